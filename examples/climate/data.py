"""Write twenty years of made-up daily temperatures to data/climate.zarr: seasons, a warming trend, weather."""

from pathlib import Path

import numpy as np
import zarr

FOLDER = Path(__file__).parent / "data" / "climate.zarr"
DAYS_A_YEAR = 365


def main(years: int = 20, rows: int = 36, columns: int = 72) -> None:
    """Write float32[day, latitude, longitude] in °C, and the number of each day."""
    days, latitude = np.arange(years * DAYS_A_YEAR), np.linspace(87.5, -87.5, rows)[:, None]
    longitude = np.linspace(-177.5, 177.5, columns)
    group = zarr.open_group(FOLDER, mode="w")
    group.create_array("day", data=days, chunks=(DAYS_A_YEAR,))
    shape = (len(days), rows, columns)
    air = group.create_array("temperature", shape=shape, chunks=(DAYS_A_YEAR, rows, columns), dtype="float32")
    normal = 30 - 0.5 * np.abs(latitude) + 3 * np.sin(np.radians(2 * longitude))
    warming = 0.2 + 0.4 * np.clip(latitude / 90, 0, 1) ** 2  # °C a decade, most in the north
    for year in range(years):
        here = days[year * DAYS_A_YEAR :][:DAYS_A_YEAR]
        season = np.cos(2 * np.pi * (here - 196) / DAYS_A_YEAR)[:, None, None] * 0.2 * latitude
        trend = warming * (here / DAYS_A_YEAR / 10)[:, None, None]
        weather = np.random.default_rng(year).normal(0, 3, (DAYS_A_YEAR, rows, columns))
        air[here[0] : here[-1] + 1] = (normal + season + trend + weather).astype(np.float32)


if __name__ == "__main__":
    main()
