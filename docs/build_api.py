"""Write the HTML reference of the public API, and fail on warnings: `python docs/build_api.py build/docs`."""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path

import pdoc
import pdoc.render

import pipedist

PUBLIC = ("pipedist", "pipedist.combiners", "pipedist.testing")


def build(folder: Path) -> None:
    """Write one page for each public module."""
    warnings.simplefilter("error", UserWarning)  # pdoc's class for names and annotations that do not resolve
    for name in PUBLIC:
        module = importlib.import_module(name)
        for public in getattr(module, "__all__", ()):
            setattr(
                module, public, getattr(module, public)
            )  # names are imported on first use; pdoc expects them
    pipedist.__all__.append("open")  # absent there, so that a star import keeps the builtin
    pdoc.render.configure(docformat="google")
    pdoc.pdoc(PUBLIC[0], rf"!{PUBLIC[0]}\.", *PUBLIC[1:], output_directory=folder)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
