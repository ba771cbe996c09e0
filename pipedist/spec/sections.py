"""Values -> models, one section at a time, so that one mistake hides no other.

A section says which value does not fit; what a person reads is made here, of the value, its `Key`
and the names that are allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from pipedist.spec.document import Path
from pipedist.spec.kinds import Misfits, Wrong
from pipedist.spec.problems import Problems, listing, nearest
from pipedist.spec.scalars import describe
from pipedist.spec.section import Key, Missing, Misspelled, Section, SectionOf
from pipedist.spec.sources import SOURCES, DatasetKeys, DatasetSpec
from pipedist.spec.stages import STAGES, StageSpec

SectionT = TypeVar("SectionT", bound=Section)

_BOOLEANS_OF_YAML_1_1 = frozenset({"yes", "no", "on", "off", "y", "n"})
_RANGE_EXPECTED = "an integer, or a mapping with `stop` and, if need be, `start` and `step`"


class SectionReader:
    """Reads sections and notes what is wrong with them.

    Args:
        problems: where mistakes are noted.
        origin: returns the reference that an interpolated value came from, "" for others.
        in_memory: whether the spec is a dict, which may hold arrays.
    """

    def __init__(self, problems: Problems, origin: Callable[[Path], str], *, in_memory: bool) -> None:
        self._problems = problems
        self._origin = origin
        self._in_memory = in_memory

    def read(
        self,
        model: type[SectionT],
        raw: object,
        path: Path,
        *,
        expected: str = "",
        beside: Iterable[str] = (),
    ) -> SectionT | None:
        """Return `raw` as a `model`, or None where it does not fit.

        Args:
            path: where the section stands.
            expected: what would have been right where `raw` is no mapping at all.
            beside: keys of the same mapping which are read elsewhere; for suggestions.
        """
        if not isinstance(raw, dict):
            self._not_fitting(path, raw, expected or f"a mapping with the keys {listing(_keys(model))}")
            return None
        elsewhere = _STAGE_KEYS if model in STAGES.values() else ()
        raw = self._respelled(raw, _keys(model), path, beside=beside, elsewhere=elsewhere)
        misfits: Misfits = []
        section = model.read(raw, misfits)
        for at, value, why in misfits:
            self._tell(model, path, at, value, why, tuple(beside))
        return section

    def dataset(self, raw: object, path: Path) -> DatasetSpec | None:
        """Return a dataset, or None where it has mistakes."""
        if not isinstance(raw, dict):
            self._not_fitting(path, raw, "a mapping with one source key and `batch`")
            return None
        if "arrays" in raw and not self._in_memory:
            self._problems.add(
                (*path, "arrays"),
                "`arrays` stands in a file",
                expected="it only in a spec that is given as a dict",
                at_key=True,
            )
            return None
        sources = [name for name in SOURCES if self._in_memory or name != "arrays"]
        kind, rest = self._one_of(raw, sources, _keys(DatasetKeys), path, "dataset", "source")
        source: Section | None = None
        if kind is not None:
            written = next(key for key in raw if key not in rest)
            value, at = raw[written], (*path, written)
            if kind == "range" and type(value) is int:
                value = {"stop": value}
            if kind == "arrays":
                value = {"arrays": value}
            expected = _RANGE_EXPECTED if kind == "range" else ""
            source = self.read(SOURCES[kind], value, at, expected=expected)
        keys = self.read(DatasetKeys, rest, path, beside=sources)
        if keys is None or source is None or kind is None:
            return None
        return DatasetSpec(kind=kind, source=source, **vars(keys))

    def stage(self, raw: object, path: Path, verb: str | None) -> StageSpec | None:
        """Return a stage, or None where it has mistakes; `verb` comes from `verb_of`."""
        if not isinstance(raw, dict) or verb is None:
            return None
        stage: Any = self.read(STAGES[verb], raw, path)
        return stage  # type: ignore[no-any-return]

    def verb_of(self, raw: object, path: Path) -> tuple[str | None, object]:
        """Return the verb of a stage (None: unknown), and the stage with its verb spelled right.

        A stage without a verb, or with two, is noted.
        """
        if not isinstance(raw, dict):
            self._not_fitting(path, raw, f"a mapping with one of {listing(STAGES)}")
            return None, raw
        others = [key for key in _STAGE_KEYS if key not in STAGES]
        verb, rest = self._one_of(raw, STAGES, others, path, "stage", "verb")
        if verb is None:
            return None, raw
        written = next(key for key in raw if key not in rest)
        keys = _keys(STAGES[verb])
        return verb, self._respelled({verb: raw[written], **rest}, keys, path, elsewhere=_STAGE_KEYS)

    def _respelled(
        self,
        raw: dict[Any, object],
        keys: Iterable[str],
        path: Path,
        *,
        beside: Iterable[str] = (),
        elsewhere: Iterable[str] = (),
    ) -> dict[Any, object]:
        """Return `raw` with each misspelled key, which is noted, taken for the one it must mean.

        So a misspelled key is one problem, and its value is checked like any other. Keys that are
        known `elsewhere` are no misspellings.
        """
        keys, elsewhere = list(keys), set(elsewhere)
        names = [*keys, *beside]
        respelled: dict[Any, object] = {}
        for key, value in raw.items():
            meant = key
            if key not in names and key not in elsewhere:
                suggestion = nearest(str(key), names)
                if suggestion in keys and suggestion not in raw and suggestion not in respelled:
                    meant = suggestion
                    self._unknown((*path, key), names)
                    self._problems.move((*path, meant), (*path, key))
            respelled[meant] = value
        return respelled

    def _one_of(
        self,
        raw: dict[Any, object],
        choices: Iterable[str],
        others: Iterable[str],
        path: Path,
        what: str,
        part: str,
    ) -> tuple[str | None, dict[Any, object]]:
        """Find the one key of `raw` that is among `choices`; return it, and `raw` without such keys.

        A key that looks like one of them, where there is none, is noted and taken for it.
        """
        choices = list(choices)
        found = [key for key in raw if key in choices]
        if found:
            for key in found[1:]:
                self._problems.add(
                    (*path, key),
                    f"a {what} has one {part}, and this one has `{found[0]}` already",
                    expected=f"one of {listing(choices)}",
                    at_key=True,
                )
            return found[0], {key: value for key, value in raw.items() if key not in found}
        names = [*choices, *others]
        for key in raw:
            if key in names:
                continue
            suggestion = nearest(str(key), names)
            if suggestion in choices:
                self._unknown((*path, key), choices)
                self._problems.move((*path, suggestion), (*path, key))
                return suggestion, {other: value for other, value in raw.items() if other != key}
        self._problems.add(
            path, f"the {what} has no {part}", expected=f"one of {listing(choices)}", at_key=True
        )
        return None, dict(raw)

    def _tell(
        self, model: type[Section], path: Path, loc: Path, value: object, why: Wrong, beside: tuple[str, ...]
    ) -> None:
        """Note what did not fit at `loc` of the section at `path`."""
        at = (*path, *loc)
        section, key = _find(model, loc)
        if isinstance(why, Misspelled):
            self._unknown_key(at, section, beside if len(loc) == 1 else ())
        elif isinstance(why, Missing):
            expected = f"{key.expected}, as in `{key.example}`" if key else ""
            self._problems.add(at[:-1], f"`{loc[-1]}` is missing", expected=expected, at_key=True)
        else:
            self._wrong_value(at, loc, value, key, why)

    def _wrong_value(self, at: Path, loc: Path, value: object, key: Key | None, why: Wrong) -> None:
        name = next((part for part in reversed(loc) if isinstance(part, str)), "")
        message = why.message or f"`{name}` is {describe(value)}"
        expected = why.expected or (key.expected if key else "")
        allowed: Iterable[str] = why.allowed or (key.choices if key else ())
        if isinstance(value, str) and value.lower() in _BOOLEANS_OF_YAML_1_1 and key is not None:
            expected += f"; in YAML 1.2 `{value}` is text"
        message += self._from(at)
        if not isinstance(value, str):
            allowed, value = (), ""
        self._problems.add(at, message, expected=expected, allowed=allowed, given=value)

    def _unknown_key(self, at: Path, section: type[Section], beside: tuple[str, ...]) -> None:
        name = str(at[-1])
        verb = next((verb for verb, model in STAGES.items() if model is section), None)
        owners = [verb for verb, model in STAGES.items() if name in _keys(model)]
        if verb is not None and owners:
            self._problems.add(
                at,
                f"`{name}` does not go with `{verb}`, only with {listing(f'`{owner}`' for owner in owners)}",
                expected=f"of its keys: {listing(_keys(section))}",
                at_key=True,
            )
        else:
            self._unknown(at, [*_keys(section), *beside])

    def _unknown(self, at: Path, allowed: Iterable[str]) -> None:
        allowed = list(allowed)
        self._problems.add(
            at,
            f"unknown key `{at[-1]}`",
            expected=listing(allowed),
            allowed=allowed,
            at_key=True,
            given=str(at[-1]),
        )

    def _from(self, path: Path) -> str:
        origin = self._origin(path)
        return f" (from {origin})" if origin else ""

    def _not_fitting(self, path: Path, raw: object, expected: str) -> None:
        name = next((part for part in reversed(path) if isinstance(part, str)), "the document")
        shown = f"`{name}`" if path else name
        self._problems.add(path, f"{shown} is {describe(raw)}{self._from(path)}", expected=expected)


def _keys(model: type[Section]) -> list[str]:
    return list(model.fields)


_STAGE_KEYS = tuple(dict.fromkeys(key for model in STAGES.values() for key in _keys(model)))


def _find(model: type[Section], loc: Path) -> tuple[type[Section], Key | None]:
    """Return the section that holds the last key of `loc` which is a key of the language, and its `Key`."""
    section, key = model, None
    for part in loc:
        field = section.fields.get(str(part))
        if field is None:
            break
        key = field.account
        if not isinstance(field.kind, SectionOf):
            break
        section = field.kind.section
    return section, key
