"""The wire's vocabulary: what scheduler and workers say to each other.

A message holds ids, sizes and times, never array bytes: those travel beside it, as a
payload (see `pipedist.transport.codec`). Every message is a frozen dataclass of plain
msgpack types. The unit is a RANGE of calls `[lo, hi)` of one pass: call number
`step * replicas + replica`. A lease is one assignment of a range to one incarnation of one
worker; a result counts only while its lease is held.

| message | direction | payload |
|---|---|---|
| Hello | worker -> scheduler | - |
| Welcome, Refuse | scheduler -> worker | - |
| Code | scheduler -> worker | the files of a code folder (`pipedist.code_archive`), or none |
| Bind | scheduler -> worker | the pass's `Program` |
| Sees | worker -> scheduler | - |
| Assign, AssignGang | scheduler -> worker | shards of the range (see `pipedist.program.Shards`) |
| Recall, Settled | scheduler -> worker | - |
| State | scheduler -> worker | one version of a state: a tree |
| DropState | scheduler -> worker | - |
| Results | worker -> scheduler | a list, one entry a call: {slot: tree} |
| Exchange | worker -> scheduler | what its replicas bring to a collective |
| Relay | scheduler -> worker | what another member of the gang brings, untouched |
| Failed, Stalled, Cancelled, Log, Heartbeat, Goodbye | worker -> scheduler | - |
| Unbind, Cancel, Stop | scheduler -> worker | - |
| Share | scheduler -> supervisor | a tree that every program of the cluster gets |
"""

from __future__ import annotations

from functools import lru_cache

from pipedist.records import record

WIRE_VERSION = 1
"""The protocol's version; a peer that speaks another one is refused."""

KEPT_RANGES_MAX = 1024
"""Ranges of finished calls that a worker may offer at most."""


@record
class Hello:
    """A worker process asks to join.

    Args:
        worker: its name in the cluster ("w0"); the same over its incarnations.
        incarnation: counts its lives; a higher one replaces a lower one.
        pid: process id on its host.
        host: the host's name.
        boot: the host's boot id: two processes with the same one share a kernel.
        wire: its WIRE_VERSION.
        python, numpy, pipedist: versions.
        cpu: processor model, for people.
        kept: finished calls that it kept for a scheduler that is gone: "KEY:LO-HI", KEY as in `Bind`.
        gpus: how many GPUs it owns, for one call at a time; a fraction where workers share one.
        traits: what numeric libraries choose their code by: architecture, vendor, features of the processor.
        holds: digests of the code folders that its supervisor has copies of.
        proof: that the name is its own, where it was not started here (`pipedist.worker.names`); here, and in
            what is said before a connection has joined: Heartbeat, Goodbye.
        threads: BLAS and OpenMP threads of its process.
    """

    worker: str
    incarnation: int
    pid: int
    host: str
    boot: str
    wire: int
    python: str
    numpy: str
    pipedist: str
    cpu: str
    kept: tuple[str, ...] = ()
    gpus: float = 0.0
    traits: tuple[str, ...] = ()
    holds: tuple[str, ...] = ()
    proof: str = ""
    threads: int = 1


@record
class Welcome:
    """The worker is in.

    Args:
        cluster: random id of this scheduler's life; stamps the worker's later messages.
        heartbeat_s: how often a supervised worker's supervisor must be heard.
        sys_path: the scheduler process's import path, for workers on the same host; may be empty.
        rejoin_s: how long a worker that dialled in waits for another scheduler when this one is gone.
        notice: what its user should know: where it differs from the scheduler's process, and was let in.
    """

    cluster: str
    heartbeat_s: float
    sys_path: tuple[str, ...]
    rejoin_s: float = 0.0
    notice: str = ""


@record
class Refuse:
    """The worker may not join; it prints the reason and exits.

    Args:
        before: to a supervisor: which incarnations of its worker are meant, those before it; 0: whichever
            is there.
    """

    reason: str
    before: int = 0


@record
class Bind:
    """Introduces a pass, once per worker, before its first Assign. Payload: its Program.

    Args:
        key: of the run, the pass and its code: what a worker finished under the same key is as good as if
            it were done again. "": nobody will ask for it again, so nothing of the pass is kept.
        elsewhere: the worker does not share the scheduler's files: it looks what it sees of the pass's data.
    """

    pass_id: int
    key: str = ""
    elsewhere: bool = False


@record
class Code:
    """What is in a folder of the user's modules, before the first Bind that names it. Payload: its files.

    Args:
        folder: absolute, on the scheduler's host.
        digest: of names and contents; "": it is not sent, for the reason in `text`. There is no payload
            where the worker holds a copy already.
        text: for people: what was sent, what was left out, or why nothing was.
    """

    folder: str
    digest: str
    text: str


@record
class Sees:
    """The worker sees the very data files of a pass, and can read its shards itself."""

    pass_id: int


@record
class Share:
    """What the scheduling program gives to the others of its cluster. Payload: a tree.

    Args:
        number: counts what is given, from 1.
    """

    number: int


@record
class Unbind:
    """The pass is over: drop its functions, instances and readers."""

    pass_id: int


@record
class Assign:
    """Execute calls [lo, hi) of a pass, in order. Payload: their Shards.

    Args:
        attempt: 0 for the first try; the same for the whole range.
        elements: of a single call, how many of its elements are sent; 0: all. A part is never kept.
    """

    lease: int
    pass_id: int
    lo: int
    hi: int
    attempt: int
    elements: int = 0


@record
class Recall:
    """Report calls [lo, hi) of a pass under this lease, in its turn: they were kept (see `Hello`)."""

    lease: int
    pass_id: int
    lo: int
    hi: int


@record
class Settled:
    """Calls of a pass below `before` are durable: whoever kept them may let go."""

    pass_id: int
    before: int


@record
class AssignGang:
    """Execute calls [lo, hi) of one step at once, as member `member` of a gang. Payload: their Shards.

    Args:
        attempt: 0 for the first try; of the whole gang.
        serial: number of this attempt of this gang; grows over the scheduler's life.
        members: over how many worker processes the step's replicas are spread, in replica order.
        segment: where the members' shared memory is found (`pipedist.collectives.segment`); "" where
            they exchange through the scheduler, or there is one member.
    """

    lease: int
    pass_id: int
    lo: int
    hi: int
    attempt: int
    serial: int
    member: int
    members: int
    segment: str


@record
class State:
    """One version of a state, sent before the first lease that reads it. Payload: its tree.

    Args:
        space: which state; unique in the scheduler's life.
        version: counts its values; a worker keeps the latest two.
    """

    space: int
    version: int


@record
class DropState:
    """No lease reads this state any more."""

    space: int


@record
class Exchange:
    """A member's part of collective `number` of its gang, for the other members. Payload: its data.

    Args:
        number: counts the collectives of a gang attempt, from 1.
    """

    lease: int
    number: int


@record
class Relay:
    """The part that another member brought. Payload: as it came; none where that member has ended.

    Args:
        lease: the receiver's.
        member: who brought it.
        number: of the collective; 0: the member has ended, and brings nothing more.
        text: how it ended, for people; "" where it has not.
    """

    lease: int
    member: int
    number: int
    text: str


@record
class Cancel:
    """Drop what is left of a lease, if it has not begun."""

    lease: int


@record
class Cancelled:
    """The answer to Cancel: no call of that lease runs any more, but for those of a gang, which end."""

    lease: int


@record
class Stop:
    """Leave: finish nothing more, say Goodbye, exit 0."""

    reason: str


@record
class Results:
    """Calls [lo, hi) of a lease are done. Payload: a list with one entry a call.

    Args:
        busy_ns: the time that executing them took, nanoseconds.
    """

    lease: int
    lo: int
    hi: int
    busy_ns: int


@record
class Failed:
    """Call `call` of a lease raised; the worker goes on with the rest of the range.

    Args:
        stage: name of the stage whose function raised.
        module, name: the exception's class.
        text: `str(exception)`.
        traceback: formatted, of the worker's side.
        retryable: False where another attempt can't help (a result that can't be sent).
        aborted: the call did nothing wrong: its gang was ended by another replica.
    """

    lease: int
    call: int
    stage: str
    module: str
    name: str
    text: str
    traceback: str
    retryable: bool
    aborted: bool = False


@record
class Stalled:
    """A collective has waited for `timeout_s`, and members of the gang have not come.

    Args:
        members: those that are missing, as decimal texts.
        text: who waits for whom, where, for people.
    """

    lease: int
    members: tuple[str, ...]
    text: str


@record
class Log:
    """A line that a replica function printed or logged."""

    stage: str
    step: int
    replica: int
    text: str


@record
class Heartbeat:
    """The supervisor of a worker that dialled in is there, and so is its worker process.

    Args:
        proof: as in `Hello`.
    """

    worker: str
    incarnation: int
    proof: str = ""


@record
class Goodbye:
    """The worker leaves; its unfinished leases go back.

    Args:
        reason: for people.
        crashed: said by its supervisor: the process died, and the call that it ran may be why.
        lease, call, stage: that call, if it is known, and which stage of its pass's program ran; a lease
            of 0: it is not.
        timed_out: the supervisor ended it, because that stage's function took longer than it may.
        proof: as in `Hello`.
    """

    worker: str
    incarnation: int
    reason: str
    crashed: bool = False
    lease: int = 0
    call: int = 0
    stage: int = 0
    timed_out: bool = False
    proof: str = ""


Message = (
    Hello
    | Welcome
    | Refuse
    | Code
    | Bind
    | Sees
    | Share
    | Unbind
    | Assign
    | Recall
    | Settled
    | AssignGang
    | State
    | DropState
    | Exchange
    | Relay
    | Stalled
    | Cancel
    | Cancelled
    | Stop
    | Results
    | Failed
    | Log
    | Heartbeat
    | Goodbye
)


@lru_cache(maxsize=256)
def spans(replicas: int, members: int) -> tuple[tuple[int, int], ...]:
    """Return which replicas each member of a gang executes, on either side of the wire.

    Args:
        replicas: R.
        members: over how many workers they are spread; from 1 to R.

    Returns:
        Chunks [a, b) in order of member, whose sizes differ by one at most, the longer ones first.
    """
    small, larger = divmod(replicas, members)
    ends = [(member + 1) * small + min(member + 1, larger) for member in range(members)]
    return tuple(zip([0, *ends], ends, strict=False))
