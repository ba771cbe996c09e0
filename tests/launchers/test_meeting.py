"""Where a run meets its workers: who is let in, what is taken over, and who removes it."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from pipedist.errors import UsageError
from pipedist.launchers.meeting import Holder, Meeting, leave, meeting
from pipedist.transport.endpoints import make_private_directory


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def left(pointer: Path) -> Meeting:
    """Return a place as a killed process leaves it."""
    opened = meeting(pointer)
    place = opened.__enter__()
    kept = {path.name: path.read_bytes() for path in place.directory.iterdir()}
    said = pointer.read_text()
    opened.__exit__(None, None, None)
    place.directory.mkdir(mode=0o700)
    for name, data in kept.items():
        (place.directory / name).write_bytes(data)
    socket = place.endpoint.removeprefix("ipc://")
    for path in (socket, f"{socket}.mem"):
        Path(path).touch()
    pointer.write_text(said)
    pointer.chmod(0o600)
    return place


def test_it_is_private_and_gone_at_the_end(tmp_path: Path, sockets: Path) -> None:
    pointer = tmp_path / "workers.json"
    with meeting(pointer) as place:
        assert pointer.stat().st_mode & 0o777 == 0o600
        assert place.directory.stat().st_mode & 0o777 == 0o700
        assert place.directory.parent == sockets
        assert place.taken == {}
    assert not list(sockets.iterdir())
    assert not pointer.exists()


def test_what_a_killed_process_left_is_taken_over(tmp_path: Path, sockets: Path) -> None:
    pointer = tmp_path / "workers.json"
    before = left(pointer)
    held = before.slot(3).take("terms")
    assert held is not None
    with meeting(pointer) as place:
        assert place.endpoint == before.endpoint
        assert not list(place.directory.glob(f"{place.endpoint[-16:]}*"))  # it can be bound again
        assert place.taken == {3: Holder(0, "terms")}
        assert place.slot(3).take("other") is None
        place.slot(3).write(held, Holder(17, "terms"))
        assert place.slot(3).holder == Holder(17, "terms")
        os.close(held)
        assert place.slot(3).holder is None
    assert not list(sockets.iterdir())


def garbage(pointer: Path, _place: Meeting) -> None:
    pointer.write_text("{")


def readable(pointer: Path, _place: Meeting) -> None:
    pointer.chmod(0o644)


def link(pointer: Path, _place: Meeting) -> None:
    pointer.rename(pointer.with_name("elsewhere"))
    pointer.symlink_to(pointer.with_name("elsewhere"))


def future(pointer: Path, _place: Meeting) -> None:
    pointer.write_text(json.dumps({**json.loads(pointer.read_text()), "format": 2}))


def elsewhere(pointer: Path, _place: Meeting) -> None:
    pointer.write_text(json.dumps({**json.loads(pointer.read_text()), "socket": "../../etc/passwd"}))


def no_socket(pointer: Path, _place: Meeting) -> None:
    pointer.write_text(json.dumps({**json.loads(pointer.read_text()), "socket": "run.lock"}))


def open_to_others(_pointer: Path, place: Meeting) -> None:
    place.directory.chmod(0o755)


def vanished(_pointer: Path, place: Meeting) -> None:
    place.directory.rename(place.directory.with_name("x"))


def none_of_ours(_pointer: Path, place: Meeting) -> None:
    (place.directory / "run.lock").unlink()


@pytest.mark.parametrize(
    "spoil", [garbage, readable, link, future, elsewhere, no_socket, open_to_others, vanished, none_of_ours]
)
def test_what_is_stale_or_not_ours_is_left_alone(
    tmp_path: Path, sockets: Path, spoil: Callable[[Path, Meeting], None]
) -> None:
    pointer = tmp_path / "workers.json"
    before = left(pointer)
    spoil(pointer, before)
    with meeting(pointer) as place:
        assert place.directory != before.directory
        assert pointer.is_file()
        assert not pointer.is_symlink()
    assert len(list(sockets.iterdir())) == 1  # what was there


def test_a_place_in_use_is_left_alone(tmp_path: Path, sockets: Path) -> None:
    """Two folders whose pointers are the same: one was copied."""
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    with meeting(one) as first:
        other.write_bytes(one.read_bytes())
        other.chmod(0o600)
        with meeting(other) as second:
            assert first.directory != second.directory
        assert first.directory.exists()


def test_a_pointer_that_cannot_be_written(tmp_path: Path, sockets: Path) -> None:
    with (
        pytest.raises(UsageError, match=r"can't write .*workers.json"),
        meeting(tmp_path / "no" / "workers.json"),
    ):
        pass
    assert not list(sockets.iterdir())


def test_the_last_worker_removes_it(tmp_path: Path, sockets: Path) -> None:
    place = left(tmp_path / "workers.json")
    held = [place.slot(number).take("") for number in (0, 1)]
    for number, descriptor in enumerate(held):
        assert place.directory.exists()
        assert descriptor is not None
        os.close(descriptor)
        leave(place.directory, number)
    assert not place.directory.exists()
    leave(place.directory, 0)  # harmless


def test_the_last_two_leave_at_once(tmp_path: Path, sockets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one gives up, as the other one, which has seen it there, looks for very long."""
    monkeypatch.setattr("pipedist.launchers.meeting._LAST_S", 0.0)
    place = left(tmp_path / "workers.json")
    held = [place.slot(number).take("") for number in (0, 1)]
    assert None not in held
    taken = Meeting.taken.fget  # type: ignore[attr-defined]

    def slowly(self: Meeting) -> dict[int, Holder]:
        found: dict[int, Holder] = taken(self)
        last = held.pop()
        monkeypatch.setattr(Meeting, "taken", property(taken))
        os.close(last)  # type: ignore[arg-type]
        leave(place.directory, 1)
        assert place.directory.exists()
        return found

    monkeypatch.setattr(Meeting, "taken", property(slowly))
    os.close(held[0])  # type: ignore[arg-type]
    leave(place.directory, 0)
    assert not place.directory.exists()


def test_a_worker_leaves_the_place_of_a_run_to_it(
    tmp_path: Path, sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipedist.launchers.meeting._LAST_S", 0.05)
    with meeting(tmp_path / "workers.json") as place:
        leave(place.directory, 0)
        assert place.directory.exists()


def test_a_lock_on_a_file_that_was_removed_meanwhile_is_none(
    tmp_path: Path, sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker that had the slot leaves just then, and removes its file."""
    with meeting(tmp_path / "workers.json") as place:
        path = place.directory / "worker-0"
        path.touch()
        flock = fcntl.flock

        def removed(descriptor: int, how: int) -> None:
            path.unlink()
            path.touch()
            flock(descriptor, how)

        with monkeypatch.context() as patched:
            patched.setattr(fcntl, "flock", removed)
            assert place.slot(0).take("") is None
        held = place.slot(0).take("")
        assert held is not None
        os.close(held)


def test_another_directory_is_not_removed(sockets: Path) -> None:
    directory = make_private_directory()
    leave(directory, 0)
    assert directory.exists()
