"""The HTML page of a report: one file, without any access to a network.

The page has the data as JSON, and a script that draws it. A Content-Security-Policy with the digests of script and
style allows nothing else, so text of the user's data can never be executed.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from importlib.resources import files
from typing import Any

from pipedist._version import __version__


def page(data: dict[str, Any], *, stream: str = "") -> str:
    """Return a report as an HTML document.

    Args:
        data: what `collect` returned.
        stream: the address, relative to the page, of server-sent events with newer data; "": none.
    """
    script, style = _part("page.js"), _part("page.css")
    fields = {
        "policy": html.escape(content_policy(connects=bool(stream))),
        "title": html.escape(f"{data['name']}: {data['state']}"),
        "version": html.escape(__version__),
        "stream": html.escape(stream),
        "style": style,
        "script": script,
        "data": embedded(data),
    }
    return re.sub("@@([a-z]+)@@", lambda found: fields[found[1]], _part("page.html"))


def content_policy(*, connects: bool) -> str:
    """Return the Content-Security-Policy of a page, which may get data from its own server if it `connects`."""
    connect = "'self'" if connects else "'none'"
    script, style = _digest(_part("page.js")), _digest(_part("page.css"))
    return (
        f"default-src 'none'; script-src 'sha256-{script}'; style-src 'sha256-{style}'; img-src data:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


def embedded(data: dict[str, Any]) -> str:
    """Return JSON that can stand inside a script element."""
    text = json.dumps(data, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _part(name: str) -> str:
    return (files("pipedist.report") / name).read_text(encoding="utf-8")
