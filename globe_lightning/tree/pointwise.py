"""The pointwise rule: every target decides alone, so that its interactions do not depend on who else is asked."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from globe_lightning.tree.cluster_tree import ClusterForest
from globe_lightning.tree.plan import InteractionPlan, exact_plan, pairs_by_tree
from globe_lightning.tree.traversal import children_of, expand_nodes, gap_squared, sizes_of, where


@torch.no_grad()
def build_pointwise_plan(points: Float[Tensor, "n dims"], sources: ClusterForest, theta: float) -> InteractionPlan:
    """Plan every interaction of single targets with a forest; each combination is covered exactly once.

    A target t takes a source node as one aggregate when theta^2 dist(t, box_S)^2 > D_S^2; otherwise the node opens,
    and a leaf that opens gives exact pairs. The pairs of a target stand in an order of its own, whatever the others.

    Args:
        points: of the precision and on the device of the forest.
        sources: trees of all boundary types.
        theta: opening angle; 0 makes everything exact.

    Data-dependent operations: one a level, one for leaves of several points, one at the end.
    """
    n, dims = points.shape
    if theta == 0 or not n or not sources.roots:
        return exact_plan(n, sources)
    columns = points.t().contiguous()
    children = sources.first_child.int()
    roots = torch.tensor(sources.roots, dtype=torch.int32).to(points.device)
    t = torch.arange(n, dtype=torch.int32, device=points.device).repeat(len(roots))
    s = roots.repeat_interleave(n)
    found: list[tuple[Tensor, Tensor, Tensor, Tensor]] = [(t[:0], s[:0], t[:0], s[:0])]
    while t.shape[0]:
        point = [column.index_select(0, t) for column in columns]
        *corners, size2, _ = (row.index_select(0, s) for row in sources.boxes)
        near = gap_squared(point, point, corners[:dims], corners[dims:]).mul_(theta**2) <= size2
        child = children.index_select(0, s)
        far, leaf = ~near, near & (child < 0)
        opened = near & ~leaf
        ids = [where(mask, size) for mask, size in zip((far, leaf, opened), sizes_of(far, leaf, opened), strict=True)]
        far_ids, leaf_ids, open_ids = ids
        found.append(
            (
                t.index_select(0, far_ids),
                s.index_select(0, far_ids),
                t.index_select(0, leaf_ids),
                s.index_select(0, leaf_ids),
            )
        )
        t, s = children_of(t, open_ids, (0, 0)), children_of(child, open_ids, (0, 1))
    far_t, far_s, leaf_t, leaf_s = (torch.cat(parts) for parts in zip(*found, strict=True))
    first = sources.start.index_select(0, leaf_s)
    if sources.leaf_size > 1:
        rows, rank = expand_nodes(sources, leaf_s)
        leaf_t, first = leaf_t.index_select(0, rows), first.index_select(0, rows) + rank
    pairs = pairs_by_tree(sources, torch.cat([far_t, leaf_t]), torch.cat([far_s + sources.n_points, first]))
    nothing = sources.start[:0]
    return InteractionPlan(pairs, n, 0, nothing, nothing, False, True, nothing, torch.stack([nothing, nothing]))
