from __future__ import annotations

import pytest
import torch

from globe_lightning.losses import complete_scales, field_loss, field_losses


def by_hand(prediction, truth, scale):
    total = 0.0
    for p, t in zip(prediction.reshape(len(truth), -1).tolist(), truth.reshape(len(truth), -1).tolist(), strict=True):
        if any(value != value for value in t):
            continue
        x = sum((a - b) ** 2 for a, b in zip(p, t, strict=True)) ** 0.5 / scale
        total += 2 * (0.5 * x * x if x <= 1 else x - 0.5)
    return total / len(truth)


@pytest.mark.parametrize("shape", [(50,), (50, 2), (50, 3)])
@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
def test_agrees_with_the_formula_point_by_point(shape, scale):
    torch.manual_seed(0)
    prediction, truth = 2 * torch.randn(shape), torch.randn(shape)
    truth[::7] = torch.nan
    assert field_loss(prediction, truth, scale).item() == pytest.approx(by_hand(prediction, truth, scale), rel=1e-5)


def test_unknown_truth_counts_zero_and_gives_no_gradient():
    prediction = torch.randn(10, 2, requires_grad=True)
    truth = torch.randn(10, 2)
    truth[3, 1] = torch.nan
    field_loss(prediction, truth, 0.5).backward()
    assert torch.isfinite(prediction.grad).all()
    assert (prediction.grad[3] == 0).all() and (prediction.grad[4] != 0).all()


def test_no_known_truth_keeps_the_graph_alive():
    prediction = torch.randn(10, requires_grad=True)
    loss = field_loss(prediction, torch.full((10,), torch.nan))
    loss.backward()
    assert loss.item() == 0 and (prediction.grad == 0).all()


def test_a_perfect_prediction_has_a_finite_gradient():
    truth = torch.randn(10, 2)
    prediction = truth.clone().requires_grad_()
    field_loss(prediction, truth).backward()
    assert torch.isfinite(prediction.grad).all()


def test_scales():
    assert complete_scales({"b": 2}, ["a", "b"]) == {"a": 1.0, "b": 2.0}
    with pytest.raises(ValueError, match=r"loss_scales: \['c'\]"):
        complete_scales({"c": 1}, ["a"])
    for bad in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"loss_scales.*'a'.*positive"):
            complete_scales({"a": bad}, ["a"])


def test_missing_and_misshapen_fields_are_named():
    fields = {"a": torch.zeros(4), "b": torch.zeros(4, 2)}
    assert field_losses(fields, fields, {"a": 1.0, "b": 1.0}).keys() == fields.keys()
    with pytest.raises(ValueError, match="targets lack the field 'b'"):
        field_losses(fields, {"a": torch.zeros(4)}, {"a": 1.0, "b": 1.0})
    with pytest.raises(ValueError, match=r"field 'b'.*\(4, 2\) and \(4, 3\)"):
        field_losses(fields, {"a": torch.zeros(4), "b": torch.zeros(4, 3)}, {"a": 1.0, "b": 1.0})
