"""Binary trees over points sorted by Morton code; several trees stand in one forest.

A node is a contiguous range of its tree's sorted points; a range of n > leaf_size points splits into its first
floor(n/2) and the rest. The shape therefore depends on the point count and leaf_size alone, is worked out on the
host and cached, and nothing is ever read back from a device to build a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from globe_lightning.tree.morton import morton_codes


@dataclass(frozen=True)
class TreeShape:
    """The nodes of a tree over n points, level by level from the root; the two children of a node are neighbours.

    Attributes:
        start, end: each node's range of sorted points, int64 (n_nodes,).
        first_child: index of the left child (the right one follows it), -1 for a leaf, int64 (n_nodes,).
        levels: index of the first node of each level, with n_nodes appended.
    """

    start: np.ndarray
    end: np.ndarray
    first_child: np.ndarray
    levels: tuple[int, ...]


@lru_cache(maxsize=64)
def tree_shape(n_points: int, leaf_size: int) -> TreeShape:
    """The shape of the tree over ``n_points`` points; no nodes for no points."""
    if leaf_size < 1:
        raise ValueError(f"leaf_size: expected at least 1, found {leaf_size}")
    if n_points == 0:
        nothing = np.zeros(0, dtype=np.int64)
        return TreeShape(nothing, nothing, nothing, (0,))
    starts, sizes, children, levels = [], [], [], [0]
    start, size = np.zeros(1, dtype=np.int64), np.array([n_points], dtype=np.int64)
    while start.size:
        next_level = levels[-1] + start.size
        splits = size > leaf_size
        first = np.where(splits, next_level + 2 * (np.cumsum(splits) - 1), -1)
        starts.append(start)
        sizes.append(size)
        children.append(first)
        levels.append(next_level)
        left = size[splits] // 2
        size = np.stack([left, size[splits] - left], axis=1).reshape(-1)
        start = np.stack([start[splits], start[splits] + left], axis=1).reshape(-1)
    start, size = np.concatenate(starts), np.concatenate(sizes)
    return TreeShape(start, start + size, np.concatenate(children), tuple(levels))


@dataclass
class ClusterForest:
    """Trees over several point sets, their points and nodes side by side.

    Attributes:
        order: row of the concatenated input of each sorted point, int64 (n_points,).
        points: the sorted points (n_points, D) [m].
        start, end: range of sorted points of each node, int64 (n_nodes,).
        first_child: left child of each node (the right one follows), -1 for a leaf, int64 (n_nodes,).
        boxes: lower corner, upper corner [m] and squared diagonal [m^2] of each node's box, (n_nodes, 2 D + 1).
        point_offsets, node_offsets: first point and node of each tree, with the totals appended.
        leaf_size: largest number of points of a leaf.
        n_levels: levels of the deepest tree.
    """

    order: Int[Tensor, " points"]
    points: Float[Tensor, "points dims"]
    start: Int[Tensor, " nodes"]
    end: Int[Tensor, " nodes"]
    first_child: Int[Tensor, " nodes"]
    boxes: Float[Tensor, "nodes columns"]
    point_offsets: tuple[int, ...]
    node_offsets: tuple[int, ...]
    leaf_size: int
    n_levels: int

    def to(self, device: torch.device | str) -> ClusterForest:
        """The same forest on a device."""
        moved = {
            name: getattr(self, name).to(device) for name in ("order", "points", "start", "end", "first_child", "boxes")
        }
        return replace(self, **moved)

    @property
    def n_points(self) -> int:
        """Points of all trees."""
        return self.point_offsets[-1]

    @property
    def n_nodes(self) -> int:
        """Nodes of all trees."""
        return self.node_offsets[-1]

    @property
    def n_trees(self) -> int:
        """Number of trees, empty ones included."""
        return len(self.point_offsets) - 1

    @property
    def roots(self) -> list[int]:
        """Root node of each tree that has points."""
        return [low for low, high in zip(self.node_offsets, self.node_offsets[1:], strict=False) if high > low]


@torch.no_grad()
def build_forest(point_sets: Sequence[Float[Tensor, "n dims"]], leaf_size: int = 1) -> ClusterForest:
    """Build one tree over each point set (at least float32, one device and precision for all).

    Data-dependent operations: none.
    """
    device = point_sets[0].device
    shapes = [tree_shape(points.shape[0], leaf_size) for points in point_sets]
    point_offsets = tuple(np.cumsum([0, *(points.shape[0] for points in point_sets)]).tolist())
    node_offsets = tuple(np.cumsum([0, *(shape.start.size for shape in shapes)]).tolist())

    def joined(name: str, offsets: tuple[int, ...]) -> Tensor:
        parts = [
            np.where(getattr(shape, name) < 0, -1, getattr(shape, name) + offset)
            for shape, offset in zip(shapes, offsets, strict=False)
        ]
        return torch.from_numpy(np.concatenate(parts)).to(device, non_blocking=True)

    orders = [torch.argsort(morton_codes(points), stable=True) for points in point_sets]
    sorted_sets = [points.index_select(0, order) for points, order in zip(point_sets, orders, strict=True)]
    boxes = [_boxes(points, shape, leaf_size) for points, shape in zip(sorted_sets, shapes, strict=True)]
    return ClusterForest(
        order=torch.cat([order + offset for order, offset in zip(orders, point_offsets, strict=False)]),
        points=torch.cat(sorted_sets),
        start=joined("start", point_offsets),
        end=joined("end", point_offsets),
        first_child=joined("first_child", node_offsets),
        boxes=torch.cat(boxes),
        point_offsets=point_offsets,
        node_offsets=node_offsets,
        leaf_size=leaf_size,
        n_levels=max(len(shape.levels) - 1 for shape in shapes),
    )


def _boxes(points: Tensor, shape: TreeShape, leaf_size: int) -> Tensor:
    """Box corners and squared diagonal of every node, from the leaves up: one minimum and maximum a level."""
    dims = points.shape[1]
    n_nodes = shape.start.size
    boxes = points.new_zeros(n_nodes, 2 * dims + 1)
    if n_nodes == 0:
        return boxes
    low, high = boxes[:, :dims], boxes[:, dims : 2 * dims]
    leaves = np.flatnonzero(shape.first_child < 0)
    members = np.minimum(
        shape.start[leaves, None] + np.arange(min(leaf_size, points.shape[0])), shape.end[leaves, None] - 1
    )
    leaf_ids = torch.from_numpy(leaves).to(points.device, non_blocking=True)
    of_leaves = points[torch.from_numpy(members).to(points.device, non_blocking=True)]
    low.index_copy_(0, leaf_ids, of_leaves.amin(dim=1))
    high.index_copy_(0, leaf_ids, of_leaves.amax(dim=1))
    for level in range(len(shape.levels) - 3, -1, -1):
        first, last, after = shape.levels[level : level + 3]
        inner = first + np.flatnonzero(shape.first_child[first:last] >= 0)
        # The children of a level's inner nodes are, in order, the whole next level.
        lows = torch.minimum(low[last:after:2], low[last + 1 : after : 2])
        highs = torch.maximum(high[last:after:2], high[last + 1 : after : 2])
        if inner.size == last - first:
            low[first:last] = lows
            high[first:last] = highs
        else:
            ids = torch.from_numpy(inner).to(points.device, non_blocking=True)
            low.index_copy_(0, ids, lows)
            high.index_copy_(0, ids, highs)
    boxes[:, -1] = (high - low).square().sum(dim=1)
    return boxes
