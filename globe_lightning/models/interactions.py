"""A plan evaluated: pairs in chunks bounded in bytes, added into one packed buffer, handed down to the points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from globe_lightning.memory import pairs_per_chunk
from globe_lightning.models.kernel import Kernel, SourceVectors
from globe_lightning.models.multiscale import Branch
from globe_lightning.tree.plan import DenseBlock, IndexedBlock, InteractionPlan
from globe_lightning.tree.prefix_sums import push_down


@dataclass
class SourceTable:
    """The sources of one boundary type as columns of packed tables: points, then (if the plan uses them) nodes.

    Attributes:
        positions: (D, rows) [m].
        vectors: packed source vectors (features, rows), see :meth:`SourceVectors.packed`.
        n_vectors: K.
        branches: one a reference length.
    """

    positions: Float[Tensor, "dims rows"]
    vectors: Float[Tensor, "features rows"]
    n_vectors: int
    branches: list[Branch]


def evaluate_block(
    block: IndexedBlock | DenseBlock,
    target_positions: Float[Tensor, "dims targets"],
    table: SourceTable,
    smoothing_radius: Float[Tensor, ""],
) -> Float[Tensor, "columns *pairs"]:
    """Contributions of a block of pairs, summed over the branches; gathers and displacements are shared."""
    displacement = block.gather_targets(target_positions) - block.gather_sources(table.positions)
    distance = displacement.square().sum(dim=0, keepdim=True)
    packed = block.gather_sources(table.vectors)
    vectors = SourceVectors.unpacked(packed, table.n_vectors, target_positions.shape[0])
    projections = (vectors.directions * displacement).sum(dim=1)
    total = None
    for branch in table.branches:
        contribution = branch.kernel(
            displacement,
            distance,
            projections,
            vectors,
            block.gather_sources(branch.hidden),
            block.gather_sources(branch.strength),
            branch.weights,
            branch.inverse_length,
            smoothing_radius,
        )
        total = contribution if total is None else total + contribution
    assert total is not None
    return total


def bytes_per_pair(kernel: Kernel, dtype: torch.dtype) -> int:
    """Rough size of the temporaries of one pair of one branch: features, hidden layers, outputs and vectors."""
    widths = [linear.out_features for linear in kernel.network.perceptron().linears()]
    features = kernel.n_vectors * (2 * kernel.n_harmonics + kernel.n_dims + 4)
    vectors = kernel.n_vector_outputs * (2 * kernel.n_vectors + 3 * kernel.n_dims)
    return (2 * sum(widths) + 2 * widths[-1] + features + vectors) * dtype.itemsize


def evaluate_plan(
    plan: InteractionPlan,
    target_positions: list[Float[Tensor, "dims targets"]],
    tables: Sequence[SourceTable],
    n_columns: int,
    smoothing_radius: Float[Tensor, ""],
    use_checkpointing: bool,
    chunk_bytes: int | None = None,
) -> Float[Tensor, "points columns"]:
    """Sum a layer's kernels over a plan.

    Args:
        plan: of targets and the trees of all boundary types.
        target_positions: for each source tree the target table [points | nodes | groups] (the mean point of a node
            depends on whether it belongs to the same boundary).
        tables: for each source tree its sources.
        n_columns: packed output columns.
        smoothing_radius: eps of all magnitudes, in the precision of the geometry.
        use_checkpointing: recompute each chunk in the backward pass instead of keeping its temporaries.
        chunk_bytes: what one chunk's temporaries may take; the device's default if None.

    Returns:
        The summed contributions at the target points (points, columns), in the precision of the geometry.
    """
    like = target_positions[0]
    buffer = torch.zeros(n_columns, plan.n_rows, dtype=like.dtype, device=like.device)
    for pairs, positions, table in zip(plan.pairs, target_positions, tables, strict=True):
        size = pairs_per_chunk(like.device, bytes_per_pair(table.branches[0].kernel, like.dtype), chunk_bytes)
        for block in pairs.blocks(size):
            if use_checkpointing:
                contributions = checkpoint(
                    evaluate_block,
                    block,
                    positions,
                    table,
                    smoothing_radius,
                    use_reentrant=False,
                    preserve_rng_state=False,
                )
            else:
                contributions = evaluate_block(block, positions, table, smoothing_radius)
            block.accumulate(buffer, contributions)
    return _hand_down(plan, buffer.t())


def _hand_down(plan: InteractionPlan, buffer: Tensor) -> Tensor:
    """Add what nodes and groups received to their points."""
    out = buffer[: plan.n_points]
    if plan.uses_target_nodes:
        nodes = buffer[plan.n_points : plan.first_group]
        out = (out + push_down(nodes, plan.node_start, plan.node_end, plan.n_points)).to(buffer.dtype)
    if plan.n_groups:
        groups, points = plan.members
        out = out.index_add(0, points, buffer[plan.first_group :].index_select(0, groups))
    return out
