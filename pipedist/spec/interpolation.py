"""`${...}` in values.

| reference | value | where |
|---|---|---|
| `${params.NAME}` | the parameter | everywhere but in `params` |
| `${env.NAME}`, `${env.NAME:default}` | the variable, read as a YAML scalar or flow list | everywhere |
| `${spec.dir}` | the spec's folder, absolute | everywhere |
| `${stages.NAME}` | the finished value of a reduce or gather | alone, in a stage's `with` |
| `${state.NAME}` | the state of an update | alone, in a stage's `with` |
| `$${` | the text `${` | everywhere |

A lone `${...}` keeps its type; inside text it becomes text. Values of stages and states exist only while the
spec runs: they stay in the tree, as `StageRef` and `StateRef`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec import Struct

from pipedist.core.types import Tree
from pipedist.errors import SpecError
from pipedist.spec.diagnostics import Path, Problems
from pipedist.spec.hints import setting_meant
from pipedist.spec.scalars import ScalarError, as_text, describe, listing, resolve_plain
from pipedist.spec.validation import STAGE_KEYS

TEXT_CHARACTERS_MAX = 65_536
NODES_MAX = 1_000_000
DEPTH_MAX = 32

NAME = re.compile(r"[^\W\d][\w-]{0,99}")  # the names of datasets, stages and parameters

NAME_EXPECTED = "a name of at most 100 letters, digits, `_` and `-`, with a letter or `_` first"

_TOKEN = re.compile(r"\$\$\{|\$\{([^{}\n]*)\}|\$\{")
_KINDS = ("params", "env", "spec", "stages", "state")
_UNRESOLVED = object()


class StageRef(Struct, frozen=True):
    """The finished value of the reduce or gather `name`."""

    name: str

    def __str__(self) -> str:
        return f"${{stages.{self.name}}}"


class StateRef(Struct, frozen=True):
    """The state of the update `name` before the step."""

    name: str

    def __str__(self) -> str:
        return f"${{state.{self.name}}}"


class Setting(Struct, frozen=True):
    """A value, and its form inside text; None if it has none."""

    value: object
    text: str | None


def read_setting(text: str) -> object:
    """Read a `--set` or an environment variable, a YAML scalar or flow list; raise ScalarError if it is neither."""
    stripped = text.strip()
    if not stripped.startswith(("[", '"', "'")):
        return resolve_plain(stripped)
    from pipedist.spec.yaml_text import read_yaml  # most settings are plain scalars

    try:
        document, problems = read_yaml(stripped.encode("utf-8", "surrogateescape"), "")
        problems.raise_all()
    except SpecError as error:
        raise ScalarError(error.problems[0].message, error.problems[0].expected) from error
    return document.value


class Interpolation:
    """Replaces the references of one document, whose folder is absolute."""

    def __init__(self, problems: Problems, env: Mapping[str, str], folder: str) -> None:
        self._problems = problems
        self._env = env
        self._folder = folder
        self._params: dict[str, Setting] | None = None
        self._nodes = 0
        self._failed: set[Path] = set()
        self._failed_params: set[str] = set()
        self.references: list[tuple[Path, StageRef | StateRef]] = []
        self._origins: dict[Path, str] = {}

    def read_params(
        self, declared: object, given: Mapping[str, object], sets: Sequence[str]
    ) -> dict[str, object]:
        """Return the values of the `params` section, `given`, and `--set`; later ones override earlier ones."""
        params: dict[str, Setting] = {}
        if not isinstance(declared, dict):
            expected = "a mapping of names to values"
            message = f"`params` must be {expected}, got {describe(declared)}"
            self._problems.add(("params",), message, expected)
            self._problems.break_at(("params",))
            declared = {}
        overridden = {*given, *(setting.partition("=")[0] for setting in sets)}
        for name, default in declared.items():
            path = ("params", name)
            if not isinstance(name, str) or not NAME.fullmatch(name):
                self._problems.add(path, f"{name!r} is not a valid name", NAME_EXPECTED, at_key=True)
            failed = len(self._failed)
            value = default if name in overridden else self.replace(default, path)
            if len(self._failed) > failed:
                self._failed_params.add(name)
            params[name] = Setting(value, _text_of(value))
        for name, value in given.items():
            if self._is_declared(name, params, "params"):
                params[name] = Setting(value, _text_of(value))
                self._failed_params.discard(name)
        for setting in sets:
            name, equals, text = setting.partition("=")
            where = f"--set {setting}"
            if not equals or not name:
                message = "the setting has no name and value"
                self._problems.add_outside(where, message, expected="--set NAME=VALUE")
            elif self._is_declared(name, params, where, text):
                try:
                    params[name] = Setting(read_setting(text), text)
                    self._failed_params.discard(name)
                except ScalarError as error:
                    self._problems.add_outside(where, error.message, expected=error.expected)
        self._params = params
        return {name: setting.value for name, setting in params.items()}

    def _is_declared(
        self, name: str, params: Mapping[str, Setting], where: str, value: str = "VALUE"
    ) -> bool:
        if name not in params:
            message = f"the spec has no parameter `{name}`"
            declared = f"a name in `params`: {listing(params)}" if params else ""
            expected = setting_meant(name, value) or declared or "a spec with `params`; this one has none"
            self._problems.add_outside(where, message, expected=expected, allowed=params, given=name)
        return name in params

    def origin(self, path: Path) -> str:
        """Return the reference that the value at `path` came from, or "" if it is written out."""
        return self._origins.get(self._problems.document.written(path), "")

    def replace(self, value: object, path: Path) -> object:
        """Return a value with its references replaced; a value without any stays the same object."""
        if path[:1] == ("datasets",) and path[2:] == ("arrays",):
            return value
        self._nodes += 1
        if len(path) > DEPTH_MAX or self._nodes > NODES_MAX:
            limit = f"{DEPTH_MAX} levels" if len(path) > DEPTH_MAX else f"{NODES_MAX} values"
            self._problems.fail(path, f"the document has more than {limit}", "a smaller tree, or one array")
        if isinstance(value, str):
            replaced_text = self._string(value, path) if "${" in value else value
            if path in self._failed:
                self._problems.break_at(path)
            return replaced_text
        if type(value) is dict:
            replaced: dict[object, object] = {}
            for key, item in value.items():
                if isinstance(key, str) and "${" in key:
                    message = f"`{key}` is a key, and references are replaced only in values"
                    self._problems.add((*path, key), message, "a key without `${`", at_key=True)
                replaced[key] = self.replace(item, (*path, key))
            return replaced if _differs(replaced.values(), value.values()) else value
        if type(value) is list or type(value) is tuple:
            items = [self.replace(item, (*path, index)) for index, item in enumerate(value)]
            return type(value)(items) if _differs(items, value) else value
        return value

    def _string(self, text: str, path: Path) -> object:
        lone = _TOKEN.fullmatch(text)
        if lone is not None and lone[1] is not None:
            value = self._resolve(lone[1], lone[0], path, alone=True)
            if isinstance(value, Setting):
                self._origins[self._problems.document.written(path)] = lone[0]
                return value.value
            return value
        parts: list[str] = []
        end = 0
        seen: set[str] = set()
        for token in _TOKEN.finditer(text):
            parts.append(text[end : token.start()])
            end = token.end()
            if token[0] == "$${":
                parts.append("${")
            elif token[0] in seen and path in self._failed:
                continue  # a reference that failed is reported once per text
            elif token[1] is None:
                self._fail(path, "${", "`${` is never closed", "`${...}`, or `$${` for the text `${`")
            else:
                value = self._resolve(token[1], token[0], path, alone=False)
                if isinstance(value, Setting):
                    if value.text is None:
                        kind = describe(value.value)
                        message = f"{token[0]} is {kind}, and only a scalar can be part of a text"
                        self._fail(path, token[0], message, "a scalar")
                    parts.append(value.text or "")
            seen.add(token[0])
        parts.append(text[end:])
        if sum(map(len, parts)) > TEXT_CHARACTERS_MAX:
            message = f"the text is longer than {TEXT_CHARACTERS_MAX} characters"
            self._fail(path, "", message, "a shorter text")
        return "".join(parts)

    def _resolve(self, body: str, token: str, path: Path, *, alone: bool) -> object:
        kind, dot, name = body.partition(".")
        if kind == "spec" and name == "dir":
            return Setting(self._folder, self._folder)
        if kind == "params" and name:
            return self._param(name, token, path)
        if kind == "env" and name:
            return self._variable(name, token, path)
        if kind in ("stages", "state") and name:
            return self._later(kind, name, token, path, alone=alone)
        message = f"unknown reference {token}"
        expected = "${params.NAME}, ${env.NAME}, ${spec.dir}, ${stages.NAME} or ${state.NAME}"
        if kind == "spec":
            return self._fail(path, token, message, "${spec.dir}", ["spec.dir"], body)
        if dot:
            return self._fail(path, token, message, expected, _KINDS, kind)
        params = [f"params.{name}" for name in self._params or ()]
        return self._fail(path, token, message, expected, params, f"params.{body}")

    def _param(self, name: str, token: str, path: Path) -> object:
        if self._params is None:
            message = f"{token} is not available in `params`"
            return self._fail(path, token, message, "a value, ${env.NAME} or ${spec.dir}")
        if name not in self._params:
            expected = listing(self._params) if self._params else "a parameter declared in `params`"
            return self._fail(
                path, token, f"the spec has no parameter `{name}`", expected, self._params, name
            )
        if name in self._failed_params:
            self._problems.break_at(path)
            return _UNRESOLVED
        return self._params[name]

    def _variable(self, body: str, token: str, path: Path) -> object:
        name, colon, default = body.partition(":")
        text = self._env.get(name, default if colon else None)
        if text is None:
            message = f"the environment variable {name} is not set"
            expected = f"its value, or a default: ${{env.{name}:default}}"
            return self._fail(path, token, message, expected, self._env, name)
        try:
            return Setting(read_setting(text), text)
        except ScalarError as error:
            message = f"the environment variable {name}: {error.message}"
            return self._fail(path, token, message, error.expected)

    def _later(self, kind: str, name: str, token: str, path: Path, *, alone: bool) -> object:
        misspelled = len(path) > 3 and path[0] == "stages" and path[2] not in STAGE_KEYS
        if len(path) < 4 or (path[:3:2] != ("stages", "with") and not misspelled):
            message = f"{token} has no value before the run"
            return self._fail(path, token, message, "this reference only in the `with` of a stage")
        if not alone:
            message = f"{token} is a tree of arrays, which cannot be part of a text"
            return self._fail(path, token, message, "the reference alone")
        reference = StageRef(name) if kind == "stages" else StateRef(name)
        self.references.append((path, reference))
        return reference

    def _fail(
        self,
        path: Path,
        token: str,
        message: str,
        expected: str,
        allowed: Mapping[str, object] | Sequence[str] = (),
        given: str = "",
    ) -> object:
        """Add a problem, and return the value of an unresolved reference."""
        self._problems.add(path, message, expected=expected, allowed=allowed, given=given, fragment=token)
        self._failed.add(path)
        return _UNRESOLVED


def _text_of(value: object) -> str | None:
    """Return the form of a parameter inside text, or None if it is not a scalar."""
    return as_text(value) if value is None or isinstance(value, str | int | float | bool) else None


def _differs(ours: Iterable[object], theirs: Iterable[object]) -> bool:
    return any(a is not b for a, b in zip(ours, theirs, strict=True))


def references(tree: Tree) -> list[StageRef | StateRef]:
    """Return the references to stages and states in a `with` tree, in order."""
    found: list[StageRef | StateRef] = []
    substitute(tree, lambda reference: found.append(reference))
    return found


def substitute(tree: Tree, value_of: Callable[[StageRef | StateRef], Tree]) -> Tree:
    """Return a `with` tree of dicts, lists and tuples with `value_of(reference)` in place of each reference."""
    if isinstance(tree, StageRef | StateRef):
        return value_of(tree)
    if type(tree) is dict:
        return {key: substitute(item, value_of) for key, item in tree.items()}
    if type(tree) is list or type(tree) is tuple:
        return type(tree)(substitute(item, value_of) for item in tree)
    return tree
