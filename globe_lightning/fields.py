"""Declared fields: their ranks, names and order, and how they lie side by side in one packed tensor.

A field is declared by its rank: 0 a scalar, 1 a vector of the space's dimension. Declarations may nest; a nested
name is flattened with "." (``{"vel": {"dU": 1}}`` declares ``vel.dU``). Everywhere in this package packed fields
stand in the order of their sorted flattened names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from tensordict import TensorDict, TensorDictBase
from torch import Tensor


def flatten_ranks(ranks: Mapping[str, Any] | None, argument: str = "ranks") -> dict[str, int]:
    """Flatten a (nested) declaration of ranks into {flattened name: rank}, sorted by name.

    Args:
        ranks: {name: 0, 1 or a further mapping}; None declares nothing. Mappings and TensorDicts alike.
        argument: the name used in error messages.

    Raises:
        ValueError: a rank is not 0 or 1, or two declarations flatten to one name.
    """
    flat: dict[str, int] = {}

    def visit(node: Mapping[str, Any], prefix: str) -> None:
        for name, rank in node.items():
            full = f"{prefix}{name}"
            if isinstance(rank, (Mapping, TensorDictBase)):
                visit(rank, full + ".")
                continue
            number = rank.item() if isinstance(rank, Tensor) and rank.numel() == 1 else rank
            if isinstance(number, bool) or number not in (0, 1):
                raise ValueError(f"{argument}[{full!r}]: a rank is 0 (scalar) or 1 (vector), found {rank!r}")
            if full in flat:
                raise ValueError(f"{argument}: two fields flatten to the name {full!r}; rename one of them")
            flat[full] = int(number)

    if ranks is not None:
        if not isinstance(ranks, (Mapping, TensorDictBase)):
            raise ValueError(f"{argument}: expected a mapping of names to ranks, found {type(ranks).__name__}")
        visit(ranks, "")
    return dict(sorted(flat.items()))


def flatten_data(data: Mapping[str, Any] | TensorDictBase | None) -> dict[str, Tensor]:
    """Flatten (nested) named tensors into {flattened name: tensor}; names are joined with "."."""
    flat: dict[str, Tensor] = {}

    def visit(node: Mapping[str, Any] | TensorDictBase, prefix: str) -> None:
        value: Any
        for name, value in node.items():
            if isinstance(value, (Mapping, TensorDictBase)):
                visit(value, f"{prefix}{name}.")
            else:
                flat[f"{prefix}{name}"] = value

    if data is not None:
        visit(data, "")
    return flat


def nested_keys(ranks: Mapping[str, Any] | None) -> dict[str, tuple[str, ...]]:
    """The path of every declared field in its nested declaration: {"vel.dU": ("vel", "dU")}, sorted by name."""
    paths: dict[str, tuple[str, ...]] = {}

    def visit(node: Mapping[str, Any], prefix: tuple[str, ...]) -> None:
        for name, rank in node.items():
            path = (*prefix, str(name))
            if isinstance(rank, (Mapping, TensorDictBase)):
                visit(rank, path)
            else:
                paths[".".join(path)] = path

    visit({} if ranks is None else ranks, ())
    return dict(sorted(paths.items()))


class FieldLayout:
    """Where each declared field stands in a packed tensor of columns: sorted names, a vector takes ``n_dims`` columns.

    Args:
        ranks: a (nested) declaration of ranks.
        n_dims: the dimension D of the space.
        argument: the name used in error messages.
    """

    def __init__(self, ranks: Mapping[str, Any] | None, n_dims: int, argument: str = "ranks") -> None:
        self.ranks = flatten_ranks(ranks, argument)
        self.n_dims = n_dims
        self.paths = nested_keys(ranks)
        self.columns: dict[str, slice] = {}
        self.n_columns = 0
        for name, rank in self.ranks.items():
            width = n_dims if rank else 1
            self.columns[name] = slice(self.n_columns, self.n_columns + width)
            self.n_columns += width
        self.scalars = [name for name, rank in self.ranks.items() if rank == 0]
        self.vectors = [name for name, rank in self.ranks.items() if rank == 1]

    def shape(self, name: str) -> tuple[int, ...]:
        """The trailing shape of a field: () for a scalar, (D,) for a vector."""
        return (self.n_dims,) if self.ranks[name] else ()

    def unpack(self, packed: Float[Tensor, "n columns"]) -> TensorDict:
        """Split packed columns into named fields, nested as they were declared; scalars (n,), vectors (n, D)."""
        out = TensorDict({}, batch_size=[packed.shape[0]], device=packed.device)
        for name, columns in self.columns.items():
            value = packed[:, columns]
            out[self.paths[name]] = value if self.ranks[name] else value.squeeze(-1)
        return out

    def pack(self, data: Mapping[str, Any] | TensorDictBase, n: int, dtype: torch.dtype) -> Float[Tensor, "n columns"]:
        """Lay named fields side by side: the inverse of :meth:`unpack`. Checks nothing; see ``validation``."""
        flat = flatten_data(data)
        parts = [flat[name].reshape(n, -1).to(dtype) for name in self.ranks]
        if parts:
            return torch.cat(parts, dim=1)
        device = next(iter(flat.values())).device if flat else None
        return torch.zeros(n, 0, dtype=dtype, device=device)
