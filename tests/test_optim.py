from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from torch import nn

from globe_lightning.optim import MuonRAdam, PlateauSchedule, StepSchedule, build_optimizer, split_parameters


def network(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 8), nn.SiLU(), nn.Linear(8, 2))
    model.scale = nn.Parameter(torch.ones(1, 1))
    return model


def loss_of(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(16, 3, generator=generator)
    return ((model(x) * model.scale - x[:, :2] ** 2) ** 2).mean()


def run(model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def test_matrices_and_others_are_told_apart():
    model = network()
    matrices, others = split_parameters(model.parameters())
    assert {tuple(p.shape) for p in matrices} == {(8, 3), (2, 8)}
    assert {tuple(p.shape) for p in others} == {(8,), (2,), (1, 1)}


def test_the_facade_equals_muon_and_radam_side_by_side():
    ours, theirs = network(), network()
    facade = MuonRAdam(ours.parameters(), lr=1e-2, weight_decay=1e-2)
    matrices, others = split_parameters(theirs.parameters())
    pair = [
        torch.optim.Muon(matrices, lr=1e-2, weight_decay=1e-2, adjust_lr_fn="match_rms_adamw"),
        torch.optim.RAdam(others, lr=1e-2, weight_decay=1e-2, decoupled_weight_decay=True),
    ]
    for step in range(10):
        facade.zero_grad()
        loss_of(ours, step).backward()
        facade.step()
        for optimizer in pair:
            optimizer.zero_grad()
        loss_of(theirs, step).backward()
        for optimizer in pair:
            optimizer.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_the_closure_is_called_once_and_its_result_returned():
    model = network()
    optimizer = MuonRAdam(model.parameters())
    calls = []

    def closure():
        calls.append(1)
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    assert len(calls) == 1


@pytest.mark.parametrize("name", ["muon", "radam", "adamw"])
def test_a_restart_changes_nothing(name, tmp_path):
    straight, stopped = network(), network()
    first = build_optimizer(name, straight.parameters(), 1e-2, 1e-3)
    run(straight, first, 12)
    second = build_optimizer(name, stopped.parameters(), 1e-2, 1e-3)
    run(stopped, second, 6)
    torch.save({"model": stopped.state_dict(), "optimizer": second.state_dict()}, tmp_path / "state.pt")
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    resumed = network(1)
    resumed.load_state_dict(saved["model"])
    third = build_optimizer(name, resumed.parameters(), 1e-2, 1e-3)
    third.load_state_dict(saved["optimizer"])
    run(resumed, third, 6, first=6)
    for mine, other in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("name", ["muon", "radam", "adamw"])
def test_hyperparameters_come_from_the_constructor_not_from_the_saved_state(name):
    model = network()
    old = build_optimizer(name, model.parameters(), 1e-2, 0.5)
    run(model, old, 2)
    new = build_optimizer(name, model.parameters(), 3e-3, 0.25)
    new.load_state_dict(copy.deepcopy(old.state_dict()))
    assert all(group["lr"] == 3e-3 and group["weight_decay"] == 0.25 for group in new.param_groups)
    before = [p.clone() for p in model.parameters()]
    for group in new.param_groups:
        group["lr"] = 0.0
    run(model, new, 1)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_the_state_of_another_optimizer_is_refused():
    model = network()
    with pytest.raises(ValueError, match="another optimizer"):
        MuonRAdam(model.parameters()).load_state_dict(build_optimizer("radam", model.parameters(), 1, 0).state_dict())
    with pytest.raises(ValueError, match="optimizer: expected one of"):
        build_optimizer("sgd", model.parameters(), 1, 0)


def rate(optimizer):
    return optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("steps_per_call", [1, 7, 100])
def test_patience_counts_steps_whatever_the_length_of_an_epoch(steps_per_call):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = PlateauSchedule(optimizer, patience_steps=200, min_lr_factor=0.25)
    lowered = {}
    for step in range(0, 1001, steps_per_call):
        schedule.step(1.0, step)
        lowered.setdefault(rate(optimizer), step)
    assert list(lowered) == [1.0, 0.5, 0.25]
    assert 200 <= lowered[0.5] <= 200 + steps_per_call
    assert 200 <= lowered[0.25] - lowered[0.5] <= 200 + steps_per_call


def test_improvement_must_pass_the_threshold_and_nan_never_does():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = PlateauSchedule(optimizer, patience_steps=10, threshold=0.1)
    schedule.step(1.0, 0)
    schedule.step(0.95, 5)  # too little
    assert schedule.best == 1.0
    schedule.step(0.8, 9)
    assert (schedule.best, schedule.best_step) == (0.8, 9)
    schedule.step(float("nan"), 15)
    assert schedule.best == 0.8
    schedule.step(float("nan"), 19)
    assert rate(optimizer) == 0.5


def test_a_restored_plateau_keeps_its_finds_and_takes_new_settings():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    old = PlateauSchedule(optimizer, patience_steps=10)
    old.step(1.0, 0)
    old.step(1.0, 10)
    state = copy.deepcopy(old.state_dict())
    assert all(isinstance(value, (int, float)) for value in state.values())
    fresh = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    new = PlateauSchedule(fresh, patience_steps=1000)
    new.load_state_dict(state)
    assert rate(fresh) == pytest.approx(0.05) and new.patience_steps == 1000 and new.best == 1.0
    new.step(1.0, 500)
    assert rate(fresh) == pytest.approx(0.05)


def test_warm_up_and_cosine():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    schedule = StepSchedule(optimizer, warmup_steps=4, total_steps=104, min_lr_factor=0.1)
    rates = []
    for step in range(120):
        schedule.step(step)
        rates.append(rate(optimizer))
    assert rates[0] == pytest.approx(0.4) and rates[4] == pytest.approx(2.0)
    assert all(a < b for a, b in pairwise(rates[:5]))
    assert all(a > b for a, b in pairwise(rates[4:105]))
    assert rates[54] == pytest.approx(1.1) and rates[-1] == pytest.approx(0.2)


def test_the_constant_schedule_is_constant_after_its_warm_up():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    schedule = StepSchedule(optimizer, warmup_steps=2)
    assert rate(optimizer) < 2.0
    for step in (2, 1000):
        schedule.step(step)
        assert rate(optimizer) == 2.0
