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
        boxes: of each node's box the lower corner, upper corner [m], squared diagonal [m^2] and diagonal [m], one row
            a quantity: (2 D + 2, n_nodes).
        point_offsets, node_offsets: first point and node of each tree, with the totals appended.
        leaf_size: largest number of points of a leaf.
        n_levels: levels of the deepest tree.
    """

    order: Int[Tensor, " points"]
    points: Float[Tensor, "points dims"]
    start: Int[Tensor, " nodes"]
    end: Int[Tensor, " nodes"]
    first_child: Int[Tensor, " nodes"]
    boxes: Float[Tensor, "rows nodes"]
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

    def leading(self, n_trees: int) -> ClusterForest:
        """The forest of the first ``n_trees`` trees; a view."""
        points, nodes = self.point_offsets[n_trees], self.node_offsets[n_trees]
        return ClusterForest(
            self.order[:points],
            self.points[:points],
            self.start[:nodes],
            self.end[:nodes],
            self.first_child[:nodes],
            self.boxes[:, :nodes],
            self.point_offsets[: n_trees + 1],
            self.node_offsets[: n_trees + 1],
            self.leaf_size,
            self.n_levels,
        )

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


@lru_cache(maxsize=16)
def _joined_shapes(sizes: tuple[int, ...], leaf_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Start, end and first child of the nodes of trees side by side; shared, not to be changed."""
    parts: list[list[np.ndarray]] = [[], [], []]
    point, node = 0, 0
    for size in sizes:
        shape = tree_shape(size, leaf_size)
        for own, values in zip(
            parts,
            (shape.start + point, shape.end + point, np.where(shape.first_child < 0, -1, shape.first_child + node)),
            strict=True,
        ):
            own.append(values)
        point, node = point + size, node + shape.start.size
    start, end, first_child = (torch.from_numpy(np.concatenate(own)) for own in parts)
    return start, end, first_child


@torch.no_grad()
def build_forest(point_sets: Sequence[Float[Tensor, "n dims"]], leaf_size: int = 1) -> ClusterForest:
    """Build one tree over each point set (at least float32, one device and precision for all).

    Data-dependent operations: none.
    """
    device, dims = point_sets[0].device, point_sets[0].shape[1]
    sizes = tuple(points.shape[0] for points in point_sets)
    shapes = [tree_shape(size, leaf_size) for size in sizes]
    point_offsets = tuple(np.cumsum([0, *sizes]).tolist())
    node_offsets = tuple(np.cumsum([0, *(shape.start.size for shape in shapes)]).tolist())
    start, end, first_child = (t.to(device, non_blocking=True) for t in _joined_shapes(sizes, leaf_size))
    orders, sorted_sets = [], []
    boxes = point_sets[0].new_empty(2 * dims + 2, node_offsets[-1])
    for tree, (points, shape) in enumerate(zip(point_sets, shapes, strict=True)):
        order = torch.sort(morton_codes(points), stable=True).indices
        sorted_points = points.index_select(0, order)
        _fill_boxes(boxes[:, node_offsets[tree] : node_offsets[tree + 1]], sorted_points, shape, leaf_size)
        orders.append(order + point_offsets[tree] if tree else order)
        sorted_sets.append(sorted_points)
    return ClusterForest(
        order=torch.cat(orders) if len(orders) > 1 else orders[0],
        points=torch.cat(sorted_sets) if len(orders) > 1 else sorted_sets[0],
        start=start,
        end=end,
        first_child=first_child,
        boxes=boxes,
        point_offsets=point_offsets,
        node_offsets=node_offsets,
        leaf_size=leaf_size,
        n_levels=max(len(shape.levels) - 1 for shape in shapes),
    )


def _fill_boxes(boxes: Tensor, points: Tensor, shape: TreeShape, leaf_size: int) -> None:
    """Box corners and diagonal of every node, from the leaves up: one minimum and maximum a level."""
    dims = points.shape[1]
    if not shape.start.size:
        return
    low, high = boxes[:dims], boxes[dims : 2 * dims]
    columns = points.t().contiguous()

    def put(first: int, last: int, which: np.ndarray, lows: Tensor, highs: Tensor) -> None:
        """Set some nodes of the level [first, last)."""
        if which.size == last - first:
            low[:, first:last] = lows
            high[:, first:last] = highs
        elif which.size:
            ids = torch.from_numpy(which).to(points.device, non_blocking=True)
            low.index_copy_(1, ids, lows)
            high.index_copy_(1, ids, highs)

    for level in range(len(shape.levels) - 2, -1, -1):
        first, last = shape.levels[level : level + 2]
        is_leaf = shape.first_child[first:last] < 0
        leaves = first + np.flatnonzero(is_leaf)
        if leaves.size:
            if leaf_size == 1:
                members = shape.start[leaves]
            else:
                largest = np.arange(min(leaf_size, points.shape[0]))
                members = np.minimum(shape.start[leaves, None] + largest, shape.end[leaves, None] - 1).reshape(-1)
            ids = torch.from_numpy(members).to(points.device, non_blocking=True)
            # Column by column: several times as fast as along the second dimension.
            own = torch.stack([column.index_select(0, ids) for column in columns])
            if leaf_size == 1:
                put(first, last, leaves, own, own)
            else:
                lows, highs = own.unflatten(1, (leaves.size, -1)).aminmax(dim=2)
                put(first, last, leaves, lows, highs)
        if leaves.size < last - first:
            # The children of a level's inner nodes are, in order, the whole next level.
            after = shape.levels[level + 2]
            inner = first + np.flatnonzero(~is_leaf)
            lows = torch.minimum(low[:, last:after:2], low[:, last + 1 : after : 2])
            highs = torch.maximum(high[:, last:after:2], high[:, last + 1 : after : 2])
            put(first, last, inner, lows, highs)
    torch.sum((high - low).square_(), dim=0, out=boxes[-2])
    torch.sqrt(boxes[-2], out=boxes[-1])
