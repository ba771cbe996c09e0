"""Validation of a spec against its models: every problem of every section, at its place.

First, misspelled keys are replaced by the keys that they most probably mean, so that a misspelled key is one
problem and its value is validated like any other. Then pydantic validates the whole tree, and `Validation._add`
turns each of its errors into a problem.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, get_args, get_origin

from pydantic import ValidationError

from pipedist.core.names import nearest
from pipedist.core.plugins import Plugin
from pipedist.errors import UsageError
from pipedist.spec.datasets import DATASET_KEYS, SOURCES, ArraysSource, DatasetSpec
from pipedist.spec.diagnostics import Path, Problems, holds
from pipedist.spec.fields import EXPECTED, MESSAGE, Section, expected_phrase, keys_of
from pipedist.spec.hints import KEYS_ELSEWHERE, function_meant, misplaced, source_of_path, verb_elsewhere
from pipedist.spec.model import SpecSection
from pipedist.spec.outputs import SINK_SECTIONS, SinkSection, is_sink
from pipedist.spec.plugins import plugin_sinks, plugin_sources, section_of
from pipedist.spec.scalars import as_yaml, describe, listing
from pipedist.spec.stages import STAGES

_PHRASES: Final = {
    EXPECTED: "{expected}",
    "literal_error": "{expected}",
    "bool_type": "true or false",
    "model_type": "a mapping with the keys {keys}",
}
"""By pydantic's type of an error: the phrase after "must be". Other types keep pydantic's own text."""

_BOOLEANS_OF_YAML_1_1 = frozenset({"yes", "no", "on", "off", "y", "n"})
_QUOTED = re.compile(r"'([^']*)'")


def section_in(annotation: Any) -> type[Section] | None:
    """Return the section that a field holds, also if it is optional or may be a scalar."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    if get_origin(annotation) in (dict, list, tuple):
        return None
    return next((found for part in get_args(annotation) if (found := section_in(part))), None)


STAGE_KEYS: Final = tuple(dict.fromkeys(key for model in STAGES.values() for key in keys_of(model)))


class Validation:
    """Validates the sections of one spec, which holds arrays only if it is a dict (`in_memory`).

    `origin` returns the reference that an interpolated value came from, or "".
    """

    def __init__(self, problems: Problems, origin: Callable[[Path], str], *, in_memory: bool) -> None:
        self._problems = problems
        self._origin = origin
        self._in_memory = in_memory
        self._reported: set[Path] = set()  # values with a problem, which pydantic would report again

    def validate(self, tree: Mapping[str, Any]) -> SpecSection | None:
        """Return an interpolated tree without misspelled keys as a model, or None if it has problems."""
        try:
            return SpecSection.model_validate(tree)
        except ValidationError as error:
            for found in error.errors(include_url=False):
                self._add(tree, found)
            return None

    def section(self, raw: object, model: type[Section], key: str) -> object:
        """Return a section at the top without misspelled keys."""
        return self._respelled(raw, model, (key,)) if isinstance(raw, dict) else raw

    def dataset(self, raw: object, path: Path) -> object:
        """Return a dataset with one source and without misspelled keys."""
        if not isinstance(raw, dict):
            self._must_be("a mapping with one source key and `batch`", raw, path)
            return raw
        if "arrays" in raw and not self._in_memory:
            message = "`arrays` is allowed only in a spec that is given as a dict"
            self._problems.add((*path, "arrays"), message, "a source that reads files", at_key=True)
            return {key: value for key, value in raw.items() if key != "arrays"}
        sources = [name for name in SOURCES if self._in_memory or name != "arrays"]
        plugins = self._plugins(raw, path)
        found, raw = self._one_of(raw, [*sources, *plugins], DATASET_KEYS, path, "dataset")
        if found is not None and found in plugins:
            raw = self._with_class(raw, plugins[found], path)
        return self._respelled(raw, DatasetSpec, path, names=[*DATASET_KEYS, *sources])

    def output(self, raw: object, path: Path) -> object:
        """Return an output with a class in place of the key of another package, also below the parts of a value."""
        if (
            not isinstance(raw, dict)
            or is_sink(raw)
            or not any(isinstance(each, dict) for each in raw.values())
        ):
            return raw
        try:
            plugins = plugin_sinks()
        except UsageError as error:
            self._problems.add(path, str(error), at_key=True)
            return raw
        (name, given), *others = raw.items()
        if others or name not in plugins or not isinstance(given, dict):
            return {part: self.output(file, (*path, part)) for part, file in raw.items()}
        at = (*path, name)
        self._problems.document.moved |= {
            (*path, "sink"): at,
            (*path, "sink", "with"): at,
            (*path, "sink", "path"): (*at, "path"),
        }
        own = {key: value for key, value in given.items() if key != "path"}
        try:
            own = self._arguments(own, section_of(plugins[name], "path"), at)
        except UsageError as error:
            self._problems.add(at, str(error), at_key=True)
        place = {"path": given["path"]} if "path" in given else {}
        return {"sink": {**place, "class": plugins[name].target, "with": own}}

    def _plugins(self, raw: Mapping[Any, object], path: Path) -> Mapping[str, Plugin]:
        """Return the sources of other packages, if a dataset may have one of them."""
        if any(key in SOURCES for key in raw):
            return {}
        try:
            return plugin_sources()
        except UsageError as error:
            self._problems.add(path, str(error), at_key=True)
            return {}

    def _with_class(self, raw: Mapping[Any, object], plugin: Plugin, path: Path) -> dict[Any, object]:
        """Return a dataset with a class and its arguments in place of the key of a plugin, whose keys are checked."""
        at, given = (*path, plugin.name), raw[plugin.name]
        self._problems.document.moved |= {(*path, "source"): at, (*path, "source", "with"): at}
        if not isinstance(given, dict):
            self._must_be("a mapping", given, at)
            given = {}
        else:
            try:
                given = self._arguments(given, section_of(plugin), at)
            except UsageError as error:
                self._problems.add(at, str(error), at_key=True)
        source = {"class": plugin.target, "with": given}
        return {
            "source" if key == plugin.name else key: source if key == plugin.name else value
            for key, value in raw.items()
        }

    def _arguments(self, given: Mapping[Any, object], model: type[Section], path: Path) -> dict[Any, object]:
        """Return the arguments of a class without misspelled keys, checked against the model of its keys."""
        given = self._respelled(given, model, path, nested=False)
        try:
            model.model_validate(given)
        except ValidationError as error:
            for found in error.errors(include_url=False):
                at = (*path, *_path_of(given, found["loc"]))
                if found["type"] == "extra_forbidden":
                    self._unknown(at, keys_of(model))
                elif found["type"] == "missing":
                    self._problems.add(at, f"`{found['loc'][-1]}` is missing", at_key=True)
                else:
                    self._must_be(found.get("ctx", {}).get(EXPECTED, found["msg"]), found["input"], at)
        return given

    def stage(self, raw: object, path: Path) -> tuple[str | None, object]:
        """Return the verb of a stage (None: unknown), and the stage without misspelled keys."""
        if not isinstance(raw, dict):
            self._must_be(f"a mapping with one of the keys {listing(STAGES)}", raw, path)
            return None, raw
        others = [key for key in STAGE_KEYS if key not in STAGES]
        verb, raw = self._one_of(raw, list(STAGES), others, path, "stage")
        if verb is None:
            self._reported.add(path)
            return None, raw
        return verb, self._respelled(raw, STAGES[verb], path, elsewhere=STAGE_KEYS)

    def respelled_top(self, raw: Mapping[Any, object]) -> dict[str, Any]:
        """Return the keys at the top of a document without misspelled and unknown ones."""
        known = self._respelled(raw, SpecSection, (), nested=False)
        for key in known:
            if key not in keys_of(SpecSection):
                self._misplaced_or_unknown((key,), SpecSection)
        return {key: value for key, value in known.items() if key in keys_of(SpecSection)}

    def _respelled(
        self,
        raw: Mapping[Any, object],
        model: type[Section],
        path: Path,
        *,
        names: Iterable[str] = (),  # allowed keys, for messages; default: those of the model
        elsewhere: Iterable[str] = (),  # keys of other sections of this kind, which are not misspelled
        nested: bool = True,
    ) -> dict[Any, object]:
        """Return a section in which each misspelled key is replaced by the key that it must mean."""
        fields = keys_of(model)
        names, elsewhere = list(names) or list(fields), set(elsewhere)
        respelled: dict[Any, object] = {}
        for key, value in raw.items():
            meant = key
            if key not in names and key not in elsewhere and misplaced(str(key), model) is None:
                suggestion = KEYS_ELSEWHERE.get(key, "") if model in STAGES.values() else ""
                suggestion = suggestion if suggestion in names else nearest(str(key), names)
                if suggestion and suggestion not in raw and suggestion not in respelled:
                    meant = suggestion
                    self._unknown((*path, key), names, meant)
                    self._problems.document.moved[*path, meant] = (*path, key)
            inner = section_in(fields[meant].annotation) if nested and meant in fields else None
            if isinstance(value, dict) and inner is not None and inner is not ArraysSource:
                value = self._respelled(value, inner, (*path, meant))
            respelled[meant] = value
        return respelled

    def _one_of(
        self, raw: Mapping[Any, object], choices: list[str], others: Iterable[str], path: Path, what: str
    ) -> tuple[str | None, dict[Any, object]]:
        """Return the one key of a section that is among `choices`, and the section without further such keys.

        If there is none, a key that resembles one of them is replaced by it.
        """
        part = "verb" if what == "stage" else "source"
        expected = f"one of {listing(choices)}"
        found = [key for key in raw if key in choices]
        for key in found[1:]:
            message = f"a {what} has one {part}, and this one has `{found[0]}` already"
            self._problems.add((*path, key), message, expected=expected, at_key=True)
        if found:
            return found[0], {key: value for key, value in raw.items() if key not in found[1:]}
        names = [*choices, *others]
        for key, value in raw.items():
            meant, op = verb_elsewhere(key, value) if what == "stage" and key not in names else ("", "")
            if meant or op:
                if op:
                    self._problems.add((*path, key), f"unknown key `{key}`", op, at_key=True)
                    return None, dict(raw)
                self._unknown((*path, key), choices, meant)
                self._problems.document.moved[*path, meant] = (*path, key)
                return meant, {meant if k == key else k: value for k, value in raw.items()}
            suggestion = nearest(str(key), names) if key not in names else ""
            if suggestion in choices:
                self._unknown((*path, key), choices)
                self._problems.document.moved[*path, suggestion] = (*path, key)
                return suggestion, {suggestion if k == key else k: value for k, value in raw.items()}
        meant = source_of_path(raw) if what == "dataset" else ""
        if meant:
            self._reported.add((*path, "path"))
        self._problems.add(path, f"the {what} has no {part}", expected=meant or expected, at_key=True)
        return None, dict(raw)

    def _add(self, tree: Mapping[str, Any], error: Any) -> None:
        """Add the problem of one of pydantic's errors."""
        kind, context = error["type"], error.get("ctx", {})
        path = _path_of(tree, error["loc"])
        if any(path[:length] in self._reported for length in range(1, len(path) + 1)):
            return
        if kind == "missing":
            self._missing(tree, path, str(error["loc"][-1]))
        elif kind == "extra_forbidden":
            self._extra(tree, path)
        elif kind == MESSAGE:
            self._problems.add(path, context[MESSAGE] + self._from(path), expected=context[EXPECTED])
        else:
            keys = listing(keys_of(_section_at(tree, path)))
            phrase = _PHRASES.get(kind)
            expected = (
                error["msg"] if phrase is None else phrase.format(expected=context.get(EXPECTED), keys=keys)
            )
            words = context.get("allowed", ())
            if kind == "literal_error":  # the words, in quotes
                words = _QUOTED.findall(expected)
                expected = listing(words)
            given = error["input"]
            meant = function_meant(given, expected) if isinstance(given, str) else ""
            self._must_be(expected, given, path, words, meant)

    def _must_be(
        self, expected: str, given: object, path: Path, words: Iterable[str] = (), meant: str = ""
    ) -> None:
        """Add the problem of a value; `meant` is a value to suggest, else the nearest of `words` is."""
        name = next((f"`{part}`" for part in reversed(path) if isinstance(part, str)), "the document")
        note = ""
        if isinstance(given, str) and given.lower() in _BOOLEANS_OF_YAML_1_1:
            note = f"; in YAML 1.2 `{given}` is text"
        self._problems.add(
            path,
            f"{name} must be {expected}, got {describe(given)}{self._from(path)}{note}",
            expected=expected,
            allowed=(meant,) if meant else words if isinstance(given, str) else (),
            given=meant or (given if isinstance(given, str) else ""),
        )
        self._reported.add(path)

    def _missing(self, tree: Mapping[str, Any], path: Path, key: str) -> None:
        field = keys_of(_section_at(tree, path))[key]
        phrase = expected_phrase(field.annotation, field.metadata)
        expected = f"{phrase}, as in `{key}: {as_yaml((field.examples or [None])[0])}`"
        self._problems.add(path, f"`{key}` is missing", expected, at_key=True)

    def _extra(self, tree: Mapping[str, Any], path: Path) -> None:
        name, section = str(path[-1]), _section_at(tree, path[:-1])
        verb = next((verb for verb, model in STAGES.items() if model is section), None)
        owners = [f"`{verb}`" for verb, model in STAGES.items() if name in keys_of(model)]
        if verb is not None and owners:
            message = f"`{name}` is a key of {listing(owners)}, not of `{verb}`"
            self._problems.add(path, message, expected=listing(keys_of(section)), at_key=True)
        else:
            written: Any = tree
            for part in path[:-1]:
                written = written[part]
            self._misplaced_or_unknown(path, section, written)

    def _misplaced_or_unknown(self, path: Path, section: type[Section], written: Iterable[str] = ()) -> None:
        home = misplaced(str(path[-1]), section, written)
        if home is None:
            self._unknown(path, [key for key in keys_of(section) if self._in_memory or key != "arrays"])
        else:
            self._problems.add(path, home[0], home[1], at_key=True)

    def _unknown(self, path: Path, allowed: Iterable[str], meant: str = "") -> None:
        """Add the problem of an unknown key; `meant` is the key to suggest, else the nearest one is."""
        allowed, name = list(allowed), str(path[-1])
        self._problems.add(
            path,
            f"unknown key `{name}`",
            expected=listing(allowed),
            allowed=(meant,) if meant else allowed,
            at_key=True,
            given=meant or name,
        )

    def _from(self, path: Path) -> str:
        origin = self._origin(path)
        return f" (from {origin})" if origin else ""


def _path_of(tree: object, loc: Iterable[str | int]) -> Path:
    """Return the part of an error's location that is written in the tree: pydantic adds tags of unions."""
    path: Path = ()
    current: Any = tree
    for part in loc:
        if holds(current, part):
            path, current = (*path, part), current[part]
    return path


def _section_at(tree: Mapping[str, Any], path: Path) -> type[Section]:
    """Return the model of the innermost section that holds a path."""
    model: type[Section] = SpecSection
    rest = path
    if path[:1] == ("datasets",) and len(path) > 1:
        model, rest = DatasetSpec, path[2:]
    elif path[:1] == ("stages",) and len(path) > 1:
        stage = tree["stages"][path[1]]
        model, rest = next(STAGES[verb] for verb in STAGES if verb in stage), path[2:]
    elif path[:1] == ("outputs",) and len(path) > 2:
        # the kind of an output is below its stage, or below a part of its value
        model, rest = SinkSection, path[2:] if path[2] in SINK_SECTIONS else path[3:]
    for part in rest:
        field = keys_of(model).get(str(part))
        inner = None if field is None else section_in(field.annotation)
        if inner is None:
            break
        model = inner
    return model
