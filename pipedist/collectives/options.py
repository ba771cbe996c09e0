"""Options of collectives; none changes a result, except the implementations gloo and nccl."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field, replace
from typing import Final

TIMEOUT_S: Final = 600.0  # default time that a collective waits for missing replicas, seconds


class Implementation(enum.StrEnum):
    """How the values of a collective are transferred.

    AUTO selects SHARED if the members share memory, else TRANSPORT; both give the same bits. GLOO and NCCL
    transfer torch tensors through torch.distributed, which folds in its own order.
    """

    AUTO = "auto"
    SHARED = "shared"
    TRANSPORT = "transport"
    GLOO = "gloo"
    NCCL = "nccl"

    @classmethod
    def of(cls, name: Implementation | str) -> Implementation:
        """Return the implementation of a name (case-insensitive), or raise ValueError."""
        if isinstance(name, cls):
            return name
        try:
            return cls(name.lower())
        except (AttributeError, ValueError):
            names = ", ".join(repr(str(member)) for member in cls)
            text = f"unknown implementation of collectives {name!r}; expected one of {names}"
            raise ValueError(text) from None


@dataclass(frozen=True, slots=True)
class CommunicationOptions:
    """Options of a strategy's collectives, or of one call (tf.distribute's CommunicationOptions).

    Args:
        bytes_per_pack: size of the pieces in which large values are transferred, bytes; 0: pipedist
            chooses.
        timeout_s: seconds after which missing replicas are considered hung; None: 600 s;
            math.inf: no limit.
        implementation: how values are transferred: an `Implementation` or its name.

    Raises:
        ValueError: `bytes_per_pack` is negative, `timeout_s` is not above 0, or the name is unknown.
        TypeError: `bytes_per_pack` is not an int, or `timeout_s` is not a number.

    Example:
        options = pipedist.CommunicationOptions(timeout_s=30)
        total = ctx.all_reduce("sum", gradient, options)
    """

    bytes_per_pack: int = 0
    timeout_s: float | None = None
    implementation: Implementation = Implementation.AUTO
    key: str = field(init=False, repr=False, compare=False, default="")
    """The options that replicas must agree on, as text: cheaper to hash than the fields."""

    def __post_init__(self) -> None:
        if isinstance(self.bytes_per_pack, bool) or not isinstance(self.bytes_per_pack, int):
            raise TypeError(f"`bytes_per_pack` must be an int, got {self.bytes_per_pack!r}")
        if self.bytes_per_pack < 0:
            raise ValueError(
                f"`bytes_per_pack` must be 0 (pipedist chooses) or more, got {self.bytes_per_pack}"
            )
        if self.timeout_s is not None:
            if isinstance(self.timeout_s, bool) or not isinstance(self.timeout_s, (int, float)):
                raise TypeError(f"`timeout_s` must be a number of seconds or None, got {self.timeout_s!r}")
            if not self.timeout_s > 0 or math.isnan(self.timeout_s):
                raise ValueError(f"`timeout_s` must be more than 0 seconds, got {self.timeout_s}")
        object.__setattr__(self, "implementation", Implementation.of(self.implementation))
        object.__setattr__(self, "key", f"{self.bytes_per_pack} {self.implementation}")

    @property
    def waits_s(self) -> float:
        """The effective timeout, seconds."""
        return TIMEOUT_S if self.timeout_s is None else float(self.timeout_s)

    def merged(self, at_call: CommunicationOptions | None) -> CommunicationOptions:
        """Return the options of one call: its own fields, and these for fields at their default.

        As in tf.distribute, a field at its default counts as unset.
        """
        if at_call is None or at_call == _DEFAULT:
            return self
        given = {name: getattr(at_call, name) for name in ("bytes_per_pack", "timeout_s", "implementation")}
        changed = {name: value for name, value in given.items() if value != getattr(_DEFAULT, name)}
        return replace(self, **changed)


_DEFAULT: Final = CommunicationOptions()
