"""`import pipedist` costs next to nothing, and names everything that is public."""

from __future__ import annotations

import subprocess
import sys

import pipedist


def test_every_public_name_is_there() -> None:
    assert set(pipedist.__all__) == {"__version__", *pipedist._HOME}
    for name in pipedist.__all__:
        assert getattr(pipedist, name) is not None


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, pipedist; print(*sorted(m.split('.')[0] for m in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    heavy = {
        "numpy",
        "zmq",
        "anyio",
        "pydantic",
        "ruamel",
        "typer",
        "rich",
        "optree",
        "pyarrow",
        "cloudpickle",
    }
    assert not heavy & set(done.stdout.split())


def test_a_worker_imports_nothing_that_it_does_not_use() -> None:
    code = "import sys, pipedist.launchers.forkserver;print(*sorted(m.split('.')[0] for m in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    heavy = {"pydantic", "ruamel", "typer", "rich", "pyarrow", "cloudpickle", "psutil", "asyncio"}
    assert not heavy & set(done.stdout.split())
