"""How collectives communicate; nothing in here changes a result, but for gloo and nccl."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field, replace
from typing import Final

TIMEOUT_S: Final = 600.0
"""How long a collective waits for replicas that do not come, where nothing else was said."""


class Implementation(enum.StrEnum):
    """Which road the values of a collective take.

    AUTO is SHARED where the members share memory, else TRANSPORT; those two give the same bits. GLOO
    and NCCL go through torch.distributed, for torch tensors, and fold in an order of their own.
    """

    AUTO = "auto"
    SHARED = "shared"
    TRANSPORT = "transport"
    GLOO = "gloo"
    NCCL = "nccl"

    @classmethod
    def of(cls, name: Implementation | str) -> Implementation:
        """Return the implementation of a name, in any case of letters.

        Raises:
            ValueError: there is none of that name.
        """
        if isinstance(name, cls):
            return name
        try:
            return cls(name.lower())
        except (AttributeError, ValueError):
            names = ", ".join(repr(str(member)) for member in cls)
            raise ValueError(
                f"{name!r} is no implementation of collectives; expected one of {names}"
            ) from None


@dataclass(frozen=True, slots=True)
class CommunicationOptions:
    """Options of a strategy's collectives, or of one call (tf.distribute's CommunicationOptions).

    Args:
        bytes_per_pack: large values travel in packs of so many bytes; 0: pipedist chooses.
        timeout_s: seconds after which replicas that have not come are taken to hang; None:
            TIMEOUT_S. math.inf waits for ever.
        implementation: which road the values take; a name does too.

    Raises:
        ValueError: a negative number of bytes, a timeout that is not above 0, or an unknown name.
        TypeError: bytes that are no int, or a timeout that is no number.
    """

    bytes_per_pack: int = 0
    timeout_s: float | None = None
    implementation: Implementation = Implementation.AUTO
    key: str = field(init=False, repr=False, compare=False, default="")
    """What replicas must agree on, as a text: cheaper to hash than the fields."""

    def __post_init__(self) -> None:
        if isinstance(self.bytes_per_pack, bool) or not isinstance(self.bytes_per_pack, int):
            raise TypeError(f"bytes_per_pack is an int, not {self.bytes_per_pack!r}")
        if self.bytes_per_pack < 0:
            raise ValueError(
                f"bytes_per_pack is {self.bytes_per_pack}, expected 0 (pipedist chooses) or more"
            )
        if self.timeout_s is not None:
            if isinstance(self.timeout_s, bool) or not isinstance(self.timeout_s, (int, float)):
                raise TypeError(f"timeout_s is a number of seconds or None, not {self.timeout_s!r}")
            if not self.timeout_s > 0 or math.isnan(self.timeout_s):
                raise ValueError(f"timeout_s is {self.timeout_s}, expected more than 0 seconds")
        object.__setattr__(self, "implementation", Implementation.of(self.implementation))
        object.__setattr__(self, "key", f"{self.bytes_per_pack} {self.implementation}")

    @property
    def waits_s(self) -> float:
        """The timeout in force, seconds."""
        return TIMEOUT_S if self.timeout_s is None else float(self.timeout_s)

    def merged(self, at_call: CommunicationOptions | None) -> CommunicationOptions:
        """Return the options of one call: what it says itself, and for the rest what this says.

        A field that a call leaves at its default says nothing, as in tf.distribute.
        """
        if at_call is None or at_call == _DEFAULT:
            return self
        said = {
            name: value
            for name, default in (
                ("bytes_per_pack", 0),
                ("timeout_s", None),
                ("implementation", Implementation.AUTO),
            )
            if (value := getattr(at_call, name)) != default
        }
        return replace(self, **said)


_DEFAULT: Final = CommunicationOptions()
