"""Cars from the command line: fit, test and predict on a small dataset in the DrivAerML layout."""

from __future__ import annotations

import csv
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import pyvista as pv
from drivaerml_synthetic import Q_INF, exact_forces, write_dataset

from globe_lightning.cli import main

OPTIONS = [
    "--config=configs/drivaer_quickstart.yaml",
    "--model.hidden_layer_sizes=[8]",
    "--model.n_latent_scalars=2",
    "--model.n_latent_vectors=1",
    "--data.init_args.n_boundary_faces=60",
    "--data.init_args.n_floor_cells=2",
    "--data.init_args.n_train_points=50",
    "--data.init_args.n_validation_points=80",
    "--data.init_args.num_workers=0",
    "--trainer.max_epochs=1",
    "--trainer.check_val_every_n_epoch=1",
    "--pictures.every_n_epochs=1",
    "--pictures.dots_per_inch=40",
]


@pytest.fixture(scope="module")
def cars(tmp_path_factory) -> Path:
    """Three train cases and one for testing: ellipsoids of 290 points with analytic fields and forces."""
    root = tmp_path_factory.mktemp("cars")
    write_dataset(root, n_train=3, n_test=1, n_along=18, n_around=17)
    return root


def table(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(("targets", "theta"), [("vertices", 0), ("cells", 1)])
def test_fit_test_predict(cars, targets, theta, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    options = [
        *OPTIONS,
        f"--data.init_args.root={cars}",
        f"--data.init_args.split={cars / 'split.json'}",
        f"--data.init_args.cache_dir={tmp_path / 'cache'}",
        f"--data.init_args.targets={targets}",
        f"--model.theta={theta}",
        "--model.prediction_chunk_size=64",  # the last chunk is not full
    ]
    run = Path("runs/drivaer_quickstart")
    main(["fit", *options])
    assert [path.name for path in (run / "pictures").iterdir()] == ["validation_epoch0001.png"]

    main(["test", *options])
    printed = capsys.readouterr().out
    (row,) = table(run / "metrics_by_case.csv")
    assert row["case"] == "run_4"
    for name in ("C_p/relative_l2", "C_p/relative_l2_area", "C_f/relative_l2_area", "C_f/relative_l2_x", "C_p/mae"):
        assert float(row[name]) > 0 and f"test/{name}" in printed
    (logged,) = table(run / "metrics_test.csv")
    assert float(logged["test/C_f/relative_l2_area"]) == pytest.approx(float(row["C_f/relative_l2_area"]), rel=1e-5)
    assert "test/forces/Cd_own/rmse" in logged and "test/forces/Cl/rmse_solver" in logged

    main(["predict", *options])
    written = {path.name for path in (run / "predictions").iterdir()}
    assert written == {"run_4.vtp", "forces.csv"}
    forces = {row["coefficient"]: row for row in table(run / "predictions" / "forces.csv")}
    names = ("Cd", "Cl", "Clf", "Clr", "Cs")
    assert set(forces) == {*names, *(f"{name}_own" for name in names)}
    exact = exact_forces(4, wheelbase=2.74, area=2.17)
    for name, row in forces.items():
        assert float(row["error"]) == pytest.approx(float(row["predicted"]) - float(row["true"]))
        if name in exact:
            assert float(row["solver"]) == pytest.approx(exact[name], abs=1e-9)
            assert float(row["true"]) == pytest.approx(exact[name], rel=0.1, abs=2e-3)  # a coarse surface
    tested = {row["coefficient"]: row for row in table(run / "forces_test.csv")}
    assert float(tested["Cd"]["predicted"]) == pytest.approx(float(forces["Cd"]["predicted"]), rel=1e-5)

    mesh = pv.read(run / "predictions" / "run_4.vtp")
    arrays = mesh.cell_data if targets == "cells" else mesh.point_data
    for name in ("CpMeanTrim", "pMeanTrim", "wallShearStressMeanTrim"):
        true, pred, error = (np.asarray(arrays[f"{name}{suffix}"]) for suffix in ("", "Pred", "Error"))
        assert len(true) == (mesh.n_cells if targets == "cells" else mesh.n_points)
        assert np.isfinite(pred).all() and pred.std() > 0  # nothing was left out at the end
        np.testing.assert_allclose(error, pred - true, rtol=1e-4, atol=1e-5 * np.abs(true).max())
    np.testing.assert_allclose(arrays["pMeanTrimPred"], Q_INF * arrays["CpMeanTrimPred"], rtol=1e-5)
    assert mesh.cell_data["pPrime2MeanTrim"].max() == 1  # the file's own arrays stay

    # The predicted drag, integrated by hand over the predicted fields of the file.
    pressure, shear = arrays["CpMeanTrimPred"], arrays["wallShearStressMeanTrimPred"] / Q_INF
    sizes = mesh.compute_cell_sizes(length=False, volume=False).cell_data["Area"]
    normals = mesh.compute_normals(point_normals=False, consistent_normals=False, auto_orient_normals=False)
    inward = np.asarray(normals.cell_data["Normals"])  # the file's faces look into the body
    if targets == "vertices":
        corners = [cell.point_ids for cell in mesh.cell]
        pressure = np.array([pressure[ids].mean() for ids in corners])
        shear = np.array([shear[ids].mean(axis=0) for ids in corners])
    drag = float(((pressure[:, None] * inward - shear) * sizes[:, None]).sum(axis=0)[0] / 2.17)
    assert float(forces["Cd"]["predicted"]) == pytest.approx(drag, rel=2e-3)

    for name in ("run_4", "validation_epoch0001"):
        image = matplotlib.image.imread(run / "pictures" / f"{name}.png")
        assert min(image.shape[:2]) > 300 and image[..., :3].std() > 0.1
