"""Dispatched and data-dependent operations, counted: each of the latter makes the host wait for the device.

Pure torch, so that benchmarks count any implementation by the same rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_ALWAYS = {
    "aten::_local_scalar_dense",
    "aten::is_nonzero",
    "aten::nonzero",
    "aten::nonzero_numpy",
    "aten::argwhere",
    "aten::masked_select",
    "aten::masked_scatter",
    "aten::_unique",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::unique_dim_consecutive",
    "aten::bincount",
    "aten::allclose",
    "aten::equal",
    "aten::histc",
    "aten::combinations",
}
_INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"}
_ADDING = {"aten::index_add", "aten::index_add_", "aten::scatter_add", "aten::scatter_add_"}


@dataclass
class Operations:
    """What was dispatched.

    Attributes:
        n_dispatched: operations in all.
        syncs: names of the data-dependent ones.
        rows_added: rows of all ``index_add`` and ``scatter_add``, along the dimension that is indexed.
    """

    n_dispatched: int = 0
    syncs: list[str] = field(default_factory=list)
    rows_added: int = 0


class _DispatchCounter(TorchDispatchMode):
    def __init__(self, found: Operations) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        self.found.n_dispatched += 1
        if name in _ALWAYS:
            self.found.syncs.append(name)
        elif name in _INDEXING:
            if any(isinstance(i, Tensor) and i.dtype.itemsize == 1 for i in args[1]):
                self.found.syncs.append(f"{name} with a mask")
        elif name == "aten::repeat_interleave" and kwargs.get("output_size") is None:
            self.found.syncs.append(f"{name} without output_size")
        elif name in _ADDING:
            self.found.rows_added += args[3].shape[args[1]]
        return func(*args, **kwargs)


class _HostCounter(TorchFunctionMode):
    """Reads to the host that never reach the dispatcher on a CPU; ``item`` and its kin are counted there."""

    def __init__(self, found: Operations) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("tolist", "numpy", "__array__"):
            self.found.syncs.append(f"Tensor.{name}")
        return func(*args, **(kwargs or {}))


@contextmanager
def count_operations() -> Iterator[Operations]:
    """All operations dispatched within the block, backward passes included."""
    found = Operations()
    with _HostCounter(found), _DispatchCounter(found):
        yield found


@contextmanager
def count_syncs() -> Iterator[list[str]]:
    """Names of all data-dependent operations within the block: on a GPU each waits for the device."""
    with count_operations() as found:
        yield found.syncs
