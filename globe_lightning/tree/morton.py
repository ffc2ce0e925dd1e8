"""Morton codes: points of 2D or 3D space numbered along a Z-shaped curve (Karras 2012)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

# On a CPU blocks of points that stay in the cache are fastest.
CPU_BLOCK = 1 << 15


def morton_codes(points: Float[Tensor, "n dims"], sizes: Sequence[int] | None = None) -> Int[Tensor, " n"]:
    """Morton code of each point within the box of all of its set, floor(63/D) bits a dimension, as int64 (n,).

    Bit b of dimension d stands at position b*D + d. The quantisation is done in the points' own precision; a
    dimension of zero extent maps to 0.

    Args:
        points: of one set, or of several one after another.
        sizes: how many points each set has; all are one set if None.
    """
    n, dims = points.shape
    if n == 0:
        return torch.zeros(0, dtype=torch.int64, device=points.device)
    bits = 63 // dims
    largest = 2**bits - 1
    columns = points.t().contiguous()
    units = [_unit(own) for own in columns.split([size for size in sizes or [n] if size], dim=1)]
    unit = torch.cat(units, dim=1) if len(units) > 1 else units[0]
    shifts = torch.arange(dims, device=points.device).unsqueeze(1)
    codes = []
    for block in unit.split(CPU_BLOCK if unit.device.type == "cpu" else n, dim=1):
        # In float32 the factor rounds up to 2^bits, so the clamp comes after the conversion, which takes the floor.
        cells = (block * largest).to(torch.int64).clamp_(0, largest)
        codes.append(_spread(cells, dims).bitwise_left_shift_(shifts).sum(dim=0))
    return torch.cat(codes) if len(codes) > 1 else codes[0]


def _unit(columns: Float[Tensor, "dims n"]) -> Float[Tensor, "dims n"]:
    """Coordinates within the box of all points, from 0 to 1; 0 where it has no extent."""
    low, high = torch.aminmax(columns, dim=1, keepdim=True)
    extent = high - low
    return (columns - low).div_(torch.where(extent > 0, extent, 1))


# Magic numbers: each step halves the length of the runs of neighbouring bits.
_STEPS = {
    2: (
        (16, 0x0000FFFF0000FFFF),
        (8, 0x00FF00FF00FF00FF),
        (4, 0x0F0F0F0F0F0F0F0F),
        (2, 0x3333333333333333),
        (1, 0x5555555555555555),
    ),
    3: (
        (32, 0x001F00000000FFFF),
        (16, 0x001F0000FF0000FF),
        (8, 0x100F00F00F00F00F),
        (4, 0x10C30C30C30C30C3),
        (2, 0x1249249249249249),
    ),
}


def _spread(x: Tensor, dims: int) -> Tensor:
    """Move bit b to position b * dims, in place."""
    for shift, mask in _STEPS[dims]:
        x.bitwise_or_(x << shift).bitwise_and_(mask)
    return x
