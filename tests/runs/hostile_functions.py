"""Functions that raise exceptions whose own methods misbehave."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any


class StrRaises(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class StrReturnsNumber(Exception):
    def __str__(self) -> str:
        return 5  # type: ignore[return-value]  # noqa: PLE0307


class StrInterrupts(Exception):
    def __str__(self) -> str:
        raise KeyboardInterrupt


class StrExits(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


class StrHangs(Exception):
    def __str__(self) -> str:
        threading.Event().wait()
        return "never"


class ModuleIsNumber(Exception):
    __module__ = 7  # type: ignore[assignment]


class InitHangs(Exception):
    """Hangs wherever it is built from a text, as the driver does."""

    def __init__(self, *args: str) -> None:
        super().__init__(*args)
        if args:
            threading.Event().wait()


class CauseHangs(Exception):
    """Has a harmless text, and a cause that hangs."""

    def __init__(self) -> None:
        super().__init__("harmless")
        self.__cause__ = StrHangs()


def raises(x: Any, ctx: Any, kind: str) -> Any:
    if ctx.step == 2:
        cls = globals()[kind]
        error = cls()
        error.args = ("some text",)
        raise error
    return x


def replaces_its_process_once(x: Any, ctx: Any, marker: str) -> Any:
    if ctx.step == 2 and not Path(marker).exists():
        Path(marker).touch()
        os.execv("/bin/sleep", ["sleep", "60"])
    return x
