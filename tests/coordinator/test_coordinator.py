"""The coordinator on real workers: deaths, defects, log sinks, waiting for workers, call_step."""

from __future__ import annotations

import asyncio
import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from msgspec.structs import replace

import pipedist
from pipedist.coordinator import Coordinator, PassHandle
from pipedist.coordinator.inbound import Inbound, LogSinks
from pipedist.coordinator.outbound import LeaseOrder, Outgoing
from pipedist.coordinator.worker_registry import Peer
from pipedist.core.functions import reference
from pipedist.errors import LocalProtocolError
from pipedist.protocol import messages as msg
from pipedist.protocol.codec import UnsendableError
from pipedist.protocol.program import Emit, Program, StageProgram
from pipedist.scheduler import PassSettings, Scheduler
from tests.coordinator import functions
from tests.coordinator.wire import wired

F = "tests.coordinator.functions"
LOOSE = PassSettings(2, ordered=False, pulled=False)


def program(fn: Any, **kwargs: Any) -> Program:
    stage = StageProgram("s", reference(fn), -1, kwargs)
    return Program(seed=0, replicas=2, reader=None, stages=(stage,), emits=(Emit("v", 0),))


def opened(coordinator: Coordinator, fn: Any, **kwargs: Any) -> PassHandle:
    return coordinator.open_pass(program(fn, **kwargs), name="p", settings=LOOSE)


def gang(coordinator: Coordinator, fn: Any, **kwargs: Any) -> PassHandle:
    stage = StageProgram("s", reference(fn), -1, kwargs, collectives=True)
    made = replace(program(fn), stages=(stage,), gang=True)
    return coordinator.open_pass(made, name="p", settings=replace(LOOSE, gang=True))


def spec_of(run: str, n: int = 40, **with_: Any) -> dict[str, Any]:
    return {
        "pipedist": 1,
        "dataset": {"range": n, "batch": 2},
        "stages": {"y": {"run": f"{F}:{run}", "with": with_}, "out": {"gather": 0, "of": "y"}},
    }


@pytest.mark.asyncio
async def test_call_step_returns_each_step_separately() -> None:
    async with asyncio.timeout(60), pipedist.LocalCluster(workers=2) as cluster:
        handle = opened(cluster.coordinator, functions.fails_for_negative)
        steps = [[i, i + 1] if i % 3 else [i, -i - 1] for i in range(30)]
        answers = await asyncio.gather(*(handle.call_step(s) for s in steps), return_exceptions=True)
        for step, answer in zip(steps, answers, strict=True):
            if step[1] < 0:
                assert isinstance(answer, pipedist.CallError)
                assert answer.replica == 1
                assert isinstance(answer.__cause__, ValueError)
            else:
                assert answer == [{"v": step[0]}, {"v": step[1]}]
        assert handle.failed.raised == {}
        assert handle._inputs == {}
        assert handle._store._results == {}

        abandoned = asyncio.ensure_future(handle.call_step([1, 2]))
        await asyncio.sleep(0)
        abandoned.cancel()
        with pytest.raises(asyncio.CancelledError):
            await abandoned
        assert await handle.call_step([3, 4]) == [{"v": 3}, {"v": 4}]

        waiting = asyncio.ensure_future(handle.call_step([5, 6]))
        await asyncio.sleep(0)
        handle.close()
        with pytest.raises(pipedist.RunCancelled, match="p was closed"):
            await waiting
        with pytest.raises(pipedist.RunCancelled):
            await handle.call_step([7, 8])
        handle.close()
        assert cluster.coordinator._passes.handles == {}


@pytest.mark.asyncio
async def test_a_finished_step_keeps_its_result_when_the_pass_fails_later() -> None:
    async with asyncio.timeout(60), pipedist.LocalCluster(workers=1) as cluster:
        handle = opened(cluster.coordinator, functions.scaled)
        waiting = asyncio.ensure_future(handle.call_step([1, 2]))
        while not handle.counts.steps_visible:  # noqa: ASYNC110 - no event tells it
            await asyncio.sleep(0)
        handle.close()  # before the waiting task has had its turn
        assert await waiting == [{"v": 3}, {"v": 6}]


@pytest.mark.asyncio
async def test_an_unsendable_value_is_reported_at_once() -> None:
    async with asyncio.timeout(60), pipedist.LocalCluster(workers=1) as cluster:
        with pytest.raises(UnsendableError, match="bad"):
            opened(cluster.coordinator, functions.scaled, bad=object())
        handle = opened(cluster.coordinator, functions.scaled)
        with pytest.raises(pipedist.CallError) as caught:
            await handle.call_step([object(), 1])
        assert isinstance(caught.value.__cause__, UnsendableError)
        assert await handle.call_step([1, 2]) == [{"v": 3}, {"v": 6}]  # it failed its own step only


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.asyncio
async def test_a_gang_exchanges_over_either_transport_and_restarts_when_a_member_dies(
    tmp_path: Path, shared_memory: bool
) -> None:
    async with (
        asyncio.timeout(60),
        pipedist.LocalCluster(workers=2, shared_memory=shared_memory) as cluster,
    ):
        await cluster.ready()
        handle = gang(cluster.coordinator, functions.summed, folder=str(tmp_path))
        steps = [[np.float64(i), np.float64(2 * i)] for i in range(60)]
        answers = await asyncio.gather(*(handle.call_step(step) for step in steps))
        assert answers == [[{"v": 3.0 * i}] * 2 for i in range(60)]
        assert cluster.coordinator._gangs._gangs == {}
        await cluster.ready()
        assert await handle.call_step([1, 2]) == [{"v": 3}] * 2


@pytest.mark.asyncio
async def test_a_death_while_a_pass_is_being_bound(tmp_path: Path) -> None:
    async with asyncio.timeout(60), pipedist.LocalCluster(workers=1) as cluster:
        await cluster.ready()
        cluster.kill(0)
        async with pipedist.open(spec_of("dies_at", folder=str(tmp_path), at=7), cluster=cluster) as run:
            cluster.kill("w0")
            assert np.array_equal((await run.results())["out"], np.arange(40) * 2)
        await cluster.ready()
        assert cluster.coordinator._pool._due == {}
        assert len(cluster.pids) == 1
        for wrong in (1, "w1", "x"):
            with pytest.raises(pipedist.UsageError, match=r"no worker 'w?[1x]' .* can be killed: w0 to w0"):
                cluster.kill(wrong)


@pytest.mark.asyncio
async def test_a_cancelled_close_still_closes_the_socket() -> None:
    """asyncio's own cancellation, as of `asyncio.timeout`, ignores anyio's shields."""
    async with wired() as wire:
        closing = asyncio.ensure_future(wire.join("a").coordinator.__aexit__(None, None, None))
        await asyncio.sleep(0)  # it waits for the worker's Goodbye
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert wire.is_closed


@pytest.mark.asyncio
async def test_every_wait_for_workers_is_woken() -> None:
    async with asyncio.timeout(60), pipedist.LocalCluster(workers=2) as cluster:
        waits = [asyncio.ensure_future(cluster.coordinator.wait_ready(n)) for n in (2, 1, 2)]
        never = asyncio.ensure_future(cluster.coordinator.wait_ready(3))
        await asyncio.gather(*waits)
        assert cluster.coordinator.workers_ready == 2
    with pytest.raises(pipedist.RunCancelled):
        await never


@pytest.mark.asyncio
async def test_a_failed_cluster_fails_every_run_and_no_later_one_waits() -> None:
    async with asyncio.timeout(60), pipedist.LocalCluster(workers=2) as cluster:
        await cluster.ready()
        async with (
            pipedist.open(spec_of("scaled", n=2_000_000), cluster=cluster) as one,
            pipedist.open(spec_of("scaled", n=2_000_000), cluster=cluster) as two,
        ):
            ends = [asyncio.ensure_future(run.results()) for run in (one, two)]
            while two.progress() is None:  # noqa: ASYNC110 - no event tells it
                await asyncio.sleep(0)
            cluster.coordinator._fail_all(pipedist.WorkersLost("5 workers in a row died"))
            for end in ends:
                with pytest.raises(pipedist.WorkersLost, match="in a row"):
                    await end
        async with pipedist.open(spec_of("scaled"), cluster=cluster) as late:
            with pytest.raises(pipedist.WorkersLost):
                await late.results()


@pytest.mark.asyncio
async def test_one_of_two_runs_fails_and_the_other_does_not(tmp_path: Path) -> None:
    async with asyncio.timeout(60), pipedist.LocalCluster(workers=2) as cluster:
        async with (
            pipedist.open(spec_of("fails_for_negative"), cluster=cluster) as bad,
            pipedist.open(spec_of("scaled", n=4000), cluster=cluster) as good,
        ):
            ends = await asyncio.gather(bad.results(), good.results(), return_exceptions=True)
        assert isinstance(ends[0], pipedist.CallError)
        assert isinstance(ends[1], pipedist.Result)
        assert np.array_equal(ends[1]["out"], np.arange(4000) * 3)
        assert cluster.coordinator._passes.handles == {}


@pytest.mark.asyncio
async def test_a_defect_of_the_scheduler_ends_runs_instead_of_hanging_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: reported.append(context))

    def defective(self: Scheduler, event: Any) -> None:
        raise ZeroDivisionError("oh no")

    async with asyncio.timeout(60), pipedist.LocalCluster(workers=1) as cluster:
        await cluster.ready()
        from pipedist.scheduler import events as ev
        from pipedist.scheduler import machine

        monkeypatch.setitem(machine._HANDLERS, ev.CallsDone, defective)
        async with pipedist.open(spec_of("scaled"), cluster=cluster) as run:
            with pytest.raises(LocalProtocolError, match="a defect of pipedist ended the cluster: oh no"):
                await run.results()
        monkeypatch.undo()
    assert any(isinstance(context.get("exception"), ZeroDivisionError) for context in reported)


@pytest.mark.asyncio
async def test_no_command_is_executed_after_a_defect_of_the_scheduler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Commands left over from a defective event would publish steps without their results."""
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: None)
    handled: list[str] = []
    handle = Scheduler.handle

    def defective(self: Scheduler, event: Any, now: float) -> Any:
        handled.append(type(event).__name__)
        if handled[-1] == "CallsDone":
            raise ZeroDivisionError("oh no")
        return handle(self, event, now)

    async with asyncio.timeout(60), pipedist.LocalCluster(workers=1) as cluster:
        await cluster.ready()
        with monkeypatch.context() as patched:
            patched.setattr(Scheduler, "handle", defective)
            async with pipedist.open(spec_of("scaled"), cluster=cluster) as run:
                with pytest.raises(LocalProtocolError, match="a defect of pipedist"):
                    await run.results()
            assert handled[-1] == "CallsDone"
            assert cluster.coordinator._passes.handles == {}


def test_a_sink_added_twice_gets_lines_once_after_one_is_removed() -> None:
    sinks = LogSinks()
    handled: list[str] = []

    def sink(_worker: str, line: msg.LogLine) -> None:
        handled.append(line.text)

    first, second = sinks.add(sink), sinks.add(sink)
    first()
    first()
    sinks.emit("w0", msg.LogLine(stage="s", step=0, replica=0, text="once"))
    assert handled == ["once"]
    second()
    assert not sinks


def test_records_reach_loggers_of_this_process_and_create_none(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "elsewhere")
    before = set(logging.root.manager.loggerDict)
    sinks = LogSinks()
    sinks.add(lambda _worker, _line: None, is_extra=True)
    for level in (logging.WARNING, logging.ERROR, 2**62):
        sinks.emit("w0", msg.LogLine("s", 0, 1, f"at {level}", level, "elsewhere.model"))
    shown = [(each.name, each.levelno, each.getMessage()) for each in caplog.records]
    assert shown == [
        ("elsewhere.model", 40, "[s 0 1 w0] at 40"),
        ("elsewhere.model", 2**62, f"[s 0 1 w0] at {2**62}"),
    ]
    assert set(logging.root.manager.loggerDict) == before


@pytest.mark.asyncio
@pytest.mark.parametrize("fails", [False, True])
async def test_the_output_of_a_call_arrives_before_its_result(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """The result may end the run, and with it the sinks."""
    handled: list[type[msg.Message]] = []
    handle = Inbound.handle

    def noted(self: Inbound, peer: Any, message: msg.Message, frames: Any) -> None:
        handled.append(type(message))
        handle(self, peer, message, frames)

    monkeypatch.setattr(Inbound, "handle", noted)
    async with asyncio.timeout(60), pipedist.LocalCluster(workers=1) as cluster:
        spec = spec_of("prints_while_the_socket_is_busy", n=1, fails=fails)
        async with pipedist.open(spec, cluster=cluster) as run:
            with pytest.raises(pipedist.CallError) if fails else nullcontext():
                await run.results()
    assert handled[:2] == [msg.LogLine, msg.Failed if fails else msg.Results]


@pytest.mark.asyncio
async def test_a_log_sink_that_raises_is_removed_and_the_others_get_the_line() -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: reported.append(context))
    handled: list[str] = []

    def broken(worker: str, line: msg.LogLine) -> None:
        raise RuntimeError("sink")

    async with asyncio.timeout(60), pipedist.LocalCluster(workers=1) as cluster:
        coordinator = cluster.coordinator
        ends = [
            coordinator.add_log_sink(broken),
            coordinator.add_log_sink(lambda _worker, line: handled.append(line.text)),
        ]
        spec = {
            "pipedist": 1,
            "dataset": {"range": 4, "batch": 1},
            "stages": {"y": {"run": "tests.runs.functions:prints"}},
        }
        async with pipedist.open(spec, cluster=cluster) as run:
            await run.results()
        for end in [*ends, *ends]:
            end()
    assert sorted(handled) == ["seen 0", "seen 1", "seen 2", "seen 3"]
    assert len(reported) == 1
    assert isinstance(reported[0]["exception"], RuntimeError)


class Members:
    """Workers that have joined, by connection."""

    def __init__(self, *workers: str) -> None:
        self.peers = {worker: Peer(worker.encode(), worker, 0, True) for worker in workers}

    def of(self, worker: str) -> Peer | None:
        return self.peers.get(worker)

    def of_identity(self, identity: bytes) -> Peer | None:
        return next((peer for peer in self.peers.values() if peer.identity == identity), None)


def test_leases_are_sent_to_each_worker_in_their_order_whichever_is_read_first() -> None:
    members, sent = Members("a", "b", "c"), list[str]()
    order = LeaseOrder(cast(Any, members))

    def add(name: str, *leases: tuple[str, int]) -> Outgoing:
        return order.add(leases, lambda _: sent.append(name))

    slow, gang = add("slow", ("a", 1)), add("gang", ("a", 2), ("b", 3))
    after, alone = add("after", ("b", 4)), add("alone", ("c", 5))
    for ready in (gang, after, alone):
        order.ready(ready, [])
    assert sent == ["alone"]
    order.ready(slow, [])
    assert sent == ["alone", "slow", "gang", "after"]
    assert order.is_empty

    lost, gang = add("lost", ("a", 6)), add("gang", ("a", 7), ("b", 8))
    after, behind = add("after", ("b", 9)), add("behind", ("a", 10))
    order.ready(after, [])
    order.withdraw("b", 8)
    assert gang.is_dropped
    assert sent[4:] == ["after"]
    members.peers["a"] = Peer(b"a.1", "a", 1, True)  # the next incarnation has joined
    new = add("new", ("a", 11))
    for ready in (lost, behind, new):
        order.ready(ready, [])
    assert sent[5:] == ["new"]
    assert order.is_empty
