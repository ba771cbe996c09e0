from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import types
from collections.abc import Callable

import pytest

from pipedist.cli import main
from pipedist.cli.signals import SIGNALS, Interruption
from pipedist.cli.terminal import Interrupted, guarded


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test waits for the end of the process that comes by itself: it is to come after all of them."""
    monkeypatch.setattr("pipedist.cli.signals._END_S", 600.0)


class FakeRun:
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.called = asyncio.Event()

    def drain(self) -> None:
        self.calls.append("drain")
        self.called.set()

    def cancel(self) -> None:
        self.calls.append("cancel")
        self.called.set()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_the_first_signal_drains_and_the_second_cancels(number: int, code: int) -> None:
    told: list[str] = []
    ended: list[int] = []

    async def main() -> FakeRun:
        run = FakeRun()
        with interruption.watching(run, 10.0):
            for _ in range(2):
                os.kill(os.getpid(), number)
                await run.called.wait()
                run.called.clear()
            os.kill(os.getpid(), number)
        return run

    with Interruption(told.append, end=ended.append) as interruption:
        run = asyncio.run(main())
    assert run.calls == ["drain", "cancel"]
    assert interruption.exit_code == code
    assert ended == [code]  # the third one does not wait for anything
    assert "10 s to finish" in told[0]
    assert "at once" in told[1]


@pytest.mark.parametrize(("raised", "code"), [(KeyboardInterrupt(), 130), (Interrupted(143), 143)])
def test_where_a_class_is_made_too(
    raised: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in an import: Python 3.11 makes a RuntimeError of it there."""

    class Field:
        def __set_name__(self, owner: type, name: str) -> None:
            raise raised

    def imports() -> int:
        type("Class", (), {"field": Field()})
        raise AssertionError("nobody was interrupted")

    assert guarded(imports) == code
    monkeypatch.setattr("pipedist.cli.app.main", imports)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130  # nobody has looked for another signal yet
    assert not capsys.readouterr().err


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_in_a_callback_that_cannot_raise_ends_the_process(name: str, code: int) -> None:
    """Such as the callbacks of weak references that an import has."""
    script = f"""
import signal, weakref
from pipedist import cli
from pipedist.cli import app, signals

class Lock: pass

def command():
    with signals.Interruption(print):
        lock = Lock()
        reference = weakref.ref(lock, lambda _: signal.raise_signal(signal.{name}))
        del lock
    raise SystemExit(0)

app.main = command
cli.main()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


def test_before_the_run_a_signal_ends_the_process() -> None:
    with Interruption(lambda text: None) as interruption, pytest.raises(Interrupted) as caught:
        signal.raise_signal(signal.SIGTERM)
    assert caught.value.exit_code == 143
    assert interruption.exit_code == 143


def test_a_busy_loop_does_not_keep_the_third_signal_from_ending_the_process() -> None:
    ended: list[int] = []

    async def main() -> None:
        with interruption.watching(FakeRun(), 10.0):
            for _ in range(3):  # the loop never gets to run
                os.kill(os.getpid(), signal.SIGINT)
        assert ended == [130]

    with Interruption(lambda text: None, end=ended.append) as interruption:
        asyncio.run(main())


async def opening(interruption: Interruption, then: Callable[[], None]) -> None:
    with interruption.lifetime():
        os.kill(os.getpid(), signal.SIGTERM)
        then()
        await asyncio.Event().wait()


def test_while_a_run_is_opened_a_signal_raises_nothing_where_it_comes_and_cancels() -> None:
    went_on: list[bool] = []
    with Interruption(lambda text: None) as interruption, pytest.raises(asyncio.CancelledError):
        asyncio.run(opening(interruption, lambda: went_on.append(True)))
    assert went_on
    assert interruption.exit_code == 143


def test_an_opening_that_does_not_end_is_ended() -> None:
    ended: list[int] = []
    with Interruption(lambda text: None, end=ended.append) as interruption:
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(opening(interruption, lambda: os.kill(os.getpid(), signal.SIGTERM)))
        assert ended == [143]
        timer = interruption._watchdog
        assert timer is not None
        assert timer.is_alive(), "the loop has not seen to it yet"


def test_a_signal_that_comes_before_the_run_and_is_seen_in_it_drains() -> None:
    run = FakeRun()

    async def main() -> None:
        with interruption.lifetime():
            os.kill(os.getpid(), signal.SIGINT)
            with interruption.watching(run, 10.0):
                await run.called.wait()
            timer = interruption._watchdog
            assert timer is not None
            await asyncio.to_thread(timer.join, 30)
            assert not timer.is_alive(), "it was not called off"

    with Interruption(lambda text: None, end=lambda code: pytest.fail("it drains")) as interruption:
        asyncio.run(main())
    assert run.calls == ["drain"]


def test_while_a_run_is_closed_a_signal_lets_that_go_on() -> None:
    async def main() -> str:
        with interruption.lifetime():
            with interruption.watching(FakeRun(), 10.0):
                pass
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            return "closed"

    with Interruption(lambda text: None) as interruption:
        assert asyncio.run(main()) == "closed"


def test_handlers_are_given_back() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with Interruption(lambda text: None):
        assert [signal.getsignal(number) for number in SIGNALS] != before
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_what_is_ignored_stays_so() -> None:
    """`nohup pipedist run ...` outlives its terminal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interruption(lambda text: None) as interruption:
            signal.raise_signal(signal.SIGHUP)
            assert interruption.exit_code is None
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


class _Signalled(types.ModuleType):
    def __getattr__(self, name: str) -> object:
        if name == "RunOptions":  # what is imported first; pytest looks for others
            raise KeyboardInterrupt
        raise AttributeError(name)


def test_a_signal_while_a_command_is_imported_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """click would call that an abort, and end with 1."""
    monkeypatch.setattr(sys, "argv", ["pipedist", "run", "spec.yaml"])
    monkeypatch.setattr("pipedist.cli._limit_threads", lambda: None)  # this process goes on with other tests
    monkeypatch.setitem(sys.modules, "pipedist.cli.run_command", _Signalled("run_command"))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert "Aborted" not in capfd.readouterr().err


def test_a_signal_before_a_command_is_imported_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pipedist.cli._limit_threads", interrupted)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
