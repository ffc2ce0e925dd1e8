"""Faults that other implementations of this model have had, and bad input of every kind: each must be met well."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import (
    Case,
    fields_of,
    gradients_of,
    make_case,
    make_mesh,
    make_model,
    map_mesh,
    model_config,
    relative_error,
)
from tensordict import TensorDict

import globe_lightning.models.plans as plans_module
from globe_lightning import GLOBE, BoundaryMesh, SampleSchema

NAN, INF = float("nan"), float("inf")


def refused(case: Case, message: str, theta: float = 1.0, dims: int = 2, error: type[Exception] = ValueError) -> None:
    """The case is refused with a message, both by the forward pass and by building plans."""
    model = make_model(dims, theta=theta)
    with pytest.raises(error, match=re.escape(message)):
        fields_of(model, case)
    points, meshes, lengths, conditions = case.arguments()
    with pytest.raises(error, match=re.escape(message)):
        model.build_plans(points, meshes, reference_lengths=lengths, global_data=conditions)


def changed(values: torch.Tensor, row: int, value: float) -> torch.Tensor:
    """A copy with one entry replaced (the first one of a row)."""
    copy = values.clone()
    copy.view(values.shape[0], -1)[row, 0] = value
    return copy


# 1. Bad numbers


@pytest.mark.parametrize("theta", [0.0, 1.0])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_fault_01_a_bad_coordinate_is_named(theta: float, bad: float) -> None:
    case = make_case(2)
    case.prediction_points = changed(case.prediction_points, 7, bad)
    refused(case, "prediction_points: 1 of 62 entries are NaN or infinite", theta)
    case = make_case(2)
    case.boundary_meshes["wall"] = map_mesh(
        case.boundary_meshes["wall"], points=changed(case.boundary_meshes["wall"].points, 3, bad)
    )
    refused(case, "boundary_meshes['wall'].points: 1 of 92 entries are NaN or infinite", theta)


def with_mesh(kind: str, **changes: Callable[[BoundaryMesh], Any]) -> Callable[[Case], None]:
    """Replace arguments of a mesh, each computed from the old mesh."""

    def apply(case: Case) -> None:
        mesh = case.boundary_meshes[kind]
        case.boundary_meshes[kind] = map_mesh(mesh, **{name: make(mesh) for name, make in changes.items()})

    return apply


def with_data(**changes: Callable[[BoundaryMesh], Any]) -> Callable[[Case], None]:
    """Replace fields of the wall's cell data; None removes one."""

    def apply(case: Case) -> None:
        mesh = case.boundary_meshes["wall"]
        data = dict(mesh.cell_data.items()) | {name: make(mesh) for name, make in changes.items()}
        kept = {name: value for name, value in data.items() if value is not None}
        case.boundary_meshes["wall"] = map_mesh(mesh, cell_data=kept)

    return apply


def with_length(name: str, value: Any) -> Callable[[Case], None]:
    return lambda case: case.reference_lengths.__setitem__(name, value)


def with_condition(name: str, value: Any) -> Callable[[Case], None]:
    return lambda case: case.global_data.__setitem__(name, value)


def with_points(make: Callable[[torch.Tensor], Any]) -> Callable[[Case], None]:
    def apply(case: Case) -> None:
        case.prediction_points = make(case.prediction_points)

    return apply


BAD_INPUT: dict[str, tuple[Callable[[Case], None], str]] = {
    "points of another dimension": (
        with_points(lambda x: torch.rand(5, 3)),
        "prediction_points: expected floating-point (n, 2), found torch.float32 (5, 3)",
    ),
    "points of one axis": (with_points(lambda x: x[0]), "prediction_points: expected floating-point (n, 2), found"),
    "whole numbers as points": (
        with_points(lambda x: x.long()),
        "prediction_points: expected floating-point (n, 2), found torch.int64 (31, 2)",
    ),
    "index too large": (
        with_mesh("wall", cells=lambda m: changed(m.cells, 2, 46)),
        "boundary_meshes['wall'].cells: 1 of 46 indices lie outside 0 … 45",
    ),
    "index negative": (
        with_mesh("wall", cells=lambda m: changed(m.cells, 2, -1)),
        "boundary_meshes['wall'].cells: 1 of 46 indices lie outside 0 … 45",
    ),
    "faces without vertices": (
        with_mesh("wall", points=lambda m: m.points[:0]),
        "boundary_meshes['wall'].cells: 46 of 46 indices lie outside",
    ),
    "NaN weight": (
        with_mesh("wall", measure_weights=lambda m: changed(m.measure_weights, 2, NAN)),
        "boundary_meshes['wall'].measure_weights: 1 of 23 entries are NaN or infinite",
    ),
    "negative weight": (
        with_mesh("wall", measure_weights=lambda m: changed(m.measure_weights, 2, -0.5)),
        "boundary_meshes['wall'].measure_weights: 1 of 23 are negative",
    ),
    "NaN face position": (
        with_mesh("far", face_positions=lambda m: changed(m.centroids, 2, NAN)),
        "boundary_meshes['far'].face_positions: 1 of 18 entries are NaN or infinite",
    ),
    "NaN data": (
        with_data(slip=lambda m: changed(m.cell_data["slip"], 2, NAN)),
        "boundary_meshes['wall'].cell_data['slip']: 1 of 46 entries are NaN or infinite",
    ),
    "infinite data": (
        with_data(heat=lambda m: m.cell_data["heat"] / 0),
        "boundary_meshes['wall'].cell_data['heat']: 23 of 23 entries are NaN or infinite",
    ),
    "a vector where a scalar is declared": (
        with_data(heat=lambda m: torch.rand(23, 2)),
        "boundary_meshes['wall'].cell_data['heat']: expected shape (23,), found (23, 2)",
    ),
    "a scalar where a vector is declared": (
        with_data(slip=lambda m: torch.rand(23)),
        "boundary_meshes['wall'].cell_data['slip']: expected shape (23, 2), found (23,)",
    ),
    "missing data": (with_data(slip=lambda m: None), "boundary_meshes['wall'].cell_data: expected the fields"),
    "undeclared data": (with_data(more=lambda m: torch.rand(23)), "not declared ['more']"),
    "undeclared type": (
        lambda case: case.boundary_meshes.__setitem__("roof", case.boundary_meshes["far"]),
        "boundary_meshes: the model does not declare ['roof']; it declares ['far', 'wall']",
    ),
    "a mesh of another dimension": (
        lambda case: case.boundary_meshes.__setitem__("far", make_mesh(3, 4, torch.Generator())),
        "boundary_meshes['far']: the model is 2D, the mesh 3D",
    ),
    "a length of zero": (with_length("chord", 0.0), "reference_lengths['chord']: expected a positive finite length"),
    "a negative length": (with_length("delta", torch.tensor(-1.0)), "reference_lengths['delta']: expected a positive"),
    "a NaN length": (with_length("delta", NAN), "reference_lengths['delta']: expected a positive finite length"),
    "an infinite length": (with_length("delta", INF), "reference_lengths['delta']: expected a positive finite length"),
    "several lengths": (
        with_length("delta", torch.ones(3)),
        "reference_lengths['delta']: expected one number, found shape (3,)",
    ),
    "an unknown length": (
        with_length("span", 1.0),
        "reference_lengths: expected ['chord', 'delta'], found ['chord', 'delta', 'span']",
    ),
    "a missing length": (
        lambda case: case.reference_lengths.pop("delta"),
        "reference_lengths: expected ['chord', 'delta'], found ['chord']",
    ),
    "a NaN condition": (
        with_condition("Re", torch.tensor(NAN)),
        "global_data['Re']: 1 of 1 entries are NaN or infinite",
    ),
    "an infinite condition": (
        with_condition("U_inf", torch.tensor([1.0, INF])),
        "global_data['U_inf']: 1 of 2 entries are NaN or infinite",
    ),
    "a condition of another shape": (
        with_condition("U_inf", torch.rand(3)),
        "global_data['U_inf']: expected shape (2,), found (3,)",
    ),
    "a condition that is no tensor": (with_condition("Re", 0.4), "global_data['Re']: expected a tensor, found float"),
    "an unknown condition": (
        with_condition("Ma", torch.tensor(1.0)),
        "global_data: expected the fields ['Re', 'U_inf']",
    ),
    "a missing condition": (lambda case: case.global_data.pop("Re"), "missing ['Re']"),
    "no conditions": (lambda case: setattr(case, "global_data", None), "missing ['Re', 'U_inf']"),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_refused_before_any_computation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_late(*_: Any) -> None:
        pytest.fail("a tree was built from bad input")

    monkeypatch.setattr(plans_module, "build_forest", too_late)
    change, message = BAD_INPUT[name]
    case = make_case(2)
    change(case)
    refused(case, message)


def test_things_that_are_no_tensors_or_meshes() -> None:
    case = make_case(2)
    case.prediction_points = case.prediction_points.tolist()
    refused(case, "prediction_points: expected a tensor, found list", error=TypeError)
    case = make_case(2)
    case.boundary_meshes["far"] = case.boundary_meshes["far"].points  # type: ignore[assignment]
    refused(case, "boundary_meshes['far']: expected a BoundaryMesh, found Tensor", error=TypeError)


def test_all_that_is_wrong_is_said_at_once() -> None:
    case = make_case(2)
    case.prediction_points = changed(case.prediction_points, 0, NAN)
    with_mesh("wall", measure_weights=lambda m: changed(m.measure_weights, 2, INF))(case)
    with_length("delta", 0.0)(case)
    with pytest.raises(ValueError, match="bad numbers in the sample") as caught:
        fields_of(make_model(2), case)
    for name in ("prediction_points", "boundary_meshes['wall'].measure_weights", "reference_lengths['delta']"):
        assert name in str(caught.value)


def test_numbers_too_large_for_the_models_precision_are_refused() -> None:
    """Finite in float64, infinite once cast: as bad as infinite from the start."""
    model, case = make_model(2, torch.float32), make_case(2)
    case.prediction_points = changed(case.prediction_points, 4, 1e300)
    with pytest.raises(ValueError, match=r"prediction_points: 1 of 62 entries are NaN or infinite"):
        fields_of(model, case)


# 5. Evaluations that serve nobody


def test_fault_05_every_evaluation_serves_a_target() -> None:
    case = make_case(3, 150, 50, 200)
    plans = make_model(3, theta=1.0, leaf_size=4).build_plans(case.prediction_points, case.boundary_meshes, None)
    n_groups = 0
    for plan in (plans.communication, plans.prediction.plan):
        members = torch.bincount(plan.members[0], minlength=plan.n_groups)
        assert (members > 0).all()
        n_groups += plan.n_groups
        for pairs in plan.pairs:
            groups = pairs.targets[pairs.targets >= plan.first_group]
            assert (groups < plan.first_group + plan.n_groups).all()
    assert n_groups > 20


# 6. Nothing to predict, nothing to predict from


@pytest.mark.parametrize("theta", [0.0, 1.0])
def test_fault_06_no_points_no_types_only_empty_types(theta: float) -> None:
    model, case = make_model(2, theta=theta), make_case(2)
    case.prediction_points = case.prediction_points[:0]
    fields = fields_of(model, case)
    assert {field.shape[0] for field in fields.values()} == {0}
    gradients = gradients_of(model, case)
    assert all(not gradient.any() for gradient in gradients.values())
    case = make_case(2)
    case.boundary_meshes = {}
    refused(case, "boundary_meshes: no faces at all", theta)
    empty = BoundaryMesh(torch.zeros(0, 2), torch.zeros(0, 2, dtype=torch.int64))
    case.boundary_meshes = {"far": empty}
    refused(case, "boundary_meshes: no faces at all; GLOBE sums over boundary faces", theta)


# 7 and 8. Precisions


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("theta", [0.0, 1.0])
def test_fault_07_16_bit_arithmetic(dtype: torch.dtype, theta: float) -> None:
    model, case = make_model(2, torch.float32, theta=theta), make_case(2, dtype=torch.float32)
    # A point on a face: r = 0, where a smoothing radius that underflows divides zero by zero.
    case.prediction_points = torch.cat([case.prediction_points, case.boundary_meshes["wall"].centroids])
    with torch.autocast("cpu", dtype):
        under_autocast = fields_of(model, case)
    cast = fields_of(model.to(dtype), case)
    for fields in (under_autocast, cast):
        for field in fields.values():
            assert field.dtype == torch.float32
            assert torch.isfinite(field).all()


def test_fault_08_float64_points_of_a_float32_model() -> None:
    model = make_model(2, torch.float32)
    case, narrow = make_case(2), make_case(2, dtype=torch.float32)
    expected = fields_of(model, narrow)
    for mixed in (
        case,
        Case(case.prediction_points, *narrow.arguments()[1:]),
        Case(narrow.prediction_points, case.boundary_meshes, *narrow.arguments()[2:]),
        Case(*narrow.arguments()[:2], *case.arguments()[2:]),
    ):
        found = fields_of(model, mixed)
        assert all(field.dtype == torch.float32 for field in found.values())
        assert relative_error(found, expected) < 1e-3


# 9. Saving whatever the arguments were


def test_fault_09_arguments_of_any_kind_can_be_saved() -> None:
    ranks = TensorDict({"C_p": 0, "vel": {"dU": 1}})
    config = model_config(2, output_field_ranks=ranks, tree_build_device=torch.device("cpu"))
    torch.manual_seed(0)
    model = GLOBE(**config)
    torch.manual_seed(0)
    plain = GLOBE(**model_config(2, output_field_ranks={"C_p": 0, "vel": {"dU": 1}}, tree_build_device="cpu"))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    plain.load_state_dict(torch.load(file, weights_only=True))
    case = make_case(2, dtype=torch.float32)
    assert relative_error(fields_of(plain, case), fields_of(model, case)) == 0
    arguments = SampleSchema(2, ranks, {"wall": TensorDict({"heat": 0})}, ["chord"], TensorDict({"Re": 0})).arguments()
    assert json.loads(json.dumps(arguments)) == arguments
    assert arguments["output_field_ranks"] == {"C_p": 0, "vel": {"dU": 1}}


# 10. Names and numbers of all kinds

ODD_NAMES = ["keys", "type", "a.b", "", "ρ∞ größe", "a%2Eb", "forward", "with blank", "0", "%"]


def test_fault_10_odd_names() -> None:
    config = model_config(
        2,
        boundary_source_data_ranks={name: {"heat": 0} for name in ODD_NAMES},
        reference_length_names=ODD_NAMES[:6],
        hidden_layer_sizes=[3],
        n_communication_hyperlayers=1,
        output_field_ranks={"keys": 0, "type": 1, "values": 0},
        global_data_ranks={"items": 0},
    )
    torch.manual_seed(0)
    model = GLOBE(**config).double()
    generator = torch.Generator().manual_seed(0)
    meshes = {name: make_mesh(2, 3, generator, {"heat": 0}) for name in ODD_NAMES}
    lengths = {name: 0.5 + 0.1 * i for i, name in enumerate(ODD_NAMES[:6])}
    points = torch.rand(5, 2, dtype=torch.float64)
    case = Case(points, meshes, lengths, {"items": torch.tensor(0.3)})
    found = fields_of(model, case)
    assert set(found) == {"keys", "type", "values"}
    assert all(torch.isfinite(field).all() for field in found.values())
    # Each name has parameters of its own, and they survive a file.
    assert all(gradient.any() for gradient in gradients_of(model, case).values())
    other = GLOBE(**config).double()
    other.load_state_dict(model.state_dict())
    assert relative_error(fields_of(other, case), found) == 0


def test_fault_10_floats_and_bad_numbers_as_reference_lengths() -> None:
    model, case = make_model(2), make_case(2)
    expected = fields_of(model, case)
    case.reference_lengths = {name: float(value) for name, value in case.reference_lengths.items()}
    assert relative_error(fields_of(model, case), expected) < 1e-14
    for bad in (0, 0.0, -0.3, NAN):
        case.reference_lengths["delta"] = bad
        refused(case, "reference_lengths['delta']: expected a positive finite length in metres")


# 11. Missing types


@pytest.mark.parametrize("theta", [0.0, 1.0])
@pytest.mark.parametrize("n_points", [9, 0])
def test_fault_11_parameters_of_missing_types_get_a_gradient_of_zero(theta: float, n_points: int) -> None:
    model, case = make_model(2, theta=theta), make_case(2, n_points=n_points)
    del case.boundary_meshes["far"]
    for name, gradient in gradients_of(model, case).items():
        assert gradient is not None, name
        if ".far." in name or n_points == 0:
            assert not gradient.any(), name
        else:
            assert gradient.any(), name


# 12. Duplicates and single faces


def test_fault_12_single_faces_and_duplicates_are_said_and_right() -> None:
    case = make_case(2, 1, 1)
    del case.boundary_meshes["far"]
    with pytest.warns(UserWarning, match="one face in all; a face does not act on itself"):
        fields_of(make_model(2), case)
    assert "Coincident faces are exact pairs at any" in str(GLOBE.__doc__)
    case = make_case(2, 6, 1)
    wall = case.boundary_meshes["wall"]
    case.boundary_meshes["wall"] = map_mesh(wall, cells=wall.cells[:1].expand(6, 2))
    del case.boundary_meshes["far"]
    plans = make_model(2, theta=1.0).build_plans(*case.arguments()[:2])
    assert plans.n_evaluations["communication"] == 6**2


# 13. A light package


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "KMP_", "GOMP_"))}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=clean | environment
    )


def test_fault_13_building_models_leaves_the_process_alone() -> None:
    """No logging handlers, no other thread count, no Lightning, VTK or plotting."""
    code = """
import logging, sys
import torch
n_threads = torch.get_num_threads()
from globe_lightning import GLOBE

def handlers():
    known = [logging.getLogger(), *(x for x in logging.Logger.manager.loggerDict.values() if hasattr(x, "handlers"))]
    return sum(len(logger.handlers) for logger in known)

before = handlers()
for _ in range(3):
    GLOBE(
        n_spatial_dims=2,
        output_field_ranks={"p": 0},
        boundary_source_data_ranks={"w": {}},
        reference_length_names=["l"],
    )
print(handlers() - before, torch.get_num_threads() - n_threads, *sorted({name.split(".")[0] for name in sys.modules}))
"""
    done = run_python(code)
    n_handlers, n_threads, *loaded = done.stdout.split()
    assert (n_handlers, n_threads) == ("0", "0")
    assert done.stderr == ""
    assert "globe_lightning" in loaded
    heavy = {"lightning", "pytorch_lightning", "pyvista", "vtk", "vtkmodules", "matplotlib", "torchmetrics"}
    assert not heavy & set(loaded)


# 14. Threads


def test_fault_14_the_command_line_asks_waiting_threads_to_sleep() -> None:
    """OpenMP threads that spin while they wait burn the cores of others; a user's own setting stays."""
    code = """
import importlib, os
import globe_lightning.cli as cli
print(os.environ.pop("OMP_WAIT_POLICY"))
importlib.reload(cli)
print(os.environ["OMP_WAIT_POLICY"])
"""
    assert run_python(code, OMP_WAIT_POLICY="active").stdout.split()[-2:] == ["active", "passive"]


# 16. Dictionaries of all kinds


@pytest.mark.parametrize("theta", [0.0, 1.0])
def test_fault_16_dicts_and_tensordicts_alike(theta: float) -> None:
    model, case = make_model(2, theta=theta), make_case(2)
    expected = fields_of(model, case)
    meshes, lengths, conditions = TensorDict(), TensorDict(case.reference_lengths), TensorDict(case.global_data)
    for kind, mesh in case.boundary_meshes.items():
        meshes[kind] = map_mesh(mesh, cell_data=TensorDict(dict(mesh.cell_data.items()), batch_size=[mesh.n_faces]))
    assert relative_error(fields_of(model, Case(case.prediction_points, meshes, lengths, conditions)), expected) == 0
    plans = model.build_plans(case.prediction_points, meshes)
    found = fields_of(model, Case(case.prediction_points, meshes, lengths, conditions), plans=plans)
    assert relative_error(found, expected) == 0
