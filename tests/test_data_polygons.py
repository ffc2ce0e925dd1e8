"""Surfaces of polygons against face-by-face evaluations."""

from __future__ import annotations

import numpy as np
import pytest
from drivaerml_synthetic import ellipsoid

from datamodules import polygons


def compact(faces):
    """``starts`` and ``connectivity`` of a list of faces."""
    offsets = np.concatenate([[0], np.cumsum([len(face) for face in faces])])
    return polygons.fan_starts(offsets), np.concatenate(faces).astype(np.int32)


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
    starts, connectivity = compact(faces)
    seen = {}
    for rows, positions in polygons.blocks(starts, block):
        seen.update(zip(rows.tolist(), connectivity[positions].tolist(), strict=True))
    assert [seen[row] for row in range(40)] == [face.tolist() for face in faces]


def test_fans_are_the_triangles_of_each_face(mixed):
    points, faces = mixed
    starts, connectivity = compact(faces)
    expected = [[face[0], face[j], face[j + 1]] for face in faces for j in range(1, len(face) - 1)]
    assert starts[-1] == len(expected)
    np.testing.assert_array_equal(polygons.drawn_triangles(starts, connectivity, np.arange(len(expected))), expected)
    some = np.array([0, 3, 50, len(expected) - 1])
    np.testing.assert_array_equal(polygons.drawn_triangles(starts, connectivity, some), np.array(expected)[some])
    area = sum(polygons.fan_area(points[face][None].astype(float)) for face in faces)
    assert polygons.triangle_areas(points[np.array(expected)].astype(float)).sum() == pytest.approx(area)
    rows = np.array([1, 5, 39])
    np.testing.assert_allclose(
        polygons.drawn_centres(points, starts, connectivity, rows),
        [points[faces[row]].mean(0) for row in rows],
        atol=1e-6,
    )


def test_area_vector_of_a_polygon_is_that_of_its_fan(mixed):
    points, faces = mixed
    for face in faces:
        corners = points[face].astype(float)
        fan = [np.cross(corners[j] - corners[0], corners[j + 1] - corners[0]) / 2 for j in range(1, len(face) - 1)]
        centre, vector = polygons.centres_and_area_vectors(corners[None])
        np.testing.assert_allclose(vector[0], np.sum(fan, axis=0), atol=1e-12)
        np.testing.assert_allclose(centre[0], corners.mean(axis=0))


def test_canonical_order_undoes_turning_and_reversal(mixed):
    _, faces = mixed
    starts, canonical = compact(faces)
    polygons.canonical_order(starts, canonical)
    generator = np.random.default_rng(0)
    _, other = compact([np.roll(face, generator.integers(6))[::-1] for face in faces])
    polygons.canonical_order(starts, other)
    polygons.reverse_winding(starts, other)
    np.testing.assert_array_equal(other, canonical)
    for face, start in zip(faces, polygons.corner_offsets(starts, 0, 40), strict=False):
        turned = canonical[start : start + len(face)]
        assert turned[0] == face.min() and turned.tolist() == np.roll(face, -face.argmin()).tolist()


def test_averages_at_points(mixed):
    _, faces = mixed
    starts, connectivity = compact(faces)
    values = np.random.default_rng(1).normal(size=(40, 3)).astype(np.float32)
    lone = 33  # points 30 to 32 belong to no face
    found = polygons.averages_at_points(lone, starts, connectivity, values)
    scalar = polygons.averages_at_points(lone, starts, connectivity, values[:, 0])
    for point in range(lone):
        around = [row for row, face in enumerate(faces) if point in face]
        if around:
            np.testing.assert_allclose(found[point], values[around].mean(axis=0), rtol=1e-5, atol=1e-6)
            assert scalar[point] == found[point, 0]
        else:
            assert np.isnan(found[point]).all() and np.isnan(scalar[point])
    assert np.isnan(scalar[30:]).all()


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
