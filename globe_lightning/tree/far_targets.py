"""Where far pairs are evaluated for their target nodes: the rows of nodes, of their parts or of their points.

Far from a source, targets that stand close together feel nearly the same; targets spread over a large node do not,
though the opening rule is met all the same. There are few large nodes, and so few far pairs of them that these cost
next to nothing: so a node of more points than a limit is evaluated in parts, the largest of its descendants within the
limit. How the parts lie follows from the number of points alone; it is found on the host and kept.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from globe_lightning.tree.cluster_tree import ClusterForest, tree_shape
from globe_lightning.tree.traversal import expand_rows

AUTO_MOST, AUTO_SHARE = 64, 128

Limit = int | Literal["auto"] | None
"""Points of the largest target node that is evaluated as one; None for no limit."""


def auto_limit(n_points: int) -> int:
    """The limit "auto" of a tree: a share of its points, so that evaluations a target do not grow with them."""
    return max(AUTO_MOST, n_points // AUTO_SHARE)


@dataclass
class FarTargets:
    """The target nodes that have rows of their own, and the rows [points | nodes] at which each node is evaluated.

    Attributes:
        offsets: first node with rows of each tree, with the total appended.
        nodes: which have rows; None if all.
        first, counts: each node's rows in the list [all rows | rows of the parts of large nodes], int32 (all nodes,);
            None if each node has a row and is evaluated there.
        of_parts: rows of the parts of large nodes, int32; None for none.
        n_points, n_proxies: points of the forest, and rows of each node.
    """

    offsets: list[int]
    nodes: Int[Tensor, " nodes"] | None
    first: Int[Tensor, " nodes"] | None
    counts: Int[Tensor, " nodes"] | None
    of_parts: Int[Tensor, " rows"] | None
    n_points: int
    n_proxies: int

    @staticmethod
    def of(forest: ClusterForest, n_proxies: int = 1, limit: Limit = None) -> FarTargets:
        """Of a forest's nodes; no device sync.

        Args:
            forest: of the targets.
            n_proxies: rows of each node; above 1 nodes of no more points than that are evaluated at these.
            limit: points of the largest node that is evaluated as one; leaves always are.
        """
        if n_proxies == 1 and limit is None:
            return FarTargets(list(forest.node_offsets), None, None, None, None, forest.n_points, 1)
        sizes = tuple(high - low for low, high in itertools.pairwise(forest.point_offsets))
        limits = tuple(n if limit is None else auto_limit(n) if limit == "auto" else limit for n in sizes)
        offsets, *tensors = _rows_of_nodes(sizes, limits, forest.leaf_size, n_proxies)
        device = forest.points.device
        nodes, first, counts, of_parts = (tensor.to(device, non_blocking=True) for tensor in tensors)
        with_rows = None if n_proxies == 1 else nodes
        return FarTargets(offsets, with_rows, first, counts, of_parts, forest.n_points, n_proxies)

    @staticmethod
    def at_points(forest: ClusterForest) -> FarTargets:
        """Of a forest whose far pairs are evaluated at every point of the target node."""
        first = forest.start.int()
        return FarTargets(list(forest.node_offsets), None, first, forest.end.int() - first, None, forest.n_points, 1)

    @property
    def n_nodes(self) -> int:
        """Nodes that have rows."""
        return self.offsets[-1]

    def select(self, of_nodes: Tensor, low: int = 0, high: int | None = None) -> Tensor:
        """The entries (along the last dimension) of the nodes with rows, of the trees [low, high)."""
        rows = slice(self.offsets[low], self.offsets[-1 if high is None else high])
        return of_nodes[..., rows] if self.nodes is None else of_nodes.index_select(-1, self.nodes[rows])

    def at_rows(self, nodes: Int[Tensor, " far"], sources: Int[Tensor, " far"]) -> tuple[Tensor, Tensor]:
        """Target rows and sources of far pairs, from their target nodes. One device sync, or none without a limit."""
        if self.first is None or self.counts is None:
            return nodes + self.n_points, sources
        counts = self.counts.index_select(0, nodes)
        pairs, rank = expand_rows(counts, int(counts.sum()))
        rows = self.first.index_select(0, nodes).index_select(0, pairs) + rank
        if self.of_parts is not None and self.of_parts.shape[0]:
            n_rows = self.n_points + self.n_nodes * self.n_proxies
            every = torch.cat([torch.arange(n_rows, dtype=torch.int32, device=rows.device), self.of_parts])
            rows = every.index_select(0, rows)
        return rows, sources.index_select(0, pairs)


@lru_cache(maxsize=16)
def _rows_of_nodes(
    sizes: tuple[int, ...], limits: tuple[int, ...], leaf_size: int, n_proxies: int
) -> tuple[list[int], Tensor, Tensor, Tensor, Tensor]:
    """What :class:`FarTargets` holds of trees over so many points: offsets, nodes, first, counts, of_parts."""
    shapes = [tree_shape(size, leaf_size) for size in sizes]
    first_points, first_nodes = np.cumsum([0, *sizes]), np.cumsum([0, *(shape.start.size for shape in shapes)])
    start = np.concatenate([shape.start + first for shape, first in zip(shapes, first_points, strict=False)])
    end = np.concatenate([shape.end + first for shape, first in zip(shapes, first_points, strict=False)])
    children = np.concatenate(
        [np.where(s.first_child < 0, -1, s.first_child + first) for s, first in zip(shapes, first_nodes, strict=False)]
    )
    size = end - start
    large = (children >= 0) & (size > np.repeat(limits, [shape.start.size for shape in shapes]))
    with_rows = np.ones_like(large) if n_proxies == 1 else (size > n_proxies) & ~large
    nodes = np.flatnonzero(with_rows)
    n_rows = int(first_points[-1]) + len(nodes) * n_proxies
    first = np.where(with_rows, first_points[-1] + (np.cumsum(with_rows) - 1) * n_proxies, start)
    counts = np.where(with_rows, n_proxies, size)

    # The parts of all large nodes tile the points: those of one node follow each other.
    outermost = np.zeros_like(large)
    outermost[[first for first, shape in zip(first_nodes, shapes, strict=False) if shape.start.size]] = True
    outermost[children[large]] = outermost[children[large] + 1] = True
    parts = np.flatnonzero(outermost & ~large)
    parts = parts[np.argsort(start[parts])]
    bounds = np.cumsum([0, *counts[parts]])
    rank = np.arange(bounds[-1]) - np.repeat(bounds[:-1], counts[parts])
    of_parts = np.repeat(first[parts], counts[parts]) + rank
    low, high = (bounds[np.searchsorted(start[parts], of[large])] for of in (start, end))
    first[large], counts[large] = n_rows + low, high - low
    if not large.any():
        of_parts = of_parts[:0]

    offsets = np.searchsorted(nodes, first_nodes).tolist()
    return (
        offsets,
        torch.from_numpy(nodes),
        *(torch.from_numpy(array.astype(np.int32)) for array in (first, counts, of_parts)),
    )
