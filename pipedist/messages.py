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
| Bind | scheduler -> worker | the pass's `Program` |
| Assign | scheduler -> worker | shards of the range (see `pipedist.program.Shards`) |
| Results | worker -> scheduler | a list, one entry a call: {slot: tree} |
| Failed, Log, Heartbeat, Goodbye | worker -> scheduler | - |
| Unbind, Cancel, Stop | scheduler -> worker | - |
"""

from __future__ import annotations

from dataclasses import dataclass

WIRE_VERSION = 1
"""The protocol's version; a peer that speaks another one is refused."""


@dataclass(frozen=True, slots=True)
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
        cpu: processor model, as far as it may change bits.
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


@dataclass(frozen=True, slots=True)
class Welcome:
    """The worker is in.

    Args:
        cluster: random id of this scheduler's life; stamps the worker's later messages.
        heartbeat_s: how often a supervised worker's supervisor must be heard.
        sys_path: the scheduler process's import path, for workers on the same host; may be empty.
    """

    cluster: str
    heartbeat_s: float
    sys_path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Refuse:
    """The worker may not join; it prints the reason and exits."""

    reason: str


@dataclass(frozen=True, slots=True)
class Bind:
    """Introduces a pass, once per worker, before its first Assign. Payload: its Program."""

    pass_id: int


@dataclass(frozen=True, slots=True)
class Unbind:
    """The pass is over: drop its functions, instances and readers."""

    pass_id: int


@dataclass(frozen=True, slots=True)
class Assign:
    """Execute calls [lo, hi) of a pass, in order. Payload: their Shards.

    Args:
        attempt: 0 for the first try; the same for the whole range.
    """

    lease: int
    pass_id: int
    lo: int
    hi: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """Drop what is left of a lease, if it has not begun."""

    lease: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Leave: finish nothing more, say Goodbye, exit 0."""

    reason: str


@dataclass(frozen=True, slots=True)
class Results:
    """Calls [lo, hi) of a lease are done. Payload: a list with one entry a call.

    Args:
        busy_ns: the time that executing them took, nanoseconds.
    """

    lease: int
    lo: int
    hi: int
    busy_ns: int


@dataclass(frozen=True, slots=True)
class Failed:
    """Call `call` of a lease raised; the worker goes on with the rest of the range.

    Args:
        stage: name of the stage whose function raised.
        module, name: the exception's class.
        text: `str(exception)`.
        traceback: formatted, of the worker's side.
        retryable: False where another attempt can't help (a result that can't be sent).
    """

    lease: int
    call: int
    stage: str
    module: str
    name: str
    text: str
    traceback: str
    retryable: bool


@dataclass(frozen=True, slots=True)
class Log:
    """A line that a replica function printed or logged."""

    stage: str
    step: int
    replica: int
    text: str


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The supervisor of a worker that dialled in is there, and so is its worker process."""

    worker: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The worker leaves; its unfinished leases go back.

    Args:
        reason: for people.
        crashed: said by its supervisor: the process died, and the call that it ran may be why.
    """

    worker: str
    incarnation: int
    reason: str
    crashed: bool = False


Message = (
    Hello
    | Welcome
    | Refuse
    | Bind
    | Unbind
    | Assign
    | Cancel
    | Stop
    | Results
    | Failed
    | Log
    | Heartbeat
    | Goodbye
)
