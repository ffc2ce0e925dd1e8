"""VTK files at the door: what is wrong is named, what is right comes back."""

from __future__ import annotations

import numpy as np
import pytest
import pyvista as pv

from datamodules.vtk_io import named_array, read_mesh, write_mesh


def grid(n: int = 40) -> pv.UnstructuredGrid:
    mesh = pv.ImageData(dimensions=(n, n, 1)).cast_to_unstructured_grid()
    generator = np.random.default_rng(0)
    mesh.point_data["p"] = generator.normal(size=mesh.n_points).astype(np.float32)
    mesh.point_data["U"] = generator.normal(size=(mesh.n_points, 3))
    mesh.cell_data["p"] = generator.normal(size=mesh.n_cells)
    return mesh


@pytest.fixture
def file(tmp_path):
    return write_mesh(grid(), tmp_path / "made" / "mesh.vtu")


def test_round_trip(file):
    mesh, back = grid(), read_mesh(file)
    np.testing.assert_array_equal(back.points, mesh.points)
    for association in ("point", "cell"):
        value = named_array(back, "p", file, association)
        assert value.dtype == np.float64
        np.testing.assert_array_equal(value, getattr(mesh, f"{association}_data")["p"])
    np.testing.assert_array_equal(named_array(back, "U", file, components=3), mesh.point_data["U"])
    assert [path.name for path in file.parent.iterdir()] == ["mesh.vtu"], "nothing left beside it"


def test_only_the_named_arrays_are_loaded(file):
    mesh = read_mesh(file, point_arrays=("U", "absent"), cell_arrays=())
    assert list(mesh.point_data) == ["U"] and list(mesh.cell_data) == []


def test_failed_write_leaves_the_old_file(file, monkeypatch):
    before = file.read_bytes()

    def fail(self, path, *args, **kwargs):
        with open(path, "wb") as stream:
            stream.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(pv.UnstructuredGrid, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        write_mesh(grid(), file)
    assert file.read_bytes() == before and len(list(file.parent.iterdir())) == 1


def test_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"gone\.vtu"):
        read_mesh(tmp_path / "gone.vtu")


@pytest.mark.parametrize("keep", [0, 0.02, 0.5, 0.97])
def test_truncated_file_is_named(file, keep):
    content = file.read_bytes()
    file.write_bytes(content[: int(keep * len(content))])
    with pytest.raises(ValueError, match=r"mesh\.vtu: .*(truncated|empty)"):
        read_mesh(file)


@pytest.mark.parametrize("suffix", [".vtu", ".txt"])
def test_no_vtk_file(tmp_path, suffix):
    path = tmp_path / f"mesh{suffix}"
    path.write_text("hello, not VTK")
    with pytest.raises(ValueError, match=f"mesh{suffix}"):
        read_mesh(path)


def test_empty_mesh(tmp_path):
    path = tmp_path / "void.vtp"
    pv.PolyData(np.zeros((0, 3))).save(str(path))
    with pytest.raises(ValueError, match=r"void\.vtp.*0 points and 0 cells"):
        read_mesh(path)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_numbers_in_a_file_are_counted(tmp_path, bad):
    mesh = grid(5)
    mesh.point_data["p"][4] = bad
    path = write_mesh(mesh, tmp_path / "bad.vtu")
    with pytest.raises(ValueError, match=r"bad\.vtu: point array 'p' holds NaN or infinity in 1 of 25 rows"):
        named_array(read_mesh(path), "p", path)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_coordinates_are_counted(tmp_path, bad):
    mesh = grid(5)
    points = np.array(mesh.points)
    points[3, 1] = points[7] = bad
    mesh.points = points
    path = write_mesh(mesh, tmp_path / "bad.vtu")
    with pytest.raises(ValueError, match=r"bad\.vtu: 2 of 25 points"):
        read_mesh(path)


def test_array_faults_name_array_expected_and_found(file):
    mesh = read_mesh(file)
    with pytest.raises(ValueError, match=r"mesh\.vtu: point array 'nut' is missing; found .*'U'"):
        named_array(mesh, "nut", file)
    with pytest.raises(ValueError, match=r"cell array 'U' is missing; found 'p'"):
        named_array(mesh, "U", file, "cell", 3)
    with pytest.raises(ValueError, match=r"'U' has shape \(1600, 3\), expected \(1600,\)"):
        named_array(mesh, "U", file)
    with pytest.raises(ValueError, match=r"'p' has shape \(1600,\), expected \(1600, 3\)"):
        named_array(mesh, "p", file, components=3)
    mesh.point_data["p"][[1, 5]] = [np.nan, np.inf]
    with pytest.raises(ValueError, match=r"'p' holds NaN or infinity in 2 of 1600 rows"):
        named_array(mesh, "p", file)
    mesh.point_data["word"] = ["x"] * mesh.n_points
    with pytest.raises(ValueError, match=r"'word' has type"):
        named_array(mesh, "word", file)
    del mesh.cell_data["p"]
    with pytest.raises(ValueError, match="found none"):
        named_array(mesh, "p", file, "cell")
