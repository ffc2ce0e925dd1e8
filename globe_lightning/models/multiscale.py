"""A multiscale kernel: one kernel branch a reference length, summed; and the names modules may carry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from globe_lightning.models.kernel import Kernel, SourceVectors
from globe_lightning.models.networks import Weights


def module_key(name: str) -> str:
    """A name under which a ModuleDict or ParameterDict takes any string, e.g. "keys" or "U.inf"; one to one.

    Ordinary names stay as they are, so that state dictionaries read as one expects.
    """
    key = name.replace("%", "%25").replace(".", "%2E")
    reserved = hasattr(nn.ModuleDict(), key) or hasattr(nn.ParameterDict(), key)
    return f"%{key}" if reserved or not key else key


@dataclass
class Branch:
    """What one branch needs to evaluate pairs: per source row its network share and strength, and its weights.

    Attributes:
        kernel: the branch's kernel.
        hidden: first layer's share of every source (hidden, rows).
        strength: q A of every source (1, rows).
        inverse_length: 1 / (l_m exp(a_m)) [1/m].
        weights: the network's weights in the precision of the products.
    """

    kernel: Kernel
    hidden: Float[Tensor, "hidden rows"]
    strength: Float[Tensor, "1 rows"]
    inverse_length: Float[Tensor, "1"]
    weights: Weights


class MultiscaleKernel(nn.Module):
    """Kernels of one (layer, boundary type), one for each reference length.

    Args:
        reference_length_names: in declared order.
        kernel_arguments: arguments of :class:`Kernel` but ``reference_length_ratios``.
    """

    def __init__(self, reference_length_names: Sequence[str], **kernel_arguments: Any) -> None:
        super().__init__()
        self.names = list(reference_length_names)
        ratios = [f"{a}_{b}" for i, a in enumerate(self.names) for b in self.names[i + 1 :]]
        self.kernels = nn.ModuleDict(
            {module_key(name): Kernel(reference_length_ratios=ratios, **kernel_arguments) for name in self.names}
        )
        self.log_scalefactors = nn.ParameterDict(
            {module_key(name): nn.Parameter(torch.zeros(1)) for name in self.names}
        )

    def global_scalars(
        self, global_data: Mapping[str, Tensor], reference_lengths: Mapping[str, Tensor], dtype: torch.dtype
    ) -> Float[Tensor, " columns"]:
        """The global scalar columns: the sample's own and log(l_k1 / l_k2) of every pair of lengths."""
        logs = {name: reference_lengths[name].log() for name in self.names}
        ratios = {f"{a}_{b}": logs[a] - logs[b] for i, a in enumerate(self.names) for b in self.names[i + 1 :]}
        kernel: Any = next(iter(self.kernels.values()))
        columns = [
            (global_data if kind == "data" else ratios)[name].reshape(1).to(dtype)
            for kind, name in kernel.global_columns
        ]
        device = next(iter(reference_lengths.values())).device
        return torch.cat(columns) if columns else torch.zeros(0, dtype=dtype, device=device)

    def branches(
        self,
        global_scalars: Float[Tensor, " columns"],
        source_scalars: Float[Tensor, "scalars rows"],
        vectors: SourceVectors,
        strengths: Mapping[str, Float[Tensor, " rows"]],
        reference_lengths: Mapping[str, Tensor],
        product_dtype: torch.dtype,
    ) -> list[Branch]:
        """Everything that depends on the sources alone, once for all pairs.

        Args:
            global_scalars: of :meth:`global_scalars`.
            source_scalars, vectors: of every source row (points, then nodes).
            strengths: {reference length name: q A of every source row}.
            reference_lengths: {name: scalar [m]}.
            product_dtype: precision of the matrix products.
        """
        out = []
        for name in self.names:
            key = module_key(name)
            kernel: Kernel = self.kernels[key]  # type: ignore[assignment]
            scale = reference_lengths[name] * self.log_scalefactors[key].to(vectors.magnitudes.dtype).exp()
            hidden = kernel.source_terms(global_scalars, source_scalars, vectors, product_dtype)
            out.append(Branch(kernel, hidden, strengths[name].unsqueeze(0), 1 / scale, kernel.weights(product_dtype)))
        return out
