"""The sections in a `run` stage: collectives, resources, rate and retry."""

from typing import Annotated, Final, Literal

from pydantic import Field, WithJsonSchema

from pipedist.core.gpus import GPUS_MAX
from pipedist.spec.fields import (
    SECONDS_MAX,
    Expected,
    ExpectedShape,
    PositiveSeconds,
    Seconds,
    Section,
    one_or_more,
    satisfies,
)

RETRIES_MAX = 1_000
CALLS_MAX = 1_000_000_000
BYTES_PER_PACK_MAX = 2**40

Implementation = Literal["auto", "shared", "transport", "gloo", "nccl"]
"""Transports of the values of collectives; `pipedist.collectives` describes them."""

TORCH_IMPLEMENTATIONS: Final = ("gloo", "nccl")  # the transports that belong to torch.distributed

OptionalSeconds = Annotated[
    Annotated[float, Field(gt=0, le=SECONDS_MAX, allow_inf_nan=False)] | None,
    Expected("a number of seconds, more than 0, or null"),
]
_ExceptionName = Annotated[
    str,
    satisfies(lambda name: all(part.isidentifier() for part in name.split("."))),
    Expected("the name of an exception"),
]


class CollectivesSpec(Section):
    """How the collectives of a run communicate (tf.distribute's CommunicationOptions)."""

    implementation: Implementation = Field(
        default="auto",
        description="The transport of the values. `auto`: `shared`, which is shared memory, if all workers of "
        "the step are on one host, else `transport`, which sends them through the driver; the bits are the "
        "same. `gloo` and `nccl` use torch.distributed, for torch tensors; they need a worker for each replica, "
        "and their bits differ.",
        examples=["auto"],
    )
    timeout_s: OptionalSeconds = Field(
        default=None,
        description="How long a collective waits for missing replicas, in seconds, before the step is retried "
        "without the workers that block it. `null`: 600.",
        examples=[30],
    )
    bytes_per_pack: Annotated[
        int, Field(ge=0, le=BYTES_PER_PACK_MAX), Expected(f"an integer from 0 to {BYTES_PER_PACK_MAX}")
    ] = Field(
        default=0,
        description="The size of the packs in which large values are sent, in bytes; 0: pipedist chooses. It "
        "never changes a bit.",
        examples=[0],
    )


class ResourcesSpec(Section):
    """The resources that one call needs for itself."""

    gpus: Annotated[
        int | float,
        satisfies(lambda gpus: 0 < gpus < 1 or gpus in range(1, GPUS_MAX + 1)),
        WithJsonSchema(
            {
                "anyOf": [
                    {"type": "integer", "minimum": 1, "maximum": GPUS_MAX},
                    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
                ]
            }
        ),
        Expected(f"an integer from 1 to {GPUS_MAX}, or a fraction between 0 and 1"),
    ] = Field(
        default=0.0,
        description="The number of GPUs. The call runs only on a worker that owns them, and `ctx.device` is the "
        "first one. A fraction, such as 0.5, is the part of one GPU that a call takes.",
        examples=[1],
    )
    devices: (
        Annotated[Literal["tpu", "gpu", "cpu"], Expected("tpu, gpu or cpu", "tpu", "gpu", "cpu")] | None
    ) = Field(
        default=None,
        description="The kind of JAX devices, one for each replica, of a function with `compile`.",
        examples=["cpu"],
    )


class RateSpec(Section):
    """The maximum rate of calls, over all workers."""

    calls: Annotated[
        float, Field(gt=0, le=CALLS_MAX, allow_inf_nan=False), Expected("a number of calls, more than 0")
    ] = Field(description="The number of calls that begin in `per_s` seconds.", examples=[50])
    per_s: PositiveSeconds = Field(default=1.0, description="The time, in seconds.", examples=[60])


class RetrySpec(Section):
    """Further attempts of a call in its worker, with waits between them."""

    attempts: Annotated[int, Field(ge=2, le=RETRIES_MAX), Expected(f"an integer from 2 to {RETRIES_MAX}")] = (
        Field(description="How often a call is attempted, the first time included.", examples=[5])
    )
    backoff_s: Seconds = Field(
        default=0.5,
        description="The wait before the second attempt, in seconds; it doubles each time, up to 60 s, and is "
        "multiplied by 0.5 to 1.5, which depends on the spec's seed and the call only.",
        examples=[1],
    )
    on: Annotated[
        tuple[_ExceptionName, ...],
        ExpectedShape(
            "the name of an exception, or a list of names",
            one_or_more,
            _ExceptionName | Annotated[list[_ExceptionName], Field(min_length=1)],
        ),
    ] = Field(
        default=(),
        description="The exceptions after which there is another attempt, by the name of the class or a base "
        "class: `TimeoutError`, `httpx.TransportError`. A class that no module of the spec imports is named with its "
        "module. Default: all. After a `pipedist.RetryAfter` there is always one, after the wait that it names, of at "
        "most 3600 s.",
        examples=[["TimeoutError", "ConnectionError"]],
    )
