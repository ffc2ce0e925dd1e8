"""Invariants of vectors: smoothed magnitudes and directions, and the harmonics of pairs of directions."""

from __future__ import annotations

from collections.abc import Sequence

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
    out = [x] if degree else []
    for n in range(1, degree):
        a, b = (2 * n + 1) / (n + 1), n / (n + 1)
        before = out[-2] * -b if n > 1 else torch.full((), -b, dtype=x.dtype, device=x.device)
        out.append(torch.addcmul(before, x, out[-1], value=a))
    return out


def legendre_derivatives(polynomials: Sequence[Float[Tensor, "..."]]) -> list[Float[Tensor, "..."]]:
    """Derivatives of P_1 … P_n from their values: ``P'_(j+1) = P'_(j-1) + (2 j + 1) P_j``."""
    before, current = torch.zeros_like(polynomials[0]), torch.ones_like(polynomials[0])
    out = []
    for n, polynomial in enumerate(polynomials, start=1):
        out.append(current)
        before, current = current, torch.add(before, polynomial, alpha=2 * n + 1)
    return out
