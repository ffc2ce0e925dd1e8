"""Data-dependent operations: each makes the host wait for the device, so they are counted and bounded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import fields_of, make_case, make_model
from syncs import count_syncs

from globe_lightning.tree.cluster_tree import build_forest
from globe_lightning.tree.opening_rule import OpeningRule
from globe_lightning.tree.plan import build_plan
from globe_lightning.tree.traversal import traverse
from globe_lightning.validation import NumberChecks

X = torch.tensor([1.0, 0.0, 2.0])
SYNCS: dict[str, Callable[[], Any]] = {
    "item": lambda: X[0].item(),
    "float": lambda: float(X.sum()),
    "truth": lambda: bool(X.any()),
    "tolist": lambda: X.tolist(),
    "numpy": lambda: X.numpy(),
    "nonzero": lambda: X.nonzero(),
    "where with one argument": lambda: torch.where(X > 0),
    "argwhere": lambda: torch.argwhere(X),
    "masked_select": lambda: X.masked_select(X > 0),
    "mask indexing": lambda: X[X > 0],
    "mask assignment": lambda: X.clone().__setitem__(X > 0, torch.tensor([5.0, 6.0])),
    "unique": lambda: X.unique(),
    "unique_consecutive": lambda: X.unique_consecutive(),
    "unsized repeat_interleave": lambda: torch.repeat_interleave(torch.tensor([1, 2])),
    "unsized repeat_interleave of values": lambda: X.repeat_interleave(torch.tensor([1, 2, 0])),
    "bincount": lambda: torch.tensor([1, 2]).bincount(),
    "equal": lambda: torch.equal(X, X),
    "allclose": lambda: torch.allclose(X, X),
}


@pytest.mark.parametrize("name", SYNCS)
def test_the_counter_sees(name: str) -> None:
    with count_syncs() as found:
        SYNCS[name]()
    assert found


def test_the_counter_lets_other_work_pass() -> None:
    rows = torch.tensor([0, 1])
    with count_syncs() as found:
        X[rows] + X.index_select(0, rows)
        torch.where(X > 0, X, 0).sum()
        torch.repeat_interleave(rows, output_size=1)
        X.clone().index_add_(0, rows, X[:2]).cumsum(0).argsort(stable=True)
    assert found == []


def test_the_counter_sees_backward_passes_and_recomputation() -> None:
    class Peek(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * gradient.sum().item()

    with count_syncs() as found:
        y = torch.utils.checkpoint.checkpoint(Peek.apply, X.clone().requires_grad_(), use_reentrant=False)
        y.sum().backward()
    assert found == ["aten::_local_scalar_dense"]


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("leaf_size", [1, 4])
def test_building_trees(dims: int, leaf_size: int) -> None:
    sets = [torch.rand(n, dims) for n in (300, 77, 1)]
    with count_syncs() as found:
        build_forest(sets, leaf_size)
    assert found == []


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("leaf_size", [1, 4])
@pytest.mark.parametrize("expand", [False, True])
def test_traversal_at_most_one_a_level(dims: int, leaf_size: int, expand: bool) -> None:
    targets = build_forest([torch.rand(200, dims)], leaf_size)
    sources = build_forest([torch.rand(n, dims) for n in (300, 40, 7)], leaf_size)
    # Each step goes down a level on one side at least.
    levels = targets.n_levels + sources.n_levels
    with count_syncs() as found:
        traverse(targets, sources, 1.0)
    assert len(found) <= levels
    with count_syncs() as found:
        build_plan(targets, sources, OpeningRule(1.0, expand))
    assert len(found) <= levels + 4
    with count_syncs() as found:
        build_plan(targets, sources, OpeningRule(0.0, expand))
    assert found == []


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("leaf_size", [1, 4])
@pytest.mark.parametrize("expand", [False, True])
def test_all_plans_of_a_sample_together(dims: int, leaf_size: int, expand: bool) -> None:
    """Faces and points in several chunks: one traversal, and one read for the checks of the numbers."""
    model = make_model(dims, theta=1.0, leaf_size=leaf_size, expand_far_targets=expand)
    case = make_case(dims, 150, 40, 120)
    with count_syncs() as found:
        plans = model.build_plans(case.prediction_points, case.boundary_meshes, 50)
    assert 0 < len(found) <= 2 * plans.forest.n_levels + 5


def test_checking_numbers_is_one() -> None:
    checks = NumberChecks()
    with count_syncs() as found:
        for name in ("a", "b", "c"):
            checks.finite(torch.rand(5), name)
        checks.judge()
    assert len(found) == 1


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("theta", [0.0, 1.0])
@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("expand", [False, True])
def test_the_network_has_none_once_the_plans_exist(dims: int, theta: float, checkpointing: bool, expand: bool) -> None:
    model = make_model(
        dims, theta=theta, leaf_size=3, expand_far_targets=expand, use_gradient_checkpointing=checkpointing
    )
    case = make_case(dims)
    plans = model.build_plans(case.prediction_points, case.boundary_meshes, 16)
    with count_syncs() as found:
        fields = fields_of(model, case, plans=plans)
        sum(field.square().sum() for field in fields.values()).backward()
    assert found == []
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_network_has_none_under_autocast_or_without_gradients() -> None:
    model, case = make_model(3, torch.float32, theta=1.0), make_case(3, dtype=torch.float32)
    plans = model.build_plans(case.prediction_points, case.boundary_meshes)
    with count_syncs() as found:
        with torch.no_grad():
            fields_of(model, case, plans=plans)
        with torch.autocast("cpu", torch.bfloat16):
            fields = fields_of(model, case, plans=plans)
        sum(field.sum() for field in fields.values()).backward()
    assert found == []
