"""``globe sensitivity``: VTK files and pictures of real cases, from the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drivaerml_synthetic import write_dataset
from matplotlib.image import imread

from globe_lightning import GlobeLightningModule, shape_sensitivity
from globe_lightning.callbacks.sensitivities import draw_sensitivity, polygon_surface, sensitivity_mesh
from globe_lightning.cli import main

AIRFOILS = [
    "--config=configs/quickstart.yaml",
    "--model.hidden_layer_sizes=[8]",
    "--model.n_communication_hyperlayers=1",
    "--data.init_args.n_validation=1",
]
CARS = [
    "--config=configs/drivaer_quickstart.yaml",
    "--model.hidden_layer_sizes=[8]",
    "--data.init_args.n_boundary_faces=40",
    "--data.init_args.n_floor_cells=2",
]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_airfoils(small_root: str, capsys: pytest.CaptureFixture) -> None:
    pv = pytest.importorskip("pyvista")
    short = [*AIRFOILS, f"--data.init_args.root={small_root}"]
    main(
        [
            "fit",
            *short,
            "--trainer.max_epochs=1",
            "--data.init_args.n_train_points=40",
            "--data.init_args.n_train_wall_points=4",
        ]
    )
    main(["sensitivity", *short, "--of=Cl"])
    said = capsys.readouterr().out
    assert "using runs/quickstart/checkpoints/" in said and "Cl = " in said
    folder = Path("runs/quickstart/sensitivities")
    files = sorted(folder.glob("*_Cl.vtp"))
    assert len(files) == 3 and len(list(folder.glob("*_Cl.png"))) == 3
    mesh = pv.read(files[0])
    gradient, normals, area = (np.asarray(mesh.point_data[name]) for name in ("ClGradient", "Normals", "Area"))
    along = (gradient * normals).sum(axis=1) / area
    np.testing.assert_allclose(mesh.point_data["ClNormal"], along, rtol=1e-4, atol=1e-6 * np.abs(along).max())
    assert mesh.n_lines == mesh.n_points > 10 and np.abs(gradient).max() > 0 and not gradient[:, 2].any()
    # Pictures show something: many colours beside white.
    assert len(np.unique(imread(files[0].with_suffix(".png")).reshape(-1, 4), axis=0)) > 50


@pytest.mark.parametrize("targets", ["vertices", "cells"])
def test_cars(targets: str, tmp_path: Path) -> None:
    """A small ellipsoid: every normal looks away from its middle."""
    write_dataset(tmp_path / "cars", n_train=2, n_test=1, n_along=18, n_around=17)
    root, split = tmp_path / "cars", tmp_path / "cars" / "split.json"
    mesh = written_for_a_car(
        targets, tmp_path, "run_3", [f"--data.init_args.{option}" for option in (f"{root=!s}", f"{split=!s}")]
    )
    assert (outwardness(mesh) > 0).all()


@pytest.mark.slow
def test_a_shipped_car(tmp_path: Path) -> None:
    mesh = written_for_a_car("vertices", tmp_path, "run_7", [])
    assert (outwardness(mesh) > 0).mean() > 0.7


def written_for_a_car(targets: str, folder: Path, case: str, more: list[str]) -> Any:
    """What the command writes for a car, read again, after checks that hold for all of them."""
    pv = pytest.importorskip("pyvista")
    short = [*CARS, f"--data.init_args.targets={targets}", f"--data.init_args.cache_dir={folder}", f"--case={case}"]
    main(["sensitivity", *short, *more, "--ckpt_path=untrained", "--of=Cd_own"])
    (file,) = Path("runs/drivaer_quickstart/sensitivities").glob("*.vtp")
    mesh = pv.read(file)
    assert file.name == f"{case}_Cd_own.vtp" and file.with_suffix(".png").is_file()
    assert np.isfinite(mesh.point_data["Cd_ownGradient"]).all() and np.abs(mesh.point_data["Cd_ownGradient"]).max() > 0
    return mesh


def outwardness(mesh: Any) -> np.ndarray:
    """How far the normals at the points of a mesh look away from its middle."""
    return ((np.asarray(mesh.points) - np.asarray(mesh.center)) * mesh.point_data["Normals"]).sum(axis=1)


def test_errors(small_root: str) -> None:
    short = [*AIRFOILS, f"--data.init_args.root={small_root}"]
    with pytest.raises(SystemExit, match="train first"):
        main(["sensitivity", *short])
    with pytest.raises(SystemExit, match="has the coefficients"):
        main(["sensitivity", *short, "--ckpt_path=untrained", "--of=Cx"])
    with pytest.raises(SystemExit, match="case: expected one of the split"):
        main(["sensitivity", *short, "--ckpt_path=untrained", "--case=nothing"])
    main(
        [
            "fit",
            *short,
            "--trainer.max_epochs=1",
            "--trainer.limit_train_batches=1",
            "--data.init_args.n_train_points=49",
        ]
    )
    with pytest.raises(SystemExit, match="does not fit the configuration"):
        changed = [part for part in short if "hidden" not in part]
        main(["sensitivity", *changed, "--model.hidden_layer_sizes=[5]"])


def test_polygons_and_pictures_of_a_surface_in_space() -> None:
    """A ball whose upper half should be pushed out: red above, blue below."""
    pv = pytest.importorskip("pyvista")
    from globe_lightning.sensitivity import ShapeSensitivity

    ball = pv.Sphere(theta_resolution=16, phi_resolution=16)
    surface = polygon_surface(ball)
    assert surface.n_faces == ball.n_cells and bool((surface.sizes == 3).all())
    normals = torch.nn.functional.normalize(surface.points.double(), dim=1)
    areas = torch.ones(len(normals), dtype=torch.float64)
    shape = ShapeSensitivity("Cd", 0.3, surface, normals * normals[:, 2:], normals, areas, 0.01)
    mesh = sensitivity_mesh(shape)
    assert mesh.n_cells == ball.n_cells and mesh.n_points == ball.n_points
    np.testing.assert_allclose(mesh.point_data["CdNormal"], mesh.points[:, 2] * 2, atol=1e-5)
    figure = draw_sensitivity(shape, "a ball")
    figure.canvas.draw()
    side = figure.axes[0].images[0].get_array()
    rows = side.shape[0]
    top, bottom = (
        side[half][side[half][..., 3] > 0.99].mean(axis=0) for half in (slice(rows // 2, None), slice(rows // 2))
    )
    assert top[0] > top[2] and bottom[2] > bottom[0]


def test_two_lines_of_python(small_root: str, tiny_arguments: dict, tmp_path: Path) -> None:
    from datamodules import AirFRANSDataModule

    data = AirFRANSDataModule(root=small_root, cache_dir=str(tmp_path), num_workers=0)
    data.setup("test")
    found = shape_sensitivity(GlobeLightningModule(**tiny_arguments), data.datasets["test"][0], "Cl")
    assert found.gradient.shape == found.normals.shape and found.normal_gradient.shape == found.areas.shape
