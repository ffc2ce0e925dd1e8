"""One kernel branch: from a (target, source) pair to a contribution to every output field.

A pair's vectors stand in the canonical order: global vectors, source vectors (each sorted by name), then r, the
displacement over the branch's length. Only the columns that involve r depend on the pair; the first linear layer's
share of all others is computed once a source. The vector outputs are summed without building their basis:
``u_r (c_0 + sum_k b_k s_k u_k.u_r) + sum_k (a_k - b_k) s_k u_k``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from globe_lightning.fields import FieldLayout
from globe_lightning.models.features import legendre, magnitude_and_direction, smooth_log
from globe_lightning.models.networks import make_network


@dataclass
class SourceVectors:
    """The vectors of each source other than r, in canonical order: K = V - 1 of them, one column a source.

    Attributes:
        directions: smoothed unit vectors u_k (K, D, *sources).
        magnitudes: m_k (K, *sources).
        log_magnitudes: s_k = smooth_log(m_k) (K, *sources).
    """

    directions: Float[Tensor, "vectors dims *sources"]
    magnitudes: Float[Tensor, "vectors *sources"]
    log_magnitudes: Float[Tensor, "vectors *sources"]

    @staticmethod
    def of(vectors: Float[Tensor, "sources vectors dims"], smoothing_radius: Float[Tensor, ""]) -> SourceVectors:
        """From plain vectors."""
        magnitudes, directions = magnitude_and_direction(vectors, smoothing_radius)
        magnitudes = magnitudes.t().contiguous()
        return SourceVectors(directions.permute(1, 2, 0).contiguous(), magnitudes, smooth_log(magnitudes))

    def packed(self) -> Float[Tensor, "features sources"]:
        """All of it in one table, so that one gather fetches a pair's share: u, m, s."""
        return torch.cat([self.directions.flatten(0, 1), self.magnitudes, self.log_magnitudes])


class Kernel(nn.Module):
    """The kernel of one branch (layer, boundary type, reference length).

    Args:
        n_spatial_dims: D.
        output_field_ranks: what the kernel emits.
        source_data_ranks: per-source fields (latents, normals, physical data).
        global_data_ranks: per-sample fields.
        reference_length_ratios: names "k1_k2" of the logarithmic length ratios among the input columns.
        hidden_layer_sizes, n_spherical_harmonics, network_type, self_regularization_beta, initial_amplitude: as of
            ``GLOBE``.
    """

    _output_rows: Tensor
    _source_columns: Tensor
    _pair_columns: Tensor

    def __init__(
        self,
        *,
        n_spatial_dims: int,
        output_field_ranks: Mapping[str, Any],
        source_data_ranks: Mapping[str, Any],
        global_data_ranks: Mapping[str, Any] | None = None,
        reference_length_ratios: Sequence[str] = (),
        hidden_layer_sizes: Sequence[int] = (64, 64, 64),
        n_spherical_harmonics: int = 4,
        network_type: str = "pade",
        self_regularization_beta: float | None = None,
        initial_amplitude: float = 1.0,
    ) -> None:
        super().__init__()
        outputs = FieldLayout(output_field_ranks, n_spatial_dims, "output_field_ranks")
        sources = FieldLayout(source_data_ranks, n_spatial_dims, "source_data_ranks")
        globals_ = FieldLayout(global_data_ranks, n_spatial_dims, "global_data_ranks")
        self.n_dims = n_spatial_dims
        self.n_harmonics = n_spherical_harmonics
        self.n_scalars, self.n_vector_outputs = len(outputs.scalars), len(outputs.vectors)
        self.n_global_vectors = len(globals_.vectors)
        self.n_vectors = len(globals_.vectors) + len(sources.vectors)
        self.global_columns = global_scalar_order(globals_.scalars, reference_length_ratios)
        n_inputs = self._index_columns(len(self.global_columns) + len(sources.scalars))
        n_outputs = self.n_scalars + self.n_vector_outputs * (1 + 2 * self.n_vectors)
        self.network = make_network(
            network_type, n_inputs, hidden_layer_sizes, n_outputs, self_regularization_beta, initial_amplitude
        )
        order = self._output_order(outputs)
        self.register_buffer("_output_rows", self.network.order_outputs(order), persistent=False)

    def _index_columns(self, n_scalars: int) -> int:
        """Which input columns depend on the source alone, which on the pair; returns the number of all."""
        k, g = self.n_vectors, self.n_global_vectors
        magnitude = [n_scalars + (i if i < g else i + 1) for i in range(k)]
        source_columns = [*range(n_scalars), *magnitude]
        pair_columns = [n_scalars + g]
        first = n_scalars + k + 1
        couples = list(combinations(range(k + 1), 2))
        for j in range(self.n_harmonics):
            for position, (_, other) in enumerate(couples):
                column = first + j * len(couples) + position
                (pair_columns if other == k else source_columns).append(column)
        self.register_buffer("_source_columns", torch.tensor(source_columns, dtype=torch.int64), persistent=False)
        self.register_buffer("_pair_columns", torch.tensor(pair_columns, dtype=torch.int64), persistent=False)
        return first + self.n_harmonics * len(couples)

    def _output_order(self, outputs: FieldLayout) -> Tensor:
        """Where the network's outputs [scalars | c_0 | a | b] stand among its F outputs by sorted field."""
        scalars: list[int] = []
        c0: list[int] = []
        a: list[int] = []
        b: list[int] = []
        position = 0
        for rank in outputs.ranks.values():
            if rank == 0:
                scalars.append(position)
                position += 1
            else:
                c0.append(position)
                a += range(position + 1, position + 1 + 2 * self.n_vectors, 2)
                b += range(position + 2, position + 2 + 2 * self.n_vectors, 2)
                position += 1 + 2 * self.n_vectors
        return torch.tensor([*scalars, *c0, *a, *b], dtype=torch.int64)

    @torch.no_grad()
    def start_positive(self, scalars: Sequence[int]) -> None:
        """Let some scalar outputs (by their place among the sorted scalars) start positive, of the order of one."""
        self.network.perceptron().linears()[-1].bias[self._output_rows[list(scalars)]] = self.network.initial_numerator

    def weights(self, dtype: torch.dtype) -> list[Tensor]:
        """The network's weights in the precision of the products, in the order of :meth:`Weights.flat`.

        The first matrix holds the pair columns only; :meth:`source_weights` gives that of the source columns.
        """
        linears = self.network.perceptron().linears()
        hidden = linears[1:-1]
        tensors = [
            linears[0].weight.index_select(1, self._pair_columns).t(),
            *(linear.weight.t() for linear in hidden),
            *(linear.bias.unsqueeze(0) for linear in hidden),
            linears[-1].weight.index_select(0, self._output_rows),
            linears[-1].bias.index_select(0, self._output_rows).unsqueeze(1),
        ]
        return [tensor.to(dtype) for tensor in tensors]

    def source_weights(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The first linear layer's matrix of the source columns (columns, hidden) and its bias (1, hidden)."""
        first = self.network.perceptron().linears()[0]
        matrix = first.weight.index_select(1, self._source_columns).t()
        return matrix.to(dtype), first.bias.unsqueeze(0).to(dtype)

    def source_columns(
        self,
        global_scalars: Float[Tensor, " globals"],
        source_scalars: Float[Tensor, "scalars sources"],
        vectors: SourceVectors,
    ) -> Float[Tensor, "columns sources"]:
        """The input columns that depend on the source alone; the same for all branches."""
        k, n = vectors.magnitudes.shape
        rows = [global_scalars.unsqueeze(1).expand(-1, n), source_scalars, vectors.log_magnitudes]
        if k > 1 and self.n_harmonics:
            first, second = torch.triu_indices(k, k, offset=1, device=vectors.magnitudes.device)
            u, m = vectors.directions, vectors.magnitudes
            cosines = (u.index_select(0, first) * u.index_select(0, second)).sum(dim=1)
            products = smooth_log(m.index_select(0, first) * m.index_select(0, second))
            rows += [products * p for p in legendre(cosines, self.n_harmonics)]
        return torch.cat(rows)


def global_scalar_order(names: Sequence[str], ratios: Sequence[str]) -> list[tuple[str, str]]:
    """Order of the global scalar columns: ("data", name) and ("ratio", "k1_k2"), sorted by their printed tuples."""
    columns = [(str(("global_scalars", name)), ("data", name)) for name in names]
    columns += [(str(("global_scalars", "log_reference_length_ratios", ratio)), ("ratio", ratio)) for ratio in ratios]
    return [column for _, column in sorted(columns)]
