"""Copy files of many kinds from this Python installation to data/, without the endings of their names."""

import random
import shutil
import sysconfig
from pathlib import Path

FOLDER = Path(__file__).parent / "data"
ENDINGS = [  # of names
    ".py",
    ".pyc",
    ".txt",
    ".md",
    ".html",
    ".js",
    ".css",
    ".json",
    ".csv",
    ".png",
    ".ttf",
    ".h",
    ".c",
    ".gz",
    ".so",
]
PER_ENDING = 60
BYTES_MAX = 1_000_000


def main(per_ending: int = PER_ENDING) -> None:
    """Copy up to `per_ending` files of each kind."""
    FOLDER.mkdir(exist_ok=True)
    roots = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")]
    files = sorted({path for root in roots for path in root.rglob("*") if path.suffix in ENDINGS})
    for ending in ENDINGS:
        found = [f for f in files if f.suffix == ending and 100 < f.stat().st_size < BYTES_MAX]
        for index, source in enumerate(random.Random(0).sample(found, min(per_ending, len(found)))):
            shutil.copyfile(source, FOLDER / f"{ending[1:]}-{index:02}")


if __name__ == "__main__":
    main()
