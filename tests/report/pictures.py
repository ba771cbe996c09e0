"""Make the pictures of the docs from a real run: `make pictures`.

A run with the death of a worker and a quarantined element waits after two thirds of its steps: then its live page and
the terminal view are drawn. A notebook in a real kernel executes it again, without a wait; the report is of that run.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

BYTES_MAX = 200 * 1024
SCHEMES = ("light", "dark")
STEPS_BEFORE = 14
WAIT_S = 60

CELLS = (
    "import pipedist",
    "result = pipedist.run('flowers.yaml', workers=3)\nresult",
    "pipedist.PerReplica([{'loss': 0.31, 'seen': 12}, {'loss': 0.28, 'seen': 12}, {'loss': 0.35, 'seen': 11}])",
    "async with pipedist.open('flowers.yaml', output='again') as run:\n    pass\nrun.plan",
)
WITHOUT_FOLDER = """  // the temporary folder is another one each time
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const node = walker.currentNode, at = node.nodeValue.indexOf(arguments[0] + "/pipedist-pictures-");
  if (at < 0) continue;
  const rest = node.nodeValue.slice(at).replace(/^.*?pictures-[^/]*[/]/, "");
  node.nodeValue = node.nodeValue.slice(0, at) + rest;
}"""
PAGE = """<!doctype html><meta charset="utf-8"><meta name="color-scheme" content="light dark"><style>
body {{ font: 14px/1.45 system-ui, "DejaVu Sans", sans-serif; margin: 16px; max-width: 1100px; }}
.source {{ border: 1px solid #8886; background: #8881; padding: 6px 10px; border-radius: 4px; margin: 14px 0 6px; }}
pre {{ font: 12.5px/1.4 Menlo, "DejaVu Sans Mono", monospace; margin: 4px 0; overflow-x: auto; }}
table {{ border-collapse: collapse; margin: 8px 0; font-size: 12.5px; }} th, td {{ padding: 3px 12px 3px 4px; }}
tr:nth-child(odd) {{ background: #8881; }} .output {{ overflow-x: auto; padding-left: 10px; }} p {{ margin: 4px; }}
</style>{}"""


def score(x: np.ndarray, folder: str, ctx: Any) -> dict[str, Any]:
    """Score some elements slowly; die once, and wait for `go` at two thirds."""
    first = Path(folder) / "died"
    if ctx.step == 5 and ctx.replica_id_in_sync_group == 1 and not first.exists():
        first.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    while ctx.step >= STEPS_BEFORE and not (Path(folder) / "go").exists():
        time.sleep(0.01)
    if (x == 137).any():
        raise ValueError("flower 137 has no petals")
    time.sleep(0.004 * len(x) + 0.0001 * float(x[0] % 97))
    return {"id": x, "score": np.round(1 / (1 + np.exp(-(x - 120) / 60)), 4)}


def loss(x: dict[str, Any]) -> float:
    return float(np.sum(1 - x["score"]))


def flowers(folder: Path) -> dict[str, Any]:
    return {
        "pipedist": 1,
        "name": "flowers",
        "replicas": 3,
        "dataset": {"range": 240, "batch": 12},
        "stages": {
            "scores": {
                "run": "flowers:score",
                "with": {"folder": str(folder)},
                "on_error": "quarantine",
            },
            "losses": {"run": "flowers:loss", "of": "scores"},
            "table": {"gather": 0, "of": "scores"},
            "curve": {"reduce": "sum", "of": "losses", "axis": None, "per": "step"},
        },
        "outputs": {"table": "table.csv", "curve": "curve.npy"},
    }


def main(target: Path) -> None:
    from tests.report.test_browser import opened_browser

    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="pipedist-pictures-") as name, opened_browser() as browser:
        folder = Path(name)
        shutil.copy(__file__, folder / "flowers.py")  # a module of the user, whose name the plan shows
        run(folder, target, browser)
        notebook(folder, target, browser)
        report(folder, target, browser)
    for path in sorted(target.iterdir()):
        size = path.stat().st_size
        print(f"{path}: {size / 1024:.0f} KiB")
        assert size <= BYTES_MAX, f"{path} has more than {BYTES_MAX:,} bytes"


def run(folder: Path, target: Path, browser: Chrome) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    from pipedist.report import collect
    from tests.report.test_live import executing

    out = folder / "out" / "flowers"
    with executing(folder, spec=flowers(folder), workers=3) as executed:
        while "passes" not in (status := collect(out, live=True)["status"]) or (
            status["passes"][0]["steps_done"] < STEPS_BEFORE
        ):
            time.sleep(0.1)
        browser.get(executed.url)
        steps = f"{STEPS_BEFORE} of 20 steps"
        WebDriverWait(browser, WAIT_S).until(
            lambda driver: steps in driver.find_element("tag name", "main").text
        )
        for scheme in SCHEMES:
            shot(browser, target / f"live-{scheme}.png", 1280, scheme, height_max=1000)
        terminal(collect(out, live=True), target / "terminal.svg")
        code, errors = executed.end()
        assert code == 3, errors


def report(folder: Path, target: Path, browser: Chrome) -> None:
    from pipedist.report import collect, page

    path = folder / "report.html"
    path.write_text(page(collect(folder / "out" / "flowers")))
    browser.get(path.as_uri())
    for scheme in SCHEMES:
        shot(browser, target / f"report-{scheme}.png", 1280, scheme, height_max=1_500)
    shot(browser, target / "report-phone.png", 400, "light", height_max=1_600)


def terminal(data: dict[str, Any], path: Path) -> None:
    import io

    from rich.console import Console

    from pipedist.cli.watch_command import screen_of

    console = Console(record=True, width=100, file=io.StringIO(), force_terminal=True)
    console.print(screen_of(data))
    svg = console.export_svg(title="pipedist watch out/flowers", unique_id="terminal")
    path.write_text(re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL))  # fonts of another site


def notebook(folder: Path, target: Path, browser: Chrome) -> None:
    shutil.rmtree(folder / "out")
    (folder / "died").unlink()
    (folder / "flowers.yaml").write_text(json.dumps(flowers(folder)))
    path = folder / "notebook.html"
    path.write_text(PAGE.format("".join(cells_of(folder))))
    browser.get(path.as_uri())
    for scheme in SCHEMES:
        shot(browser, target / f"notebook-{scheme}.png", 1120, scheme)


def cells_of(folder: Path) -> list[str]:
    from tests.runs.test_notebooks import executed

    parts = []
    for source, outputs in zip(CELLS, executed(folder, CELLS), strict=True):
        parts.append(f'<pre class="source">{escape(source)}</pre>')
        for output in outputs:
            text = f"<pre>{escape(output.get('text', ''))}</pre>"
            parts.append(f'<div class="output">{output.get("data", {}).get("text/html", text)}</div>')
    return parts


def shot(browser: Chrome, path: Path, width: int, scheme: str, height_max: int = 4_000) -> None:
    """Write a picture of the whole page, or of its beginning."""
    from tests.report.test_browser import emulate

    emulate(browser, width, scheme)
    wanted = browser.execute_script("return document.documentElement.scrollHeight")
    emulate(browser, width, scheme, min(height_max, wanted))
    browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    browser.execute_script(WITHOUT_FOLDER, tempfile.gettempdir())
    data = browser.execute_cdp_cmd("Page.captureScreenshot", {})["data"]
    path.write_bytes(base64.b64decode(data))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
