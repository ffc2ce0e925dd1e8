"""Invariants of vectors: smoothed magnitudes and directions, and the harmonics of pairs of directions."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def smooth_log(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """``(1 - exp(-x)) log(1 + x)``: x^2 near 0, log(x) far away; by expm1 and log1p."""
    return -torch.expm1(-x) * torch.log1p(x)


def magnitude_and_direction(
    vectors: Float[Tensor, "... dims"], smoothing_radius: Float[Tensor, ""]
) -> tuple[Float[Tensor, "..."], Float[Tensor, "... dims"]]:
    """``m = sqrt(|v|^2 + eps^2)`` and ``u = v / m``; smooth at v = 0."""
    magnitude = (vectors.square().sum(dim=-1) + smoothing_radius**2).sqrt()
    return magnitude, vectors / magnitude.unsqueeze(-1)


def legendre(x: Float[Tensor, "..."], degree: int) -> list[Float[Tensor, "..."]]:
    """Legendre polynomials P_1(x) … P_degree(x) by Bonnet's recursion; [] for degree 0."""
    previous, current = torch.ones_like(x), x
    out = []
    for n in range(1, degree + 1):
        out.append(current)
        previous, current = current, ((2 * n + 1) * x * current - n * previous) / (n + 1)
    return out
