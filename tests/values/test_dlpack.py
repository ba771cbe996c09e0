"""Arrays of other libraries become NumPy's, through DLPack: a stand-in, and the real ones where they are."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import numpy as np
import pytest

import pipedist
from pipedist.collectives import signatures
from pipedist.collectives.options import CommunicationOptions
from pipedist.collectives.requests import ALL_GATHER, ALL_REDUCE, BROADCAST, CollectiveRequest
from pipedist.core import dlpack
from pipedist.protocol.encoder import UnsendableError
from pipedist.worker.array_isolation import take_ownership

CPU, CUDA = 1, 2
PLACE = ("step.py", 1)


class Exported:
    """An array that NumPy knows nothing of, but through DLPack."""

    def __init__(self, data: Any, device: int = CPU) -> None:
        self.data = np.array(data)
        self.device = device
        self.copied = 0

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device, 0

    def __dlpack__(
        self, *, dl_device: tuple[int, int] | None = None, copy: bool | None = None, **options: Any
    ) -> Any:
        if self.device == CPU:
            return self.data.__dlpack__()
        if dl_device != (CPU, 0):
            raise BufferError("its memory is a device's")
        self.copied += 1
        return self.data.copy().__dlpack__()


class Unknown(Exported):
    """Of a dtype that NumPy lacks."""

    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("float4 can't be exported")


def needs(name: str, command: str, mark: str = "") -> Any:
    marks = [
        pytest.mark.skipif(
            importlib.util.find_spec(name) is None, reason=f"{name} is not installed here: {command}"
        )
    ]
    return pytest.param(name, marks=[*marks, *([getattr(pytest.mark, mark)] if mark else [])])


LIBRARIES = [
    needs("torch", "make bench-torch, then make test-torch", "torch"),
    needs("jax.numpy" if importlib.util.find_spec("jax") else "jax", "make test-jax", "jax"),
    needs("cupy", "pip install cupy-cuda12x, then make test-gpu", "gpu"),
]


@pytest.mark.parametrize("data", [[1.5, 2.5], [[1, 2], [3, 4]], 7, [], [True, False]], ids=str)
@pytest.mark.parametrize("device", [CPU, CUDA])
def test_an_exported_array_is_converted(data: Any, device: int) -> None:
    source = Exported(data, device)
    array = dlpack.to_numpy(source)
    assert type(array) is np.ndarray
    assert (array.dtype, array.shape) == (source.data.dtype, source.data.shape)
    assert np.array_equal(array, source.data)
    assert source.copied == (device == CUDA)


def test_a_sent_array_has_its_own_memory() -> None:
    source = Exported([1.0, 2.0])
    value, size = take_ownership([{"rows": source, "n": 2}])
    source.data[:] = 0.0
    assert np.array_equal(value["rows"], [1.0, 2.0])
    assert size >= 16


def test_what_numpy_cannot_have_is_refused_with_its_path() -> None:
    with pytest.raises(UnsendableError, match=r"Unknown cannot be converted to NumPy: float4 .*, at rows/1$"):
        take_ownership([{"rows": [1, Unknown(1.0)]}])
    with pytest.raises(dlpack.ForeignArrayError, match=r"as the whole value$"):
        dlpack.to_host(Unknown(1.0))


@pytest.mark.parametrize(
    "tree", [None, 1, "text", {"a": [1.0, None]}, np.ma.masked_array([1], [True])], ids=repr
)
def test_a_tree_without_them_is_left_alone(tree: Any) -> None:
    assert dlpack.to_host(tree) is tree


@pytest.mark.parametrize("kind", [ALL_REDUCE, ALL_GATHER, BROADCAST])
def test_a_collective_takes_them(kind: str) -> None:
    request = CollectiveRequest(kind, PLACE, {"w": Exported([1.0, 2.0], CUDA)}, op="sum", axis=0, source=0)
    signatures.check(request, CommunicationOptions(), 2)
    assert np.array_equal(request.tree["w"], [1.0, 2.0])


@pytest.mark.asyncio
async def test_results_come_back_as_numpy() -> None:
    def double(x: np.ndarray) -> Any:
        return {"twice": Exported(2 * x, CUDA), "kind": type(x).__name__}

    spec = {
        "pipedist": 1,
        "replicas": 2,
        "dataset": {"range": 8, "batch": 4},
        "stages": {
            "doubled": {"run": double},
            "rows": {"run": _twice_of, "of": "doubled"},
            "total": {"reduce": "sum", "of": "rows", "axis": 0},
            "all": {"gather": 0, "of": "rows"},
        },
    }
    async with pipedist.open(spec, workers=1) as run:
        result = await run.results()
    assert result["total"] == 2 * sum(range(8))
    assert np.array_equal(result["all"], 2 * np.arange(8))
    assert type(result["all"]) is np.ndarray


def _twice_of(tree: dict[str, Any]) -> Any:
    return Exported(tree["twice"].data)  # within a pass it is handed on as it is


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int64", "uint8", "bool", "complex64"])
def test_a_librarys_array_is_converted(library: str, dtype: str) -> None:
    module = importlib.import_module(library)
    if not hasattr(module, dtype):
        pytest.skip(f"{library} has no {dtype}")
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes", reason="bfloat16 is that of ml_dtypes: make bench-torch")
    if (library, dtype) == ("jax.numpy", "int64"):
        pytest.skip("jax has no 64 bits, unless it is told so for the whole process")
    make = module.asarray if library != "torch" else module.tensor
    source = make([[0, 1], [1, 1]], dtype=getattr(module, dtype))
    value, _ = take_ownership([[source, source.T]])
    wanted = np.array([[0, 1], [1, 1]]).astype(value[0].dtype)
    assert value[0].dtype.name == str(source.dtype).removeprefix("torch.")
    assert np.array_equal(value[0], wanted)
    assert np.array_equal(value[1], wanted.T)
    assert value[1].flags.c_contiguous


@pytest.mark.torch
@pytest.mark.skipif(
    importlib.util.find_spec("torch") is None,
    reason="torch is not installed here: make bench-torch, then make test-torch",
)
def test_torch_tensors_that_can_not_leave_say_what_to_do() -> None:
    import torch

    loss = (torch.ones(3, requires_grad=True) * 2).sum()
    with pytest.raises(UnsendableError, match=r"requires grad.*tensor\.detach\(\), at loss$"):
        take_ownership([{"loss": loss}])
    assert take_ownership([{"loss": loss.detach()}])[0]["loss"] == 6
    with pytest.raises(UnsendableError, match=r"is sparse.*tensor\.to_dense\(\)"):
        take_ownership([torch.eye(2).to_sparse()])
    conjugate = torch.tensor([1 + 2j]).conj()  # lazily: a bit, not other memory
    assert take_ownership([conjugate])[0] == [1 - 2j]
    reused = torch.zeros(2)
    value, _ = take_ownership([reused])
    reused += 1
    assert np.array_equal(value, [0, 0])


@pytest.mark.gpu
@pytest.mark.skipif(
    importlib.util.find_spec("torch") is None,
    reason="no torch: make test-gpu on a machine with a CUDA device",
)
def test_a_tensor_of_a_gpu_is_copied_to_the_host() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device: make test-gpu on a machine with one")
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        value, _ = take_ownership([torch.arange(6, device="cuda", dtype=dtype).reshape(2, 3).T])
        assert np.array_equal(value.astype(np.float64), np.arange(6.0).reshape(2, 3).T)
