"""Leaf pairs of a traversal resolved into single targets and sources."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from globe_lightning.tree.cluster_tree import ClusterForest
from globe_lightning.tree.traversal import NodePairs, expand_rows, gap_squared, where


@dataclass
class LeafPairs:
    """What leaf pairs become; points and nodes by their index in the forests.

    A group is the part of a target leaf whose points did not take a source leaf as a whole; those of one target part
    stand together, part after part.

    Attributes:
        nn_targets, nn_sources: (near, near): target point, source point.
        nf_targets, nf_sources: (near, far): target point, source node.
        fn_groups, fn_sources: (far, near): group, source point.
        group_nodes: the leaf of each group.
        members: (group, target point) of every member of a group, sorted by group.
    """

    nn_targets: Int[Tensor, " nn"]
    nn_sources: Int[Tensor, " nn"]
    nf_targets: Int[Tensor, " nf"]
    nf_sources: Int[Tensor, " nf"]
    fn_groups: Int[Tensor, " fn"]
    fn_sources: Int[Tensor, " fn"]
    group_nodes: Int[Tensor, " groups"]
    members: Int[Tensor, "2 members"]


def open_leaf_pairs(
    targets: ClusterForest, sources: ClusterForest, found: NodePairs, theta: float, part_of_node: Tensor
) -> LeafPairs:
    """Resolve leaf pairs by the two tests of the plan.

    First every target may take the source leaf as a whole; then sources far from the target leaf are evaluated
    once for the remaining targets; the rest is exact.

    Args:
        targets, sources, found, theta: of the traversal.
        part_of_node: number of the target part of each target node.

    Data-dependent operations: two, or none at ``leaf_size`` 1.
    """
    leaf_t, leaf_s = found.leaf_targets, found.leaf_sources
    none = targets.start[:0]
    if targets.leaf_size == 1 and sources.leaf_size == 1:
        # A leaf pair of two single points that is not far coincides: neither test can pass.
        t, s = targets.start.index_select(0, leaf_t), sources.start.index_select(0, leaf_s)
        return LeafPairs(t, s, *(none,) * 5, torch.stack([none, none]))
    dims = targets.points.shape[1]
    by_part = torch.sort(part_of_node.index_select(0, leaf_t), stable=True).indices
    leaf_t, leaf_s = leaf_t.index_select(0, by_part), leaf_s.index_select(0, by_part)
    start_t, start_s = targets.start.index_select(0, leaf_t), sources.start.index_select(0, leaf_s)
    counts_t = targets.end.index_select(0, leaf_t) - start_t
    counts_s = sources.end.index_select(0, leaf_s) - start_s
    total_t, total_s = torch.stack([counts_t.sum(), counts_s.sum()]).tolist()

    rows, rank = expand_rows(counts_t, total_t)
    t = start_t.index_select(0, rows) + rank
    box = sources.boxes.index_select(1, leaf_s).index_select(1, rows)
    point = targets.points.index_select(0, t).t()
    takes_leaf = theta**2 * gap_squared(point, point, box[:dims], box[dims : 2 * dims]) > box[-2]
    n_left = torch.zeros_like(start_t).index_add_(0, rows, (~takes_leaf).long())

    s_rows, s_rank = expand_rows(counts_s, total_s)
    s = start_s.index_select(0, s_rows) + s_rank
    t_box = targets.boxes.index_select(1, leaf_t).index_select(1, s_rows)
    source_point = sources.points.index_select(0, s).t()
    is_far = theta**2 * gap_squared(source_point, source_point, t_box[:dims], t_box[dims : 2 * dims]) > t_box[-2]
    left_there = n_left.index_select(0, s_rows)
    is_fn, is_near = is_far & (left_there > 0), ~is_far & (left_there > 0)
    has_group = torch.zeros_like(start_t).index_add_(0, s_rows, is_fn.long()) > 0
    is_member = ~takes_leaf & has_group.index_select(0, rows)
    sizes = [torch.count_nonzero(mask) for mask in (takes_leaf, is_fn, is_near, has_group, is_member)]
    n_taken, n_fn, n_near, n_groups, n_members, n_exact = torch.stack([*sizes, (left_there * is_near).sum()]).tolist()

    # Each near source meets each remaining target of its leaf pair; the latter stand sorted by leaf pair.
    taken, left = where(takes_leaf, n_taken), where(~takes_leaf, total_t - n_taken)
    near = where(is_near, n_near)
    near_pair = s_rows.index_select(0, near)
    nn_rows, nn_rank = expand_rows(n_left.index_select(0, near_pair), n_exact)
    first_left = (n_left.cumsum(0) - n_left).index_select(0, near_pair)
    nn_targets = t.index_select(0, left).index_select(0, first_left.index_select(0, nn_rows) + nn_rank)
    group_of_pair = has_group.cumsum(0) - 1
    fn, member = where(is_fn, n_fn), where(is_member, n_members)
    return LeafPairs(
        nn_targets=nn_targets,
        nn_sources=s.index_select(0, near).index_select(0, nn_rows),
        nf_targets=t.index_select(0, taken),
        nf_sources=leaf_s.index_select(0, rows.index_select(0, taken)).long(),
        fn_groups=group_of_pair.index_select(0, s_rows.index_select(0, fn)),
        fn_sources=s.index_select(0, fn),
        group_nodes=leaf_t.index_select(0, where(has_group, n_groups)).long(),
        members=torch.stack([group_of_pair.index_select(0, rows.index_select(0, member)), t.index_select(0, member)]),
    )
