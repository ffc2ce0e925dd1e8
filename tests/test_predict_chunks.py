"""Prediction in bounded memory: chunks, one at a time."""

from __future__ import annotations

import gc

import pytest
import torch
from conftest import make_sample
from helpers import fields_of, make_case, make_model, relative_error
from test_module import module

from globe_lightning.fields import flatten_data


def chunked(model, case, size, pointwise=True):
    chunks = model.predict_chunks(*case.arguments(), prediction_chunk_size=size, pointwise=pointwise)
    parts = [flatten_data(part) for part in chunks]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}, parts


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("size", [1, 7, 31, 40, None, "auto"])
def test_exact_predictions_do_not_depend_on_chunks(dims, size):
    model, case = make_model(dims), make_case(dims)
    found, parts = chunked(model, case, size)
    assert relative_error(found, fields_of(model, case, prediction_chunk_size=None)) < 1e-12
    assert all(not value.requires_grad for value in found.values())
    if size == 7:
        assert [len(part["C_p"]) for part in parts] == [7, 7, 7, 7, 3]


@pytest.mark.parametrize("expand", [False, True])
def test_with_a_tree_they_equal_the_forward_pass_in_the_same_chunks(expand):
    model, case = make_model(3, theta=1.0, expand_far_targets=expand), make_case(3, 60, 20, 101)
    found, _ = chunked(model, case, 16, pointwise=False)
    assert relative_error(found, fields_of(model, case, prediction_chunk_size=16)) < 1e-12


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("leaf_size", [1, 4])
def test_pointwise_predictions_depend_on_their_own_point_only(dims, leaf_size):
    model, case = make_model(dims, theta=1.0, leaf_size=leaf_size), make_case(dims, 60, 20, 101)
    everything, _ = chunked(model, case, None)
    shuffle = torch.randperm(101, generator=torch.Generator().manual_seed(0))
    for size in (1, 7, 16, 100, "auto"):
        assert relative_error(chunked(model, case, size)[0], everything) < 1e-12
    case.prediction_points = case.prediction_points[shuffle[:40]]
    some, _ = chunked(model, case, 11)
    assert relative_error(some, {name: value[shuffle[:40]] for name, value in everything.items()}) < 1e-12
    dual, _ = chunked(model, case, 11, pointwise=False)
    assert relative_error(dual, some) > 1e-6, "else the test says nothing"


def test_pointwise_predictions_become_exact_as_theta_falls():
    case, errors = make_case(3, 60, 20, 101), []
    exact, _ = chunked(make_model(3, theta=0.0, n_communication_hyperlayers=0), case, None)
    for theta in (1.0, 0.5, 0.2, 1e-3):
        # The faces among themselves are exact, so that only the last layer's rule is seen.
        model = make_model(3, theta=theta, n_communication_hyperlayers=0)
        errors.append(relative_error(chunked(model, case, 40)[0], exact))
    assert errors[0] > errors[1] > errors[2] > errors[3]
    assert errors[3] < 1e-12


def test_faces_communicate_once_and_one_plan_lives_at_a_time(monkeypatch):
    from globe_lightning.models import globe

    model, case = make_model(3, theta=1.0), make_case(3, 60, 20, 101)
    targets, alive = [], []
    original = globe.evaluate_plan

    def spy(plan, *args, **options):
        targets.append(plan.n_points)
        alive.append(sum(type(item).__name__ == "PredictionPlan" for item in gc.get_objects()))
        return original(plan, *args, **options)

    monkeypatch.setattr(globe, "evaluate_plan", spy)
    for _ in model.predict_chunks(*case.arguments(), prediction_chunk_size=25):
        pass
    assert targets == [80, 80, 25, 25, 25, 25, 1]
    assert max(alive) == 1


def test_no_points_and_wrong_sizes():
    model, case = make_model(2), make_case(2)
    case.prediction_points = case.prediction_points[:0]
    assert list(model.predict_chunks(*case.arguments())) == []
    with pytest.raises(ValueError, match="prediction_chunk_size"):
        next(model.predict_chunks(*case.arguments(), prediction_chunk_size=0))


def test_the_callers_autocast_stays_its_own():
    model, case = make_model(2, torch.float32), make_case(2, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in model.predict_chunks(*case.arguments(), prediction_chunk_size=10):
            assert torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("size", [7, None])
def test_the_module_gathers_all_points(size):
    model, sample = module(prediction_chunk_size=size), make_sample(2)
    found = model.predict_fields(sample, device="cpu", progress=True)
    with torch.no_grad():
        expected = flatten_data(model(sample))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def test_a_bad_number_names_the_case_in_prediction():
    sample = make_sample(3)
    sample.prediction_points[5, 0] = torch.nan
    with pytest.raises(ValueError, match="case3"):
        module().predict_fields(sample)
