"""The messages between the scheduler and its workers.

A message holds ids, sizes and times, never array bytes: those travel beside it as a payload
(`pipedist.protocol.codec`). The unit of work is a RANGE of calls `[lo, hi)` of one pass; the number
of a call is `step * replicas + replica`. A lease assigns a range to one incarnation of one worker. A
result counts only while its lease is held.

| message | direction | payload |
|---|---|---|
| Hello | worker -> scheduler | - |
| Welcome, Refuse | scheduler -> worker | - |
| Code | scheduler -> worker | the files of a code folder (`pipedist.protocol.code_archive`), or none |
| Bind | scheduler -> worker | the pass's `Program` |
| DataVisible | worker -> scheduler | - |
| Assign, AssignGang | scheduler -> worker | shards of the range (`pipedist.protocol.program.Shards`) |
| Recall, Committed | scheduler -> worker | - |
| StateVersion | scheduler -> worker | one version of a state: a tree |
| DropState | scheduler -> worker | - |
| Results | worker -> scheduler | a list with one entry per call: {slot: tree} |
| Exchange | worker -> scheduler | the contribution of its replicas to a collective |
| Relay | scheduler -> worker | the contribution of another member of the gang, unchanged |
| Failed, Stalled, Cancelled, LogLine, Heartbeat, Goodbye | worker -> scheduler | - |
| Unbind, Cancel, Stop | scheduler -> worker | - |
| Share | scheduler -> supervisor | a tree for every program of the cluster |
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Annotated

from msgspec import Meta, Struct

WIRE_VERSION = 1
"""The protocol's version; a peer with another one is refused."""

CACHED_RANGES_MAX = 1024
"""Maximum number of ranges of finished calls in a Hello."""

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
Text = Annotated[str, Meta(max_length=256 * 1024)]  # code points: at most 1 MiB of UTF-8
Texts = Annotated[tuple[Text, ...], Meta(max_length=4096)]
Path = Annotated[bytes, Meta(max_length=64 * 1024)]  # of `os.fsencode`: not every path is Unicode text
Paths = Annotated[tuple[Path, ...], Meta(max_length=4096)]


class WireMessage(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The base of every message: a list of a tag and the fields.

    A tag is never used again.
    """


class Hello(WireMessage, frozen=True, tag=1):
    """Ask to join, as a worker process.

    Args:
        worker: its name in the cluster ("w0"); the same for all of its incarnations.
        incarnation: counts its processes; a higher one replaces a lower one.
        pid: process id on its host.
        host: the host's name.
        boot: the host's boot id: two processes with the same one share a kernel.
        wire: its WIRE_VERSION.
        python, numpy, pipedist: versions.
        cpu: processor model, for people.
        cached: results that it has cached for an earlier scheduler: "KEY:LO-HI", KEY as in `Bind`.
        gpus: number of GPUs it owns, for one call at a time; a fraction if workers share one.
        traits: what numeric libraries choose their code by: architecture, vendor, processor features.
        code_digests: digests of the code folders that its supervisor has copies of.
        proof: that the name is its own, if another process started it (`pipedist.worker.identity`). The
            same in messages before the connection has joined: Heartbeat, Goodbye.
        threads: BLAS and OpenMP threads of its process.
    """

    worker: Text
    incarnation: Count
    pid: Count
    host: Text
    boot: Text
    wire: Count
    python: Text
    numpy: Text
    pipedist: Text
    cpu: Text
    cached: Texts = ()
    gpus: Finite = 0.0
    traits: Texts = ()
    code_digests: Texts = ()
    proof: Text = ""
    threads: Count = 1


class Welcome(WireMessage, frozen=True, tag=2):
    """Accept a worker.

    Args:
        cluster: random id of this scheduler process; stamps the worker's later messages.
        heartbeat_s: the longest time between two heartbeats of a supervised worker's supervisor.
        sys_path: the scheduler process's import path, for workers on the same host; may be empty.
        rejoin_s: how long a dialled-in worker waits for another scheduler after this one is gone.
        notice: for its user: differences from the scheduler's process that were accepted.
    """

    cluster: Text
    heartbeat_s: Finite
    sys_path: Paths
    rejoin_s: Finite = 0.0
    notice: Text = ""


class Refuse(WireMessage, frozen=True, tag=3):
    """Reject a worker, which prints the reason and exits.

    Args:
        before: to a supervisor: rejects the incarnations of its worker below this one; 0: the present one.
    """

    reason: Text
    before: Count = 0


class Bind(WireMessage, frozen=True, tag=4):
    """Introduce a pass, once per worker, before its first Assign.

    Payload: its Program.

    Args:
        key: of the run, the pass and its code: results cached under the same key are as good as new
            ones. "": results of the pass are not cached.
        elsewhere: the worker does not share the scheduler's files, and checks which of them it sees.
    """

    pass_id: Count
    key: Text = ""
    elsewhere: bool = False


class Code(WireMessage, frozen=True, tag=23):
    """Send a folder of the user's modules, before a Bind that names it.

    Payload: its files.

    Args:
        folder: absolute, on the scheduler's host.
        digest: of names and contents; "": the folder is not sent, for the reason in `text`. There is
            no payload if the worker has a copy already.
        text: for people: which files were sent or skipped, or why none was sent.
    """

    folder: Path
    digest: Text
    text: Text


class DataVisible(WireMessage, frozen=True, tag=24):
    """Report that the worker sees the data files of a pass itself."""

    pass_id: Count


class Share(WireMessage, frozen=True, tag=25):
    """Send a value to the other programs of the cluster. Payload: a tree.

    Args:
        number: counts the values, from 1.
    """

    number: Count


class Unbind(WireMessage, frozen=True, tag=5):
    """End a pass: the worker drops its functions, instances and readers."""

    pass_id: Count


class Assign(WireMessage, frozen=True, tag=6):
    """Execute calls [lo, hi) of a pass, in order. Payload: their Shards.

    Args:
        attempt: 0 for the first try; the same for the whole range.
        elements: of a single call, how many of its elements are sent; 0: all. The result of a part is
            never cached.
    """

    lease: Count
    pass_id: Count
    lo: Count
    hi: Count
    attempt: Count
    elements: Count = 0


class Recall(WireMessage, frozen=True, tag=21):
    """Report cached results of calls [lo, hi) under this lease.

    See `Hello`.
    """

    lease: Count
    pass_id: Count
    lo: Count
    hi: Count


class Committed(WireMessage, frozen=True, tag=22):
    """Report that calls of a pass below `before` are durable.

    Workers release their cached results.
    """

    pass_id: Count
    before: Count


class AssignGang(WireMessage, frozen=True, tag=14):
    """Execute calls [lo, hi) of one step at once, as a member of a gang.

    Payload: their Shards.

    Args:
        attempt: 0 for the first try; of the whole gang.
        serial: number of this attempt of this gang; grows while the scheduler runs.
        members: number of worker processes that execute the step's replicas, in replica order.
        segment: name of the members' shared memory (`pipedist.collectives.segment`); "" if they
            exchange through the scheduler, or there is one member.
    """

    lease: Count
    pass_id: Count
    lo: Count
    hi: Count
    attempt: Count
    serial: Count
    member: Count
    members: Count
    segment: Text


class StateVersion(WireMessage, frozen=True, tag=15):
    """Send one version of a state, before the first lease that reads it.

    Payload: its tree.

    Args:
        space: which state; unique while the scheduler runs.
        version: counts its values; a worker keeps the latest two.
    """

    space: Count
    version: Count


class DropState(WireMessage, frozen=True, tag=16):
    """Drop a state that no lease reads any more."""

    space: Count


class Exchange(WireMessage, frozen=True, tag=17):
    """Send a member's part of a collective to the other members.

    Payload: its data.

    Args:
        number: counts the collectives of a gang attempt, from 1.
    """

    lease: Count
    number: Count


class Relay(WireMessage, frozen=True, tag=18):
    """Forward another member's part.

    Payload: unchanged; none if that member has ended.

    Args:
        lease: the receiver's.
        member: the sender.
        number: of the collective; 0: the member has ended, and sends nothing more.
        text: how it ended, for people; "" if it has not.
    """

    lease: Count
    member: Count
    number: Count
    text: Text


class Cancel(WireMessage, frozen=True, tag=7):
    """Drop the calls of a lease that have not begun."""

    lease: Count


class Cancelled(WireMessage, frozen=True, tag=20):
    """Confirm Cancel: no call of that lease runs any more.

    Running calls of a gang are ending.
    """

    lease: Count


class Stop(WireMessage, frozen=True, tag=8):
    """Leave: finish nothing more, send Goodbye, exit 0."""

    reason: Text


class Results(WireMessage, frozen=True, tag=9):
    """Report that calls [lo, hi) of a lease are done.

    Payload: a list with one entry per call.

    Args:
        busy_ns: the time that executing them took, nanoseconds.
    """

    lease: Count
    lo: Count
    hi: Count
    busy_ns: Count


class Failed(WireMessage, frozen=True, tag=10):
    """Report that a call of a lease raised.

    The worker goes on with the rest of the range.

    Args:
        stage: name of the stage whose function raised.
        module, name: the exception's class.
        text: `str(exception)`.
        traceback: formatted, from the worker.
        retryable: False if another attempt can't help (a result that can't be sent).
        aborted: another replica ended the call's gang; the call is not the cause.
    """

    lease: Count
    call: Count
    stage: Text
    module: Text
    name: Text
    text: Text
    traceback: Text
    retryable: bool
    aborted: bool = False


class Stalled(WireMessage, frozen=True, tag=19):
    """Report that a collective has waited for `timeout_s`.

    Args:
        members: the missing ones, as decimal texts.
        text: which replica waits for which, and where, for people.
    """

    lease: Count
    members: Texts
    text: Text


class LogLine(WireMessage, frozen=True, tag=11):
    """A line that a replica function printed or logged."""

    stage: Text
    step: Count
    replica: Count
    text: Text


class Heartbeat(WireMessage, frozen=True, tag=12):
    """Report that a dialled-in worker and its supervisor are alive.

    Args:
        proof: as in `Hello`.
    """

    worker: Text
    incarnation: Count
    proof: Text = ""


class Goodbye(WireMessage, frozen=True, tag=13):
    """Report that the worker leaves.

    Its unfinished leases are assigned to others.

    Args:
        reason: for people.
        crashed: sent by its supervisor: the process died, perhaps because of the call that it ran.
        lease, call, stage: that call, if it is known, and the index of the stage that ran in its pass's
            program; a lease of 0: unknown.
        timed_out: the supervisor ended the process, because the stage's function exceeded its timeout.
        proof: as in `Hello`.
    """

    worker: Text
    incarnation: Count
    reason: Text
    crashed: bool = False
    lease: Count = 0
    call: Count = 0
    stage: Count = 0
    timed_out: bool = False
    proof: Text = ""


Message = (
    Hello
    | Welcome
    | Refuse
    | Code
    | Bind
    | DataVisible
    | Share
    | Unbind
    | Assign
    | Recall
    | Committed
    | AssignGang
    | StateVersion
    | DropState
    | Exchange
    | Relay
    | Stalled
    | Cancel
    | Cancelled
    | Stop
    | Results
    | Failed
    | LogLine
    | Heartbeat
    | Goodbye
)


@lru_cache(maxsize=256)
def spans(replicas: int, members: int) -> tuple[tuple[int, int], ...]:
    """Return the replicas [a, b) that each member of a gang executes.

    Args:
        replicas: R.
        members: number of workers that execute them; from 1 to R.

    Returns:
        Chunks in order of member, whose sizes differ by at most one, the longer ones first.
    """
    small, larger = divmod(replicas, members)
    ends = [(member + 1) * small + min(member + 1, larger) for member in range(members)]
    return tuple(zip([0, *ends], ends, strict=False))
