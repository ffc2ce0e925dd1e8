"""The benchmarks themselves, tried on tiny sizes: they run, and what they measure is there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import cases
import compare
import gpu
import measure
import pytest
import rules
import scaling
import settings
import sides
import throughput_cost
import torch
from sides import one_thread
from syncs import count_operations

from globe_lightning import GLOBE, BoundaryMesh
from globe_lightning.fields import flatten_data
from globe_lightning.memory import GPU_CHUNK_BYTES
from globe_lightning.models import interactions
from globe_lightning.models.multiscale import SourceTable
from globe_lightning.models.pair_network import Weights


@pytest.mark.parametrize("n_faces", [96, 500, 1000])
def test_the_body_is_closed_and_its_normals_point_outward(n_faces: int) -> None:
    mesh = BoundaryMesh(*cases.closed_body(n_faces))
    assert mesh.n_faces == n_faces
    directed = mesh.normals * mesh.areas.unsqueeze(1)
    assert directed.sum(dim=0).norm() < 1e-4 * mesh.areas.sum()
    # The divergence theorem: the volume is positive, and of a car's size.
    assert 4 < float((directed * mesh.centroids).sum() / 3) < 4.6 * 1.9 * 1.4
    with pytest.raises(ValueError, match="n_faces"):
        cases.closed_body(2 * 97)


def test_floors_and_airfoil() -> None:
    _, geometry = cases.make(3, 500)
    kinds = {kind: BoundaryMesh(*mesh) for kind, mesh in geometry.meshes.items()}
    assert kinds["slip_floor"].n_faces == kinds["no_slip_floor"].n_faces == 722
    assert (kinds["slip_floor"].normals[:, 2] > 0.999).all()
    assert float(kinds["slip_floor"].areas.sum()) == pytest.approx(22 * (10 - 2.339), rel=1e-4)
    _, geometry = cases.make(2, 100)
    mesh = BoundaryMesh(*geometry.meshes["no_slip"])
    directed = mesh.normals * mesh.areas.unsqueeze(1)
    assert float((directed * mesh.centroids).sum().abs() / 2) == pytest.approx(0.0822, rel=2e-2)  # its area
    assert len(geometry.points) == 2048


def test_products_are_seen_and_done_again() -> None:
    a, b = torch.rand(4, 3, requires_grad=True), torch.rand(5, 3)
    found = measure.record_products(lambda: (a @ b.t()).sum().backward())
    assert sum(found.values()) == 2
    measure.bare_products(found)()
    assert measure.timed(lambda: torch.ones(1 << 22).sum())["peak_mb"] > 10


@pytest.mark.parametrize(
    ("dims", "n_faces", "of_reference"),
    [
        (3, 500, 112_325),
        (2, 500, 43_967),
        pytest.param(3, 2000, 114_773, marks=pytest.mark.slow),
        pytest.param(2, 1000, 59_420, marks=pytest.mark.slow),
    ],
)
def test_a_training_step_dispatches_a_tenth_of_the_references_operations(
    dims: int, n_faces: int, of_reference: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Narrow layers in as many chunks as the wide ones take on a GPU."""
    config, geometry = cases.make(dims, n_faces)
    width, bytes_per_pair = config["hidden_layer_sizes"][0], interactions.bytes_per_pair

    def as_of_wide(table: SourceTable, *arguments: object) -> int:
        first, matrices, biases, last, last_bias = table.weights
        n_branches, n_columns, _ = first.shape
        wide = Weights(
            torch.empty(n_branches, n_columns, width, device="meta"),
            [torch.empty(n_branches, width, width, device="meta") for _ in matrices],
            [torch.empty(n_branches, 1, width, device="meta") for _ in biases],
            torch.empty(n_branches, last.shape[1], width, device="meta"),
            last_bias,
        )
        return bytes_per_pair(replace(table, weights=wide), *arguments)

    monkeypatch.setattr(interactions, "bytes_per_pair", as_of_wide)
    layers = [4] * len(config["hidden_layer_sizes"])
    model = GLOBE(**{**config, "hidden_layer_sizes": layers, "chunk_bytes": GPU_CHUNK_BYTES})
    meshes = {kind: BoundaryMesh(*mesh) for kind, mesh in geometry.meshes.items()}
    with one_thread(), count_operations() as found:
        fields = flatten_data(model(geometry.points, meshes, geometry.lengths, geometry.conditions))
        sum(field.square().mean() for field in fields.values()).backward()
    assert 0 < found.n_dispatched <= of_reference / 10


def test_a_small_comparison_of_this_project_alone(tmp_path: Path) -> None:
    out = tmp_path / "bench"
    sizes = ["--cases", "3:96", "2:32:1", "--boundaries", "500", "--points", "20", "--floor", "2"]
    compare.main([*sizes, "--repetitions", "1", "--threads", "1", "--no-compile", "--out", str(out)])
    stored = json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))
    assert [case["case"] for case in stored["cases"]] == ["3:96", "2:32:1"]
    first = stored["cases"][0]
    assert first["evaluations"]["faces"] == 96 + 2 * 8
    assert len(first["times"]["step"]["ours"]) == 1
    counts = first["counts"]["ours"]
    assert 0 < counts["plans"]["dispatched"] < counts["step"]["dispatched_in_gpu_chunks"]
    assert counts["step"]["dispatched_in_gpu_chunks"] <= counts["step"]["dispatched"]
    assert counts["step"]["data_dependent"] == counts["plans"]["data_dependent"] > 0
    assert set(stored["boundaries"][0]["times"]) == {"tree", "aggregate", "plan"}
    lines = out.with_suffix(".md").read_text(encoding="utf-8").splitlines()
    assert len({line.count("|") for line in lines[2:]}) == 1, "every row has the same cells"


def test_a_case_that_fails_loses_none_of_those_before_it(tmp_path: Path) -> None:
    out = tmp_path / "runs" / "bench"
    sizes = ["--cases", "3:96", "3:97", "--boundaries", "--points", "20", "--floor", "2", "--no-count"]
    with pytest.raises(RuntimeError, match="n_faces: expected twice a product of two similar numbers, found 97"):
        compare.main([*sizes, "--repetitions", "1", "--threads", "1", "--no-compile", "--out", str(out)])
    case, *rest = json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))["cases"]
    assert not rest and case["case"] == "3:96" and case["counts"] == {}
    assert "3D, 96 faces" in out.with_suffix(".md").read_text(encoding="utf-8")
    assert {path.name for path in out.parent.iterdir()} == {"bench.json", "bench.md"}


def test_products_of_a_step_are_those_of_one_that_recomputes_nothing(tmp_path: Path) -> None:
    found = []
    for checkpointing in (True, False):
        ours = sides.Ours()
        ours.set_up(dims=3, n_faces=96, n_points=40, n_floor=2, state=str(tmp_path / "state.pt"), threads=1)
        ours.model.use_gradient_checkpointing = checkpointing
        found.append(ours.set_up_products())
    assert found[0] == found[1]
    assert found[0]["step"] > 2 * found[0]["forward"] > 0


def test_a_small_run_of_the_scaling_checks(tmp_path: Path) -> None:
    sizes = ["--counted", "96", "500", "--timed", "96", "240", "--floor", "2", "--threads", "1"]
    found = scaling.main([*sizes, "--out", str(tmp_path / "scaling")])
    rows = found["rows"]
    evaluations = 2 * rows["communication"] + rows["prediction"]
    # Two steps a node and layer hand down what nodes received.
    assert evaluations < rows["rows_added"] <= evaluations + 20 * (rows["nodes"] + rows["faces"])
    assert found["chunks"]["difference"] < 1e-5
    assert json.loads((tmp_path / "scaling.json").read_text(encoding="utf-8"))["exponent"] == found["exponent"]
    assert list(tmp_path.iterdir()) == [tmp_path / "scaling.json"]


def test_a_small_table_of_rules(tmp_path: Path) -> None:
    sizes = ["--faces", "240", "--points", "30", "--floor", "2", "--hidden", "8", "--steps", "2"]
    found = rules.main([*sizes, "--thetas", "1", "--out", str(tmp_path / "rules")])
    of = {row["rule"]: row for row in found if row["kernel"] == "untrained"}
    assert set(of) == set(rules.RULES)
    assert of["dual"]["evaluations"] < of["dual, target weight 2"]["evaluations"] < of["pointwise"]["evaluations"]
    assert all(0 < row["error"] < 1 for row in found)


def test_a_small_run_of_the_gpu_script(tmp_path: Path) -> None:
    found = gpu.main(
        ["--device", "cpu", "--faces", "96", "--floor", "2", "--repetitions", "1", "--out", str(tmp_path / "gpu")]
    )
    assert [(row["faces"], row["bf16"]) for row in found] == [(96, False), (96, True)]
    assert all(row["step_s"] > 0 for row in found)
    sizes = ["--device", "cpu", "--faces", "96", "--floor", "2", "--repetitions", "1", "--far-field-order", "1"]
    (first, _) = gpu.main([*sizes, "--out", str(tmp_path / "gpu")])
    assert first["evaluations"]["prediction"] < found[0]["evaluations"]["prediction"]


def test_a_small_table_of_settings(tmp_path: Path) -> None:
    sizes = ["--counted", "240", "--faces", "96", "--step-faces", "96", "--floor", "2"]
    sizes += ["--hidden", "4", "--step-hidden", "4"]
    sizes += ["--thetas", "1", "--chunks", "1", "64", "--repetitions", "1"]
    found = settings.main([*sizes, "--out", str(tmp_path / "settings")])
    kept, recomputed = (next(r["peak_mb"] for r in found["step"] if r["checkpointing"] is c) for c in (False, True))
    assert recomputed < kept
    small, large = (r for r in found["step"] if r["checkpointing"])
    assert 0 < large["dispatched"] < small["dispatched"]
    of = {(row["rule"], row["leaf_size"]): row for row in found["rules"]}
    assert of["exact", 1]["a_point"] == 240 + 2 * 8
    assert of["dual", 1]["a_point"] < of["pointwise", 1]["a_point"] < of["exact", 1]["a_point"]
    assert of["dual", 1]["a_point"] < of["dual, target weight 2", 1]["a_point"] < of["expanded", 1]["a_point"]
    single, mixed = (row["error"] for row in found["precision"])
    assert 0 < single < 1e-3 and single < mixed
    assert "bf16-mixed" in (tmp_path / "settings.md").read_text(encoding="utf-8")


def test_the_count_of_the_throughput_callback_s_cost(small_root: str) -> None:
    short = ["--data.init_args.n_train_points=60", "--data.init_args.n_validation=1", "--model.hidden_layer_sizes=[4]"]
    found = throughput_cost.main(["--epochs", "2", f"--data.init_args.root={small_root}", *short])
    assert found["steps"] == 8 and 0 < found["callback_seconds"] < found["fit_seconds"]
    assert found["seconds"].keys() >= {*throughput_cost.HOOKS, "around plans", "rows"} - {
        "on_validation_start",
        "on_validation_end",
    }
    assert all(value > 0 for value in found["seconds"].values())
