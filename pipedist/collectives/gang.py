"""The replicas of a gang that live in this process, and the turn among them.

Each replica runs in its own thread, the first one in the calling thread, but only the replica that holds
the TURN executes user code, so user code need not be thread-safe (as with tf.distribute's
MirroredStrategy). A replica gives up the turn when it calls a collective, waits outside, or ends; the
turn always goes to the lowest replica that can continue, so the order of events in a process follows
from the program. The last replica to call a collective executes it for all of them, together with the
other members (`pipedist.collectives.member`).

A replica that ENDED by returning makes a pending collective a mismatch. A replica that raised does not:
its error is the step's error, and replicas that wait for it end with GangAborted. The outcome never
depends on timing, because a collective completes only when every replica has called it or ended, or
one has raised.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import enum
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

from pipedist.collectives.channel import Channel, GangAborted, StallPolicy
from pipedist.collectives.member import Member, PendingMerge
from pipedist.collectives.options import CommunicationOptions
from pipedist.collectives.requests import CollectiveRequest
from pipedist.collectives.signatures import CheckedCall, account, check, detach, format_replicas, stall_text
from pipedist.collectives.thread_pool import ReplicaThreadPool
from pipedist.core.remote_errors import class_names, exception_text, rebuild_exception
from pipedist.core.types import Tree
from pipedist.errors import CollectiveTimeoutError, RemoteError


class ReplicaState(enum.Enum):
    """State of a replica.

        NEW -> RUNNING -> WAITING, OUTSIDE -> READY -> RUNNING -> ... -> ENDED

    RUNNING: it holds the turn. WAITING: it has called a collective that not all replicas have called.
    OUTSIDE: it waits for something else, without the turn. READY: it waits for the turn.
    """

    NEW = enum.auto()
    READY = enum.auto()
    RUNNING = enum.auto()
    WAITING = enum.auto()
    OUTSIDE = enum.auto()
    ENDED = enum.auto()


@dataclass(slots=True, eq=False)
class LocalReplica:
    number: int
    state: ReplicaState = ReplicaState.NEW
    turn: threading.Lock = field(default_factory=threading.Lock)  # released to give this replica the turn
    call: CheckedCall | None = None  # its pending collective; only while WAITING
    result: Tree = None
    error: BaseException | None = None  # error of its last collective, as `result`, until `take`
    merge: PendingMerge | None = None  # a merged function that it must call; in replica 0 only
    failed: bool = False  # True if it ended by raising; valid once ENDED
    is_stalled: bool = False  # True once its collective's timeout has passed

    def __post_init__(self) -> None:
        self.turn.acquire()

    @property
    def may_call(self) -> bool:
        """True if it has neither called the pending collective nor ended."""
        return self.state not in (ReplicaState.WAITING, ReplicaState.ENDED)

    def take(self) -> Tree:
        """Return the result of its collective, or raise its error."""
        result, error = self.result, self.error
        self.result = self.error = None
        if error is not None:
            raise error
        return result


def _copy_error(error: BaseException) -> BaseException:
    """Return a copy of an error for another replica: a traceback belongs to one thread."""
    try:
        return copy.copy(error)
    except Exception:
        return RemoteError(f"{type(error).__name__}: {exception_text(error)}")


def outside_turn(replica: int) -> RuntimeError:
    return RuntimeError(
        f"replica {replica} called a collective outside its turn: call collectives in the replica function itself, "
        "one after the other, not in threads or tasks"
    )


T = TypeVar("T")

OnStalled: TypeAlias = Callable[[tuple[int, ...], str], None]

_DEFAULTS: Final = CommunicationOptions()
_TURN_WAIT_S_MAX: Final = 3600.0  # a single wait for the turn if no collective is pending


class LocalGang:
    """The replicas of one attempt of a gang that live in this process.

    `on_stalled` gets (missing members, text) when a collective's timeout passes, once per waiting replica; then the
    collective waits as long again. It may be called in any thread of the gang, also while a replica of this process
    runs (then that replica is missing). None: a timeout is an error immediately.
    """

    def __init__(
        self,
        *,
        replicas: int,
        local: range,  # the replicas of this process: a contiguous range, at least one
        channel: Channel | None = None,  # to other members; None: no others. The caller closes it
        options: CommunicationOptions = _DEFAULTS,
        on_stalled: OnStalled | None = None,
        threads: ReplicaThreadPool | None = None,  # for the replicas except the first; None: its own
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
        self._mutex = threading.Lock()  # guards the replica states and the turn; held briefly
        self._is_executing = False  # a collective, which waits for other members
        self._collectives = 0
        self._aborted = ""  # why the attempt is aborted; "" while it is not
        self._all_ended: threading.Event | None = None  # in `run`, if there are several local replicas
        self._bodies: Sequence[Callable[[], None]] = ()
        self._alone: StallPolicy | None = None  # of the last collective of the only local replica

    # run

    def run(self, calls: Sequence[Callable[[], T]]) -> list[T | BaseException]:
        """Run every local replica to its end, the first one in this thread.

        `calls` has the function of each replica, which may use `call` with its own replica id. Returns for each its
        return value, or the exception that it raised; GangAborted if another replica failed.
        """
        if len(calls) == 1:
            return [self._run_alone(calls[0])]
        outcomes: list[Any] = [None] * len(calls)

        def run_replica(place: int, context: contextvars.Context) -> None:
            failed = True
            try:
                outcomes[place] = context.run(calls[place])
                failed = False
            except BaseException as error:  # an outcome; the caller of `run` decides
                outcomes[place] = error
            self._end(self._states[place], failed=failed)

        self._bodies = [partial(run_replica, n, contextvars.copy_context()) for n in range(len(calls))]
        self._all_ended = threading.Event()
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
        """Run the only replica of this process, without turns."""
        self.begin_alone()
        outcome: T | BaseException
        failed = False
        try:
            outcome = contextvars.copy_context().run(call)
        except BaseException as error:  # an outcome; the caller of `run` decides
            outcome, failed = error, True
        self.end_alone(failed=failed)
        return outcome

    def begin_alone(self) -> None:
        """Begin the only replica of this process, which its caller runs instead of `run`."""
        self._states[0].state = ReplicaState.RUNNING

    def begin_another(self, on_stalled: OnStalled) -> None:
        """Begin another attempt of the only replica, whose last one has returned, through the same channel."""
        self._on_stalled = on_stalled
        self._aborted = ""
        self._collectives = 0
        self._member.begin_another()
        self.begin_alone()

    def end_alone(self, *, failed: bool) -> None:
        with self._mutex:
            self._states[0].failed = failed
            self._states[0].state = ReplicaState.ENDED
        self._alone = None  # it refers to this gang: a cycle would wait for the garbage collector
        if self._channel is not None:
            self._channel.ended(returned=not failed)

    def abort(self, reason: str) -> None:
        """Abort replicas that wait for a local one or call a collective later. Thread-safe."""
        with self._mutex:
            self._abort(reason)
            if not self._is_busy():
                self._pass_turn()

    @contextlib.contextmanager
    def outside(self, replica: int) -> Iterator[None]:
        """Release the turn while a replica waits for something other than a collective."""
        me = self._states[replica - self._local.start]
        with self._mutex:
            self._check_runs(me)
            me.state = ReplicaState.OUTSIDE
            self._pass_turn()
        try:
            yield
        finally:
            with self._mutex:
                me.state = ReplicaState.READY
                if not self._is_busy():
                    self._pass_turn()
            self._await_turn(me)

    def patience(self, purpose: str) -> StallPolicy:
        """Return how long this process waits for other members, for a purpose that is no collective."""

        def stalled(members: tuple[int, ...]) -> None:
            text = (
                f"{purpose} has waited {self._options.waits_s:g} s for members {', '.join(map(str, members))}"
            )
            if self._on_stalled is None:
                raise CollectiveTimeoutError(text)
            self._on_stalled(members, text)

        return StallPolicy(self._options.waits_s, stalled)

    # collectives

    def call(self, replica: int, request: CollectiveRequest) -> Tree:
        """Call a collective, from the replica's own code; return its result, which the replica may modify.

        Raise ValueError, TypeError or OverflowError for an invalid request or an integer result that does not fit,
        CollectiveMismatchError, CollectiveTimeoutError, the exception of a merged function, or GangAborted if another
        replica failed, or the attempt is cancelled.
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
        if any(r is not me and r.may_call for r in self._states):
            detach(call, replica)
        with self._mutex:
            me.call = call
            me.is_stalled = False
            me.state = ReplicaState.WAITING
            is_last = self._is_executing = self._is_complete()
            if not is_last:
                self._pass_turn()
        if is_last:
            self._execute()
        self._await_turn(me)
        self._run_merge(me)
        return me.take()

    def _call_alone(self, me: LocalReplica, call: CheckedCall) -> Tree:
        self._collectives += 1
        me.call = call
        me.is_stalled = False
        if self._alone is None or call.options.waits_s != self._alone.timeout_s:
            self._alone = StallPolicy(call.options.waits_s, self._stalls_of([me]))
        policy = self._alone
        try:
            found = self._member.execute(self._collectives, [call], policy)
            if type(found) is PendingMerge:
                me.merge = found
                found = self._answer(found, policy)
            return found[0]  # type: ignore[index]
        except GangAborted as aborted:
            self._aborted = str(aborted)
            raise
        finally:
            me.merge = me.call = None
            self._is_executing = False  # `_answer` sets it

    def _execute(self) -> None:
        """Execute the collective that every local replica has called, or will not call."""
        waiting = [replica for replica in self._states if replica.state is ReplicaState.WAITING]
        self._collectives += 1
        try:
            calls = [r.call if r.state is ReplicaState.WAITING else None for r in self._states]
            found = self._member.execute(self._collectives, calls, self._patience(waiting))
        except BaseException as error:  # also GangAborted: raised in every waiting replica
            self._deliver(waiting, None, error)
            return
        if type(found) is not PendingMerge:
            self._deliver(waiting, found, None)  # type: ignore[arg-type]
            return
        with self._mutex:
            self._is_executing = False
            self._states[0].merge = found
            self._states[0].state = ReplicaState.READY
            self._pass_turn()

    def _run_merge(self, me: LocalReplica) -> None:
        """Call the merged function, if any, in the thread of replica 0; deliver its results."""
        if me.merge is None:
            return
        waiting = [me, *(r for r in self._states if r.state is ReplicaState.WAITING)]
        try:
            results = self._answer(me.merge, self._patience(waiting))
        except Exception as error:  # the others get the error that they would get in another process
            (module, name), text = class_names(error), exception_text(error)
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
        self._is_executing = True
        return self._member.answer(result, error, policy)

    def _deliver(
        self,
        waiting: Sequence[LocalReplica],
        results: Sequence[Tree] | None,
        error: BaseException | None,
        rebuild: Callable[[], BaseException] | None = None,
    ) -> None:
        with self._mutex:
            self._is_executing = False
            if error is not None and not isinstance(error, Exception):
                self._aborted = self._aborted or exception_text(error) or type(error).__name__
            for place, replica in enumerate(waiting):
                if replica.state is ReplicaState.ENDED:
                    continue  # a signal handler raised while it waited
                if results is not None:
                    replica.result = results[place]
                elif error is not None:
                    replica.error = error if place == 0 else rebuild() if rebuild else _copy_error(error)
                replica.call = replica.merge = None
                replica.state = ReplicaState.READY
            self._pass_turn()

    # turns; all of these hold the mutex

    def _is_busy(self) -> bool:
        return self._is_executing or any(r.state is ReplicaState.RUNNING for r in self._states)

    def _is_complete(self) -> bool:
        states = {replica.state for replica in self._states}
        return ReplicaState.WAITING in states and states <= {ReplicaState.WAITING, ReplicaState.ENDED}

    def _pass_turn(self) -> None:
        """Give the turn to the lowest replica that can continue, if any."""
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
        if self._is_executing:
            return
        for replica in self._states:
            if replica.state is ReplicaState.WAITING:
                replica.call = None
                replica.error = GangAborted(self._aborted)
                replica.state = ReplicaState.READY

    # transitions of one replica

    def _check_runs(self, me: LocalReplica) -> None:
        if me.state is not ReplicaState.RUNNING:
            raise outside_turn(me.number)

    def _await_turn(self, me: LocalReplica) -> None:
        while True:
            waits_s = _TURN_WAIT_S_MAX if (call := me.call) is None else call.options.waits_s
            if me.turn.acquire(timeout=min(threading.TIMEOUT_MAX, waits_s)):
                return
            self._check_stall(me)

    def _check_stall(self, me: LocalReplica) -> None:
        """Handle a timeout: report the missing local replicas, or abort if already reported."""
        with self._mutex:
            if me.state is not ReplicaState.WAITING or self._is_executing:
                return
            number = self._collectives + 1
            missing = [r.number for r in self._states if r.may_call]
            text = self._stall_text(number, me, format_replicas(missing))
            was_stalled, me.is_stalled = me.is_stalled, True
            if was_stalled or self._on_stalled is None:
                self._abort(text)
                me.error = CollectiveTimeoutError(text)
                # The hung replica holds the turn, and may never release it.
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
            numbers = ", ".join(map(str, members))
            missing = f"member{'s' if len(members) > 1 else ''} {numbers} of the gang"
            text = self._stall_text(self._collectives, waiting[0], missing)
            was_stalled, waiting[0].is_stalled = waiting[0].is_stalled, True
            if was_stalled or self._on_stalled is None:
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
            self._is_executing = self._is_executing or is_last
            if not self._is_busy():
                self._pass_turn()
            is_over = all(replica.state is ReplicaState.ENDED for replica in self._states)
        if is_last:
            self._execute()
        if is_over and self._all_ended is not None:
            self._all_ended.set()
