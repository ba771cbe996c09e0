"""Detect the type of files from their bytes, with the neural network of the package magika (ONNX)."""

from pathlib import Path

import numpy as np
from magika import Magika

from pipedist.combiners import counter


class Detect:
    """Loads the network once per worker."""

    def __init__(self):
        self.magika = Magika()

    def __call__(self, files):
        results = [self.magika.identify_bytes(data) for data in files["bytes"]]
        return {
            "file": np.array([Path(path).name for path in files["path"]]),
            "found": np.array([str(result.output.label) for result in results]),
            "score": np.array([result.score for result in results], np.float32),
        }


def pairs(rows):
    """Count pairs of the ending that a file had, and the type that was found."""
    endings = (name.split("-")[0] for name in rows["file"])
    return counter.of([f"{ending} -> {found}" for ending, found in zip(endings, rows["found"], strict=True)])
