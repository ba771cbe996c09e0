"""Gangs in real worker processes, with a fake scheduler."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from pipedist import values
from pipedist.cluster.launchers.local import LocalLauncher
from pipedist.protocol.codec import encode
from pipedist.protocol.messages import (
    AssignGang,
    Cancel,
    DropState,
    Failed,
    Refuse,
    Relay,
    Results,
    StateVersion,
    Unbind,
)
from pipedist.protocol.program import Emit, Program, ReaderConfig, StateValue
from pipedist.values import PerReplica
from tests.worker import gang_functions
from tests.worker.fake_scheduler import FakeScheduler, program, stages

FUNCTIONS = "tests.worker.gang_functions"

pytestmark = pytest.mark.asyncio


@asynccontextmanager
async def workers(count: int) -> AsyncIterator[tuple[FakeScheduler, list[bytes]]]:
    async with FakeScheduler() as scheduler:
        launcher = LocalLauncher(scheduler.endpoint)
        launcher.on_exit = scheduler.exits.put_nowait
        async with launcher:
            joined = {}
            for number in range(count):
                launcher.start(f"w{number}", 0)
            for _ in range(count):
                identity, hello = await scheduler.welcome()
                joined[hello.worker] = identity
            identities = [joined[name] for name in sorted(joined)]
            yield scheduler, identities
            for identity in identities:
                scheduler._router.send(identity, Refuse("the test is over"))


def gang(function: str, replicas: int, **settings: Any) -> Program:
    return program(f"{FUNCTIONS}:{function}", replicas=replicas, gang=True, **settings)


async def run(function: str, values: Sequence[Any], members: int = 1, **settings: Any) -> list[Any]:
    """What each replica returned, or its Failed."""
    async with workers(members) as (scheduler, identities):
        return await run_on(scheduler, identities, function, values, **settings)


async def run_on(
    scheduler: FakeScheduler, identities: list[bytes], function: str, values: Sequence[Any], **settings: Any
) -> list[Any]:
    pass_id = scheduler.bind_all(identities, gang(function, len(values), **settings))
    leases = scheduler.assign_gang(identities, pass_id, values)
    found = await scheduler.gang_outcomes(leases, len(values))
    return [f if isinstance(f, Failed) else f["y"] for f in found]


def expected_of_every_kind(replicas: int) -> dict[str, Any]:
    rows = [gang_functions.FLOATS[r].astype(np.float32) for r in range(replicas)]
    parts = [{"a": rows[r], "b": [r, np.float64(r) / 3]} for r in range(replicas)]
    per_replica = values.per_replica(parts)
    return {
        "total": values.reduce("sum", per_replica, None, replicas),
        "gathered": np.concatenate([np.full((r % 3, 2), r) for r in range(replicas)]),
        "mean": values.reduce("mean", PerReplica(rows), None, replicas),
        "rows": np.concatenate(rows),
    }


@pytest.mark.parametrize("function", ["every_kind", "every_kind_async"])
@pytest.mark.parametrize("members", [1, 2, 4])
async def test_every_collective_has_the_bits_of_the_strategys_methods(function: str, members: int) -> None:
    expected = expected_of_every_kind(4)
    found = await run(function, [0] * 4, members)
    assert not [f for f in found if isinstance(f, Failed)]
    for replica, each in enumerate(found):
        assert each["total"]["a"].tobytes() == expected["total"]["a"].tobytes()
        assert each["total"]["b"] == expected["total"]["b"]
        assert each["gathered"].tolist() == expected["gathered"].tolist()
        assert each["sent"] == "from 1"
        assert each["merged"]["mean"].tobytes() == expected["mean"].tobytes()
        assert each["merged"]["rows"].tobytes() == expected["rows"].tobytes()
        assert each["merged"]["own"].tobytes() == gang_functions.FLOATS[replica].astype(np.float32).tobytes()
        assert each["merged"]["count"] == 4


async def test_replicas_that_share_a_worker_do_not_deadlock_and_run_one_at_a_time() -> None:
    assert await run("one_at_a_time", [0] * 8) == [[1] * 5] * 8


async def test_the_first_replica_runs_in_the_main_thread() -> None:
    assert await run("in_main_thread", [0] * 3) == [True, False, False]
    assert await run("in_main_thread", [0] * 4, 2) == [True, False, True, False]


async def test_every_replica_has_its_own_context_also_in_printed_lines() -> None:
    async with workers(2) as (scheduler, identities):
        found = await run_on(scheduler, identities, "says_who_it_is", [0] * 4)
        assert [f[:3] for f in found] == [[r, 4, 0] for r in range(4)]
        assert [len({f[3] for f in found[a:b]}) for a, b in ((0, 2), (2, 4), (0, 4))] == [1, 1, 2]
        assert {f[4] for f in found} == {"cpu"}
        await scheduler.printed(4)
        assert sorted((log.replica, log.text) for log in scheduler.logs) == [
            (r, f"replica {r}") for r in range(4)
        ]


@pytest.mark.parametrize("function", ["raises_on", "raises_while_it_cleans_up"])
@pytest.mark.parametrize("members", [1, 2, 4])
@pytest.mark.parametrize("failing", [0, 2])
async def test_a_replica_that_raises_ends_the_gang_with_its_error(
    function: str, members: int, failing: int
) -> None:
    found = await run(function, [failing] * 4, members)
    assert [(f.call, f.aborted) for f in found] == [(r, r != failing) for r in range(4)]
    assert (found[failing].name, found[failing].text) == ("KeyError", f"'replica {failing}'")
    assert "gang_functions.py" in found[failing].traceback


@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize(
    "kind", ["kind", "op", "shape", "dtype", "tree", "order", "source", "function", "returned"]
)
async def test_a_mismatch_ends_every_replica_that_waits(kind: str, members: int) -> None:
    """At once: the next limit is that of hung replicas, after ten minutes."""
    async with workers(members) as (scheduler, identities):
        found = await run_on(scheduler, identities, "mismatch", [kind] * 4)
        waiting = found[:3] if kind == "returned" else found
        assert {f.name for f in waiting} == {"CollectiveMismatchError"}
        assert not any(f.aborted for f in waiting)
        assert all("gang_functions.py" in f.text for f in waiting)
        if kind == "returned":
            assert found[3] is None
        # the next step works
        assert await run_on(scheduler, identities, "in_main_thread", [0] * 2)


async def test_an_error_in_merge_call_fails_every_replica() -> None:
    found = await run("merge_raises", [0] * 4, 2)
    assert [(f.name, f.text) for f in found] == [("ValueError", "in the body")] * 4


async def test_a_stop_iteration_in_merge_call_does_not_block_async_functions() -> None:
    found = await run("merge_stops_async", [0] * 4, 2)
    assert [(f.name, f.text) for f in found] == [
        ("RuntimeError", "merge_stops_async.<locals>.body raised StopIteration")
    ] * 4


async def test_methods_that_merge_call_rejects() -> None:
    for found_texts in await run("merge_misuse", [0] * 2):
        assert ["inside merge_call" in text for text in found_texts] == [True] * 5
        assert "use reduce" in found_texts[3]
        assert "are on the strategy itself" in found_texts[4]


async def test_a_gang_that_is_cancelled_while_it_waits_ends_and_the_next_lease_runs() -> None:
    async with workers(1) as (scheduler, [identity]):
        pass_id = scheduler.bind_all([identity], gang("says_who_it_is", 2))
        other = scheduler.bind(identity, program(f"{FUNCTIONS}:length"))
        # a member of two, whose peer never comes
        leases = scheduler.assign_gang([identity, identity], pass_id, [0, 0])
        first = min(leases)
        scheduler.send(identity, Cancel(max(leases)))
        await scheduler.printed()
        last = scheduler.assign(identity, other, [[1, 2, 3]])
        scheduler.send(identity, Cancel(first))
        _, results, _ = await scheduler.take(Results, aside=object)
        assert results.lease == last


async def test_a_stop_ends_a_gang_that_waits() -> None:
    async with workers(1) as (scheduler, [identity]):
        pass_id = scheduler.bind_all([identity], gang("says_who_it_is", 2))
        leases = scheduler.assign_gang([identity, identity], pass_id, [0, 0])
        scheduler.send(identity, Cancel(max(leases)))
        await scheduler.printed()
        scheduler.stop(identity)
        assert (await scheduler.exit()).code == 0


async def test_unbinding_a_waiting_gang_ends_it_before_its_functions_are_dropped() -> None:
    async with workers(1) as (scheduler, [identity]):
        pass_id = scheduler.bind_all([identity], gang("says_who_it_is", 2))
        other = scheduler.bind(identity, program(f"{FUNCTIONS}:length"))
        leases = scheduler.assign_gang([identity, identity], pass_id, [0, 0])
        scheduler.send(identity, Cancel(max(leases)))
        await scheduler.printed()
        scheduler.send(identity, Unbind(pass_id))
        last = scheduler.assign(identity, other, [[1, 2, 3]])
        _, results, _ = await scheduler.take(Results, aside=object)
        assert results.lease == last


async def test_parts_that_arrive_before_their_lease_executes_are_stored() -> None:
    """A member that is behind gets what a faster one has brought already."""
    async with workers(1) as (scheduler, [identity]):
        pass_id = scheduler.bind_all([identity], gang("in_main_thread", 2))
        slow = scheduler.bind(identity, program("tests.worker.replica_functions:maybe_wait"))
        scheduler.assign(identity, slow, [""] * 3)
        (lease, *_) = scheduler.assign_gang([identity, identity], pass_id, [0, 0])
        scheduler.send(identity, Cancel(lease + 1))
        scheduler.send(identity, Relay(lease, 1, 0, "member 1 has failed"))
        while True:
            _, message, _ = await scheduler.take((Failed, Results), aside=object)  # type: ignore[arg-type]
            if message.lease == lease:
                break
        assert isinstance(message, Failed)
        assert (message.aborted, message.text) == (True, "member 1 has failed")


@pytest.mark.parametrize(
    ("member", "members", "lo", "hi"), [(0, 2, 0, 1), (1, 2, 0, 2), (0, 1, 2, 6), (3, 5, 3, 4)]
)
async def test_calls_of_another_member_are_a_protocol_error(
    member: int, members: int, lo: int, hi: int
) -> None:
    async with workers(1) as (scheduler, [identity]):
        pass_id = scheduler.bind_all([identity], gang("in_main_thread", 4))
        message = AssignGang(1, pass_id, lo, hi, 0, 1, member, members, "")
        scheduler.send(identity, message, encode([None, None, [0] * (hi - lo), None]))
        assert (await scheduler.exit()).code == 76


async def test_replicas_run_while_the_loop_of_another_one_waits() -> None:
    assert await run("waits_for_the_others", [0] * 3) == [[0, 1, 2]] * 3


async def test_a_cancelled_collective_is_executed_nevertheless() -> None:
    assert await run("forgets_to_wait", [0] * 4, 2) == [0, 1, 2, 3]


async def test_the_error_of_a_collective_outside_of_a_gang_names_the_missing_key() -> None:
    async with workers(1) as (scheduler, [identity]):
        for settings in ({}, {"gang": True, "collectives": False}):
            pass_id = scheduler.bind(
                identity,
                program(f"{FUNCTIONS}:reduce_alone", **settings),  # type: ignore[arg-type]
            )
            scheduler.assign(identity, pass_id, [0])
            (failed,) = await scheduler.outcomes(1)
            assert isinstance(failed, Failed)
            assert (failed.name, failed.text) == (
                "RuntimeError",
                "a collective needs every replica of the step at once: add `collectives: true` to stage s0 "
                "(a closure of ClusterCoordinator.schedule has no other replicas)",
            )


async def test_each_replica_has_its_own_instance() -> None:
    async with workers(1) as (scheduler, identities):
        pass_id = scheduler.bind_all(identities, gang("PerReplicaState", 3, kwargs={"scale": 2}))
        for step in range(2):
            leases = scheduler.assign_gang(identities, pass_id, [0] * 3, step=step)
            found = await scheduler.gang_outcomes(leases, 3)
            assert [f["y"] for f in found] == [[step + 1, step + 1, 2.0]] * 3  # type: ignore[index]


async def test_stages_with_collectives_get_empty_shards_and_the_others_are_absent() -> None:
    reader = ReaderConfig({"kind": "range", "start": 0, "stop": 5, "step": 1}, 3, 5, False)
    described = Program(
        seed=0,
        replicas=4,
        reader=reader,
        stages=stages(f"{FUNCTIONS}:shard_of", f"{FUNCTIONS}:length", collectives=(True, False)),
        emits=(Emit("met", 0), Emit("length", 1), Emit("rows", -1, "sum", (0,)), Emit("shard", -1)),
        gang=True,
    )
    async with workers(2) as (scheduler, identities):
        pass_id = scheduler.bind_all(identities, described)
        leases = scheduler.assign_gang(identities, pass_id, None, step=1, replicas=4)
        found = await scheduler.gang_outcomes(leases, 4)
    assert [f["met"] for f in found] == [["int64", [1], 2]] * 2 + [["int64", [0], 2]] * 2  # type: ignore[index]
    assert [sorted(f) for f in found] == [["length", "met", "rows", "shard"]] * 2 + [["met"]] * 2  # type: ignore[arg-type]


async def test_a_list_without_elements_is_an_empty_shard_too() -> None:
    async with workers(1) as (scheduler, identities):
        reader = ReaderConfig(None, 3, -1, False)
        pass_id = scheduler.bind_all(identities, gang("shard_of", 2, reader=reader))
        leases = scheduler.assign_gang(identities, pass_id, [["a"], []], ids=[range(1), range(1, 1)])
        found = await scheduler.gang_outcomes(leases, 2)
        assert [f["y"] for f in found] == [["list", [1], 1], ["list", [0], 1]]  # type: ignore[index]


async def test_states_replace_their_names_in_the_arguments() -> None:
    async with workers(1) as (scheduler, [identity]):
        kwargs = {"w": StateValue("w"), "more": {"deep": [StateValue("b")]}}
        reads = program(f"{FUNCTIONS}:read_state", kwargs=kwargs)
        pass_id = scheduler.bind(identity, reads)
        for version in range(3):
            scheduler.send(identity, StateVersion(7, version), encode(np.full(2, version)))
            scheduler.send(identity, StateVersion(8, version), encode(f"b{version}"))
        for w, b in ((1, 2), (2, 1)):
            scheduler.assign(identity, pass_id, [0], states={"w": [7, w], "b": [8, b]})
            (found,) = await scheduler.outcomes(1)
            assert found == {"y": [[w, w], False, {"deep": [f"b{b}"]}]}
        scheduler.assign(identity, pass_id, [0], states={"w": [7, 0], "b": [8, 1]})  # only two are kept
        assert (await scheduler.exit()).code == 76


async def test_states_in_the_arguments_of_a_strategys_function() -> None:
    async with workers(1) as (scheduler, [identity]):
        pass_id = scheduler.bind(identity, program(f"{FUNCTIONS}:apply_state", form="apply"))
        scheduler.send(identity, StateVersion(7, 0), encode(np.arange(2)))
        value = ((StateValue("w"),), {"nested": {"a": (StateValue("w"),)}})
        scheduler.assign(identity, pass_id, [value], states={"w": [7, 0]})
        (found,) = await scheduler.outcomes(1)
        assert found == {"y": [[0, 1], [0, 1]]}
        scheduler.send(identity, DropState(7))
        scheduler.assign(identity, pass_id, [value], states={"w": [7, 0]})
        assert (await scheduler.exit()).code == 76


async def test_a_class_is_constructed_anew_for_each_version_of_its_states() -> None:
    async with workers(1) as (scheduler, identities):
        pass_id = scheduler.bind_all(
            identities, gang("PerReplicaState", 2, kwargs={"scale": StateValue("w")})
        )
        found_texts = []
        for step, version in enumerate((0, 0, 1)):
            scheduler.send(identities[0], StateVersion(7, version), encode(np.ones(version + 2)))
            leases = scheduler.assign_gang(
                identities, pass_id, [0] * 2, step=step, states={"w": [7, version]}
            )
            found = await scheduler.gang_outcomes(leases, 2)
            found_texts.append(found[0]["y"])  # type: ignore[index]
        assert found_texts == [[1, 1, 2.0], [2, 2, 2.0], [1, 1, 3.0]]
