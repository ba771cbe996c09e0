"""Damage to specs, decided by a seed: to their text, their structure, their values."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

VALUES = (
    "no", "yes", "on", "~", "null", "true", "1:20", "0o17", "010", "0x1F", "1_000", ".inf", "-.inf", ".nan",
    "NaN", "1e999", "-1", "0", "1.5", "9" * 30, "9" * 400, "-9223372036854775809", "''", "'x'", "[]", "{}",
    "[1, [2, [3]]]", "{a: {b: c}}", "*a", "&a x", "!!int '3'", "!!python/object:os.system x", "!x y",
    '"${params.x}"', '"${env.HOME}"', '"${stages.}"', '"${"', "${state.w}", "m:f", "os:system",
    "../x:y", "m:f()", "m:__import__('os')", "../../etc/passwd.json", "/etc/passwd", "x.npy", "x.JSON",
    "2001-01-01", "|\n    text", ">\n    text", "? a", "- 1", "<<", "a: b: c", "@x", "`x`", "%x", "\\x00",
    "'\N{ZERO WIDTH SPACE}'", "é", "sum", "mean", "0", "local", "connect", "dataset",
)  # fmt: skip
"""What may stand in the place of a value."""

KEYS = ("run", "reduce", "gather", "update", "of", "axis", "per", "with", "init", "until", "batch", "epochs",
        "shuffle", "range", "csv", "path", "pipedist", "replicas", "stages", "outputs", "dataset", "datasets",
        "cluster", "params", "seed", "timeout_s", "retries", "on_error", "collectives", "1", "null", "<<", "",
        "rnu", "Stages", "stage s", "'a\\nb'", "[a, b]", "{a: b}", "? x")  # fmt: skip
"""What may stand in the place of a key."""

BOMBS = (
    lambda r: "[" * r.randint(1, 3000),
    lambda r: "{a: " * r.randint(1, 2000),
    lambda r: "- " * r.randint(1, 3000),
    lambda r: "k: [" + "1, " * r.randint(1, 5000) + "1]",
    lambda r: "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40)),
    lambda r: "\n" + "".join(" " * i + f"k{i}:\n" for i in range(r.randint(1, 100))),
    lambda r: "x" * r.randint(1, 40_000),
    lambda r: "# " + "y" * 500 + "\n",
    lambda r: "\n---\n",
    lambda r: "'" + "${" * r.randint(1, 1000),
)


def mutated(corpus: Sequence[bytes], seed: int) -> bytes:
    """Return one of the specs, damaged in one to three places."""
    random = Random(seed)
    data = random.choice(corpus)
    for _ in range(random.choice((1, 1, 2, 3))):
        what = random.randrange(10)
        if what < 6:
            data = _line(data, random)
        elif what < 9:
            data = _bytes(data, random)
        else:
            at = random.randrange(len(data) + 1)
            data = data[:at] + random.choice(BOMBS)(random).encode() + data[at:]
    return data


def _line(data: bytes, random: Random) -> bytes:
    lines = data.split(b"\n")
    at = random.randrange(len(lines))
    line = lines[at]
    head, colon, tail = line.partition(b":")
    what = random.randrange(7)
    if what == 0:
        lines[at] = head + b": " + random.choice(VALUES).encode()
    elif what == 1:
        indent = line[: len(line) - len(line.lstrip())]
        lines[at] = indent + random.choice(KEYS).encode() + colon + tail
    elif what == 2:
        del lines[at]
    elif what == 3:
        lines.insert(random.randrange(len(lines) + 1), line)
    elif what == 4:
        lines[at] = b" " * random.randrange(1, 5) + line
    elif what == 5:
        lines[at] = line[random.randrange(3) :]
    else:  # a value inside of a flow mapping
        places = [i for i in range(len(line)) if line[i : i + 1] in b",:[{"]
        if places:
            cut = random.choice(places) + 1
            lines[at] = line[:cut] + b" " + random.choice(VALUES).encode() + line[cut + random.randrange(6) :]
    return b"\n".join(lines)


def _bytes(data: bytes, random: Random) -> bytes:
    at = random.randrange(len(data) + 1)
    what = random.randrange(4)
    if what == 0:
        return data[:at] + data[at + random.randrange(1, 9) :]
    if what == 1:
        return data[:at] + bytes([random.randrange(256)]) + data[at + 1 :]
    if what == 2:
        return data[:at] + random.choice(VALUES).encode() + data[at:]
    other = random.randrange(len(data) + 1)
    return data[:at] + data[other : other + random.randrange(1, 60)] + data[at:]
