"""Bodies in space as images: against rays cast one by one, and what a figure shows."""

from __future__ import annotations

import numpy as np
import pytest
import pyvista as pv
import torch
from drivaerml_synthetic import body
from tensordict import TensorDict

from globe_lightning.callbacks import rasterise
from globe_lightning.callbacks.rasterise import Camera, see_triangles
from globe_lightning.callbacks.surface_pictures import VIEWS, draw_surface_case, fans, is_surface
from globe_lightning.sample import Sample


def cast_rays(camera, points, triangles):
    """The nearest triangle under every pixel centre, one triangle after the other; -1 for none."""
    height, width = camera.shape
    owner, nearest = np.full((height, width), -1), np.full((height, width), -np.inf)
    y, x = np.mgrid[:height, :width]
    projected = camera.project(points)
    for number, corners in enumerate(projected[triangles]):
        matrix = np.concatenate([corners[:, :2].T, np.ones((1, 3))])
        weights = np.linalg.solve(matrix, np.stack([x.ravel(), y.ravel(), np.ones(x.size)]))
        depth = (weights * corners[:, 2:]).sum(axis=0).reshape(height, width)
        hit = (weights >= 0).all(axis=0).reshape(height, width) & (depth > nearest)
        owner[hit], nearest[hit] = number, depth[hit]
    return owner


@pytest.mark.parametrize("small", [False, True])
def test_pixels_show_the_nearest_triangle(small, monkeypatch):
    if small:  # many blocks
        monkeypatch.setattr(rasterise, "TRIANGLES", 7)
        monkeypatch.setattr(rasterise, "CANDIDATES", 50)
    generator = np.random.default_rng(0)
    triangles = np.arange(120).reshape(40, 3)
    centres = generator.uniform(-1, 1, (40, 1, 3))
    points = (centres + generator.normal(scale=0.5, size=(40, 3, 3))).reshape(-1, 3)
    camera = Camera(30.0, 20.0, 25.0, (-1.5, -1.2), (60, 75))
    shown = see_triangles(camera, points, triangles, np.arange(40))
    expected = cast_rays(camera, points, triangles)
    found = np.where(shown.covered, shown.rows[..., 0], -1)
    assert (found == expected).mean() > 0.999 and 0.3 < shown.covered.mean() < 1
    # Mixed from vertices, a field that is linear in space is the position that the pixel shows.
    mixed = see_triangles(camera, points, triangles).values(points)
    flat = camera.project(mixed[shown.covered])
    y, x = np.nonzero(shown.covered)
    np.testing.assert_allclose(flat[:, :2], np.stack([x, y], axis=1), atol=1e-9)
    assert np.isnan(mixed[~shown.covered]).all()


def test_a_sphere_is_a_disc_that_faces_the_viewer_in_its_middle():
    sphere = pv.Sphere(radius=1.0, theta_resolution=60, phi_resolution=60)
    triangles, cells = fans(sphere)
    camera = Camera(10.0, 35.0, 40.0, (-1.25, -1.25), (100, 100))
    shown = see_triangles(camera, np.asarray(sphere.points), triangles)
    assert shown.covered.sum() / 40**2 == pytest.approx(np.pi, rel=0.01)
    assert shown.facing[50, 50] > 0.99 > 0.4 > shown.facing[50, np.flatnonzero(shown.covered[50])[0]]
    # Only the near half is seen.
    assert ((shown.values(np.asarray(sphere.points)) @ camera.axes[2])[shown.covered] > -0.01).all()
    assert len(triangles) == len(cells) == sphere.n_cells


def test_cameras_look_from_where_they_say():
    right, up, toward = Camera(-90.0, 0.0).axes
    np.testing.assert_allclose([right, up, toward], [[1, 0, 0], [0, 0, 1], [0, -1, 0]], atol=1e-12)
    for angles in VIEWS.values():
        axes = Camera(*angles).axes
        np.testing.assert_allclose(axes @ axes.T, np.eye(3), atol=1e-12)
        assert np.linalg.det(axes) == pytest.approx(1) and axes[1, 2] > 0


def test_polygons_as_fans():
    mesh = body(1, 6, 7, caps="polygons")
    triangles, cells = fans(mesh)
    corners = np.asarray(mesh.points)[triangles]
    areas = np.linalg.norm(np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]), axis=1) / 2
    assert areas.sum() == pytest.approx(mesh.triangulate().area, rel=1e-3)
    counts = np.bincount(cells, minlength=mesh.n_cells)
    assert list(counts) == [cell.n_points - 2 for cell in mesh.cell]


def surface_sample(mesh, place="point", rows=None):
    positions = mesh.cell_centers().points if place == "cell" else mesh.points
    points = torch.from_numpy(np.array(positions, dtype=np.float32))
    ids = None if rows is None else torch.from_numpy(rows)
    points = points if ids is None else points[ids]
    targets = TensorDict({"C_p": points[:, 0] - 1.4, "C_f": 0.01 * points}, batch_size=[len(points)])
    return Sample("run_1", 0, points, targets, {}, {}, point_ids=ids)


@pytest.mark.parametrize("kind", ["point", "cell", "subset"])
def test_a_figure_shows_every_field_from_every_side(kind):
    mesh = body(1, 30, 30)
    place = "cell" if kind == "cell" else "point"
    rows = np.arange(0, mesh.n_points, 2) if kind == "subset" else None
    sample = surface_sample(mesh, place, rows)
    prediction = {"C_p": sample.targets["C_p"] + 0.5, "C_f": 0.5 * sample.targets["C_f"]}
    figure = draw_surface_case(sample, prediction, mesh, "a car", place, dots_per_inch=40)
    titles = [axis.get_title() for axis in figure.axes]
    for title in ("C_p, truth", "C_p, prediction", "error of C_p", "|C_f|, truth", "|error| of C_f", "middle plane"):
        assert titles.count(title) == 1
    images = [axis.images[0].get_array() for axis in figure.axes if axis.images and not axis.get_ylabel()]
    images = [image for image in images if image.ndim == 3]
    assert len(images) == 2 * len(VIEWS) * 3
    # The side view of C_p = x - 1.4: blue in front, red behind; its error is the same everywhere, all in one colour.
    truth, _, error = images[:3]
    height, width = truth.shape[:2]
    front, rear = truth[height // 2, width // 8], truth[height // 2, -width // 8]
    assert front[2] > front[0] and rear[0] > rear[2]
    middle = error[height // 2, width // 3 : -width // 3]
    assert middle[:, 0].min() > middle[:, 2].max() + 0.2 and truth[0, 0, 3] == 0
    scatter = next(axis for axis in figure.axes if axis.get_title() == "middle plane").collections
    gap = scatter[1].get_offsets()[:, 1] - scatter[0].get_offsets()[:, 1]
    np.testing.assert_allclose(gap, -0.5, atol=1e-5)


def test_what_is_unknown_or_constant_is_drawn_too():
    mesh = body(1, 12, 12)
    sample = surface_sample(mesh)
    sample.targets["C_p"] = torch.ones(len(sample.prediction_points))
    sample.targets["C_f"] = torch.full_like(sample.targets["C_f"], torch.nan)
    figure = draw_surface_case(sample, dict(sample.targets.items()), mesh, dots_per_inch=30)
    assert sum("C_p" in axis.get_title() for axis in figure.axes) == 3
    assert not any("C_f" in axis.get_title() for axis in figure.axes)


def test_what_is_a_surface():
    assert is_surface(body(1, 6, 6)) and not is_surface(pv.PolyData(np.zeros((3, 3))))
    assert not is_surface(body(1, 6, 6).cast_to_unstructured_grid())
