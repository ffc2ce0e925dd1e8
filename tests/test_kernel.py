"""The parts of a kernel against stored numbers, and the whole network against its definition written out naively."""

from __future__ import annotations

from typing import Any

import naive
import pytest
import torch
from helpers import Case, fields_of, golden_pieces, make_case, make_model, model_config, relative_error
from torch import Tensor

from globe_lightning import GLOBE, BoundaryMesh
from globe_lightning.models.features import legendre, magnitude_and_direction, smooth_log
from globe_lightning.models.kernel import Kernel, global_scalar_order
from globe_lightning.models.networks import make_network, rational
from globe_lightning.models.outputs import compress

PIECES = golden_pieces()


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["pade_globe", "pade_globe_beta", "mlp"])
def test_networks(name: str) -> None:
    piece = PIECES[name]
    config = piece["config"]
    network = make_network(
        "mlp" if name == "mlp" else "pade",
        config["in_features"],
        config["hidden_features"],
        config["out_features"],
        config.get("self_regularization_beta"),
    ).double()
    network.load_state_dict({key: value for key, value in piece["state_dict"].items() if key != "_one"})
    x = piece["x"].clone().requires_grad_()
    y = network(x)
    close(y, piece["y"])
    if "grad_x" in piece:
        # The stored gradient is that of the sum of squares.
        y.square().sum().backward()
        close(x.grad, piece["grad_x"], 1e-9)
        for key, parameter in network.named_parameters():
            close(parameter.grad, piece["grad_params"][key], 1e-9)


def test_rational_is_odd_and_bounded() -> None:
    p = torch.linspace(-1e3, 1e3, 41, dtype=torch.float64)
    q = torch.zeros_like(p)
    close(rational(-p, q, 0.01), -rational(p, q, 0.01))
    assert rational(p, q, 0.01).abs().max() <= 100
    close(rational(p, q, None), p * p.abs())


def test_smooth_log_and_its_derivative() -> None:
    piece = PIECES["smooth_log"]
    x = piece["x"].clone().requires_grad_()
    y = smooth_log(x)
    close(y, piece["y"])
    (dy,) = torch.autograd.grad(y.sum(), x)
    close(dy, piece["dy"])


def test_legendre() -> None:
    piece = PIECES["legendre"]
    polynomials = legendre(piece["x"], piece["n"] - 1)
    assert len(polynomials) == piece["n"] - 1
    for degree, polynomial in enumerate(polynomials, start=1):
        close(polynomial, piece["P"][degree])
    assert legendre(piece["x"], 0) == []


def test_magnitude_and_direction_at_zero() -> None:
    eps = torch.tensor(1e-8, dtype=torch.float64)
    vectors = torch.tensor([[0.0, 0.0], [3.0, 4.0]], dtype=torch.float64, requires_grad=True)
    magnitude, direction = magnitude_and_direction(vectors, eps)
    close(magnitude, torch.tensor([1e-8, 5.0], dtype=torch.float64))
    close(direction, torch.tensor([[0.0, 0.0], [0.6, 0.8]], dtype=torch.float64))
    magnitude.sum().backward()
    assert torch.isfinite(vectors.grad).all()


def test_latent_compression() -> None:
    piece = PIECES["latent_compression"]
    model = make_model(3, n_latent_scalars=1, n_latent_vectors=1, latent_compression_scale=piece["C"])
    # Packed latents: the scalars (one latent, two strengths), then the vector.
    scalars = piece["scalar_in"].unsqueeze(1).expand(-1, 3)
    scale = model.latent_compression_scale
    packed = torch.cat([scalars, piece["vector_in"]], dim=1)
    packed = compress(packed, model.latent_layout, scale, model.smoothing_radius)
    close(packed[:, :3], piece["scalar_out"].unsqueeze(1).expand(-1, 3))
    close(packed[:, 3:], piece["vector_out"], 1e-10)
    assert compress(packed, model.latent_layout, None, model.smoothing_radius) is packed


@pytest.mark.parametrize("dims", [2, 3])
def test_the_naive_kernel_is_the_stored_one(dims: int) -> None:
    """What the reference of the tests computes for a pair is what the independent implementation stored."""
    piece = PIECES[f"kernel_dense_{dims}d"]
    data, ranks = naive.flat(piece["source_data"]), naive.flat(piece["config"]["source_data_ranks"])
    state = {f"x.{key}": value for key, value in piece["state_dict"].items()}
    fields = naive.kernel(
        state,
        "x",
        piece["config"],
        (piece["target_points"][:, None] - piece["source_points"][None]) / piece["reference_length"],
        {("global_scalars", "Re"): piece["global_data"]["Re"]},
        {"dir": piece["global_data"]["dir"]},
        {name: value for name, value in data.items() if ranks[name] == 0},
        {name: value for name, value in data.items() if ranks[name] == 1},
        naive.flat(piece["config"]["output_field_ranks"]),
    )
    for name, expected in piece["pairwise_outputs_TxS"].items():
        close(fields[name], expected, 1e-11)
        weights = piece["source_strengths"].reshape(1, -1, *[1] * (expected.ndim - 2))
        close((fields[name] * weights).sum(dim=1), piece["outputs"][name], 1e-11)


@pytest.mark.parametrize("dims", [2, 3])
def test_a_kernels_network_has_the_stored_shape(dims: int) -> None:
    piece = PIECES[f"kernel_dense_{dims}d"]
    kernel = Kernel(**piece["config"]).double()
    state = {key: value for key, value in piece["state_dict"].items() if key != "network._one"}
    kernel.load_state_dict(state)
    linears = kernel.network.perceptron().linears()
    assert linears[0].in_features == piece["network_in_features"]
    assert linears[-1].out_features == 2 * piece["network_out_features"]


@pytest.mark.parametrize("dims", [2, 3])
def test_vector_bases(dims: int) -> None:
    """u_r, u_k and e_k of the stored bases: the vector e_k is the part of -u_k normal to u_r."""
    piece = PIECES["polar_and_dipole_basis" if dims == 2 else "spherical_basis"]
    r, n = piece["r_hat"], piece["n_hat"]
    e = -n + (n * r).sum(dim=-1, keepdim=True) * r
    stored = piece["unnormalized"]
    close(stored[0], r)
    # Rows 0 to 3 are degenerate; elsewhere e_k is one of the stored directions.
    assert any(torch.allclose(candidate[4:], e[4:], atol=1e-12) for candidate in stored)


def naive_fields(config: dict[str, Any], model: GLOBE, case: Case) -> dict[str, Tensor]:
    meshes = {
        kind: {
            "points": mesh.points,
            "cells": mesh.cells,
            "cell_data": dict(mesh.cell_data.items()),
            "measure_weights": mesh.measure_weights,
        }
        for kind, mesh in case.boundary_meshes.items()
    }
    lengths = {name: torch.as_tensor(value, dtype=torch.float64) for name, value in case.reference_lengths.items()}
    state = model.state_dict()
    return naive.forward(config, state, case.prediction_points, meshes, lengths, case.global_data)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "mlp": {"network_type": "mlp"},
    "no regularisation": {"self_regularization_beta": None, "latent_compression_scale": None},
    "no harmonics": {"n_spherical_harmonics": 0},
    "many harmonics": {"n_spherical_harmonics": 5},
    "no communication": {"n_communication_hyperlayers": 0},
    "three layers": {"n_communication_hyperlayers": 3, "hidden_layer_sizes": [9]},
    "names beyond ten": {"n_latent_scalars": 12, "n_latent_vectors": 11, "n_communication_hyperlayers": 1},
    "no latents": {"n_latent_scalars": 0, "n_latent_vectors": 0},
    "scalars only": {"output_field_ranks": {"p": 0}},
    "three lengths": {"reference_length_names": ["chord", "b", "delta"]},
    "large smoothing": {"smoothing_radius": 0.01},
}


@torch.no_grad()
@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("variant", VARIANTS)
def test_forward_is_its_definition(dims: int, variant: str) -> None:
    """The whole network at theta = 0 against sums over all pairs written out by name."""
    config = model_config(dims, **VARIANTS[variant])
    model = make_model(dims, **VARIANTS[variant])
    case = make_case(dims, 11, 6, 13)
    if variant == "three lengths":
        case.reference_lengths["b"] = 0.4
    found = fields_of(model, case)
    assert relative_error(found, naive_fields(config, model, case)) < 1e-11


@torch.no_grad()
@pytest.mark.parametrize("dims", [2, 3])
def test_forward_with_nested_data_and_many_names(dims: int) -> None:
    """Nested declarations, names that sort oddly, no global vectors, several of each kind."""
    overrides: dict[str, Any] = {
        "boundary_source_data_ranks": {"wall": {"b": {"x": 0, "y": 1}, "a": 1, "Z": 0, "b2": 0}, "far": {"q": 0}},
        "global_data_ranks": {"zeta": 0, "log": {"a": 0}, "Re": 0, "m": 0},
        "output_field_ranks": {"u": 1, "a": {"w": 1, "q": 0}, "p": 0, "B": 1},
    }
    model, case = make_model(dims, **overrides), make_case(dims, 11, 6, 13)
    generator = torch.Generator().manual_seed(4)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    wall, far = case.boundary_meshes["wall"], case.boundary_meshes["far"]
    data = {"a": draw(11, dims), "Z": draw(11), "b": {"y": draw(11, dims), "x": draw(11)}, "b2": draw(11)}
    case.boundary_meshes = {
        "far": BoundaryMesh(far.points, far.cells, {"q": draw(6)}),
        "wall": BoundaryMesh(wall.points, wall.cells, data),
    }
    case.global_data = {"Re": draw(), "log": {"a": draw()}, "m": draw(), "zeta": draw()}
    found = fields_of(model, case)
    meshes = {
        "wall": {"points": wall.points, "cells": wall.cells, "cell_data": data},
        "far": {
            "points": far.points,
            "cells": far.cells,
            "cell_data": {"q": case.boundary_meshes["far"].cell_data["q"]},
        },
    }
    expected = naive.forward(
        model_config(dims, **overrides),
        model.state_dict(),
        case.prediction_points,
        meshes,
        case.reference_lengths,
        case.global_data,
    )
    assert relative_error(found, expected) < 1e-11


def test_global_scalars_sort_as_printed_tuples() -> None:
    order = global_scalar_order(["zeta", "Re", "log_q", "m"], ["a_b"])
    printed = {
        ("data", "zeta"): str(("global_scalars", "zeta")),
        ("data", "Re"): str(("global_scalars", "Re")),
        ("data", "log_q"): str(("global_scalars", "log_q")),
        ("data", "m"): str(("global_scalars", "m")),
        ("ratio", "a_b"): str(("global_scalars", "log_reference_length_ratios", "a_b")),
    }
    assert order == sorted(printed, key=printed.__getitem__)


def test_an_unknown_network_type() -> None:
    with pytest.raises(ValueError, match='network_type: expected "pade" or "mlp", found \'kan\''):
        make_network("kan", 3, [4], 2, None)
