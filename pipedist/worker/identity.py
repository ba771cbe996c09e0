"""The identity of a worker: proof of its name, and its report on joining a cluster.

All workers of a cluster may share one key, so the key does not distinguish them. Therefore each supervisor draws
a secret, its PROOF, and ends its worker's name with a digest of the rest of the name and the proof. A peer shows
the proof with the name, over a connection that only the scheduler can read, and the scheduler computes the digest
again. It needs no list of names: a name belongs to its supervisor even while no connection exists, and for a
later scheduler that has never received it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

from msgspec import Struct

from pipedist.protocol.messages import Welcome

_PROOF_BYTES = 32
_DIGEST_BYTES = 10  # 80 bits: the number of attempts that finding another proof takes, for each name


def new_name(prefix: str) -> tuple[str, str]:
    """Return a name that begins with `prefix`, and its proof."""
    proof = os.urandom(_PROOF_BYTES).hex()
    return f"{prefix}:{_digest(prefix, proof)}", proof


def is_proven(name: str, proof: str) -> bool:
    import hmac  # takes milliseconds to import; local workers prove nothing

    prefix, _, digest = name.rpartition(":")
    found = _digest(prefix, proof)
    return len(proof) == 2 * _PROOF_BYTES and hmac.compare_digest(found.encode(), digest.encode())


def _digest(prefix: str, proof: str) -> str:
    import base64  # as hmac
    import hashlib

    text = f"pipedist worker\0{prefix}\0{proof}".encode("utf-8", "surrogatepass")
    return base64.b32encode(hashlib.sha256(text).digest()[:_DIGEST_BYTES]).decode().lower()


SILENT_S = 2.0  # how long a scheduler may take to reply before the worker reports that it waits


class JoinReporter(Struct):
    """Reports the join of a worker to people, and applies the Welcome.

    `diagnose` returns a problem of the endpoint, beginning with "; "; "" if none is known.
    """

    report: Callable[[str], None]
    threads: int
    join_s: float
    diagnose: Callable[[], str]
    _waiting_since: float | None = None  # when Hello was sent; None: no report is due

    def begin(self) -> None:
        self._waiting_since = time.monotonic()

    def check(self) -> None:
        """Report once, after SILENT_S, that the worker waits for a scheduler."""
        if self._waiting_since is None:
            return
        if SILENT_S <= time.monotonic() - self._waiting_since < self.join_s:
            self._waiting_since = None
            self.report(f"waiting for the driver, for at most {self.join_s:.3g} s{self.diagnose()}")

    def joined(self, welcome: Welcome) -> None:
        """Report the cluster, and put the scheduler's import path before this one's."""
        self._waiting_since = None
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        self.report(f"joined cluster {welcome.cluster}, {threads}")
        if welcome.notice:
            self.report(welcome.notice)
        theirs = [entry for entry in map(os.fsdecode, welcome.sys_path) if os.path.isabs(entry)]
        if theirs:
            sys.path[:] = theirs + [entry for entry in sys.path if entry not in theirs]
