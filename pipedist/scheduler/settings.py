"""What bounds the scheduler: every queue, wait and retry has a limit, with its unit last."""

from __future__ import annotations

from msgspec import Struct

from pipedist.errors import LocalProtocolError


class Limits(Struct, frozen=True):
    """The limits of a cluster's scheduler.

    Args:
        bundle_s: a lease is made as large as about this much work, so that short calls cost little.
        bundle_growth: a lease has at most this many times the calls of the largest one that came back.
        bundle_calls_max: calls in one lease.
        bundle_bytes_max: input bytes in one lease that travel with it, unless a single call has more.
        prefetch_below_s: a worker whose leases take less than this gets a second one in advance; a
            group of workers gets as many gangs in advance as take about this long.
        gangs_queued_max: gangs that are sent to a group of workers and not over; fewer than a segment
            remembers (`pipedist.collectives.steps.ATTEMPTS_REMEMBERED`).
        steps_in_flight_max: steps of one pass that are issued and not yet consumed.
        bytes_in_flight_max: bytes of one pass, inputs and results, that are held at one time.
        deaths_max: workers that may die under one and the same call before it counts as failed.
        backoff_s: a call that raised for the second time rests for so long before it is tried again, then
            twice as long each time; after the first time not at all.
        backoff_s_max: but at most for so long.
        probes_max: subsets of the elements of one call that are tried, to find the guilty ones.
        speculation_reports_min: reports of a pass that must have come before any call gets a second attempt.
        speculation_s_min: no call gets a second attempt before it has taken so long.
        speculation_attempts_max: second attempts that one attempt of a call gets, one after another: its
            worker was lost, or it raised, while the first one ran.
        starts_fruitless_max: workers in a row that may die before they join.
        heard_within_s: a supervised worker not heard for this long is lost.
    """

    bundle_s: float = 0.01
    bundle_growth: int = 8
    bundle_calls_max: int = 8192
    bundle_bytes_max: int = 4 * 2**20
    prefetch_below_s: float = 0.05
    gangs_queued_max: int = 12
    steps_in_flight_max: int = 65_536
    bytes_in_flight_max: int = 256 * 2**20
    deaths_max: int = 5
    backoff_s: float = 0.1
    backoff_s_max: float = 10.0
    probes_max: int = 4096
    speculation_reports_min: int = 3
    speculation_s_min: float = 1.0
    speculation_attempts_max: int = 3
    starts_fruitless_max: int = 5
    heard_within_s: float = 16.0


class PassSettings(Struct, frozen=True):
    """How the calls of one pass are treated.

    Args:
        replicas: R; call number = step * R + replica.
        ordered: steps become visible in step order; otherwise as they are complete.
        fail_fast: the first step with a failed call ends the pass; otherwise only that step fails.
        pulled: the scheduler asks for steps (`RequestSteps`); otherwise they are offered unasked.
        priority: passes with a lower number are dealt first.
        gang: the calls of a step are executed at once or not at all; each step has all R of them.
        quarantine: of a call under which too many workers died, in nobody knows which stage, the guilty
            elements are set aside; otherwise it fails.
        first_step: the steps before it were done earlier: they are neither offered nor told.
        speculation: a call that takes so many times as long as 19 of 20 do gets a second attempt, on an
            idle worker; 0: none does. Never of a gang.
        gpus: a call runs only at a worker that owns so many; a gang has one such worker a replica.

    An unordered pass is neither `fail_fast` (which step is the first to fail would depend on the
    order of arrival) nor `pulled` (its steps are not consumed in order), and it ends by being closed.

    Raises:
        LocalProtocolError: if these don't go together.
    """

    replicas: int
    ordered: bool = True
    fail_fast: bool = True
    pulled: bool = True
    priority: int = 1
    gang: bool = False
    quarantine: bool = False
    first_step: int = 0
    speculation: float = 0.0
    gpus: float = 0.0

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise LocalProtocolError(f"a pass of {self.replicas} replicas")
        if not self.ordered and (self.fail_fast or self.pulled):
            raise LocalProtocolError("an unordered pass can be neither fail_fast nor pulled")
        if self.first_step < 0 or (self.first_step and not self.ordered):
            raise LocalProtocolError(f"first_step {self.first_step} of a pass that is read in no order")
        if self.speculation and (self.gang or self.speculation < 1.0):
            raise LocalProtocolError(f"speculation {self.speculation}: it is 0, or 1 and more and of no gang")
