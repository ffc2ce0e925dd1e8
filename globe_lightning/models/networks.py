"""The small networks of a kernel: a multilayer perceptron with a rational (Pade) or bounded (tanh) output.

These modules hold the parameters. Pairs are evaluated on plain tensors of them, all branches at once (see ``pairs``).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor, nn


class Perceptron(nn.Module):
    """Linear-SiLU-…-Linear; ``layers`` holds linear layers at even and activations at odd places."""

    def __init__(self, n_inputs: int, hidden_layer_sizes: Sequence[int], n_outputs: int) -> None:
        super().__init__()
        sizes = [n_inputs, *hidden_layer_sizes, n_outputs]
        layers: list[nn.Module] = []
        for wide, narrow in pairwise(sizes):
            layers += [nn.Linear(wide, narrow), nn.SiLU()]
        self.layers = nn.ModuleList(layers[:-1])

    def linears(self) -> list[nn.Linear]:
        """The linear layers in order."""
        return [layer for layer in self.layers if isinstance(layer, nn.Linear)]

    def forward(self, x: Float[Tensor, "n inputs"]) -> Float[Tensor, "n outputs"]:
        """Evaluate the whole perceptron."""
        for layer in self.layers:
            x = layer(x)
        return x


def rational(p: Float[Tensor, "..."], q: Float[Tensor, "..."], beta: float) -> Float[Tensor, "..."]:
    """``sign(p) p^2 / (1 + q^2 + beta p^2)``: bounded by 1/beta, unbounded for 0."""
    if torch.is_grad_enabled():
        return p.abs() * p / _denominator(p, q, beta)
    return p.abs().mul_(p).div_(_denominator(p, q, beta))


def rational_gradient(
    gradient: Float[Tensor, "..."],
    p: Float[Tensor, "..."],
    q: Float[Tensor, "..."],
    out: Float[Tensor, "..."],
    beta: float,
) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."]]:
    """Gradients of p and q from that of ``out = rational(p, q, beta)``."""
    scaled = 2 * gradient / _denominator(p, q, beta)
    of_p = p.abs()
    if beta:
        of_p = torch.addcmul(of_p, p, out, value=-beta)
    return of_p * scaled, -(q * out) * scaled


def _denominator(p: Tensor, q: Tensor, beta: float) -> Tensor:
    denominator = torch.addcmul(torch.ones((), dtype=q.dtype, device=q.device), q, q)
    if not beta:
        return denominator
    if torch.is_grad_enabled():
        return torch.addcmul(denominator, p, p, value=beta)
    return denominator.addcmul_(p, p, value=beta)


class KernelNetwork(nn.Module):
    """Network of one kernel branch with ``n_outputs`` outputs F; subclasses say what follows the perceptron."""

    n_outputs: int
    beta: float | None = None
    """Of the rational function; None where none follows."""
    initial_numerator: float = 1.5
    """The size of what a fresh network's last linear layer puts out."""

    def perceptron(self) -> Perceptron:
        """The perceptron that holds all parameters."""
        raise NotImplementedError

    def activate(self, raw: Float[Tensor, "raw *n"]) -> Float[Tensor, "outputs *n"]:
        """From the perceptron's outputs, along the first dimension, to the F outputs of the network."""
        raise NotImplementedError

    def order_outputs(self, order: Tensor) -> Tensor:
        """Rows of the last linear layer that yield the outputs in a given order."""
        raise NotImplementedError

    def forward(self, x: Float[Tensor, "n inputs"]) -> Float[Tensor, "n outputs"]:
        """Evaluate the whole network on complete input columns."""
        return self.activate(self.perceptron()(x).t()).t()


class PadeNetwork(KernelNetwork):
    """One perceptron with 2F outputs: numerators p, then denominators q."""

    def __init__(
        self,
        n_inputs: int,
        hidden_layer_sizes: Sequence[int],
        n_outputs: int,
        self_regularization_beta: float | None = None,
        initial_amplitude: float = 1.0,
    ) -> None:
        super().__init__()
        self.n_outputs = n_outputs
        self.beta = self_regularization_beta or 0.0
        self.combined_mlp = Perceptron(n_inputs, hidden_layer_sizes, 2 * n_outputs)
        # p^2 of a default initialisation is so small that, layer upon layer, outputs and gradients would vanish.
        self.initial_numerator = 1.5 * initial_amplitude**0.5
        bias = self.combined_mlp.linears()[-1].bias.data[:n_outputs]
        nn.init.uniform_(bias, -self.initial_numerator, self.initial_numerator)

    def perceptron(self) -> Perceptron:
        """The perceptron that holds all parameters."""
        return self.combined_mlp

    def activate(self, raw: Float[Tensor, "raw *n"]) -> Float[Tensor, "outputs *n"]:
        """The rational function of numerators and denominators."""
        p, q = raw.chunk(2)
        return rational(p, q, self.beta or 0.0)

    def order_outputs(self, order: Tensor) -> Tensor:
        """Rows of the last linear layer: numerators, then denominators, each in the given order."""
        return torch.cat([order, order + self.n_outputs])


class TanhNetwork(KernelNetwork):
    """A perceptron with F outputs, then tanh."""

    def __init__(self, n_inputs: int, hidden_layer_sizes: Sequence[int], n_outputs: int) -> None:
        super().__init__()
        self.n_outputs = n_outputs
        self.add_module("0", Perceptron(n_inputs, hidden_layer_sizes, n_outputs))

    def perceptron(self) -> Perceptron:
        """The perceptron that holds all parameters."""
        return self.get_submodule("0")  # type: ignore[return-value]

    def activate(self, raw: Float[Tensor, "raw *n"]) -> Float[Tensor, "outputs *n"]:
        """Hyperbolic tangent."""
        return torch.tanh(raw)

    def order_outputs(self, order: Tensor) -> Tensor:
        """Rows of the last linear layer in the given order."""
        return order


def make_network(
    network_type: str,
    n_inputs: int,
    hidden_layer_sizes: Sequence[int],
    n_outputs: int,
    self_regularization_beta: float | None,
    initial_amplitude: float = 1.0,
) -> KernelNetwork:
    """Build the network named ``network_type``: "pade" or "mlp".

    Raises:
        ValueError: another name.
    """
    if network_type == "pade":
        return PadeNetwork(n_inputs, hidden_layer_sizes, n_outputs, self_regularization_beta, initial_amplitude)
    if network_type == "mlp":
        return TanhNetwork(n_inputs, hidden_layer_sizes, n_outputs)
    raise ValueError(f'network_type: expected "pade" or "mlp", found {network_type!r}')
