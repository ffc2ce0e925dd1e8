"""The pointwise rule: every target decides alone, so that its interactions do not depend on who else is asked."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from globe_lightning.tree.cluster_tree import ClusterForest
from globe_lightning.tree.plan import InteractionPlan, exact_plan, pairs_by_tree
from globe_lightning.tree.traversal import Walk, expand_nodes, node_table, point_table


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
    n = points.shape[0]
    if theta == 0 or not n or not sources.roots:
        return exact_plan(n, sources)
    roots = torch.tensor(sources.roots, dtype=torch.int32).to(points.device)
    t = torch.arange(n, dtype=torch.int32, device=points.device).repeat(len(roots))
    walk = Walk(point_table(points), sources.start[:0], node_table(sources), sources.first_child, theta)
    (far_t, far_s), (leaf_t, leaf_s) = walk.down(torch.stack([t, roots.repeat_interleave(n)]))
    first = sources.start.index_select(0, leaf_s)
    if sources.leaf_size > 1:
        rows, rank = expand_nodes(sources, leaf_s)
        leaf_t, first = leaf_t.index_select(0, rows), first.index_select(0, rows) + rank
    pairs = pairs_by_tree(sources, torch.cat([far_t, leaf_t]), torch.cat([far_s + sources.n_points, first]))
    nothing = sources.start[:0]
    return InteractionPlan(pairs, n, 0, nothing, nothing, False, True, nothing, torch.stack([nothing, nothing]))
