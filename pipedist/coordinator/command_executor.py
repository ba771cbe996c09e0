"""What the scheduler orders, carried out: one command after the other, on workers and on passes."""

from __future__ import annotations

from collections.abc import Callable

from pipedist.coordinator.dispatch import Dispatch
from pipedist.coordinator.gang_relay import Gangs
from pipedist.coordinator.passes import Passes
from pipedist.coordinator.program_distribution import Introductions
from pipedist.coordinator.rejections import Refusals
from pipedist.coordinator.remote_exceptions import call_error
from pipedist.coordinator.store import Chunk
from pipedist.coordinator.worker_pool import Fleet
from pipedist.errors import LocalProtocolError, PipedistError, WorkersLost
from pipedist.protocol import messages as msg
from pipedist.scheduler import Event
from pipedist.scheduler import commands as cmd
from pipedist.scheduler import events as ev


class Orders:
    """Carries out the scheduler's commands. Nothing waits, and sends never block.

    Args:
        post: tells the scheduler.
        fail: ends every pass with an error.
        fleet: starts and ends workers, and speaks with them.
        dispatch: sends leases.
        gangs: keep results of gangs until all of them are there.
        introductions: tell workers of passes.
        refusals: counts results that come too late.
        passes: those that are open.
    """

    def __init__(
        self,
        post: Callable[[Event], None],
        fail: Callable[[PipedistError], None],
        *,
        fleet: Fleet,
        dispatch: Dispatch,
        gangs: Gangs,
        introductions: Introductions,
        refusals: Refusals,
        passes: Passes,
    ) -> None:
        self._post = post
        self._fail = fail
        self._fleet = fleet
        self._dispatch = dispatch
        self._gangs = gangs
        self._introductions = introductions
        self._refusals = refusals
        self._handles = passes.handles

    def carry_out(self, command: cmd.Command, chunk: Chunk | None) -> None:
        """Carry out one command.

        Args:
            chunk: the results that came with the event which caused it.

        Raises:
            LocalProtocolError: nobody knows such a command.
        """
        match command:
            case cmd.StashResults(serial):
                if chunk is not None:
                    self._gangs.stash(serial, chunk)
            case cmd.GangEnded():
                pass_id, stash, peers = self._gangs.end(command)
                if stash:
                    self._handles[pass_id].gang_arrived(stash, peers)
            case cmd.AcceptResults(pass_id):
                if chunk is not None:
                    self._handles[pass_id].arrived(chunk)
            case cmd.StepsReady(pass_id, first, last):
                self._handles[pass_id].ready(first, last)
            case cmd.SendGang(pass_id=pass_id):
                self._dispatch.gang(self._handles[pass_id], command)
            case cmd.SendAssign(pass_id=pass_id):
                self._dispatch.lease(self._handles[pass_id], command)
            case cmd.RequestSteps(pass_id, count):
                self._handles[pass_id].want(count)
            case cmd.SendBind(worker, pass_id):
                self._introductions.bind(worker, self._handles[pass_id])
            case cmd.SendRecall(worker, lease, pass_id, lo, hi):
                self._fleet.send(worker, msg.Recall(lease, pass_id, lo, hi))
            case cmd.SendCommitted(worker, pass_id, before):
                self._fleet.send(worker, msg.Committed(pass_id, before))
            case cmd.SendUnbind(worker, pass_id):
                self._fleet.send(worker, msg.Unbind(pass_id))
            case cmd.SendCancel(worker, lease):
                self._fleet.send(worker, msg.Cancel(lease))
            case cmd.StepFailed(pass_id, step, failures):
                handle = self._handles[pass_id]
                replicas = handle.settings.replicas
                error = call_error(failures[0], handle.raised, name=handle.name, replicas=replicas)
                handle.step_failed(step, error)
            case cmd.SizeCall(pass_id, call):
                self._post(ev.CallSized(pass_id, call, self._handles[pass_id].separable(call)))
            case cmd.CallsQuarantined(pass_id):
                self._handles[pass_id].set_aside(command)
            case cmd.PassComplete(pass_id):
                self._handles[pass_id].completed()
            case cmd.PassDrained(pass_id):
                self._handles[pass_id].went_quiet()
            case cmd.StartWorker(worker, incarnation):
                self._fleet.start(worker, incarnation)
            case cmd.EvictWorker(worker, incarnation, reason):
                self._fleet.expel(worker, incarnation, reason)
            case cmd.ClusterFailed(reason):
                self._fail(WorkersLost(reason))
            case cmd.DropResults():
                self._refusals.stale += 1
            case _:
                raise LocalProtocolError(f"the coordinator knows no command {command!r}")
