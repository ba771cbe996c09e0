"""A digest of a function that is sent by value, which is the same in every process."""

from __future__ import annotations

import hashlib
import pickletools
import re
from collections import Counter

OPCODES_MAX = 200_000  # of a pickle that is read; it takes some 0.3 s

_TYPED_IN = re.compile(r"<i?python-input-[\w-]+>|.*[/\\]ipykernel_\d+[/\\]\d+\.py")
"""The file name of code that was typed in. It has the number of the input, or of the notebook's process."""


def _sha256(*parts: bytes | bytearray) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


def _maker(name: str) -> bytes:
    texts = (_sha256(f"SHORT_BINUNICODE {text!r}".encode()) for text in ("cloudpickle.cloudpickle", name))
    return _sha256(b"STACK_GLOBAL None", *texts)


_CLASS_MAKERS = (_maker("_make_skeleton_class"), _maker("_make_skeleton_enum"))
"""Digests of the functions whose last argument but one is the id of a class."""


def digest_of_pickle(pickled: bytes) -> str:
    """Return a digest of what a pickle of a function says, which is the same in every process.

    The bytes are not: equal strings are one object or several, which depends on whether the module was compiled or read
    from its bytecode; sets, as the constant `{"a", "b"}`, have the order of random hashes; classes have random ids;
    and the file of a notebook's cell has the number of a process.

    A function that captures very many objects has the digest of its bytes: reading them would delay the run.
    """
    stack: list[bytes] = []  # a digest of each object
    marks: list[int] = []  # lengths of the stack
    memo: list[bytes] = []
    copies: Counter[bytes] = Counter()  # number of equal objects in the memo, by digest
    removed = hashlib.sha256()  # of what was removed from the stack, as the results of calls that set a state
    before: object = None  # the argument of the opcode before
    for count, (opcode, argument, _) in enumerate(pickletools.genops(pickled)):
        if count == OPCODES_MAX:
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
