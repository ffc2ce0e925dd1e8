"""Surfaces of polygons against face-by-face evaluations."""

from __future__ import annotations

import numpy as np
import pytest
from drivaerml_synthetic import ellipsoid

from datamodules import polygons


def compact(faces):
    """``starts`` and ``triangles`` of a list of faces."""
    offsets = np.concatenate([[0], np.cumsum([len(face) for face in faces])])
    return polygons.fans(offsets, np.concatenate(faces))


def turned(face):
    """A face from its smallest index on."""
    return np.roll(face, -face.argmin())


@pytest.fixture
def mixed():
    """Points and 40 faces of 3 to 6 corners each, in random order."""
    generator = np.random.default_rng(3)
    points = generator.normal(size=(30, 3)).astype(np.float32)
    faces = [generator.choice(30, size=generator.integers(3, 7), replace=False) for _ in range(40)]
    return points, faces


def closed(caps="fans"):
    points, groups = ellipsoid(np.array([2.0, 1.0, 0.5]), 8, 6, caps)
    return points.astype(np.float32), [face for faces in groups for face in faces]


@pytest.mark.parametrize("block", [7, 1000])
def test_every_face_is_in_one_block(mixed, block):
    _, faces = mixed
    seen = {}
    for rows, corners in polygons.polygons(*compact(faces), block):
        seen.update(zip(rows.tolist(), corners.tolist(), strict=True))
    assert [seen[row] for row in range(40)] == [turned(face).tolist() for face in faces]


def test_fans_are_the_triangles_of_each_face(mixed):
    points, faces = mixed
    starts, triangles = compact(faces)
    expected = [[face[0], face[j], face[j + 1]] for face in map(turned, faces) for j in range(1, len(face) - 1)]
    np.testing.assert_array_equal(triangles, expected)
    np.testing.assert_array_equal(starts, np.concatenate([[0], np.cumsum([len(face) - 2 for face in faces])]))
    area = sum(polygons.fan_area(points[turned(face)][None].astype(float)) for face in faces)
    assert polygons.triangle_areas(points[triangles].astype(float)).sum() == pytest.approx(area)
    rows = np.array([1, 5, 39])
    found = polygons.drawn_centres(points, starts, triangles, rows)
    np.testing.assert_allclose(found, [points[faces[row]].mean(axis=0) for row in rows], atol=1e-6)


def test_area_vector_of_a_polygon_is_that_of_its_fan(mixed):
    points, faces = mixed
    for face in faces:
        corners = points[face].astype(float)
        fan = [np.cross(corners[j] - corners[0], corners[j + 1] - corners[0]) / 2 for j in range(1, len(face) - 1)]
        centre, vector = polygons.centres_and_area_vectors(corners[None])
        np.testing.assert_allclose(vector[0], np.sum(fan, axis=0), atol=1e-12)
        np.testing.assert_allclose(centre[0], corners.mean(axis=0))


def test_turning_and_reversal_leave_the_triangles(mixed):
    _, faces = mixed
    starts, triangles = compact(faces)
    generator = np.random.default_rng(0)
    _, other = compact([np.roll(face, generator.integers(6))[::-1] for face in faces])
    assert not np.array_equal(triangles, other)
    polygons.reverse_winding(starts, other)
    np.testing.assert_array_equal(triangles, other)


def test_averages_at_points(mixed):
    _, faces = mixed
    starts, triangles = compact(faces)
    values = np.random.default_rng(1).normal(size=(40, 3)).astype(np.float32)
    lone = 33  # points 30 to 32 belong to no face
    found = polygons.averages_at_points(lone, starts, triangles, values)
    for point in range(lone):
        around = [row for row, face in enumerate(faces) if point in face]
        if around:
            np.testing.assert_allclose(found[point], values[around].mean(axis=0), rtol=1e-5, atol=1e-6)
        else:
            assert np.isnan(found[point]).all()
    assert np.isnan(found[30:]).all()


@pytest.mark.parametrize("caps", ["fans", "polygons"])
def test_inverted_faces_are_counted_by_their_edges(caps):
    points, faces = closed(caps)
    assert polygons.inverted_edges(len(points), *compact(faces)) == 0
    assert polygons.inverted_edges(len(points), *compact([face[::-1] for face in faces])) == 0
    faces[10] = faces[10][::-1]
    edges = sum(map(len, faces)) / 2
    assert polygons.inverted_edges(len(points), *compact(faces)) == pytest.approx(len(faces[10]) / edges)
    # A degenerate face runs along an edge and back.
    faces[10] = faces[10][::-1]
    degenerate = [*faces, np.array([0, 0, 0])]
    assert polygons.inverted_edges(len(points), *compact(degenerate)) == 0


CUBE = np.array([[x, y, z] for x in (0, 1) for y in (0, 1) for z in (0, 1)], dtype=np.float32)
CUBE_FACES = [[0, 1, 3, 2], [4, 6, 7, 5], [0, 4, 5, 1], [2, 3, 7, 6], [0, 2, 6, 4], [1, 5, 7, 3]]


@pytest.mark.parametrize("angle", [0.0, 0.3, np.pi / 4])
def test_the_shadow_of_boxes(angle):
    """Of a box turned about the line of sight, of two that overlap, and of one behind the other."""
    _, triangles = compact([np.array(face) for face in CUBE_FACES])
    turn = np.array([[1, 0, 0], [0, np.cos(angle), -np.sin(angle)], [0, np.sin(angle), np.cos(angle)]])
    size = np.array([3.0, 2.0, 0.5])
    box = (CUBE * size) @ turn.T
    rel = 1e-3
    assert polygons.shadow_area(box, triangles) == pytest.approx(1.0, rel=rel)
    both = np.concatenate([triangles, triangles + 8])
    for shift, area in (([9, 0, 0], 1.0), ([1, 0.5, 0.2], 2.0 - 1.5 * 0.3), ([0, 5, 0], 2.0)):
        moved = np.concatenate([box, box + turn @ np.array(shift)])
        assert polygons.shadow_area(moved, both) == pytest.approx(area, rel=rel)
        assert polygons.shadow_area(moved, both[:, ::-1]) == pytest.approx(area, rel=rel)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_the_shadow_against_points_in_triangles(axis):
    generator = np.random.default_rng(axis)
    points = generator.random((40, 3)).astype(np.float32)
    triangles = np.stack([generator.choice(40, 3, replace=False) for _ in range(12)])
    triangles[:4, 2] = triangles[:4, 1]  # of no area
    u, v = (axis + 1) % 3, (axis + 2) % 3
    asked = (np.stack(np.meshgrid(*[np.arange(1000)] * 2), axis=-1).reshape(-1, 2) + 0.5) / 1000
    covered = np.zeros(len(asked), dtype=bool)
    for corners in points[triangles[4:]][:, :, [u, v]].astype(np.float64):
        sides = [
            (b[0] - a[0]) * (asked[:, 1] - a[1]) - (b[1] - a[1]) * (asked[:, 0] - a[0])
            for a, b in zip(corners, np.roll(corners, -1, axis=0), strict=True)
        ]
        covered |= (np.min(sides, axis=0) >= 0) | (np.max(sides, axis=0) <= 0)
    assert polygons.shadow_area(points, triangles, axis) == pytest.approx(covered.mean(), abs=2e-3)


def test_the_shadow_of_an_ellipsoid_and_of_nothing():
    points, groups = ellipsoid(np.array([2.2, 0.9, 0.7]), 160, 160, "fans")
    _, triangles = compact([face for faces in groups for face in faces])
    assert polygons.shadow_area(points, triangles) == pytest.approx(np.pi * 0.9 * 0.7, rel=1e-3)
    assert polygons.shadow_area(points, triangles[:0]) == 0
    assert polygons.shadow_area(points * [1, 1, 0], triangles) == 0
