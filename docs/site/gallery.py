"""Makes the pages of the gallery from the READMEs and pictures of `examples/`."""

from __future__ import annotations

import re
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
LINK = re.compile(r"(?<!\!)\]\(([\w.]+)\)")
READMES = {
    f"examples/{path.parent.name}/README.md": f"gallery/{path.parent.name}.md"
    for path in EXAMPLES.glob("*/README.md")
}


def pages() -> dict[str, str]:
    """Return the text of each page, and each picture, by its path in the site."""
    found = {}
    for readme in sorted(EXAMPLES.glob("*/README.md")):
        name = readme.parent.name
        text = readme.read_text(encoding="utf-8").replace("](picture.svg)", f"]({name}.svg)")
        found[f"gallery/{name}.md"] = LINK.sub(
            lambda match, name=name: (  # type: ignore[misc]
                match[0] if match[1] == f"{name}.svg" else f"](../../examples/{name}/{match[1]})"
            ),
            text,
        )
        found[f"gallery/{name}.svg"] = (readme.parent / "picture.svg").read_text(encoding="utf-8")
    return found
