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
| Elements | worker -> scheduler | a list of [stage, element, result, failure] |
| Exchange | worker -> scheduler | the contribution of its replicas to a collective |
| Relay | scheduler -> worker | the contribution of another member of the gang, unchanged |
| Failed, Retried, Stalled, Cancelled, QuotaMet, LogLine, Heartbeat, Goodbye | worker -> scheduler | - |
| Unbind, Cancel, Quota, Stop | scheduler -> worker | - |
| Share | scheduler -> supervisor | a tree for every program of the cluster |
"""

from __future__ import annotations

import sys
from functools import lru_cache
from itertools import pairwise
from typing import Annotated

from msgspec import Meta, Struct

WIRE_VERSION = 1  # the protocol's version; a peer with another one is refused

CACHED_RANGES_MAX = 1024  # maximum number of ranges of finished calls in a Hello

CULPRITS_MAX = 4096  # maximum number of elements in a Failed

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
Text = Annotated[str, Meta(max_length=256 * 1024)]  # code points: at most 1 MiB of UTF-8
Quantities = Annotated[tuple[Count, ...], Meta(max_length=4096)]
Texts = Annotated[tuple[Text, ...], Meta(max_length=4096)]
Path = Annotated[bytes, Meta(max_length=64 * 1024)]  # of `os.fsencode`: not every path is Unicode text
Paths = Annotated[tuple[Path, ...], Meta(max_length=4096)]


class Message(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The base of every message: a list of a tag, which is never used again, and the fields."""


class Hello(Message, frozen=True, tag=1):
    """Ask to join, as a worker process."""

    worker: Text  # its name in the cluster ("w0"); the same for all of its incarnations
    incarnation: Count  # counts its processes; a higher one replaces a lower one
    pid: Count  # process id on its host
    host: Text
    boot: Text  # the host's boot id: two processes with the same one share a kernel
    wire: Count  # its WIRE_VERSION
    python: Text
    numpy: Text
    pipedist: Text
    cpu: Text  # processor model, for people
    cached: Texts = ()  # results that it has cached for an earlier scheduler: "KEY:LO-HI", KEY as in `Bind`
    gpus: Finite = 0.0  # number of GPUs it owns, for one call at a time; a fraction if workers share one
    # What numeric libraries choose their code by: architecture, vendor, processor features
    traits: Texts = ()
    code_digests: Texts = ()  # digests of the code folders that its supervisor has copies of
    # That the name is its own, if another process started it (`pipedist.worker.identity`). The same in messages
    # before the connection has joined: Heartbeat, Goodbye
    proof: Text = ""
    threads: Count = 1  # BLAS and OpenMP threads of its process


class Welcome(Message, frozen=True, tag=2):
    """Accept a worker."""

    cluster: Text  # random id of this driver process; stamps the worker's later messages
    heartbeat_s: Finite  # the longest time between two heartbeats of a supervised worker's supervisor
    sys_path: Paths  # the driver's import path, for workers on the same host; may be empty
    # How long a dialled-in worker waits for another scheduler after this one is gone
    rejoin_s: Finite = 0.0
    notice: Text = ""  # for its user: differences from the driver that were accepted


class Refuse(Message, frozen=True, tag=3):
    """Reject a worker, which prints the reason and exits."""

    reason: Text
    # To a supervisor: rejects the incarnations of its worker below this one; 0: the present one
    before: Count = 0


class Bind(Message, frozen=True, tag=4):
    """Introduce a pass, once per worker, before its first Assign. Payload: its Program."""

    pass_id: Count
    # Names the run, the pass and its code: results cached under the same key are as good as new ones. "": results
    # of the pass are not cached
    key: Text = ""
    # The worker does not share the scheduler's files, and checks which of them it sees
    elsewhere: bool = False


class Code(Message, frozen=True, tag=23):
    """Send a folder of the user's modules, before a Bind that names it. Payload: its files.

    There is no payload if the worker has a copy already.
    """

    folder: Path  # absolute, on the scheduler's host
    digest: Text  # that of names and contents; "": the folder is not sent, for the reason in `text`
    text: Text  # which files were sent or skipped, or why none was sent, for people


class DataVisible(Message, frozen=True, tag=24):
    """Report that the worker sees the data files of a pass itself."""

    pass_id: Count


class Share(Message, frozen=True, tag=25):
    """Send a value, counted from 1, to the other programs of the cluster. Payload: a tree."""

    number: Count


class Unbind(Message, frozen=True, tag=5):
    """End a pass: the worker drops its functions, instances and readers."""

    pass_id: Count


class Assign(Message, frozen=True, tag=6):
    """Execute calls [lo, hi) of a pass, in order. Payload: their Shards."""

    lease: Count
    pass_id: Count
    lo: Count
    hi: Count
    attempt: Count  # 0 for the first try; the same for the whole range
    # How many elements of a single call are sent; 0: all. The result of a part is never cached
    elements: Count = 0
    overlaps: bool = False  # the calls only wait, so they overlap with those of other leases


class Recall(Message, frozen=True, tag=21):
    """Report cached results of calls [lo, hi) under this lease; see `Hello`."""

    lease: Count
    pass_id: Count
    lo: Count
    hi: Count


class Committed(Message, frozen=True, tag=22):
    """Report that calls of a pass below `before` are durable: release their cached results."""

    pass_id: Count
    before: Count


class AssignGang(Message, frozen=True, tag=14):
    """Execute calls [lo, hi) of one step at once, as a member of a gang. Payload: their Shards."""

    lease: Count
    pass_id: Count
    lo: Count
    hi: Count
    attempt: Count  # 0 for the first try; of the whole gang
    serial: Count  # number of this attempt of this gang; grows while the scheduler runs
    member: Count
    members: Count  # number of worker processes that execute the step's replicas, in replica order
    # Name of the members' shared memory (`pipedist.collectives.segment`); "" if they exchange through the
    # scheduler, or there is one member
    segment: Text
    # The number of the step, or of the first of several, for its functions; -1: that of its calls, which is lower
    # if leases before it had several steps
    step: Annotated[int, Meta(ge=-1, le=2**63 - 1)] = -1


class StateVersion(Message, frozen=True, tag=15):
    """Send one version of a state, before the first lease that reads it. Payload: its tree."""

    space: Count  # which state; unique while the scheduler runs
    version: Count  # counts its values; a worker keeps the latest two


class DropState(Message, frozen=True, tag=16):
    """Drop a state that no lease reads any more."""

    space: Count


class Exchange(Message, frozen=True, tag=17):
    """Send a member's part of a collective to the other members. Payload: its data."""

    lease: Count
    number: Count  # counts the collectives of a gang attempt, from 1


class Relay(Message, frozen=True, tag=18):
    """Forward another member's part. Payload: unchanged; none if that member has ended."""

    lease: Count  # the receiver's
    member: Count  # the sender
    number: Count  # the collective's; 0: the member has ended, and sends nothing more
    text: Text  # how it ended, for people; "" if it has not


class Cancel(Message, frozen=True, tag=7):
    """Drop the calls of a lease that have not begun."""

    lease: Count


class Quota(Message, frozen=True, tag=28):
    """Set how much of the limits of a pass the worker may use; nothing before the first Quota."""

    pass_id: Count
    number: Count  # from 1 in each pass; a Quota that arrives after one with a higher number has no effect
    calls: Quantities  # at the same time; one number for each of `Program.limits`
    # Number of workers among which rates are divided. 0: no further attempt or element begins; calls that wait for
    # one are given back (`Failed.aborted`)
    sharing: Count


class QuotaMet(Message, frozen=True, tag=29):
    """Confirm a Quota with a lower number: at most this many calls run now."""

    pass_id: Count
    calls: Quantities


class Cancelled(Message, frozen=True, tag=20):
    """Confirm Cancel: no call of that lease runs any more, or those of a gang are ending."""

    lease: Count


class Stop(Message, frozen=True, tag=8):
    """Leave: finish nothing more, send Goodbye, exit 0."""

    reason: Text


class Results(Message, frozen=True, tag=9):
    """Report that calls [lo, hi) of a lease are done. Payload: a list with one entry per call."""

    lease: Count
    lo: Count
    hi: Count
    busy_ns: Count  # the time that executing them took
    # For measurements only; also of a call that runs
    reading_ns: Count = 0  # the time that reading shards from their source took since the last report
    stages_ns: Quantities = ()  # by stage, in programs of several: the time in its function since the last report
    memory_bytes: Count = 0  # the largest resident memory of the process so far
    cpu_ns: Count = 0  # the processor time of all threads of the process since the last report


class Elements(Message, frozen=True, tag=26):
    """Report elements of a call that are over. Payload: a list of [stage, element, result, failure].

    `stage` is the index of the stage in the pass's program, `element` the element's id, `failure` the exception of
    its last attempt in this call, for people; "": it returned.
    """

    lease: Count
    call: Count


class Failed(Message, frozen=True, tag=10):
    """Report that a call of a lease raised; the worker goes on with the rest of the range."""

    lease: Count
    call: Count
    stage: Text  # name of the stage whose function raised
    module: Text  # the exception's class is `name` in this module
    name: Text
    text: Text  # `str(exception)`
    traceback: Text  # formatted, from the worker
    retryable: bool  # False if another attempt can't help (a result that can't be sent)
    # Another replica ended the call's gang, or it only waited; the call is not the cause
    aborted: bool = False
    # Elements that failed for good by themselves: position in the call's shard, and the exception, for people
    culprits: Annotated[tuple[tuple[Count, Text], ...], Meta(max_length=CULPRITS_MAX)] = ()
    element: Count | None = None  # for which the function was called, if it gets single ones


class Stalled(Message, frozen=True, tag=19):
    """Report that a collective has waited for `timeout_s`."""

    lease: Count
    members: Texts  # the missing ones, as decimal texts
    text: Text  # which replica waits for which, and where, for people


class LogLine(Message, frozen=True, tag=11):
    """A line that a replica function printed, or a `logging` record."""

    stage: Text
    step: Count
    replica: Count
    text: Text  # a record may have several lines, such as a traceback
    level: Count = 0  # of the record; 0: printed
    logger: Text = "stdout"  # of the record; if printed, the stream


class Retried(Message, frozen=True, tag=27):
    """Report that a function is called again, by the `retry` of its stage."""

    pass_id: Count
    call: Count
    stage: Text
    attempt: Count  # number of the next attempt, from 1
    timed_out: bool
    text: Text  # the exception of the last attempt, and its element if it has one


class Heartbeat(Message, frozen=True, tag=12):
    """Report that a dialled-in worker and its supervisor are alive."""

    worker: Text
    incarnation: Count
    proof: Text = ""  # as in `Hello`


class Goodbye(Message, frozen=True, tag=13):
    """Report that the worker leaves; its unfinished leases are assigned to others."""

    worker: Text
    incarnation: Count
    reason: Text  # for people
    # Sent by its supervisor: the process died, perhaps because of the call that it ran
    crashed: bool = False
    lease: Count = 0  # that of the call that ran; 0: unknown
    call: Count = 0
    stage: Count = 0  # index of the stage that ran in its pass's program
    # The supervisor ended the process, because the stage's function exceeded its timeout
    timed_out: bool = False
    proof: Text = ""  # as in `Hello`


@lru_cache(maxsize=256)
def spans(replicas: int, members: int) -> tuple[tuple[int, int], ...]:
    """Return the replicas [a, b) that each member of a gang executes, in order of member.

    The sizes differ by at most one, the longer chunks first.
    """
    small, larger = divmod(replicas, members)
    return tuple(pairwise(member * small + min(member, larger) for member in range(members + 1)))
