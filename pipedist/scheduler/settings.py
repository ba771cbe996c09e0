"""Limits of the scheduler and settings of a pass; each limit ends with its unit."""

from __future__ import annotations

from msgspec import Struct

from pipedist.errors import LocalProtocolError


class SchedulerLimits(Struct, frozen=True):
    bundle_s: float = 0.01  # target amount of work in one lease, so that short calls cost little
    bundle_growth: int = 8  # maximum growth of a lease over the largest completed one
    bundle_calls_max: int = 8192  # calls in one lease
    bundle_bytes_max: int = 8 * 2**20  # input bytes sent with one lease, unless a single call has more
    # A worker whose leases take less than this gets a second lease in advance; a group of workers gets as many
    # gangs in advance as take about this long
    prefetch_below_s: float = 0.05
    # Unfinished gangs of a group of workers; fewer than a segment remembers
    # (`pipedist.collectives.steps.ATTEMPTS_REMEMBERED`)
    gangs_queued_max: int = 12
    steps_in_flight_max: int = 65_536  # steps of one pass that were requested and not yet consumed
    bytes_in_flight_max: int = 256 * 2**20  # bytes of inputs and results of one pass held at one time
    deaths_max: int = 5  # workers that may die while executing the same call, before it fails
    # Wait before the retry of a call that raised twice; doubles each time. The first retry is immediate
    backoff_s: float = 0.1
    backoff_s_max: float = 10.0  # maximum of this wait
    probes_max: int = 4096  # subsets of one call's elements that are executed to find its culprits
    speculation_reports_min: int = 3  # reports of a pass before any of its calls gets a second attempt
    speculation_s_min: float = 1.0  # minimum duration of a call before it gets a second attempt
    # Second attempts of one attempt of a call, one after another: each was lost or raised while the first
    # attempt ran
    speculation_attempts_max: int = 3
    # Calls that wait are not kept for a worker that takes longer than this to start
    start_s: float = 5.0
    failed_starts_max: int = 5  # workers in a row that may die before they join
    heartbeat_timeout_s: float = 16.0  # a supervised worker without a heartbeat for this long is lost


class PassSettings(Struct, frozen=True):
    """Settings of one pass, or LocalProtocolError if they contradict each other.

    A failed call ends an ordered pass. In an unordered pass only its step fails, because the first one to fail would
    depend on the order of arrival. An unordered pass is not `pulled`, because its steps are not consumed in order, and
    it ends by being closed.
    """

    replicas: int  # R; call number = step * R + replica
    ordered: bool = True  # steps become visible in step order; otherwise in order of completion
    pulled: bool = True  # the scheduler requests steps (`RequestSteps`); otherwise they are pushed
    priority: int = 1  # passes with a lower number go first
    # The calls of a step are executed at once or not at all; each step has all R of them
    gang: bool = False
    # If too many workers died under a call, in an unknown stage, its culprits are quarantined; otherwise the
    # call fails
    quarantine: bool = False
    # Elements that may be quarantined, or fail alone in a search; more end the pass. None: no limit
    quarantine_max: int | None = None
    quarantined: int = 0  # elements of steps before `first_step` that were quarantined before
    first_step: int = 0  # earlier steps were committed before; they are neither available nor reported
    # A call that takes this many times as long as the 95th percentile gets a second attempt on an idle worker;
    # 0: never. Not for gangs
    speculation: float = 0.0
    call_s_max: float = 0.0  # the time after which a call ends by the timeouts of its stages; 0: no limit
    # Calls that a worker executes at the same time, because they only wait; their leases overlap, and each is
    # reported by itself. 0: leases are executed one after the other
    at_once: int = 0
    # Maximum of these calls over all workers, each of which travels alone then; 0: no limit
    concurrency: int = 0
    # Limits of the program's stages (`Program.limits`), divided among the workers with calls; (): none
    limits: tuple[int, ...] = ()
    gpus: float = 0.0  # GPUs that a worker needs to own for a call; a gang has one such worker per replica
    members: int = 0  # number of workers of a gang; 0: as many as are ready, at most one per replica

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise LocalProtocolError(f"a pass of {self.replicas} replicas")
        if self.pulled and not self.ordered:
            raise LocalProtocolError("an unordered pass can't be pulled")
        if self.first_step < 0 or (self.first_step and not self.ordered):
            raise LocalProtocolError(f"first_step {self.first_step} of a pass that is read in no order")
        if self.concurrency < 0 or self.at_once < (self.concurrency > 0) or (self.at_once and self.gang):
            raise LocalProtocolError(f"{self.at_once} calls at once, {self.concurrency} in all")
        if self.limits and not self.at_once:
            raise LocalProtocolError(f"limits {self.limits} of calls that are executed one after the other")
        if self.speculation and (self.gang or self.concurrency or self.speculation < 1.0):
            raise LocalProtocolError(f"speculation {self.speculation}: it is 0, or 1 and more and of no gang")
