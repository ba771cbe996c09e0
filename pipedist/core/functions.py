"""Function references: `package.module:name` or a pickled function, and how a worker loads them.

A function that a new process can import is sent by NAME. One without an importable name (a lambda, a
local function, one of a notebook's or script's `__main__`) is sent by VALUE with cloudpickle, only from
the driver to workers, over the authenticated channel.

A name is dotted identifiers, a colon, dotted identifiers: it is looked up, never evaluated. A spec's
folders of modules are appended LAST to `sys.path`, so they cannot shadow a library. If a name therefore
resolves to another module than intended, the error names both. A worker keeps these entries (`append_code`);
the user's own process has them only as long as a plan is open (`code_on_path`).
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import os
import pickle
import re
import shlex
import sys
import threading
import traceback
from collections import ChainMap, Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any, ClassVar

from msgspec import Struct

from pipedist.core.import_guard import ADVICE, caller_is_waiting, importing
from pipedist.core.names import did_you_mean
from pipedist.core.types import FunctionRef
from pipedist.errors import PipedistError, UsageError

PICKLED_BYTES_MAX = 64 * 2**20  # limit for a function sent by value, with everything that it captures

_IDENTIFIERS = r"[^\W\d]\w*(?:\.[^\W\d]\w*)*"
_NAME = re.compile(rf"(?P<module>{_IDENTIFIERS}):(?P<attribute>{_IDENTIFIERS})")

process_note = (
    ""  # where this process and its code are, for errors; "" if it shares the files of the run's host
)
_appended: list[str] = []  # the code folders that `append_code` put at the end of `sys.path`
_code_uses: Counter[str] = Counter()  # number of open `code_on_path` contexts, by folder
_code_seen: set[str] = set()  # all folders that `append_code` put there so far: modules may be theirs
_path_lock = threading.RLock()  # runs in several threads change `sys.path`


class BrokenLine(Struct, frozen=True):
    """A line at which the import of a user's module fails."""

    file: str
    line: int
    column: int  # 1-based; 0: unknown
    text: str
    cause: str  # why the import fails, without the place


class FunctionNotFound(PipedistError):
    """A function reference does not resolve to a callable in this process.

    Args:
        message: the function, and the cause.
        broken: the line of a user's module that can't be imported, if that is the cause.
    """

    exit_code = 2

    def __init__(self, message: str, broken: BrokenLine | None = None) -> None:
        self.broken = broken
        super().__init__(message)


def reference(fn: Callable[..., Any] | str) -> FunctionRef:
    """Return the reference with which `fn` is sent to workers, or raise UsageError.

    A name is not looked up here. A callable is sent by name if it can be imported under its own name, else by value.
    """
    if isinstance(fn, str):
        _split(fn)
        return FunctionRef(label=fn, name=fn)
    if not callable(fn):
        raise UsageError(f"expected a function, or its name 'package.module:name', got {fn!r}")
    module, qualname = getattr(fn, "__module__", None), getattr(fn, "__qualname__", None)
    if isinstance(module, str) and isinstance(qualname, str) and _is_importable(fn, module, qualname):
        return _named(f"{module}:{qualname}")
    label = qualname if isinstance(qualname, str) else type(fn).__qualname__
    return FunctionRef(label=label, pickled=_pickled(fn, label))


def load(ref: FunctionRef, code: Sequence[str]) -> Callable[..., Any]:
    """Return the callable of a reference; one sent by value must come from this worker's own driver.

    The folders of the spec's modules, `code`, are searched before those of other specs.

    Raises:
        FunctionNotFound: the module is missing, fails to import, or is not the spec's own module of
            that name; or the attribute is missing or not callable.
        UsageError: the name has another form than "package.module:name".
    """
    append_code([folder for folder in code if folder in _appended])
    if ref.pickled:
        return _unpickled(ref)
    module_name, attribute = _split(ref.name)
    module = _import(ref.name, module_name, code)
    _reject_stale(ref.name, module_name, code)
    found: Any = module
    walked = module_name
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise FunctionNotFound(
                f"{ref.name}: {walked} ({_place(module)}) has no attribute {part!r}"
                + _shadowed(module_name, module, code)
                + did_you_mean(part, dir(found))
            ) from None
        walked += f".{part}"
    if not callable(found):
        raise FunctionNotFound(
            f"{ref.name}: expected a function or class, found a value of type {type(found).__name__} "
            f"in {_place(module)}"
        )
    return found  # type: ignore[no-any-return]


def _process_suffix() -> str:
    return f" ({process_note})" if process_note else ""


def uncallable(fn: Callable[..., Any], label: str) -> str:
    """Return why a function cannot serve a run stage, or "". (If it is a class, its instances are called.)"""
    if inspect.isclass(fn) and call_of(fn) is None:
        return f"class {label} has no __call__ method, so its instances can't be called"
    called = call_of(fn) if inspect.isclass(fn) else fn
    for kind, check in (
        ("a generator", inspect.isgeneratorfunction),
        ("an async generator", inspect.isasyncgenfunction),
    ):
        if check(called) or check(call_of(type(called))):
            return (
                f"{label} has a `yield`, so its calls return {kind}, not a value: "
                "`return` a list or an array of all values"
            )
    return ""


def call_of(cls: type) -> object:
    """Return the `__call__` attribute of a class, without binding; None if it has none."""
    return next((vars(base)["__call__"] for base in cls.__mro__ if "__call__" in vars(base)), None)


def _split(name: str) -> tuple[str, str]:
    match = _NAME.fullmatch(name)
    if match is None:
        raise UsageError(f"{name!r} is not a function name, expected 'package.module:name'")
    return match["module"], match["attribute"]


def _is_importable(fn: object, module: str, qualname: str) -> bool:
    """Return whether a new process that imports `module` finds this object under `qualname`."""
    loaded = sys.modules.get(module)
    if module in ("__main__", "__mp_main__") or getattr(loaded, "__spec__", None) is None:
        return False
    found: object = loaded
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found is fn and _is_name(f"{module}:{qualname}")


@lru_cache(maxsize=1024)
def _is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


@lru_cache(maxsize=1024)
def _named(name: str) -> FunctionRef:
    return FunctionRef(label=name, name=name)


def _dumps(value: object) -> bytes:
    file = io.BytesIO()
    _pickler()(file).dump(value)
    return file.getvalue()


@lru_cache(maxsize=1)
def _pickler() -> Callable[[io.BytesIO], pickle.Pickler]:
    """Return cloudpickle's class, which can't pickle cached functions and properties of `__main__`, with those."""
    import cloudpickle  # only needed for functions without an importable name

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        dispatch_table: ClassVar = ChainMap(
            {type(_named): _reduce_cached, cached_property: _reduce_property},
            cloudpickle.Pickler.dispatch_table,
        )

    return Pickler


def _reduce_cached(cached: Any) -> str | tuple[Callable[..., Any], tuple[Any, ...]]:
    name = getattr(cached, "__qualname__", "")  # a `partial` has none
    if name and _is_importable(cached, cached.__module__, name):
        return str(name)
    return _with_cache, (cached.__wrapped__, cached.cache_parameters())


def _reduce_property(cached: Any) -> tuple[Any, ...]:
    return cached_property, (cached.func,), {"attrname": cached.attrname}  # without the lock of Python 3.11


def _with_cache(fn: Callable[..., Any], parameters: Mapping[str, Any]) -> Callable[..., Any]:
    cached: Callable[..., Any] = lru_cache(**parameters)(fn)
    return cached


def _pickled(fn: Callable[..., Any], label: str) -> bytes:
    try:
        pickled = _dumps(fn)
    except Exception as error:
        raise UsageError(
            f"{label} can't be sent to workers by value: {_unpicklable(fn)}{type(error).__name__}: {error}; "
            "define it at the top level of a module, and open files and connections inside it"
        ) from error
    if len(pickled) > PICKLED_BYTES_MAX:
        raise UsageError(
            f"{label} captures {len(pickled)} bytes, more than the {PICKLED_BYTES_MAX} that a function "
            "may capture; pass large values as arguments, or read them from a file in the function"
        )
    return pickled


def _unpicklable(fn: Callable[..., Any]) -> str:
    """Return which captured variable cannot be pickled, as text, or ""."""
    code = getattr(fn, "__code__", None)
    if code is None:
        return ""
    own = {name: fn.__globals__[name] for name in code.co_names if name in fn.__globals__}
    for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # no value yet
            own[name] = cell.cell_contents
    for name, value in own.items():
        try:
            _dumps(value)
        except Exception:
            return f"it uses `{name}`, a {type(value).__qualname__}: "
    return ""


def pickled_value(value: object) -> bytes:
    """Return a value that a driver sends to its workers as it sends functions, for functions that need the object.

    Its class may be one of `__main__`.
    """
    return _dumps(value)


def unpickled_value(data: bytes) -> Any:
    """Return the value of `pickled_value`; only in a worker, for what its own driver sent."""
    inside = importing.set(True)
    try:
        return pickle.loads(data)
    finally:
        importing.reset(inside)


def _unpickled(ref: FunctionRef) -> Callable[..., Any]:
    inside = importing.set(True)
    try:
        found = pickle.loads(ref.pickled)
    except Exception as error:
        raise FunctionNotFound(
            f"{ref.label} was sent by value but can't be loaded here: {type(error).__name__}: {error}; "
            f"the modules that it uses must be importable in workers{_process_suffix() or ' on this host'}"
        ) from error
    finally:
        importing.reset(inside)
    if not callable(found):
        raise FunctionNotFound(
            f"{ref.label}: expected a function or class, found a value of type {type(found).__name__}"
        )
    return found  # type: ignore[no-any-return]


def append_code(code: Sequence[str]) -> None:
    """Move the folders of a spec's modules, then those of earlier specs, to the end of `sys.path`."""
    with _path_lock:
        wanted = [folder for folder in code if folder not in sys.path or folder in _appended]
        _code_seen.update(wanted)  # not those of the user's own path, whose modules are never stale
        if wanted == _appended[: len(wanted)]:
            return
        order = wanted + [folder for folder in _appended if folder not in wanted]
        sys.path[:] = [entry for entry in sys.path if entry not in _appended] + order
        _appended[:] = order
    importlib.invalidate_caches()


@contextlib.contextmanager
def code_on_path(code: Sequence[str]) -> Iterator[None]:
    """Have the folders of a spec's modules at the end of `sys.path` while the context is open.

    Several contexts may be open at once, in any threads; a folder is removed with the last one that needs it.
    """
    with _path_lock:
        append_code(code)
        own = [folder for folder in code if folder in _appended]
        _code_uses.update(own)
    try:
        yield
    finally:
        with _path_lock:
            _code_uses.subtract(own)
            unused = [folder for folder in own if not _code_uses[folder]]
            _appended[:] = [folder for folder in _appended if folder not in unused]
            sys.path[:] = [entry for entry in sys.path if entry not in unused]


def _import(name: str, module_name: str, code: Sequence[str]) -> ModuleType:
    parts = module_name.split(".") if caller_is_waiting.get() else []
    for module in (".".join(parts[:count]) for count in range(1, len(parts) + 1)):
        spec = getattr(sys.modules.get(module), "__spec__", None)
        if getattr(spec, "_initializing", False):
            raise FunctionNotFound(
                f"{name}: importing {module_name} failed: {module} is still being imported, and waits for "
                f"this run. Where it calls pipedist.run or a simulation, {ADVICE}"
            )
    failed = f"importing {module_name} failed"
    inside = importing.set(True)
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing != module_name and not module_name.startswith(f"{missing}."):
            how = f"{_process_suffix()}. {how_to_install(missing)}"
            raise FunctionNotFound(
                f"{name}: {failed}, because it needs the module {missing!r}, which is not installed here{how}",
                _broken_line(error, f"{failed}, because the module {missing!r} is not installed here{how}"),
            ) from error
        looked = ", ".join(code) if code else "the installed packages"
        top = module_name.partition(".")[0]
        found = sys.modules.get(top)
        raise FunctionNotFound(
            f"{name}: there is no module {missing!r} in {looked} or on the import path"
            + (_shadowed(module_name, found, code) if found is not None and missing != top else "")
            + (
                "; write it without `.py`"
                if module_name.endswith(".py")
                else _in_src(missing, code) or did_you_mean(missing, _modules_in(code))
            )
            + _process_suffix()
        ) from None
    except (Exception, SystemExit) as error:
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        cause = f"SyntaxError: {error.msg}" if isinstance(error, SyntaxError) else text
        raise FunctionNotFound(
            f"{name}: {failed}: {text}{place_of(error)}", _broken_line(error, f"{failed}: {cause}")
        ) from error
    finally:
        importing.reset(inside)


def _in_src(module: str, code: Sequence[str]) -> str:
    """Return where a missing module is, if its project has a folder `src`, or ""."""
    for folder in (os.path.join(each, "src") for each in code):
        if os.path.isdir(os.path.join(folder, module)) or os.path.isfile(
            os.path.join(folder, f"{module}.py")
        ):
            return f"; it is in {folder}: name that folder in the spec, as in `code: src`"
    return ""


def how_to_install(module: str) -> str:
    """Return how to install a missing module for this Python; the name of its package may be another one."""
    python, top = shlex.quote(sys.executable), module.partition(".")[0]
    upgrade = "--upgrade " * (top in sys.modules)  # the package is there, and lacks the module
    return f"Install its package for this Python, for example with {python} -m pip install {upgrade}{top}"


def place_of(error: BaseException) -> str:
    """Return where an exception was raised, " (file.py, line 3)": the innermost line in a user file, or ""."""
    at = None if isinstance(error, SyntaxError) else _user_frame(error)  # its text names the place
    return f" ({os.path.basename(at.filename)}, line {at.lineno})" if at is not None else ""


def _broken_line(error: BaseException, cause: str) -> BrokenLine | None:
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        text = (error.text or "").rstrip("\n")
        return BrokenLine(error.filename, error.lineno, error.offset or 0, text, cause)
    at = _user_frame(error)
    return None if at is None else BrokenLine(at.filename, at.lineno or 1, 0, at.line or "", cause)


def _user_frame(error: BaseException) -> traceback.FrameSummary | None:
    """Return the innermost frame of an error in a user file, in the code of a spec if there is one."""
    walked = traceback.extract_tb(error.__traceback__)
    package = os.path.dirname(os.path.dirname(__file__))
    outside = [f for f in walked if not _is_within(f.filename, package)]
    frames = [f for f in outside if not f.filename.startswith("<frozen importlib")]
    own = [f for f in frames if any(_is_within(f.filename, folder) for folder in tuple(_code_seen))]
    found = own or frames
    return found[-1] if found else None


def is_async(fn: object) -> bool:
    """Return whether calling `fn`, a function or an object with `__call__`, returns a coroutine."""
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(
        inspect.getattr_static(type(fn), "__call__", None)
    )


def wants_ctx(fn: object) -> bool:
    """Return whether `fn` has a parameter `ctx` that accepts a keyword: it receives the ReplicaContext."""
    try:
        ctx = inspect.signature(fn).parameters.get("ctx")  # type: ignore[arg-type]
    except (TypeError, ValueError):  # a built-in without a signature
        return False
    return ctx is not None and ctx.kind in (ctx.POSITIONAL_OR_KEYWORD, ctx.KEYWORD_ONLY)


def _reject_stale(name: str, module_name: str, code: Sequence[str]) -> None:
    """Raise if a module of the same name was imported from an earlier spec's folder."""
    top = module_name.partition(".")[0]
    place = _place(sys.modules[top])
    is_own = any(_is_within(place, folder) for folder in tuple(_code_seen))
    if not is_own or any(_is_within(place, folder) for folder in code):
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
        with contextlib.suppress(OSError):  # a missing folder is reported with the spec's errors
            entries = sorted(os.listdir(folder))
            names += [e.removesuffix(".py") for e in entries if e.endswith(".py") or "." not in e]
    return names
