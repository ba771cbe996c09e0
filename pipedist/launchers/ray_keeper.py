"""What runs inside the Ray actor that places workers which outlive the process of their run.

It is detached: Ray does not end it with the run's process. Placement group and actors belong to it, and Ray
ends them with it, however it ends. It ends by itself when nobody goes on with the run:

| who is gone | it ends |
|---|---|
| all workers, which found no process of the run | when it has not heard of one for `SILENCE_S` either |
| the run's process, and some workers can't leave: their nodes are lost | after `LOST_S` and `rejoin_s` |

Where its own node is lost, Ray starts it on another one, and it places all workers anew.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from pipedist.launchers.hosted import Terms
from pipedist.launchers.ray_placing import Room, end_hosts, make_group, make_host

NAMESPACE = "pipedist"
"""Where keepers are found by their names."""

SILENCE_S = 10.0
"""How long a process of the run may be silent before it counts as gone, where no worker hears it either."""

LOST_S = 60.0
"""How long it may be silent where workers are there: its event loop may be busy."""

_LOOK_S = 0.5
"""How soon the end of a worker is noticed."""


class RayKeeper:
    """Keeps the workers of a run, for as long as one of its processes is there, and some time longer.

    Its methods are called in threads of the actor.

    Args:
        room: what Ray is to set aside.
        terms: how the workers join.
        brings_code: see `RayHost`.
        rejoin_s: how long the next process of the run is waited for, seconds.
    """

    def __init__(self, room: Room, terms: Terms, brings_code: bool, rejoin_s: float) -> None:
        self._room = room
        self._terms = terms
        self._brings_code = brings_code
        self._rejoin_s = rejoin_s
        self._heard_at = time.monotonic()
        self._news = threading.Condition()
        self._left: dict[int, str] = {}
        """How workers left that will not come back, by number, in that order."""
        self._is_over = False
        self._group = make_group(room)
        self._hosts: list[Any] = [self._make(number) for number in range(room.workers)]
        self._asked: dict[Any, tuple[int, bool]] = {}
        """By what will be answered: the number of the actor, and whether it was asked how its worker left;
        otherwise, whether it is there (again)."""
        for number in range(room.workers):
            self._ask(number)
        threading.Thread(target=self._keep, name="pipedist-ray-keeper", daemon=True).start()

    def has_room(self, timeout_s: float) -> bool:
        """Return whether Ray has set the room aside, within some seconds."""
        self._heard()
        return bool(self._group.wait(timeout_s))

    def take_over(self, rejoin_s: float) -> bool:
        """Serve another process of the run: place anew the workers that have left.

        Args:
            rejoin_s: as for the class.

        Returns:
            Whether it can; otherwise it is about to end.
        """
        import ray

        with self._news:
            if self._is_over:
                return False
            self._rejoin_s = rejoin_s
            self._heard()
            for number in self._left:
                ray.kill(self._hosts[number])
                self._hosts[number] = self._make(number)
                self._ask(number)
            self._left.clear()
            return True

    def news(self, known: int, timeout_s: float) -> list[str]:
        """Return how workers left that will not come back, beyond those known, as soon as there is one.

        Args:
            known: how many are.
            timeout_s: how long is waited at most, seconds; then there is none.
        """
        with self._news:
            self._heard()
            self._news.wait_for(lambda: len(self._left) > known, timeout_s)
            self._heard()
            return list(self._left.values())[known:]

    def close(self) -> None:
        """End all workers, and give back their room; who asked for it ends the actor."""
        with self._news:
            self._is_over = True
            self._heard()
        end_hosts(self._hosts, self._group)

    def _heard(self) -> None:
        self._heard_at = time.monotonic()

    def _make(self, number: int) -> Any:
        return make_host(self._room, self._group, number, self._terms, self._brings_code)

    def _ask(self, number: int, *, left: bool = True) -> None:
        host = self._hosts[number]
        self._asked[(host.left if left else host.__ray_ready__).remote()] = (number, left)

    # -- in a thread of its own -------------------------------------------------------------------

    def _keep(self) -> None:
        import ray

        try:
            self._until_over()
        finally:  # also by a mistake: nobody else would ever end this actor
            try:
                end_hosts(self._hosts, self._group)
            finally:
                ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    def _until_over(self) -> None:
        import ray

        while not self._may_end():
            with self._news:
                asked = list(self._asked)
            if asked:
                heard = [self._hear(answer) for answer in ray.wait(asked, timeout=_LOOK_S)[0]]
                if all(heard):
                    continue
            time.sleep(_LOOK_S)

    def _may_end(self) -> bool:
        with self._news:
            is_empty = self._is_over or len(self._left) == self._room.workers
            patience_s = SILENCE_S if is_empty else LOST_S + self._rejoin_s
            if time.monotonic() - self._heard_at <= patience_s:
                return False
            self._is_over = True
            return True

    def _hear(self, answer: Any) -> bool:
        """Take note of an answer; return whether it was one.

        Otherwise Ray does not know yet whether the actor's node is lost: it is asked again.
        """
        import ray
        from ray.exceptions import ActorUnavailableError, RayError

        with self._news:
            number, asked_left = self._asked.pop(answer)
            try:
                how = str(ray.get(answer))
                if asked_left:
                    self._leave(number, how)
                else:
                    self._ask(number)  # Ray has started it again
            except RayError as error:
                if asked_left or isinstance(error, ActorUnavailableError):
                    self._ask(number, left=False)
                    return asked_left
                self._leave(number, str(error).strip())
            return True

    def _leave(self, number: int, how: str) -> None:
        self._left[number] = how
        self._news.notify_all()
