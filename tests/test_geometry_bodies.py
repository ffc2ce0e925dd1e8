"""Surfaces of cars: every fault is found and mended, in every file format."""

from __future__ import annotations

import numpy as np
import pytest
import pyvista as pv
from drivaerml_synthetic import body

from datamodules import polygons
from datamodules.body_shape import REPAIRS, UNITS, body_arrays, build_surface, examine_body, read_body
from datamodules.drivaerml_source import SurfaceIntegrals
from datamodules.shape_report import ShapeError, ShapeReport
from datamodules.vtk_io import polygon_corners


def report(**options) -> ShapeReport:
    return ShapeReport("car.stl", REPAIRS, **options)


def car(winding: str = "outward") -> pv.PolyData:
    """A body with a nose, a tail and a roof: an ellipsoid, flattened below and sheared; 290 points, x from -0.85."""
    mesh = body(1, n_along=18, n_around=17, winding=winding)
    mesh.clear_data()
    points = np.array(mesh.points, dtype=np.float64)
    points[:, 2] = np.maximum(points[:, 2], 0.15) + 0.04 * points[:, 0] * (points[:, 2] > 0.5)
    points[:, 0] += -0.85 - points[:, 0].min()
    mesh.points = points.astype(np.float32)
    return mesh


def integrals(mesh: pv.PolyData) -> SurfaceIntegrals:
    starts, triangles = polygons.fans(*polygon_corners(mesh, "car"))
    return SurfaceIntegrals(np.asarray(mesh.points), starts, triangles)


def with_faces(mesh: pv.PolyData, keep: np.ndarray, more: pv.PolyData | None = None) -> pv.PolyData:
    """Some faces of a triangulated mesh, and those of another."""
    points = np.asarray(mesh.points)
    triangles = mesh.faces.reshape(-1, 4)[keep, 1:]
    if more is not None:
        triangles = np.concatenate([triangles, more.faces.reshape(-1, 4)[:, 1:] + len(points)])
        points = np.concatenate([points, np.asarray(more.points)])
    return build_surface(points, np.arange(len(triangles) + 1) * 3, triangles.ravel())


CAR = car().triangulate()
ALL = np.arange(CAR.n_cells)


@pytest.mark.parametrize("suffix", ["stl", "vtp", "ply", "obj"])
def test_every_format_gives_the_same_surface(tmp_path, suffix):
    path = tmp_path / f"car.{suffix}"
    if suffix == "obj":
        vertices = "".join(f"v {x:.9g} {y:.9g} {z:.9g}\n" for x, y, z in CAR.points.tolist())
        faces = CAR.faces.reshape(-1, 4)[:, 1:] + 1
        path.write_text(vertices + "".join(f"f {a} {b} {c}\n" for a, b, c in faces))
    else:
        CAR.save(path)
    found = report()
    mesh = examine_body(read_body(path), found)
    assert not found.findings, str(found)
    assert (mesh.n_points, mesh.n_cells) == (CAR.n_points, CAR.n_cells)
    assert integrals(mesh).volume == pytest.approx(integrals(CAR).volume, rel=1e-5)


@pytest.mark.parametrize("unit", ["mm", "cm", "in"])
def test_units_are_found_and_mended(unit):
    mesh = CAR.copy()
    mesh.points = mesh.points / np.float32(UNITS[unit])
    with pytest.raises(ShapeError, match=r"--repair units"):
        examine_body(mesh, report())
    for options in ({"repair": ["units"]}, {}):
        mended = examine_body(mesh, report(**options), unit=None if options else unit)
        np.testing.assert_allclose(mended.points, CAR.points, rtol=1e-5, atol=1e-5)
    accepted = report(accept=["units", "position"])
    np.testing.assert_array_equal(examine_body(mesh, accepted).points, mesh.points)
    assert "units" in accepted.names("warning")


def test_millimeters_are_named():
    mesh = CAR.copy()
    mesh.points = mesh.points * np.float32(1000)
    with pytest.raises(ShapeError, match="millimeters"):
        examine_body(mesh, report())


def test_sizes_that_fit_no_unit_and_unknown_units():
    mesh = CAR.copy()
    mesh.points = mesh.points * np.float32(1e7)
    with pytest.raises(ShapeError, match="no usual unit fits"):
        examine_body(mesh, report())
    with pytest.raises(ValueError, match="units cannot be mended"):
        examine_body(mesh, report(repair=["all"]))
    with pytest.raises(ValueError, match="units: expected one of m, mm, cm, in, ft, found 'yd'"):
        examine_body(CAR, report(), unit="yd")


@pytest.mark.parametrize(
    ("axes", "names"),
    [((0, 2, 1), ["up"]), ((1, 0, 2), ["flow"]), ((1, 2, 0), ["flow", "up"]), ((2, 1, 0), ["flow", "up"])],
)
def test_axes_are_found_and_mended(axes, names):
    mesh = CAR.copy()
    signs = np.array([1, 1, 1], dtype=np.float32)
    if np.linalg.det(np.eye(3)[list(axes)]) < 0:
        signs[2] = -1  # a rotation, not a mirror image
    mesh.points = np.asarray(mesh.points)[:, list(axes)] * signs
    with pytest.raises(ShapeError) as raised:
        examine_body(mesh, report(accept=["position"]))
    assert sorted(raised.value.report.names("error")) == sorted(names)
    mended = examine_body(mesh, report(repair=[*names, "position"]))
    extents = np.ptp(np.asarray(mended.points), axis=0)
    np.testing.assert_allclose(extents, np.ptp(np.asarray(CAR.points), axis=0), rtol=1e-5)
    assert integrals(mended).volume > 0


def test_a_body_far_from_the_floors_is_refused_a_shifted_one_reported():
    for shift, level in (((50, 0, 0), "error"), ((1.5, 0.4, 0), "warning")):
        mesh = CAR.copy()
        mesh.points = mesh.points + np.array(shift, dtype=np.float32)
        found = report()
        if level == "error":
            with pytest.raises(ShapeError, match="floors"):
                examine_body(mesh, found)
        else:
            examine_body(mesh, found)
        assert found.names(level) == ["position"]
        mended = examine_body(mesh, report(repair=["position"]))
        np.testing.assert_allclose(mended.points, CAR.points, atol=2e-2)


def test_inward_faces_are_reported_and_turned_when_asked():
    inward = car("inward").triangulate()
    found = report()
    assert integrals(examine_body(inward, found)).volume < 0 and found.names("warning") == ["normals"]
    assert integrals(examine_body(inward, report(repair=["normals"]))).volume > 0
    # The sources look outward in any case.
    for mesh in (inward, CAR):
        arrays = body_arrays(mesh, "car", 2.7, None)
        sums = SurfaceIntegrals(arrays["points"], arrays["starts"], arrays["triangles"])
        assert sums.volume == pytest.approx(integrals(CAR).volume, rel=1e-6)


def test_mixed_faces_are_refused_and_mended():
    faces = CAR.faces.reshape(-1, 4)[:, 1:].copy()
    some = np.random.default_rng(0).random(len(faces)) < 0.3
    faces[some] = faces[some][:, ::-1]
    mesh = build_surface(np.asarray(CAR.points), np.arange(len(faces) + 1) * 3, faces.ravel())
    with pytest.raises(ShapeError, match="two faces look to opposite sides"):
        examine_body(mesh, report())
    mended = examine_body(mesh, report(repair=["normals"]))
    assert integrals(mended).volume == pytest.approx(integrals(CAR).volume, rel=1e-5)
    starts, triangles = polygons.fans(*polygon_corners(mended, "car"))
    assert polygons.inverted_edges(mended.n_points, starts, triangles) == 0


def test_a_part_that_looks_inward_is_refused_and_turned():
    mirror = pv.Sphere(0.2, center=(0.5, 1.3, 0.6), theta_resolution=8, phi_resolution=8)
    turned = build_surface(np.asarray(mirror.points), *inside_out(mirror))
    mesh = with_faces(CAR, ALL, turned)
    with pytest.raises(ShapeError, match="some connected parts look into the body"):
        examine_body(mesh, report(accept=["position"]))
    mended = examine_body(mesh, report(repair=["normals"], accept=["position"]))
    whole = integrals(CAR).volume + mirror.volume
    assert integrals(mended).volume == pytest.approx(whole, rel=1e-3)


def inside_out(mesh: pv.PolyData) -> tuple[np.ndarray, np.ndarray]:
    faces = mesh.faces.reshape(-1, 4)[:, :0:-1]
    return np.arange(len(faces) + 1) * 3, faces.ravel()


def test_openings_are_counted_and_closed():
    centers = np.asarray(CAR.cell_centers().points)
    mesh = with_faces(CAR, np.linalg.norm(centers - [1.5, 0, 0.15], axis=1) > 0.3)
    found = report()
    examine_body(mesh, found)
    assert found.names("warning") == ["holes"] and "belong to one face only" in str(found)
    mended = examine_body(mesh, report(repair=["holes"]))
    starts, triangles = polygons.fans(*polygon_corners(mended, "car"))
    assert polygons.edge_uses(mended.n_points, starts, triangles)[1] == 0
    assert integrals(mended).volume == pytest.approx(integrals(CAR).volume, rel=1e-2)


def test_edge_uses_against_a_dictionary():
    generator = np.random.default_rng(1)
    triangles = np.stack([generator.choice(9, 3, replace=False) for _ in range(30)]).astype(np.int32)
    uses: dict[tuple[int, int], int] = {}
    for a, b, c in triangles.tolist():
        for edge in ((a, b), (b, c), (c, a)):
            uses[min(edge), max(edge)] = uses.get((min(edge), max(edge)), 0) + 1
    counts = list(uses.values())
    expected = (len(counts), counts.count(1), sum(count > 2 for count in counts))
    assert polygons.edge_uses(9, np.arange(31, dtype=np.int32), triangles) == expected


def test_several_solids_are_reported_and_inner_ones_left_out_when_asked(tmp_path):
    engine = pv.Sphere(0.2, center=(1.4, 0, 0.5), theta_resolution=8, phi_resolution=8)
    wing = pv.Sphere(0.2, center=(3.5, 0, 1.6), theta_resolution=8, phi_resolution=8)
    path = tmp_path / "solids.stl"
    path.write_text(
        "".join(ascii_solid(mesh, name) for mesh, name in ((CAR, "car"), (engine, "engine"), (wing, "wing")))
    )
    mesh = read_body(path)
    assert mesh.n_cells == CAR.n_cells + engine.n_cells + wing.n_cells
    found = report()
    examine_body(mesh, found)
    assert "3 connected parts, taken as one surface" in str(found) and "1 of 3 parts lie inside" in str(found)
    mended = examine_body(mesh, report(repair=["solids"]))
    assert mended.n_cells == CAR.n_cells + wing.n_cells


def ascii_solid(mesh: pv.PolyData, name: str) -> str:
    facets = []
    for corners in np.asarray(mesh.points)[mesh.faces.reshape(-1, 4)[:, 1:]].tolist():
        vertices = "".join(f"vertex {x:.9g} {y:.9g} {z:.9g}\n" for x, y, z in corners)
        facets.append(f"facet normal 0 0 0\nouter loop\n{vertices}endloop\nendfacet\n")
    return f"solid {name}\n{''.join(facets)}endsolid {name}\n"


def test_degenerate_and_double_faces_and_points():
    points = np.asarray(CAR.points)
    faces = CAR.faces.reshape(-1, 4)[:, 1:]
    thin = np.array([[5, 5, 9], [7, 7, 7]])
    loose = np.concatenate([points, points])  # every point twice, and every second face on the copies
    bad = np.concatenate([np.where(np.arange(len(faces))[:, None] % 2, faces, faces + len(points)), thin, faces[:1]])
    mesh = build_surface(loose, np.arange(len(bad) + 1) * 3, bad.ravel())
    found = report()
    assert examine_body(mesh, found).n_cells == len(bad)
    assert found.names("warning") == ["duplicates", "degenerate", "duplicates"]
    mended = examine_body(mesh, report(repair=["duplicates", "degenerate"]))
    assert (mended.n_points, mended.n_cells) == (len(points), len(faces))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.stl", b"hello there\n", "a.stl: VTK cannot read"),
        ("a.stl", b"", "empty"),
        ("a.obj", b"hello\n", "mesh is empty"),
        ("a.obj", b"v 0 0 0\nv 1 0 0\nv 0 1 0\nf 1 2 7\n", "faces name the points"),
        ("a.ply", b"hello\n", "not a PLY file"),
        ("a.ply", b"ply\nformat ascii 1.0\nelement vertex 3\nproperty float x\n", "not a PLY file"),
    ],
)
def test_files_that_are_no_surface(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        examine_body(read_body(tmp_path / name), report())


@pytest.mark.parametrize("binary", [True, False])
def test_truncated_files_are_refused(tmp_path, binary):
    for suffix in ("ply", "stl"):
        path = tmp_path / f"car.{suffix}"
        CAR.save(path, binary=binary)
        content = path.read_bytes()
        path.write_bytes(content[: len(content) * 2 // 3])
        with pytest.raises(ValueError, match="truncated"):
            read_body(path)


def test_lines_points_and_flat_things_are_no_body(tmp_path):
    pv.Line().save(tmp_path / "line.vtp")
    with pytest.raises(ValueError, match="no polygons"):
        read_body(tmp_path / "line.vtp")
    with pytest.raises(FileNotFoundError, match="expected a surface"):
        read_body(tmp_path / "none.stl")
    flat = build_surface(np.zeros((3, 3), dtype=np.float32), np.array([0, 3]), np.array([0, 1, 2]))
    with pytest.raises(ValueError, match="all points are at one place"):
        examine_body(flat, report())
    with pytest.raises(ValueError, match=r"1 of .* points"):
        bad = CAR.copy()
        bad.points[3] = np.nan
        bad.save(tmp_path / "nan.vtp")
        read_body(tmp_path / "nan.vtp")
