"""The model as a whole: unusual samples, precisions, checkpointing, chunks, reuse of plans, saving, refusals."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import (
    Case,
    assert_same,
    fields_of,
    gradients_of,
    make_case,
    make_mesh,
    make_model,
    map_mesh,
    model_config,
    relative_error,
    relative_l2,
)
from tensordict import TensorDict
from torch import Tensor

from globe_lightning import GLOBE, BoundaryMesh

BOTH_THETAS = pytest.mark.parametrize("theta", [0.0, 1.0])
BOTH_DIMS = pytest.mark.parametrize("dims", [2, 3])


# Shapes of what comes out


@BOTH_DIMS
def test_fields_are_nested_as_declared(dims: int) -> None:
    model, case = make_model(dims), make_case(dims)
    out = model(*case.arguments())
    n = case.prediction_points.shape[0]
    assert isinstance(out, TensorDict)
    assert out.batch_size == torch.Size([n])
    assert out["vel", "dU"].shape == (n, dims)
    assert out["C_p"].shape == (n,)
    assert {out[name].dtype for name in ("C_p", "nut", "C_f")} == {torch.float64}


# Unusual samples


@BOTH_DIMS
@BOTH_THETAS
def test_missing_and_empty_types_contribute_nothing(dims: int, theta: float) -> None:
    model, case = make_model(dims, theta=theta), make_case(dims)
    wall = case.boundary_meshes["wall"]
    empty = BoundaryMesh(torch.zeros(0, dims, dtype=torch.float64), torch.zeros(0, dims, dtype=torch.int64))
    missing = Case(case.prediction_points, {"wall": wall}, case.reference_lengths, case.global_data)
    hollow = Case(case.prediction_points, {"wall": wall, "far": empty}, case.reference_lengths, case.global_data)
    found = fields_of(model, missing, prediction_chunk_size=None)
    assert_same(fields_of(model, hollow, prediction_chunk_size=None), found)
    gradients = gradients_of(model, missing, prediction_chunk_size=None)
    assert_same(gradients_of(model, hollow, prediction_chunk_size=None), gradients)
    for name, gradient in gradients.items():
        assert bool(gradient.any()) != (".far." in name), name
    # The same as a model that never heard of the other type.
    config = {"boundary_source_data_ranks": {"wall": {"heat": 0, "slip": 1}}}
    smaller = make_model(dims, theta=theta, **config)
    smaller.load_state_dict({name: value for name, value in model.state_dict().items() if ".far." not in name})
    assert relative_error(found, fields_of(smaller, missing, prediction_chunk_size=None)) < 1e-12


@BOTH_DIMS
@BOTH_THETAS
def test_no_prediction_points(dims: int, theta: float) -> None:
    model, case = make_model(dims, theta=theta), make_case(dims)
    case.prediction_points = case.prediction_points[:0]
    for chunk in ("auto", None, 5):
        fields = fields_of(model, case, prediction_chunk_size=chunk)
        assert {name: tuple(field.shape) for name, field in fields.items()} == {
            "C_p": (0,),
            "nut": (0,),
            "C_f": (0, dims),
            "vel.dU": (0, dims),
        }
        assert all(field.dtype == torch.float64 for field in fields.values())


@BOTH_DIMS
@BOTH_THETAS
def test_one_face(dims: int, theta: float) -> None:
    """A face does not act on itself: without others the communication layers pass nothing on."""
    case = make_case(dims, 1, 1)
    case.boundary_meshes = {"wall": case.boundary_meshes["wall"]}
    direct = fields_of(make_model(dims, theta=theta, n_communication_hyperlayers=0), case)
    assert all(torch.isfinite(field).all() and field.std() > 0 for field in direct.values())
    model = make_model(dims, theta=theta)
    with pytest.warns(UserWarning, match="one face"):
        fields = fields_of(model, case)
    for name, transform in zip(model.output_layout.ranks, model.final_field_transforms, strict=True):
        offset = torch.zeros(1, dtype=torch.float64) if transform.bias is None else transform.bias
        torch.testing.assert_close(fields[name], offset.expand_as(fields[name]))


@BOTH_DIMS
@BOTH_THETAS
@pytest.mark.parametrize("leaf_size", [1, 4])
def test_faces_without_area_count_for_nothing(dims: int, theta: float, leaf_size: int) -> None:
    """Degenerate faces and faces of weight 0 change nothing where everything is exact and give no NaN anywhere."""
    model, case = make_model(dims, theta=theta, leaf_size=leaf_size), make_case(dims)
    wall = case.boundary_meshes["wall"]
    points = wall.points.clone()
    points[wall.cells[:5]] = points[wall.cells[:5, :1]]
    degenerate = map_mesh(wall, points=points)
    weightless = map_mesh(wall, measure_weights=wall.measure_weights * (torch.arange(wall.n_faces) >= 5))
    kept = torch.arange(5, wall.n_faces)
    without = map_mesh(
        wall,
        cells=wall.cells[kept],
        cell_data={name: value[kept] for name, value in wall.cell_data.items()},
        measure_weights=wall.measure_weights[kept],
    )

    def with_wall(mesh: BoundaryMesh) -> Case:
        meshes = {"wall": mesh, "far": case.boundary_meshes["far"]}
        return Case(case.prediction_points, meshes, case.reference_lengths, case.global_data)

    expected = fields_of(model, with_wall(without), prediction_chunk_size=None)
    for mesh in (degenerate, weightless):
        found = fields_of(model, with_wall(mesh), prediction_chunk_size=None)
        gradients = gradients_of(model, with_wall(mesh))
        assert all(torch.isfinite(value).all() for value in [*found.values(), *gradients.values()])
        if theta == 0:
            assert relative_error(found, expected) < 1e-12
    nothing = with_wall(map_mesh(wall, measure_weights=torch.zeros_like(wall.measure_weights)))
    assert all(torch.isfinite(field).all() for field in fields_of(model, nothing).values())


@BOTH_DIMS
@pytest.mark.parametrize("leaf_size", [1, 3])
def test_coincident_faces_and_points(dims: int, leaf_size: int) -> None:
    """Duplicates, and prediction points on the faces themselves: finite, and near exact where the tree is."""
    case = make_case(dims)
    wall = case.boundary_meshes["wall"]
    twice = torch.arange(wall.n_faces).repeat(2)
    meshes = {
        "wall": map_mesh(
            wall,
            cells=wall.cells[twice],
            cell_data={name: value[twice] for name, value in wall.cell_data.items()},
            measure_weights=wall.measure_weights[twice],
        ),
        "far": case.boundary_meshes["far"],
    }
    points = torch.cat([case.prediction_points, wall.centroids, wall.centroids, wall.points])
    doubled = Case(points, meshes, case.reference_lengths, case.global_data)
    exact = fields_of(make_model(dims, leaf_size=leaf_size), doubled)
    tiny = fields_of(make_model(dims, theta=1e-4, leaf_size=leaf_size), doubled)
    assert relative_error(tiny, exact) < 1e-11
    model = make_model(dims, theta=1.0, leaf_size=leaf_size)
    found = fields_of(model, doubled)
    assert all(torch.isfinite(field).all() for field in found.values())
    assert all(torch.isfinite(gradient).all() for gradient in gradients_of(model, doubled).values())
    for field in exact.values():
        n = wall.n_faces
        first = field[case.prediction_points.shape[0] :][:n]
        torch.testing.assert_close(field[case.prediction_points.shape[0] + n :][:n], first)


@BOTH_DIMS
def test_all_faces_in_one_place(dims: int) -> None:
    model, case = make_model(dims, theta=1.0), make_case(dims)
    for kind, mesh in case.boundary_meshes.items():
        case.boundary_meshes[kind] = map_mesh(mesh, cells=mesh.cells[:1].expand(mesh.n_faces, dims))
    values = [*fields_of(model, case).values(), *gradients_of(model, case).values()]
    assert all(torch.isfinite(value).all() for value in values)


# Forms of input


@BOTH_DIMS
@BOTH_THETAS
def test_forms_of_the_same_input(dims: int, theta: float) -> None:
    model, case = make_model(dims, theta=theta), make_case(dims)
    expected = fields_of(model, case)

    def spread(x: Tensor) -> Tensor:
        """The same numbers, not contiguous in memory."""
        wide = torch.empty(*x.shape, 2, dtype=x.dtype)[..., 0].copy_(x)
        assert not wide.is_contiguous()
        return wide

    meshes = {
        kind: map_mesh(
            mesh,
            points=spread(mesh.points),
            cells=spread(mesh.cells.int()),
            measure_weights=None if mesh.measure_weights is None else spread(mesh.measure_weights),
        )
        for kind, mesh in case.boundary_meshes.items()
    }
    lengths = {name: float(value) for name, value in case.reference_lengths.items()}
    variants = {
        "not contiguous, int32 cells": Case(spread(case.prediction_points), meshes, lengths, case.global_data),
        "plain floats": Case(case.prediction_points, case.boundary_meshes, lengths, case.global_data),
        "lengths of shape (1,)": Case(
            case.prediction_points,
            case.boundary_meshes,
            {name: torch.tensor([value], dtype=torch.float64) for name, value in lengths.items()},
            {"Re": case.global_data["Re"].reshape(1), "U_inf": case.global_data["U_inf"]},
        ),
        "tensordicts": Case(
            case.prediction_points,
            case.boundary_meshes,
            TensorDict(case.reference_lengths, batch_size=[]),
            TensorDict(case.global_data, batch_size=[]),
        ),
    }
    for name, variant in variants.items():
        assert relative_error(fields_of(model, variant), expected) < 1e-12, name


@BOTH_DIMS
def test_face_positions_move_sources_and_targets(dims: int) -> None:
    model, case = make_model(dims), make_case(dims)
    expected = fields_of(model, case)
    same = {kind: map_mesh(mesh, face_positions=mesh.centroids) for kind, mesh in case.boundary_meshes.items()}
    assert relative_error(fields_of(model, Case(case.prediction_points, same, *case.arguments()[2:])), expected) == 0
    generator = torch.Generator().manual_seed(0)
    drawn = {kind: mesh.with_random_positions(generator) for kind, mesh in case.boundary_meshes.items()}
    moved = fields_of(model, Case(case.prediction_points, drawn, *case.arguments()[2:]))
    assert relative_error(moved, expected) > 1e-3


# Precision


@BOTH_DIMS
@BOTH_THETAS
def test_float64_input_of_a_float32_model_is_cast(dims: int, theta: float) -> None:
    model = make_model(dims, torch.float32, theta=theta)
    wide, narrow = make_case(dims), make_case(dims, dtype=torch.float32)
    found = fields_of(model, wide)
    assert all(field.dtype == torch.float32 for field in found.values())
    assert relative_l2(found, fields_of(model, narrow)) < 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@BOTH_THETAS
def test_autocast_gives_finite_float32(dtype: torch.dtype, theta: float) -> None:
    model, case = make_model(3, torch.float32, theta=theta), make_case(3, dtype=torch.float32)
    exact = fields_of(model, case)
    with torch.autocast("cpu", dtype):
        found = fields_of(model, case)
    assert all(field.dtype == torch.float32 for field in found.values())
    assert (
        0
        < max(float((found[name] - exact[name]).detach().norm() / exact[name].detach().norm()) for name in exact)
        < 0.03
    )
    if dtype == torch.float16:
        return  # Gradients in float16 need a loss that is scaled.
    sum(field.square().sum() for field in found.values()).backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@BOTH_THETAS
def test_a_model_of_16_bit_weights(dtype: torch.dtype, theta: float) -> None:
    model, case = make_model(3, torch.float32, theta=theta), make_case(3, dtype=torch.float32)
    exact = fields_of(model, case)
    model = model.to(dtype)
    assert model.smoothing_radius.dtype == torch.float32
    found = fields_of(model, case)
    assert all(field.dtype == torch.float32 for field in found.values())
    assert relative_l2(found, exact) < 0.1
    if dtype == torch.bfloat16:
        assert all(torch.isfinite(gradient).all() for gradient in gradients_of(model, case).values())
    back = model.double()
    assert all(torch.isfinite(field).all() for field in fields_of(back, make_case(3)).values())


def test_plans_are_never_built_under_autocast() -> None:
    model, case = make_model(3, torch.float32, theta=1.0), make_case(3, dtype=torch.float32)
    plain = model.build_plans(case.prediction_points, case.boundary_meshes)
    with torch.autocast("cpu", torch.bfloat16):
        under = model.build_plans(case.prediction_points, case.boundary_meshes)
    assert torch.equal(plain.forest.boxes, under.forest.boxes)
    assert under.forest.boxes.dtype == torch.float32
    assert plain.n_evaluations == under.n_evaluations
    assert not under.forest.points.requires_grad


# The same numbers by other ways


@BOTH_DIMS
@pytest.mark.parametrize(("theta", "expand", "leaf_size"), [(0.0, False, 1), (1.0, False, 1), (1.0, True, 4)])
def test_checkpointing_and_eval_change_nothing(dims: int, theta: float, expand: bool, leaf_size: int) -> None:
    case, options = make_case(dims), {"theta": theta, "expand_far_targets": expand, "leaf_size": leaf_size}
    kept = make_model(dims, use_gradient_checkpointing=False, **options)
    recomputed = make_model(dims, use_gradient_checkpointing=True, **options)
    expected = fields_of(kept, case)
    assert_same(fields_of(recomputed, case), expected)
    assert_same(gradients_of(recomputed, case), gradients_of(kept, case))
    with torch.no_grad():
        assert_same(fields_of(recomputed.eval(), case), {name: field.detach() for name, field in expected.items()})
    with torch.inference_mode():
        assert relative_error(fields_of(recomputed.eval(), case), expected) < 1e-12


@BOTH_DIMS
def test_prediction_chunks_change_nothing_at_theta_zero(dims: int) -> None:
    model, case = make_model(dims), make_case(dims)
    expected = fields_of(model, case, prediction_chunk_size=None)
    for chunk in ("auto", 1, 7, 31, 1000):
        assert_same(fields_of(model, case, prediction_chunk_size=chunk), expected)


@BOTH_DIMS
@pytest.mark.parametrize(("theta", "expand", "leaf_size"), [(0.0, False, 1), (1.0, False, 3), (1.0, True, 1)])
def test_reused_plans_equal_built_ones(dims: int, theta: float, expand: bool, leaf_size: int) -> None:
    model = make_model(dims, theta=theta, expand_far_targets=expand, leaf_size=leaf_size)
    case = make_case(dims)
    plans = model.build_plans(*case.arguments()[:2], 12)
    expected = fields_of(model, case, prediction_chunk_size=12)
    for _ in range(2):
        assert_same(fields_of(model, case, plans=plans), expected)
    # Plans hold indices only: other data, areas and conditions on the same places need no new ones.
    other = make_case(dims)
    wall = other.boundary_meshes["wall"]
    data = {name: value * 2 for name, value in wall.cell_data.items()}
    other.boundary_meshes["wall"] = map_mesh(wall, cell_data=data)
    assert_same(fields_of(model, other, plans=plans), fields_of(model, other, prediction_chunk_size=12))
    assert plans.n_evaluations["prediction"] <= 31 * 32


def test_trees_built_elsewhere() -> None:
    case = make_case(3)
    expected = fields_of(make_model(3, theta=1.0), case)
    for device in ("cpu", torch.device("cpu")):
        assert_same(fields_of(make_model(3, theta=1.0, tree_build_device=device), case), expected)


# Gradients


@pytest.mark.parametrize(("theta", "leaf_size"), [(0.0, 1), (1.0, 3)])
def test_gradients_with_respect_to_the_inputs(theta: float, leaf_size: int) -> None:
    """Points, vertices, weights, data, lengths and conditions, by finite differences."""
    overrides = {"n_latent_scalars": 1, "n_latent_vectors": 1, "hidden_layer_sizes": [4], "leaf_size": leaf_size}
    model = make_model(2, theta=theta, n_communication_hyperlayers=1, smoothing_radius=1e-4, **overrides)
    case = make_case(2, 7, 4, 5)
    wall, far = case.boundary_meshes["wall"], case.boundary_meshes["far"]
    plans = model.build_plans(*case.arguments()[:2])
    inputs = (
        case.prediction_points,
        wall.points,
        wall.measure_weights,
        wall.cell_data["heat"],
        wall.cell_data["slip"],
        case.reference_lengths["delta"],
        case.global_data["Re"],
        case.global_data["U_inf"],
    )

    def run(points: Tensor, *others: Tensor) -> Tensor:
        vertices, weights, heat, slip, delta, reynolds, wind = others
        mesh = BoundaryMesh(vertices, wall.cells, {"heat": heat, "slip": slip}, weights)
        lengths = {"chord": case.reference_lengths["chord"], "delta": delta}
        out = model(points, {"wall": mesh, "far": far}, lengths, {"Re": reynolds, "U_inf": wind}, plans=plans)
        return torch.cat([out["C_p"], out["vel", "dU"].flatten()])

    inputs = tuple(value.detach().clone().requires_grad_() for value in inputs)
    assert torch.autograd.gradcheck(run, inputs, eps=1e-6, atol=1e-5, rtol=1e-3, fast_mode=True)


@BOTH_THETAS
@pytest.mark.parametrize("checkpointing", [True, False])
def test_two_backward_passes_and_double_backward(theta: float, checkpointing: bool) -> None:
    model = make_model(2, theta=theta, use_gradient_checkpointing=checkpointing)
    case = make_case(2)
    once = gradients_of(model, case)
    model.zero_grad()
    loss = sum(field.square().sum() for field in fields_of(model, case).values())
    loss.backward(retain_graph=True)
    loss.backward()
    assert_same({name: p.grad / 2 for name, p in model.named_parameters()}, once)

    # A loss on the gradient of a field, as of a differential equation.
    case.prediction_points = case.prediction_points.clone().requires_grad_()
    plans = model.build_plans(*case.arguments()[:2])

    def slope() -> Tensor:
        pressure = fields_of(model, case, plans=plans)["C_p"]
        (gradient,) = torch.autograd.grad(pressure.sum(), case.prediction_points, create_graph=True)
        return gradient.square().sum()

    model.zero_grad()
    slope().backward()
    weight = model.kernel_layers[0]["wall"].kernels["chord"].network.combined_mlp.layers[0].weight
    analytic = weight.grad[2, 3].item()
    step = 1e-5
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            weight[2, 3] += sign * step
        values.append(slope().item())
        with torch.no_grad():
            weight[2, 3] -= sign * step
    assert analytic == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-4)


@BOTH_THETAS
@pytest.mark.parametrize("network_type", ["pade", "mlp"])
@pytest.mark.parametrize("n_communication", [0, 1, 2])
def test_every_parameter_gets_a_gradient(theta: float, network_type: str, n_communication: int) -> None:
    model = make_model(
        2, theta=theta, network_type=network_type, n_communication_hyperlayers=n_communication, n_spherical_harmonics=0
    )
    for name, gradient in gradients_of(model, make_case(2)).items():
        assert torch.isfinite(gradient).all(), name
        assert gradient.any(), name


# Saving


def test_state_survives_a_file_and_a_copy() -> None:
    model, case = make_model(3, torch.float32, theta=1.0), make_case(3, dtype=torch.float32)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = make_model(3, torch.float32, seed=7, theta=1.0)
    assert relative_error(fields_of(other, case), fields_of(model, case)) > 1e-3
    other.load_state_dict(torch.load(file, weights_only=True))
    assert_same(fields_of(other, case), fields_of(model, case), 0)
    assert_same(fields_of(copy.deepcopy(model), case), fields_of(model, case), 0)
    assert "smoothing_radius" not in model.state_dict()


# Refusals of constructor arguments


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_spatial_dims": 4}, "n_spatial_dims: expected 2 or 3, found 4"),
        ({"output_field_ranks": {}}, "output_field_ranks: expected at least one field"),
        ({"output_field_ranks": {"p": 2}}, "output_field_ranks['p']: a rank is 0 (scalar) or 1 (vector), found 2"),
        ({"boundary_source_data_ranks": {}}, "boundary_source_data_ranks: expected at least one type"),
        ({"boundary_source_data_ranks": {"wall": {"x": 3}}}, "boundary_source_data_ranks['wall']['x']: a rank is 0"),
        ({"global_data_ranks": {"x": "1"}}, "global_data_ranks['x']: a rank is 0"),
        ({"reference_length_names": []}, "reference_length_names: expected at least one length"),
        ({"reference_length_names": ["a", "a"]}, "reference_length_names: expected different names"),
        ({"reference_area": 0.0}, "reference_area: expected a positive area, found 0.0"),
        ({"n_communication_hyperlayers": -1}, "n_communication_hyperlayers: expected >= 0, found -1"),
        ({"n_latent_scalars": -1}, "n_latent_scalars"),
        ({"n_latent_vectors": -2}, "n_latent_vectors"),
        ({"smoothing_radius": 0.0}, "smoothing_radius: expected a positive number"),
        ({"hidden_layer_sizes": [4, 0]}, "hidden_layer_sizes: expected sizes > 0"),
        ({"hidden_layer_sizes": []}, "hidden_layer_sizes: expected at least one hidden layer"),
        ({"n_spherical_harmonics": -1}, "n_spherical_harmonics: expected >= 0"),
        ({"theta": -0.5}, "theta: expected >= 0, found -0.5"),
        ({"theta": float("nan")}, "theta: expected >= 0, found nan"),
        ({"far_field_order": 2}, "far_field_order: expected 0 or 1, found 2"),
        ({"max_far_targets": 0}, 'max_far_targets: expected "auto", None or a positive integer, found 0'),
        ({"max_far_targets": "all"}, "max_far_targets: expected \"auto\", None or a positive integer, found 'all'"),
        ({"plan_cache_bytes": -1}, "plan_cache_bytes: expected >= 0, found -1"),
        (
            {"far_field_order": 1, "expand_far_targets": True},
            "far_field_order: expected 0 with expand_far_targets: true",
        ),
        ({"leaf_size": 0}, "leaf_size: expected >= 1, found 0"),
        ({"network_type": "kan"}, 'network_type: expected "pade" or "mlp", found \'kan\''),
        ({"self_regularization_beta": -1.0}, "self_regularization_beta: expected None or >= 0, found -1.0"),
        ({"latent_compression_scale": 0.0}, "latent_compression_scale: expected None or a positive number"),
    ],
)
def test_arguments_out_of_range(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        GLOBE(**model_config(2, **changes))


def test_unknown_arguments_and_chunk_sizes() -> None:
    with pytest.raises(TypeError, match="tetha"):
        GLOBE(**model_config(2), tetha=1.0)
    model, case = make_model(2), make_case(2)
    for chunk in (0, -3, "all", 2.5):
        with pytest.raises(ValueError, match='prediction_chunk_size: expected "auto", None or a positive integer'):
            fields_of(model, case, prediction_chunk_size=chunk)


@pytest.mark.parametrize(
    "change",
    [
        lambda case: case.prediction_points[:5],
        lambda case: torch.cat([case.prediction_points, case.prediction_points]),
    ],
)
def test_plans_of_other_points_are_refused(change: Callable[[Case], Tensor]) -> None:
    model, case = make_model(2, theta=1.0), make_case(2)
    plans = model.build_plans(*case.arguments()[:2])
    case.prediction_points = change(case)
    with pytest.raises(ValueError, match=r"plans: .*31 prediction points"):
        fields_of(model, case, plans=plans)


def test_plans_of_other_faces_are_refused() -> None:
    model, case = make_model(2, theta=1.0), make_case(2)
    plans = model.build_plans(*case.arguments()[:2])
    other = make_case(2, n_wall=24)
    other.prediction_points = case.prediction_points
    with pytest.raises(ValueError, match=r"plans: .*'wall'"):
        fields_of(model, other, plans=plans)
    del other.boundary_meshes["wall"]
    with pytest.raises(ValueError, match=r"plans: .*'wall'"):
        fields_of(model, other, plans=plans)


def test_a_mesh_made_by_hand_is_enough() -> None:
    """The smallest use: one type, no data, no conditions."""
    model = GLOBE(
        n_spatial_dims=2,
        output_field_ranks={"p": 0},
        boundary_source_data_ranks={"wall": {}},
        reference_length_names=["l"],
    )
    mesh = make_mesh(2, 6, torch.Generator().manual_seed(0), dtype=torch.float32)
    fields = model(torch.rand(4, 2), {"wall": mesh}, {"l": 1.0})
    assert fields["p"].shape == (4,)
    assert torch.isfinite(fields["p"]).all()
