"""The identity of a run: the meaning of its spec, the files and modules that it uses, and where it came from.

Two specs with the same digest give the same results, whatever their outputs are, from the same files and
modules. Files of datasets are compared by size and modification time. Other files are compared by content: the
`inputs` of a stage, and existing files whose paths are in its `with`. A file above DIGEST_BYTES_MAX, and all
files after the first DIGESTS_BYTES_MAX, are compared by size, modification time and both ends only.

The modules of a function are the modules that name and define it or, if it is sent by value, those below the code
folder that it names, and all modules below the code folder that they import, directly or not, as their source shows.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import pickletools
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
from msgspec import Struct, convert

from pipedist.core.functions import reference
from pipedist.core.types import FunctionRef, Tree, is_record
from pipedist.datasets.sources.paths import DataFile, expand, is_remote
from pipedist.errors import PipedistError, UsageError
from pipedist.journal.log_format import packed, unpacked
from pipedist.plan import Plan
from pipedist.protocol.codec import encode
from pipedist.spec import (
    CollectivesSpec,
    GatherSpec,
    InitFile,
    InitFunction,
    InitLiteral,
    ResourcesSpec,
    RetrySpec,
    Spec,
    Until,
    UpdateSpec,
    load,
)

_NEVER_DECIDES = ("concurrency", "rate")  # keys of stages that decide the time of calls only


def meaning(spec: Spec) -> dict[str, Any]:
    """Return everything in a spec that decides its results, as JSON."""
    return {
        "replicas": spec.replicas,
        "seed": spec.seed,
        "threads_per_replica": spec.threads_per_replica,
        "datasets": {
            name: {
                d.kind: _plain(d.config),
                "batch": d.batch,
                "drop_remainder": d.drop_remainder,
                "epochs": d.epochs,
                "shuffle": d.shuffle,
            }
            for name, d in spec.datasets.items()
        },
        "stages": {
            name: {
                field.removesuffix("_"): _plain(value)
                for field, value in stage
                if value is not None and (field, value) != ("inputs", ()) and field not in _NEVER_DECIDES
            }
            for name, stage in spec.stages.items()
        },
    }


def digest(spec: Spec) -> str:
    return digest_of(meaning(spec))


def digest_of(meant: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(meant, sort_keys=True).encode()).hexdigest()


def _plain(value: Any) -> Any:
    """Return a value as JSON, with digests for functions and arrays."""
    if isinstance(value, np.number | np.bool_):  # the type decides the result's type, as for 1 and 1.0
        return [str(value.dtype), str(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray):
        frames = encode(value) if value.dtype.kind in "OT" else [np.ascontiguousarray(value).tobytes()]
        return [str(value.dtype), list(value.shape), hashlib.sha256(b"".join(frames)).hexdigest()]
    if isinstance(value, Until):
        return _plain({"function": value.function, "with": value.with_} if value.with_ else value.function)
    if isinstance(value, InitLiteral | InitFile | InitFunction):
        return [type(value).__name__, *(_plain(getattr(value, name)) for name in value.__struct_fields__)]
    if isinstance(value, CollectivesSpec | ResourcesSpec | RetrySpec):
        return _plain(dict(value))
    if callable(value):
        ref = reference(value)
        return ref.name or _digest_of_pickle(ref.pickled)
    if is_record(type(value)):
        return [type(value).__qualname__, _plain({n: getattr(value, n) for n in value.__dataclass_fields__})]
    return str(value)


_OPCODES_MAX = 200_000  # of a pickle that is read; it takes some 0.3 s

_TYPED_IN = re.compile(r"<i?python-input-[\w-]+>|.*[/\\]ipykernel_\d+[/\\]\d+\.py")
"""The file name of code that was typed in. It has the number of the input, or of the notebook's process."""


def _sha256(*parts: bytes | bytearray) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


def _maker(name: str) -> bytes:
    texts = (_sha256(f"SHORT_BINUNICODE {text!r}".encode()) for text in ("cloudpickle.cloudpickle", name))
    return _sha256(b"STACK_GLOBAL None", *texts)


_CLASS_MAKERS = (_maker("_make_skeleton_class"), _maker("_make_skeleton_enum"))
"""Digests of the functions whose last argument but one is the id of a class."""


def _digest_of_pickle(pickled: bytes) -> str:
    """Return a digest of what a pickle of a function says, which is the same in every process.

    The bytes are not: equal strings are one object or several, which depends on whether the module was compiled or read
    from its bytecode; sets, as the constant `{"a", "b"}`, have the order of random hashes; classes have random ids; and
    so do the files of a notebook's cells.

    A function that captures very many objects has the digest of its bytes: reading them would delay the run.
    """
    stack: list[bytes] = []  # a digest of each object
    marks: list[int] = []  # lengths of the stack
    memo: list[bytes] = []
    copies: Counter[bytes] = Counter()  # number of equal objects in the memo, by digest
    removed = (
        hashlib.sha256()
    )  # objects that were removed from the stack, as the results of calls that set a state
    before: object = None  # the argument of the opcode before
    for count, (opcode, argument, _) in enumerate(pickletools.genops(pickled)):
        if count == _OPCODES_MAX:
            return hashlib.sha256(pickled).hexdigest()
        name, takes = opcode.name, opcode.stack_before
        if name == "MARK":
            marks.append(len(stack))
        elif name == "MEMOIZE":
            number = 0 if isinstance(before, str) else copies[stack[-1]]
            copies[stack[-1]] += 1
            memo.append(_sha256(b"copy %d" % number, stack[-1]) if number else stack[-1])
        elif isinstance(argument, int) and name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name not in ("PROTO", "FRAME"):
            has_mark = pickletools.markobject in takes
            begin = marks.pop() - takes.index(pickletools.markobject) if has_mark else len(stack) - len(takes)
            parts = stack[begin:]
            del stack[begin:]
            if name in ("POP", "POP_MARK", "STOP"):
                removed.update(b"".join(parts))
                continue
            if name in ("ADDITEMS", "FROZENSET"):  # in any order; a large set is in several portions
                parts = [(sum(map(int.from_bytes, parts)) % 2**256).to_bytes(32)]
            elif name == "TUPLE" and stack and stack[-1] in _CLASS_MAKERS:
                del parts[-2]
            if isinstance(argument, str) and _TYPED_IN.fullmatch(argument):
                argument = ""
            content = argument if isinstance(argument, bytes | bytearray) else repr(argument).encode()
            stack.append(parts[0] if name == "ADDITEMS" else _sha256(name.encode(), b" ", content, *parts))
        before = argument
    return removed.hexdigest()


# -- files --------------------------------------------------------------------------------------------

DIGEST_BYTES_MAX: Final = 64 * 2**20  # a larger file is compared by its size, modification time and both ends

DIGESTS_BYTES_MAX: Final = 256 * 2**20
"""Bytes of all files that are read whole; of later ones only the ends are read."""

END_BYTES: Final = 2**20  # bytes that are read at each end of a file that is not read whole

FINGERPRINT: Final = "the fingerprint of its data"  # in place of the path of a file

Stamp = list[Any]
"""[bytes, mtime in ns] of a file; with its ctime in ns and the SHA-256 of its content if that is compared.

[text] of a fingerprint.
"""


def stamps(
    plan: Plan,
    before: Mapping[str, Mapping[str, Stamp]] = {},
    spec_before: Mapping[str, Any] = {},
    ended_ns: int = 0,
) -> dict[str, dict[str, Stamp]]:
    """Return the stamps of the input files of a plan, by path in the spec and by path.

    Functions may write to files that `with` names, such as logs. These are no inputs: a file that an earlier
    run named and that did not exist when it began, and what was appended to a file before that run ended.

    Args:
        before, spec_before: the stamps and the spec of an earlier run; a file whose size and times have not
            changed is not read again.
        ended_ns: when it ended or was killed.
    """
    spec, folder = plan.spec, Path(plan.spec.folder)
    known = {path: stamp for files in before.values() for path, stamp in files.items()}
    written = {os.path.abspath(path) for path in _texts_in(spec_before, folder)} - known.keys()
    found: dict[str, dict[str, Stamp]] = {}
    read: dict[str, Stamp] = {}
    read_bytes = 0
    declared: set[str] = set()
    for name, dataset in spec.datasets.items():
        fingerprint = plan.sources[name].fingerprint
        by_files = "path" in dataset.config and not fingerprint
        files = expand(dataset.config["path"], folder) if by_files else _database(plan, name)
        plain: dict[str, Stamp] = {file.path: [file.size_bytes, file.mtime_ns] for file in files}
        plain |= {FINGERPRINT: [fingerprint]} if fingerprint else {}
        with_ = None if by_files or fingerprint else dataset.config.get("with")
        found[f"datasets.{name}"] = plain | {path: [] for path in _paths_in(with_, folder)}
    for name, stage in spec.stages.items():
        paths = list(_paths_in(getattr(stage, "with_", None), folder))
        if not isinstance(stage, GatherSpec) and stage.inputs:
            inputs = [file.path for file in expand(stage.inputs, folder)]
            declared.update(inputs)
            paths += inputs
        found[f"stages.{name}"] = {path: [] for path in paths}
        if isinstance(stage, UpdateSpec) and isinstance(stage.init, InitFile):
            file = expand(stage.init.path, folder)[0]
            found[f"stages.{name}"][file.path] = [file.size_bytes, file.mtime_ns]
        elif isinstance(stage, UpdateSpec) and isinstance(stage.init, InitFunction):
            found[f"stages.{name}"] |= {path: [] for path in _paths_in(stage.init.with_, folder)}
    for files_there in found.values():
        for path in [path for path, stamp in files_there.items() if not stamp]:
            if path in written - declared:
                del files_there[path]
                continue
            if path not in read:
                until_ns = 0 if path in declared else ended_ns
                read[path] = _stamp(path, read_bytes, known.get(path), until_ns)
                read_bytes += read[path][0]
            files_there[path] = read[path]
    return {place: files for place, files in found.items() if files}


def _database(plan: Plan, name: str) -> list[DataFile]:
    """Return the file that a query reads, of a dataset without a `path`."""
    config = plan.sources[name].config
    return convert(config["files"], list[DataFile]) if config.get("kind") == "sql" else []


def _paths_in(value: object, folder: Path) -> Iterator[str]:
    """Yield the absolute paths of the existing files that a value names, relative to a folder."""
    for path in _texts_in(value, folder):
        try:
            is_file = os.path.isfile(path)
        except ValueError:  # a text with NUL
            continue
        if is_file:
            yield os.path.abspath(path)


def _texts_in(value: object, folder: Path) -> Iterator[str]:
    """Yield the texts in a value as paths relative to a folder."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _texts_in(item, folder)
    elif isinstance(value, str | os.PathLike) and isinstance(text := os.fspath(value), str) and text:
        yield os.path.join(folder, text)


def _stamp(path: str, read_bytes: int, before: Stamp | None, ended_ns: int) -> Stamp:
    """Return the stamp of a file whose content is compared; that of `before` if it was only appended to."""
    try:
        with open(path, "rb") as file:
            now = os.fstat(file.fileno())
            head = [now.st_size, now.st_mtime_ns, now.st_ctime_ns]
            if before and before[:3] == head:
                return before
            if before and len(before) == 4 and before[0] < now.st_size and now.st_mtime_ns <= ended_ns:
                start = hashlib.sha256(file.read(before[0]) if before[0] <= DIGEST_BYTES_MAX else b"")
                if start.hexdigest() == before[3]:
                    return before
                file.seek(0)
            if now.st_size <= DIGEST_BYTES_MAX and read_bytes + now.st_size <= DIGESTS_BYTES_MAX:
                return [*head, hashlib.file_digest(file, "sha256").hexdigest()]
            found = hashlib.sha256(str(head[:2]).encode() + file.read(END_BYTES))
            file.seek(max(0, now.st_size - END_BYTES))
            found.update(file.read(END_BYTES))
            return [*head, found.hexdigest()]
    except OSError as error:
        raise UsageError(f"the input {path} can't be read: {error.strerror or error}") from error


def changed_files(
    there: Mapping[str, Mapping[str, Stamp]],
    now: Mapping[str, Mapping[str, Stamp]],
    places: Iterable[str],
    *,
    called: tuple[str, str] | None = None,
) -> Iterator[str]:
    """Yield a line for each file that has changed since an earlier run, by path in the spec.

    `called` are the names of two runs, none of which is earlier.
    """
    new, gone, changed = ("is new", "is missing now", "has changed")
    if called is not None:
        new, gone, changed = f"is only in {called[1]}", f"is only in {called[0]}", "differs"
    for place in places:
        before, after = there.get(place, {}), now.get(place, {})
        for path in dict.fromkeys((*before, *after)):
            a, b = before.get(path), after.get(path)
            if a is None or a == b or (b is not None and len(a) == len(b) == 4 and a[3] == b[3]):
                if a is None:
                    yield f"{place}: {path} {new}"
            elif b is None:
                yield f"{place}: {path} {gone}"
            elif len(a) == 4 or path == FINGERPRINT:
                yield f"{place}: {path} {changed}"
            else:
                names = ("then", "now") if called is None else (f"in {called[0]}", f"in {called[1]}")
                if a[0] != b[0]:
                    what = f"size {a[0]:,} bytes {names[0]}, {b[0]:,} {names[1]}"
                elif is_remote(path):
                    what = "its server reports another version"
                else:
                    what = f"modification time {_time(a[1])} {names[0]}, {_time(b[1])} {names[1]}"
                yield f"{place}: {path} {changed}: {what}"


def _time(ns: int) -> str:
    seconds, rest = divmod(ns, 10**9)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest:09}Z"


# -- modules ------------------------------------------------------------------------------------------


def modules_of(plan: Plan) -> dict[str, dict[str, str]]:
    """Return the files of the modules of functions, by path in the spec and by name of the module."""
    folder = Path(plan.spec.code)
    imports: dict[str, tuple[str, ...]] = {}
    modules: dict[str, dict[str, str]] = {}
    for name, stage in plan.spec.stages.items():
        state = plan.states.get(name)
        refs = [plan.functions.get(name), plan.finishes.get(name)]
        refs += [state.init, state.until] if state is not None else []
        wrapped = getattr(getattr(stage, "run", None), "__wrapped__", None)
        if (
            wrapped is not None and not plan.functions[name].name
        ):  # sent by value, but what it calls may have a name
            refs.append(reference(wrapped))
        modules[f"stages.{name}"] = _modules_below(folder, refs, imports)
    for name, dataset in plan.spec.datasets.items():
        call = dataset.config.get("call", dataset.config.get("class"))
        if isinstance(call, str) or callable(call):
            modules[f"datasets.{name}"] = _modules_below(folder, [reference(call)], imports)
    return modules


def _modules_below(
    folder: Path, refs: Sequence[FunctionRef | None], imports: dict[str, tuple[str, ...]]
) -> dict[str, str]:
    """Return the modules of functions, and those below a folder that they import; `imports` is a cache."""
    named = [name for ref in refs if ref is not None and ref.name for name in _defining(ref.name)]
    found: dict[str, str] = {}
    used = (
        name for ref in refs if ref is not None and ref.pickled for name in _named_in(ref.pickled, folder)
    )
    pending, seen = [*named, *used], {"pipedist", "__main__"}
    while pending:
        module = pending.pop()
        if module in seen:
            continue
        seen.add(module)
        file = _file_of(module, folder) or (_imported_file(module) if module in named else None)
        if file is None:
            continue
        found[module] = file
        if module not in imports:
            imports[module] = tuple(_imports(module, file))
        pending += [name for name in imports[module] if name.partition(".")[0] != "pipedist"]
        pending += [module.rpartition(".")[0]] if "." in module else []
    return found


def _defining(function: str) -> list[str]:
    """Return the module that names a function, and the one that defines it."""
    module, _, path = function.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return list(dict.fromkeys((module, getattr(found, "__module__", None) or module)))


def _named_in(pickled: bytes, folder: Path) -> set[str]:
    """Return what may be modules among the texts in a pickle of a function: its names, and those that it imports."""
    there = {entry.partition(".")[0] for entry in os.listdir(folder)} - {""}
    texts = {
        text for _, text, _ in islice(pickletools.genops(pickled), _OPCODES_MAX) if isinstance(text, str)
    }
    return {each for each in texts if each in sys.modules or each.partition(".")[0] in there}


def _imported_file(module: str) -> str | None:
    path = getattr(sys.modules.get(module), "__file__", None)
    return path if path is not None and os.path.isfile(path) else None


def _file_of(module: str, folder: Path) -> str | None:
    """Return the file of a module below a folder, None if it is not there."""
    loaded = _imported_file(module)
    if loaded is not None and Path(loaded).is_relative_to(folder) and "site-packages" not in loaded:
        return loaded
    base = os.path.join(folder, *module.split("."))
    return next((p for p in (os.path.join(base, "__init__.py"), f"{base}.py") if os.path.isfile(p)), None)


def _imports(module: str, file: str) -> Iterator[str]:
    """Yield the names of the modules that a module may import, as its source shows."""
    if not file.endswith(".py"):
        return
    package = module if os.path.basename(file) == "__init__.py" else module.rpartition(".")[0]
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (SyntaxError, ValueError):  # it can't be imported, or only with an error that the run reports
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.args[0].value


def changed_modules(
    there: Mapping[str, str], now: Mapping[str, str], modules: Iterable[str], folder: Path
) -> Iterator[str]:
    """Yield a line with the file of each module that has changed since an earlier run."""
    for module in modules:
        if there.get(module) != now.get(module):
            file = _file_of(module, folder) or _imported_file(module)
            yield f"module {module} has changed" + ("" if file is None else f": {file}")


def code_of(modules: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Return the SHA-256 of the files of modules."""
    files = {name: file for those in modules.values() for name, file in those.items()}
    return {name: hashlib.sha256(Path(file).read_bytes()).hexdigest() for name, file in sorted(files.items())}


# -- the source of a spec -----------------------------------------------------------------------------


class SpecSource(Struct, frozen=True):
    """Where a spec came from, so that a later process can load it again.

    Args:
        source: absolute path of its file; "" if the spec can't be loaded again.
        sets: texts NAME=VALUE of the command line.
        params: parameters given as values: a dict, encoded as a record of a log.
    """

    source: str = ""
    sets: tuple[str, ...] = ()
    params: bytes = b""

    @classmethod
    def of(cls, spec: object, params: Mapping[str, Tree] | None, sets: Sequence[str]) -> SpecSource:
        if not isinstance(spec, str | os.PathLike):
            return cls()
        try:
            kept = b"".join(packed(None, encode(dict(params)))) if params else b""
        except PipedistError:  # a value that can't be encoded
            return cls()
        return cls(os.path.abspath(os.fspath(spec)), tuple(sets), kept)

    def command(self, output: str = "") -> str:
        """Return the command line that runs the spec, "" if there is none; `output`: that of `--output`."""
        if not self.source or self.params:
            return ""
        words = ["pipedist", "run", os.path.relpath(self.source)]
        for each in self.sets:
            words += ["--set", each]
        return shlex.join([*words, "--output", output] if output else words)

    def load(self) -> Spec:
        if not self.source:
            raise UsageError(
                "the run's spec did not come from a file: it was passed in Python, as a dict or with values "
                "that can't be stored. Write the spec to a YAML file, and run that file"
            )
        if not Path(self.source).is_file():
            raise UsageError(f"the run's spec file {self.source} does not exist any more: put it back")
        return load(self.source, sets=self.sets, params=unpacked(self.params) if self.params else None)


TEXT_MAX: Final = 60  # longest excerpt of a value in a line, in characters

_MISSING: Final = object()


def differences(
    there: Any, now: Any, path: str = "", *, called: tuple[str, str] = ("there", "now")
) -> Iterator[str]:
    """Yield a line for each difference: "stages.late.axis: 0 there, 1 now"."""
    if _text(there) == _text(now):
        return
    if isinstance(there, Mapping) and isinstance(now, Mapping):
        for name in dict.fromkeys((*there, *now)):
            below = f"{path}.{name}" if path else str(name)
            yield from differences(there.get(name, _MISSING), now.get(name, _MISSING), below, called=called)
    elif isinstance(there, list) and isinstance(now, list) and len(there) == len(now):
        for index, (a, b) in enumerate(zip(there, now, strict=True)):
            yield from differences(a, b, f"{path}[{index}]", called=called)
    else:
        yield f"{path or 'all of it'}: {_excerpt(there)} {called[0]}, {_excerpt(now)} {called[1]}"


def _text(value: Any) -> str:
    # as for a digest: 1, 1.0 and true differ, as do 0.0 and -0.0, and NaN equals NaN
    return "" if value is _MISSING else json.dumps(value, sort_keys=True)


def _excerpt(value: Any) -> str:
    if value is _MISSING:
        return "nothing"
    text = repr(value)
    return text if len(text) <= TEXT_MAX else text[: TEXT_MAX - 3] + "..."


LINES_MAX = 12


def listed(lines: Iterable[str]) -> str:
    """Return at most LINES_MAX lines, indented, and the number of the others."""
    shown = list(lines)
    rest = [f"... and {len(shown) - LINES_MAX} more"] if len(shown) > LINES_MAX else []
    return "".join(f"\n    {line}" for line in shown[:LINES_MAX] + rest)
