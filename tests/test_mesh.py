"""Boundary meshes: derived geometry, points drawn on faces, refusals."""

from __future__ import annotations

import pickle
import re
from typing import Any

import naive
import pytest
import torch
from helpers import golden_pieces, make_mesh
from tensordict import TensorDict

from globe_lightning import BoundaryMesh


@pytest.mark.parametrize("dims", [2, 3])
def test_geometry_against_stored_and_naive(dims: int) -> None:
    piece = golden_pieces()["mesh_geometry"][f"{dims}d"]
    mesh = BoundaryMesh(piece["points"], piece["cells"])
    check = torch.testing.assert_close
    for found in (
        (mesh.centroids, mesh.normals, mesh.areas),
        naive.face_geometry(piece["points"], piece["cells"]),
    ):
        check(found[0], piece["centroids"], rtol=1e-13, atol=1e-14)
        check(found[1], piece["normals"], rtol=1e-13, atol=1e-14)
        check(found[2], piece["areas"], rtol=1e-13, atol=1e-14)
    assert mesh.positions is not None
    check(mesh.positions, mesh.centroids)
    assert (mesh.n_dims, mesh.n_faces) == (dims, piece["cells"].shape[0])
    assert mesh.device == torch.device("cpu")
    weights = torch.rand(mesh.n_faces, dtype=torch.float64)
    check(BoundaryMesh(mesh.points, mesh.cells, measure_weights=weights).areas, mesh.areas * weights)


def test_orientation_by_hand() -> None:
    segment = BoundaryMesh(torch.tensor([[0.0, 0.0], [2.0, 0.0]]), torch.tensor([[0, 1]]))
    assert segment.normals.tolist() == [[0, 1]]
    assert segment.areas.tolist() == [2]
    triangle = BoundaryMesh(torch.tensor([[0.0, 0, 0], [2, 0, 0], [0, 3, 0]]), torch.tensor([[0, 1, 2]]))
    assert triangle.normals.tolist() == [[0, 0, 1]]
    assert triangle.areas.tolist() == [3]
    for mesh in (segment, triangle):
        assert torch.equal(mesh.flipped().normals, -mesh.normals)
        assert torch.equal(mesh.flipped().areas, mesh.areas)
        torch.testing.assert_close(mesh.flipped().centroids, mesh.centroids)


@pytest.mark.parametrize("dims", [2, 3])
def test_degenerate_faces_have_no_normal_and_finite_gradients(dims: int) -> None:
    points = torch.zeros(dims, dims, dtype=torch.float64)
    points[:, 0] = 0.5
    mesh = BoundaryMesh(points.requires_grad_(), torch.arange(dims).unsqueeze(0))
    normals, areas = mesh.normals_and_areas()
    assert not normals.any()
    assert not areas.any()
    (normals.sum() + areas.sum()).backward()
    assert torch.isfinite(points.grad).all()


@pytest.mark.parametrize("dims", [2, 3])
def test_random_positions_are_uniform_inside_the_faces(dims: int) -> None:
    corners = torch.randn(dims, dims, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    n = 20_000
    mesh = BoundaryMesh(corners, torch.arange(dims).expand(n, dims))
    drawn = mesh.with_random_positions(torch.Generator().manual_seed(1))
    # Barycentric coordinates: positive, summing to 1; uniform on a simplex means mean 1/D and variance (D-1)/D^2/(D+1).
    weights = torch.linalg.solve(corners.T, drawn.positions.T).T
    assert weights.min() > -1e-12
    torch.testing.assert_close(weights.sum(1), torch.ones(n, dtype=torch.float64))
    torch.testing.assert_close(weights.mean(0), torch.full((dims,), 1 / dims, dtype=torch.float64), rtol=0.02, atol=0)
    variance = torch.full((dims,), (dims - 1) / dims**2 / (dims + 1), dtype=torch.float64)
    torch.testing.assert_close(weights.var(0), variance, rtol=0.05, atol=0)
    torch.testing.assert_close(drawn.areas, mesh.areas)
    torch.testing.assert_close(drawn.centroids, mesh.centroids)
    again = mesh.with_random_positions(torch.Generator().manual_seed(1))
    assert torch.equal(again.positions, drawn.positions)
    assert drawn.to(dtype=torch.float32).positions.dtype == torch.float32


def test_to_keeps_indices_and_casts_the_rest() -> None:
    mesh = make_mesh(2, 4, torch.Generator().manual_seed(0), {"heat": 0, "slip": 1}, True)
    mesh = BoundaryMesh(mesh.points, mesh.cells.int(), mesh.cell_data, mesh.measure_weights)
    narrow = mesh.to("cpu", torch.float32)
    assert narrow.points.dtype == narrow.measure_weights.dtype == narrow.cell_data["slip"].dtype == torch.float32
    assert narrow.cells.dtype == torch.int32
    torch.testing.assert_close(narrow.areas.double(), mesh.areas, rtol=1e-5, atol=1e-6)
    assert "4 faces" in repr(mesh)
    assert "heat" in repr(mesh)


def test_meshes_travel_between_processes() -> None:
    mesh = make_mesh(3, 4, torch.Generator().manual_seed(0), {"heat": 0}, True)
    copy = pickle.loads(pickle.dumps(mesh))
    assert torch.equal(copy.areas, mesh.areas)
    assert torch.equal(copy.cell_data["heat"], mesh.cell_data["heat"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="page-locked memory belongs to an accelerator")
def test_pinned_memory() -> None:
    mesh = make_mesh(3, 4, torch.Generator().manual_seed(0), {"heat": 0}, True).pin_memory()
    assert mesh.points.is_pinned()
    assert mesh.cells.is_pinned()


def test_cell_data_as_dict_or_tensordict() -> None:
    points, cells = torch.rand(3, 2), torch.tensor([[0, 1], [1, 2]])
    data = {"a": torch.rand(2), "b": {"c": torch.rand(2, 2)}}
    plain = BoundaryMesh(points, cells, data)
    other = BoundaryMesh(points, cells, TensorDict(data, batch_size=[2]))
    assert torch.equal(plain.cell_data["b", "c"], other.cell_data["b", "c"])
    assert BoundaryMesh(points, cells).cell_data.is_empty()


GOOD: dict[str, Any] = {"points": torch.rand(4, 3), "cells": torch.tensor([[0, 1, 2], [1, 2, 3]])}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"points": torch.rand(4)}, "points: expected floating-point (n_points, 2 or 3), found torch.float32 (4,)"),
        ({"points": torch.rand(4, 4)}, "points: expected floating-point (n_points, 2 or 3)"),
        ({"points": torch.ones(4, 3).long()}, "found torch.int64 (4, 3)"),
        (
            {"cells": torch.tensor([[0, 1]])},
            "cells: expected integer (n_faces, 3) (triangles in 3D), found torch.int64",
        ),
        ({"cells": torch.zeros(2, 3)}, "cells: expected integer (n_faces, 3)"),
        ({"cells": torch.zeros(2, 3, dtype=torch.bool)}, "found torch.bool (2, 3)"),
        ({"cells": torch.tensor([0, 1, 2])}, "found torch.int64 (3,)"),
        ({"measure_weights": torch.ones(3)}, "measure_weights: expected (2,), found (3,)"),
        ({"face_positions": torch.ones(2, 2)}, "face_positions: expected (2, 3), found (2, 2)"),
        ({"cell_data": {"heat": torch.ones(3)}}, "cell_data['heat']: expected 2 rows, one a face, found (3,)"),
        ({"cell_data": {"heat": torch.tensor(1.0)}}, "cell_data['heat']: expected 2 rows, one a face, found ()"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        BoundaryMesh(**(GOOD | changes))
