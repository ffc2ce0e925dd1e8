"""The model against stored vectors of an independent implementation: outputs, gradients, plans."""

from __future__ import annotations

import pytest
import torch
from helpers import golden_cases, load_golden
from torch import Tensor

from globe_lightning.tree.plan import InteractionPlan

CASES = golden_cases()


def assert_fields_agree(found: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Deviations from each field's mean within 1e-9 (1e-4 and two units in the last place) of its variation."""
    assert set(found) == set(expected)
    for name, truth in expected.items():
        assert found[name].shape == truth.shape
        assert found[name].dtype == dtype
        error = ((found[name] - found[name].mean(0)) - (truth - truth.mean(0))).abs().max()
        deviation = (truth - truth.mean(0)).square().mean().sqrt()
        if dtype == torch.float64:
            tolerance = 1e-9 * deviation
            torch.testing.assert_close(found[name].mean(0), truth.mean(0), rtol=1e-9, atol=0)
        else:
            tolerance = 1e-4 * deviation + 2 * torch.finfo(dtype).eps * truth.abs().max()
        assert error <= tolerance, f"{name}: {error / deviation:.1e} of the standard deviation"


@pytest.mark.parametrize(("name", "precision"), CASES)
def test_outputs_and_gradients(name: str, precision: str) -> None:
    case = load_golden(name, precision)
    model = case.model()
    outputs = case.predict(model, None)
    assert_fields_agree({key: value.detach() for key, value in outputs.items()}, case.expected["outputs"], case.dtype)
    sum(value.square().sum() for value in outputs.values()).backward()
    tolerance = 1e-7 if case.dtype == torch.float64 else 1e-3
    parameters = dict(model.named_parameters())
    assert set(parameters) == set(case.gradients) | set(case.expected["params_without_grad"])
    for key, truth in case.gradients.items():
        gradient = parameters[key].grad
        assert gradient is not None, key
        error = (gradient.double() - truth.double()).norm()
        assert error <= tolerance * truth.double().norm(), f"{key}: {error / truth.norm():.1e}"
    for key in case.expected["params_without_grad"]:
        assert parameters[key].grad is not None, key
        assert not parameters[key].grad.any(), key
    with torch.no_grad():
        chunked = case.predict(model, 40)
    assert_fields_agree(chunked, case.expected["outputs_chunk40"], case.dtype)


@pytest.mark.parametrize(("name", "precision"), [case for case in CASES if "theta0_" not in f"{case[0]}_"])
def test_plan_counts(name: str, precision: str) -> None:
    case = load_golden(name, precision)
    plans = case.model().build_plans(case.inputs["prediction_points"], case.meshes(), None)
    forest, kinds = plans.forest, plans.kinds
    counts = count_pairs(plans.communication, forest.point_offsets, forest.node_offsets, forest.point_offsets)
    expected = case.expected["plan_counts"]["comm"]
    assert len(expected) == len(kinds) ** 2
    for (target, source), found in counts.items():
        assert_counts_agree(found, expected[f"{kinds[target]}<-{kinds[source]}"])
    plan = plans.prediction.plan
    counts = count_pairs(plan, (0, plan.n_points), (0, plan.n_nodes), forest.point_offsets)
    for (_, source), found in counts.items():
        assert_counts_agree(found, case.expected["plan_counts"]["pred"][kinds[source]])


def assert_counts_agree(found: dict[str, int], expected: dict[str, int]) -> None:
    """(far, near) entries that serve no target may be missing; all else is exact."""
    found, expected = dict(found), dict(expected)
    assert found.pop("n_fn") <= expected.pop("n_fn")
    assert found == expected


def count_pairs(
    plan: InteractionPlan, points: tuple[int, ...], nodes: tuple[int, ...], source_points: tuple[int, ...]
) -> dict[tuple[int, int], dict[str, int]]:
    """How many pairs of each kind stand between each target tree and source tree."""
    out = {}
    for source, pairs in enumerate(plan.pairs):
        t, s = pairs.targets.long(), pairs.sources.long()
        from_point = s < source_points[source + 1] - source_points[source]
        node_of = torch.where(t >= plan.first_group, -1, t - plan.n_points)
        nodes_of_groups = torch.cat([plan.group_nodes, plan.group_nodes.new_full((1,), -1)])
        group_node = nodes_of_groups[torch.where(t >= plan.first_group, t - plan.first_group, -1)]
        is_group = t >= plan.first_group
        for target in range(len(points) - 1):
            on_point = (t >= points[target]) & (t < points[target + 1])
            on_node = (t >= plan.n_points) & ~is_group & (node_of >= nodes[target]) & (node_of < nodes[target + 1])
            on_group = is_group & (group_node >= nodes[target]) & (group_node < nodes[target + 1])
            out[target, source] = {
                "n_near": int((on_point & from_point).sum()),
                "n_nf": int((on_point & ~from_point).sum()),
                "n_fn": int((on_group & from_point).sum()),
                "n_far_nodes": int((on_node & ~from_point).sum()),
            }
    return out


def test_state_keys_are_the_references() -> None:
    for name, precision in CASES:
        case = load_golden(name, precision)
        assert set(case.model().state_dict()) == {key for key in case.state if not key.endswith("._one")}
