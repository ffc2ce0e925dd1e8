"""AirFRANS cases: what is derived, and what a sample holds."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import pyvista as pv
import torch
from data_synthetic import RADIUS, SHEAR_RATE, SPEED, write_case, write_dataset

import datamodules
from datamodules import AirFRANSDataModule
from datamodules.airfrans import SAMPLES, TASKS
from datamodules.airfrans_source import NU, AirFRANSSource, corner_gradients
from globe_lightning.fields import flatten_ranks

SHIPPED = sorted(path.name for path in SAMPLES.iterdir() if path.is_dir())


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory):
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def shipped(cache_dir):
    module = AirFRANSDataModule(root="samples", cache_dir=cache_dir, num_workers=0)
    module.prepare(progress=False)
    module.setup()
    return module


@pytest.fixture
def root(tmp_path):
    write_dataset(tmp_path / "data")
    return tmp_path / "data"


def module_of(root, **options):
    return AirFRANSDataModule(root=str(root), num_workers=0, **options)


def derive(root, case):
    return AirFRANSSource(root).derive(case)


def coefficients(sample, fields=None):
    """Force coefficients by the formula of ForceSurface, face by face."""
    fields = sample.targets if fields is None else fields
    surface = sample.force_surface
    out = {}
    for name, direction in surface.directions.items():
        total = 0.0
        for corners, area in zip(surface.point_indices, surface.area_vectors, strict=True):
            pressure = fields[surface.pressure_field][corners].double().mean()
            shear = fields[surface.shear_field][corners].double().mean(dim=0)
            force = -pressure * area.double() + surface.shear_sign * shear * area.double().norm()
            total += float(force @ direction.double())
        out[name] = total / surface.reference_areas[""]
    return out


# What is derived.


def test_gradients_of_a_linear_field_are_exact_on_any_cells():
    points = np.array([[0, 0], [2, 0.1], [2.5, 1.0], [0.2, 1.5], [3.0, 0.2]])
    matrix = np.array([[1.0, -2.0], [0.5, 3.0]])
    for cells in (np.array([[0, 1, 2, 3]]), np.array([[1, 4, 2], [0, 1, 2]]), np.array([[2, 1, 0]])):
        gradient, count = corner_gradients(points, cells, points @ matrix.T)
        touched = np.unique(cells)
        np.testing.assert_allclose(gradient[touched], np.broadcast_to(matrix, (len(touched), 2, 2)), atol=1e-12)
        assert np.isnan(gradient[np.setdiff1d(np.arange(5), touched)]).all()
        assert count.sum() == cells.size
    flat = np.array([[0.0, 0], [1, 0], [2, 0]])
    assert corner_gradients(flat, np.array([[0, 1, 2]]), flat)[1].sum() == 0, "a cell without area tells nothing"


@pytest.mark.parametrize("clockwise", [True, False])
def test_known_wall_shear_and_orientation(tmp_path, clockwise):
    write_case(tmp_path, "ring", clockwise=clockwise)
    arrays = derive(tmp_path, "ring")
    wall = arrays["points"][arrays["wall_ids"]].astype(float)
    tangent = np.stack([-wall[:, 1], wall[:, 0]], axis=1) / RADIUS
    expected = NU * SHEAR_RATE * tangent / (SPEED**2 / 2)
    # Coordinates in single precision limit the wall distance.
    np.testing.assert_allclose(arrays["wall_shear"], expected, atol=1e-4 * np.abs(expected).max())
    middle = arrays["points"][arrays["segments"]].mean(axis=1)
    for name in ("segment_areas", "segment_areas_vertex"):
        assert ((arrays[name] * middle).sum(axis=1) > 0).all(), "into the fluid, away from the circle"
        np.testing.assert_allclose(arrays[name].sum(axis=0), 0, atol=1e-6)
    assert (arrays["segment_outward"] == clockwise).all()


def test_triangles_at_the_wall(tmp_path):
    write_case(tmp_path, "ring")
    expected = derive(tmp_path, "ring")
    path = AirFRANSSource(tmp_path).file("ring", "internal.vtu")
    mesh = pv.read(path)
    quads = mesh.cells_dict[pv.CellType.QUAD]
    split = np.concatenate([quads[1::2][:, [0, 1, 2]], quads[1::2][:, [0, 2, 3]]])
    mixed = pv.UnstructuredGrid({pv.CellType.QUAD: quads[::2], pv.CellType.TRIANGLE: split}, mesh.points)
    for name in mesh.point_data:
        mixed.point_data[name] = mesh.point_data[name]
    mixed.save(str(path))
    found = derive(tmp_path, "ring")
    np.testing.assert_array_equal(found["segment_outward"], expected["segment_outward"])
    scale = np.abs(expected["wall_shear"]).max()
    assert np.abs(found["wall_shear"] - expected["wall_shear"]).max() < 0.2 * scale


def test_fields_against_a_plain_evaluation(shipped):
    case = SHIPPED[5]
    source = shipped.make_source()
    arrays = source.derive(case)
    internal = pv.read(source.file(case, "internal.vtu"))
    far = pv.read(source.file(case, "freestream.vtp"))
    velocities = far.cell_data["U"].tolist()
    ux = math.fsum(u[0] for u in velocities) / len(velocities)
    uy = math.fsum(u[1] for u in velocities) / len(velocities)
    speed = math.hypot(ux, uy)
    np.testing.assert_allclose(arrays["U_inf"], [ux, uy], rtol=1e-12)
    for row in np.random.default_rng(0).choice(internal.n_points, 200, replace=False):
        u, v = (float(x) for x in internal.point_data["U"][row, :2])
        pressure = float(internal.point_data["p"][row]) / (0.5 * speed**2)
        expected = {
            "C_p": pressure,
            "C_pt": pressure + (u * u + v * v) / speed**2,
            "ln(1+nut/nu)": math.log(1 + float(internal.point_data["nut"][row]) / 1.56e-5),
        }
        for name, value in expected.items():
            assert arrays[name][row] == pytest.approx(value, rel=1e-6, abs=1e-6)
        assert arrays["ΔU/|U_inf|"][row].tolist() == pytest.approx([(u - ux) / speed, (v - uy) / speed], abs=1e-6)
    wall = np.flatnonzero(internal.point_data["implicit_distance"] == 0)
    np.testing.assert_array_equal(arrays["wall_ids"], wall)
    assert arrays["wall_shear"].shape == (len(wall), 2)
    # VTK differentiates the interpolation in each cell and averages at the points, another route to the same numbers.
    internal.points = internal.points.astype(np.float64)
    internal.point_data["U"] = internal.point_data["U"].astype(np.float64)
    gradient = internal.compute_derivative(scalars="U").point_data["gradient"].reshape(-1, 3, 3)[wall, :2, :2]
    normals = np.zeros((internal.n_points, 2))
    for ends, area in zip(arrays["segments"], arrays["segment_areas"], strict=True):
        normals[ends] += area / np.hypot(*area)
    normals = normals[wall] / np.linalg.norm(normals[wall], axis=1, keepdims=True)
    shear = NU * np.einsum("wij,wj->wi", gradient + gradient.transpose(0, 2, 1), normals) / (speed**2 / 2)
    np.testing.assert_allclose(arrays["wall_shear"], shear, atol=1e-5 * np.abs(shear).max())


def test_normals_are_those_of_the_file_reversed(shipped):
    source = shipped.make_source()
    for case in SHIPPED[::5]:
        wall = pv.read(source.file(case, "aerofoil.vtp"))
        arrays = source.derive(case)
        areas = arrays["segment_areas"]
        lengths = np.linalg.norm(areas, axis=1)
        np.testing.assert_allclose(lengths, wall.cell_data["Length"], rtol=1e-4)
        np.testing.assert_allclose(-areas / lengths[:, None], wall.cell_data["Normals"][:, :2], atol=1e-4)
        vertex = wall.point_data["Normals"][wall.lines.reshape(-1, 3)[:, 1:], :2].mean(axis=1)
        np.testing.assert_allclose(-arrays["segment_areas_vertex"] / lengths[:, None], vertex, atol=1e-4)


def test_unphysical_total_pressure_masks_all_targets(tmp_path):
    write_case(tmp_path, "ring")
    before = derive(tmp_path, "ring")
    path = AirFRANSSource(tmp_path).file("ring", "internal.vtu")
    mesh = pv.read(path)
    rows = [2, 60]  # one on the wall
    mesh.point_data["p"][rows] = 1.03 * SPEED**2 / 2
    mesh.save(str(path))
    arrays = derive(tmp_path, "ring")
    assert (before["C_pt"] < 1.02).all()
    for name in ("ΔU/|U_inf|", "C_p", "C_pt", "ln(1+nut/nu)"):
        bad = np.isnan(arrays[name]).reshape(len(arrays[name]), -1)
        assert np.flatnonzero(bad.all(axis=1)).tolist() == rows == np.flatnonzero(bad.any(axis=1)).tolist()
    assert np.flatnonzero(np.isnan(arrays["wall_shear"]).all(axis=1)).tolist() == [2]


def test_shear_and_forces_agree_with_the_airfrans_package(shipped):
    airfrans = pytest.importorskip("airfrans")
    samples = {}
    for split in ("train", "val", "test"):
        module = AirFRANSDataModule(
            root="samples", cache_dir=shipped.cache_dir, num_workers=0, predict_split=split, random_face_positions=False
        )
        module.setup("predict")
        for sample in module.predict_dataloader():
            samples[sample.case] = sample
    assert sorted(samples) == SHIPPED
    for case, sample in samples.items():
        theirs = airfrans.Simulation(str(SAMPLES), case)
        wall = np.array(shipped.datasets["test"].arrays(case)["wall_ids"])
        shear = theirs.wallshearstress(reference=True)[wall] / sample.scales["q_inf"]
        ours = sample.targets["C_F,shear"][wall].numpy()
        error = np.linalg.norm(ours - shear, axis=1) / np.linalg.norm(shear, axis=1)
        assert np.median(error) < 0.02
        (drag, *_), (lift, *_) = theirs.force_coefficient(reference=True)
        found = coefficients(sample)
        assert found["Cl"] == pytest.approx(lift, rel=0.03)
        assert found["Cd"] == pytest.approx(drag, rel=0.05)


# What a sample holds.


def test_samples_fit_the_schema(shipped):
    schema = shipped.schema
    ranks = flatten_ranks(schema.output_field_ranks)
    for split in ("train", "val", "test", "predict"):
        dataset = shipped.datasets[split]
        for index in range(0, len(dataset), 3):
            sample = dataset[index]
            n = len(sample.prediction_points)
            assert sample.case == dataset.cases[index] and sample.index == index
            assert sample.prediction_points.dtype == torch.float32
            assert set(sample.targets.keys()) == set(ranks)
            for name, rank in ranks.items():
                assert sample.targets[name].shape == ((n, 2) if rank else (n,))
                assert sample.targets[name].dtype == torch.float32
            assert list(sample.reference_lengths) == schema.reference_length_names
            assert all(length > 0 for length in sample.reference_lengths.values())
            assert float(sample.reference_lengths["delta_FS"]) == pytest.approx(
                math.sqrt(NU / sample.scales["U_inf"]), rel=1e-6
            )
            assert list(sample.boundary_meshes) == list(schema.boundary_source_data_ranks)
            assert sample.global_data["U_inf / U_inf_magnitude"].norm().item() == pytest.approx(1, rel=1e-6)
            assert all(type(value) is float for value in sample.scales.values())
            known = ~sample.targets["C_F,shear"].isnan().any(dim=1)
            assert torch.equal(known, sample.targets["ΔU/|U_inf|"].isfinite().all(1) & _on_wall(shipped, sample))
            assert (sample.force_surface is None) == (split == "train")


def _on_wall(module, sample):
    distance = module.case_mesh(sample.case).point_data["implicit_distance"]
    return torch.from_numpy(np.asarray(distance) == 0)[sample.point_ids]


def test_points_and_targets_belong_together(shipped):
    sample = shipped.datasets["train"][1]
    mesh = shipped.case_mesh(sample.case)
    assert len(sample.prediction_points) == 2048 == len(sample.point_ids.unique())
    np.testing.assert_array_equal(sample.prediction_points.numpy(), mesh.points[sample.point_ids.numpy(), :2])
    pressure = mesh.point_data["p"][sample.point_ids.numpy()] / sample.scales["q_inf"]
    np.testing.assert_allclose(sample.targets["C_p"].numpy(), pressure, rtol=1e-5, atol=1e-6)


def test_test_and_prediction_hold_all_points_and_forces_integrate(shipped):
    sample = shipped.datasets["test"][0]
    assert torch.equal(sample.point_ids, torch.arange(shipped.case_mesh(sample.case).n_points))
    small = AirFRANSDataModule(
        root="samples", cache_dir=shipped.cache_dir, num_workers=0, n_validation_points=700, n_train_points=100
    )
    small.setup("fit")
    assert set(small.datasets) == {"train", "val"}, "only what the stage needs"
    few = small.datasets["val"][0]
    whole = shipped.datasets["val"][0]
    assert len(few.prediction_points) == 700
    assert coefficients(few) == pytest.approx(coefficients(whole), rel=1e-12)
    assert torch.equal(few.prediction_points, small.datasets["val"][0].prediction_points)
    small.set_epoch(5)
    assert torch.equal(few.prediction_points, small.datasets["val"][0].prediction_points), "one draw for good"


def test_face_normal_forces_close_the_surface(shipped):
    module = AirFRANSDataModule(root="samples", cache_dir=shipped.cache_dir, num_workers=0, force_normals="face")
    module.setup("test")
    for index in range(4):
        sample = module.datasets["test"][index]
        areas = sample.force_surface.area_vectors.double()
        assert areas.sum(dim=0).abs().max() < 1e-6
        vertex = coefficients(shipped.datasets["test"][index])
        assert coefficients(sample)["Cl"] == pytest.approx(vertex["Cl"], rel=0.01)
        drag, lift = (sample.force_surface.directions[name].double() for name in ("Cd", "Cl"))
        assert abs(drag @ lift) < 1e-12 and drag[0] * lift[1] - drag[1] * lift[0] == pytest.approx(1, rel=1e-6)


def test_orientation_of_the_sources(root, shipped):
    for orientation, sign in (("outward", 1), ("inward", -1)):
        module = module_of(root, orientation=orientation)
        module.setup("test")
        mesh = module.datasets["test"][0].boundary_meshes["no_slip"]
        assert ((mesh.normals * mesh.centroids).sum(dim=1) * sign > 0).all()
    # The ring's file is clockwise, so its own winding points outward.
    module = module_of(root, orientation="file")
    module.setup("test")
    sample = module.datasets["test"][0]
    mesh = sample.boundary_meshes["no_slip"]
    wall = pv.read(module.make_source().file(sample.case, "aerofoil.vtp"))
    corners = wall.points[wall.lines.reshape(-1, 3)[:, 1:], :2]
    np.testing.assert_array_equal(mesh.corners.numpy(), corners)


def test_a_subset_of_faces_keeps_the_length(shipped):
    whole = shipped.datasets["test"][0].boundary_meshes["no_slip"]
    assert whole.n_faces == 168 and whole.measure_weights is None and whole.face_positions is None
    module = AirFRANSDataModule(root="samples", cache_dir=shipped.cache_dir, num_workers=0, n_boundary_faces=50)
    module.setup(None)
    for split in ("train", "val", "test"):
        mesh = module.datasets[split][0].boundary_meshes["no_slip"]
        assert mesh.n_faces == 50
    assert mesh.areas.sum().item() == pytest.approx(whole.areas.sum().item(), rel=1e-5)
    assert torch.equal(mesh.cells, module.datasets["test"][0].boundary_meshes["no_slip"].cells)
    assert module.datasets["test"][0].force_surface.point_indices.shape[0] == 168, "forces integrate over all"


def test_random_positions_lie_on_their_faces_in_training_only(shipped):
    mesh = shipped.datasets["train"][0].boundary_meshes["no_slip"]
    start, end = mesh.corners.double().unbind(dim=1)
    place = mesh.face_positions.double()
    along = ((place - start) * (end - start)).sum(1) / (end - start).square().sum(1)
    assert (along >= -1e-5).all() and (along <= 1 + 1e-5).all() and along.std() > 0.2
    assert shipped.datasets["val"][0].boundary_meshes["no_slip"].face_positions is None
    module = AirFRANSDataModule(root="samples", cache_dir=shipped.cache_dir, random_face_positions=False)
    module.setup("fit")
    assert module.datasets["train"][0].boundary_meshes["no_slip"].face_positions is None


def test_wall_points_by_request(shipped):
    module = AirFRANSDataModule(
        root="samples", cache_dir=shipped.cache_dir, n_train_points=300, n_train_wall_points=120
    )
    module.setup("fit")
    sample = module.datasets["train"][0]
    assert len(sample.point_ids.unique()) == 300
    assert int(_on_wall(module, sample).sum()) >= 120
    every = AirFRANSDataModule(root="samples", cache_dir=shipped.cache_dir, n_train_points=None)
    every.setup("fit")
    assert len(every.datasets["train"][0].point_ids) == every.case_mesh(sample.case).n_points


def test_fields_in_the_datasets_units(shipped):
    sample = shipped.datasets["test"][1]
    mesh = shipped.case_mesh(sample.case)
    found = shipped.dimensional(sample, {**dict(sample.targets.items()), "other": torch.zeros(3)})
    assert set(found) == {"U", "p", "p_total", "nut", "wallShearStress"}
    speed, pressure = sample.scales["U_inf"], sample.scales["q_inf"]
    np.testing.assert_allclose(found["U"], mesh.point_data["U"][:, :2], atol=1e-5 * speed)
    np.testing.assert_allclose(found["p"], mesh.point_data["p"], atol=1e-5 * pressure)
    np.testing.assert_allclose(found["nut"], mesh.point_data["nut"], rtol=1e-4, atol=1e-4 * NU)
    np.testing.assert_allclose(found["p_total"] - found["p"], (found["U"] ** 2).sum(1) / 2, atol=2e-5 * pressure)
    only = shipped.dimensional(sample, {"C_p": sample.targets["C_p"].numpy()})
    np.testing.assert_array_equal(only["p"], found["p"])


# Splits.


@pytest.mark.parametrize("task", TASKS)
def test_shipped_splits_are_disjoint_and_complete(task, cache_dir):
    module = AirFRANSDataModule(root="samples", task=task, cache_dir=cache_dir)
    splits = module.splits()
    lists = module.case_lists()
    cases = [case for names in splits.values() for case in names]
    assert len(cases) == len(set(cases)) and set(cases) <= set(SHIPPED)
    assert splits["test"] == lists["test"] and all(splits.values())
    assert sorted(splits["train"] + splits["val"]) == sorted(lists["train"]), "validation is carved from train alone"


def test_the_validation_choice_depends_on_its_seed_and_the_names_alone(root):
    first = module_of(root, n_validation=2).splits()
    assert len(first["val"]) == 2 and len(first["train"]) == 3
    assert module_of(root, n_validation=2, seed=9, n_train_points=3).splits() == first
    others = [module_of(root, n_validation=2, split_seed=seed).splits()["val"] for seed in range(1, 8)]
    assert any(other != first["val"] for other in others)
    path = root / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["full_train"].reverse()
    path.write_text(json.dumps(manifest))
    assert set(module_of(root, n_validation=2).splits()["val"]) == set(first["val"])
    none = module_of(root, validation_fraction=0)
    none.setup("fit")
    assert none.splits()["val"] == [] and none.val_dataloader() == []
    assert len(module_of(root).splits()["val"]) == 1


def test_predict_split(root):
    for split in ("train", "val", "test"):
        module = module_of(root, predict_split=split)
        module.setup("predict")
        assert module.datasets["predict"].cases == module.splits()[split]
        assert all(sample.force_surface is not None for sample in module.predict_dataloader())


def test_shipped_size_and_licence():
    size = sum(path.stat().st_size for path in SAMPLES.rglob("*") if path.is_file())
    assert len(SHIPPED) == 16 and size < 13e6
    text = (SAMPLES.parent / "README.md").read_text()
    assert "CC0" in text and "not part of AirFRANS" in text


# The cache of a dataset.


def test_default_cache_stands_beside_the_data_or_in_the_users_cache(root, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    module = module_of(root)
    assert module.make_cache(module.make_source()).folder == root / ".globe_cache" / "airfrans"
    samples = AirFRANSDataModule(root="samples")
    folder = samples.make_cache(samples.make_source()).folder
    assert folder.parent == tmp_path / "user" / "globe_lightning"
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert module.make_cache(module.make_source()).folder.parent == folder.parent
    assert module.make_cache(module.make_source()).folder != folder


@pytest.mark.parametrize("workers", [0, 1])
def test_prepare_fills_the_cache_once(root, workers, capsys, monkeypatch):
    module = AirFRANSDataModule(root=str(root), num_workers=workers)
    module.prepare()
    assert "7/7" in capsys.readouterr().err, "a progress bar"
    before = dict(vars(module))
    monkeypatch.setattr(AirFRANSSource, "derive", lambda self, case: pytest.fail("derived again"))
    module.prepare_data()
    assert vars(module) == before, "prepare_data assigns no state"
    module.num_workers = 0
    module.setup(None)
    for split in module.datasets:
        assert len(list(module._dataloader_factory(split))) == len(module.datasets[split])


def test_a_changed_file_or_derivation_makes_the_entry_stale(root, monkeypatch):
    module = module_of(root)
    module.prepare(progress=False)
    folder = root / ".globe_cache" / "airfrans"
    assert len(list(folder.iterdir())) == 7
    module.setup("test")
    case = module.datasets["test"].cases[0]
    before = module.datasets["test"][0].targets["C_p"].clone()
    path = module.make_source().file(case, "internal.vtu")
    mesh = pv.read(path)
    mesh.point_data["p"] *= np.float32(0.5)
    mesh.save(str(path))
    torch.testing.assert_close(module.datasets["test"][0].targets["C_p"], before / 2)
    assert len(list(folder.iterdir())) == 8
    module.prepare(progress=False)
    assert len(list(folder.iterdir())) == 7, "the stale entry is gone"
    names = {path.name for path in folder.iterdir()}
    monkeypatch.setattr(AirFRANSSource, "derivation_version", 999)
    module.prepare(progress=False)
    assert len(list(folder.iterdir())) == 7 and not names & {path.name for path in folder.iterdir()}


def test_prepare_heals_a_flipped_bit(root):
    module = module_of(root)
    module.prepare(progress=False)
    module.setup("test")
    before = module.datasets["test"][0].prediction_points
    file = next((root / ".globe_cache" / "airfrans").glob(f"{module.datasets['test'].cases[0]}-*")) / "0.npy"
    content = bytearray(file.read_bytes())
    content[-1] ^= 64
    file.write_bytes(content)
    assert not torch.equal(module.datasets["test"][0].prediction_points, before)
    module.prepare(progress=False)
    assert torch.equal(module.datasets["test"][0].prediction_points, before)


# The module.


def test_loaders_before_setup(shipped):
    with pytest.raises(RuntimeError, match="setup"):
        AirFRANSDataModule(root="samples").train_dataloader()


def test_cases_may_be_copied_elsewhere(root, tmp_path):
    shutil.copytree(root, tmp_path / "copy")
    first, second = module_of(root), module_of(tmp_path / "copy")
    for module in (first, second):
        module.setup("test")
    a, b = (module.datasets["test"][0] for module in (first, second))
    assert torch.equal(a.targets["C_p"], b.targets["C_p"]) and torch.equal(a.prediction_points, b.prediction_points)


def test_workers_load_no_lightning():
    script = "import sys, datamodules.airfrans_source; sys.exit('lightning' in sys.modules or 'pyvista' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=120).returncode == 0


def test_public_names():
    assert "AirFRANSDataModule" in dir(datamodules)
    with pytest.raises(AttributeError, match="Nothing"):
        _ = datamodules.Nothing
