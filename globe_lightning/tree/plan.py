"""Interaction plans: which source stands for which others at which target, as one list of pairs a source tree.

Target points, target nodes and target groups are rows of one table, source points and source nodes of another, so
that a single kind of pair serves exact pairs and all approximations:

==============  ========================  ====================
kind            target row                source row
==============  ========================  ====================
near, near      point                     point
near, far       point                     node
far, near       group (part of a leaf)    point
far, far        node                      node
==============  ========================  ====================

A group is the part of a target leaf whose points did not take a source leaf as a whole; it is evaluated at the
leaf's mean point. What nodes and groups receive is handed to their points afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from globe_lightning.tree.cluster_tree import ClusterForest
from globe_lightning.tree.traversal import NodePairs, expand_rows, gap_squared, traverse


@dataclass
class IndexedPairs:
    """A list of pairs by their rows in the target table and in one source tree's table."""

    targets: Int[Tensor, " pairs"]
    sources: Int[Tensor, " pairs"]

    def __len__(self) -> int:
        return self.targets.shape[0]

    def blocks(self, n_pairs: int) -> Iterator[IndexedBlock]:
        """Cut the list into blocks of at most ``n_pairs`` pairs."""
        for first in range(0, len(self), n_pairs):
            part = slice(first, first + n_pairs)
            yield IndexedBlock(self.targets[part], self.sources[part])

    def to(self, device: torch.device | str) -> IndexedPairs:
        """The same list on a device."""
        return IndexedPairs(self.targets.to(device), self.sources.to(device))


@dataclass
class IndexedBlock:
    """Some pairs of a list: how their columns are gathered and how what they yield is added up.

    Tables hold one row a feature and one column a target or source, so that arithmetic runs along the pairs; tables of
    rows hold one row a (branch, source), branch after branch.
    """

    targets: Int[Tensor, " pairs"]
    sources: Int[Tensor, " pairs"]

    def ready(self) -> IndexedBlock:
        """The block with 64-bit indices, for the moment of use: adding by 32-bit ones is far slower on a CPU."""
        return IndexedBlock(self.targets.long(), self.sources.long())

    def gather_targets(self, table: Float[Tensor, "features targets"]) -> Float[Tensor, "features pairs"]:
        """Each pair's column of the target table."""
        return table.index_select(1, self.targets)

    def gather_sources(self, table: Float[Tensor, "features sources"]) -> Float[Tensor, "features pairs"]:
        """Each pair's column of the source table."""
        return table.index_select(1, self.sources)

    def gather_rows(
        self, table: Float[Tensor, "branches_sources width"], n_branches: int
    ) -> Float[Tensor, "branches pairs width"]:
        """Each pair's row of every branch."""
        return table.index_select(0, self._rows(table, n_branches)).unflatten(0, (n_branches, -1))

    def add_to_targets(
        self, buffer: Float[Tensor, "features targets"], values: Float[Tensor, "features pairs"]
    ) -> None:
        """Add each pair's values to its target's column, in place."""
        buffer.index_add_(1, self.targets, values.to(buffer.dtype))

    def add_to_sources(
        self, buffer: Float[Tensor, "features sources"], values: Float[Tensor, "features pairs"]
    ) -> None:
        """Add each pair's values to its source's column, in place."""
        buffer.index_add_(1, self.sources, values.to(buffer.dtype))

    def add_to_rows(
        self, buffer: Float[Tensor, "branches_sources width"], values: Float[Tensor, "branches pairs width"]
    ) -> None:
        """Add each pair's values to its source's row of every branch, in place."""
        buffer.index_add_(0, self._rows(buffer, values.shape[0]), values.flatten(0, 1).to(buffer.dtype))

    def _rows(self, table: Tensor, n_branches: int) -> Tensor:
        if n_branches == 1:
            return self.sources
        n_sources = table.shape[0] // n_branches
        first = torch.arange(0, n_branches * n_sources, n_sources, device=table.device)
        return (first.unsqueeze(1) + self.sources).flatten()


@dataclass
class AllPairs:
    """Every target point with every source point (theta = 0), target by target; nothing is stored."""

    n_targets: int
    n_sources: int

    def __len__(self) -> int:
        return self.n_targets * self.n_sources

    def blocks(self, n_pairs: int) -> Iterator[DenseBlock]:
        """Cut the grid into blocks of whole targets, or of parts of one target's sources if those are many."""
        rows = max(1, n_pairs // max(1, self.n_sources))
        columns = self.n_sources if rows > 1 else min(self.n_sources, max(1, n_pairs))
        if self.n_sources:
            for t in range(0, self.n_targets, rows):
                for s in range(0, self.n_sources, columns):
                    yield DenseBlock(t, min(t + rows, self.n_targets), s, min(s + columns, self.n_sources))

    def to(self, device: torch.device | str) -> AllPairs:
        """Itself: nothing is stored."""
        return self


@dataclass
class DenseBlock:
    """The pairs of targets [t0, t1) with sources [s0, s1), target by target: repeated and summed, not indexed."""

    t0: int
    t1: int
    s0: int
    s1: int

    def ready(self) -> DenseBlock:
        """Itself."""
        return self

    @property
    def _sides(self) -> tuple[int, int]:
        return self.t1 - self.t0, self.s1 - self.s0

    def gather_targets(self, table: Float[Tensor, "features targets"]) -> Float[Tensor, "features pairs"]:
        """Each pair's column of the target table."""
        return table[:, self.t0 : self.t1].unsqueeze(2).expand(-1, *self._sides).flatten(1)

    def gather_sources(self, table: Float[Tensor, "features sources"]) -> Float[Tensor, "features pairs"]:
        """Each pair's column of the source table."""
        return table[:, self.s0 : self.s1].unsqueeze(1).expand(-1, *self._sides).flatten(1)

    def gather_rows(
        self, table: Float[Tensor, "branches_sources width"], n_branches: int
    ) -> Float[Tensor, "branches pairs width"]:
        """Each pair's row of every branch, never a view of the table."""
        rows = table.unflatten(0, (n_branches, -1))[:, self.s0 : self.s1].unsqueeze(1)
        return rows.expand(-1, *self._sides, -1).clone(memory_format=torch.contiguous_format).flatten(1, 2)

    def add_to_targets(
        self, buffer: Float[Tensor, "features targets"], values: Float[Tensor, "features pairs"]
    ) -> None:
        """Add each pair's values to its target's column, in place."""
        buffer[:, self.t0 : self.t1].add_(values.unflatten(1, self._sides).sum(dim=2, dtype=buffer.dtype))

    def add_to_sources(
        self, buffer: Float[Tensor, "features sources"], values: Float[Tensor, "features pairs"]
    ) -> None:
        """Add each pair's values to its source's column, in place."""
        buffer[:, self.s0 : self.s1].add_(values.unflatten(1, self._sides).sum(dim=1, dtype=buffer.dtype))

    def add_to_rows(
        self, buffer: Float[Tensor, "branches_sources width"], values: Float[Tensor, "branches pairs width"]
    ) -> None:
        """Add each pair's values to its source's row of every branch, in place."""
        rows = buffer.unflatten(0, (values.shape[0], -1))
        rows[:, self.s0 : self.s1].add_(values.unflatten(1, self._sides).sum(dim=1, dtype=buffer.dtype))


@dataclass
class InteractionPlan:
    """All interactions of the target trees of a forest with the source trees of another (or the same).

    Attributes:
        pairs: one list a source tree; target rows are [points | nodes | groups] of the target forest, source rows
            [points | nodes] of the source tree alone.
        n_points, n_nodes: of the target forest.
        node_start, node_end: target points of each target node, int64 (n_nodes,).
        uses_target_nodes, uses_source_nodes: whether any pair refers to them.
        group_nodes: target leaf of each group, int64 (n_groups,).
        members: (group, target point) of every member of a group, int64 (2, n_members).
    """

    pairs: list[IndexedPairs | AllPairs]
    n_points: int
    n_nodes: int
    node_start: Int[Tensor, " nodes"]
    node_end: Int[Tensor, " nodes"]
    uses_target_nodes: bool
    uses_source_nodes: bool
    group_nodes: Int[Tensor, " groups"]
    members: Int[Tensor, "2 members"]
    n_groups: int = field(init=False)

    def __post_init__(self) -> None:
        self.n_groups = self.group_nodes.shape[0]

    @property
    def n_evaluations(self) -> int:
        """Kernel evaluations that the plan asks for, per branch."""
        return sum(len(pairs) for pairs in self.pairs)

    @property
    def n_rows(self) -> int:
        """Rows of the accumulation buffer."""
        return self.n_points + (self.n_nodes if self.uses_target_nodes else 0) + self.n_groups

    @property
    def first_group(self) -> int:
        """Row of the first group."""
        return self.n_points + (self.n_nodes if self.uses_target_nodes else 0)

    def to(self, device: torch.device | str) -> InteractionPlan:
        """The same plan on a device."""
        return InteractionPlan(
            [pairs.to(device) for pairs in self.pairs],
            self.n_points,
            self.n_nodes,
            self.node_start.to(device),
            self.node_end.to(device),
            self.uses_target_nodes,
            self.uses_source_nodes,
            self.group_nodes.to(device),
            self.members.to(device),
        )


@torch.no_grad()
def build_plan(
    targets: ClusterForest, sources: ClusterForest, theta: float, expand_far_targets: bool = False
) -> InteractionPlan:
    """Plan every interaction of two forests so that each (target, source) combination is covered exactly once.

    Args:
        targets, sources: forests of one dimension, precision and device; may be the same object.
        theta: opening angle; 0 makes everything exact.
        expand_far_targets: evaluate far pairs at every target of the node instead of once at its mean point.
    """
    device = targets.points.device
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    source_sizes = [high - low for low, high in zip(sources.point_offsets, sources.point_offsets[1:], strict=False)]
    if theta == 0 or not targets.roots or not sources.roots:
        return InteractionPlan(
            [AllPairs(targets.n_points, size) for size in source_sizes],
            targets.n_points,
            targets.n_nodes,
            targets.start,
            targets.end,
            False,
            False,
            nothing,
            torch.stack([nothing, nothing]),
        )
    found = traverse(targets, sources, theta)
    near = _open_leaf_pairs(targets, sources, found, theta)
    far_t, far_s = found.far_targets, found.far_sources
    if expand_far_targets:
        rows, rank = _expand_nodes(targets, far_t)
        far_t, far_s = targets.start[far_t][rows] + rank, far_s[rows]
    else:
        far_t = far_t + targets.n_points
    first_group = targets.n_points + (0 if expand_far_targets else targets.n_nodes)
    pair_targets = torch.cat([near.nn_targets, near.nf_targets, near.fn_groups + first_group, far_t])
    # Source rows of all trees at first: points, then nodes.
    pair_sources = torch.cat(
        [near.nn_sources, near.nf_sources + sources.n_points, near.fn_sources, far_s + sources.n_points]
    )
    return InteractionPlan(
        _by_source_tree(sources, pair_targets, pair_sources),
        targets.n_points,
        targets.n_nodes,
        targets.start,
        targets.end,
        not expand_far_targets,
        True,
        near.group_nodes,
        torch.stack([near.member_groups, near.member_targets]),
    )


def _by_source_tree(
    sources: ClusterForest, pair_targets: Tensor, pair_sources: Tensor
) -> list[IndexedPairs | AllPairs]:
    """Split a list by source tree and number the source rows within each tree's own table."""
    device = pair_sources.device
    kinds, local = [], []
    for tree in range(sources.n_trees):
        points = sources.point_offsets[tree + 1] - sources.point_offsets[tree]
        kinds.append(torch.full((points,), tree, dtype=torch.uint8))
        local.append(torch.arange(points, dtype=torch.int32))
    for tree in range(sources.n_trees):
        points = sources.point_offsets[tree + 1] - sources.point_offsets[tree]
        nodes = sources.node_offsets[tree + 1] - sources.node_offsets[tree]
        kinds.append(torch.full((nodes,), tree, dtype=torch.uint8))
        local.append(torch.arange(points, points + nodes, dtype=torch.int32))
    local_rows = torch.cat(local).to(device, non_blocking=True)
    rows = local_rows.index_select(0, pair_sources)
    # Rows fit 32 bits by far: a tree of 700 million points would be needed to exceed them.
    pair_targets = pair_targets.to(torch.int32)
    if sources.n_trees == 1:
        return [IndexedPairs(pair_targets, rows)]
    tree_of_pair = torch.cat(kinds).to(device, non_blocking=True).index_select(0, pair_sources)
    out: list[IndexedPairs | AllPairs] = []
    for tree in range(sources.n_trees):
        ids = (tree_of_pair == tree).nonzero().squeeze(1)
        out.append(IndexedPairs(pair_targets[ids], rows[ids]))
    return out


def _expand_nodes(forest: ClusterForest, nodes: Tensor) -> tuple[Tensor, Tensor]:
    counts = forest.end[nodes] - forest.start[nodes]
    return expand_rows(counts, int(counts.sum()))


@dataclass
class _NearPairs:
    nn_targets: Tensor
    nn_sources: Tensor
    nf_targets: Tensor
    nf_sources: Tensor
    fn_groups: Tensor
    fn_sources: Tensor
    group_nodes: Tensor
    member_groups: Tensor
    member_targets: Tensor


def _open_leaf_pairs(targets: ClusterForest, sources: ClusterForest, found: NodePairs, theta: float) -> _NearPairs:
    """Resolve leaf pairs into single targets and sources by the two tests of the plan.

    First every target may take the source leaf as a whole; then sources far from the target leaf are evaluated
    once for the remaining targets; the rest is exact.
    """
    leaf_t, leaf_s = found.leaf_targets, found.leaf_sources
    none = leaf_t[:0]
    if targets.leaf_size == 1 and sources.leaf_size == 1:
        # A leaf pair of two single points that is not far coincides: neither test can pass.
        return _NearPairs(targets.start[leaf_t], sources.start[leaf_s], *(none,) * 7)
    dims = targets.points.shape[1]

    rows, rank = _expand_nodes(targets, leaf_t)
    t = targets.start[leaf_t][rows] + rank
    box = sources.boxes[leaf_s][rows]
    point = targets.points[t]
    takes_leaf = theta**2 * gap_squared(point, point, box[:, :dims], box[:, dims:-1]) > box[:, -1]
    taken = takes_leaf.nonzero().squeeze(1)
    left = (~takes_leaf).nonzero().squeeze(1)
    left_pair, left_t = rows[left], t[left]
    n_left = torch.zeros_like(leaf_t).index_add_(0, left_pair, torch.ones_like(left_pair))

    s_rows, s_rank = _expand_nodes(sources, leaf_s)
    s = sources.start[leaf_s][s_rows] + s_rank
    t_box = targets.boxes[leaf_t][s_rows]
    source_point = sources.points[s]
    is_far = theta**2 * gap_squared(source_point, source_point, t_box[:, :dims], t_box[:, dims:-1])
    is_far = is_far > t_box[:, -1]
    served = n_left[s_rows] > 0
    fn = (is_far & served).nonzero().squeeze(1)
    near = (~is_far & served).nonzero().squeeze(1)

    # Each near source meets each remaining target of its leaf pair; left_t stands sorted by leaf pair.
    near_pair = s_rows[near]
    counts = n_left[near_pair]
    nn_rows, nn_rank = expand_rows(counts, int(counts.sum()))
    first_left = n_left.cumsum(0) - n_left
    nn_targets = left_t[first_left[near_pair][nn_rows] + nn_rank]

    has_fn = torch.zeros_like(leaf_t).index_fill_(0, s_rows[fn], 1)
    group_of_pair = has_fn.cumsum(0) - 1
    grouped = has_fn.nonzero().squeeze(1)
    in_group = has_fn[left_pair].nonzero().squeeze(1)
    return _NearPairs(
        nn_targets=nn_targets,
        nn_sources=s[near][nn_rows],
        nf_targets=t[taken],
        nf_sources=leaf_s[rows[taken]],
        fn_groups=group_of_pair[s_rows[fn]],
        fn_sources=s[fn],
        group_nodes=leaf_t[grouped],
        member_groups=group_of_pair[left_pair[in_group]],
        member_targets=left_t[in_group],
    )
