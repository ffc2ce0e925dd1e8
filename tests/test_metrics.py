from __future__ import annotations

import pytest
import torch
import torch.multiprocessing as mp
from helpers import free_port

from globe_lightning.metrics import CaseMeans, FieldErrors, ForceErrors, RunningMean, TargetVariances

RANKS = {"p": 0, "u": 1}


def make_case(index):
    generator = torch.Generator().manual_seed(index)
    n = 20 + 5 * index
    truth = {"p": torch.randn(n, generator=generator) + index, "u": torch.randn(n, 2, generator=generator)}
    prediction = {
        name: value + 0.3 * torch.randn(value.shape, generator=generator) + 0.1 for name, value in truth.items()
    }
    truth["p"][:3] = torch.nan
    truth["u"][4, 1] = torch.nan
    forces = {"Cd": torch.tensor(0.01 * (index % 3)), "Cl": torch.tensor(0.5 + index)}
    areas = torch.rand(n, generator=generator)
    areas[:3] = 0  # where p is unknown
    predicted = {"Cd": torch.tensor(0.01 * index), "Cl": torch.tensor(0.4 + 0.9 * index)}
    return prediction, truth, predicted, forces, areas


def evaluate(indices):
    fields, forces, losses = FieldErrors(RANKS, 2), ForceErrors(), CaseMeans(["loss"])
    for index in indices:
        prediction, truth, predicted, true, areas = make_case(index)
        fields.update(index, prediction, truth, areas)
        forces.update(index, predicted, true, {"Cl": 0.45 + index} if index else {})
        losses.update(index, {"loss": torch.tensor(float(index) ** 2)})
    return {**fields.compute(), **forces.compute(), **losses.compute()}


def test_field_errors_against_their_definitions():
    found = evaluate(range(5))
    cases = [make_case(index) for index in range(5)]
    for name in RANKS:
        mse, relative, by_case, everything = [], [], [], []
        for prediction, truth, *_ in cases:
            p, t = (f[name].double().reshape(len(f[name]), -1) for f in (prediction, truth))
            known = ~t.isnan().any(dim=1)
            p, t = p[known], t[known]
            mse.append((p - t).square().sum(dim=1).mean())
            relative.append((p - t).norm() / t.norm())
            by_case.append(mse[-1] / t.var(dim=0, correction=0).sum())
            everything.append(t)
        variance = torch.cat(everything).var(dim=0, correction=0).sum()
        expected = {
            "mse": torch.stack(mse).mean(),
            "relative_l2": torch.stack(relative).mean(),
            "mse_case_std": torch.stack(by_case).mean(),
            "r2_case_std": 1 - torch.stack(by_case).mean(),
            "mse_set_std": torch.stack(mse).mean() / variance,
            "r2_set_std": 1 - torch.stack(mse).mean() / variance,
        }
        for key, value in expected.items():
            assert float(found[f"{name}/{key}"]) == pytest.approx(float(value), rel=1e-10), (name, key)


def test_errors_by_length_component_and_area():
    found = evaluate(range(5))
    mae, components, by_area = [], [], []
    for index in range(5):
        prediction, truth, _, _, areas = make_case(index)
        known = ~truth["u"].isnan().any(dim=1)
        error, true = (prediction["u"] - truth["u"])[known].double(), truth["u"][known].double()
        mae.append(error.norm(dim=1).mean())
        components.append(error[:, 1].norm() / true[:, 1].norm())
        known = ~truth["p"].isnan()
        error, true = (prediction["p"] - truth["p"])[known].double(), truth["p"][known].double()
        by_area.append(((areas[known] * error**2).sum() / (areas[known] * true**2).sum()).sqrt())
    for name, values in (("u/mae", mae), ("u/relative_l2_y", components), ("p/relative_l2_area", by_area)):
        assert float(found[name]) == pytest.approx(float(torch.stack(values).mean()), rel=1e-6), name
    # u is known at points without area: no surface covers it.
    assert "u/relative_l2_area" not in found and "p/relative_l2_x" not in found


def test_the_latest_case_is_one_row_of_all():
    fields, losses = FieldErrors(RANKS, 2), CaseMeans(["loss"])
    alone = FieldErrors(RANKS, 2)
    for index in range(3):
        prediction, truth, _, _, areas = make_case(index)
        fields.update(index, prediction, truth, areas)
        losses.update(index, {"loss": torch.tensor(float(index))})
    alone.update(2, prediction, truth, areas)
    latest, expected = fields.latest_case(), alone.compute()
    assert {name for name in expected if "_set_std" not in name} == set(latest)
    for name, value in latest.items():
        assert value == pytest.approx(float(expected[name]), rel=1e-12)
    assert losses.latest_case() == {"loss": 2.0}


def test_one_case_without_areas_leaves_the_weighted_mean_undefined():
    metric = FieldErrors(RANKS, 2)
    for index in range(2):
        prediction, truth, _, _, areas = make_case(index)
        metric.update(index, prediction, truth, areas if index else None)
    assert "p/relative_l2_area" not in metric.compute()
    assert "p/relative_l2_area" in metric.latest_case()


def test_the_train_sets_variance_has_its_own_name():
    variances = TargetVariances(RANKS, 2)
    assert not variances.known
    for index in range(3):
        variances.update(make_case(index)[1])
    assert variances.known
    everything = torch.cat([make_case(index)[1]["p"] for index in range(3)]).double()
    variance = everything[~everything.isnan()].var(correction=0)
    assert variances.compute()["p"] == pytest.approx(float(variance), rel=1e-10)

    metric = FieldErrors(RANKS, 2)
    metric.train_variances = variances.compute()
    metric.update(0, *make_case(0)[:2])
    found = metric.compute()
    assert float(found["p/mse_train_std"]) == pytest.approx(float(found["p/mse"] / variance), rel=1e-10)
    assert "p/mse_set_std" not in found


def test_variances_survive_in_the_state_dict(tmp_path):
    variances = TargetVariances(RANKS, 2)
    variances.update(make_case(0)[1])
    torch.save(variances.state_dict(), tmp_path / "state.pt")
    restored = TargetVariances(RANKS, 2)
    restored.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert restored.known and restored.compute() == variances.compute()


def test_force_errors_against_their_definitions():
    found = evaluate(range(5))
    pairs = [(make_case(i)[2]["Cd"].double(), make_case(i)[3]["Cd"].double()) for i in range(5)]
    predicted, true = (torch.stack(part) for part in zip(*pairs, strict=True))
    error = (predicted - true).abs()
    assert float(found["forces/Cd/mae"]) == pytest.approx(float(error.mean()))
    nonzero = true != 0
    assert float(found["forces/Cd/relative_error"]) == pytest.approx(float((error / true.abs())[nonzero].mean()))
    assert float(found["forces/Cd/rmse"]) == pytest.approx(float(error.square().mean().sqrt()))
    r2 = 1 - error.square().sum() / (true - true.mean()).square().sum()
    assert float(found["forces/Cd/r2"]) == pytest.approx(float(r2))
    lifts = torch.tensor([0.4 + 0.9 * i - (0.45 + i) for i in range(1, 5)])  # the first case states no lift
    assert float(found["forces/Cl/rmse_solver"]) == pytest.approx(float(lifts.square().mean().sqrt()), rel=1e-6)
    assert "forces/Cd/rmse_solver" not in found
    assert float(found["forces/Cl/spearman"]) == pytest.approx(1.0, abs=1e-12)
    # Ranks by hand: predicted 1 2 3 4 5, true (0 1 2 0 1) -> 1.5 3.5 5 1.5 3.5.
    ranks = torch.tensor([[1.0, 2, 3, 4, 5], [1.5, 3.5, 5, 1.5, 3.5]])
    assert float(found["forces/Cd/spearman"]) == pytest.approx(float(torch.corrcoef(ranks)[0, 1]), abs=1e-6)


def test_a_case_seen_twice_counts_once():
    once, twice = evaluate([0, 1, 2, 3, 4]), evaluate([3, 0, 1, 2, 3, 4, 0])
    assert once.keys() == twice.keys()
    for key in once:
        assert float(once[key]) == pytest.approx(float(twice[key]), rel=1e-13)


def test_the_undefined_is_left_out():
    metric = FieldErrors({"p": 0, "u": 1}, 2)
    truth = {"p": torch.full((5,), torch.nan), "u": torch.ones(5, 2)}
    metric.update(0, {"p": torch.zeros(5), "u": torch.zeros(5, 2)}, truth)
    found = metric.compute()
    assert not any(name.startswith("p/") for name in found)
    # No spread, so no normalised error; no surface, so no areas.
    assert set(found) == {f"u/{name}" for name in ("mse", "mae", "relative_l2", "relative_l2_x", "relative_l2_y")}
    forces = ForceErrors()
    forces.update(0, {"Cl": torch.tensor(1.0)}, {"Cl": torch.tensor(0.0)})
    assert set(forces.compute()) == {"forces/Cl/mae", "forces/Cl/rmse"}
    assert FieldErrors(RANKS, 2).distinct_rows().shape[0] == 0


def test_force_names_must_agree():
    forces = ForceErrors()
    forces.update(0, {"Cl": torch.tensor(1.0)}, {"Cl": torch.tensor(0.0)})
    with pytest.raises(ValueError, match="Cs"):
        forces.update(1, {"Cs": torch.tensor(1.0)}, {"Cs": torch.tensor(0.0)})


def test_a_running_mean_leaves_out_what_is_not_finite():
    mean = RunningMean()
    assert not bool(torch.isfinite(mean(torch.tensor(torch.nan))))
    for value in (1.0, torch.inf, 2.0):
        assert float(mean(torch.tensor(value))) == value or value == torch.inf
    assert float(mean.compute()) == 1.5


PADDED, ONE_EMPTY = [[0, 2, 4], [1, 3, 0]], [[0, 1, 2, 3, 4], []]


def _rank(rank, port, folder):
    import os

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    for number, shares in enumerate((PADDED, ONE_EMPTY)):
        found = {name: float(value) for name, value in evaluate(shares[rank]).items()}
        torch.save(found, f"{folder}/{number}{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_processes_find_what_one_does(tmp_path):
    mp.start_processes(_rank, args=(free_port(), str(tmp_path)), nprocs=2, start_method="fork")
    alone = evaluate(range(5))
    for number, shares in enumerate((PADDED, ONE_EMPTY)):
        for rank in range(2):
            found = torch.load(tmp_path / f"{number}{rank}.pt", weights_only=True)
            # A process without cases does not know the coefficients' names.
            expected = {name for name in alone if shares[rank] or not name.startswith("forces/")}
            assert found.keys() == expected
            for name in expected:
                assert found[name] == pytest.approx(float(alone[name]), rel=1e-12, abs=1e-12), name
