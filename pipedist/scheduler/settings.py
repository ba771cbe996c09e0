"""Limits of the scheduler and settings of a pass; each limit ends with its unit."""

from __future__ import annotations

from msgspec import Struct

from pipedist.errors import LocalProtocolError


class SchedulerLimits(Struct, frozen=True):
    """The limits of a cluster's scheduler.

    Args:
        bundle_s: target amount of work in one lease, so that short calls cost little.
        bundle_growth: maximum growth of a lease over the largest completed one.
        bundle_calls_max: calls in one lease.
        bundle_bytes_max: input bytes sent with one lease, unless a single call has more.
        prefetch_below_s: a worker whose leases take less than this gets a second lease in advance; a
            group of workers gets as many gangs in advance as take about this long.
        gangs_queued_max: unfinished gangs of a group of workers; fewer than a segment
            remembers (`pipedist.collectives.steps.ATTEMPTS_REMEMBERED`).
        steps_in_flight_max: steps of one pass that were requested and not yet consumed.
        bytes_in_flight_max: bytes of inputs and results of one pass held at one time.
        deaths_max: workers that may die while executing the same call, before it fails.
        backoff_s: wait before the retry of a call that raised twice; doubles each time. The first retry is
            immediate.
        backoff_s_max: maximum of this wait.
        probes_max: subsets of one call's elements that are executed to find its culprits.
        speculation_reports_min: reports of a pass before any of its calls gets a second attempt.
        speculation_s_min: minimum duration of a call before it gets a second attempt.
        speculation_attempts_max: second attempts of one attempt of a call, one after another: each was
            lost or raised while the first attempt ran.
        failed_starts_max: workers in a row that may die before they join.
        heartbeat_timeout_s: a supervised worker without a heartbeat for this long is lost.
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
    failed_starts_max: int = 5
    heartbeat_timeout_s: float = 16.0


class PassSettings(Struct, frozen=True):
    """Settings of one pass.

    Args:
        replicas: R; call number = step * R + replica.
        ordered: steps become visible in step order; otherwise in order of completion.
        fail_fast: the first step with a failed call ends the pass; otherwise only that step fails.
        pulled: the scheduler requests steps (`RequestSteps`); otherwise they are pushed.
        priority: passes with a lower number go first.
        gang: the calls of a step are executed at once or not at all; each step has all R of them.
        quarantine: if too many workers died under a call, in an unknown stage, its culprits are quarantined;
            otherwise the call fails.
        first_step: earlier steps were committed before; they are neither available nor reported.
        speculation: a call that takes this many times as long as the 95th percentile gets a second attempt on
            an idle worker; 0: never. Not for gangs.
        gpus: GPUs that a worker needs to own for a call; a gang has one such worker per replica.

    An unordered pass is neither `fail_fast` (the first step to fail would depend on the order
    of arrival) nor `pulled` (its steps are not consumed in order), and it ends by being closed.

    Raises:
        LocalProtocolError: the settings contradict each other.
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
