"""What a spec says of its states: who feeds them, who reads them, and what can't be waited for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipedist.spec.document import Path
from pipedist.spec.problems import Problems
from pipedist.spec.training import Links, Training, ancestry, rhythm, root_of, training_of

Waits = Sequence[tuple[Path, str, str, str]]
"""(place, waiting stage, awaited stage, the text at the place to point at or "")."""


class StateChecks:
    """Checks the states of one spec; every mistake is noted.

    Args:
        datasets: the datasets as they are written, by name.
        links: what the stages depend on.
        waits: where a stage waits for another to be complete.
        written: the keys of each stage.
        problems: where mistakes are noted.
    """

    def __init__(
        self,
        datasets: Mapping[str, object],
        links: Mapping[str, Links],
        waits: Waits,
        written: Mapping[str, Mapping[str, object]],
        problems: Problems,
    ) -> None:
        self._datasets = datasets
        self._links = links
        self._waits = waits
        self._written = written
        self._problems = problems

    def check(self, *, acyclic: bool) -> None:
        """Check everything.

        Args:
            acyclic: no stages wait for each other directly: only then is it worth telling that
                they do so through their training.
        """
        training = training_of(tuple(self._datasets), self._links)
        if training is None:
            return
        self._one_feeder(training)
        self._ends()
        self._held_out(training)
        if acyclic:
            self._waits_of(training)

    def _one_feeder(self, training: Training) -> None:
        updates = [name for name, link in self._links.items() if link.verb == "update"]
        roots = {name: root_of(name, self._datasets, self._links) for name in updates}
        first = next(name for name in updates if roots[name] == training.feeder)
        for name, root in roots.items():
            if root not in (training.feeder, None):
                self._problems.add(
                    ("stages", name, "of"),
                    f"`{name}` is fed by the dataset `{root}`, and `{first}` by `{training.feeder}`",
                    expected="one dataset that feeds all updates",
                )

    def _ends(self) -> None:
        """What ends a dataset's epochs is asked before the last one is over."""
        for name, link in self._links.items():
            source = self._links.get(link.of or "")
            if link.verb != "update" or source is None or source.verb not in ("reduce", "gather"):
                continue
            ends = self._written[name].get("until") is not None
            if ends and rhythm(name, self._links) == "run":
                self._problems.add(
                    ("stages", name, "until"),
                    f"`{link.of}` has one value for the run: `until` would be asked when all epochs are over",
                    expected=f"`per: step` or `per: epoch` in `{link.of}`, or no `until`",
                    at_key=True,
                )

    def _held_out(self, training: Training) -> None:
        for dataset in training.held_out:
            why = (
                f"`{dataset}` is read once after each epoch of `{training.feeder}`, "
                "because its stages read a state"
            )
            keys = self._datasets[dataset]
            epochs = keys.get("epochs", 1) if isinstance(keys, dict) else 1
            if type(epochs) is int and epochs > 1:
                self._problems.add(("datasets", dataset, "epochs"), why, expected="no `epochs`", at_key=True)
            for name, link in self._links.items():
                if link.verb not in ("reduce", "gather") or link.per == "epoch":
                    continue
                if root_of(name, self._datasets, self._links) == dataset:
                    is_written = "per" in self._written[name]
                    self._problems.add(
                        ("stages", name, "per") if is_written else ("stages", name),
                        f"{why}: `{name}` has a value for each",
                        expected="`per: epoch`; or `after: UPDATE` on the run, for the last states",
                        at_key=not is_written,
                    )

    def _waits_of(self, training: Training) -> None:
        """What takes turns in the training can't wait for its end."""
        for path, name, awaited, token in self._waits:
            if name not in training.members | training.early or awaited not in self._links:
                continue
            stuck = [other for other in ancestry(awaited, self._links) if other in training.members]
            if stuck:
                self._problems.add(
                    path,
                    f"`{name}` takes turns with the updates of `{training.feeder}`, and `{awaited}` is "
                    "complete only when these have ended",
                    expected="a stage that depends on no state, or ${state.NAME}",
                    fragment=token,
                )
