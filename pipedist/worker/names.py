"""The name of a worker that dials in: nobody else can prove that it is theirs.

All workers of a cluster may share one key, so a key does not tell one of them from another. Therefore each
supervisor draws a secret, its PROOF, and ends its worker's name with a digest of the rest of the name and
the proof. Whoever speaks in a name shows the proof, over a connection that only the scheduler can read; the
scheduler computes the digest again. It keeps no list for that: a name also stays its supervisor's while no
connection is there, and for the next scheduler, to whom nobody has spoken yet.
"""

from __future__ import annotations

import os

_PROOF_BYTES = 32
_DIGEST_BYTES = 10  # 80 bits: to find another proof for a name takes that many attempts, a name at a time


def new_name(prefix: str) -> tuple[str, str]:
    """Return a name that begins with `prefix`, and its proof."""
    proof = os.urandom(_PROOF_BYTES).hex()
    return f"{prefix}:{_digest(prefix, proof)}", proof


def is_proven(name: str, proof: str) -> bool:
    """Whether this is the proof of the name."""
    import hmac  # takes milliseconds to import, and local workers prove nothing

    prefix, _, digest = name.rpartition(":")
    found = _digest(prefix, proof)
    return len(proof) == 2 * _PROOF_BYTES and hmac.compare_digest(found.encode(), digest.encode())


def _digest(prefix: str, proof: str) -> str:
    import base64  # likewise
    import hashlib

    text = f"pipedist worker\0{prefix}\0{proof}".encode("utf-8", "surrogatepass")
    return base64.b32encode(hashlib.sha256(text).digest()[:_DIGEST_BYTES]).decode().lower()
