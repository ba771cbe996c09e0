"""Climate statistics of a part of the days: sums, from which normals and trends follow."""

import numpy as np

DAYS_A_YEAR = 365
STARTS = np.cumsum([0, 31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30])


def month_of(days):
    """Return the month of each day, 0 to 11."""
    return np.searchsorted(STARTS, days % DAYS_A_YEAR, side="right") - 1


def by_month(shard):
    """Return the sum of the temperatures of each month, and its number of days."""
    months = month_of(shard["day"])
    sums = [np.sum(shard["temperature"][months == month], axis=0, dtype=np.float64) for month in range(12)]
    return {"sum": np.stack(sums), "days": np.bincount(months, minlength=12)}


def normals(total):
    """Return the mean temperature of each month: float64[12, latitude, longitude]."""
    return total["sum"] / total["days"][:, None, None]


def regression(shard, normals):
    """Return the sums of a linear regression of the anomalies (differences from the normals) on time in decades."""
    time = shard["day"] / DAYS_A_YEAR / 10
    anomaly = shard["temperature"] - normals[month_of(shard["day"])]
    return {
        "n": len(time),
        "t": np.sum(time),
        "tt": np.sum(time * time),
        "a": anomaly.sum(axis=0),
        "ta": np.tensordot(time, anomaly, axes=1),
    }


def trend(total):
    """Return the trend of each grid cell, in °C a decade."""
    covariance = total["n"] * total["ta"] - total["t"] * total["a"]
    return covariance / (total["n"] * total["tt"] - total["t"] ** 2)
