"""A multiscale kernel: one kernel branch a reference length, summed; and the names modules may carry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from globe_lightning.models.kernel import Kernel, SourceVectors
from globe_lightning.models.pair_network import Weights
from globe_lightning.models.pairs import KernelShape


def module_key(name: str) -> str:
    """A name under which a ModuleDict or ParameterDict takes any string, e.g. "keys" or "U.inf"; one to one.

    Ordinary names stay as they are, so that state dictionaries read as one expects.
    """
    key = name.replace("%", "%25").replace(".", "%2E")
    reserved = hasattr(nn.ModuleDict(), key) or hasattr(nn.ParameterDict(), key)
    return f"%{key}" if reserved or not key else key


@dataclass
class SourceTable:
    """The sources of one boundary type as a layer's pairs see them: points, then (if the plan uses them) nodes.

    Attributes:
        kind: the boundary type.
        shape: of the layer's kernels for this type.
        positions: (D, rows) [m].
        features: packed directions, magnitudes, log magnitudes and strengths (features, rows), see ``pairs``.
        hidden: the first layer's share of every source (B, rows, hidden).
        inverse_length: 1 / (l_m exp(a_m)) of every branch (B, 1) [1/m].
        weights: the networks' weights in the precision of the products.
    """

    kind: str
    shape: KernelShape
    positions: Float[Tensor, "dims rows"]
    features: Float[Tensor, "features rows"]
    hidden: Float[Tensor, "branches rows hidden"]
    inverse_length: Float[Tensor, "branches 1"]
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

    @property
    def shape(self) -> KernelShape:
        """What the branches have in common."""
        kernel: Kernel = next(iter(self.kernels.values()))  # type: ignore[assignment]
        return KernelShape(
            n_dims=kernel.n_dims,
            n_vectors=kernel.n_vectors,
            n_harmonics=kernel.n_harmonics,
            n_scalars=kernel.n_scalars,
            n_vector_outputs=kernel.n_vector_outputs,
            n_branches=len(self.names),
            beta=kernel.network.beta,
        )

    def source_table(
        self,
        kind: str,
        positions: Float[Tensor, "rows dims"],
        global_scalars: Float[Tensor, " columns"],
        source_scalars: Float[Tensor, "scalars rows"],
        vectors: SourceVectors,
        strengths: Float[Tensor, "branches rows"],
        reference_lengths: Mapping[str, Tensor],
        product_dtype: torch.dtype,
    ) -> SourceTable:
        """Everything that depends on the sources alone, once for all pairs.

        Args:
            kind: the boundary type.
            positions: of every source row (points, then nodes) [m].
            global_scalars: of :meth:`global_scalars`.
            source_scalars, vectors: of every source row.
            strengths: q A of every source row.
            reference_lengths: {name: scalar [m]}.
            product_dtype: precision of the matrix products.
        """
        kernels: list[Any] = [self.kernels[module_key(name)] for name in self.names]
        dtype = vectors.magnitudes.dtype
        scales = [
            reference_lengths[name] * self.log_scalefactors[module_key(name)].to(dtype).exp() for name in self.names
        ]
        columns = kernels[0].source_columns(global_scalars, source_scalars, vectors).to(product_dtype)
        of_kernels = [(*kernel.source_weights(product_dtype), *kernel.weights(product_dtype)) for kernel in kernels]
        matrix, bias, *weights = (torch.stack(tensors) for tensors in zip(*of_kernels, strict=True))
        return SourceTable(
            kind,
            self.shape,
            positions.t().contiguous(),
            torch.cat([vectors.packed(), strengths]),
            torch.baddbmm(bias, columns.t().expand(len(kernels), -1, -1), matrix),
            1 / torch.stack(scales),
            Weights.of(weights),
        )
