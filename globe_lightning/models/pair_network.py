"""The networks of a batch of pairs, all branches at once, and their gradient written out, by torch's operations.

Shapes: B branches, P pairs, S sources, F raw outputs. A pair is a row of a hidden layer and a column of all else, so
that rows are gathered and added up as they are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F


class Weights(NamedTuple):
    """A network's weights for all branches, in the precision of the products.

    Attributes:
        first: (B, pair columns, hidden).
        matrices, biases: of the hidden layers after the first (B, hidden, hidden) and (B, 1, hidden).
        last, last_bias: (B, outputs, hidden) and (B, outputs, 1), outputs ordered [scalars | c_0 | a | b].
    """

    first: Tensor
    matrices: list[Tensor]
    biases: list[Tensor]
    last: Tensor
    last_bias: Tensor

    def flat(self) -> list[Tensor]:
        """All of them in one list."""
        return [self.first, *self.matrices, *self.biases, self.last, self.last_bias]

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> Weights:
        """The inverse of :meth:`flat`."""
        n = (len(tensors) - 3) // 2
        first, rest = tensors[0], list(tensors[1:])
        return Weights(first, rest[:n], rest[n : 2 * n], rest[-2], rest[-1])


class HiddenLayers(NamedTuple):
    """What the networks of a batch leave for their gradient: hidden layers before and after their activation."""

    before: list[Tensor]
    after: list[Tensor]


class NetworkGradients(NamedTuple):
    """Gradients of :func:`network_outputs`; ``hidden`` has a row for every pair."""

    columns: Float[Tensor, "branches columns pairs"]
    hidden: Float[Tensor, "branches pairs hidden"]
    weights: Weights


def network_outputs(
    columns: Float[Tensor, "branches columns pairs"],
    hidden: Float[Tensor, "branches sources hidden"],
    rows: Int[Tensor, " pairs"] | None,
    weights: Weights,
    keep: bool,
) -> tuple[Float[Tensor, "branches raw pairs"], HiddenLayers]:
    """The networks' last linear layer.

    Args:
        columns: what of the input depends on the pair.
        hidden: source terms of the first layer.
        rows: each pair's row of them; None for pairs that have all the sources in turn, again and again.
        weights: of the networks.
        keep: whether all hidden layers are wanted; else they overwrite each other and none is returned.
    """
    inplace = not (keep or torch.is_grad_enabled() or torch.compiler.is_compiling())
    before = [_first_layer(columns.transpose(1, 2), hidden, rows, weights.first)]
    after = [F.silu(before[0], inplace=inplace)]
    for matrix, bias in zip(weights.matrices, weights.biases, strict=True):
        before.append(_affine(after[-1], matrix, bias))
        after.append(F.silu(before[-1], inplace=inplace))
        if not keep:
            del before[0], after[0]
    raw = _affine(weights.last, after[-1].transpose(1, 2), weights.last_bias)
    return raw, HiddenLayers(before, after) if keep else HiddenLayers([], [])


def network_gradients(
    columns: Float[Tensor, "branches columns pairs"],
    weights: Weights,
    layers: HiddenLayers,
    of_raw: Float[Tensor, "branches raw pairs"],
    consume: bool,
) -> NetworkGradients:
    """The gradient of :func:`network_outputs`, from the hidden layers that it kept.

    Args:
        columns, weights: its arguments.
        layers: what it left.
        of_raw: gradient of its result.
        consume: take each hidden layer out of ``layers`` when it is done with, so that its memory is free.
    """
    before, after = layers if consume else (list(layers.before), list(layers.after))
    of_last_bias = of_raw.sum(dim=2, keepdim=True)
    of_last = torch.bmm(of_raw, after.pop())
    of_a = torch.bmm(of_raw.transpose(1, 2), weights.last)
    of_matrices: list[Tensor] = []
    of_biases: list[Tensor] = []
    for matrix in reversed(weights.matrices):
        of_z = _silu_gradient(of_a, before.pop())
        of_biases.insert(0, of_z.sum(dim=1, keepdim=True))
        of_matrices.insert(0, torch.bmm(after.pop().transpose(1, 2), of_z))
        of_a = torch.bmm(of_z, matrix.transpose(1, 2))
    of_hidden = _silu_gradient(of_a, before.pop())
    of_first = torch.bmm(columns, of_hidden)
    of_columns = torch.bmm(weights.first, of_hidden.transpose(1, 2))
    of_weights = Weights(of_first, of_matrices, of_biases, of_last, of_last_bias)
    return NetworkGradients(of_columns, of_hidden, of_weights)


class NetworkFunctions(NamedTuple):
    """A way to evaluate networks of pairs: functions like :func:`network_outputs` and :func:`network_gradients`."""

    outputs: Callable[..., tuple[Tensor, HiddenLayers]]
    gradients: Callable[..., NetworkGradients]


TORCH_NETWORK = NetworkFunctions(network_outputs, network_gradients)


def _first_layer(
    x: Float[Tensor, "branches pairs columns"],
    hidden: Float[Tensor, "branches sources hidden"],
    rows: Int[Tensor, " pairs"] | None,
    matrix: Float[Tensor, "branches columns hidden"],
) -> Float[Tensor, "branches pairs hidden"]:
    """Products of the pair columns plus each pair's source term; no second copy of the terms where none is needed."""
    by_itself = torch.is_grad_enabled() or torch.compiler.is_compiling()  # recorded, or fused
    if rows is None:
        products, terms = torch.bmm(x, matrix).unflatten(1, (-1, hidden.shape[1])), hidden.unsqueeze(1)
        return (products + terms if by_itself else products.add_(terms)).flatten(1, 2)
    terms = hidden.index_select(1, rows)
    return torch.bmm(x, matrix) + terms if by_itself else terms.baddbmm_(x, matrix)


def _affine(x: Tensor, y: Tensor, bias: Tensor) -> Tensor:
    """Batched products plus a bias, which a compiler joins to what follows."""
    return torch.bmm(x, y) + bias if torch.compiler.is_compiling() else torch.baddbmm(bias, x, y)


def _silu_gradient(gradient: Tensor, z: Tensor) -> Tensor:
    """Gradient of ``silu(z)`` in the memory of the one given; torch's own operation for it cannot be differentiated."""
    if torch.is_grad_enabled():
        sigmoid = torch.sigmoid(z)
        return gradient * sigmoid * (1 + z * (1 - sigmoid))
    if torch.compiler.is_compiling():
        return torch.ops.aten.silu_backward(gradient, z)
    return torch.ops.aten.silu_backward.grad_input(gradient, z, grad_input=gradient)
