"""What the affine field of a far pair costs: from values at proxy points, or from the kernel's derivative.

    python tests/benchmarks/derivatives.py

The kernel of the car-like case, with random sources and distances of some lengths, in float32 on one thread. Each way
yields a pair's value and what describes its D slopes. The derivative is taken in the pair function (written out below,
along all directions at once, sharing what does not depend on them), by forward-mode differentiation along all
directions together, and one after another. Microseconds of the processor a pair, all ways in turn, medians; "written
out" is the gradient that the model uses, "recorded" that of automatic differentiation.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from sides import one_thread
from torch import Tensor

from globe_lightning.models.features import legendre, legendre_derivatives
from globe_lightning.models.networks import rational, rational_gradient
from globe_lightning.models.pair_network import Weights
from globe_lightning.models.pairs import KernelShape, contributions, gradients, split_features


@dataclass
class Pairs:
    """Inputs of ``contributions`` for as many pairs as there are sources, which stand in order."""

    shape: KernelShape
    displacement: Float[Tensor, "dims pairs"]
    features: Float[Tensor, "features pairs"]
    hidden: Float[Tensor, "branches pairs hidden"]
    inverse_length: Float[Tensor, "branches 1"]
    smoothing: Float[Tensor, ""]
    weights: Weights

    def arguments(self, displacement: Tensor) -> tuple[Any, ...]:
        """With other displacements, a multiple of the sources."""
        times = displacement.shape[1] // self.hidden.shape[1]
        features = self.features.repeat(1, times) if times > 1 else self.features
        return (
            self.shape,
            displacement,
            features,
            self.hidden,
            None,
            self.inverse_length,
            self.smoothing,
            self.weights,
        )

    def differentiable(self) -> list[Tensor]:
        """What a training step wants gradients of."""
        return [self.displacement, self.features, self.hidden, self.inverse_length, *self.weights.flat()]


def make(n_pairs: int, hidden: int = 64, n_layers: int = 3, dtype: torch.dtype = torch.float32) -> Pairs:
    """Pairs of a kernel with the car case's shape: six vectors, one scalar and a vector, two branches, 14 latents."""
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)

    shape = KernelShape(3, 6, 2, 6, 6, 2, 0.01)
    n_columns = 1 + shape.n_vectors * shape.n_harmonics
    directions = torch.nn.functional.normalize(normal(shape.n_vectors, 3, n_pairs), dim=1)
    magnitudes = normal(shape.n_vectors, n_pairs).abs()
    logs = -torch.expm1(-magnitudes) * torch.log1p(magnitudes)
    features = torch.cat([directions.flatten(0, 1), magnitudes, logs, normal(shape.n_branches, n_pairs)])
    weights = Weights(
        normal(2, n_columns, hidden, scale=n_columns**-0.5),
        [normal(2, hidden, hidden, scale=hidden**-0.5) for _ in range(n_layers - 1)],
        [normal(2, 1, hidden, scale=0.1) for _ in range(n_layers - 1)],
        normal(2, 2 * shape.n_outputs, hidden, scale=hidden**-0.5),
        normal(2, 2 * shape.n_outputs, 1, scale=0.5),
    )
    lengths = torch.tensor([[1.0], [0.2]], dtype=dtype)
    return Pairs(
        shape, normal(3, n_pairs), features, normal(2, n_pairs, hidden), 1 / lengths, lengths.new_tensor(1e-8), weights
    )


def with_tangents(
    pairs: Pairs, displacement: Float[Tensor, "dims pairs"]
) -> tuple[Float[Tensor, "columns pairs"], Float[Tensor, "dims columns pairs"]]:
    """The contributions of ``contributions`` and their derivatives along all axes, written out.

    Tangents run along the first dimension. In the hidden layers value and tangents of a pair are rows of one product.
    """
    shape, weights, inverse_length = pairs.shape, pairs.weights, pairs.inverse_length
    assert shape.n_dims == 3 and shape.beta is not None
    u, m, s, weight = split_features(shape, pairs.features)
    n, n_pairs = 1 + shape.n_dims, displacement.shape[1]
    d2 = displacement.square().sum(dim=0)
    projections = (u * displacement).sum(dim=1)
    r2 = torch.addcmul(pairs.smoothing, d2, inverse_length.square())
    m_r = r2.sqrt()
    to_unit = inverse_length / m_r
    cosines = projections * to_unit.unsqueeze(1)
    d_r2 = 2 * displacement.unsqueeze(1) * inverse_length.square()
    d_m_r = d_r2 / (2 * m_r)
    d_to_unit = -(to_unit / m_r) * d_m_r
    directions = u.transpose(0, 1).unsqueeze(1)  # (D, 1, K, P)
    d_cosines = directions * to_unit.unsqueeze(1) + projections * d_to_unit.unsqueeze(2)

    # Input columns and their tangents.
    arguments = torch.cat([m_r.unsqueeze(1), m * m_r.unsqueeze(1)], dim=1)
    e, log = torch.expm1(-arguments), torch.log1p(arguments)
    logs = (e * log).neg()
    slopes = (1 + e) * log - e / (1 + arguments)
    d_logs = slopes * torch.cat([torch.ones_like(m[:1]), m]) * d_m_r.unsqueeze(2)
    polynomials = legendre(cosines, shape.n_harmonics)
    columns, d_columns = [logs[:, :1]], [d_logs[:, :, :1]]
    for p, slope in zip(polynomials, legendre_derivatives(polynomials), strict=True):
        columns.append(logs[:, 1:] * p)
        d_columns.append(d_logs[:, :, 1:] * p + (logs[:, 1:] * slope) * d_cosines)
    x = torch.cat([torch.cat(columns, dim=1).unsqueeze(0), torch.cat(d_columns, dim=2)])  # (1 + D, B, columns, P)
    x = x.permute(1, 0, 3, 2).flatten(1, 2)  # (B, (1 + D) P, columns)

    # Through the network.
    terms: Tensor = pairs.hidden
    for matrix, bias in zip([weights.first, *weights.matrices], [terms, *weights.biases], strict=True):
        z, dz = torch.bmm(x, matrix).split([n_pairs, (n - 1) * n_pairs], dim=1)
        z = z + bias
        sigmoid = torch.sigmoid(z)
        slope = sigmoid * (1 + z * (1 - sigmoid))
        dz = (dz.unflatten(1, (n - 1, n_pairs)) * slope.unsqueeze(1)).flatten(1, 2)
        x = torch.cat([z * sigmoid, dz], dim=1)
    raw, d_raw = torch.bmm(weights.last, x.transpose(1, 2)).split([n_pairs, (n - 1) * n_pairs], dim=2)
    raw = raw + weights.last_bias
    d_raw = d_raw.unflatten(2, (n - 1, n_pairs)).permute(2, 0, 1, 3)
    p, q = raw.chunk(2, dim=1)
    y = rational(p, q, shape.beta)
    of_p, of_q = rational_gradient(torch.ones_like(y), p, q, y, shape.beta)
    dp, dq = d_raw.chunk(2, dim=2)
    dy = of_p * dp + of_q * dq

    # Output columns.
    power = 1 / (r2 + 1)
    envelope = torch.expm1(-r2) * -power
    g = envelope * weight
    dg = weight * (torch.exp(-r2) * power - envelope * power) * d_r2
    k, v = shape.n_vectors, shape.n_vector_outputs
    sizes = [shape.n_scalars, v, v * k, v * k]
    scalars, c0, along, normal = y.split(sizes, dim=1)
    d_scalars, dc0, d_along, d_normal = dy.split(sizes, dim=2)
    out = (scalars * g.unsqueeze(1)).sum(dim=0)
    d_out = (d_scalars * g.unsqueeze(1) + scalars * dg.unsqueeze(2)).sum(dim=1)
    w, dw = s * cosines, s * d_cosines
    across, d_across = (along - normal).unflatten(1, (v, k)), (d_along - d_normal).unflatten(2, (v, k))
    normal, d_normal = normal.unflatten(1, (v, k)), d_normal.unflatten(2, (v, k))
    radial = c0 + (normal * w.unsqueeze(1)).sum(dim=2)
    d_radial = dc0 + (d_normal * w.unsqueeze(1) + normal * dw.unsqueeze(2)).sum(dim=3)
    tg = to_unit * g
    d_tg = d_to_unit * g + to_unit * dg
    summed = (radial * tg.unsqueeze(1)).sum(dim=0)
    d_summed = (d_radial * tg.unsqueeze(1) + radial * d_tg.unsqueeze(2)).sum(dim=1)
    tangential = (across * g[:, None, None]).sum(dim=0)
    d_tangential = (d_across * g[:, None, None] + across * dg[:, :, None, None]).sum(dim=1)
    scaled = u * s.unsqueeze(1)
    vectors = summed.unsqueeze(1) * displacement + (tangential.unsqueeze(2) * scaled).sum(dim=1)
    unit = torch.eye(n - 1, dtype=summed.dtype, device=summed.device)
    d_vectors = d_summed.unsqueeze(2) * displacement + summed.unsqueeze(1) * unit[:, None, :, None]
    d_vectors = d_vectors + (d_tangential.unsqueeze(3) * scaled).sum(dim=2)
    return torch.cat([out, vectors.flatten(0, 1)]), torch.cat([d_out, d_vectors.flatten(1, 2)], dim=1)


def forward_mode(pairs: Pairs, displacement: Tensor, together: bool = True) -> tuple[Tensor, Tensor]:
    """The same by forward-mode differentiation of ``contributions``."""

    def value(x: Tensor) -> Tensor:
        return contributions(*pairs.arguments(x))[0]

    axes = torch.eye(pairs.shape.n_dims, dtype=displacement.dtype).unsqueeze(2).expand(-1, -1, displacement.shape[1])
    if together:
        values, slopes = torch.func.vmap(lambda axis: torch.func.jvp(value, (displacement,), (axis,)))(axes)
        return values[0], slopes
    found = [torch.func.jvp(value, (displacement,), (axis,)) for axis in axes]
    return found[0][0], torch.stack([slope for _, slope in found])


def ways(pairs: Pairs, compiled: bool) -> dict[str, Callable[[], Any]]:
    """What is timed."""
    one = pairs.displacement
    four = torch.cat([one + 0.05 * step.unsqueeze(1) for step in torch.eye(4, 3, dtype=one.dtype)], dim=1)

    def values(displacement: Tensor) -> Callable[[], Any]:
        def work() -> None:
            with torch.no_grad():
                contributions(*pairs.arguments(displacement), keep=False)

        return work

    def written_out(displacement: Tensor) -> Callable[[], Any]:
        def work() -> None:
            with torch.no_grad():
                arguments = pairs.arguments(displacement)
                out, kept = contributions(*arguments)
                shape, displaced, features, _, _, length, _, weights = arguments
                gradients(shape, displaced, features, length, weights, kept, out, True, True)

        return work

    def recorded(outputs: Callable[[Tensor], tuple[Tensor, ...]], displacement: Tensor) -> Callable[[], Any]:
        def work() -> None:
            inputs = pairs.differentiable()
            for tensor in inputs:
                tensor.requires_grad_(True)
            loss = sum((out.square().sum() for out in outputs(displacement)), torch.zeros(()))
            torch.autograd.grad(loss, inputs, allow_unused=True)
            for tensor in inputs:
                tensor.requires_grad_(False)

        return work

    def quiet(function: Callable[[], Any]) -> Callable[[], Any]:
        def work() -> None:
            with torch.no_grad():
                function()

        return work

    found = {
        "one point": values(one),
        "proxies": values(four),
        "derivative in the pair function": quiet(lambda: with_tangents(pairs, one)),
        "forward mode, together": quiet(lambda: forward_mode(pairs, one)),
        "forward mode, one by one": quiet(lambda: forward_mode(pairs, one, together=False)),
        "one point, gradient written out": written_out(one),
        "proxies, gradient written out": written_out(four),
        "proxies, gradient recorded": recorded(lambda x: (contributions(*pairs.arguments(x))[0],), four),
        "derivative in the pair function, gradient recorded": recorded(lambda x: with_tangents(pairs, x), one),
    }
    if compiled:
        options = {"cpp_wrapper": True}
        proxies = torch.compile(lambda: contributions(*pairs.arguments(four), keep=False)[0], options=options)
        derivative = torch.compile(lambda: with_tangents(pairs, one), options=options)
        found |= {"proxies, compiled": quiet(proxies), "derivative in the pair function, compiled": quiet(derivative)}
    return found


def main(args: list[str] | None = None) -> dict[str, float]:
    """Time all ways in turn; microseconds a pair by way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", nargs="*", type=int, default=[512, 2048], help="at once; the best of these counts")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--compile", action="store_true", help="both compiled, too")
    parser.add_argument("--repetitions", type=int, default=20)
    a = parser.parse_args(args)
    best: dict[str, float] = {}
    with one_thread():
        for n_pairs in a.pairs:
            works = ways(make(n_pairs, a.hidden), a.compile)
            times: dict[str, list[float]] = {name: [] for name in works}
            for _ in range(a.repetitions + 1):
                for name, work in works.items():
                    start = time.process_time()
                    work()
                    times[name].append((time.process_time() - start) / n_pairs * 1e6)
            for name, values in times.items():
                best[name] = min(best.get(name, float("inf")), statistics.median(values[1:]))
    print("| a far pair | us |\n|---|---|")
    print("\n".join(f"| {name} | {value:.3g} |" for name, value in best.items()))
    return best


if __name__ == "__main__":
    main()
