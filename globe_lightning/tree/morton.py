"""Morton codes: points of 2D or 3D space numbered along a Z-shaped curve (Karras 2012)."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


def morton_codes(points: Float[Tensor, "n dims"]) -> Int[Tensor, " n"]:
    """Morton code of each point within the box of all of them, floor(63/D) bits a dimension, as int64 (n,).

    Bit b of dimension d stands at position b*D + d. The quantisation is done in the points' own precision; a
    dimension of zero extent maps to 0.
    """
    n, dims = points.shape
    if n == 0:
        return torch.zeros(0, dtype=torch.int64, device=points.device)
    bits = 63 // dims
    largest = 2**bits - 1
    columns = points.t().contiguous()
    low, high = torch.aminmax(columns, dim=1, keepdim=True)
    extent = high - low
    unit = (columns - low).div_(torch.where(extent > 0, extent, torch.ones_like(extent)))
    # In float32 the factor rounds up to 2^bits, so the clamp comes after the conversion, which takes the floor.
    cells = unit.mul_(largest).to(torch.int64).clamp_(0, largest)
    codes = _spread(cells[0], dims)
    for dimension in range(1, dims):
        codes.bitwise_or_(_spread(cells[dimension], dims).bitwise_left_shift_(dimension))
    return codes


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
