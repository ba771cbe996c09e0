"""YAML 1.2 text to a `Document`.

Rules: one document, no tags, keys are text and unique, no merge keys. Aliases are read, but their expansion
counts against the limit of nodes, and no node holds itself. ruamel.yaml's scanner and parser handle the
syntax; its resolver and constructor are not used, because they drop the places and have more types than a
spec. The limits are such that a hostile file is rejected within 100 ms.

`_Scanner` overrides methods of ruamel.yaml's scanner, and `_SYNTAX` matches its messages: pyproject.toml
therefore pins the minor version.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentEndEvent,
    DocumentStartEvent,
    MappingEndEvent,
    NodeEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
    StreamEndEvent,
    StreamStartEvent,
)
from ruamel.yaml.reader import ReaderError
from ruamel.yaml.scanner import Scanner, ScannerError

from pipedist.spec.diagnostics import Document, Path, Place, Problems
from pipedist.spec.scalars import ScalarError, resolve_plain

DOCUMENT_BYTES_MAX = 32_768
NODES_MAX = 2_000
DEPTH_MAX = 32

# the line breaks that ruamel.yaml counts
_LINE_BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")

# the characters that end a line, or begin a comment
_ENDS_LINE = "#\0\n\r\x85\u2028\u2029"

_TOO_DEEP = f"more than {DEPTH_MAX} levels"

# (part of ruamel.yaml's message, our message, the expectation); the first match counts
_SYNTAX = (
    (
        "mapping values are not allowed",
        "no value can begin at this `:`",
        "keys of one mapping at the same indentation, a space after each `:`, and quotes around text that "
        "contains `: `",
    ),
    (
        "found character '\\t'",
        "a tab is not allowed here",
        "spaces, or quotes around text that contains a tab",
    ),
    ("could not find expected ':'", "this is not `key: value`", "a `:` and a space after the key"),
    ("expected <block end>, but found '}'", "this `}` closes nothing", "a `{` before it"),
    ("expected <block end>, but found ']'", "this `]` closes nothing", "a `[` before it"),
    (
        "expected <block end>",
        "this line does not continue the lines above it",
        "the indentation of the mapping or list it belongs to, and quotes around text that contains a quote",
    ),
    ("expected the node content", "a value is missing here", "a value, or the end of the list or mapping"),
    ("expected ',' or ']'", "the list is not closed, or a comma is missing", "`,` or `]`"),
    ("expected ',' or '}'", "the mapping is not closed, or a comma is missing", "`,` or `}`"),
    ("found unexpected end of stream", "the quote is never closed", "a closing quote"),
    ("found unknown escape character", "this escape is unknown in double quotes", "single quotes, or `\\\\`"),
    ("cannot start any token", "a value cannot begin with this character", "quotes around the text"),
    (_TOO_DEEP, f"the document has {_TOO_DEEP}", f"at most {DEPTH_MAX} levels"),
)


class _Scanner(Scanner):
    """Limits the depth of flow collections, and reads tabs where YAML 1.2 allows them.

    The time to look ahead in flow collections is quadratic in their depth. Tabs are allowed after a `:` and at
    the end of a line.
    """

    def scan_to_next_token(self) -> None:
        super().scan_to_next_token()
        while (tabs := self._tabs()) > 0:
            self.reader.forward(tabs)
            super().scan_to_next_token()

    def _tabs(self) -> int:
        """Return the number of white space characters, with a tab, that may be skipped."""
        peek = self.reader.peek
        before, behind = -1, 0
        while peek(behind) in ("\t", " "):
            behind += 1
        if not behind or peek(behind) in _ENDS_LINE:
            return behind
        while peek(before) == " ":
            before -= 1
        return behind if peek(before) == ":" and not self.allow_simple_key else 0

    def fetch_flow_collection_start(self, TokenClass: Any, to_push: str) -> None:
        if self.flow_level >= DEPTH_MAX:
            raise ScannerError(None, None, _TOO_DEEP, self.reader.get_mark())
        super().fetch_flow_collection_start(TokenClass, to_push)


def read_yaml(data: bytes, name: str) -> tuple[Document, Problems]:
    """Read a YAML document, and return it with its problems so far; raise those after which nothing can be read."""
    document = Document(name, None, ("",))
    problems = Problems(document)
    if len(data) > DOCUMENT_BYTES_MAX:
        problems.fail((), f"the document is longer than {DOCUMENT_BYTES_MAX} bytes", "data in separate files")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - (data.rfind(b"\n", 0, error.start) + 1) + 1
        document.lines = tuple(data.decode("utf-8", "replace").split("\n"))
        document.values[()] = Place(line, column)
        problems.fail((), f"byte 0x{data[error.start]:02x} is not UTF-8", "UTF-8 text")
    document.lines = tuple(_LINE_BREAK.split(text))
    try:
        _Composer(document, problems).compose(text)
    except MarkedYAMLError as error:
        _raise_syntax_error(error, document, problems)
    except ReaderError as error:
        before = _LINE_BREAK.split(text[: error.position])
        document.values[()] = Place(len(before), len(before[-1]) + 1)
        message = f"the character U+{ord(text[error.position]):04X} is not allowed"
        problems.fail((), message, "printable text")
    return document, problems


def _raise_syntax_error(error: MarkedYAMLError, document: Document, problems: Problems) -> NoReturn:
    mark, reported = error.problem_mark, str(error.problem or "")
    opened = error.context_mark
    # these two are found in a later line than the one that is wrong
    if "unexpected end of stream" in reported or "could not find expected ':'" in reported or mark is None:
        mark = opened or mark
    if mark is not None:
        last = len(document.lines)
        place = Place(mark.line + 1, mark.column + 1)
        # after the last line there is nothing to show
        document.values[("",)] = place if place.line <= last else Place(last, len(document.lines[-1]) + 1)
        if "expected ','" in reported and document.lines[mark.line][: mark.column].endswith("$"):
            message = "a reference inside `{...}` or `[...]` has no quotes"
            problems.fail(("",), message, 'quotes around it: "${params.x}"')
    for fragment, message, expected in _SYNTAX:
        if fragment in reported:
            if "is not closed" in message and opened is not None and opened.line != mark.line:
                message = message.replace("is not", f"that begins on line {opened.line + 1} is not")
            problems.fail(("",), message, expected)
    problems.fail(("",), f"this is not YAML: {reported or error.context}", "YAML 1.2")


class _Composer:
    """Builds values and their places from the parser's events."""

    def __init__(self, document: Document, problems: Problems) -> None:
        self._document = document
        self._problems = problems
        self._nodes = 0
        self._anchors: dict[str, tuple[object, int]] = {}
        self._open_anchors: set[str] = set()

    def compose(self, text: str) -> None:
        yaml = YAML(typ="safe", pure=True)
        yaml.Scanner = _Scanner
        events = iter(yaml.parse(text))
        self._events: Iterator[Any] = events
        documents = 0
        for event in events:
            if isinstance(event, StreamStartEvent | StreamEndEvent | DocumentEndEvent):
                continue
            if isinstance(event, DocumentStartEvent):
                documents += 1
                self._check_document_start(event, documents)
            else:
                self._document.value = self._node(event, ())
        if not documents:
            self._problems.fail((), "the document is empty", "a mapping that begins with `pipedist: 1`")

    def _check_document_start(self, event: DocumentStartEvent, documents: int) -> None:
        if documents > 1:
            self._reject(("",), event, "a second document begins here", "one document per file")
            self._problems.raise_all()
        if event.version is not None and tuple(event.version) != (1, 2):
            version = ".".join(map(str, event.version))
            self._reject(("",), event, f"the document declares YAML {version}", "YAML 1.2")
        if event.tags:
            self._reject(("",), event, "the document declares tags", "a document without tags")

    def _node(self, event: Any, path: Path) -> object:
        self._document.values[path] = _place(event)
        if len(path) > DEPTH_MAX:
            self._reject(path, event, f"the document has {_TOO_DEEP}", f"at most {DEPTH_MAX} levels")
            self._problems.raise_all()
        if isinstance(event, AliasEvent):
            return self._alias(event, path)
        self._count(1, path, event)
        before = self._nodes
        anchor = event.anchor
        if anchor is not None:
            self._open_anchors.add(anchor)
        self._check_tag(event, path)
        value: object
        if isinstance(event, ScalarEvent):
            value = self._scalar(event, path)
        elif isinstance(event, SequenceStartEvent):
            value = self._sequence(path)
        else:
            value = self._mapping(path)
        if anchor is not None:
            self._open_anchors.discard(anchor)
            self._anchors[anchor] = (value, self._nodes - before + 1)
        return value

    def _alias(self, event: AliasEvent, path: Path) -> object:
        name = event.anchor
        if name in self._open_anchors:
            self._reject(path, event, f"the node *{name} contains itself", "a tree")
        elif name not in self._anchors:
            message = f"there is no anchor for *{name}"
            self._reject(path, event, message, f"an anchor &{name} above", self._anchors)
        else:
            value, size = self._anchors[name]
            self._count(size, path, event)
            return value
        self._problems.break_at(path)
        return None

    def _count(self, nodes: int, path: Path, event: NodeEvent) -> None:
        self._nodes += nodes
        if self._nodes > NODES_MAX:
            message = f"the document has more than {NODES_MAX} values, with aliases expanded"
            self._reject(path, event, message, "data in separate files")
            self._problems.raise_all()

    def _check_tag(self, event: Any, path: Path) -> None:
        tag = event.tag
        if tag is not None:
            shown = str(tag).replace("tag:yaml.org,2002:", "!!")
            self._reject(path, event, f"the tag {shown} is not allowed", "no tag; quotes make a value text")
            if isinstance(event, ScalarEvent):
                self._problems.break_at(path)

    def _scalar(self, event: ScalarEvent, path: Path) -> object:
        if event.style is not None:
            return event.value
        try:
            return resolve_plain(event.value)
        except ScalarError as error:
            self._reject(path, event, error.message, error.expected)
            self._problems.break_at(path)
            return None

    def _sequence(self, path: Path) -> list[object]:
        values: list[object] = []
        for event in self._events:
            if isinstance(event, SequenceEndEvent):
                break
            values.append(self._node(event, (*path, len(values))))
        return values

    def _mapping(self, path: Path) -> dict[str, object]:
        values: dict[str, object] = {}
        for event in self._events:
            if isinstance(event, MappingEndEvent):
                break
            key = self._key(event, path)
            place = _place(event)
            if key in values:
                first = self._document.keys[(*path, key)].line
                self._reject(path, event, f"the key `{key}` is already on line {first}", "each key once")
                # the second value is read for its own problems, under a path that no check uses
                self._node(next(self._events), (*path, key, ""))
                continue
            self._document.keys[(*path, key)] = place
            values[key] = self._node(next(self._events), (*path, key))
        return values

    def _key(self, event: Any, path: Path) -> str:
        if not isinstance(event, ScalarEvent):
            self._reject(path, event, "this key is not text", "a plain or quoted text as key")
            self._problems.raise_all()
        self._count(1, path, event)
        self._check_tag(event, path)
        text = str(event.value)
        if text == "<<" and event.style is None:
            message = "the merge key `<<` is not allowed"
            self._reject(path, event, message, "the keys themselves: YAML 1.2 has no merge keys")
            self._problems.raise_all()
        if event.style is None:
            try:
                is_text = isinstance(resolve_plain(text), str)
            except ScalarError:
                is_text = False
            if not is_text:
                self._reject(path, event, f"the key `{text}` is not text", f'quotes around it: "{text}"')
        return text

    def _reject(
        self, path: Path, event: Any, message: str, expected: str, allowed: Iterable[str] = ()
    ) -> None:
        """Add a problem at the place of an event, not at the value at `path`."""
        beside: Path = (*path, "", len(self._document.values))
        self._document.values[beside] = _place(event)
        given = event.anchor if isinstance(event, AliasEvent) else ""
        self._problems.add(beside, message, expected, allowed=allowed, given=given)


def _place(event: Any) -> Place:
    return Place(event.start_mark.line + 1, event.start_mark.column + 1)
