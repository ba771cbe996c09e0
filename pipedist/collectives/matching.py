"""What is said where replicas do not meet: one text, the same in every replica."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipedist.collectives.signatures import Call, describe

RETURNED = "returned, and calls nothing more"

_ADVICE = (
    "Every replica must call the same collectives, in the same order, with trees of the same structure, "
    "dtypes and shapes (all_gather: sizes may differ along its axis), and must not return before the "
    "others have called theirs."
)


def account(call: Call | None) -> str:
    """Return what one replica does, for the others: None: it has returned."""
    return RETURNED if call is None else f"{describe(call)}, at {call.request.where}"


def mismatch(number: int, accounts: Mapping[int, str]) -> str:
    """Return the text of a mismatch.

    Args:
        number: of the collective in the step, from 1.
        accounts: by replica, what it does.
    """
    together: dict[str, list[int]] = {}
    for replica in sorted(accounts):
        together.setdefault(accounts[replica], []).append(replica)
    what = "differs between replicas" if RETURNED not in together else "was not called by every replica"
    lines = [f"collective {number} of this step {what}:"]
    lines += [f"  {_spell(replicas)}: {text}" for text, replicas in together.items()]
    return "\n".join([*lines, _ADVICE])


def waits(number: int, text: str, missing: str, waited_s: float) -> str:
    """Return the text of a collective for which somebody does not come.

    Args:
        number: of the collective in the step, from 1.
        text: the account of a replica that waits.
        missing: who does not come.
    """
    return (
        f"collective {number} of this step has waited {waited_s:g} s for {missing}: {text}. Raise "
        "CommunicationOptions(timeout_s=...) if the step may take so long; else look where they hang"
    )


def spell_replicas(replicas: Sequence[int]) -> str:
    """Return "replica 3", or "replicas 0-2, 5"."""
    return _spell(list(replicas))


def _spell(replicas: list[int]) -> str:
    runs: list[list[int]] = []
    for replica in replicas:
        if runs and replica == runs[-1][1] + 1:
            runs[-1][1] = replica
        else:
            runs.append([replica, replica])
    spelled = ", ".join(str(lo) if lo == hi else f"{lo}-{hi}" for lo, hi in runs)
    return f"replica{'s' if len(replicas) > 1 else ''} {spelled}"
