"""Arrays of other libraries (torch, JAX, CuPy, ...), converted to NumPy arrays through DLPack.

No library is imported: a type with `__dlpack__` is such an array. An array on a device is copied to the
host; one on the host becomes a view, which must be copied before it is stored. bfloat16, which NumPy and
its DLPack lack, uses the dtype of `ml_dtypes`.

A tensor that requires grad is rejected, as by torch itself: the function must end its history explicitly
(`tensor.detach()`), because a loss that silently lost it would train nothing.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import numpy as np

from pipedist.core import trees
from pipedist.core.types import Tree

_ON_HOST: Final = (1, 3)  # DLPack's device types: the CPU, and host memory pinned for CUDA
_REASONS: Final = (BufferError, TypeError, ValueError, RuntimeError, AttributeError)  # of failed conversions

_NATIVE: Final = frozenset({np.ndarray, int, float, str, bool, bytes, complex, type(None)})


class ForeignArrayError(TypeError):
    """An array of another library that NumPy cannot represent; the text names a fix."""


def is_foreign(cls: type) -> bool:
    """Return whether the instances of a class are arrays of another library."""
    return cls not in _NATIVE and hasattr(cls, "__dlpack__") and not issubclass(cls, np.ndarray)


def to_numpy(value: Any) -> np.ndarray[Any, Any]:
    """Return an array of another library as a NumPy array, a view of its memory if possible."""
    try:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            return _of_torch(torch, value)
        return _of_any(value)
    except ForeignArrayError:
        raise
    except _REASONS as reason:
        raise ForeignArrayError(f"{_type_text(value)} cannot be converted to NumPy: {reason}") from reason


def to_host(tree: Tree) -> Tree:
    """Return a tree with other libraries' arrays as NumPy arrays; the same object if it has none."""
    if type(tree) in _NATIVE:
        return tree
    leaves, treedef = trees.flatten(tree)
    found = [index for index, leaf in enumerate(leaves) if is_foreign(type(leaf))]
    if not found:
        return tree
    for index in found:
        try:
            leaves[index] = to_numpy(leaves[index])
        except ForeignArrayError as error:
            raise ForeignArrayError(f"{error}, {place_of(treedef, index)}") from error
    return trees.unflatten(treedef, leaves)


def place_of(treedef: trees.Treedef | None, index: int) -> str:
    """Return the place of a leaf as text: `at grads/w`."""
    path = "" if treedef is None else trees.treedef_paths(treedef)[index]
    return f"at {path}" if path else "as the whole value"


def _of_any(value: Any) -> np.ndarray[Any, Any]:
    """Convert through DLPack; through `__array__` if its DLPack cannot (bfloat16)."""
    try:
        if value.__dlpack_device__()[0] in _ON_HOST:
            return np.from_dlpack(value)
        return np.from_dlpack(value, device="cpu")
    except _REASONS:
        if type(value).__module__.partition(".")[0] == "cupy":
            return np.asarray(value.get())
        if hasattr(value, "__array__"):
            return np.asarray(value)
        raise


def _of_torch(torch: Any, tensor: Any) -> np.ndarray[Any, Any]:
    if tensor.requires_grad:
        raise ForeignArrayError(
            f"{_type_text(tensor)} that requires grad: its history cannot leave the function, "
            "so return tensor.detach()"
        )
    if tensor.layout != torch.strided:
        raise ForeignArrayError(f"{_type_text(tensor)} that is sparse: convert it with tensor.to_dense()")
    host = tensor.cpu().resolve_conj().resolve_neg()
    if host.dtype == torch.bfloat16:
        return np.from_dlpack(host.view(torch.int16)).view(_bfloat16(tensor))
    return np.from_dlpack(host)


def _bfloat16(value: Any) -> np.dtype[Any]:
    try:
        from ml_dtypes import bfloat16  # optional
    except ImportError as error:
        raise ForeignArrayError(
            f"{_type_text(value)} of bfloat16, which NumPy lacks: pip install ml_dtypes, or send float32"
        ) from error
    dtype: np.dtype[Any] = np.dtype(bfloat16)
    return dtype


def _type_text(value: Any) -> str:
    cls = type(value)
    return f"a {cls.__module__}.{cls.__qualname__}"
