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
from torch.nn import functional as F

from globe_lightning.fields import FieldLayout
from globe_lightning.models.features import legendre, smooth_log
from globe_lightning.models.networks import Weights, hidden_layers, make_network


@dataclass
class SourceVectors:
    """The vectors of each source other than r, in canonical order: K = V - 1 of them.

    Attributes:
        directions: smoothed unit vectors u_k (n, K, D).
        magnitudes: m_k (n, K).
        log_magnitudes: s_k = smooth_log(m_k) (n, K).
    """

    directions: Float[Tensor, "n vectors dims"]
    magnitudes: Float[Tensor, "n vectors"]
    log_magnitudes: Float[Tensor, "n vectors"]

    @staticmethod
    def of(magnitudes: Float[Tensor, "n vectors"], directions: Float[Tensor, "n vectors dims"]) -> SourceVectors:
        """From smoothed magnitudes and directions."""
        return SourceVectors(directions, magnitudes, smooth_log(magnitudes))

    def packed(self) -> Float[Tensor, "n columns"]:
        """All of it side by side, so that one gather fetches a pair's share: u, m, s."""
        return torch.cat([self.directions.flatten(1), self.magnitudes, self.log_magnitudes], dim=1)

    @staticmethod
    def unpacked(packed: Float[Tensor, "n columns"], n_vectors: int, n_dims: int) -> SourceVectors:
        """The inverse of :meth:`packed`."""
        u, m, s = packed.split([n_vectors * n_dims, n_vectors, n_vectors], dim=1)
        return SourceVectors(u.view(-1, n_vectors, n_dims), m, s)


class Kernel(nn.Module):
    """The kernel of one branch (layer, boundary type, reference length).

    Args:
        n_spatial_dims: D.
        output_field_ranks: what the kernel emits.
        source_data_ranks: per-source fields (latents, normals, physical data).
        global_data_ranks: per-sample fields.
        reference_length_ratios: names "k1_k2" of the logarithmic length ratios among the input columns.
        hidden_layer_sizes, n_spherical_harmonics, network_type, self_regularization_beta: as of ``GLOBE``.
    """

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
        self.network = make_network(network_type, n_inputs, hidden_layer_sizes, n_outputs, self_regularization_beta)
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
        scalars, c0, a, b = [], [], [], []
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

    def weights(self, dtype: torch.dtype) -> Weights:
        """The network's weights in the precision of the products: source and pair columns apart, outputs ordered.

        The first matrix holds the pair columns only; :meth:`source_terms` takes the source columns.
        """
        linears = self.network.perceptron().linears()
        matrices = [linear.weight for linear in linears]
        biases = [linear.bias for linear in linears]
        matrices[-1] = matrices[-1].index_select(0, self._output_rows)
        biases[-1] = biases[-1].index_select(0, self._output_rows)
        matrices[0] = matrices[0].index_select(1, self._pair_columns)
        return Weights([matrix.to(dtype) for matrix in matrices], [bias.to(dtype) for bias in biases])

    def source_terms(
        self,
        global_scalars: Float[Tensor, " globals"],
        source_scalars: Float[Tensor, "n scalars"],
        vectors: SourceVectors,
        dtype: torch.dtype,
    ) -> Float[Tensor, "n hidden"]:
        """The first linear layer's share of everything that depends on the source alone, bias included."""
        n, k = vectors.magnitudes.shape
        columns = [global_scalars.expand(n, -1), source_scalars, vectors.log_magnitudes]
        if k > 1 and self.n_harmonics:
            first, second = torch.triu_indices(k, k, offset=1, device=vectors.magnitudes.device)
            u, m = vectors.directions, vectors.magnitudes
            cosines = (u.index_select(1, first) * u.index_select(1, second)).sum(dim=-1)
            products = smooth_log(m.index_select(1, first) * m.index_select(1, second))
            columns += [products * p for p in legendre(cosines, self.n_harmonics)]
        first_layer = self.network.perceptron().linears()[0]
        matrix = first_layer.weight.index_select(1, self._source_columns)
        return F.linear(torch.cat(columns, dim=1).to(dtype), matrix.to(dtype), first_layer.bias.to(dtype))

    def forward(
        self,
        displacement: Float[Tensor, "pairs dims"],
        vectors: SourceVectors,
        hidden: Float[Tensor, "pairs hidden"],
        strength: Float[Tensor, "pairs 1"],
        weights: Weights,
        smoothing_radius: Float[Tensor, ""],
    ) -> Float[Tensor, "pairs columns"]:
        """Contribution of every pair to the packed outputs [scalars | vectors].

        Args:
            displacement: r, (target - source) over the branch's length, nondimensional.
            vectors: the pair's source vectors.
            hidden: the pair's row of :meth:`source_terms`.
            strength: weight of the source, q A.
            weights: of :meth:`weights`.
            smoothing_radius: eps of the magnitudes.
        """
        r2 = displacement.square().sum(dim=1, keepdim=True) + smoothing_radius**2
        m_r = r2.sqrt()
        u_r = displacement / m_r
        cosines = (vectors.directions * u_r.unsqueeze(1)).sum(dim=-1)
        products = smooth_log(vectors.magnitudes * m_r)
        features = [smooth_log(m_r), *(products * p for p in legendre(cosines, self.n_harmonics))]
        first = torch.cat(features, dim=1).to(hidden.dtype)
        raw = hidden_layers(torch.addmm(hidden, first, weights.matrices[0].t()), weights)
        out = self.network.activate(raw.to(r2.dtype))

        envelope = -torch.expm1(-r2) * (r2 + 1) ** (-(self.n_dims - 1) / 2)
        return self.assemble(out, u_r, cosines, vectors) * (envelope * strength)

    def assemble(
        self,
        out: Float[Tensor, "pairs outputs"],
        u_r: Float[Tensor, "pairs dims"],
        cosines: Float[Tensor, "pairs vectors"],
        vectors: SourceVectors,
    ) -> Float[Tensor, "pairs columns"]:
        """Turn the network's outputs [scalars | c_0 | a | b] into scalars and vectors."""
        nv, k = self.n_vector_outputs, self.n_vectors
        if nv == 0:
            return out
        scalars, c0, a, b = out.split([self.n_scalars, nv, nv * k, nv * k], dim=1)
        if k:
            s = vectors.log_magnitudes.unsqueeze(1)
            a, b = a.view(-1, nv, k), b.view(-1, nv, k)
            c0 = c0 + (b * (s * cosines.unsqueeze(1))).sum(dim=-1)
            radial = c0.unsqueeze(-1) * u_r.unsqueeze(1)
            result = torch.baddbmm(radial, (a - b) * s, vectors.directions)
        else:
            result = c0.unsqueeze(-1) * u_r.unsqueeze(1)
        return torch.cat([scalars, result.flatten(1)], dim=1)


def global_scalar_order(names: Sequence[str], ratios: Sequence[str]) -> list[tuple[str, str]]:
    """Order of the global scalar columns: ("data", name) and ("ratio", "k1_k2"), sorted by their printed tuples."""
    columns = [(str(("global_scalars", name)), ("data", name)) for name in names]
    columns += [(str(("global_scalars", "log_reference_length_ratios", ratio)), ("ratio", ratio)) for ratio in ratios]
    return [column for _, column in sorted(columns)]
