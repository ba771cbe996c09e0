"""Arrays of other libraries (torch, JAX, CuPy, ...): taken over through DLPack, as NumPy arrays.

Nothing is imported for it: whose type has `__dlpack__` is such an array. One that lies on a device is
copied to the host; one on the host is a view, which whoever keeps it copies. bfloat16, which NumPy and
its DLPack lack, is that of `ml_dtypes`.

A tensor that requires grad is refused, as by torch itself: that its history ends here is for the
function to say (`tensor.detach()`), because a loss that silently lost it would train nothing.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import numpy as np

from pipedist import trees
from pipedist.program import Tree

_ON_HOST: Final = (1, 3)
"""DLPack's numbers of the CPU, and of host memory that is pinned for CUDA."""

_REASONS: Final = (BufferError, TypeError, ValueError, RuntimeError, AttributeError)
"""What libraries raise where an array can't be had."""

_NATIVE: Final = frozenset({np.ndarray, int, float, str, bool, bytes, complex, type(None)})


class ForeignArrayError(TypeError):
    """An array of another library that NumPy can't have; the text says what to do."""


def is_foreign(cls: type) -> bool:
    """Return whether the instances of a class are arrays of another library."""
    return cls not in _NATIVE and hasattr(cls, "__dlpack__") and not issubclass(cls, np.ndarray)


def taken(value: Any) -> np.ndarray[Any, Any]:
    """Return an array of another library as one of NumPy.

    Args:
        value: of a class that `is_foreign`.

    Returns:
        The same dtype, shape and values; where it lies on the host, perhaps a view of its memory.

    Raises:
        ForeignArrayError: it requires grad, is sparse, or has a dtype that NumPy does not know.
    """
    try:
        if type(value).__module__.partition(".")[0] == "torch" or _is_tensor(value):
            return _of_torch(value)
        return _of_any(value)
    except ForeignArrayError:
        raise
    except _REASONS as reason:
        raise ForeignArrayError(f"{_spelled(value)} that NumPy can't take over: {reason}") from reason


def to_host(tree: Tree) -> Tree:
    """Return a tree with NumPy arrays in place of other libraries'; the same object where there are none.

    Raises:
        ForeignArrayError: one can't be had; the text has its path.
    """
    if type(tree) in _NATIVE:
        return tree
    leaves, treedef = trees.flatten(tree)
    found = [index for index, leaf in enumerate(leaves) if is_foreign(type(leaf))]
    if not found:
        return tree
    for index in found:
        try:
            leaves[index] = taken(leaves[index])
        except ForeignArrayError as error:
            raise ForeignArrayError(f"{error}, {place_of(treedef, index)}") from error
    return trees.unflatten(treedef, leaves)


def place_of(treedef: trees.Treedef | None, index: int) -> str:
    """Return where a leaf is, for people: `at grads/w`."""
    path = "" if treedef is None else trees.treedef_paths(treedef)[index]
    return f"at {path}" if path else "as the whole value"


def _of_any(value: Any) -> np.ndarray[Any, Any]:
    """Through DLPack; where its version of that can't say it (bfloat16), through `__array__`."""
    try:
        if value.__dlpack_device__()[0] in _ON_HOST:
            return np.from_dlpack(value)
        return np.from_dlpack(value, device="cpu")  # NumPy 2.1; an older one has no such argument
    except _REASONS:
        if type(value).__module__.partition(".")[0] == "cupy":
            return np.asarray(value.get())
        if hasattr(value, "__array__"):
            return np.asarray(value)
        raise


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")  # a subclass of the user's, perhaps
    return torch is not None and isinstance(value, torch.Tensor)


def _of_torch(tensor: Any) -> np.ndarray[Any, Any]:
    torch = sys.modules["torch"]
    if tensor.requires_grad:
        raise ForeignArrayError(
            f"{_spelled(tensor)} that requires grad: its history can't leave the function; "
            "say that it ends here with tensor.detach()"
        )
    if tensor.layout != torch.strided:
        raise ForeignArrayError(f"{_spelled(tensor)} that is sparse: make it dense with tensor.to_dense()")
    host = tensor.cpu().resolve_conj().resolve_neg()
    if host.dtype == torch.bfloat16:
        return np.from_dlpack(host.view(torch.int16)).view(_bfloat16(tensor))
    return np.from_dlpack(host)


def _bfloat16(value: Any) -> np.dtype[Any]:
    try:
        from ml_dtypes import bfloat16  # optional
    except ImportError as error:
        raise ForeignArrayError(
            f"{_spelled(value)} of bfloat16, which NumPy has not: pip install ml_dtypes, or send float32"
        ) from error
    dtype: np.dtype[Any] = np.dtype(bfloat16)
    return dtype


def _spelled(value: Any) -> str:
    cls = type(value)
    return f"a {cls.__module__}.{cls.__qualname__}"
