"""The functions of ``pairs`` as the evaluation of a plan calls them: as they are, or compiled, one graph each."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from globe_lightning.models.pairs import KernelShape, PairGradients, Values, Weights, contributions, gradients


class PairFunctions(NamedTuple):
    """What is computed for a block of pairs of one kind of kernel.

    Attributes:
        sums: contributions alone.
        sums_and_values: contributions and what their gradient needs.
        gradients: from those values.
        recomputed_gradients: from the inputs.
    """

    sums: Callable[..., Tensor]
    sums_and_values: Callable[..., tuple[Tensor, Values]]
    gradients: Callable[..., PairGradients]
    recomputed_gradients: Callable[..., PairGradients]


@lru_cache(maxsize=256)
def pair_functions(shape: KernelShape, compiled: bool) -> PairFunctions:
    """The functions for kernels of a shape.

    Args:
        shape: of the kernels.
        compiled: by ``torch.compile``, as whole graphs for any number of pairs. Compiling takes some seconds at the
            first use of each function, and a C++ compiler on a CPU.
    """

    def sums(*inputs: Any) -> Tensor:
        return contributions(shape, *inputs)[0]

    def sums_and_values(*inputs: Any) -> tuple[Tensor, Values]:
        return contributions(shape, *inputs)

    def of_values(*inputs: Any) -> PairGradients:
        return gradients(shape, *inputs)

    def recomputed(
        displacement: Tensor,
        features: Tensor,
        hidden: Tensor,
        inverse_length: Tensor,
        smoothing: Tensor,
        weights: Weights,
        *wanted: Any,
    ) -> PairGradients:
        _, values = contributions(shape, displacement, features, hidden, inverse_length, smoothing, weights)
        return gradients(shape, displacement, features, inverse_length, weights, values, *wanted)

    if not compiled:
        return PairFunctions(sums, sums_and_values, of_values, recomputed)
    # Every layer and boundary type may have a shape of its own, and every precision a graph.
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 64)
    compiler = torch.compile(fullgraph=True, dynamic=True)
    return PairFunctions(compiler(sums), compiler(sums_and_values), compiler(of_values), compiler(recomputed))
