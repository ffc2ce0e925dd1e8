"""From a checkpoint and a shape to fields and forces: in Python, from the command line, as the datasets do it."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import lightning.pytorch as pl
import matplotlib.image
import numpy as np
import pytest
import pyvista as pv
import torch
from conftest import AIRFRANS, TINY
from drivaerml_synthetic import semi_axes, write_dataset
from test_geometry_airfoils import SELIG, lines

from datamodules import AirFRANSDataModule, DrivAerMLDataModule, GeometryDataModule, polygons
from datamodules.csv_io import read_row
from datamodules.drivaerml import SAMPLES
from datamodules.probes import parse_probes
from datamodules.vtk_io import polygon_corners
from globe_lightning import GlobeLightningModule, predict_geometry
from globe_lightning.callbacks.plane import loops
from globe_lightning.cli import main
from globe_lightning.geometry_arguments import parse_conditions


class Cars(DrivAerMLDataModule):
    """The schema of cars and how they are prepared, without any file."""


def saved(model: GlobeLightningModule, path: Path) -> Path:
    """A checkpoint as training writes it."""
    trainer = pl.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu", enable_progress_bar=False)
    trainer.strategy.connect(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    trainer.save_checkpoint(path)
    return path


def airfoil_model(**arguments) -> GlobeLightningModule:
    torch.manual_seed(0)
    return GlobeLightningModule(**AIRFRANS.arguments(), **{**TINY, **arguments}).eval()


def car_model(**arguments) -> GlobeLightningModule:
    torch.manual_seed(0)
    schema = DrivAerMLDataModule().schema.arguments()
    model = GlobeLightningModule(
        **schema, reference_area=2.17, **{**TINY, "initial_amplitude": 0.1, **arguments}
    ).eval()
    model.geometry_arguments = DrivAerMLDataModule(n_boundary_faces=60, n_floor_cells=2).geometry_arguments()
    return model


@pytest.fixture(scope="module")
def cars(tmp_path_factory) -> DrivAerMLDataModule:
    """One test case, an ellipsoid of 290 points, prepared with 60 faces."""
    root = tmp_path_factory.mktemp("cars")
    write_dataset(root, n_train=2, n_test=1, n_along=18, n_around=17)
    data = DrivAerMLDataModule(
        root=str(root), split=str(root / "split.json"), n_boundary_faces=60, n_floor_cells=2, num_workers=0
    )
    data.prepare(progress=False)
    data.setup("predict")
    return data


@pytest.fixture
def wing(tmp_path) -> Path:
    path = tmp_path / "wing.dat"
    path.write_text("NACA 2412\n" + lines(SELIG))
    return path


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_known_cars_surface_gives_what_its_dataset_gives(cars, tmp_path):
    model = car_model()
    dataset = cars.datasets["predict"]
    known = dataset[0]
    truth = model.predict_fields(known)
    case = known.case
    arrays = dataset.arrays(case)
    triangles = arrays["points"][arrays["triangles"]]
    path = tmp_path / f"{case}.stl"
    facets = "".join(
        "facet normal 0 0 0\nouter loop\n"
        + "".join(f"vertex {x:.9g} {y:.9g} {z:.9g}\n" for x, y, z in corners)
        + "endloop\nendfacet\n"
        for corners in triangles.tolist()
    )
    path.write_text(f"solid car\n{facets}endsolid car\n")
    length = float(known.reference_lengths["L_ref"])
    result = predict_geometry(model, path, L_ref=length, accept="position")
    assert len(result.points) == len(known.prediction_points)
    # The file numbers the points anew.
    place = {tuple(point): row for row, point in enumerate(result.points.tolist())}
    rows = [place[tuple(point)] for point in known.prediction_points.tolist()]
    for name in ("C_p", "C_f"):
        np.testing.assert_allclose(result.fields[name][rows], truth[name].numpy(), rtol=1e-4, atol=1e-5)
    vehicle, before = result.sample.boundary_meshes["vehicle"], known.boundary_meshes["vehicle"]
    assert vehicle.n_faces == 60 and torch.allclose(vehicle.areas.sum(), before.areas.sum(), rtol=1e-5)
    assert result.sample.reference_lengths == known.reference_lengths


def test_the_frontal_area_is_found_and_can_be_given(cars):
    model = car_model()
    mesh = cars.case_mesh("run_3")
    result = predict_geometry(model, mesh, L_ref=2.7, accept="position")
    exact = np.pi * semi_axes(3)[1] * semi_axes(3)[2]
    area = result.sample.force_surface.reference_areas["_own"]
    assert area == pytest.approx(exact, rel=0.04) and area < exact  # 17 corners around
    assert f"frontal area {area:.4f} m^2" in str(result.report)
    for name in ("Cd", "Clr"):
        assert result.forces[f"{name}_own"] * area == pytest.approx(result.forces[name] * 2.17, rel=1e-5)
    given = predict_geometry(model, mesh, L_ref=2.7, A_ref=2.0, accept="position")
    assert given.forces["Cd_own"] * 2.0 == pytest.approx(result.forces["Cd"] * 2.17, rel=1e-5)


def test_frontal_areas_of_the_shipped_cars():
    """Those in the cases' own files were counted on a grid of 8 mm."""
    data = DrivAerMLDataModule(root="samples")
    for case in ("run_3", "run_6"):
        mesh = data.case_mesh(case)
        _, triangles = polygons.fans(*polygon_corners(mesh, case))
        file = SAMPLES / case / f"geo_ref_{case.removeprefix('run_')}.csv"
        found = polygons.shadow_area(np.asarray(mesh.points), triangles)
        assert found == pytest.approx(read_row(file, ("aRef",))["aref"], rel=2e-3)


def test_a_known_airfoils_outline_gives_what_its_dataset_gives(small_root, tmp_path):
    model = airfoil_model()
    data = AirFRANSDataModule(root=small_root, num_workers=0, cache_dir=str(tmp_path / "cache"))
    data.prepare(progress=False)
    data.setup("predict")
    known = data.datasets["predict"][0]
    wall = known.boundary_meshes["no_slip"].corners.numpy()
    (loop,) = loops(wall)
    path = tmp_path / "wing.dat"
    path.write_text("".join(f"{x:.9g} {y:.9g}\n" for x, y in loop))
    speed = known.scales["U_inf"]
    direction = known.global_data["U_inf / U_inf_magnitude"]
    alpha = float(torch.rad2deg(torch.atan2(direction[1], direction[0])))
    result = predict_geometry(model, path, U_inf=speed, alpha=alpha, accept="all")
    n_wall = len(loop) - 1
    assert result.sample.boundary_meshes["no_slip"].n_faces == len(wall)
    truth = model.predict_fields(replace(known, prediction_points=torch.from_numpy(result.points[:n_wall])))
    for name, values in truth.items():
        np.testing.assert_allclose(result.fields[name][:n_wall], values.numpy(), rtol=1e-3, atol=1e-4)
    forces = model.predict_fields(known)
    from globe_lightning.forces import force_coefficients

    total = force_coefficients(known.force_surface, forces).total
    for name in ("Cd", "Cl"):
        assert result.forces[name] == pytest.approx(float(total[name]), rel=1e-3, abs=1e-4)


def test_the_conditions_of_an_airfoil(wing):
    model = airfoil_model()
    result = predict_geometry(model, wing, U_inf=50, alpha=3)
    direction = result.sample.global_data["U_inf / U_inf_magnitude"]
    np.testing.assert_allclose(direction, [np.cos(np.radians(3)), np.sin(np.radians(3))], rtol=1e-6)
    assert float(result.sample.reference_lengths["delta_FS"]) == pytest.approx((1.56e-5 / 50) ** 0.5, rel=1e-6)
    same = predict_geometry(model, SELIG, Re=50 / 1.56e-5, alpha=3)
    np.testing.assert_allclose(same.fields["C_p"], result.fields["C_p"], rtol=1e-3, atol=1e-5)
    assert same.forces["Cl"] == pytest.approx(result.forces["Cl"], rel=1e-3)
    for name in ("C_pPred", "pPred", "UPred", "nutPred"):
        assert len(result.mesh.point_data[name]) == result.mesh.n_points
    assert not [name for name in result.mesh.point_data if name.endswith("Error")]


@pytest.mark.parametrize(
    ("conditions", "message"),
    [
        ({}, "needs U_inf .* or Re"),
        ({"U_inf": 50, "Re": 1e6}, "one of the two"),
        ({"U_inf": -1}, "condition U_inf: expected a positive number"),
        ({"U_inf": 50, "alpha": float("nan")}, "condition alpha"),
        ({"U_inf": 50, "alpha": 120}, "angle of attack in degrees"),
        ({"U_inf": 50, "beta": 1}, "'beta' is unknown for airfrans; known are U_inf: freestream speed"),
    ],
)
def test_conditions_that_make_no_sense(wing, conditions, message):
    with pytest.raises(ValueError, match=message):
        predict_geometry(airfoil_model(), wing, **conditions)


def test_shapes_of_the_other_kind_are_refused(wing, tmp_path):
    with pytest.raises(ValueError, match=r"one of drivaerml, whose shapes come in .stl"):
        predict_geometry(car_model(), wing)
    with pytest.raises(ValueError, match=r"one of airfrans, whose shapes come in .dat"):
        predict_geometry(airfoil_model(), tmp_path / "car.stl", U_inf=50)
    with pytest.raises(ValueError, match=r"expected coordinates \(n, 2\)"):
        predict_geometry(airfoil_model(), np.zeros((4, 3)), U_inf=50)
    with pytest.raises(ValueError, match="expected a surface"):
        predict_geometry(car_model(), SELIG)


def test_a_model_of_other_data_is_refused(wing):
    arguments = {**AIRFRANS.arguments(), "reference_length_names": ["span"]}
    with pytest.raises(ValueError, match=r"fits neither(.|\n)*reference_length_names(.|\n)*predict_fields"):
        predict_geometry(GlobeLightningModule(**arguments, **TINY), wing, U_inf=50)


def test_probes_are_predicted_as_the_model_predicts_points(cars, tmp_path):
    model = car_model()
    mesh = cars.case_mesh("run_3").triangulate()
    mesh.clear_data()
    points = np.array([[-2.0, 0.5, 0.4], [5.0, 0.0, 0.6], [1.4, 0.0, 0.5]])  # the last inside
    file = tmp_path / "probes.csv"
    file.write_text("y,x,z\n" + "".join(f"{y},{x},{z}\n" for x, y, z in points))
    result = predict_geometry(
        model, mesh, L_ref=2.7, accept="position", probes=[str(file), "y=0.1,x=-1:4:11,z=0:1.2:5"]
    )
    assert list(result.probes) == ["probes", "y0.1"]
    probes = result.probes["probes"]
    np.testing.assert_allclose(probes.points, points[:2], rtol=1e-6)
    assert np.isnan(probes.mesh.point_data["C_pPred"][2]) and not probes.forces
    alone = replace(result.sample, prediction_points=torch.tensor(points[:2], dtype=torch.float32))
    np.testing.assert_allclose(probes.fields["C_p"], model.predict_fields(alone)["C_p"], rtol=1e-5)
    plane = result.probes["y0.1"]
    assert plane.mesh.n_points == 55 and 20 < len(plane.points) < 55
    assert plane.plot() is not None and probes.plot() is None
    files = {path.name for path in result.save(tmp_path / "out")}
    assert {
        "shape.vtp",
        "shape_forces.csv",
        "shape.png",
        "shape_probes.vtp",
        "shape_y0.1.vtu",
        "shape_y0.1.png",
    } == files
    again = pv.read(tmp_path / "out" / "shape.vtp")
    np.testing.assert_array_equal(again.point_data["C_pPred"], result.fields["C_p"])


def test_planes_and_grids_in_words():
    low, high = np.array([-1.0, -2.0, 0.0]), np.array([3.0, 2.0, 1.0])
    plane = parse_probes("y=0", low, high)
    assert plane.name == "y0" and (plane.points[:, 1] == 0).all()
    assert len(np.unique(plane.points[:, 0])) == 161 and len(np.unique(plane.points[:, 2])) == 41
    grid = parse_probes("x=0:1:3,y=0:1:2,z=0.5", low, high)
    np.testing.assert_allclose(grid.points, np.asarray(grid.mesh.points), atol=1e-7)
    assert len(grid.points) == 6 and len(parse_probes("x=0,y=0,z=0", low, high).points) == 1
    cells = parse_probes("x=0:1:3,y=0:1:2,z=0.5", low, high, "cell")
    np.testing.assert_allclose(cells.points, np.asarray(cells.mesh.cell_centers().points), atol=1e-6)
    assert len(parse_probes("x=0.5", low[:2], high[:2]).points) == 161


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("w=0", "expected each of the axes x, y, z at most once, found 'w'"),
        ("y=0,y=1", "at most once"),
        ("y=a", "expected y=value"),
        ("y=1:0:5", "low < high"),
        ("y=0:1:1", "2 points or more"),
        ("y=0:1:2:3", "expected y=value"),
        ("x=0:1:1000,y=0:1:1000,z=0:1:1000", "1000000000 points"),
    ],
)
def test_planes_and_grids_that_make_no_sense(text, message):
    with pytest.raises(ValueError, match=message):
        parse_probes(text, -np.ones(3), np.ones(3))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "x,y\n1,2\n", "column 'z' is missing"),
        ("a.csv", "x,y,z\n1,2,a\n", "line 2: expected the numbers x, y, z"),
        ("a.csv", "1,2\n", "line 1"),
        ("a.csv", "x,y,z\n", "no points"),
        ("a.json", "{}", "expected points in .csv"),
    ],
)
def test_files_of_points_that_make_no_sense(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        parse_probes(str(tmp_path / name), -np.ones(3), np.ones(3))


def test_an_absent_file_of_points():
    with pytest.raises(FileNotFoundError, match="or a plane or grid"):
        parse_probes("nowhere.csv", -np.ones(3), np.ones(3))


def test_conditions_in_words():
    assert parse_conditions(["U_inf=60,alpha=0,2,4"]) == {"U_inf": [60], "alpha": [0, 2, 4]}
    assert parse_conditions(["U_inf=6e1", "alpha=-4"]) == {"U_inf": [60], "alpha": [-4]}
    for text in ("U_inf", "60", "U_inf=", "U_inf=fast", "U_inf=1,U_inf=2"):
        with pytest.raises(ValueError, match=r"condition .*expected"):
            parse_conditions([text])


def test_airfoils_from_the_command_line(wing, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = saved(airfoil_model(), tmp_path / "elsewhere" / "model.ckpt")
    options = ["--pictures.dots_per_inch=40", "--trainer.accelerator=cpu"]
    arguments = ["predict", "--geometry", str(wing), f"--ckpt_path={path}", "--condition", "U_inf=50,alpha=0,4"]
    main([*arguments, "--grid", "x=-0.5:1.5:21,y=-0.3:0.3:7", *options])
    printed = capsys.readouterr().out
    assert "Selig order" in printed and "wing_alpha4" in printed and "friction" in printed
    folder = tmp_path / "runs" / "wing"
    written = {item.name for item in (folder / "predictions").iterdir()}
    cases = {"wing_alpha0", "wing_alpha0_grid", "wing_alpha4", "wing_alpha4_grid"}
    assert written == {"forces.csv", *(f"{case}.vtu" for case in cases)}
    assert {item.stem for item in (folder / "pictures").iterdir()} == cases
    for item in (folder / "pictures").iterdir():
        image = matplotlib.image.imread(item)
        assert image[..., :3].std() > 0.1
    result = predict_geometry(GlobeLightningModule.load_from_checkpoint(path), wing, U_inf=50, alpha=4)
    rows = {
        row["coefficient"]: row for row in table(folder / "predictions" / "forces.csv") if row["case"] == "wing_alpha4"
    }
    for name, value in result.forces.items():
        assert float(rows[name]["predicted"]) == pytest.approx(value, rel=1e-5) and rows[name]["true"] == ""
    mesh = pv.read(folder / "predictions" / "wing_alpha4.vtu")
    np.testing.assert_allclose(mesh.point_data["C_pPred"], result.fields["C_p"], rtol=1e-5, atol=1e-6)
    # The saved configuration is complete: it can be run again.
    main(["predict", f"--config={folder / 'config_predict.yaml'}", f"--ckpt_path={path}", "--pictures.predicted=false"])


def test_cars_from_a_run_and_the_command_line(cars, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    saved(car_model(), tmp_path / "runs" / "mine" / "checkpoints" / "last.ckpt")
    mesh = cars.case_mesh("run_3").triangulate()
    mesh.points = mesh.points * np.float32(1000)
    mesh.save("car.stl")
    arguments = ["predict", "--geometry", "car.stl", "--ckpt_path", "last", "--run.name", "mine"]
    options = ["--pictures.dots_per_inch=40", "--trainer.accelerator=cpu", "--condition=U_inf=38.89"]
    with pytest.raises(SystemExit, match=r"millimeters(.|\n)*--repair units"):
        main([*arguments, *options])
    main([*arguments, *options, "--repair", "units,normals", "--plane", "y=0,x=-1:4:21,z=0:1.5:7"])
    assert "mended" in capsys.readouterr().out
    folder = tmp_path / "runs" / "mine" / "geometry" / "car"
    assert {item.name for item in (folder / "predictions").iterdir()} == {"car.vtp", "car_y0.vtu", "forces.csv"}
    assert {item.name for item in (folder / "pictures").iterdir()} == {"car.png", "car_y0.png"}
    found = pv.read(folder / "predictions" / "car.vtp")
    assert found.bounds[1] < 10 and {"CpMeanTrimPred", "wallShearStressMeanTrimPred"} <= set(found.point_data)
    names = ("Cd", "Cl", "Clf", "Clr", "Cs")
    written = {row["coefficient"] for row in table(folder / "predictions" / "forces.csv")}
    assert written == {*names, *(f"{name}_own" for name in names)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--condition", "U_inf=1"], "need --geometry FILE"),
        (["--geometry", "a.dat", "--ckpt_path", "none.ckpt"], "none.ckpt: no such file"),
        (["--geometry", "a.dat"], "no checkpoint; give --ckpt_path FILE"),
        (["--geometry", "a.dat", "--ckpt_path", "model.ckpt"], "a.dat: no such file"),
        (["--geometry", "wing.dat", "--ckpt_path", "model.ckpt"], "needs U_inf"),
        (["--geometry", "wing.dat", "--ckpt_path", "model.ckpt", "--n_segments", "x"], "n_segments: expected a number"),
        (
            ["--geometry", "wing.dat", "--ckpt_path", "model.ckpt", "--repair", "up"],
            r"repair: expected names among chord",
        ),
        (["--geometry", "wing.dat", "--ckpt_path", "weights.ckpt"], "weights.ckpt: not a checkpoint of this package"),
    ],
)
def test_mistakes_on_the_command_line(wing, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    saved(airfoil_model(), tmp_path / "model.ckpt")
    torch.save({"state_dict": {}}, tmp_path / "weights.ckpt")
    with pytest.raises(SystemExit, match=message):
        main(["predict", *arguments])


def test_the_help_names_the_options(capsys):
    with pytest.raises(SystemExit):
        main(["predict", "--help"])
    printed = capsys.readouterr().out
    for name in ("--geometry", "--condition", "--repair", "--plane", "--points"):
        assert name in printed


def test_training_leaves_in_the_checkpoint_how_cases_were_prepared(small_root, tmp_path):
    model = airfoil_model()
    data = AirFRANSDataModule(
        root=small_root, num_workers=0, n_boundary_faces=12, orientation="inward", cache_dir=str(tmp_path / "cache")
    )
    trainer = pl.Trainer(
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        accelerator="cpu",
        enable_progress_bar=False,
        limit_val_batches=0,
    )
    trainer.fit(model, data)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    again = GlobeLightningModule.load_from_checkpoint(tmp_path / "a.ckpt")
    assert again.geometry_arguments == data.geometry_arguments()
    sample = predict_geometry(again, SELIG, U_inf=50).sample
    mesh = sample.boundary_meshes["no_slip"]
    whole = np.linalg.norm(np.diff(SELIG, axis=0), axis=1).sum()
    assert mesh.n_faces == 12 and float(mesh.areas.sum()) == pytest.approx(whole, rel=1e-5)
    upper = mesh.centroids[:, 1] > 0.03
    assert (mesh.normals[upper][:, 1] < 0).all()


def test_a_checkpoint_from_elsewhere_takes_a_bounded_number_of_faces():
    from globe_lightning.geometry import CAR_FACES, prepared_as_trained

    model = car_model()
    assert prepared_as_trained(model.schema, {})["n_boundary_faces"] == CAR_FACES
    assert prepared_as_trained(model.schema, model.geometry_arguments)["n_boundary_faces"] == 60


def test_a_model_of_cell_centers_predicts_there(cars):
    model = car_model()
    model.geometry_arguments["targets"] = "cells"
    mesh = cars.case_mesh("run_3")
    result = predict_geometry(model, mesh, L_ref=2.7, accept="position", probes="x=5,y=-1:1:5,z=0:1:3")
    assert len(result.points) == mesh.n_cells and len(result.mesh.cell_data["C_pPred"]) == mesh.n_cells
    plane = result.probes["x5"]
    np.testing.assert_allclose(plane.mesh.cell_centers().points, plane.points, atol=1e-6)


def test_names_of_cases_are_distinct(wing, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / wing.name).write_text(wing.read_text())
    data = GeometryDataModule(
        [str(wing), str(other / wing.name)],
        "airfrans",
        conditions={"U_inf": [50], "alpha": [0, 4]},
        probes=["y=0.5", "y=0.5,x=2:3"],
    )
    names = [case.name for case in data.cases()]
    assert len(set(names)) == len(names) == 12
    assert names[:3] == ["wing_alpha0", "wing_alpha0_y0.5", "wing_alpha0_y0.5_2"]
    with pytest.raises(ValueError, match="at least one shape"):
        GeometryDataModule([], "airfrans")
    with pytest.raises(ValueError, match="conventions: expected one of"):
        GeometryDataModule([str(wing)], "boats")
