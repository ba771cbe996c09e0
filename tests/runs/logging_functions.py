"""Replica functions that print and log."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

_first, _second = logging.getLogger("app.first"), logging.getLogger("app.second")


def speaks(x: np.ndarray, ctx: Any) -> np.ndarray:
    if ctx.step == 0:
        _first.setLevel(logging.INFO)
        print("printed")
        print("to stderr", file=sys.stderr)
        _first.debug("below the level")
        _first.info("three is %d", 3)
        _second.warning("careful")
        logging.error("by the root logger")
        warnings.warn("deprecated thing", stacklevel=1)
        try:
            raise ValueError("inner")
        except ValueError:
            _second.exception("it failed")
    return x


def configures(x: np.ndarray, ctx: Any) -> np.ndarray:
    logging.basicConfig(level=logging.DEBUG, format="<%(levelname)s %(message)s>")
    _second.debug("formatted")
    return x


def floods(x: np.ndarray, lines: int) -> np.ndarray:
    for number in range(lines):
        print(f"line {number}")
    return x


def waits(x: np.ndarray, folder: str, ctx: Any) -> np.ndarray:
    print(f"step {ctx.step}")
    while ctx.step == 1 and not (Path(folder) / "go").exists():
        time.sleep(0.01)
    return x


def dies_once(x: np.ndarray, folder: str, ctx: Any) -> np.ndarray:
    mark = Path(folder) / "mark"
    if ctx.step == 1 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if (x == 3).any():
        raise ValueError("3 is bad")
    return x
