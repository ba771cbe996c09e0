"""Write the text of Python's language reference, which ships with Python, to data/: one file per topic."""

import os
import re
from pathlib import Path
from pydoc_data.topics import topics

FOLDER = Path(__file__).parent / "data"


def main(topics_max: int | None = None) -> None:
    """Write the topics, or the first few."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in list(topics.items())[:topics_max]:
        part = FOLDER / f"{name}.{os.getpid()}"
        part.write_text(re.sub(r"\n{2,}", "\n", text), encoding="utf-8")
        part.replace(FOLDER / f"{name}.txt")  # whole, or not there


if __name__ == "__main__":
    main()
