"""Executes the Python blocks of a page, one after the other, in one process.

    python -m tests.docs.python_session

Each line of standard input is a block as JSON; the reply to it is a line of JSON with what the block printed.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import io
import json
import linecache
import os
import sys
import traceback
import types
from contextlib import redirect_stderr, redirect_stdout


def serve() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main = sys.modules["__main__"] = types.ModuleType("__main__")  # functions in it are sent by value
    sys.path.insert(0, os.getcwd())
    with asyncio.Runner() as runner:
        for line in sys.stdin:
            request = json.loads(line)
            printed, failure = execute(request["text"], request["name"], main.__dict__, runner)
            replies.write(json.dumps({"printed": printed, "failure": failure}) + "\n")
            replies.flush()


def execute(text: str, name: str, names: dict[str, object], runner: asyncio.Runner) -> tuple[str, str]:
    """Execute a block, and return what it printed, and its traceback."""
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = compile(text, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            if code.co_flags & inspect.CO_COROUTINE:
                runner.run(eval(code, names))
            else:
                exec(code, names)
        except BaseException:
            return out.getvalue(), err.getvalue() + traceback.format_exc()
    return out.getvalue(), ""


if __name__ == "__main__":
    serve()
