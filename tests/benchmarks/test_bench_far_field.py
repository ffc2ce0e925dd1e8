"""The scripts that compare far fields run, and write what they promise."""

from __future__ import annotations

import json
from pathlib import Path

import cases
import derivatives
import far_field
import far_field_training
import pytest
import rules
import torch

from globe_lightning import GLOBE


def test_a_small_front(tmp_path: Path) -> None:
    sizes = [
        "--faces",
        "240",
        "--points",
        "40",
        "--pairs",
        "20",
        "--floor",
        "2",
        "--hidden",
        "8",
        "--thetas",
        "0.6",
        "1.2",
    ]
    found = far_field.main([*sizes, "--timed", "1.2", "--out", str(tmp_path / "front")])
    of = {(row["far field"], row["theta"]): row for row in found}
    assert set(of) == {(name, theta) for name in far_field.FIELDS for theta in (0.6, 1.2)}
    for theta in (0.6, 1.2):
        constant, affine, expanded = (of[name, theta] for name in ("order 0", "order 1", "expanded"))
        assert constant["evaluations"] < affine["evaluations"] < expanded["evaluations"]
        assert expanded["error"] < constant["error"] and affine["error"] < constant["error"]
    assert {row["far field"] for row in found if "step_seconds" in row} == set(far_field.FIELDS) - {"pointwise"}
    assert {row["theta"] for row in found if "forward_seconds" in row} == {1.2}
    assert {path.name for path in tmp_path.iterdir()} == {"front.md", "front.json", "front.png"}
    assert json.loads((tmp_path / "front.json").read_text(encoding="utf-8")) == found


@torch.no_grad()
def test_sampled_points_see_all_that_acts_on_them() -> None:
    config = {**cases.CAR, "hidden_layer_sizes": [8], "theta": 0.0, "expand_far_targets": False}
    model = GLOBE(**config).double()
    everywhere, points, meshes, lengths = rules.problem(240, 30, 2)
    source = rules.like(model, config, theta=1.0).double()
    faces = source._planner(points.device).plan_faces(source._checked_meshes(points, meshes, None, None))[0]
    tables = source._communicate(meshes, lengths, None, faces, points.device, True)
    everywhere = everywhere.double()
    chosen = torch.arange(len(everywhere)) % 7 == 0
    for changes in far_field.FIELDS.values():
        order, plan = rules.planned(everywhere, faces.forest, 1.0, changes)
        few = far_field.restricted(plan, chosen.index_select(0, order))
        assert few.n_evaluations < plan.n_evaluations
        whole, part = (rules.fields_at(model, everywhere, order, p, tables) for p in (plan, few))
        for name, value in whole.items():
            torch.testing.assert_close(part[name][chosen], value[chosen], rtol=1e-9, atol=1e-9)
    # The last is of expanded targets.
    order, plan = rules.planned(everywhere, faces.forest, 1.0, {})
    own, n_evaluations = far_field.expanded(plan, chosen.index_select(0, order))
    assert n_evaluations == rules.planned(everywhere, faces.forest, 1.0, changes)[1].n_evaluations
    assert own.n_evaluations == few.n_evaluations
    for name, value in rules.fields_at(model, everywhere, order, own, tables).items():
        torch.testing.assert_close(value[chosen], whole[name][chosen], rtol=1e-9, atol=1e-9)


def test_three_derivatives_are_one(capsys: pytest.CaptureFixture[str]) -> None:
    pairs = derivatives.make(9, hidden=8, n_layers=2, dtype=torch.float64)
    found = derivatives.with_tangents(pairs, pairs.displacement)
    for together in (True, False):
        for value, expected in zip(found, derivatives.forward_mode(pairs, pairs.displacement, together), strict=True):
            assert expected.abs().max() > 1e-3
            torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-12)
    times = derivatives.main(["--pairs", "16", "--hidden", "8", "--repetitions", "1"])
    assert "| proxies |" in capsys.readouterr().out and min(times.values()) > 0


def test_proxies_drawn_in_yield_the_tangent(tmp_path: Path) -> None:
    sizes = ["--faces", "96", "--points", "20", "--pairs", "5", "--floor", "2", "--hidden", "4", "--thetas", "1"]
    sizes += ["--timed", "--far-fields", "order 0", "order 1", "--out", str(tmp_path / "front")]
    (constant, affine), (same, tangent) = (far_field.main([*sizes, *more]) for more in ([], ["--reach", "0.02"]))
    assert constant["error"] == same["error"] and affine["error"] != tangent["error"] < constant["error"]


@pytest.mark.slow
def test_a_short_comparison_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sizes = ["--seconds", "0.5", "--seeds", "0", "--faces", "60", "--points", "60", "--timed-steps", "1"]
    found = far_field_training.main([*sizes, "--out", str(tmp_path / "training")])
    assert [run["rule"] for run in found["runs"]] == list(far_field_training.RULES)
    assert all(0 < run["own"]["loss"] < 10 for run in found["runs"])
    assert {path.suffix for path in tmp_path.glob("training*")} == {".md", ".json", ".png"}
