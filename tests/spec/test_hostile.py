from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipedist.errors import Problem, SpecError
from pipedist.spec import load
from pipedist.spec.yaml_text import DOCUMENT_BYTES_MAX, read_yaml
from tests.spec.golden import INVALID, ROOT

BOMBS: dict[str, Callable[[], str]] = {
    "aliases": lambda: (
        "a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
        + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 40))
    ),
    "anchors": lambda: "".join(f"k{i}: &a{i} {i}\n" for i in range(1_700)),
    "flow lists": lambda: "[" * 30_000,
    "flow mappings": lambda: "{" * 30_000,
    "flow lists on lines": lambda: "[\n" * 15_000,
    "block lists": lambda: "- " * 15_000,
    "complex keys": lambda: "? " * 15_000,
    "indentation": lambda: "".join(" " * i + f"k{i}:\n" for i in range(240)),
    "values": lambda: "k: [" + "1, " * 10_000 + "1]",
    "keys": lambda: "".join(f"k{i}: 1\n" for i in range(3_300)),
    "the same key": lambda: "k: 1\n" * 6_000,
    "digits": lambda: "k: " + "9" * 30_000,
    "hexadecimal digits": lambda: "k: 0x" + "f" * 30_000,
    "a float": lambda: "k: 1" + "0" * 30_000 + ".0",
    "exponent": lambda: "k: 1e" + "9" * 30_000,
    "one long text": lambda: "k: " + "a b " * 8_000,
    "a quoted text": lambda: 'k: "' + "a b " * 8_000 + '"',
    "a block text": lambda: "k: |\n" + "  text text text\n" * 1_900,
    "comments": lambda: "# comment\n" * 3_200,
    "spaces": lambda: " " * 32_000 + "a",
    "references": lambda: "pipedist: 1\nname: '" + "${" * 15_000 + "'",
    "too long": lambda: "k: " + "x" * 50_000_000,
    "documents": lambda: "--- 1\n" * 5_000,
    "tags": lambda: "k: [" + "!a 1, " * 5_000 + "]",
    "directives": lambda: "".join(f"%TAG !a{i}! b\n" for i in range(2_000)),
}


REJECTIONS = {
    "aliases": "more than 2000 values",
    "anchors": "more than 2000 values",
    "flow lists": "more than 32 levels",
    "flow mappings": "more than 32 levels",
    "flow lists on lines": "more than 32 levels",
    "block lists": "more than 32 levels",
    "complex keys": "this key is not text",
    "indentation": "more than 32 levels",
    "values": "more than 2000 values",
    "keys": "more than 2000 values",
    "the same key": "the first 100 problems",
    "digits": "beyond 64 bits",
    "hexadecimal digits": "beyond 64 bits",
    "a float": "beyond float64",
    "exponent": "beyond float64",
    "comments": "the document is empty",
    "references": "never closed",
    "too long": "longer than 32768 bytes",
    "documents": "a second document",
    "tags": "the first 100 problems",
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_rejected_at_once_with_a_place(name: str, tmp_path: Path) -> None:
    path = tmp_path / "bomb.yaml"
    path.write_text(BOMBS[name]())
    assert (path.stat().st_size <= DOCUMENT_BYTES_MAX) == (name != "too long"), (
        "meets the limit it is made for"
    )
    with pytest.raises(SpecError, match=REJECTIONS.get(name)) as caught:
        load(path)
    for problem in caught.value.problems:
        assert re.fullmatch(r".*:\d+:\d+", problem.where)
        assert len(str(problem)) < 2_000
    # The best processor time of some, relative to the present speed of this machine: 100 ms is the
    # limit on an idle machine.
    assert min(seconds_of(lambda: rejected(path)) for _ in range(3)) < 0.1 * slowness()


def rejected(path: Path) -> None:
    with pytest.raises(SpecError):
        load(path)


def seconds_of(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def slowness() -> float:
    """How much slower than nominal this machine runs plain Python at the moment, at least 1."""
    nominal_s = 0.010
    return max(1.0, min(seconds_of(lambda: [str(i) for i in range(80_000)]) for _ in range(3)) / nominal_s)


def test_the_limit_of_bytes_counts_bytes() -> None:
    head = b"# \xc3\xa9\nk: "
    document, _ = read_yaml(head + b"x" * (DOCUMENT_BYTES_MAX - len(head)), "f")
    assert isinstance(document.value, dict)
    with pytest.raises(SpecError, match="longer than 32768 bytes"):
        read_yaml(head + b"x" * (DOCUMENT_BYTES_MAX - len(head) + 1), "f")


def test_aliases_are_read_within_the_limits() -> None:
    document, problems = read_yaml(b"a: &a [1, 2]\nb: *a\nc: &a 3\nd: *a", "f")
    problems.raise_all()
    assert document.value == {"a": [1, 2], "b": [1, 2], "c": 3, "d": 3}


def test_line_breaks_and_byte_order_mark() -> None:
    document, problems = read_yaml(b"\xef\xbb\xbfa: 1\r\nb: 2\rc: 3\n", "f")
    problems.raise_all()
    assert document.value == {"a": 1, "b": 2, "c": 3}
    assert [(place.line, place.column) for place in document.keys.values()] == [(1, 1), (2, 1), (3, 1)]


def test_tabs_where_yaml_has_them() -> None:
    text = b"a: 1\t# one\nb: {c: 2,\td: x}\t\n\t\ne:\t\n \t# none\n  - 3 \t \nf: \tg\nh:\t'i\t'\t"
    document, problems = read_yaml(text, "f")
    problems.raise_all()
    assert document.value == {"a": 1, "b": {"c": 2, "d": "x"}, "e": [3], "f": "g", "h": "i\t"}


@pytest.mark.parametrize(
    ("text", "place"), [("a:\n\tb: 1", "2:1"), ("a:\n  \tb: 1", "2:3"), ("a: b\tc", "1:5")]
)
def test_tabs_where_yaml_has_none(text: str, place: str) -> None:
    with pytest.raises(SpecError, match=f"^f:{place}: a tab is not allowed here"):
        read_yaml(text.encode(), "f")


SEEDS = [
    path.read_bytes() for folder in ("specs", str(INVALID)) for path in sorted((ROOT / folder).glob("*.yaml"))
]
PIECES = [b"${", b"}", b"&a ", b"*a", b": ", b"\n", b"  ", b"- ", b"[", b"{", b"'", b'"', b"!!int ", b"\x00",
          b"\xff", b"null", b"1e999", b"stages", b"of", b"|", b"#", b"%", b"\t", b"? ", b"<<: "]  # fmt: skip


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32))
def test_mutated_specs_load_or_give_places(seed: int) -> None:
    generator = random.Random(seed)
    data = bytearray(generator.choice(SEEDS))
    for _ in range(generator.randint(1, 4)):
        at = generator.randrange(len(data) + 1)
        what = generator.randrange(4)
        if what == 0:
            data[at : at + generator.randint(1, 8)] = b""
        elif what == 1:
            data[at:at] = generator.choice(PIECES)
        elif what == 2:
            data[at : at + 1] = bytes([generator.randrange(256)])
        else:
            other = generator.randrange(len(data) + 1)
            data[at:at] = data[other : other + generator.randint(1, 30)]
    load_data(bytes(data))


def load_data(data: bytes) -> None:
    from pipedist.spec.load import Loader

    found: tuple[Problem, ...] = ()
    try:
        _, problems = read_yaml(data, "f")
        Loader(problems, "/").load("f", {}, (), {})
    except SpecError as error:
        found = error.problems
        assert found
    for problem in found:
        assert re.fullmatch(r"f:\d+:\d+", problem.where)
        assert problem.message
        assert problem.expected


ODD = [None, True, -1, 2**70, 1.5, float("nan"), "", "x", "a:b", "${", "${params.x}", [], [1], (), {}, {1: 2},
       {None: "x"}, {("a", 1): 2}, b"bytes", object(), len, {"run": "m:f"}, {"stop": "x"}, ["a", {"b": 1}],
       {"": 1}, 10**5000, np.zeros(2)]  # fmt: skip


def replaced(tree: object, generator: random.Random) -> object:
    """Return `tree` with one of its values or keys replaced by something odd."""
    if isinstance(tree, dict) and tree and generator.random() < 0.85:
        key = generator.choice(list(tree))
        if generator.random() < 0.15:
            odd = generator.choice([None, 5, "", "x", True, ("a", 1), key])
            return {odd if name == key else name: value for name, value in tree.items()}
        return {**tree, key: replaced(tree[key], generator)}
    return generator.choice(ODD)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_dicts_with_odd_values_load_or_give_paths(seed: int) -> None:
    generator = random.Random(seed)
    shipped = [path.read_bytes() for path in sorted((ROOT / "specs").glob("*.yaml"))]
    tree = read_yaml(generator.choice(shipped), "f")[0].value
    for _ in range(generator.randint(1, 3)):
        tree = replaced(tree, generator)
    found: tuple[Problem, ...] = ()
    try:
        load(tree if isinstance(tree, dict) else {"x": tree}, env={})
    except SpecError as error:
        found = error.problems
    for problem in found:
        assert problem.where
        assert problem.message
        assert problem.expected
        assert "object at 0x" not in str(problem)
        assert "Input should" not in str(problem), "this type of pydantic's errors has no phrase"


def places(tree: object, path: tuple[object, ...] = ()) -> Iterator[tuple[object, ...]]:
    yield path
    for key, item in tree.items() if isinstance(tree, dict) else ():
        yield from places(item, (*path, key))


def with_value(tree: object, path: tuple[object, ...], value: object) -> Any:
    if not path:
        return value
    assert isinstance(tree, dict)
    return {key: with_value(item, path[1:], value) if key == path[0] else item for key, item in tree.items()}


@pytest.mark.parametrize("odd", [10**5000, np.zeros(2)], ids=["digits", "array"])
def test_values_without_repr_or_equality_are_reported_at_any_place(odd: object) -> None:
    tree = {
        "pipedist": 1,
        "replicas": 2,
        "params": {"a": 1},
        "cluster": {"launcher": "connect", "listen": "tcp://127.0.0.1:1", "key_file": "k"},
        "datasets": {"d": {"range": {"stop": 4}, "batch": 2}},
        "stages": {
            "r": {"run": "m:f", "with": {"x": "a${params.a}"}, "resources": {"gpus": 1}, "collectives": {}},
            "m": {"reduce": "mean", "of": "r", "axis": 0, "per": "step"},
            "u": {"update": "m:u", "of": "m", "init": {"function": "m:i", "with": {"x": 1}}},
        },
        "outputs": {"m": "m.json"},
    }
    load(tree, env={})
    for path in places(tree):
        changed = with_value(tree, path, odd)
        with suppress(SpecError):
            load(changed if isinstance(changed, dict) else {"x": changed}, env={})
    assert str(load(tree, params={"a": 10**5000}, env={}).stages["r"].with_["x"]).startswith("a0x")
