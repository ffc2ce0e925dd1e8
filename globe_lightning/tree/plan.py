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

In a far field of first order a node is evaluated at several proxy points instead of its mean point, and a group at
those of its leaf (see ``proxies``): every such pair stands there once for each proxy point, each of which is a target
row. A node of no more points than proxies is evaluated at its points; it has no rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from globe_lightning.tree.cluster_tree import ClusterForest
from globe_lightning.tree.far_targets import FarTargets
from globe_lightning.tree.leaf_pairs import LeafPairs, open_leaf_pairs
from globe_lightning.tree.opening_rule import OpeningRule
from globe_lightning.tree.traversal import traverse

# Shorter blocks take longer to call for than to evaluate.
FEWEST_PAIRS = 256


def even_parts(total: int, most: int, n_shares: int, fewest: int) -> list[tuple[int, int]]:
    """Ranges of at most ``most``, alike to one, as many for each share unless they held fewer than ``fewest``."""
    n_parts = -(-total // most)
    n_parts = max(n_parts, min(-(-n_parts // n_shares) * n_shares, total // fewest))
    return list(itertools.pairwise(total * i // n_parts for i in range(n_parts + 1))) if n_parts else []


@dataclass
class IndexedPairs:
    """A list of pairs by their rows in the target table and in one source tree's table."""

    targets: Int[Tensor, " pairs"]
    sources: Int[Tensor, " pairs"]

    def __len__(self) -> int:
        return self.targets.shape[0]

    def blocks(self, n_pairs: int, n_shares: int = 1) -> Iterator[IndexedBlock]:
        """Cut the list into blocks of at most ``n_pairs`` pairs, as many for each of some shares."""
        for first, last in even_parts(len(self), n_pairs, n_shares, FEWEST_PAIRS):
            yield IndexedBlock(self.targets[first:last], self.sources[first:last])

    def to(self, device: torch.device | str) -> IndexedPairs:
        """The same list on a device."""
        return IndexedPairs(self.targets.to(device), self.sources.to(device))


@dataclass
class IndexedBlock:
    """Some pairs of a list: how their columns are gathered and how what they yield is added up.

    Tables hold one row a feature and one column a target or source, so that arithmetic runs along the pairs; tables of
    rows hold one row a source for every branch.
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

    def source_rows(
        self, table: Float[Tensor, "branches sources width"], listed: bool = True
    ) -> tuple[Float[Tensor, "branches sources width"], Int[Tensor, " pairs"]]:
        """A table whose rows the pairs have, and which row each has."""
        return table, self.sources

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
        self, buffer: Float[Tensor, "branches sources width"], values: Float[Tensor, "branches pairs width"]
    ) -> None:
        """Add each pair's values to its source's row of every branch, in place."""
        n_branches, n_sources, _ = buffer.shape
        first = torch.arange(0, n_branches * n_sources, n_sources, device=buffer.device)
        rows = (first.unsqueeze(1) + self.sources).flatten()
        buffer.view(-1, buffer.shape[2]).index_add_(0, rows, values.flatten(0, 1).to(buffer.dtype))


@dataclass
class AllPairs:
    """Every target point with every source point (theta = 0), target by target; nothing is stored."""

    n_targets: int
    n_sources: int

    def __len__(self) -> int:
        return self.n_targets * self.n_sources

    def blocks(self, n_pairs: int, n_shares: int = 1) -> Iterator[DenseBlock]:
        """Cut the grid into blocks of whole targets, or of parts of one target's sources if those are many.

        Blocks of whole targets are as many for each of some shares.
        """
        if not self.n_sources:
            return
        most, fewest = max(1, n_pairs // self.n_sources), -(-FEWEST_PAIRS // self.n_sources)
        for t0, t1 in even_parts(self.n_targets, most, n_shares, fewest):
            for s0, s1 in even_parts(self.n_sources, n_pairs, 1, FEWEST_PAIRS):
                yield DenseBlock(t0, t1, s0, s1)

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
        return table[:, self.t0 : self.t1].unsqueeze(2).repeat(1, 1, self.s1 - self.s0).flatten(1)

    def gather_sources(self, table: Float[Tensor, "features sources"]) -> Float[Tensor, "features pairs"]:
        """Each pair's column of the source table."""
        return table[:, self.s0 : self.s1].repeat(1, self.t1 - self.t0)

    def source_rows(
        self, table: Float[Tensor, "branches sources width"], listed: bool = True
    ) -> tuple[Float[Tensor, "branches sources width"], Int[Tensor, " pairs"] | None]:
        """The rows of its sources, which the pairs of every target have in turn, and (if listed) which row each has."""
        n_targets, n_sources = self._sides
        rows = torch.arange(n_sources, device=table.device).repeat(n_targets) if listed else None
        return table[:, self.s0 : self.s1].contiguous(), rows

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
        self, buffer: Float[Tensor, "branches sources width"], values: Float[Tensor, "branches pairs width"]
    ) -> None:
        """Add each pair's values to its source's row of every branch, in place."""
        buffer[:, self.s0 : self.s1].add_(values.unflatten(1, self._sides).sum(dim=1, dtype=buffer.dtype))


@dataclass
class InteractionPlan:
    """All interactions of the target trees of a forest with the source trees of another (or the same).

    Attributes:
        pairs: one list a source tree; target rows are [points | nodes | groups] of the target forest, source rows
            [points | nodes] of the source tree alone.
        n_points: of the target forest.
        n_nodes: target nodes that have rows: all, or with proxies those that are evaluated at them.
        node_start, node_end: target points of each target node that has rows, int64 (n_nodes,).
        uses_target_nodes, uses_source_nodes: whether any pair refers to them.
        group_nodes: target leaf of each group, int64 (n_groups,).
        members: (group, target point) of every member of a group, int64 (2, n_members).
        n_proxies: target rows of each node and each group, side by side.
        boxes: lower and upper corners of the boxes of [nodes | groups' leaves] [m] (2 D, n_nodes + n_groups), if there
            are proxies.
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
    n_proxies: int = 1
    boxes: Float[Tensor, "two_dims nodes_groups"] | None = None
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
        return self.first_group + self.n_groups * self.n_proxies

    @property
    def first_group(self) -> int:
        """Row of the first group."""
        return self.n_points + (self.n_nodes * self.n_proxies if self.uses_target_nodes else 0)

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
            self.n_proxies,
            None if self.boxes is None else self.boxes.to(device),
        )


@torch.no_grad()
def build_plan(targets: ClusterForest, sources: ClusterForest, rule: OpeningRule) -> InteractionPlan:
    """Plan every interaction of two forests so that each (target, source) combination is covered exactly once.

    Args:
        targets, sources: forests of one dimension, precision and device; may be the same object.
        rule: of the traversal.
    """
    return build_plans(targets, [targets.n_trees], sources, rule)[0]


@torch.no_grad()
def build_plans(
    targets: ClusterForest, parts: Sequence[int], sources: ClusterForest, rule: OpeningRule
) -> list[InteractionPlan]:
    """One traversal for several target forests that stand side by side in one: a plan for each.

    Args:
        targets: all target trees.
        parts: number of trees of each target forest; they sum to ``targets.n_trees``.
        sources, rule: see :func:`build_plan`.

    Data-dependent operations: one a level of the traversal and at most five.
    """
    bounds = [0, *itertools.accumulate(parts)]
    if rule.theta == 0 or not targets.roots or not sources.roots:
        sizes = np.diff([targets.point_offsets[bound] for bound in bounds]).tolist()
        return [exact_plan(size, sources) for size in sizes]
    n_proxies, own = rule.proxies_of(targets.points.shape[1]), rule.far_targets(targets)
    found = traverse(targets, sources, rule.theta, rule.target_size_weight)
    part_of_tree = np.repeat(np.arange(len(parts)), parts)
    part_of_node = _per_node(targets, part_of_tree)
    near = open_leaf_pairs(targets, sources, found, rule.theta, part_of_node)
    far_t, far_s = own.at_rows(found.far_targets, found.far_sources)
    # Rows of all parts and trees at first: points, then nodes, then groups.
    first_group = targets.n_points + own.n_nodes * n_proxies
    fn_targets = _repeated(near.fn_groups * n_proxies + first_group, n_proxies)
    fn_sources = near.fn_sources.repeat_interleave(n_proxies) if n_proxies > 1 else near.fn_sources
    pair_targets = torch.cat([rows.int() for rows in (near.nn_targets, near.nf_targets, fn_targets, far_t)])
    nf_sources, far_s = near.nf_sources + sources.n_points, far_s + sources.n_points
    pair_sources = torch.cat([rows.int() for rows in (near.nn_sources, nf_sources, fn_sources, far_s)])
    part_of_row = torch.cat([own.select(part_of_node), part_of_node[near.group_nodes]])
    if n_proxies > 1:
        part_of_row = part_of_row.repeat_interleave(n_proxies)
    part_of_row = torch.cat([_per_point(targets, part_of_tree), part_of_row])
    uses_target_nodes = not rule.expand_far_targets
    return _split(
        targets, own, bounds, sources, pair_targets, pair_sources, part_of_row, near, uses_target_nodes, n_proxies
    )


def _repeated(first: Tensor, n: int) -> Tensor:
    """Each row and the n - 1 that follow it."""
    return (first.unsqueeze(1) + torch.arange(n, device=first.device)).flatten() if n > 1 else first


def exact_plan(n_points: int, sources: ClusterForest) -> InteractionPlan:
    """Every target point with every source point."""
    nothing = sources.start[:0]
    sizes = [last - first for first, last in itertools.pairwise(sources.point_offsets)]
    pairs: list[IndexedPairs | AllPairs] = [AllPairs(n_points, size) for size in sizes]
    return InteractionPlan(pairs, n_points, 0, nothing, nothing, False, False, nothing, torch.stack([nothing, nothing]))


class _Part:
    """The target trees [low, high) of a forest."""

    def __init__(self, forest: ClusterForest, own: FarTargets, low: int, high: int) -> None:
        self.first_point, last_point = forest.point_offsets[low], forest.point_offsets[high]
        self.first_node = forest.node_offsets[low]
        self.n_points, self.n_nodes = last_point - self.first_point, own.offsets[high] - own.offsets[low]
        self.boxes = own.select(forest.boxes[:-2], low, high)
        start, end = own.select(forest.start, low, high), own.select(forest.end, low, high)
        self.start, self.end = (of - self.first_point if self.first_point else of for of in (start, end))


def _per_node(forest: ClusterForest, values: np.ndarray) -> Tensor:
    """A small value a tree, for each node."""
    counts = np.diff(forest.node_offsets)
    return torch.from_numpy(np.repeat(values.astype(np.uint8), counts)).to(forest.points.device, non_blocking=True)


def _per_point(forest: ClusterForest, values: np.ndarray) -> Tensor:
    """A small value a tree, for each point."""
    counts = np.diff(forest.point_offsets)
    return torch.from_numpy(np.repeat(values.astype(np.uint8), counts)).to(forest.points.device, non_blocking=True)


def _source_rows(sources: ClusterForest) -> tuple[Tensor, Tensor]:
    """Tree of every source row [points | nodes], and its number in that tree's own table [points | nodes]."""
    trees, device = np.arange(sources.n_trees), sources.points.device
    n_points, n_nodes = np.diff(sources.point_offsets), np.diff(sources.node_offsets)
    local = [np.arange(n) for n in n_points] + [np.arange(n, n + m) for n, m in zip(n_points, n_nodes, strict=True)]
    # Rows fit 32 bits by far: a tree of 700 million points would be needed to exceed them.
    rows = torch.from_numpy(np.concatenate(local).astype(np.int32)).to(device, non_blocking=True)
    return torch.cat([_per_point(sources, trees), _per_node(sources, trees)]), rows


def pairs_by_tree(
    sources: ClusterForest, pair_targets: Int[Tensor, " pairs"], pair_sources: Int[Tensor, " pairs"]
) -> list[IndexedPairs | AllPairs]:
    """Split a list of pairs by source tree, keeping its order; sources are rows [points | nodes] of all trees.

    Data-dependent operations: one.
    """
    tree_of_row, local_sources = _source_rows(sources)
    tree, order = torch.sort(tree_of_row.index_select(0, pair_sources), stable=True)
    pair_targets = pair_targets.index_select(0, order).to(torch.int32)
    pair_sources = local_sources.index_select(0, pair_sources.index_select(0, order))
    bounds = _cuts(tree, sources.n_trees).tolist()
    return [
        IndexedPairs(pair_targets[low:high], pair_sources[low:high])
        for low, high in itertools.pairwise([0, *bounds, len(tree)])
    ]


def _cuts(ascending: Tensor, n_values: int) -> Int[Tensor, " cuts"]:
    """Where the values 1, ..., n_values - 1 begin in an ascending list."""
    values = torch.arange(1, n_values, dtype=ascending.dtype, device=ascending.device)
    return torch.searchsorted(ascending, values)


def _split(
    targets: ClusterForest,
    with_rows: FarTargets,
    bounds: list[int],
    sources: ClusterForest,
    pair_targets: Tensor,
    pair_sources: Tensor,
    part_of_row: Tensor,
    near: LeafPairs,
    uses_target_nodes: bool,
    n_proxies: int,
) -> list[InteractionPlan]:
    """Sort all pairs by target part and source tree; number rows within each part's and each tree's own table."""
    n_parts, n_trees = len(bounds) - 1, sources.n_trees
    device = pair_sources.device
    own = [_Part(targets, with_rows, low, high) for low, high in itertools.pairwise(bounds)]
    tree_of_row, local_sources = _source_rows(sources)
    key = part_of_row.index_select(0, pair_targets).mul_(n_trees).add_(tree_of_row.index_select(0, pair_sources))
    if n_parts * n_trees > 1:
        key, order = torch.sort(key, stable=True)
        pair_targets, pair_sources = pair_targets.index_select(0, order), pair_sources.index_select(0, order)
    part_of_group = part_of_row[targets.n_points + with_rows.n_nodes * n_proxies :: n_proxies].contiguous()
    # All lists stand sorted by part: where each begins and ends, in one read from the device.
    group_cuts = _cuts(part_of_group, n_parts)
    member_cuts = torch.searchsorted(near.members[0], group_cuts)
    cuts = torch.cat([_cuts(key, n_parts * n_trees), group_cuts, member_cuts]).tolist()
    n_pair_cuts = n_parts * n_trees - 1
    pair_bounds = [0, *cuts[:n_pair_cuts], len(key)]
    group_bounds = [0, *cuts[n_pair_cuts : n_pair_cuts + n_parts - 1], len(part_of_group)]
    member_bounds = [0, *cuts[n_pair_cuts + n_parts - 1 :], near.members.shape[1]]

    rows = [np.arange(part.n_points) for part in own]
    rows += [np.arange(part.n_points, part.n_points + part.n_nodes * n_proxies) for part in own]
    for part, (low, high) in zip(own, itertools.pairwise(group_bounds), strict=True):
        first = part.n_points + (part.n_nodes * n_proxies if uses_target_nodes else 0)
        rows.append(np.arange(first, first + (high - low) * n_proxies))
    local_targets = torch.from_numpy(np.concatenate(rows).astype(np.int32)).to(device, non_blocking=True)
    pair_targets = local_targets.index_select(0, pair_targets)
    pair_sources = local_sources.index_select(0, pair_sources)

    plans = []
    for i, part in enumerate(own):
        groups, members = slice(*group_bounds[i : i + 2]), slice(*member_bounds[i : i + 2])
        pairs: list[IndexedPairs | AllPairs] = []
        for tree in range(n_trees):
            those = slice(*pair_bounds[i * n_trees + tree : i * n_trees + tree + 2])
            pairs.append(IndexedPairs(pair_targets[those], pair_sources[those]))
        of_members, points = near.members[:, members]
        boxes = None
        if n_proxies > 1:
            boxes = torch.cat([part.boxes, targets.boxes[:-2].index_select(1, near.group_nodes[groups])], dim=1)
        plans.append(
            InteractionPlan(
                pairs,
                part.n_points,
                part.n_nodes,
                part.start,
                part.end,
                uses_target_nodes,
                True,
                near.group_nodes[groups] - part.first_node,
                torch.stack([of_members - groups.start, points - part.first_point]),
                n_proxies,
                boxes,
            )
        )
    return plans
