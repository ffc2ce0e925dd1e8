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

    Where the sources are the first trees of the targets and a = 1, only one of the pairs (A, B) and (B, A) is walked,
    and none of a node with itself, which splits down to the leaves.

    Data-dependent operations: one a level, and one at the end if some of the targets are sources.
    """
    shared = sources.leads(targets) and target_size_weight == 1
    walk = Walk(
        node_table(targets, target_size_weight), targets.first_child, node_table(sources), sources.first_child, theta
    )
    n_trees = len(sources.roots)
    roots = [
        (t, s) for i, t in enumerate(targets.roots) for s in sources.roots[i + 1 if shared and i < n_trees else 0 :]
    ]
    seeds = torch.tensor(roots, dtype=torch.int32).reshape(-1, 2).t().to(targets.points.device)
    if not shared:
        far, leaf = walk.down(seeds)
        return NodePairs(far[0], far[1], leaf[0], leaf[1])
    # A node with itself comes to its children with each other, and in the end to its leaves with themselves.
    n_inner = (sources.n_nodes - n_trees) // 2
    is_leaf = sources.first_child < 0
    leaves = where(is_leaf, sources.n_nodes - n_inner).int()
    left = sources.first_child.index_select(0, where(~is_leaf, n_inner)).int()
    far, leaf = walk.down(torch.cat([torch.stack([left, left + 1]), seeds], dim=1))
    own_far, own_leaf = far, leaf
    if targets.n_nodes > sources.n_nodes:
        in_far, in_leaf = far[0] < sources.n_nodes, leaf[0] < sources.n_nodes
        n_far, n_leaf = sizes_of(in_far, in_leaf)
        own_far, own_leaf = far.index_select(1, where(in_far, n_far)), leaf.index_select(1, where(in_leaf, n_leaf))
    return NodePairs(
        torch.cat([far[0], own_far[1]]),
        torch.cat([far[1], own_far[0]]),
        torch.cat([leaf[0], own_leaf[1], leaves]),
        torch.cat([leaf[1], own_leaf[0], leaves]),
    )


def node_table(forest: ClusterForest, weight: float = 1.0) -> Float[Tensor, "rows nodes"]:
    """What a walk reads of every node: lower corner, negative upper corner, diagonal D and, for its turn to split, D^2.

    Args:
        forest: the nodes.
        weight: of the diagonals.

    Returns:
        (2 D + 2, nodes); the last row is -1 where a leaf never splits.
    """
    dims = forest.points.shape[1]
    low, high, size2, size = forest.boxes.split([dims, dims, 1, 1])
    # Squares are compared: a square root may make two sizes equal that are not.
    splits = (size2 * weight**2).masked_fill_(forest.first_child < 0, -1)
    return torch.cat([low, -high, size * weight, splits])


def point_table(points: Float[Tensor, "n dims"]) -> Float[Tensor, "rows n"]:
    """Points as nodes of no size that never split, see :func:`node_table`."""
    columns = points.t()
    nothing = torch.zeros_like(columns[:1])
    return torch.cat([columns, -columns, nothing, nothing - 1])


# On a CPU blocks of pairs that stay in the cache are fastest.
CPU_BLOCK = 1 << 16


class Walk:
    """Pairs of nodes opened level by level until all are far from each other or leaves.

    Args:
        targets, sources: tables of :func:`node_table`.
        target_children, source_children: left child of each node.
        theta: opening angle.
    """

    def __init__(
        self,
        targets: Float[Tensor, "rows targets"],
        target_children: Int[Tensor, " targets"],
        sources: Float[Tensor, "rows sources"],
        source_children: Int[Tensor, " sources"],
        theta: float,
    ) -> None:
        self.dims = dims = (targets.shape[0] - 2) // 2
        low, high, rest = sources.split([dims, dims, 2])
        # One sum then holds the gaps to both sides.
        self.targets, self.sources = targets, torch.cat([high, low, rest])
        self.target_children, self.source_children = target_children.int(), source_children.int()
        self.theta2 = theta**2
        self.later_classes = torch.arange(1, 5, dtype=torch.uint8, device=targets.device)

    def down(self, pairs: Int[Tensor, "2 pairs"]) -> tuple[Int[Tensor, "2 far"], Int[Tensor, "2 leaf"]]:
        """The far pairs and leaf pairs that some pairs (int32) come to."""
        on_cpu = pairs.device.type == "cpu"
        far, leaf = [pairs[:, :0]], [pairs[:, :0]]
        while pairs.shape[1]:
            opened = []
            for block in pairs.split(CPU_BLOCK if on_cpu else pairs.shape[1], dim=1):
                children, *done = self._open(block)
                opened += children
                far.append(done[0])
                leaf.append(done[1])
            pairs = torch.cat(opened, dim=1) if opened else pairs[:, :0]
        return torch.cat(far, dim=1), torch.cat(leaf, dim=1)

    def _open(self, pairs: Int[Tensor, "2 pairs"]) -> tuple[list[Tensor], Tensor, Tensor]:
        """Children of the pairs that open, far pairs and leaf pairs, each in the order of the pairs."""
        # One sort brings each class together: the order of all, instead of a selection each.
        classes, order = torch.sort(self._classes(*pairs.unbind(0)), stable=True)
        n_target, n_both, n_opened, n_near = torch.searchsorted(classes, self.later_classes).tolist()
        pairs = pairs.index_select(1, order)
        first, leaf, far = pairs.split([n_opened, n_near - n_opened, len(order) - n_near], dim=1)
        if not n_opened:
            return [], far, leaf
        last = first.clone()
        for side, children, splits in (
            (0, self.target_children, slice(0, n_both)),
            (1, self.source_children, slice(n_target, n_opened)),
        ):
            left = children.index_select(0, first[side, splits])
            first[side, splits] = left
            torch.add(left, 1, out=last[side, splits])
        opened = [torch.stack([first, last], dim=2).flatten(1)]
        if n_both > n_target:
            (a, b), (c, d) = first[:, n_target:n_both], last[:, n_target:n_both]
            opened += [torch.stack([a, d]), torch.stack([c, b])]
        return opened, far, leaf

    def _classes(self, t: Int[Tensor, " pairs"], s: Int[Tensor, " pairs"]) -> Int[Tensor, " pairs"]:
        """What becomes of each pair: 0 the target splits, 1 both, 2 the source, 3 two leaves, above 3 far."""
        rows = [2 * self.dims, 1, 1]
        sides, size, turn_t = self.targets.index_select(1, t).split(rows)
        other_sides, other_size, turn_s = self.sources.index_select(1, s).split(rows)
        gaps = torch.maximum(*sides.add_(other_sides).split(self.dims)).clamp_min_(0).square_().split(1)
        gap2 = gaps[0]
        for gap in gaps[1:]:
            gap2 = gap2.add_(gap)
        far = gap2.mul_(self.theta2) > size.add_(other_size).square_()
        leaf = torch.maximum(turn_t, turn_s) < 0
        target_splits, source_splits = turn_t >= turn_s, turn_s >= turn_t
        # Two leaves would both split.
        classes = source_splits.view(torch.uint8).add_(1).sub_(target_splits.view(torch.uint8))
        return classes.add_(leaf.view(torch.uint8), alpha=2).add_(far.view(torch.uint8), alpha=4).squeeze(0)
