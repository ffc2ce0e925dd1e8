"""The dual traversal: far pairs and leaf pairs of the nodes of a target and a source forest (Gray & Moore 2001)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from globe_lightning.tree.cluster_tree import ClusterForest


@dataclass
class NodePairs:
    """Result of a traversal: every (target point, source point) lies in exactly one far pair or leaf pair.

    Attributes:
        far_targets, far_sources: node indices of the far pairs, int64.
        leaf_targets, leaf_sources: node indices of the leaf pairs, int64.
    """

    far_targets: Int[Tensor, " far"]
    far_sources: Int[Tensor, " far"]
    leaf_targets: Int[Tensor, " leaf"]
    leaf_sources: Int[Tensor, " leaf"]


def gap_squared(
    low_a: Float[Tensor, "n dims"],
    high_a: Float[Tensor, "n dims"],
    low_b: Float[Tensor, "n dims"],
    high_b: Float[Tensor, "n dims"],
) -> Float[Tensor, " n"]:
    """Squared distance between boxes, 0 where they touch or overlap; a point is a box of its own."""
    return torch.maximum(low_a - high_b, low_b - high_a).clamp_min_(0).square_().sum(dim=1)


def expand_rows(counts: Int[Tensor, " rows"], total: int) -> tuple[Int[Tensor, " total"], Int[Tensor, " total"]]:
    """Repeat row i ``counts[i]`` times: the row of each entry and the entry's rank within its row. No device sync."""
    rows = torch.repeat_interleave(counts, output_size=total)
    first = counts.cumsum(0) - counts
    return rows, torch.arange(total, device=counts.device) - first.index_select(0, rows)


@torch.no_grad()
def traverse(targets: ClusterForest, sources: ClusterForest, theta: float) -> NodePairs:
    """Walk all (target tree, source tree) pairs at once, level by level, from their roots.

    A pair is far when theta^2 gap^2 > (D_T + D_S)^2; otherwise two leaves are a leaf pair; otherwise the larger node
    that is not a leaf splits, both when equal.

    Data-dependent operations: one a level (the size of the next frontier) and two at the end.
    """
    device = targets.points.device
    dims = targets.points.shape[1]
    t, s = torch.cartesian_prod(torch.tensor(targets.roots), torch.tensor(sources.roots)).to(device).unbind(1)
    visited: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    while True:
        box_t, box_s = targets.boxes.index_select(0, t), sources.boxes.index_select(0, s)
        child_t, child_s = targets.first_child.index_select(0, t), sources.first_child.index_select(0, s)
        size2_t, size2_s = box_t[:, -1], box_s[:, -1]
        gap2 = gap_squared(box_t[:, :dims], box_t[:, dims:-1], box_s[:, :dims], box_s[:, dims:-1])
        far = theta**2 * gap2 > (size2_t.sqrt() + size2_s.sqrt()).square()
        # Squares are compared: a square root may make two sizes equal that are not.
        inner_t, inner_s = child_t >= 0, child_s >= 0
        split_t = ~far & inner_t & (~inner_s | (size2_t >= size2_s))
        split_s = ~far & inner_s & (~inner_t | (size2_s >= size2_t))
        visited.append((t, s, far, ~(far | split_t | split_s)))
        counts = torch.where(split_t | split_s, (1 + split_t.long()) * (1 + split_s.long()), 0)
        total = int(counts.sum())
        if total == 0:
            break
        rows, rank = expand_rows(counts, total)
        of_t, of_s = split_t.index_select(0, rows), split_s.index_select(0, rows)
        which_s = torch.where(of_t, rank // 2, rank)
        t = torch.where(of_t, child_t.index_select(0, rows) + rank % 2, t.index_select(0, rows))
        s = torch.where(of_s, child_s.index_select(0, rows) + which_s, s.index_select(0, rows))
    t, s, far, leaf = (torch.cat(parts) for parts in zip(*visited, strict=True))
    far_ids, leaf_ids = far.nonzero().squeeze(1), leaf.nonzero().squeeze(1)
    return NodePairs(t[far_ids], s[far_ids], t[leaf_ids], s[leaf_ids])
