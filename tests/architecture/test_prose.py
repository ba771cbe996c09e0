"""Plain English: wording that the project's writing rules forbid stays out of code and documents."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import pipedist

PACKAGE = Path(pipedist.__file__).parent
ROOT = PACKAGE.parent

PATTERNS = {
    "a person as the subject": r"\b(whoever|nobody|somebody|someone who|he who|whom)\b",
    "'who' as the subject": r"(?:^|[.;:(]\s+)who\b",
    "'what is ...' as the subject": r"(?:^|[.;:]\s+)what (?:is|was|has|does|it|a|the)\b(?![^.;:]*\?)",
    "a fronted 'Of ...:'": r"(?:^|[.;]\s+)of (?:a|an|the|one|each|all|this|it)\b[^.;,]{0,60}[:,]",
    "'so many'": r"\bso (?:many|few|much) (?!that)\w+",
    "a verb of speech for an effect": r"\b(?:is|are|was|were|be|been|being) (?:told|said|asked for its|heard)\b",
    "'says nothing' and the like": r"\b(?:says|said|tells|told) (?:so|nothing|why|what|which|who|how|it|of)\b",
    "'hangs on'": r"\bhang(?:s|ing)? on\b|\bhung on\b",
    "'mend'": r"\bmend(?:s|ed|ing)?\b",
    "'do again' for repeat": r"\b(?:is|are|be|was|were) done again\b",
    "a building": r"\b(?:doors?|floors?|houses?|roads?|doorstep)\b(?! ?(?:or ceil|\())",
    "a court": r"\b(?:guilty|innocent|suspects?|courtroom)\b",
    "a staff": r"\b(?:keepers?|crews?|muster|lay(?:s)? off|laid off|expel(?:s|led)?|turn(?:s|ed)? away)\b",
    "'the bar'": r"\bthe bar\b(?! chart)",
    "a poem": r"\b(?:thirsty|fruitless|bury|buried|forgiven?|whereabouts|baton|rous(?:e|es|ed|ing))\b",
    "'leave out' for skip": r"\b(?:leaves?|left) out\b",
    "'in vain'": r"\bin vain\b",
    "'let go'": r"\b(?:let|lets|letting) go\b",
    "'come apart'": r"\b(?:come|comes|came) (?:apart|of it|to life)\b",
}
"""What the rule is called, and the pattern: in lower case, on text whose lines are joined."""

FOUND = {name: re.compile(pattern, re.MULTILINE) for name, pattern in PATTERNS.items()}


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of each comment block and string of a Python file, or paragraph of a document."""
    if path.suffix == ".py":
        block: list[str] = []
        first = 0
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            if token.type == tokenize.COMMENT:
                first = first if block else token.start[0]
                block.append(token.string.lstrip("# "))
            elif token.type in (tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)):
                yield token.start[0], token.string.lstrip("rbfRBF").strip("\"'")
            elif token.type not in (tokenize.NL, tokenize.INDENT, tokenize.DEDENT) and block:
                yield first, "\n".join(block)
                block = []
        return
    line = 1
    for paragraph in path.read_text().split("\n\n"):
        yield line, paragraph
        line += paragraph.count("\n") + 2


def violations(path: Path) -> Iterator[str]:
    for line, text in texts(path):
        plain = re.sub(r"`[^`]*`", "x", text).lower()
        joined = re.sub(r"(?<!\n)\n(?!\n)", " ", plain)  # a sentence goes on after the end of a line
        for name, pattern in FOUND.items():
            for match in pattern.finditer(joined):
                at = line + plain[: match.start()].count("\n")
                yield f"{path.relative_to(ROOT)}:{at}: {name}: {match.group(0).strip()!r}"


DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize(
    "folder", [*sorted(p.name for p in PACKAGE.iterdir() if p.is_dir() and p.name != "__pycache__"), "."]
)
def test_the_code_reads_as_plain_english(folder: str) -> None:
    paths = sorted(PACKAGE.glob("*.py") if folder == "." else (PACKAGE / folder).rglob("*.py"))
    found = [one for path in paths for one in violations(path)]
    assert not found, f"{len(found)} places:\n" + "\n".join(found)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_documents_read_as_plain_english(path: Path) -> None:
    found = list(violations(path))
    assert not found, f"{len(found)} places:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "Who asks is sent away.",
        "Nobody waits behind a call.",
        "The worker is told of it.",
        "It hangs on the input.",
        "The guilty element.",
        "Of a finished run: print it.",
    ],
)
def test_the_patterns_find_what_they_forbid(text: str, tmp_path: Path) -> None:
    assert any(pattern.search(text.lower()) for pattern in FOUND.values())
