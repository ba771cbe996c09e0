"""Replica functions: plain NumPy on one shard, a dict of columns. Missing delays are NaN."""

import numpy as np

from pipedist.combiners import by_key_moments


def by_carrier(flights):
    """Moments of the arrival delay (minutes), by carrier; missing delays are counted apart."""
    return by_key_moments.of(flights["carrier"], flights["arr_delay"], skip_missing=True)


def arrivals(flights, late_after_min):
    """Counts and sums of a shard."""
    delay = flights["arr_delay"]
    known = ~np.isnan(delay)
    return {
        "flights": len(delay),
        "missing": np.count_nonzero(~known),
        "late": np.count_nonzero(delay > late_after_min),
        "delay_min": np.sum(delay[known], dtype=np.float64),
        "miles": np.sum(flights["distance"], dtype=np.float64),
    }


def made_up(flights):
    """Minutes made up in the air, one a flight; NaN where a delay is missing."""
    return flights["dep_delay"] - flights["arr_delay"]
