"""Binary trees over points sorted by Morton code; several trees stand in one forest.

A node is a contiguous range of its tree's sorted points; a range of n > leaf_size points splits into its first
floor(n/2) and the rest. The shape therefore depends on the point count and leaf_size alone, is worked out on the
host and cached, and nothing is ever read back from a device to build a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

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

    def leads(self, other: ClusterForest) -> bool:
        """Whether this forest is the first trees of another, as of :meth:`leading`, or the other itself."""
        n = len(self.node_offsets)
        return self.boxes.data_ptr() == other.boxes.data_ptr() and self.node_offsets == other.node_offsets[:n]

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


@dataclass(frozen=True)
class _JoinedShape:
    """The nodes of trees side by side, and in which order their boxes are found; shared, not to be changed.

    A tree is complete down to the first level that has leaves, its base. Boxes are found base by base, then upward,
    for all trees at once: in the order [highest nodes | … | bases | what is below the bases], where the two children
    of the i-th node of a height are the nodes 2 i and 2 i + 1 of the height below.

    Attributes:
        start, end, first_child: of all nodes, tree after tree, int64.
        heights: first and last place of the nodes of each height, bases first.
        members: for the bases and for what is below them, points that span each node's box, (points, nodes).
        place: of each node in the order above; None for a single tree, which stands in this order.
    """

    start: Tensor
    end: Tensor
    first_child: Tensor
    heights: list[tuple[int, int]]
    members: tuple[Tensor, Tensor]
    place: Tensor | None


@lru_cache(maxsize=16)
def _joined_shapes(sizes: tuple[int, ...], leaf_size: int) -> _JoinedShape:
    """The shape of a forest over point sets of these sizes."""
    shapes = [tree_shape(size, leaf_size) for size in sizes]
    points = np.cumsum([0, *sizes])
    nodes = np.cumsum([0, *(shape.start.size for shape in shapes)])
    start = np.concatenate([shape.start + first for shape, first in zip(shapes, points[:-1], strict=True)])
    end = np.concatenate([shape.end + first for shape, first in zip(shapes, points[:-1], strict=True)])
    first_child = np.concatenate(
        [np.where(s.first_child < 0, -1, s.first_child + first) for s, first in zip(shapes, nodes[:-1], strict=True)]
    )
    # Deep trees first: so the trees that reach a height lead at all heights below.
    bases = {
        tree: int(np.searchsorted(shape.levels, np.argmax(shape.first_child < 0), side="right")) - 1
        for tree, shape in enumerate(shapes)
        if shape.start.size
    }
    deep_first = sorted(bases, key=lambda tree: -bases[tree])

    def level(tree: int, number: int) -> np.ndarray:
        levels = shapes[tree].levels
        low, high = levels[number : number + 2] if number + 1 < len(levels) else (0, 0)
        return np.arange(low, high) + nodes[tree]

    below = [level(tree, bases[tree] + 1) for tree in deep_first]
    nothing = np.zeros(0, dtype=np.int64)
    heights = [
        np.concatenate([nothing, *(level(tree, bases[tree] - height) for tree in deep_first if bases[tree] >= height)])
        for height in range(max(bases.values(), default=0) + 1)
    ]
    order = np.concatenate([*heights[::-1], *below])
    bounds = np.cumsum([0, *(len(own) for own in heights[::-1])]).tolist()
    place = None
    if len(bases) > 1:
        place = torch.empty(len(order), dtype=torch.int64)
        place[torch.from_numpy(order)] = torch.arange(len(order))

    def members(of: np.ndarray) -> Tensor:
        first, last = start[of], end[of] - 1
        steps = np.arange((last - first).max(initial=0) + 1)
        return torch.from_numpy(np.minimum(first + steps[:, None], last))

    return _JoinedShape(
        start=torch.from_numpy(start),
        end=torch.from_numpy(end),
        first_child=torch.from_numpy(first_child),
        heights=list(pairwise(bounds))[::-1],
        members=(members(heights[0]), members(order[bounds[-1] :])),
        place=place,
    )


@torch.no_grad()
def build_forest(point_sets: Sequence[Float[Tensor, "n dims"]], leaf_size: int = 1) -> ClusterForest:
    """Build one tree over each point set (at least float32, one device and precision for all).

    Data-dependent operations: none.
    """
    points = torch.cat(list(point_sets)) if len(point_sets) > 1 else point_sets[0]
    sizes = tuple(own.shape[0] for own in point_sets)
    shapes = [tree_shape(size, leaf_size) for size in sizes]
    joined = _joined_shapes(sizes, leaf_size)
    first, orders = 0, []
    for codes in morton_codes(points, sizes).split(sizes):
        order = torch.sort(codes, stable=True).indices
        orders.append(order.add_(first) if first else order)
        first += codes.shape[0]
    order = torch.cat(orders) if len(orders) > 1 else orders[0]
    points = points.index_select(0, order)
    start, end, first_child = (
        t.to(points.device, non_blocking=True) for t in (joined.start, joined.end, joined.first_child)
    )
    return ClusterForest(
        order=order,
        points=points,
        start=start,
        end=end,
        first_child=first_child,
        boxes=_boxes(points, joined),
        point_offsets=tuple(np.cumsum([0, *sizes]).tolist()),
        node_offsets=tuple(np.cumsum([0, *(shape.start.size for shape in shapes)]).tolist()),
        leaf_size=leaf_size,
        n_levels=max(len(shape.levels) - 1 for shape in shapes),
    )


def loose_points(point_sets: Sequence[Float[Tensor, "n dims"]]) -> ClusterForest:
    """The points as they are, in trees without nodes: all that exact sums need."""
    points = torch.cat(list(point_sets)) if len(point_sets) > 1 else point_sets[0]
    order = torch.arange(points.shape[0], device=points.device)
    offsets = np.cumsum([0, *(own.shape[0] for own in point_sets)]).tolist()
    boxes = points.new_empty(2 * points.shape[1] + 2, 0)
    return ClusterForest(
        order, points, order[:0], order[:0], order[:0], boxes, tuple(offsets), (0,) * len(offsets), 1, 0
    )


def _boxes(points: Float[Tensor, "points dims"], shape: _JoinedShape) -> Float[Tensor, "rows nodes"]:
    """Box corners and diagonal of every node, from the bases up: one minimum a level."""
    dims, n_nodes = points.shape[1], shape.start.shape[0]
    boxes = points.new_empty(2 * dims + 2, n_nodes)
    if not n_nodes:
        return boxes
    # Lower corners and negative upper ones, so that one minimum serves both.
    corners = boxes[: 2 * dims] if shape.place is None else torch.empty_like(boxes[: 2 * dims])
    columns = points.t().contiguous()
    first, last = shape.heights[0]
    for members, (low, high) in zip(shape.members, ((first, last), (last, n_nodes)), strict=True):
        ids = members.to(points.device, non_blocking=True)
        own = columns.index_select(1, ids.view(-1)).view(dims, *ids.shape)
        lowest, *others = own.unbind(1)
        highest = lowest
        for other in others:
            lowest, highest = torch.minimum(lowest, other), torch.maximum(highest, other)
        corners[:dims, low:high] = lowest
        torch.neg(highest, out=corners[dims:, low:high])
    for (low, high), (first, last) in pairwise(shape.heights):
        high = low + 2 * (last - first)
        torch.minimum(corners[:, low:high:2], corners[:, low + 1 : high : 2], out=corners[:, first:last])
    if shape.place is not None:
        torch.index_select(corners, 1, shape.place.to(points.device, non_blocking=True), out=boxes[: 2 * dims])
    boxes[dims : 2 * dims].neg_()
    torch.sum((boxes[dims : 2 * dims] - boxes[:dims]).square_(), dim=0, out=boxes[-2])
    torch.sqrt(boxes[-2], out=boxes[-1])
    return boxes
