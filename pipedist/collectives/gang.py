"""The replicas of a gang that live in this process, and the baton among them.

Each replica runs in a thread of its own, the first in the calling one, but only the replica that has
the BATON runs user code: so that user code need not be thread-safe, as with tf.distribute's
MirroredStrategy. The baton is passed where a replica calls a collective, waits outside, or ends,
always to the lowest replica that can go on, so that the order of events in a process follows from the
program. The last replica to call a collective carries it out for all of them, together with the
other members (`pipedist.collectives.member`).

A replica that ENDED by returning is an answer to a collective: a mismatch. One that raised is not:
its error is the step's, and whoever waits for it is ended by GangAborted. Which of both it is never
depends on timing, since a collective has its outcome only when every replica has called or ended, or
when one has raised.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import enum
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

from pipedist.collectives.channel import Channel, StallPolicy
from pipedist.collectives.channel import GangAborted as GangAborted
from pipedist.collectives.member import Member, PendingMerge
from pipedist.collectives.options import CommunicationOptions
from pipedist.collectives.requests import CollectiveRequest
from pipedist.collectives.signatures import CheckedCall, account, check, keep, spell_replicas, stall_text
from pipedist.collectives.thread_pool import ReplicaThreadPool
from pipedist.errors import CollectiveTimeoutError, RemoteError
from pipedist.program import Tree
from pipedist.remote_errors import rebuild_exception


class ReplicaState(enum.Enum):
    """What a replica does.

        NEW -> RUNNING -> WAITING, OUTSIDE -> READY -> RUNNING -> ... -> ENDED

    RUNNING: it has the baton. WAITING: it has called a collective, which not all have called. OUTSIDE: it
    waits for something else, without the baton. READY: it could go on, and waits for the baton.
    """

    NEW = enum.auto()
    READY = enum.auto()
    RUNNING = enum.auto()
    WAITING = enum.auto()
    OUTSIDE = enum.auto()
    ENDED = enum.auto()


class LocalReplica:
    """One of them.

    Args:
        number: its id.
    """

    __slots__ = ("call", "error", "failed", "is_stalled", "merge", "number", "result", "state", "turn")

    def __init__(self, number: int) -> None:
        self.number = number
        self.state = ReplicaState.NEW
        self.turn = threading.Lock()
        """Released to give it the baton."""
        self.turn.acquire()
        self.call: CheckedCall | None = None
        """What it waits for; only while WAITING."""
        self.result: Tree = None
        """Of its last collective, until it takes it."""
        self.error: BaseException | None = None
        """The same, where that failed."""
        self.merge: PendingMerge | None = None
        """A merged function that it is to call; replica 0's only."""
        self.failed = False
        """It ended by raising; only once ENDED."""
        self.is_stalled = False
        """Its collective's timeout has passed once."""

    def take(self) -> Tree:
        """Return the result of its collective, or raise what became of it."""
        result, error = self.result, self.error
        self.result = self.error = None
        if error is not None:
            raise error
        return result


def another(error: BaseException) -> BaseException:
    """Return an error like this one, for another replica: tracebacks are of one thread."""
    try:
        return copy.copy(error)
    except Exception:
        return RemoteError(f"{type(error).__name__}: {error}")


T = TypeVar("T")

_DEFAULTS: Final = CommunicationOptions()
_LONGEST_S: Final = 3600.0
"""Of one look of a replica that waits for the baton: nobody else is late then."""


class LocalGang:
    """One attempt of a gang, as far as its replicas live in this process.

    Args:
        replicas: R.
        local: the replicas of this process: neighbours, at least one.
        channel: to the other members; None where `local` is all of them. The caller closes it.
        options: of the collectives that say nothing else.
        on_stalled: told (missing members, text) when a collective's timeout has passed, once for each
            waiting; then it waits as long again. It may be called in any of the gang's threads, also
            while a replica of this process runs (which then is what is missing). None: a timeout is
            an error at once.
        threads: threads for the replicas but the first; None: threads for this gang alone.
    """

    def __init__(
        self,
        *,
        replicas: int,
        local: range,
        channel: Channel | None = None,
        options: CommunicationOptions = _DEFAULTS,
        on_stalled: Callable[[tuple[int, ...], str], None] | None = None,
        threads: ReplicaThreadPool | None = None,
    ) -> None:
        if not local or (channel is None) != (len(local) == replicas):
            raise ValueError(f"replicas {local} of {replicas}, with{'' if channel else 'out'} a channel")
        self._replicas = replicas
        self._local = local
        self._channel = channel
        self._options = options
        self._on_stalled = on_stalled
        self._threads = threads
        self._member = Member(replicas, local, channel)
        self._states = [LocalReplica(number) for number in local]
        self._mutex = threading.Lock()
        """Guards states, and who has the baton; held for moments only."""
        self._is_carried_out = False
        """A collective is being carried out: what it waits for is another member's, not ours."""
        self._collectives = 0
        self._aborted = ""
        """Why nobody may go on; "" while all may."""
        self._all_ended = threading.Event()
        self._bodies: Sequence[Callable[[], None]] = ()
        self._alone = StallPolicy(options.waits_s, self._stalls_of(self._states))
        """Of the only replica of a process, for calls that say nothing of a timeout."""

    # run

    def run(self, calls: Sequence[Callable[[], T]]) -> list[T | BaseException]:
        """Run every local replica to its end, the first one in this thread.

        Args:
            calls: what each of them does; it may use `call` with its own number.

        Returns:
            What each returned, or the exception that it raised; GangAborted where it did nothing wrong.
        """
        if len(calls) == 1:
            return [self._run_alone(calls[0])]
        outcomes: list[Any] = [None] * len(calls)

        def body(place: int) -> Callable[[], None]:
            context = contextvars.copy_context()

            def run_replica() -> None:
                failed = True
                try:
                    outcomes[place] = context.run(calls[place])
                    failed = False
                except BaseException as error:  # an outcome like any other; `run`'s caller judges it
                    outcomes[place] = error
                self._end(self._states[place], failed=failed)

            return run_replica

        self._bodies = [body(place) for place in range(len(calls))]
        own_threads = None
        if self._threads is None:
            own_threads = self._threads = ReplicaThreadPool()
        self._states[0].state = ReplicaState.RUNNING
        try:
            self._bodies[0]()
            self._all_ended.wait()
        except BaseException:
            self.abort("interrupted")  # a signal's handler has raised
            raise
        finally:
            if own_threads is not None:
                own_threads.close()
                self._threads = None
            self._bodies = ()
        if self._channel is not None:
            self._channel.ended(returned=not any(replica.failed for replica in self._states))
        return outcomes

    def _run_alone(self, call: Callable[[], T]) -> T | BaseException:
        """The same for the only replica of a process: there is nobody to pass the baton to."""
        me = self._states[0]
        me.state = ReplicaState.RUNNING
        outcome: T | BaseException
        try:
            outcome = contextvars.copy_context().run(call)
        except BaseException as error:  # an outcome like any other; `run`'s caller judges it
            outcome, me.failed = error, True
        with self._mutex:
            me.state = ReplicaState.ENDED
        if self._channel is not None:
            self._channel.ended(returned=not me.failed)
        return outcome

    def abort(self, reason: str) -> None:
        """End all replicas that wait for a collective, and those that call one later. From any thread.

        Replicas that wait for OTHER members are ended by their channel.
        """
        with self._mutex:
            self._abort(reason)
            if not self._is_carried_out and not any(r.state is ReplicaState.RUNNING for r in self._states):
                self._pass_on()

    @contextlib.contextmanager
    def outside(self, replica: int) -> Iterator[None]:
        """Let the others run while replica `replica` waits for something that is no collective."""
        me = self._states[replica - self._local.start]
        with self._mutex:
            self._check_runs(me)
            me.state = ReplicaState.OUTSIDE
            self._pass_on()
        try:
            yield
        finally:
            with self._mutex:
                me.state = ReplicaState.READY
                if not self._is_busy():
                    self._pass_on()
            self._await_turn(me)

    # collectives

    def call(self, replica: int, request: CollectiveRequest) -> Tree:
        """Call a collective, from the replica's own code, and wait for its result.

        Args:
            replica: the caller's id.
            request: what it asks for.

        Returns:
            The result, which is the replica's own.

        Raises:
            ValueError, TypeError, OverflowError: the request makes no sense in itself, or an
                integer result does not fit.
            CollectiveMismatchError: the replicas do not call the same.
            CollectiveTimeoutError: replicas did not come.
            GangAborted: another replica failed, or the attempt is cancelled.
            Exception: what a merged function raised.
        """
        me = self._states[replica - self._local.start]
        if me.merge is not None:
            raise RuntimeError(
                f"{request.kind} was called in the function of a merge_call, which runs once for all "
                "replicas: use the strategy's reduce and gather there"
            )
        if me.state is not ReplicaState.RUNNING:
            self._check_runs(me)
        call = check(request, self._options, self._replicas)
        if self._aborted:
            raise GangAborted(self._aborted)
        if len(self._states) == 1:
            return self._call_alone(me, call)
        if any(
            r is not me and r.state not in (ReplicaState.WAITING, ReplicaState.ENDED) for r in self._states
        ):
            keep(call, replica)
        with self._mutex:
            me.call = call
            me.is_stalled = False
            me.state = ReplicaState.WAITING
            is_last = self._is_carried_out = self._is_complete()
            if not is_last:
                self._pass_on()
        if is_last:
            self._carry_out()
        self._await_turn(me)
        self._run_merge(me)
        return me.take()

    def _call_alone(self, me: LocalReplica, call: CheckedCall) -> Tree:
        """The same, for the only replica of a process."""
        self._collectives += 1
        me.call = call
        me.is_stalled = False
        waits_s = call.options.waits_s
        if waits_s == self._alone.timeout_s:
            policy = self._alone
        else:
            policy = self._alone = StallPolicy(waits_s, self._stalls_of([me]))
        try:
            found = self._member.meet(self._collectives, [call], policy)
            if type(found) is PendingMerge:
                me.merge = found
                found = self._answer(found, policy)
            return found[0]  # type: ignore[index]
        except GangAborted as aborted:
            self._aborted = str(aborted)
            raise
        finally:
            me.merge = me.call = None
            self._is_carried_out = False  # as an answer sets it

    def _carry_out(self) -> None:
        """Carry out the collective that every local replica has called, or will not call."""
        waiting = [replica for replica in self._states if replica.state is ReplicaState.WAITING]
        self._collectives += 1
        try:
            calls = [r.call if r.state is ReplicaState.WAITING else None for r in self._states]
            found = self._member.meet(self._collectives, calls, self._patience(waiting))
        except BaseException as error:  # also GangAborted: it is told to those who wait
            self._deliver(waiting, None, error)
            return
        if type(found) is not PendingMerge:
            self._deliver(waiting, found, None)  # type: ignore[arg-type]
            return
        with self._mutex:
            self._is_carried_out = False
            self._states[0].merge = found
            self._states[0].state = ReplicaState.READY
            self._pass_on()

    def _run_merge(self, me: LocalReplica) -> None:
        """Call the merged function, if there is one, in the thread of replica 0; give all its answer."""
        if me.merge is None:
            return
        waiting = [me, *(r for r in self._states if r.state is ReplicaState.WAITING)]
        try:
            results = self._answer(me.merge, self._patience(waiting))
        except Exception as error:  # others get what they would get in another process
            module, name, text = type(error).__module__, type(error).__qualname__, str(error)
            self._deliver(waiting, None, error, lambda: rebuild_exception(module, name, text))
        except BaseException as error:
            self._deliver(waiting, None, error)
        else:
            self._deliver(waiting, results, None)
        self._await_turn(me)

    def _answer(self, merge: PendingMerge, policy: StallPolicy) -> list[Tree]:
        result, error = None, None
        try:
            result = merge.call()
        except Exception as raised:
            error = raised
        self._is_carried_out = True
        return self._member.answer(result, error, policy)

    def _deliver(
        self,
        waiting: Sequence[LocalReplica],
        results: Sequence[Tree] | None,
        error: BaseException | None,
        again: Callable[[], BaseException] | None = None,
    ) -> None:
        """Give those who wait their results, or the error, and pass the baton on."""
        with self._mutex:
            self._is_carried_out = False
            if error is not None and not isinstance(error, Exception):
                self._aborted = self._aborted or str(error) or type(error).__name__
            for place, replica in enumerate(waiting):
                if replica.state is ReplicaState.ENDED:
                    continue  # a signal's handler has raised while it waited
                if results is not None:
                    replica.result = results[place]
                elif error is not None:
                    replica.error = error if place == 0 else again() if again else another(error)
                replica.call = replica.merge = None
                replica.state = ReplicaState.READY
            self._pass_on()

    # the baton; all of these hold the mutex

    def _is_busy(self) -> bool:
        return self._is_carried_out or any(r.state is ReplicaState.RUNNING for r in self._states)

    def _is_complete(self) -> bool:
        """Whether nobody can run any more, and somebody waits."""
        states = {replica.state for replica in self._states}
        return ReplicaState.WAITING in states and states <= {ReplicaState.WAITING, ReplicaState.ENDED}

    def _pass_on(self) -> None:
        """Give the baton to the lowest replica that can go on, if there is one."""
        for place, replica in enumerate(self._states):
            if replica.state is ReplicaState.NEW and self._threads is not None:
                replica.state = ReplicaState.RUNNING
                self._threads.start(self._bodies[place])
                return
            if replica.state is ReplicaState.READY:
                replica.state = ReplicaState.RUNNING
                replica.turn.release()
                return

    def _abort(self, reason: str) -> None:
        self._aborted = self._aborted or reason
        if self._is_carried_out:
            return
        for replica in self._states:
            if replica.state is ReplicaState.WAITING:
                replica.call = None
                replica.error = GangAborted(self._aborted)
                replica.state = ReplicaState.READY

    # transitions of one replica

    def _check_runs(self, me: LocalReplica) -> None:
        if me.state is not ReplicaState.RUNNING:
            raise RuntimeError(
                f"a collective of replica {me.number} was called outside its turn: collectives are called "
                "by the replica function itself, one after the other, not by threads or tasks of its own"
            )

    def _await_turn(self, me: LocalReplica) -> None:
        while not me.turn.acquire(timeout=self._slice_s(me)):
            self._look_for_stall(me)

    def _slice_s(self, me: LocalReplica) -> float:
        call = me.call
        return min(threading.TIMEOUT_MAX, _LONGEST_S if call is None else call.options.waits_s)

    def _look_for_stall(self, me: LocalReplica) -> None:
        """A replica of this process has not come for as long as `me` is willing to wait."""
        with self._mutex:
            if me.state is not ReplicaState.WAITING or self._is_carried_out:
                return
            number = self._collectives + 1
            missing = [
                r.number for r in self._states if r.state not in (ReplicaState.WAITING, ReplicaState.ENDED)
            ]
            text = self._stall_text(number, me, spell_replicas(missing))
            again, me.is_stalled = me.is_stalled, True
            if again or self._on_stalled is None:
                self._abort(text)
                me.error = CollectiveTimeoutError(text)
                # The one that hangs has the baton, and may never give it back.
                if me.turn.locked():
                    me.state = ReplicaState.RUNNING
                    me.turn.release()
                return
        self._on_stalled((self._channel.member if self._channel else 0,), text)

    def _patience(self, waiting: Sequence[LocalReplica]) -> StallPolicy:
        waits_s = min(replica.call.options.waits_s for replica in waiting if replica.call is not None)
        return StallPolicy(waits_s, self._stalls_of(waiting))

    def _stalls_of(self, waiting: Sequence[LocalReplica]) -> Callable[[tuple[int, ...]], None]:
        def stalled(members: tuple[int, ...]) -> None:
            who = ", ".join(map(str, members))
            missing = f"member{'s' if len(members) > 1 else ''} {who} of the gang"
            text = self._stall_text(self._collectives, waiting[0], missing)
            again, waiting[0].is_stalled = waiting[0].is_stalled, True
            if again or self._on_stalled is None:
                raise CollectiveTimeoutError(text)
            self._on_stalled(members, text)

        return stalled

    def _stall_text(self, number: int, me: LocalReplica, missing: str) -> str:
        call = me.call
        waited_s = self._options.waits_s if call is None else call.options.waits_s
        return stall_text(number, account(call), missing, waited_s)

    def _end(self, me: LocalReplica, *, failed: bool) -> None:
        with self._mutex:
            me.state = ReplicaState.ENDED
            me.failed = failed
            if failed:
                self._abort(f"replica {me.number} failed")
            is_last = self._is_complete()
            self._is_carried_out = self._is_carried_out or is_last
            if not self._is_busy():
                self._pass_on()
            is_over = all(replica.state is ReplicaState.ENDED for replica in self._states)
        if is_last:
            self._carry_out()
        if is_over:
            self._all_ended.set()
