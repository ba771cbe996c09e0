from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from pipedist.cli.commands import explain_run
from pipedist.errors import OutputError, UsageError
from pipedist.outputs import FinishedRun, RunFolder, open_folder, run_folder


def start(
    path: Path, *, run: str = "r1", spec: str = "s1", outputs: list[str] | None = None, **flags: bool
) -> RunFolder:
    folder = open_folder(path, run_id=run, spec_hash=spec, outputs=outputs or ["a.json"], **flags)
    assert isinstance(folder, RunFolder)
    if folder.found == "unfinished":
        stages = flags.get("stages", {})
        folder.take_over(folder.run_id, spec, outputs or ["a.json"], stages, stages)
    return folder


def complete(path: Path, text: str = "1", **kwargs: Any) -> dict[str, Path]:
    outputs = kwargs.get("outputs") or ["a.json"]
    with start(path, **kwargs) as folder:
        for name in outputs:
            folder.staged(name).write_text(text)
        return folder.finish({"run": kwargs.get("run", "r1")})


def visible(path: Path) -> list[str]:
    return sorted(
        str(p.relative_to(path)) for p in path.rglob("*") if p.is_file() and ".pipedist" not in p.parts
    )


def test_files_appear_when_the_run_is_complete(tmp_path: Path) -> None:
    out = tmp_path / "out" / "x"
    with start(out, outputs=["a.json", "sub/b.json"]) as folder:
        folder.staged("a.json").write_text("1")
        folder.staged("sub/b.json").write_text("2")
        assert visible(out) == []
        assert folder.final("sub/b.json") == out / "sub/b.json"
        assert folder.finish({}) == {"a.json": out / "a.json", "sub/b.json": out / "sub/b.json"}
    assert visible(out) == ["a.json", "sub/b.json"]
    assert not (out / ".pipedist/new").exists()


def test_no_folder_is_named_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"~/x: `~` is expanded only by a shell"):
        start(Path("~/x"))
    assert not list(tmp_path.iterdir())
    start(Path("~x")).close()


def test_a_finished_run_is_replaced_when_the_next_one_is_complete(tmp_path: Path) -> None:
    out = tmp_path / "x"
    complete(out, "old", outputs=["a.json", "gone.json"])
    (out / "notes.txt").write_text("mine")
    with start(out, run="r2", outputs=["a.json", "new.json"]) as folder:
        folder.staged("a.json").write_text("new")
        folder.staged("new.json").write_text("new")
        assert (out / "a.json").read_text() == "old"
        folder.finish({})
    assert visible(out) == ["a.json", "new.json", "notes.txt"]
    assert (out / "a.json").read_text() == "new"


def test_overwriting_an_unfinished_run_requires_restart(tmp_path: Path) -> None:
    out = tmp_path / "x"
    start(out).close()
    with pytest.raises(UsageError, match=r"unfinished run r1.*--resume continues.*--restart discards"):
        start(out, run="r2")
    with start(out, run="r3", resume=True) as folder:
        assert "has no journal" in folder.notice
        assert "starting fresh" in folder.notice
    with start(out, run="r4", restart=True) as folder:
        assert folder.notice == ""
        folder.staged("a.json").write_text("1")
        folder.finish({})
    complete(out, run="r5")


@pytest.mark.parametrize("failed", [True, False])
def test_a_resumed_run_keeps_its_id_and_files(tmp_path: Path, failed: bool) -> None:
    out = tmp_path / "x"
    complete(out, "old")
    names = {"b": "b.json", "c": "sub/c.json"}
    with start(out, run="r2", outputs=["b.json", "sub/c.json"], stages=names) as folder:
        folder.staged("b.json").write_text("new")
        (folder.staged("sub/c.json").parent / ".c.json.12ab.partial").write_text("half")
        (folder.journal / "journal").write_text("its records")
        if failed:
            folder.fail(resumable=True)
    with start(out, run="r3", outputs=["b.json", "sub/c.json"], stages=names, resume=True) as folder:
        assert (folder.run_id, folder.found, folder.notice) == ("r2", "unfinished", "")
        assert folder.staged("b.json").read_text() == "new"
        assert not list((out / ".pipedist" / "new").rglob("*.partial"))
        folder.staged("sub/c.json").write_text("2")
        folder.finish({})
    assert visible(out) == ["b.json", "sub/c.json"]


def test_take_over_keeps_files_of_another_spec(tmp_path: Path) -> None:
    out = tmp_path / "x"
    with start(out, outputs=["a.json", "b.json"], stages={"a": "a.json", "b": "b.json"}) as folder:
        for name in ("a.json", "b.json"):
            folder.staged(name).write_text(name)
        (folder.journal / "journal").write_text("its records")
        folder.finish({})
    found = open_folder(out, run_id="r2", spec_hash="s2", outputs=["b.json", "c.json"], resume="reuse")
    assert isinstance(found, RunFolder)
    with found as folder:
        assert (folder.run_id, folder.found) == ("r1", "other")
        assert folder.has("b", "b.json")
        assert not folder.has("a", "b.json")
        assert not folder.has("c", "c.json")
        folder.take_over("r2", "s2", ["b.json", "c.json"], {"b": "b.json", "c": "c.json"}, ["b", "c"])
        assert visible(out) == ["a.json", "b.json"]  # until the new run is complete
        folder.staged("c.json").write_text("c")
        folder.finish({})
    assert visible(out) == ["b.json", "c.json"]
    assert (out / "b.json").read_text() == "b.json"


def test_an_unfinished_run_keeps_the_finished_one_before_it(tmp_path: Path) -> None:
    out = tmp_path / "x"
    complete(out, "old", outputs=["a.json", "b.json"])
    with start(out, run="r2") as folder:
        folder.staged("a.json").write_text("half")
    assert (out / "a.json").read_text() == "old"
    complete(out, "new", run="r3", restart=True)
    assert visible(out) == ["a.json"]
    assert (out / "a.json").read_text() == "new"


def test_resume_of_a_finished_run_returns_it(tmp_path: Path) -> None:
    out = tmp_path / "x"
    complete(out)
    for _ in range(2):  # the lock was released
        found = open_folder(out, run_id="r2", spec_hash="s1", outputs=["a.json"], resume=True)
        assert found == FinishedRun(out, "r1", {"run": "r1"}, {"a.json": out / "a.json"})


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Let this process write nothing in a folder; root gets another user's rights meanwhile."""
    for each in (folder, *folder.rglob("*")):
        each.chmod(0o555 if each.is_dir() else 0o444)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        for each in (folder, *folder.rglob("*")):
            each.chmod(0o755)


def test_resume_of_a_finished_run_needs_no_right_to_write() -> None:
    with TemporaryDirectory() as name:  # the folders of `tmp_path` are closed to other users
        folder = Path(name, "out")
        Path(name).chmod(0o755)
        complete(folder)
        with read_only(folder):
            found = open_folder(folder, run_id="r2", spec_hash="s1", outputs=["a.json"], resume=True)
            assert isinstance(found, FinishedRun)
            options: tuple[dict[str, Any], ...] = ({}, {"restart": True}, {"resume": True, "spec": "other"})
            for each in options:
                with pytest.raises(UsageError, match=r"can't use .* as output folder: Permission denied"):
                    start(folder, **each)


def test_a_file_in_place_of_a_folder_of_a_run_is_named(tmp_path: Path) -> None:
    complete(tmp_path)
    (tmp_path / ".pipedist/new").touch()
    with pytest.raises(OutputError, match=r"can't write .*/\.pipedist/new: Not a directory"):
        start(tmp_path)


def test_resume_of_a_finished_run_with_missing_files(tmp_path: Path) -> None:
    out = tmp_path / "x"
    complete(out)
    results = out / ".pipedist/results.json"
    for text in ("{", "[]", '{"files": []}', "\0"):
        results.write_text(text)
        with pytest.raises(UsageError, match=r"results\.json of the finished run can't be read.*--restart"):
            start(out, resume=True)
    results.unlink()
    with pytest.raises(UsageError, match=r"can't be read \(No such file or directory\)"):
        start(out, resume=True)
    (out / "a.json").unlink()
    with pytest.raises(UsageError, match=r"x/a\.json of the finished run r1 is missing.*--restart"):
        start(out, resume=True)
    complete(out, restart=True)


def test_an_unreadable_journal_is_reported(tmp_path: Path) -> None:
    out = tmp_path / "x"
    start(out).close()
    (out / ".pipedist/journal").rmdir()
    (out / ".pipedist/journal").symlink_to("x" * 300)  # unreadable, also for root
    with pytest.raises(UsageError, match=r"can't use .*/x as output folder: File name too long"):
        start(out, resume=True)
    with pytest.raises(UsageError, match=r"can't use .*/x as output folder: File name too long"):
        explain_run(str(out), as_json=False)


def test_a_resume_without_a_run_is_reported(tmp_path: Path) -> None:
    with start(tmp_path / "x", resume=True) as folder:
        assert "nothing to resume" in folder.notice


@pytest.mark.parametrize("finished", [True, False])
def test_resume_of_another_spec_is_refused(tmp_path: Path, finished: bool) -> None:
    out = tmp_path / "x"
    if finished:
        complete(out)
    else:
        start(out).close()
    with pytest.raises(UsageError, match=r"another spec.*s1.*s2"):
        start(out, spec="s2", resume=True)


def test_resume_and_restart_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="exclude"):
        start(tmp_path / "x", resume=True, restart=True)


@pytest.mark.parametrize("flags", [{}, {"restart": True}, {"resume": True}])
def test_a_foreign_folder_is_left_unchanged(tmp_path: Path, flags: dict[str, bool]) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match="not made by pipedist"):
        start(tmp_path, **flags)
    assert os.listdir(tmp_path) == ["thesis.txt"]


def test_a_foreign_file_is_not_replaced(tmp_path: Path) -> None:
    out = tmp_path / "x"
    complete(out)
    (out / "b.json").write_text("mine")
    with pytest.raises(UsageError, match=r"b\.json has the name of an output"):
        start(out, outputs=["b.json"])
    assert (out / "b.json").read_text() == "mine"


def test_a_file_with_the_name_of_an_output_folder_is_reported_before_the_run(tmp_path: Path) -> None:
    out = tmp_path / "x"
    complete(out, outputs=["sub/a.json", "old"])
    (out / "b").write_text("mine")
    (out / "c").symlink_to(tmp_path)
    for name in ("b", "c"):
        with pytest.raises(UsageError, match=rf"/{name} has the name of an output"):
            start(out, outputs=[f"{name}/d/a.json"])
    complete(out, outputs=["sub/b.json", "old/a.json"])
    assert visible(out) == ["b", "old/a.json", "sub/b.json"]


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    with start(tmp_path / "x"), pytest.raises(UsageError, match="another run is writing to"):
        start(tmp_path / "x", restart=True)
    start(tmp_path / "x", restart=True).close()


def test_the_lock_goes_with_its_process(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path; from pipedist.outputs import open_folder\n"
        "f = open_folder(Path(sys.argv[1]), run_id='r1', spec_hash='s1', outputs=['a.json'])\n"
        "f.staged('a.json').write_text('half'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path / "x"], check=False)
    assert done.returncode == -signal.SIGKILL
    with pytest.raises(UsageError, match="unfinished run r1"):
        start(tmp_path / "x")
    assert visible(tmp_path / "x") == []


def test_a_kill_at_any_point_of_the_commit_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After every system call of `finish`, a crash: the next opening finds old or new, whole."""
    calls = ["os.replace", "os.unlink", "os.fsync"]
    for crash_at in range(40):
        out = tmp_path / str(crash_at)
        complete(out, "old", outputs=["a.json", "gone.json"])
        folder = start(out, run="r2", outputs=["a.json", "sub/b.json"])
        folder.staged("a.json").write_text("new")
        folder.staged("sub/b.json").write_text("new")
        countdown = [crash_at]

        class Crash(BaseException):
            pass

        def crashing(
            original: Any, countdown: list[int] = countdown, crash: type[BaseException] = Crash
        ) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                if countdown[0] == 0:
                    raise crash
                countdown[0] -= 1
                return original(*args, **kwargs)

            return call

        crashed = False
        with monkeypatch.context() as patch:
            for name in calls:
                patch.setattr(name, crashing(getattr(os, name.removeprefix("os."))))
            try:
                folder.finish({"run": "r2"})
            except Crash:
                crashed = True
        folder.close()
        if not crashed:
            assert crash_at > 8
            return
        found = open_folder(out, run_id="r3", spec_hash="s1", outputs=["a.json"], resume=True)
        if isinstance(found, FinishedRun):
            assert found.run_id == "r2"
            assert found.document == {"run": "r2"}
            assert visible(out) == ["a.json", "sub/b.json"]
            assert {path.read_text() for path in found.files.values()} == {"new"}
        else:
            found.close()
            assert visible(out) == ["a.json", "gone.json"]
            assert (out / "a.json").read_text() == "old"
    raise AssertionError("finish never got through")


def test_symbolic_links_below_the_folder_are_not_followed(tmp_path: Path) -> None:
    out, outside = tmp_path / "x", tmp_path / "outside"
    outside.mkdir()
    with start(out, outputs=["sub/a.json"]) as folder:
        folder.staged("sub/a.json").write_text("1")
        (out / "sub").symlink_to(outside)  # swapped in while the run is going on
        with pytest.raises(OutputError):
            folder.finish({})
    assert os.listdir(outside) == []


@pytest.mark.parametrize(
    "name", ["../victim.json", "/victim.json", "a/../../victim.json", ".pipedist/run.json"]
)
def test_outputs_stay_inside(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError):
        start(tmp_path / "x", outputs=[name])
    assert not (tmp_path / "x").exists()


def test_a_forged_record_removes_nothing_outside(tmp_path: Path) -> None:
    out, victim = tmp_path / "x", tmp_path / "victim.json"
    victim.write_text("mine")
    complete(out)
    record = out / ".pipedist/run.json"
    record.write_text(record.read_text().replace('"a.json"', '"../victim.json"'))
    with pytest.raises(UsageError, match="can't be read"):
        complete(out)
    assert victim.read_text() == "mine"


def test_a_link_in_place_of_a_file_is_replaced_not_followed(tmp_path: Path) -> None:
    out, victim = tmp_path / "x", tmp_path / "victim"
    victim.write_text("mine")
    with start(out) as folder:
        folder.staged("a.json").write_text("1")
        (out / "a.json").symlink_to(victim)
        folder.finish({})
    assert victim.read_text() == "mine"
    assert (out / "a.json").read_text() == "1"


def test_a_link_in_place_of_the_private_folder_is_refused(tmp_path: Path) -> None:
    out, outside = tmp_path / "x", tmp_path / "outside"
    outside.mkdir()
    out.mkdir()
    (out / ".pipedist").symlink_to(outside)
    with pytest.raises(UsageError, match="not a folder that pipedist made"):
        start(out)
    assert os.listdir(outside) == []


def test_the_folder_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "x").symlink_to(tmp_path / "scratch")
    assert complete(tmp_path / "x") == {"a.json": tmp_path / "scratch" / "a.json"}


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 1}', '{"format": 99}'])
def test_an_unreadable_record_is_refused(tmp_path: Path, text: str) -> None:
    out = tmp_path / "x"
    complete(out)
    (out / ".pipedist/run.json").write_text(text)
    with pytest.raises(UsageError, match="--output DIR"):
        start(out)


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("mine")
    with pytest.raises(UsageError, match="is a file"):
        start(tmp_path / "x")
    with pytest.raises(UsageError, match="output folder"):
        start(tmp_path / "x" / "below")
    assert (tmp_path / "x").read_text() == "mine"


def test_overwriting_a_resumable_failed_run_requires_restart(tmp_path: Path) -> None:
    out = tmp_path / "x"
    complete(out, "old")
    with start(out, run="r2") as folder:
        (folder.journal / "journal").write_text("its records")
        folder.fail(resumable=True)
    with pytest.raises(UsageError, match=r"failed run r2: --resume continues.*--restart discards"):
        start(out, run="r3")
    with pytest.raises(UsageError, match=r"failed run r2: --reuse keeps its unchanged parts"):
        start(out, run="r3", spec="s2")
    with start(out, run="r3", resume=True) as folder:
        assert (folder.run_id, folder.found) == ("r2", "unfinished")
        folder.fail(resumable=True)
    complete(out, "new", run="r4", restart=True)
    complete(out, "newer", run="r5")
    assert (out / "a.json").read_text() == "newer"


def test_a_failed_run_without_steps_is_replaced(tmp_path: Path) -> None:
    out = tmp_path / "x"
    complete(out, "old", outputs=["a.json", "b.json"])
    with start(out, run="r2") as folder:
        folder.staged("a.json").write_text("half")
        folder.fail(resumable=False)
    assert visible(out) == ["a.json", "b.json"]
    assert (out / "a.json").read_text() == "old"
    with start(out, run="r3", resume=True) as folder:
        assert "r2" in folder.notice
        assert "has no journal" in folder.notice
        folder.fail(resumable=False)
    complete(out, "new", run="r4")  # needs no --restart: no step is lost
    assert visible(out) == ["a.json"]


def test_a_run_without_some_of_its_files_is_failed(tmp_path: Path) -> None:
    out = tmp_path / "x"
    with start(out, outputs=["a.json", "b.json"]) as folder:
        folder.staged("a.json").write_text("1")
        assert folder.finish({}, failed=True) == {"a.json": out / "a.json"}
        folder.fail(resumable=True)  # the error was reported, and the replacement stays
    assert visible(out) == ["a.json"]
    with start(out, run="r2", outputs=["c.json"], resume=True) as folder:
        assert "starting fresh" in folder.notice
        folder.staged("c.json").write_text("2")
        folder.finish({})
    assert visible(out) == ["c.json"]


def test_an_output_that_was_not_announced(tmp_path: Path) -> None:
    with start(tmp_path / "x") as folder, pytest.raises(ValueError, match="other"):
        folder.staged("other.json")
    assert run_folder.PRIVATE == ".pipedist"


def test_values_of_the_run_before_that_cannot_be_removed_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    (out / ".pipedist/values/r0").mkdir(parents=True)

    remove = shutil.rmtree

    def refuse(path: Path, **options: Any) -> None:
        if Path(path).name == "r0":
            raise PermissionError(13, "Permission denied", str(path))
        remove(path, **options)

    monkeypatch.setattr("shutil.rmtree", refuse)
    with pytest.raises(OutputError, match=r"can't write .*values: Permission denied"):
        complete(out)
