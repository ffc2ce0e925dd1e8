"""Symmetries of the model: translation, rotation, reflection, units of length, order of faces and points."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from helpers import Case, fields_of, make_case, make_model, map_mesh, relative_l2
from torch import Tensor

from globe_lightning import GLOBE

TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5}
PRECISIONS = [torch.float64, torch.float32]


def rotation(dims: int, seed: int = 0) -> Tensor:
    """A random proper rotation, float64."""
    matrix = torch.randn(dims, dims, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    q, _ = torch.linalg.qr(matrix)
    return q if torch.linalg.det(q) > 0 else q * torch.tensor([-1.0] + [1.0] * (dims - 1), dtype=torch.float64)


def moved(case: Case, move: Callable[[Tensor], Tensor], turn: Tensor, flip: bool = False) -> Case:
    """The case with ``move`` applied to all places and the matrix ``turn`` to all vectors.

    A reflection also reverses the faces' winding, so that normals are reflected like any other vector.
    """

    def turned(value: Tensor) -> Tensor:
        return (value.double() @ turn.T).to(value.dtype) if value.shape[-1:] == turn.shape[:1] else value

    meshes = {}
    for kind, mesh in case.boundary_meshes.items():
        data = {name: turned(value) if value.ndim == 2 else value for name, value in mesh.cell_data.items()}
        new = map_mesh(mesh, points=move(mesh.points.double()).to(mesh.points.dtype), cell_data=data)
        meshes[kind] = new.flipped() if flip else new
    conditions = {name: turned(value) if value.ndim else value for name, value in (case.global_data or {}).items()}
    points = move(case.prediction_points.double()).to(case.prediction_points.dtype)
    return Case(points, meshes, case.reference_lengths, conditions)


def turned_fields(fields: dict[str, Tensor], turn: Tensor) -> dict[str, Tensor]:
    return {name: field.double() @ turn.T if field.ndim == 2 else field for name, field in fields.items()}


@torch.no_grad()
def deviation(model: GLOBE, case: Case, move: Callable[[Tensor], Tensor], turn: Tensor, flip: bool = False) -> float:
    """How far prediction and motion are from commuting, over each field's own variation."""
    before = fields_of(model, case, prediction_chunk_size=None)
    after = fields_of(model, moved(case, move, turn, flip), prediction_chunk_size=None)
    return relative_l2(after, turned_fields(before, turn))


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize(("theta", "leaf_size", "expand"), [(0.0, 1, False), (1.0, 1, False), (1.0, 4, True)])
def test_translation(dims: int, dtype: torch.dtype, theta: float, leaf_size: int, expand: bool) -> None:
    model = make_model(dims, dtype, theta=theta, leaf_size=leaf_size, expand_far_targets=expand)
    case = make_case(dims, dtype=dtype)
    if dtype == torch.float32:
        # Places on a grid, so that moving them is exact: what is tested is the model, not the rounding of its input.
        for kind, mesh in case.boundary_meshes.items():
            case.boundary_meshes[kind] = map_mesh(mesh, points=(mesh.points * 1024).round() / 1024)
        case.prediction_points = (case.prediction_points * 1024).round() / 1024
    shift = torch.tensor([0.5, -0.25, 0.75][:dims], dtype=torch.float64)
    assert deviation(model, case, lambda x: x + shift, torch.eye(dims, dtype=torch.float64)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_rotation_at_theta_zero(dims: int, dtype: torch.dtype) -> None:
    model, case = make_model(dims, dtype), make_case(dims, dtype=dtype)
    turn = rotation(dims)
    assert deviation(model, case, lambda x: x @ turn.T, turn) < TOLERANCE[dtype]


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_reflection_at_theta_zero(dims: int, dtype: torch.dtype) -> None:
    model, case = make_model(dims, dtype), make_case(dims, dtype=dtype)
    turn = rotation(dims)
    turn[:, 0] = -turn[:, 0]
    assert torch.linalg.det(turn) < 0
    assert deviation(model, case, lambda x: x @ turn.T, turn, flip=True) < TOLERANCE[dtype]


@pytest.mark.parametrize("dims", [2, 3])
def test_a_vector_that_is_not_turned_along_is_noticed(dims: int) -> None:
    """The measure of these tests sees a broken symmetry: a freestream that stays behind."""
    model, case = make_model(dims), make_case(dims)
    turn = rotation(dims)
    with torch.no_grad():
        before = fields_of(model, case)
        wrong = moved(case, lambda x: x @ turn.T, turn)
        wrong.global_data = case.global_data
        assert relative_l2(fields_of(model, wrong), turned_fields(before, turn)) > 1e-3


@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("dims", [2, 3])
def test_rotation_at_theta_one_is_approximate(
    dims: int, expand: bool, record_property: Callable[[str, object], None]
) -> None:
    """Boxes follow the axes, so that another orientation approximates other pairs: measured, bounded, not exact."""
    found, opening = [], []
    for seed in range(3):
        model = make_model(dims, theta=1.0, expand_far_targets=expand, seed=seed)
        exact = make_model(dims, theta=0.0, seed=seed)
        case, turn = make_case(dims, 80, 30, 150, seed=seed), rotation(dims, seed)
        found.append(deviation(model, case, lambda x, turn=turn: x @ turn.T, turn))
        with torch.no_grad():
            opening.append(
                relative_l2(
                    fields_of(model, case, prediction_chunk_size=None),
                    fields_of(exact, case, prediction_chunk_size=None),
                )
            )
    record_property("rotation_deviation_at_theta_1", found)
    print(f"\nrotation at theta 1, {dims}D, expand_far_targets={expand}: rms deviation over a field's variation")
    print(f"  turned: {[f'{x:.2f}' for x in found]}, theta 1 against theta 0: {[f'{x:.2f}' for x in opening]}")
    assert min(found) > 1e-6
    # Turning costs no more than what the approximation itself costs, before and after.
    assert max(f / o for f, o in zip(found, opening, strict=True)) < 4


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("theta", [0.0, 1.0])
@pytest.mark.parametrize("unit", [1024.0, 1 / 256])
def test_units_of_length(dims: int, dtype: torch.dtype, theta: float, unit: float) -> None:
    """Metres or millimetres: places, reference lengths and the reference area together."""
    model, case = make_model(dims, dtype, theta=theta), make_case(dims, dtype=dtype)
    other = make_model(dims, dtype, theta=theta, reference_area=0.7 * unit ** (dims - 1))
    meshes = {kind: map_mesh(mesh, points=mesh.points * unit) for kind, mesh in case.boundary_meshes.items()}
    lengths = {name: value * unit for name, value in case.reference_lengths.items()}
    scaled = Case(case.prediction_points * unit, meshes, lengths, case.global_data)
    with torch.no_grad():
        error = relative_l2(fields_of(other, scaled), fields_of(model, case))
        assert error < TOLERANCE[dtype]
        wrong = Case(case.prediction_points * unit, meshes, case.reference_lengths, case.global_data)
        assert relative_l2(fields_of(other, wrong), fields_of(model, case)) > 1e-2


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("theta", [0.0, 1.0])
def test_order_of_faces_vertices_and_points(dims: int, theta: float) -> None:
    model, case = make_model(dims, theta=theta, leaf_size=3), make_case(dims)
    generator = torch.Generator().manual_seed(0)
    meshes = {}
    for kind, mesh in reversed(case.boundary_meshes.items()):
        faces = torch.randperm(mesh.n_faces, generator=generator)
        vertices = torch.randperm(mesh.points.shape[0], generator=generator)
        meshes[kind] = map_mesh(
            mesh,
            points=mesh.points[vertices],
            cells=vertices.argsort()[mesh.cells[faces]],
            cell_data={name: value[faces] for name, value in mesh.cell_data.items()},
            measure_weights=None if mesh.measure_weights is None else mesh.measure_weights[faces],
        )
    rows = torch.randperm(case.prediction_points.shape[0], generator=generator)
    shuffled = Case(case.prediction_points[rows], meshes, case.reference_lengths, case.global_data)
    with torch.no_grad():
        expected = {name: field[rows] for name, field in fields_of(model, case, prediction_chunk_size=None).items()}
        found = fields_of(model, shuffled, prediction_chunk_size=None)
    assert relative_l2(found, expected) < 1e-11


@pytest.mark.parametrize("dims", [2, 3])
def test_splitting_a_face_keeps_the_sum_of_its_parts(dims: int) -> None:
    """Area enters linearly: a face counted twice at half its weight is the same face."""
    model, case = make_model(dims), make_case(dims)
    meshes = {}
    for kind, mesh in case.boundary_meshes.items():
        twice = torch.arange(mesh.n_faces).repeat(2)
        weights = (
            torch.ones(mesh.n_faces, dtype=torch.float64) if mesh.measure_weights is None else mesh.measure_weights
        )
        meshes[kind] = map_mesh(
            mesh,
            cells=mesh.cells[twice],
            cell_data={name: value[twice] for name, value in mesh.cell_data.items()},
            measure_weights=weights[twice] / 2,
        )
    doubled = Case(case.prediction_points, meshes, case.reference_lengths, case.global_data)
    with torch.no_grad():
        assert relative_l2(fields_of(model, doubled), fields_of(model, case)) < 1e-11


@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("leaf_size", [1, 4])
def test_theta_to_zero_is_exact(leaf_size: int, expand: bool) -> None:
    case = make_case(3, 60, 20, 80)

    def predicted(theta: float) -> dict[str, Tensor]:
        model = make_model(3, theta=theta, leaf_size=leaf_size, expand_far_targets=expand)
        with torch.no_grad():
            return fields_of(model, case, prediction_chunk_size=None)

    exact = predicted(0.0)
    errors = {theta: relative_l2(predicted(theta), exact) for theta in (1.0, 0.3, 0.1, 1e-3)}
    assert errors[1.0] > errors[0.3] > errors[0.1]
    assert errors[0.1] < errors[1.0] / 5
    assert errors[1e-3] < 1e-11
    assert all(math.isfinite(error) for error in errors.values())
