"""Pages that the site build generates, and links from pages to files of the repository.

- The spec, the command line and the Python API are generated from the code, so they are not committed. The pages of the
  gallery are the READMEs of the examples.
- A link to a file outside `docs/` leads to a page with its text, one to the README of an example to its page in the
  gallery; a link to a missing file is an error.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority, get_plugin_logger
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(Path(__file__).parent))

import api  # noqa: E402  # beside this file
import command_line  # noqa: E402
import gallery  # noqa: E402
import language  # noqa: E402
import scheduler  # noqa: E402

LINK = re.compile(r"(?<!\!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#:]+)(#[^)\s]*)?\)")
SOURCES = "sources"
LEXERS = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".sh": "bash", "": "make"}
GENERATED = {
    "reference/spec.md": language.reference,
    "reference/command-line.md": command_line.reference,
    **{f"reference/api/{name}.md": page for name, page in api.pages().items()},
}
OTHER_PAGES = "<!-- generated: how-to pages of no other group -->"
TABLES = {"<!-- generated: scheduler -->": scheduler.tables}

# In the search, pages that answer questions come before references, which repeat the words more often.
BOOSTS = {"reference/api/": 0.4, "reference/spec.md": 0.6, "contributing/": 0.2}

log = get_plugin_logger("pipedist")


@event_priority(100)  # before the plugin that reads the navigation from the folders
def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, page in GENERATED.items():
        files.append(File.generated(config, path, content=page()))
    for path, text in gallery.pages().items():
        files.append(File.generated(config, path, content=text))
    linked = {}
    for file in files.documentation_pages():
        for match in LINK.finditer(file.content_string):
            if (path := _outside(file.src_uri, match[2])) and path not in gallery.READMES:
                linked[path] = file.src_uri
    for path, page in sorted(linked.items()):
        try:
            text = (ROOT / path).read_text(encoding="utf-8")
        except OSError:
            log.warning(f"{page} links to {path}, which is not a file of the repository")
            continue
        source = f"{SOURCES}/{path}.md"
        content = _source_page(path, text)
        files.append(File.generated(config, source, content=content, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    for folder, boost in BOOSTS.items():
        if page.file.src_uri.startswith(folder):
            page.meta.setdefault("search", {"boost": boost})
    if OTHER_PAGES in markdown:
        markdown = markdown.replace(OTHER_PAGES, _other_pages(markdown, page.file.src_uri, files))
    for marker, table in TABLES.items():
        if marker in markdown:
            markdown = markdown.replace(marker, table())

    def link(match: re.Match[str]) -> str:
        path = _outside(page.file.src_uri, match[2])
        if path is None:
            return match[0]
        page_of = gallery.READMES.get(path, f"{SOURCES}/{path}.md")
        target = posixpath.relpath(page_of, posixpath.dirname(page.file.src_uri) or ".")
        return f"[{match[1]}]({target}{match[3] or ''})"

    return LINK.sub(link, markdown)


def _other_pages(markdown: str, index: str, files: Files) -> str:
    """Return a list of the pages in the folder of an index that it does not mention."""
    folder = posixpath.dirname(index)
    lines = []
    for file in files.documentation_pages():
        name = posixpath.basename(file.src_uri)
        if (
            posixpath.dirname(file.src_uri) == folder
            and file.src_uri != index
            and f"({name})" not in markdown
        ):
            title = file.content_string.partition("\n")[0].removeprefix("# ")
            lines.append(f"- [{title}]({name})")
    return "\n".join(["**More**:", "", *sorted(lines)]) if lines else ""


def _outside(page: str, target: str) -> str | None:
    """Return the path in the repository that a page links to, if it is outside `docs/`."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
    return None if path.startswith(("docs/", "../", "/")) or page.startswith(SOURCES) else path


def _source_page(path: str, text: str) -> str:
    head = f"---\ntitle: {path}\nsearch: {{exclude: true}}\nhide: [toc]\n---\n\n"
    if path.endswith(".md"):
        return head + re.sub(r"\]\((?!https?:)[^)]*\)", "]", text)  # its links are relative to another place
    fence = "`" * 6
    return f"{head}# `{path}`\n\n{fence}{LEXERS.get(Path(path).suffix, 'text')}\n{text}\n{fence}\n"
