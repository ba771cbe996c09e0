"""Functions on the wire: `package.module:name` to callable, and back.

A function travels by NAME wherever a new process can import it under that name. One that has
none (a lambda, a local function, a notebook's or script's `__main__`) travels by VALUE with
cloudpickle, in one direction only: scheduler to worker, over the authenticated channel.

A name is dotted identifiers, a colon, dotted identifiers: it is looked up, never evaluated. The
folders of a spec's modules are appended LAST to `sys.path`, so they can't shadow a library. Where
that makes a name resolve to another module than the user meant, the error names both places.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import os
import pickle
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

from pipedist.errors import PipedistError, UsageError
from pipedist.import_guard import ADVICE, caller_is_waiting, importing
from pipedist.program import FunctionRef

PICKLED_BYTES_MAX = 64 * 2**20
"""The largest function, with everything it captured, that travels by value."""

_IDENTIFIERS = r"[^\W\d]\w*(?:\.[^\W\d]\w*)*"
_NAME = re.compile(rf"(?P<module>{_IDENTIFIERS}):(?P<attribute>{_IDENTIFIERS})")

_process_note = ""
"""What errors say about this process; see `set_process_note`."""

_appended: list[str] = []
"""The code folders at the end of sys.path that were put there by `append_code`."""


class FunctionNotFound(PipedistError):
    """A function's name leads to no callable in this process."""

    exit_code = 2


def reference(fn: Callable[..., Any] | str) -> FunctionRef:
    """Return how `fn` travels to a worker.

    Args:
        fn: a name "package.module:attribute", which stays a name and is not looked up here; or
            a callable, which travels by name if it can be imported under its own name, else by value.

    Raises:
        UsageError: if a name has another form, `fn` is no callable, or it can't be pickled.
    """
    if isinstance(fn, str):
        _split(fn)
        return FunctionRef(label=fn, name=fn)
    if not callable(fn):
        raise UsageError(f"a function was expected, or its name 'package.module:name', not {fn!r}")
    module, qualname = getattr(fn, "__module__", None), getattr(fn, "__qualname__", None)
    if isinstance(module, str) and isinstance(qualname, str) and _is_importable(fn, module, qualname):
        name = f"{module}:{qualname}"
        return FunctionRef(label=name, name=name)
    label = qualname if isinstance(qualname, str) else type(fn).__qualname__
    return FunctionRef(label=label, pickled=_pickled(fn, label))


def load(ref: FunctionRef, code: Sequence[str]) -> Callable[..., Any]:
    """Return the callable behind a reference.

    Args:
        ref: from `reference`, maybe of another process. One that travels by value is unpickled:
            it must come from this worker's own scheduler.
        code: absolute folders of the spec's modules; they become the last entries of `sys.path`.

    Raises:
        FunctionNotFound: if the module is not found, fails while it is imported, is another one
            than the spec's own of that name, or has no such attribute; or what is found can't be called.
        UsageError: if the name has another form than "package.module:name".
    """
    append_code(code)
    if ref.pickled:
        return _unpickled(ref)
    module_name, attribute = _split(ref.name)
    module = _import(ref.name, module_name, code)
    _refuse_stale(ref.name, module_name, code)
    found: Any = module
    walked = module_name
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise FunctionNotFound(
                f"{ref.name}: {walked} ({_place(module)}) has no attribute {part!r}"
                + _shadowed(module_name, module, code)
                + _nearest(part, dir(found))
            ) from None
        walked += f".{part}"
    if not callable(found):
        raise FunctionNotFound(
            f"{ref.name}: expected a function or class, found a value of type {type(found).__name__} "
            f"in {_place(module)}"
        )
    return found  # type: ignore[no-any-return]


def set_process_note(text: str) -> None:
    """Have every FunctionNotFound of this process say which process it is, and what it has."""
    global _process_note
    _process_note = text


def process_note() -> str:
    """Return what `set_process_note` was told; "" in a process that has the files of the run's host."""
    return _process_note


def _which() -> str:
    return f" ({_process_note})" if _process_note else ""


def uncallable(fn: Callable[..., Any], label: str) -> str:
    """Return why a function can't serve a run stage, whatever its arguments are; "" if it can.

    Of a class, the instances are called.
    """
    if inspect.isclass(fn) and call_of(fn) is None:
        return f"class {label} has no __call__ method, so its instances can't be called"
    return ""


def call_of(cls: type) -> object:
    """Return what a call of a class's instances executes, as it stands in the class; None for nothing."""
    return next((vars(base)["__call__"] for base in cls.__mro__ if "__call__" in vars(base)), None)


def _split(name: str) -> tuple[str, str]:
    match = _NAME.fullmatch(name)
    if match is None:
        raise UsageError(f"{name!r} is no function's name: expected 'package.module:name'")
    return match["module"], match["attribute"]


def _is_importable(fn: object, module: str, qualname: str) -> bool:
    """Whether a new process that imports `module` finds this very object under `qualname`."""
    loaded = sys.modules.get(module)
    if module in ("__main__", "__mp_main__") or getattr(loaded, "__spec__", None) is None:
        return False
    found: object = loaded
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found is fn and _NAME.fullmatch(f"{module}:{qualname}") is not None


def _pickled(fn: Callable[..., Any], label: str) -> bytes:
    import cloudpickle  # only functions without a name need it

    try:
        pickled: bytes = cloudpickle.dumps(fn)
    except Exception as error:
        raise UsageError(
            f"{label} can't be sent to workers by value: {_culprit(fn)}{type(error).__name__}: {error}; "
            "define it at the top level of a module, and let it open what it needs itself"
        ) from error
    if len(pickled) > PICKLED_BYTES_MAX:
        raise UsageError(
            f"{label} captures {len(pickled)} bytes, more than the {PICKLED_BYTES_MAX} that a function "
            "may carry; pass large values as arguments, or read them from a file in the function"
        )
    return pickled


def _culprit(fn: Callable[..., Any]) -> str:
    """Return which captured variable can't be sent, as far as it can be told from outside."""
    import cloudpickle  # loaded already

    code = getattr(fn, "__code__", None)
    if code is None:
        return ""
    own = {name: fn.__globals__[name] for name in code.co_names if name in fn.__globals__}
    for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # it has no value yet
            own[name] = cell.cell_contents
    for name, value in own.items():
        try:
            cloudpickle.dumps(value)
        except Exception:
            return f"it uses `{name}`, a {type(value).__qualname__}: "
    return ""


def _unpickled(ref: FunctionRef) -> Callable[..., Any]:
    inside = importing.set(True)
    try:
        found = pickle.loads(ref.pickled)
    except Exception as error:
        raise FunctionNotFound(
            f"{ref.label} travelled by value but can't be loaded here: {type(error).__name__}: {error}; "
            f"the modules that it uses must be importable on the worker's host{_which()}"
        ) from error
    finally:
        importing.reset(inside)
    if not callable(found):
        raise FunctionNotFound(
            f"{ref.label}: expected a function or class, found a value of type {type(found).__name__}"
        )
    return found  # type: ignore[no-any-return]


def append_code(code: Sequence[str]) -> None:
    """Make sys.path end with the folders of a spec's modules, then those of earlier specs.

    Args:
        code: absolute folders.
    """
    wanted = [folder for folder in code if folder not in sys.path or folder in _appended]
    if wanted == _appended[: len(wanted)]:
        return
    order = wanted + [folder for folder in _appended if folder not in wanted]
    sys.path[:] = [entry for entry in sys.path if entry not in _appended] + order
    _appended[:] = order
    importlib.invalidate_caches()


def _import(name: str, module_name: str, code: Sequence[str]) -> ModuleType:
    parts = module_name.split(".") if caller_is_waiting.get() else []
    for module in (".".join(parts[:count]) for count in range(1, len(parts) + 1)):
        spec = getattr(sys.modules.get(module), "__spec__", None)
        if getattr(spec, "_initializing", False):
            raise FunctionNotFound(
                f"{name}: importing {module_name} failed: the import of {module} has begun, and waits for "
                f"this run. Where it calls pipedist.run or a simulation, {ADVICE}"
            )
    inside = importing.set(True)
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing != module_name and not module_name.startswith(f"{missing}."):
            raise FunctionNotFound(
                f"{name}: importing {module_name} failed, because it needs the module {missing!r}, "
                f"which is not installed here{_which()}"
            ) from error
        looked = ", ".join(code) if code else "the installed packages"
        top = module_name.partition(".")[0]
        found = sys.modules.get(top)
        raise FunctionNotFound(
            f"{name}: there is no module {missing!r} in {looked} or on the import path"
            + (_shadowed(module_name, found, code) if found is not None and missing != top else "")
            + _nearest(missing, _modules_in(code))
            + _which()
        ) from None
    except (Exception, SystemExit) as error:
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise FunctionNotFound(f"{name}: importing {module_name} failed: {text}{_where(error)}") from error
    finally:
        importing.reset(inside)


def _where(error: BaseException) -> str:
    """Return where the import of a module came to its end: its innermost line in a file of the user's."""
    if isinstance(error, SyntaxError):
        return ""  # its text says so
    walked = traceback.extract_tb(error.__traceback__)
    here = os.path.dirname(__file__)
    frames = [
        f
        for f in walked
        if not _is_within(f.filename, here) and not f.filename.startswith("<frozen importlib")
    ]
    own = [f for f in frames if any(_is_within(f.filename, folder) for folder in _appended)]
    if not frames:
        return ""
    at = (own or frames)[-1]
    return f" ({os.path.basename(at.filename)}, line {at.lineno})"


def is_async(fn: object) -> bool:
    """Return whether calling `fn`, a function or an object with a method `__call__`, gives a coroutine."""
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(
        inspect.getattr_static(type(fn), "__call__", None)
    )


def wants_ctx(fn: object) -> bool:
    """Return whether `fn` has a parameter `ctx` that can be given by name: it gets the ReplicaContext."""
    try:
        ctx = inspect.signature(fn).parameters.get("ctx")  # type: ignore[arg-type]
    except (TypeError, ValueError):  # a built-in without a signature
        return False
    return ctx is not None and ctx.kind in (ctx.POSITIONAL_OR_KEYWORD, ctx.KEYWORD_ONLY)


def _refuse_stale(name: str, module_name: str, code: Sequence[str]) -> None:
    """Refuse a module that an earlier spec's folder brought in under the same name."""
    top = module_name.partition(".")[0]
    place = _place(sys.modules[top])
    owner = next((folder for folder in _appended if _is_within(place, folder)), None)
    if owner is None or any(_is_within(place, folder) for folder in code):
        return
    own = next((_found_in(top, folder) for folder in code if _found_in(top, folder)), None)
    raise FunctionNotFound(
        f"{name}: this worker has already imported {top!r} from {place}, for another spec"
        + (f", but this spec means {own}" if own else "")
        + "; run the two specs on clusters of their own, or rename one module"
    )


def _shadowed(module_name: str, module: ModuleType, code: Sequence[str]) -> str:
    top = module_name.partition(".")[0]
    used = _place(sys.modules.get(top, module))
    for folder in code:
        other = _found_in(top, folder)
        if other and not _is_within(used, folder):
            return (
                f"; {other} has that name too, but {top!r} resolves to {used}, "
                f"because a spec's folder comes last on the import path: rename yours"
            )
    return ""


def _found_in(top: str, folder: str) -> str:
    spec = PathFinder.find_spec(top, [folder])
    if spec is None:
        return ""
    return spec.origin or next(iter(spec.submodule_search_locations or ()), "")


def _place(module: ModuleType) -> str:
    place = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
    return str(place) if place else "built in"


def _is_within(place: str, folder: str) -> bool:
    return os.path.realpath(place).startswith(os.path.join(os.path.realpath(folder), ""))


def _modules_in(code: Sequence[str]) -> list[str]:
    names: list[str] = []
    for folder in code:
        try:
            entries = sorted(os.listdir(folder))
        except OSError:
            continue  # a missing folder is the spec's fault, and is reported there
        names += [e.removesuffix(".py") for e in entries if e.endswith(".py") or "." not in e]
    return names


def _nearest(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
