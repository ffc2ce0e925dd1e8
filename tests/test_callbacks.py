from __future__ import annotations

import csv
import os
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import pyvista as pv
import torch
from conftest import make_sample
from test_module import Data, make_trainer, module

from globe_lightning.callbacks.checkpoints import BestCheckpoint
from globe_lightning.callbacks.pictures import PictureWriter, draw_case
from globe_lightning.callbacks.plane import inside_loops, loops, triangulate
from globe_lightning.callbacks.predictions import FORCE_COLUMNS, PredictionWriter, with_fields
from globe_lightning.callbacks.progress import LossBar
from globe_lightning.fields import flatten_data
from globe_lightning.forces import force_coefficients
from globe_lightning.run_folder import RunFolder, RunLogger, safe_name, written_whole


class MeshedData(Data):
    """Made-up cases that also have a mesh to hang fields on."""

    def case_mesh(self, case):
        points = make_sample(int(case.removeprefix("case"))).prediction_points.numpy()
        return pv.PolyData(
            np.column_stack([points, np.zeros(len(points))]).astype(np.float32)
        ).cast_to_unstructured_grid()


def test_predictions_are_written_case_by_case(tmp_path):
    model = module()
    writer = PredictionWriter(str(tmp_path / "out"))
    trainer = make_trainer(tmp_path, callbacks=[writer])
    trainer.predict(model, MeshedData(n_val=3), return_predictions=False)
    assert model.latest_prediction is None and writer._forces == []
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "case0.vtu",
        "case1.vtu",
        "case2.vtu",
        "forces.csv",
    ]
    sample = make_sample(1)
    with torch.no_grad():
        predicted, truth = flatten_data(model(sample)), flatten_data(sample.targets)
    mesh = pv.read(tmp_path / "out" / "case1.vtu")
    for name in truth:
        found = mesh.point_data[name], mesh.point_data[f"{name}Pred"], mesh.point_data[f"{name}Error"]
        expected = truth[name], predicted[name], predicted[name] - truth[name]
        for mine, theirs in zip(found, expected, strict=True):
            mine = mine[:, :2] if mine.ndim == 2 else mine
            np.testing.assert_allclose(mine, theirs.numpy(), rtol=1e-5, atol=1e-6)

    with open(tmp_path / "out" / "forces.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == list(FORCE_COLUMNS)
    assert [(row["case"], row["coefficient"]) for row in rows] == [
        (f"case{index}", name) for index in range(3) for name in ("Cd", "Cl")
    ]
    true = force_coefficients(sample.force_surface, truth)
    row = next(row for row in rows if row["case"] == "case1" and row["coefficient"] == "Cl")
    assert float(row["true"]) == pytest.approx(float(true.total["Cl"]), rel=1e-6)
    assert float(row["error"]) == pytest.approx(float(row["predicted"]) - float(row["true"]))
    for who in ("true", "predicted"):
        assert float(row[who]) == pytest.approx(float(row[f"{who}_pressure"]) + float(row[f"{who}_friction"]))


def test_points_that_were_not_predicted_are_nan():
    sample = make_sample(0, n=40)
    sample.point_ids = torch.arange(40) * 2
    mesh = pv.PolyData(np.zeros((100, 3), dtype=np.float32))
    fields = flatten_data(sample.targets)
    with_fields(mesh, sample, fields, fields)
    found = mesh.point_data["C_pPred"]
    np.testing.assert_array_equal(found[:80:2], fields["C_p"].numpy())
    assert np.isnan(found[1::2]).all() and np.isnan(found[80:]).all()


@pytest.mark.parametrize("ids", [None, torch.arange(40) * 3])
def test_a_mesh_of_another_size_is_refused(ids):
    sample = make_sample(4)
    sample.point_ids = ids
    with pytest.raises(ValueError, match=r"case4.*40 points"):
        with_fields(pv.PolyData(np.zeros((50, 3), dtype=np.float32)), sample, flatten_data(sample.targets), {})


def test_pictures_of_validation_and_of_every_predicted_case(tmp_path):
    model = module()
    writer = PictureWriter(str(tmp_path / "pictures"), every_n_epochs=2, dots_per_inch=40)
    make_trainer(tmp_path, max_epochs=3, callbacks=[writer]).fit(model, Data(n_train=1, n_val=2))
    names = {path.name for path in (tmp_path / "pictures").iterdir()}
    assert names == {"validation_epoch0002.png", "validation_epoch0003.png"}  # every second, and the last
    make_trainer(tmp_path, callbacks=[writer]).predict(model, Data(n_val=1))
    names = {path.name for path in (tmp_path / "pictures").iterdir()} - names
    assert names == {"case0.png"}
    image = matplotlib.image.imread(tmp_path / "pictures" / "case0.png")
    assert min(image.shape[:2]) > 200 and image[..., :3].std() > 0.05


def test_a_picture_shows_all_fields_and_the_surface():
    sample = make_sample(1, n=400)
    truth = flatten_data(sample.targets)
    figure = draw_case(sample, {name: 0.9 * value for name, value in truth.items()}, "a case")
    titles = [axis.get_title() for axis in figure.axes]
    for name in ("C_p", "C_pt", "ln(1+nut/nu)"):
        assert {f"{name}, truth", f"{name}, prediction", f"error of {name}"} <= set(titles)
    assert "|ΔU/|U_inf||, truth" in titles
    assert not any(title.startswith("C_F") for title in titles)  # known at the wall only: drawn as a curve
    labels = [axis.get_ylabel() for axis in figure.axes]
    assert "−C_p" in labels and "|C_F,shear|" in labels
    assert any("Cl" in title and "predicted" in title for title in titles)
    by_title = {axis.get_title(): axis for axis in figure.axes}
    limits = [by_title[f"C_p, {what}"].collections[0].get_clim() for what in ("truth", "prediction")]
    assert limits[0] == limits[1]
    low, high = by_title["error of C_p"].collections[0].get_clim()
    assert low == -high


def test_a_picture_without_surface_or_spread_is_drawn_too():
    sample = make_sample(1)
    sample.force_surface = None
    sample.targets["C_p"] = torch.ones(40)
    figure = draw_case(sample, {"C_p": torch.full((40,), torch.nan)})
    assert len(figure.axes) == 6  # three panels and their colour bars


def test_triangles_inside_the_body_are_left_out():
    sample = make_sample(0, n=600)
    angle = torch.rand(400) * 2 * torch.pi
    ring = (0.5 + torch.rand(400)).unsqueeze(1) * torch.stack([angle.cos(), angle.sin()], dim=1)
    points = torch.cat([sample.prediction_points[:16], ring]).double().numpy()
    outline = sample.boundary_meshes["no_slip"].corners.double().numpy()
    mesh = triangulate(points, outline, (-1.0, 1.0, -1.0, 1.0))
    centres = points[mesh.rows][mesh.triangulation.get_masked_triangles()].mean(axis=1)
    assert not inside_loops(centres, outline).any() and len(centres) > 100
    assert np.linalg.norm(centres, axis=1).min() > 0.4
    whole = points[mesh.rows][mesh.triangulation.triangles].mean(axis=1)
    assert inside_loops(whole, outline).any()


def test_inside_of_a_star_against_its_polar_form():
    angle = np.linspace(0, 2 * np.pi, 200, endpoint=False)
    radius = 1 + 0.4 * np.cos(5 * angle)
    corners = radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    outline = np.stack([corners, np.roll(corners, -1, axis=0)], axis=1)
    points = np.random.default_rng(0).uniform(-1.5, 1.5, (2000, 2))
    r, a = np.linalg.norm(points, axis=1), np.arctan2(points[:, 1], points[:, 0])
    limit = 1 + 0.4 * np.cos(5 * a)
    clear = np.abs(r - limit) > 0.02
    np.testing.assert_array_equal(inside_loops(points, outline)[clear], (r < limit)[clear])
    chains = loops(outline[np.random.default_rng(1).permutation(200)])
    assert len(chains) == 1 and len(chains[0]) == 201


def test_a_loss_that_is_not_finite_is_never_the_best(tmp_path):
    checkpoint = BestCheckpoint(dirpath=str(tmp_path / "c"), monitor="val/loss", filename="best")
    model = module()
    with torch.no_grad():
        next(model.network.parameters()).fill_(torch.nan)
    trainer = make_trainer(tmp_path, callbacks=[checkpoint], enable_checkpointing=True, limit_train_batches=0)
    trainer.strategy.connect(model)
    for value, expected in (("nan", False), ("inf", False), ("1.0", True)):
        assert checkpoint.check_monitor_top_k(trainer, torch.tensor(float(value))) is expected


def test_the_bar_shows_short_names(tmp_path, monkeypatch):
    shown = {"v_num": 1, "train/loss_step": 1.0, "train/loss_epoch": 2.0, "train/loss/C_p_step": 3.0, "val/loss": 4.0}
    trainer = make_trainer(tmp_path)
    monkeypatch.setattr(type(trainer), "progress_bar_metrics", property(lambda self: shown))
    assert LossBar().get_metrics(trainer, module()) == {"loss": 1.0, "C_p": 3.0, "val_loss": 4.0}


def test_file_names():
    assert safe_name("airFoil2D_SST_50.1_-2") == "airFoil2D_SST_50.1_-2"
    assert "/" not in safe_name("../a b/c") and safe_name("") == "_"


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(KeyError), written_whole(path) as beside:
        beside.write_text("half")
        raise KeyError
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["a.txt"]


def test_rows_of_a_resumed_run_are_appended(tmp_path):
    for part, extra in ((0, {}), (1, {"c": 3.0})):
        logger = RunLogger(str(tmp_path))
        for step in range(2):
            logger.log_metrics({"a": float(part), "b": float(step), **extra}, step=2 * part + step)
        logger.finalize("success")
    with open(tmp_path / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["a"], row["step"], row["c"]) for row in rows] == [
        ("0.0", "0", ""),
        ("0.0", "1", ""),
        ("1.0", "2", "3.0"),
        ("1.0", "3", "3.0"),
    ]


def test_the_run_folder_finds_its_checkpoints(tmp_path):
    folder = RunFolder(str(tmp_path), "a")
    assert folder.best_checkpoint() is None and folder.last_checkpoint() is None and folder.set_aside() is None
    folder.checkpoints.mkdir(parents=True)
    best = folder.checkpoints / "best-epoch0001.ckpt"
    for path in (best, folder.checkpoints / "best-epoch0009.ckpt"):
        path.write_text("")
    torch.save({"callbacks": {"x": {"best_model_path": f"/elsewhere/{best.name}"}}}, folder.checkpoints / "last.ckpt")
    assert folder.best_checkpoint() == best
    assert folder.set_aside() == folder.path / "earlier" / "1"
    assert folder.best_checkpoint() is None
    assert (folder.path / "earlier" / "1" / "checkpoints" / best.name).is_file()
    folder.checkpoints.mkdir()
    assert folder.set_aside() == folder.path / "earlier" / "2"
    assert isinstance(folder.path, Path)
