"""Functions by name and by value."""

from __future__ import annotations

import contextlib
import functools
import os.path
import pickle
import shlex
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipedist.core import functions
from pipedist.core.functions import FunctionNotFound, load, reference
from pipedist.core.types import FunctionRef
from pipedist.errors import UsageError


@pytest.fixture(autouse=True)
def _own_import_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(functions, "_appended", [])
    monkeypatch.setattr(functions, "_code_seen", set())
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def top_level(x: int) -> int:
    return x + 1


class Holder:
    @staticmethod
    def static(x: int) -> int:
        return x

    def method(self) -> int:
        return 1


def by_name(name: str) -> FunctionRef:
    return FunctionRef(label=name, name=name)


def load_from(name: str, *code: Path) -> Any:
    """Load a function as a worker does."""
    folders = [str(folder) for folder in code]
    functions.append_code(folders)
    return load(by_name(name), folders)


def test_importable_functions_are_sent_by_name() -> None:
    assert reference(top_level) == by_name(f"{__name__}:top_level")
    assert reference(Holder.static) == by_name(f"{__name__}:Holder.static")
    assert reference(Holder) == by_name(f"{__name__}:Holder")
    assert reference(os.path.join) == by_name("posixpath:join")
    assert reference("some.module:fn") == by_name("some.module:fn")


def test_functions_without_a_name_are_sent_by_value() -> None:
    def local(x: int) -> int:
        return x + offset

    offset = 2
    candidates: list[Any] = [local, lambda x: x + 2, functools.partial(lambda x, y: x + y, 2)]
    for fn in candidates:
        ref = reference(fn)
        assert ref.name == ""
        assert ref.pickled
        assert load(ref, ())(1) == 3
    assert reference(Holder().method).name == ""
    assert reference(candidates[1]).label.endswith("<lambda>")


@pytest.mark.parametrize("file", ["src/laid_out/fn.py", "src/laid_out.py"])
def test_a_module_of_a_src_layout_is_found_for_the_error(tmp_path: Path, file: str) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).touch()
    with pytest.raises(FunctionNotFound, match=rf"it is in {tmp_path}/src: .* `code: src`"):
        load(by_name("laid_out:f"), [str(tmp_path)])


def test_cached_functions_are_sent_by_value_too() -> None:
    @functools.lru_cache(maxsize=3, typed=True)
    def model() -> int:
        return 2

    @functools.cache
    def fibonacci(n: int) -> int:
        return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

    importable = functions._is_name
    uses = load(reference(lambda: (model(), model, importable)), ())
    assert uses()[0] == 2
    assert uses()[1].cache_parameters() == {"maxsize": 3, "typed": True}
    assert uses()[2] is importable
    assert load(reference(fibonacci), ())(40) == 102334155


def test_cached_properties_and_partials_are_sent_by_value_too() -> None:
    class Model:
        @functools.cached_property
        def weight(self) -> int:
            return 2

        def __call__(self, x: int) -> int:
            return self.weight * x

    doubles = functools.lru_cache(functools.partial(lambda a, x: a * x, 2))
    assert load(reference(Model), ())()(4) == 8
    assert load(reference(lambda x: doubles(x)), ())(4) == 8


def test_functions_that_other_processes_cannot_import_are_sent_by_value() -> None:
    made = types.ModuleType("made_up_here")
    exec("def fn(x): return x", made.__dict__)
    sys.modules["made_up_here"] = made
    assert reference(made.fn).name == ""


def test_functions_of_main_are_sent_by_value() -> None:
    script = """
from pipedist.core.functions import reference, load
def fn(x): return x * 2
ref = reference(fn)
assert ref.name == "" and ref.pickled, ref
assert load(ref, ())(4) == 8
"""
    root = str(Path(functions.__file__).parents[1])
    subprocess.run([sys.executable, "-c", script], check=True, env={"PYTHONPATH": root})


@pytest.mark.parametrize(
    "name",
    [
        "noattr",
        "a:",
        ":b",
        "a:b:c",
        "a.b:c()",
        "__import__('os'):system",
        "a b:c",
        "a:1b",
        "../x:y",
        "a:b.",
        "",
    ],
)
def test_only_dotted_identifiers_are_names(name: str) -> None:
    with pytest.raises(UsageError, match=r"expected 'package\.module:name'"):
        reference(name)
    with pytest.raises(UsageError):
        load(by_name(name), ())


def test_a_value_that_is_not_a_function_is_rejected() -> None:
    with pytest.raises(UsageError, match="expected a function, or its name"):
        reference(3)  # type: ignore[arg-type]


def test_a_function_that_cannot_be_pickled_is_rejected() -> None:
    lock = threading.Lock()
    with pytest.raises(
        UsageError, match=r"it uses `lock`, a lock: .*; define it at the top level of a module"
    ):
        reference(lambda: lock)


def test_a_function_that_captures_too_much_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "PICKLED_BYTES_MAX", 1000)
    large = b"x" * 2000
    with pytest.raises(UsageError, match="the 1000 that"):
        reference(lambda: large)


def test_a_pickled_function_that_cannot_be_loaded_is_an_error() -> None:
    bad = pickle.dumps(top_level).replace(__name__.encode(), b"x" * len(__name__))
    with pytest.raises(FunctionNotFound, match="was sent by value"):
        load(FunctionRef("<lambda>", pickled=bad), ())


def test_code_folders_are_searched_last(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("def dumps(x): return 'shadowed'\n")
    (tmp_path / "my_flights.py").write_text("class A:\n    def b(x): return x * 2\n")
    assert load_from("my_flights:A.b", tmp_path)(4) == 8
    assert load_from("json:dumps", tmp_path)(1) == "1"
    assert sys.path[-1] == str(tmp_path)
    load_from("my_flights:A.b", tmp_path)
    assert sys.path.count(str(tmp_path)) == 1


def test_code_folders_leave_the_path_with_the_last_context_that_needs_them(tmp_path: Path) -> None:
    a, b, mine = (str(tmp_path / name) for name in ("a", "b", "mine"))
    sys.path.insert(0, mine)
    before = list(sys.path)
    with contextlib.suppress(ZeroDivisionError), functions.code_on_path([a, mine]):
        assert sys.path == [*before, a]
        with functions.code_on_path([b, a]):
            assert sys.path == [*before, b, a]
            load(by_name("json:dumps"), [a])  # which has a's modules searched before b's
            assert sys.path == [*before, a, b]
        assert sys.path == [*before, a]
        raise ZeroDivisionError
    assert sys.path == before


def test_modules_of_the_users_own_path_are_not_those_of_another_spec(tmp_path: Path) -> None:
    sys.path.insert(0, str(tmp_path))
    (tmp_path / "own_module.py").write_text("def f(): return 1\n")
    with functions.code_on_path([str(tmp_path)]):
        assert load(by_name("own_module:f"), [str(tmp_path)])() == 1
    with functions.code_on_path([str(tmp_path / "other")]):
        assert load(by_name("own_module:f"), [str(tmp_path / "other")])() == 1


def test_a_context_keeps_the_folders_of_one_that_is_still_open(tmp_path: Path) -> None:
    before = list(sys.path)
    first, second = functions.code_on_path([str(tmp_path)]), functions.code_on_path([str(tmp_path)])
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert sys.path == [*before, str(tmp_path)]
    second.__exit__(None, None, None)
    assert sys.path == before


def fault(name: str, *code: Path) -> str:
    with pytest.raises(FunctionNotFound) as caught:
        load_from(name, *code)
    return str(caught.value)


def test_a_missing_module_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "my_flights.py").write_text("")
    text = fault("my_flihgts:delays", tmp_path)
    assert "no module 'my_flihgts'" in text
    assert str(tmp_path) in text
    assert "did you mean 'my_flights'?" in text


def test_a_missing_submodule_is_named(tmp_path: Path) -> None:
    assert "no module 'json.nothing'" in fault("json.nothing:fn", tmp_path)


def test_a_missing_attribute_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "my_flights.py").write_text("def delays(x): return x\n")
    text = fault("my_flights:dealys", tmp_path)
    assert f"my_flights ({tmp_path / 'my_flights.py'}) has no attribute 'dealys'" in text
    assert "did you mean 'delays'?" in text


def test_a_name_that_resolves_elsewhere_names_both_places(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("def delays(x): return x\n")
    text = fault("json:delays", tmp_path)
    assert str(tmp_path / "json.py") in text
    assert os.path.join("json", "__init__.py") in text


def test_an_error_during_an_import_is_reported(tmp_path: Path) -> None:
    (tmp_path / "broken_one.py").write_text("1 / 0\n")
    (tmp_path / "needs_more.py").write_text("import not_there_at_all\n")
    assert "ZeroDivisionError" in fault("broken_one:fn", tmp_path)
    assert "needs the module 'not_there_at_all'" in fault("needs_more:fn", tmp_path)


def test_a_missing_package_is_named_with_the_command_of_this_python(tmp_path: Path) -> None:
    (tmp_path / "needs_a_package.py").write_text("import not_there_at_all.client\n")
    (tmp_path / "needs_a_newer_one.py").write_text("import json.not_there\n")
    command = f"for example with {shlex.quote(sys.executable)} -m pip install"
    assert fault("needs_a_package:fn", tmp_path).endswith(f"{command} not_there_at_all")
    assert fault("needs_a_newer_one:fn", tmp_path).endswith(f"{command} --upgrade json")


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("import os\n\n1 / 0\n", "failed: ZeroDivisionError: division by zero (top.py, line 3)"),
        ("\nint('x')\n", "(top.py, line 2)"),
        ("import numpy\nnumpy.array([1, [2]])\n", "(top.py, line 2)"),
        ("def f(:\n", "(top.py, line 1)"),
        ("import sys\nsys.exit(3)\n", "failed: SystemExit: 3 (top.py, line 2)"),
        ("import below\n", "failed: RuntimeError (below.py, line 2)"),
    ],
)
def test_an_import_that_fails_names_the_place(tmp_path: Path, text: str, ends: str) -> None:
    (tmp_path / "top.py").write_text(text)
    (tmp_path / "below.py").write_text("\nraise RuntimeError\n")
    with pytest.raises(FunctionNotFound) as caught:
        load_from("top:f", tmp_path)
    assert str(caught.value).startswith("top:f: importing top failed: ")
    assert str(caught.value).endswith(ends)
    assert str(caught.value).count("line") == 1


def test_a_name_must_refer_to_a_callable(tmp_path: Path) -> None:
    (tmp_path / "values_only.py").write_text("x = 3\n")
    assert "found a value of type int" in fault("values_only:x", tmp_path)


def test_a_module_of_another_spec_is_never_used_instead_of_the_own_one(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same_name.py").write_text(f"def fn(): return {folder!r}\n")
    assert load_from("same_name:fn", tmp_path / "a")() == "a"
    text = fault("same_name:fn", tmp_path / "b")
    assert str(tmp_path / "a" / "same_name.py") in text
    assert str(tmp_path / "b" / "same_name.py") in text


def test_the_specs_own_folder_is_searched_before_those_of_earlier_specs(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"only_{folder}.py").write_text("def fn(): return 0\n")
        (tmp_path / folder / "shared_name.py").write_text(f"def fn(): return {folder!r}\n")
    load_from("only_a:fn", tmp_path / "a")
    assert load_from("shared_name:fn", tmp_path / "b")() == "b"


def test_the_working_directory_is_not_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in_the_cwd.py").write_text("def fn(): return 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    assert "no module 'in_the_cwd'" in fault("in_the_cwd:fn")
