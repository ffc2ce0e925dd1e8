"""The contribution of a batch of (target, source) pairs, and its gradient, written out for all branches at once.

Both are plain functions of tensors: no module, no graph. The gradient costs a fraction of what automatic
differentiation of the same formulas would, keeps nothing that it does not use, and is itself differentiable.

Shapes: B branches, D dimensions, K source vectors (r apart), P pairs, F network outputs [scalars | c_0 | a | b],
V vector fields among the C output columns [scalars | vectors]. Features run along the first dimensions and pairs along
the last, except in the hidden layers, where a pair is a row: so rows are gathered and added up as they are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from globe_lightning.models.features import legendre, legendre_derivatives
from globe_lightning.models.networks import rational, rational_gradient
from globe_lightning.models.pair_network import TORCH_NETWORK, HiddenLayers, NetworkFunctions, Weights


@dataclass(frozen=True)
class KernelShape:
    """What all branches of a (layer, boundary type) have in common.

    Attributes:
        n_dims: D.
        n_vectors: K, the vectors of a source: global ones, normal, latents, physical data.
        n_harmonics: H.
        n_scalars, n_vector_outputs: of the output fields.
        n_branches: B.
        beta: of the rational network; None for a tanh network.
    """

    n_dims: int
    n_vectors: int
    n_harmonics: int
    n_scalars: int
    n_vector_outputs: int
    n_branches: int
    beta: float | None

    @property
    def n_outputs(self) -> int:
        """F."""
        return self.n_scalars + self.n_vector_outputs * (1 + 2 * self.n_vectors)

    @property
    def n_features(self) -> int:
        """Rows of a source's packed features: directions, magnitudes, log magnitudes and strengths."""
        return self.n_vectors * (self.n_dims + 2) + self.n_branches


class Values(NamedTuple):
    """What a batch of pairs leaves for its gradient."""

    squared_distance: Tensor
    projections: Tensor
    r2: Tensor
    m_r: Tensor
    to_unit: Tensor
    cosines: Tensor
    log_arguments: Tensor
    expm1: Tensor
    log1p: Tensor
    polynomials: list[Tensor]
    columns: Tensor
    layers: HiddenLayers
    raw: Tensor
    outputs: Tensor
    envelope: Tensor
    strength: Tensor
    radial: Tensor
    summed_radial: Tensor
    summed_tangential: Tensor


def split_features(shape: KernelShape, features: Float[Tensor, "features pairs"]) -> tuple[Tensor, ...]:
    """Directions u (K, D, P), magnitudes m and their smooth_log s (K, P), strengths q A (B, P)."""
    k, d = shape.n_vectors, shape.n_dims
    u, m, s, q = features.split([k * d, k, k, shape.n_branches])
    return u.unflatten(0, (k, d)), m, s, q


def contributions(
    shape: KernelShape,
    displacement: Float[Tensor, "dims pairs"],
    features: Float[Tensor, "features pairs"],
    hidden: Float[Tensor, "branches sources hidden"],
    rows: Int[Tensor, " pairs"] | None,
    inverse_length: Float[Tensor, "branches 1"],
    smoothing: Float[Tensor, ""],
    weights: Weights,
    keep: bool = True,
    network: NetworkFunctions = TORCH_NETWORK,
) -> tuple[Float[Tensor, "columns pairs"], Values]:
    """What every pair contributes to the output columns, summed over the branches.

    With coefficients c_0, a_k, b_k of a vector output its sum over the basis of Sharpe (arXiv:2511.15856) collapses to
    ``u_r (c_0 + sum_k b_k s_k u_k.u_r) + sum_k (a_k - b_k) s_k u_k``; only the second sum is wide, and it is summed
    over the branches before it meets the vectors.

    Args:
        shape: of the kernels.
        displacement: target - source [m].
        features: the pairs' columns of the packed source features.
        hidden: source terms of the first layer.
        rows: each pair's row of them; None for pairs that have all the sources in turn, again and again.
        inverse_length: 1 / (l_m exp(a_m)) [1/m].
        smoothing: eps of the magnitudes, squared.
        weights: of the networks.
        keep: whether the gradient's values are wanted whole; else hidden layers overwrite each other and are not among
            them.
        network: how networks are evaluated.
    """
    u, m, s, weight = split_features(shape, features)
    d2 = displacement.square().sum(dim=0)
    projections = (u * displacement).sum(dim=1)
    r2 = torch.addcmul(smoothing, d2, inverse_length.square())
    m_r = r2.sqrt()
    to_unit = inverse_length / m_r
    cosines = projections * to_unit.unsqueeze(1)

    arguments = torch.cat([m_r.unsqueeze(1), m * m_r.unsqueeze(1)], dim=1)
    expm1, log1p = torch.expm1(-arguments), torch.log1p(arguments)
    logs = (expm1 * log1p).neg()  # smooth_log
    polynomials = legendre(cosines, shape.n_harmonics)
    columns = torch.cat([logs[:, :1], *(logs[:, 1:] * p for p in polynomials)], dim=1).to(hidden.dtype)

    raw, layers = network.outputs(columns, hidden, rows, weights, keep)
    raw = raw.to(r2.dtype)
    if shape.beta is None:
        y = torch.tanh(raw)
    else:
        p, q = raw.chunk(2, dim=1)
        y = rational(p, q, shape.beta)

    power = 1 / (r2 + 1) if shape.n_dims == 3 else (r2 + 1).rsqrt()
    envelope = torch.expm1(-r2) * -power
    g = envelope * weight
    scalars, c0, along, normal = _split_outputs(shape, y)
    out = (scalars * g.unsqueeze(1)).sum(dim=0)
    radial = c0 + (normal * (s * cosines).unsqueeze(1)).sum(dim=2)
    summed_radial = (radial * (to_unit * g).unsqueeze(1)).sum(dim=0)
    tangential = ((along - normal) * g[:, None, None]).sum(dim=0)
    if shape.n_vector_outputs:
        scaled = u * s.unsqueeze(1)
        vectors = summed_radial.unsqueeze(1) * displacement + (tangential.unsqueeze(2) * scaled).sum(dim=1)
        out = torch.cat([out, vectors.flatten(0, 1)])
    values = Values(
        d2, projections, r2, m_r, to_unit, cosines, arguments, expm1, log1p, polynomials, columns, layers, raw,
        y, envelope, g, radial, summed_radial, tangential,
    )  # fmt: skip
    return out, values


class PairGradients(NamedTuple):
    """Gradients of :func:`contributions`; None where not asked for."""

    displacement: Tensor | None
    features: Tensor | None
    hidden: Tensor
    inverse_length: Tensor
    weights: Weights


def gradients(
    shape: KernelShape,
    displacement: Float[Tensor, "dims pairs"],
    features: Float[Tensor, "features pairs"],
    inverse_length: Float[Tensor, "branches 1"],
    weights: Weights,
    values: Values,
    gradient: Float[Tensor, "columns pairs"],
    of_displacement: bool,
    of_features: bool,
    consume: bool = False,
    network: NetworkFunctions = TORCH_NETWORK,
) -> PairGradients:
    """The gradient of :func:`contributions`.

    Args:
        shape, displacement, features, inverse_length, weights: its arguments.
        values: what it returned.
        gradient: of its output.
        of_displacement, of_features: whether those gradients are wanted.
        consume: take each hidden layer out of the values when it is done with, so that its memory is free.
        network: how networks are evaluated; the one of the values.
    """
    v = values
    u, m, s, q = split_features(shape, features)
    scalars, _, along, normal = _split_outputs(shape, v.outputs)
    g, t = v.strength, v.to_unit
    of_scalars, of_vectors = gradient[: shape.n_scalars], gradient[shape.n_scalars :]
    of_vectors = of_vectors.unflatten(0, (shape.n_vector_outputs, shape.n_dims))

    # Output columns to network outputs.
    w = s * v.cosines
    on_radial = (of_vectors * displacement).sum(dim=1)
    on_tangential = (of_vectors.unsqueeze(1) * (u * s.unsqueeze(1))).sum(dim=2)
    of_tangential = on_tangential * g[:, None, None]
    radial_sum = (on_radial * v.radial).sum(dim=1)
    of_g = (of_scalars * scalars).sum(dim=1) + (on_tangential * (along - normal)).sum(dim=(1, 2)) + radial_sum * t
    of_t = radial_sum * g
    of_radial = on_radial * (t * g).unsqueeze(1)
    of_normal = of_radial.unsqueeze(2) * w.unsqueeze(1) - of_tangential
    of_w = (of_radial.unsqueeze(2) * normal).sum(dim=1)
    of_y = torch.cat(
        [of_scalars * g.unsqueeze(1), of_radial, of_tangential.flatten(1, 2), of_normal.flatten(1, 2)], dim=1
    )
    if shape.beta is None:
        of_raw = torch.ops.aten.tanh_backward(of_y, v.outputs)
    else:
        numerator, denominator = v.raw.chunk(2, dim=1)
        of_raw = torch.cat(rational_gradient(of_y, numerator, denominator, v.outputs, shape.beta), dim=1)

    # Through the network.
    of_network = network.gradients(v.columns, weights, v.layers, of_raw.to(weights.last.dtype), consume)
    of_columns = of_network.columns.to(v.r2.dtype)

    # Input columns to the pair's geometry.
    k, h = shape.n_vectors, shape.n_harmonics
    of_c = of_w * s
    of_logs = of_columns[:, :1]
    if h:
        logs = -(v.expm1[:, 1:] * v.log1p[:, 1:])
        of_products = of_columns[:, 1:].unflatten(1, (h, k))
        of_logs = torch.cat([of_logs, _dot(of_products, v.polynomials)], dim=1)
        of_c = torch.addcmul(of_c, logs, _dot(of_products, legendre_derivatives(v.polynomials)))
    n_logs = of_logs.shape[1]
    x, e, log = v.log_arguments[:, :n_logs], v.expm1[:, :n_logs], v.log1p[:, :n_logs]
    of_x = of_logs * torch.addcmul(log - e / (1 + x), e, log)
    of_m_r = of_x[:, 0] + (of_x[:, 1:] * m[: n_logs - 1]).sum(dim=1)
    of_t = of_t + (of_c * v.projections).sum(dim=1)
    of_m_r = of_m_r - of_t * t / v.m_r
    shifted = v.r2 + 1
    power = 1 / shifted if shape.n_dims == 3 else shifted.rsqrt()
    slope = (torch.exp(-v.r2) * power) - (shape.n_dims - 1) / 2 * v.envelope / shifted
    of_r2 = of_g * q * slope + of_m_r / (2 * v.m_r)
    of_length = (of_t / v.m_r).sum(dim=1, keepdim=True)
    of_length = of_length + 2 * inverse_length * (of_r2 * v.squared_distance).sum(dim=1, keepdim=True)

    of_displacement_, of_features_ = None, None
    of_projections = (of_c * t.unsqueeze(1)).sum(dim=0)
    if of_displacement:
        of_d2 = (of_r2 * inverse_length.square()).sum(dim=0)
        of_displacement_ = 2 * of_d2 * displacement + (of_projections.unsqueeze(1) * u).sum(dim=0)
        of_displacement_ = of_displacement_ + (of_vectors * v.summed_radial.unsqueeze(1)).sum(dim=0)
    if of_features:
        of_scaled = (v.summed_tangential.unsqueeze(2) * of_vectors.unsqueeze(1)).sum(dim=0)
        of_u = torch.addcmul(of_scaled * s.unsqueeze(1), of_projections.unsqueeze(1), displacement)
        of_s = (of_w * v.cosines).sum(dim=0) + (of_scaled * u).sum(dim=1)
        of_m = (of_x[:, 1:] * v.m_r.unsqueeze(1)).sum(dim=0) if h else torch.zeros_like(m)
        of_features_ = torch.cat([of_u.flatten(0, 1), of_m, of_s, of_g * v.envelope])
    return PairGradients(of_displacement_, of_features_, of_network.hidden, of_length, of_network.weights)


def _dot(products: Float[Tensor, "branches degrees vectors pairs"], others: Sequence[Tensor]) -> Tensor:
    """Sum over the degrees of products with one tensor a degree."""
    total = products[:, 0] * others[0]
    for degree, other in enumerate(others[1:], start=1):
        total = torch.addcmul(total, products[:, degree], other)
    return total


def _split_outputs(shape: KernelShape, y: Float[Tensor, "branches outputs pairs"]) -> tuple[Tensor, ...]:
    """Scalars (B, S, P), c_0 (B, V, P), a and b (B, V, K, P)."""
    n, k = shape.n_vector_outputs, shape.n_vectors
    scalars, c0, a, b = y.split([shape.n_scalars, n, n * k, n * k], dim=1)
    return scalars, c0, a.unflatten(1, (n, k)), b.unflatten(1, (n, k))
