"""The dual traversal: far pairs and leaf pairs of the nodes of a target and a source forest (Gray & Moore 2001)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from globe_lightning.tree.cluster_tree import ClusterForest


@dataclass
class NodePairs:
    """Result of a traversal: every (target point, source point) lies in exactly one far pair or leaf pair.

    Attributes:
        far_targets, far_sources: node indices of the far pairs, int32.
        leaf_targets, leaf_sources: node indices of the leaf pairs, int32.
    """

    far_targets: Int[Tensor, " far"]
    far_sources: Int[Tensor, " far"]
    leaf_targets: Int[Tensor, " leaf"]
    leaf_sources: Int[Tensor, " leaf"]


Rows = Sequence[Tensor] | Tensor


def gap_squared(low_a: Rows, high_a: Rows, low_b: Rows, high_b: Rows) -> Float[Tensor, " n"]:
    """Squared distance between boxes, 0 where they touch or overlap; a point is a box of its own.

    Args:
        low_a, high_a, low_b, high_b: corners, one row (n,) a dimension.
    """
    total: Tensor | None = None
    for la, ha, lb, hb in zip(low_a, high_a, low_b, high_b, strict=True):
        gap = torch.maximum(la - hb, lb - ha).clamp_min_(0).square_()
        total = gap if total is None else total.add_(gap)
    assert total is not None
    return total


def expand_rows(counts: Int[Tensor, " rows"], total: int) -> tuple[Int[Tensor, " total"], Int[Tensor, " total"]]:
    """Repeat row i ``counts[i]`` times: the row of each entry and the entry's rank within its row. No device sync."""
    rows = torch.repeat_interleave(counts, output_size=total)
    first = counts.cumsum(0) - counts
    return rows, torch.arange(total, device=counts.device) - first.index_select(0, rows)


def expand_nodes(forest: ClusterForest, nodes: Int[Tensor, " n"]) -> tuple[Tensor, Tensor]:
    """Repeat each node for each of its points: the row in ``nodes`` and the rank of the point. One device sync."""
    counts = forest.end.index_select(0, nodes) - forest.start.index_select(0, nodes)
    return expand_rows(counts, int(counts.sum()))


def sizes_of(*masks: Tensor) -> list[int]:
    """How many entries of each mask hold, in one read from the device."""
    return torch.stack([torch.count_nonzero(mask) for mask in masks]).tolist()


def where(mask: Tensor, size: int) -> Int[Tensor, " size"]:
    """Indices of the ``size`` entries that hold; no device sync."""
    return torch.nonzero_static(mask, size=size).squeeze(1)


@torch.no_grad()
def traverse(
    targets: ClusterForest, sources: ClusterForest, theta: float, target_size_weight: float = 1.0
) -> NodePairs:
    """Walk all (target tree, source tree) pairs at once, level by level, from their roots.

    With a = ``target_size_weight``, a pair is far when theta^2 gap^2 > (a D_T + D_S)^2; otherwise two leaves are a
    leaf pair; otherwise the node with the larger of a D_T and D_S that is not a leaf splits, both when equal.

    Data-dependent operations: one a level.
    """
    device = targets.points.device
    dims = targets.points.shape[1]
    weight = target_size_weight
    children_t, children_s = targets.first_child.int(), sources.first_child.int()
    roots = torch.cartesian_prod(torch.tensor(targets.roots), torch.tensor(sources.roots)).reshape(-1, 2)
    t, s = roots.to(device, torch.int32).unbind(1)
    found: list[tuple[Tensor, Tensor, Tensor, Tensor]] = [(t[:0], s[:0], t[:0], s[:0])]
    while t.shape[0]:
        # Row by row: contiguous, and several times as fast as gathering along the second dimension.
        box_t = [row.index_select(0, t) for row in targets.boxes]
        box_s = [row.index_select(0, s) for row in sources.boxes]
        size2_t, size_t = box_t[2 * dims :]
        size2_s, size_s = box_s[2 * dims :]
        gap2 = gap_squared(box_t[:dims], box_t[dims : 2 * dims], box_s[:dims], box_s[dims : 2 * dims])
        near = gap2.mul_(theta**2) <= size_t.mul_(weight).add_(size_s).square_()
        child_t, child_s = children_t.index_select(0, t), children_s.index_select(0, s)
        inner_t, inner_s = child_t >= 0, child_s >= 0
        # Squares are compared: a square root may make two sizes equal that are not.
        size2_t.mul_(weight**2)
        split_t = near & inner_t & (~inner_s | (size2_t >= size2_s))
        split_s = near & inner_s & (~inner_t | (size2_s >= size2_t))
        both, far, leaf = split_t & split_s, ~near, near & ~(inner_t | inner_s)
        only_t, only_s = split_t ^ both, split_s ^ both
        n_far, n_leaf, n_both, n_t, n_s = sizes_of(far, leaf, both, only_t, only_s)
        far_ids, leaf_ids = where(far, n_far), where(leaf, n_leaf)
        found.append(
            (
                t.index_select(0, far_ids),
                s.index_select(0, far_ids),
                t.index_select(0, leaf_ids),
                s.index_select(0, leaf_ids),
            )
        )
        ids_both, ids_t, ids_s = where(both, n_both), where(only_t, n_t), where(only_s, n_s)
        next_t = (
            children_of(child_t, ids_both, (0, 0, 1, 1)),
            children_of(child_t, ids_t, (0, 1)),
            children_of(t, ids_s, (0, 0)),
        )
        next_s = (
            children_of(child_s, ids_both, (0, 1, 0, 1)),
            children_of(s, ids_t, (0, 0)),
            children_of(child_s, ids_s, (0, 1)),
        )
        t, s = torch.cat(next_t), torch.cat(next_s)
    return NodePairs(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def children_of(nodes: Int[Tensor, " n"], ids: Int[Tensor, " m"], steps: tuple[int, ...]) -> Int[Tensor, " m_steps"]:
    """For each of the chosen nodes the node plus every step, side by side; steps of 0 repeat it."""
    chosen = nodes.index_select(0, ids)
    out = chosen.new_empty(ids.shape[0], len(steps))
    for column, step in enumerate(steps):
        torch.add(chosen, step, out=out[:, column])
    return out.reshape(-1)
