"""A far field of first order: affine fields are exact, errors fall faster, gradients are right."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import Case, fields_of, gradients_of, make_case, make_model, map_mesh, relative_error, relative_l2
from syncs import count_syncs
from torch import Tensor

from globe_lightning import BoundaryMesh
from globe_lightning.models.interactions import _hand_down
from globe_lightning.models.targets import point_targets
from globe_lightning.tree import far_targets
from globe_lightning.tree.cluster_tree import build_forest
from globe_lightning.tree.far_targets import FarTargets
from globe_lightning.tree.opening_rule import OpeningRule
from globe_lightning.tree.plan import IndexedPairs, build_plan, build_plans
from globe_lightning.tree.proxies import Proxies
from globe_lightning.tree.traversal import traverse


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# Proxy points


@pytest.mark.parametrize("dims", [2, 3])
def test_proxies_have_the_mean_and_covariance_of_an_even_spread(dims: int) -> None:
    low, high = normal(5, dims) - 4, normal(5, dims, seed=1) + 4
    proxies = Proxies.of(torch.cat([low.T, high.T]))
    assert proxies.points.shape == (5, dims + 1, dims)
    for node, points in enumerate(proxies.points):
        torch.testing.assert_close(points.mean(dim=0), (low + high)[node] / 2)
        even = torch.diag((high - low)[node].square() / 12)
        torch.testing.assert_close(torch.cov(points.T, correction=0), even, atol=1e-12, rtol=1e-12)
        assert ((points > low[node]) & (points < high[node])).all()


@pytest.mark.parametrize("dims", [2, 3])
def test_affine_fields_are_reproduced(dims: int) -> None:
    slope, constant = normal(dims, 4, seed=2), normal(4, seed=3)
    low = normal(6, dims) + 50
    widths = normal(6, dims, seed=1).abs()
    widths[1, 0], widths[2] = 0, 0  # flat, and a single point
    proxies = Proxies.of(torch.cat([low.T, (low + widths).T]))
    constants, slopes = proxies.affine((proxies.points @ slope + constant).permute(2, 0, 1))
    for share in (0.0, 0.3, 1.0):
        x = low + share * widths
        found = constants + (slopes * x.T.unsqueeze(1)).sum(dim=0)
        torch.testing.assert_close(found.T, x @ slope + constant, atol=1e-10, rtol=0)


# Plans


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("leaf_size", [1, 3, 6])
@pytest.mark.parametrize("theta", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("most", [None, 1, 5, 11])
def test_an_affine_kernel_is_summed_exactly(dims: int, leaf_size: int, theta: float, most: int | None) -> None:
    """A kernel affine in the target's place acts on every point as if that had been evaluated by itself."""
    points = torch.cat([normal(90, dims), normal(30, dims, seed=1) * 0.01])
    sources = build_forest([normal(60, dims, seed=2) + 1, normal(25, dims, seed=3)], leaf_size)
    targets = build_forest([points[:50], points[50:]], leaf_size)
    plan, other = build_plans(targets, [1, 1], sources, OpeningRule(theta, far_field_order=1, max_far_targets=most))
    same, _ = build_plans(targets, [1, 1], sources, OpeningRule(theta))
    assert plan.n_proxies == dims + 1 and same.n_proxies == 1
    own_nodes = slice(0, targets.node_offsets[1])
    sizes, leaf = (targets.end - targets.start)[own_nodes], targets.first_child[own_nodes] < 0
    with_rows = (sizes > dims + 1) & (leaf | (sizes <= (most or 50)))
    assert plan.n_nodes == int(with_rows.sum()) < same.n_nodes
    assert torch.equal(plan.node_end - plan.node_start, sizes[with_rows])
    if most is None:
        assert plan.n_evaluations <= (dims + 1) * same.n_evaluations
    own = targets.points[:50]
    where = point_targets(plan, own, 2)
    buffer = torch.zeros(plan.n_rows, 2, dtype=torch.float64)
    # Source row j of a tree acts by a_j + b_j x; nodes by the sums over their points.
    expected = torch.zeros(50, 2, dtype=torch.float64)
    for tree, pairs in enumerate(plan.pairs):
        assert isinstance(pairs, IndexedPairs)
        low, high = sources.point_offsets[tree : tree + 2]
        first, last = sources.node_offsets[tree : tree + 2]
        coefficients = normal(high - low, dims + 1, 2, seed=9 + tree)
        nodes = [
            coefficients[a - low : b - low].sum(dim=0)
            for a, b in zip(sources.start[first:last], sources.end[first:last], strict=True)
        ]
        table = torch.cat([coefficients, torch.stack(nodes)])

        def act(positions: Tensor, on: Tensor) -> Tensor:
            return on[:, 0] + (positions.unsqueeze(1) @ on[:, 1:]).squeeze(1)

        t, s = pairs.targets.long(), pairs.sources.long()
        buffer.index_add_(0, t, act(where.tables[tree].T[t], table[s]))
        for total in coefficients:
            expected += act(own, total.expand(50, -1, -1))
    torch.testing.assert_close(_hand_down(plan, where, buffer), expected, atol=1e-8, rtol=0)
    assert other.n_points == 70


@pytest.mark.parametrize("leaf_size", [1, 3])
@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("limit", [2, 16, 40, "auto"])
def test_large_target_nodes_are_evaluated_in_their_largest_parts(
    leaf_size: int, order: int, limit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a plan without a limit whose far pairs are opened one by one."""
    monkeypatch.setattr(far_targets, "AUTO_MOST", 5)
    monkeypatch.setattr(far_targets, "AUTO_SHARE", 8)
    forest = build_forest([normal(130, 3), normal(70, 3, seed=1) + 9, normal(0, 3), normal(9, 3, seed=2)], leaf_size)
    sizes, n_proxies = forest.end - forest.start, 4 if order else 1
    far = traverse(forest, forest, 3.0)

    def parts(node: int) -> list[int]:
        child = int(forest.first_child[node])
        tree = int(np.searchsorted(forest.node_offsets, node, side="right")) - 1
        most = [16, 8, 5, 5][tree] if limit == "auto" else limit
        return [node] if sizes[node] <= most or child < 0 else parts(child) + parts(child + 1)

    expected: Counter[tuple[str, int, int]] = Counter()
    for target, source in zip(far.far_targets.tolist(), far.far_sources.tolist(), strict=True):
        for part in parts(target):
            if order and sizes[part] <= n_proxies:
                expected.update(("point", row, source) for row in range(int(forest.start[part]), int(forest.end[part])))
            else:
                expected["node", part, source] = n_proxies
    own = FarTargets.of(forest, n_proxies, limit)
    nodes = list(range(forest.n_nodes)) if own.nodes is None else own.nodes.tolist()
    found: Counter[tuple[str, int, int]] = Counter()
    rows, sources = own.at_rows(far.far_targets, far.far_sources)
    for row, source in set(zip(rows.tolist(), sources.tolist(), strict=True)):
        node = nodes[(row - forest.n_points) // n_proxies] if row >= forest.n_points else row
        found["node" if row >= forest.n_points else "point", node, source] += 1
    assert any(len(parts(node)) > 1 for node in far.far_targets.tolist())
    assert found == expected and found.total() == len(rows)


@pytest.mark.parametrize("order", [0, 1])
def test_a_limit_of_one_target_expands_all(order: int) -> None:
    case = make_case(3, 80, 20, 60)
    expected = fields_of(make_model(3, theta=1.0, expand_far_targets=True), case)
    found = fields_of(make_model(3, theta=1.0, far_field_order=order, max_far_targets=1), case)
    assert relative_error(found, expected) < 1e-12


@pytest.mark.parametrize("leaf_size", [1, 4])
def test_it_costs_one_more_read_of_the_device(leaf_size: int) -> None:
    forest = build_forest([normal(200, 3)], leaf_size)
    with count_syncs() as plain:
        build_plan(forest, forest, OpeningRule(1.0))
    for rule in ({"far_field_order": 1}, {"far_field_order": 1, "max_far_targets": 16}, {"max_far_targets": 16}):
        with count_syncs() as found:
            build_plan(forest, forest, OpeningRule(1.0, **rule))
        assert len(found) == len(plain) + 1


# The network


def surface_case(n: int, n_points: int = 60) -> Case:
    """Small faces of a sphere, which point outwards, and points on it."""
    case = make_case(3)
    place = normal(n, 3, seed=4)
    place = place / place.norm(dim=1, keepdim=True)
    first = torch.linalg.cross(place, normal(n, 3, seed=5))
    first = first / first.norm(dim=1, keepdim=True)
    second = torch.linalg.cross(place, first)
    corners = torch.stack([first, second * 0.9 - first * 0.5, -second * 0.9 - first * 0.5], dim=1) * n**-0.5
    data = {"heat": place[:, 0].clone(), "slip": place.flip(1)}
    wall = BoundaryMesh((place.unsqueeze(1) + corners).flatten(0, 1), torch.arange(3 * n).reshape(n, 3), data)
    points = normal(n_points, 3, seed=6)
    points = points / points.norm(dim=1, keepdim=True)
    return replace(case, prediction_points=points, boundary_meshes={"wall": wall})


def test_errors_of_the_target_side_fall_one_order_faster() -> None:
    """Beside expanded targets, which err on the source side alone, at equal opening angles and without a limit."""
    case = surface_case(400, 500)
    errors: dict[int, list[float]] = {0: [], 1: []}
    for theta in (0.5, 0.25):
        model = make_model(3, theta=theta, expand_far_targets=True, n_communication_hyperlayers=0)
        expanded = fields_of(model, case, prediction_chunk_size=None)
        for order in errors:
            options = {"theta": theta, "far_field_order": order, "max_far_targets": None}
            model = make_model(3, **options, n_communication_hyperlayers=0)
            errors[order].append(relative_l2(fields_of(model, case, prediction_chunk_size=None), expanded))
    ratios = {order: coarse / fine for order, (coarse, fine) in errors.items()}
    print(f"\nerrors at theta 0.5 and 0.25 by order: {errors}; ratios {ratios}")
    assert errors[1][0] < 0.5 * errors[0][0]
    assert ratios[1] > 1.5 * ratios[0]


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("leaf_size", [1, 3])
def test_a_small_opening_angle_is_exact(dims: int, leaf_size: int) -> None:
    case = make_case(dims, 60, 20, 50)
    exact = fields_of(make_model(dims), case)
    found = fields_of(make_model(dims, theta=1e-4, far_field_order=1, leaf_size=leaf_size), case)
    assert relative_error(found, exact) < 1e-10


@pytest.mark.parametrize("theta", [0.7, 1.5])
def test_fields_do_not_depend_on_where_the_case_stands(theta: float) -> None:
    model, case = make_model(3, theta=theta, far_field_order=1, leaf_size=2), make_case(3, 80, 20, 60)
    shift = torch.tensor([300.0, -20.0, 7.0], dtype=torch.float64)
    moved = replace(
        case,
        prediction_points=case.prediction_points + shift,
        boundary_meshes={
            kind: map_mesh(mesh, points=mesh.points + shift) for kind, mesh in case.boundary_meshes.items()
        },
    )
    assert relative_error(fields_of(model, moved), fields_of(model, case)) < 1e-8


@pytest.mark.parametrize("changes", [{"use_gradient_checkpointing": False}, {"chunk_bytes": 1 << 16}])
def test_chunks_and_recomputation_change_nothing(changes: dict[str, Any]) -> None:
    options: dict[str, Any] = {"theta": 1.0, "far_field_order": 1, "leaf_size": 2}
    case = make_case(3, 80, 20, 60)
    model, other = make_model(3, **options), make_model(3, **options, **changes)
    assert relative_error(fields_of(other, case), fields_of(model, case)) < 1e-11
    expected = gradients_of(model, case)
    for name, gradient in gradients_of(other, case).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-9 * float(expected[name].abs().max()))


@pytest.mark.parametrize("leaf_size", [1, 3])
@pytest.mark.parametrize("dims", [2, 3])
def test_gradients_are_right(dims: int, leaf_size: int) -> None:
    """Points, vertices, data, conditions and weights, by central differences with the plans held fixed."""
    model = make_model(dims, theta=1.5, far_field_order=1, leaf_size=leaf_size, smoothing_radius=1e-4)
    case = make_case(dims, 24, 8, 20)
    wall, far = case.boundary_meshes["wall"], case.boundary_meshes["far"]
    plans = model.build_plans(*case.arguments()[:2])
    weight = model.kernel_layers[1]["wall"].kernels["chord"].network.combined_mlp.layers[2].weight
    inputs = [case.prediction_points, wall.points, wall.cell_data["heat"], case.global_data["U_inf"], weight.detach()]
    inputs = [value.detach().clone().requires_grad_() for value in inputs]

    def loss(points: Tensor, vertices: Tensor, heat: Tensor, wind: Tensor, weight: Tensor) -> Tensor:
        mesh = map_mesh(wall, points=vertices, cell_data={"heat": heat, "slip": wall.cell_data["slip"]})
        arguments = (points, {"wall": mesh, "far": far}, case.reference_lengths, {**case.global_data, "U_inf": wind})
        key = "kernel_layers.1.wall.kernels.chord.network.combined_mlp.layers.2.weight"
        out = torch.func.functional_call(model, {key: weight}, arguments, {"plans": plans})
        return sum(field.square().sum() for field in (out["C_p"], out["nut"], out["C_f"], out["vel", "dU"]))

    gradients = torch.autograd.grad(loss(*inputs), inputs)
    for place, gradient in enumerate(gradients):
        direction = normal(*gradient.shape, seed=place)
        ends = []
        for sign in (1, -1):
            moved = list(inputs)
            moved[place] = inputs[place] + sign * 1e-6 * direction
            ends.append(float(loss(*moved).detach()))
        found = float((gradient * direction).sum())
        assert found == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-5, abs=1e-6 * float(gradient.norm())), place


def test_a_loss_on_a_slope_can_be_trained() -> None:
    model, case = make_model(2, theta=1.5, far_field_order=1), make_case(2, 60, 20, 40)
    case.prediction_points = case.prediction_points.clone().requires_grad_()
    plans = model.build_plans(*case.arguments()[:2])
    weight = model.kernel_layers[0]["wall"].kernels["chord"].network.combined_mlp.layers[0].weight

    def slope() -> Tensor:
        pressure = fields_of(model, case, plans=plans)["C_p"]
        (gradient,) = torch.autograd.grad(pressure.sum(), case.prediction_points, create_graph=True)
        return gradient.square().sum()

    slope().backward()
    ends = []
    for sign in (1, -1):
        with torch.no_grad():
            weight[2, 3] += sign * 1e-5
        ends.append(float(slope().detach()))
        with torch.no_grad():
            weight[2, 3] -= sign * 1e-5
    assert float(weight.grad[2, 3]) == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-4)


def test_bf16_products_leave_the_far_field_in_float32() -> None:
    case = make_case(3, 150, 30, 80, dtype=torch.float32)
    model = make_model(3, torch.float32, theta=1.0, far_field_order=1)
    expected = fields_of(model, case)
    with torch.autocast("cpu", torch.bfloat16):
        found = fields_of(model, case)
        sum(field.square().sum() for field in found.values()).backward()
    assert all(field.dtype == torch.float32 for field in found.values())
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    # What bf16 does to exact sums of the same case.
    plain = make_model(3, torch.float32, theta=0.0)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = fields_of(plain, case)
    assert relative_l2(found, expected) < 3 * relative_l2(rounded, fields_of(plain, case))


def test_the_network_reads_nothing_back_once_the_plans_exist() -> None:
    model, case = make_model(3, theta=1.0, leaf_size=3, far_field_order=1), make_case(3, 80, 20, 60)
    plans = model.build_plans(case.prediction_points, case.boundary_meshes)
    with count_syncs() as found:
        sum(field.square().sum() for field in fields_of(model, case, plans=plans).values()).backward()
    assert found == []


def test_jumps_between_neighbors_shrink() -> None:
    """Between points that all but coincide, where they stand on both sides of a node's border."""
    case = surface_case(1500, 1500)
    near = case.prediction_points + 1e-4 * normal(1500, 3, seed=8)
    case = replace(case, prediction_points=torch.cat([case.prediction_points, near]))
    jumps: dict[int, dict[str, float]] = {}
    for order in (0, 1):
        model = make_model(3, far_field_order=order, theta=1.0, n_communication_hyperlayers=0)
        with torch.no_grad():
            fields = fields_of(model, case, prediction_chunk_size=None)
        jumps[order] = {name: float((f[:1500] - f[1500:]).abs().max() / f.std()) for name, f in fields.items()}
    print(f"\nlargest jump between neighbors by order: {jumps}")
    assert all(jumps[1][name] < 0.6 * jumps[0][name] for name in jumps[0])
    assert all(jumps[1][name] < jumps[0][name] / 4 for name in ("C_f", "vel.dU"))
