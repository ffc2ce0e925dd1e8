"""What the AirFRANS data module refuses: arguments, folders, manifests and files, and how it says so."""

from __future__ import annotations

import json

import numpy as np
import pytest
import pyvista as pv
from data_synthetic import write_case, write_dataset

from datamodules import AirFRANSDataModule
from datamodules.airfrans_source import AirFRANSSource


@pytest.fixture
def root(tmp_path):
    write_dataset(tmp_path / "data")
    return tmp_path / "data"


def module_of(root, **options):
    return AirFRANSDataModule(root=str(root), num_workers=0, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "ful"}, r"task: expected one of 'full', 'scarce', 'reynolds', 'aoa', found 'ful'"),
        ({"orientation": "up"}, "orientation: expected one of"),
        ({"force_normals": "no"}, "force_normals: expected one of"),
        ({"n_train_points": 0}, "n_train_points: expected a positive number or null, found 0"),
        ({"n_validation_points": -1}, "n_validation_points"),
        ({"n_boundary_faces": 0}, "n_boundary_faces"),
        ({"n_train_wall_points": 4096}, "n_train_wall_points"),
        ({"validation_fraction": 1.0}, "validation_fraction"),
        ({"n_validation": -1}, "n_validation"),
        ({"predict_split": "all"}, "predict_split"),
        ({"num_workers": -2}, "num_workers"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        AirFRANSDataModule(root="samples", **options)


def test_root_argument_environment_or_error(root, tmp_path, monkeypatch):
    monkeypatch.delenv("AIRFRANS_DATA_DIR", raising=False)
    with pytest.raises(ValueError, match=r"AIRFRANS_DATA_DIR.*samples"):
        AirFRANSDataModule().setup("fit")
    monkeypatch.setenv("AIRFRANS_DATA_DIR", str(root))
    assert AirFRANSDataModule().root_path() == root
    monkeypatch.setenv("AIRFRANS_DATA_DIR", str(tmp_path / "no"))
    with pytest.raises(FileNotFoundError, match=r"no: .*AIRFRANS_DATA_DIR"):
        AirFRANSDataModule().prepare_data()
    with pytest.raises(FileNotFoundError, match="gone: no such folder, named by root"):
        AirFRANSDataModule(root=str(tmp_path / "gone")).prepare_data()


def test_manifest_faults(root):
    path = root / "manifest.json"
    manifest = json.loads(path.read_text())

    def refuse(error, message):
        with pytest.raises(error, match=message):
            module_of(root).setup("fit")

    path.write_text(json.dumps({**manifest, "full_train": [*manifest["full_train"], "ghost"]}))
    refuse(FileNotFoundError, r"manifest\.json: list 'full_train' names 1 of 6 cases .*'ghost'")
    path.write_text(json.dumps({**manifest, "full_test": manifest["full_train"][:1]}))
    refuse(ValueError, "both the train and the test list")
    path.write_text(json.dumps({**manifest, "full_train": manifest["full_train"] * 2}))
    refuse(ValueError, "names a case twice")
    path.write_text(json.dumps({"aoa_train": []}))
    refuse(ValueError, r"under 'full_train', found \['aoa_train'\]")
    path.write_text("[]")
    refuse(ValueError, "found list")
    path.write_text("{")
    refuse(ValueError, r"manifest\.json: not valid JSON")
    path.unlink()
    refuse(FileNotFoundError, r"manifest\.json: no such file")


def test_all_train_cases_set_aside(root):
    with pytest.raises(ValueError, match=r"3 of 3 train cases.*n_validation"):
        module_of(root, task="scarce", n_validation=3).setup("fit")


def edit_missing(path):
    path.unlink()


def edit_truncated(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize("part", ["internal.vtu", "aerofoil.vtp", "freestream.vtp"])
@pytest.mark.parametrize(("edit", "error"), [(edit_missing, FileNotFoundError), (edit_truncated, ValueError)])
def test_missing_or_truncated_files_are_named(root, part, edit, error):
    module = module_of(root)
    case = module.splits()["train"][0]
    edit(module.make_source().file(case, part))
    with pytest.raises(error, match=f"{case}_{part}"):
        module.prepare(progress=False)


def change(root, part, edit):
    source = AirFRANSSource(root)
    path = source.file("ring", part)
    mesh = pv.read(path)
    mesh = edit(mesh) or mesh
    mesh.save(str(path))


def _drop(name):
    def edit(mesh):
        (mesh.point_data if name in mesh.point_data else mesh.cell_data).remove(name)

    return edit


def _replace(name, value, association="point_data"):
    def edit(mesh):
        data = getattr(mesh, association)
        data[name] = value(np.array(data[name]))

    return edit


def _nan(array):
    array.reshape(-1)[3] = np.nan
    return array


def _move_wall(mesh):
    points = np.array(mesh.points)
    points[4, 0] += 1e-3
    mesh.points = points


def _open_wall(mesh):
    return pv.PolyData(mesh.points, lines=mesh.lines.reshape(-1, 3)[:-2].ravel())


def _one_line(mesh):
    return pv.PolyData(mesh.points, lines=[mesh.n_points, *range(mesh.n_points)])


def _chords(mesh):
    lines = mesh.lines.reshape(-1, 3).copy()
    lines[:, 2] = (lines[:, 1] + 2) % mesh.n_points
    return pv.PolyData(mesh.points, lines=lines.ravel())


def _only_outer_cells(mesh):
    return pv.UnstructuredGrid({pv.CellType.QUAD: mesh.cells_dict[pv.CellType.QUAD][24:]}, mesh.points)


def _outer(mesh):
    new = _only_outer_cells(mesh)
    for name in mesh.point_data:
        new.point_data[name] = mesh.point_data[name]
    return new


@pytest.mark.parametrize(
    ("part", "edit", "message"),
    [
        ("internal.vtu", _drop("nut"), r"ring_internal\.vtu: point array 'nut' is missing"),
        ("internal.vtu", _drop("implicit_distance"), "'implicit_distance' is missing"),
        ("internal.vtu", _replace("U", lambda u: u[:, :2]), r"'U' has shape \(144, 2\), expected \(144, 3\)"),
        ("internal.vtu", _replace("p", _nan), r"'p' holds NaN or infinity in 1 of 144 rows"),
        ("internal.vtu", _replace("nut", lambda x: -x - 1), r"'nut' is negative in 144 rows"),
        ("internal.vtu", _replace("implicit_distance", lambda x: x - 1), "'implicit_distance' is 0 nowhere"),
        ("internal.vtu", _outer, r"ring_internal\.vtu: no cell touches the wall"),
        ("aerofoil.vtp", _move_wall, r"ring_aerofoil\.vtp: 1 of 24 points are not among the points"),
        ("aerofoil.vtp", _open_wall, r"ring_internal\.vtu: 1 of 24 wall points belong to no segment"),
        ("aerofoil.vtp", _one_line, r"ring_aerofoil\.vtp: expected 1 cells that are segments"),
        ("aerofoil.vtp", _chords, r"ring_aerofoil\.vtp: 24 of 24 segments are edges of no cell"),
        ("freestream.vtp", _drop("U"), r"ring_freestream\.vtp: cell array 'U' is missing"),
        ("freestream.vtp", _replace("U", lambda u: 0 * u, "cell_data"), "mean of zero"),
        ("freestream.vtp", lambda mesh: pv.PolyData(np.zeros((0, 3))), r"ring_freestream\.vtp: the mesh is empty"),
    ],
)
def test_bad_contents_name_file_array_expected_and_found(tmp_path, part, edit, message):
    write_case(tmp_path, "ring")
    change(tmp_path, part, edit)
    with pytest.raises(ValueError, match=message):
        AirFRANSSource(tmp_path).derive("ring")
