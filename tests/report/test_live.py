"""The live page over real HTTP, and in a real browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from pipedist.errors import UsageError
from pipedist.report.live import LiveOptions, names_of
from tests.preloaded import run_module
from tests.report.jobs import waiting

WAIT_S = 60


@dataclass
class Executing:
    """A run in another process, and its live page."""

    folder: Path
    process: subprocess.Popen[str]
    url: str

    def let_go(self) -> None:
        (self.folder / "go").touch()

    def end(self) -> tuple[int, str]:
        """Let the run end, and return its exit code and the rest of its standard error."""
        self.let_go()
        _, errors = self.process.communicate(timeout=WAIT_S)
        return self.process.returncode, errors


@contextmanager
def executing(
    folder: Path, *more: str, spec: dict[str, Any] | None = None, workers: int = 1
) -> Iterator[Executing]:
    """Execute a run with a live page, in processes of their own, until `go`."""
    (folder / "waiting.yaml").write_text(json.dumps(spec or waiting(folder)))
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-m", "pipedist", "run", "waiting.yaml", "--workers", str(workers), "--live", *more],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("live page: "):
                yield Executing(folder, process, line.removeprefix("live page: ").strip())
                return
        raise AssertionError("no live page was announced")
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executing]:
    with executing(tmp_path_factory.mktemp("live")) as run:
        yield run


def test_the_page_is_private_and_protected(live: Executing) -> None:
    answer = httpx.get(live.url)
    assert answer.status_code == 200
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert "access-control-allow-origin" not in answer.headers
    base, token = live.url.rstrip("/").rsplit("/", 1)
    assert len(token) >= 32
    for wrong in ("wrong", token[:-1], token + "x"):
        for page in ("", "events", "metrics"):
            assert httpx.get(f"{base}/{wrong}/{page}").status_code == 404
    assert httpx.get(f"{base}/").status_code == 404
    assert httpx.get(live.url, headers={"Host": "evil.example"}).status_code == 400
    assert httpx.post(live.url).status_code == 405


def test_events_are_newer_data(live: Executing) -> None:
    with httpx.stream("GET", f"{live.url}events", timeout=WAIT_S) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        line = next(line for line in answer.iter_lines() if line.startswith("data: "))
    data = json.loads(line.removeprefix("data: "))
    assert (data["name"], data["state"]) == ("waiting", "running")


def test_metrics_are_those_of_prometheus(live: Executing) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    found = {
        family.name: family for family in text_string_to_metric_families(httpx.get(f"{live.url}metrics").text)
    }
    (state,) = found["pipedist_run_state"].samples
    assert (state.labels["name"], state.labels["state"], state.value) == ("waiting", "running", 1.0)
    assert found["pipedist_calls"].type == "counter"
    assert found["pipedist_busy_seconds"].type == "counter"


def test_the_server_ends_with_its_run_after_the_last_state(tmp_path: Path) -> None:
    with executing(tmp_path) as run:
        states = []
        with httpx.stream("GET", f"{run.url}events", timeout=WAIT_S) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    states.append(json.loads(line.removeprefix("data: ")))
                    run.let_go()
        code, errors = run.end()
        assert code == 0, errors
        assert states[0]["state"] == "running"
        assert states[-1]["state"] == "finished"
        assert [output["file"] for output in states[-1]["outputs"]] == ["out.npy"]
        with pytest.raises(httpx.ConnectError):
            httpx.get(run.url)


@pytest.mark.slow
def test_the_server_ends_with_a_run_that_is_killed(tmp_path: Path) -> None:
    with executing(tmp_path) as run:
        states = []
        with httpx.stream("GET", f"{run.url}events", timeout=WAIT_S) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    states.append(json.loads(line.removeprefix("data: "))["state"])
                    run.process.kill()
        assert (states[0], states[-1]) == ("running", "interrupted")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"address": "0.0.0.0:8080"}, "0.0.0.0 can be reached from other hosts"),
        ({"address": "[::]:8080"}, ":: can be reached from other hosts"),
        ({"address": "example.org:80", "token_file": "t"}, "example.org can be reached from other hosts"),
        ({"address": "8080"}, "'8080' is not an address"),
        ({"address": "localhost:99999"}, "'localhost:99999' is not an address"),
        ({"cert": "cert.pem"}, "--live-cert and --live-key are given together"),
        ({"token_file": "missing"}, "the token can't be read from missing"),
    ],
)
def test_a_page_is_never_served_unprotected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("[", r"\[")):
        LiveOptions(**options).checked()


def test_other_hosts_may_use_any_name_of_the_server_and_local_pages_only_its_own() -> None:
    assert names_of("0.0.0.0") == ["*"]
    assert "*" not in names_of("127.0.0.1")
    assert "localhost" in names_of("::1")


def test_a_page_for_other_hosts_is_served_with_tls_and_the_given_token(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate: apt-get install openssl")
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -keyout key.pem -out cert.pem -days 2 -subj /CN=localhost"
    )
    command += " -addext subjectAltName=DNS:localhost,IP:127.0.0.1"
    subprocess.run(command.split(), cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "token").write_text("abcdefghijklmnopqrstuvwx\n")
    options = ("--live-cert", "cert.pem", "--live-key", "key.pem", "--live-token-file", "token")
    with executing(tmp_path, "--live-address", "0.0.0.0:0", *options) as run:
        port = run.url.removesuffix("/abcdefghijklmnopqrstuvwx/").removeprefix("https://0.0.0.0:")
        trusted = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
        url = f"https://localhost:{port}/abcdefghijklmnopqrstuvwx/"
        answer = httpx.get(url, verify=trusted, headers={"Host": "node7.example"})
        assert (answer.status_code, answer.headers["cache-control"]) == (200, "no-store")
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://localhost:{port}/abcdefghijklmnopqrstuvwx/")


def test_a_weak_token_is_refused(tmp_path: Path) -> None:
    token = tmp_path / "token"
    for text in ("short", "x" * 20 + "/", ""):
        token.write_text(text)
        with pytest.raises(UsageError, match="must have at least 16 letters"):
            LiveOptions(token_file=str(token)).checked()
    token.write_text("abcdefghijklmnopqrst\n")
    assert LiveOptions(token_file=str(token)).checked() == ("127.0.0.1", 0, "abcdefghijklmnopqrst")


def test_unusable_options_are_reported_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "waiting.yaml").write_text(json.dumps(waiting(tmp_path)))
    command = ("pipedist", "run", "waiting.yaml", "--live", "--live-address", "0.0.0.0:1")
    done = run_module(*command, cwd=tmp_path)
    assert done.returncode == 2
    assert "add --live-token-file FILE --live-cert FILE --live-key FILE" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_run_is_watched_in_the_terminal_until_it_ends(live: Executing) -> None:
    watching = subprocess.Popen(
        [sys.executable, "-m", "pipedist", "watch", "out/waiting"],
        cwd=live.folder,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert watching.stdout is not None
    first = watching.stdout.readline()
    assert first.startswith("waiting: phase 1 of 1, ")
    assert "y: 0 of 4 steps" in first
    code, _ = live.end()
    rest, _ = watching.communicate(timeout=WAIT_S)
    assert (code, watching.returncode) == (0, 0)
    assert rest.endswith("in out/waiting: finished\n")


@pytest.mark.parametrize("command", ["watch", "why"])
def test_a_failed_run_shows_its_error_and_the_command_that_continues_it(tmp_path: Path, command: str) -> None:
    (tmp_path / "broken.py").write_text("def f(shard):\n    raise ValueError('the sensor was offline')\n")
    spec = {"pipedist": 1, "dataset": {"range": 2, "batch": 1}, "outputs": {"all": "all.npy"}}
    stages = {"y": {"run": "broken:f"}, "all": {"gather": 0, "of": "y"}}
    (tmp_path / "broken.yaml").write_text(json.dumps(spec | {"stages": stages}))
    assert run_module("pipedist", "run", "broken.yaml", "-w", "1", cwd=tmp_path).returncode == 1
    done = run_module("pipedist", command, "out/broken", cwd=tmp_path)
    assert done.returncode == 1
    shown = done.stdout + done.stderr
    assert "ValueError: the sensor was offline" in shown
    assert re.search(r"^  pipedist run broken.yaml .*--resume$", shown, re.MULTILINE), shown
    if command == "why":
        document = json.loads(run_module("pipedist", command, "--json", "out/broken", cwd=tmp_path).stdout)
        assert "ValueError: the sensor was offline" in document["failure"]
