"""Interaction plans: every combination exactly once, approximations only where the opening angle allows them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from globe_lightning.tree.cluster_tree import ClusterForest, build_forest
from globe_lightning.tree.opening_rule import OpeningRule
from globe_lightning.tree.plan import (
    FEWEST_PAIRS,
    AllPairs,
    IndexedPairs,
    InteractionPlan,
    build_plan,
    build_plans,
)
from globe_lightning.tree.pointwise import build_pointwise_plan
from globe_lightning.tree.traversal import gap_squared, traverse

SETTINGS = [(leaf, expand, theta) for leaf in (1, 3, 4) for expand in (False, True) for theta in (0.3, 1.0, 2.0)]


def random_points(n: int, dims: int, seed: int = 0) -> Tensor:
    return torch.randn(n, dims, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rows_by_point(forest: ClusterForest, plan: InteractionPlan) -> Tensor:
    """Which sorted points each row of the target table serves, (rows, points)."""
    rows = [torch.eye(forest.n_points)]
    if plan.uses_target_nodes:
        rows.append(node_members(forest))
    groups = torch.zeros(plan.n_groups, forest.n_points)
    groups[plan.members[0], plan.members[1]] = 1
    return torch.cat([*rows, groups])


def node_members(forest: ClusterForest) -> Tensor:
    points = torch.arange(forest.n_points)
    return ((points >= forest.start.unsqueeze(1)) & (points < forest.end.unsqueeze(1))).float()


def coverage(targets: ClusterForest, sources: ClusterForest, plan: InteractionPlan) -> Tensor:
    """How often each (target, source) combination is covered, (targets, sources)."""
    serves = rows_by_point(targets, plan)
    counts = torch.zeros(targets.n_points, sources.n_points)
    for tree, pairs in enumerate(plan.pairs):
        low, high = sources.point_offsets[tree : tree + 2]
        first, last = sources.node_offsets[tree : tree + 2]
        stands_for = torch.cat([torch.eye(sources.n_points)[low:high], node_members(sources)[first:last]])
        if isinstance(pairs, AllPairs):
            counts[:, low:high] += 1
        elif len(pairs):
            # Dense products: brute force, but quick for a few hundred points.
            t, s = pairs.targets.long(), pairs.sources.long()
            table = torch.zeros(serves.shape[0], stands_for.shape[0])
            table.index_put_((t, s), torch.ones(len(t)), accumulate=True)
            counts += serves.T @ table @ stands_for
    return counts


def point_sets(dims: int) -> dict[str, list[Tensor]]:
    cloud = random_points(33, dims)
    line = torch.zeros(10, dims, dtype=torch.float64)
    line[:, 0] = torch.arange(10)
    return {
        "one": [random_points(1, dims)],
        "two": [random_points(2, dims)],
        "not a power of two": [cloud],
        "a power of two": [random_points(32, dims)],
        "duplicates": [torch.cat([cloud[:20], cloud[:20], cloud[:5]])],
        "all equal": [cloud[:1].expand(13, dims)],
        "on a line": [line],
        "two clusters": [torch.cat([cloud * 0.01, cloud * 0.01 + 3])],
        "several trees": [cloud[:7], random_points(19, dims, 5) + 1, random_points(1, dims, 6)],
    }


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize(("leaf_size", "expand", "theta"), SETTINGS)
def test_every_combination_is_covered_exactly_once(dims: int, leaf_size: int, expand: bool, theta: float) -> None:
    others = build_forest([random_points(21, dims, 9) * 2], leaf_size)
    for name, sets in point_sets(dims).items():
        forest = build_forest(sets, leaf_size)
        for targets, sources in ((forest, forest), (others, forest), (forest, others)):
            plan = build_plan(targets, sources, OpeningRule(theta, expand))
            assert (coverage(targets, sources, plan) == 1).all(), name
            assert plan.n_evaluations <= targets.n_points * sources.n_points, name


@pytest.mark.parametrize("dims", [2, 3])
def test_approximations_save_work(dims: int) -> None:
    forest = build_forest([random_points(200, dims)], 1)
    counts = [build_plan(forest, forest, OpeningRule(theta)).n_evaluations for theta in (0.0, 0.5, 1.0, 2.0)]
    assert counts[0] == 200 * 200
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] < counts[0] / 4
    assert build_plan(forest, forest, OpeningRule(1.0, True)).n_evaluations > counts[2]


def test_theta_zero_stores_nothing() -> None:
    forest = build_forest([random_points(9, 2), random_points(4, 2)], 1)
    plan = build_plan(forest, forest, OpeningRule(0.0))
    assert all(isinstance(pairs, AllPairs) for pairs in plan.pairs)
    assert [len(pairs) for pairs in plan.pairs] == [13 * 9, 13 * 4]
    assert not plan.uses_source_nodes
    assert plan.n_rows == 13


def box(points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    low, high = points.amin(0), points.amax(0)
    return low, high, (high - low).square().sum()


def recursive_pairs(
    targets: ClusterForest, sources: ClusterForest, theta: float
) -> tuple[set[tuple[int, int, int, int]], set[tuple[int, int, int, int]]]:
    """Far pairs and leaf pairs as ranges (t0, t1, s0, s1), by recursion straight from the definition."""
    far, leaf = set(), set()
    leaf_t, leaf_s = targets.leaf_size, sources.leaf_size

    def visit(t0: int, t1: int, s0: int, s1: int) -> None:
        low_t, high_t, size_t = box(targets.points[t0:t1])
        low_s, high_s, size_s = box(sources.points[s0:s1])
        gap = torch.maximum(low_t - high_s, low_s - high_t).clamp_min(0)
        if theta**2 * gap.square().sum() > (size_t.sqrt() + size_s.sqrt()) ** 2:
            far.add((t0, t1, s0, s1))
            return
        inner_t, inner_s = t1 - t0 > leaf_t, s1 - s0 > leaf_s
        if not inner_t and not inner_s:
            leaf.add((t0, t1, s0, s1))
            return
        split_t = inner_t and (not inner_s or size_t >= size_s)
        split_s = inner_s and (not inner_t or size_s >= size_t)
        middle_t, middle_s = t0 + (t1 - t0) // 2, s0 + (s1 - s0) // 2
        for a, b in [(t0, middle_t), (middle_t, t1)] if split_t else [(t0, t1)]:
            for c, d in [(s0, middle_s), (middle_s, s1)] if split_s else [(s0, s1)]:
                visit(a, b, c, d)

    visit(0, targets.n_points, 0, sources.n_points)
    return far, leaf


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize(("leaf_size", "theta"), [(1, 1.0), (1, 0.4), (3, 1.0), (4, 2.0)])
def test_traversal_is_the_recursion_of_its_definition(dims: int, leaf_size: int, theta: float) -> None:
    targets = build_forest([random_points(37, dims, 1)], leaf_size)
    sources = build_forest([random_points(22, dims, 2) * 0.7 + 0.5], leaf_size)
    for a, b in ((targets, sources), (targets, targets)):
        found = traverse(a, b, theta)

        def ranges(t: Tensor, s: Tensor, a: ClusterForest = a, b: ClusterForest = b) -> list[tuple[int, ...]]:
            columns = [a.start[t], a.end[t], b.start[s], b.end[s]]
            return [tuple(row) for row in torch.stack(columns, dim=1).tolist()]

        far = ranges(found.far_targets, found.far_sources)
        leaf = ranges(found.leaf_targets, found.leaf_sources)
        assert len(far) == len(set(far))
        assert len(leaf) == len(set(leaf))
        assert (set(far), set(leaf)) == recursive_pairs(a, b, theta)
        assert far or leaf
        assert leaf or leaf_size == 1


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize(("leaf_size", "expand", "theta"), SETTINGS)
def test_no_pair_is_approximated_within_the_opening_angle(
    dims: int, leaf_size: int, expand: bool, theta: float
) -> None:
    """A node or group is used only across a gap larger than its own size over theta."""
    targets = build_forest([random_points(60, dims, 3)], leaf_size)
    sources = build_forest([random_points(45, dims, 4) + 1], leaf_size)
    plan = build_plan(targets, sources, OpeningRule(theta, expand))
    serves = rows_by_point(targets, plan).bool()
    stands_for = torch.cat([torch.eye(sources.n_points), node_members(sources)]).bool()
    (pairs,) = plan.pairs
    assert isinstance(pairs, IndexedPairs)
    approximated = 0
    for t, s in zip(pairs.targets.tolist(), pairs.sources.tolist(), strict=True):
        if t < targets.n_points and s < sources.n_points:
            continue
        low_t, high_t, size_t = box(targets.points[serves[t]])
        low_s, high_s, size_s = box(sources.points[stands_for[s]])
        gap = torch.maximum(low_t - high_s, low_s - high_t).clamp_min(0).square().sum()
        if t < plan.first_group:
            # A single far target has no size of its own; an expanded one was judged with its node.
            assert theta**2 * gap > (size_t.sqrt() + size_s.sqrt()) ** 2
        else:
            assert theta**2 * gap > 0
        approximated += 1
    assert approximated


def test_groups_serve_the_targets_that_are_left(dims: int = 3) -> None:
    """Every (far, near) entry serves at least one target, and its members lie in the group's leaf."""
    forest = build_forest([random_points(150, dims, 7)], 4)
    plan = build_plan(forest, forest, OpeningRule(1.0))
    assert plan.n_groups > 10
    groups, points = plan.members
    assert torch.equal(groups.unique(), torch.arange(plan.n_groups))
    nodes = plan.group_nodes[groups]
    assert ((points >= forest.start[nodes]) & (points < forest.end[nodes])).all()
    assert (forest.first_child[plan.group_nodes] < 0).all()
    used = torch.cat([pairs.targets for pairs in plan.pairs])
    assert torch.equal(used[used >= plan.first_group].unique(), plan.first_group + torch.arange(plan.n_groups))


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("leaf_size", [1, 4])
@pytest.mark.parametrize("theta", [0.0, 0.3, 1.0])
def test_pointwise_plans_cover_once_and_only_what_is_far(dims: int, leaf_size: int, theta: float) -> None:
    points = random_points(21, dims, 9) * 2
    for name, sets in point_sets(dims).items():
        sources = build_forest(sets, leaf_size)
        plan = build_pointwise_plan(points, sources, theta)
        targets = build_forest([points], 1)
        targets.order, targets.points = torch.arange(21), points  # the plan's own order
        assert (coverage(targets, sources, plan) == 1).all(), name
        assert plan.n_rows == 21
    (pairs,) = build_pointwise_plan(points, build_forest([random_points(45, dims, 4)], leaf_size), 1.0).pairs
    sources = build_forest([random_points(45, dims, 4)], leaf_size)
    nodes = pairs.sources >= 45
    assert nodes.any()
    assert not nodes.all() or leaf_size == 1, "single points have no size, so that all others are far"
    for t, s in zip(pairs.targets[nodes].tolist(), (pairs.sources[nodes] - 45).tolist(), strict=True):
        low, high, size = box(sources.points[sources.start[s] : sources.end[s]])
        gap = torch.maximum(low - points[t], points[t] - high).clamp_min(0).square().sum()
        assert gap > size


@pytest.mark.parametrize("leaf_size", [1, 4])
@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("theta", [0.0, 1.0])
def test_one_traversal_for_several_plans(leaf_size: int, expand: bool, theta: float) -> None:
    """The same pairs as from a traversal each, in each part's own numbers."""
    faces = [random_points(40, 3), random_points(0, 3), random_points(11, 3, 2) + 0.5]
    points = [random_points(30, 3, 3), random_points(17, 3, 4)]
    both, sources = build_forest([*faces, *points], leaf_size), build_forest(faces, leaf_size)
    found = build_plans(both, [3, 2], both.leading(3), OpeningRule(theta, expand))
    expected = [
        build_plan(own, sources, OpeningRule(theta, expand)) for own in (sources, build_forest(points, leaf_size))
    ]
    for plan, single in zip(found, expected, strict=True):
        assert (plan.n_points, plan.n_rows, plan.n_groups) == (single.n_points, single.n_rows, single.n_groups)
        assert (plan.n_nodes, plan.uses_target_nodes) == (single.n_nodes, single.uses_target_nodes)
        assert torch.equal(plan.node_start, single.node_start) and torch.equal(plan.node_end, single.node_end)
        for pairs, own in zip(plan.pairs, single.pairs, strict=True):
            assert len(pairs) == len(own)
            if theta:
                # Groups may be numbered in another order: compare what each serves.
                assert sorted(served(plan, pairs)) == sorted(served(single, own))


def served(plan: InteractionPlan, pairs: IndexedPairs) -> list[tuple[object, ...]]:
    members = {group: [] for group in range(plan.n_groups)}
    for group, point in plan.members.t().tolist():
        members[group].append(point)
    out = []
    for t, s in zip(pairs.targets.tolist(), pairs.sources.tolist(), strict=True):
        group = t - plan.first_group
        out.append((-1, s, int(plan.group_nodes[group]), *members[group]) if group >= 0 else (t, s))
    return out


@pytest.mark.parametrize("weight", [2.0, 8.0])
def test_a_weight_of_the_target_size_opens_more(weight: float) -> None:
    forest = build_forest([random_points(200, 3)], 1)
    plan = build_plan(forest, forest, OpeningRule(1.0, target_size_weight=weight))
    assert (coverage(forest, forest, plan) == 1).all()
    assert plan.n_evaluations > build_plan(forest, forest, OpeningRule(1.0)).n_evaluations
    (pairs,) = plan.pairs
    nodes = pairs.targets >= plan.n_points
    t, s = (rows[nodes].long() - plan.n_points for rows in (pairs.targets, pairs.sources))
    low_t, high_t, low_s, high_s = (
        rows.index_select(1, of) for of in (t, s) for rows in (forest.boxes[:3], forest.boxes[3:6])
    )
    size_t, size_s = forest.boxes[-1, t], forest.boxes[-1, s]
    assert (weight * size_t + size_s < gap_squared(low_t, high_t, low_s, high_s).sqrt()).all()


def test_empty_trees_and_empty_targets() -> None:
    forest = build_forest([random_points(5, 2), random_points(0, 2), random_points(6, 2)], 1)
    plan = build_plan(forest, forest, OpeningRule(1.0))
    assert (coverage(forest, forest, plan) == 1).all()
    assert len(plan.pairs[1]) == 0
    nobody = build_forest([random_points(0, 2)], 1)
    plan = build_plan(nobody, forest, OpeningRule(1.0))
    assert plan.n_evaluations == 0
    assert plan.n_rows == 0


def test_plans_move_between_devices() -> None:
    forest = build_forest([random_points(40, 3)], 4)
    plan = build_plan(forest, forest, OpeningRule(1.0))
    moved = plan.to("cpu")
    check = partial(torch.testing.assert_close, rtol=0, atol=0)
    check(moved.pairs[0].targets, plan.pairs[0].targets)
    check(moved.members, plan.members)
    assert (moved.n_rows, moved.n_groups) == (plan.n_rows, plan.n_groups)


@pytest.mark.parametrize("n_shares", [1, 2, 3])
@pytest.mark.parametrize("most", [1, 300, 1000, 10**6])
def test_blocks_hold_every_pair_once_and_are_as_many_for_each_share(most: int, n_shares: int) -> None:
    n_targets, n_sources = 97, 41
    grid = AllPairs(n_targets, n_sources)
    indices = torch.arange(n_targets * n_sources)
    listed = IndexedPairs(indices // n_sources, indices % n_sources)

    found = [block.targets * n_sources + block.sources for block in listed.blocks(most, n_shares)]
    assert torch.equal(torch.cat(found), indices)
    table = indices.view(1, -1)
    dense = list(grid.blocks(most, n_shares))
    numbers = [
        block.gather_targets(table[:, :n_targets]) * n_sources + block.gather_sources(table[:, :n_sources])
        for block in dense
    ]
    assert torch.equal(torch.cat(numbers, dim=1).sort().values, table)
    for sizes in ([len(block) for block in found], [block.shape[1] for block in numbers]):
        assert max(sizes) <= most
        if most >= 2 * FEWEST_PAIRS:  # shorter blocks are not worth more calls
            assert len(sizes) % n_shares == 0
            assert max(sizes) - min(sizes) <= n_sources
