"""What tests share: golden cases, small random models and samples, a quiet trainer, a free port."""

from __future__ import annotations

import random
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from globe_lightning import GLOBE, BoundaryMesh
from globe_lightning.fields import flatten_data

GOLDEN = Path(__file__).parent / "golden"


# Golden cases


@dataclass
class GoldenCase:
    """One case in one precision."""

    config: dict[str, Any]
    state: dict[str, Tensor]
    inputs: dict[str, Any]
    expected: dict[str, Any]
    gradients: dict[str, Tensor]
    dtype: torch.dtype

    def meshes(self) -> dict[str, BoundaryMesh]:
        """The boundary meshes of the inputs."""
        out = {}
        for kind, mesh in self.inputs["boundary_meshes"].items():
            data = dict(mesh["cell_data"])
            weights = data.pop("_measure_weights", None)
            out[kind] = BoundaryMesh(mesh["points"], mesh["cells"], data, weights)
        return out

    def model(self) -> GLOBE:
        """The model with the stored weights."""
        model = GLOBE(**self.config).to(self.dtype)
        model.load_state_dict({name: value for name, value in self.state.items() if not name.endswith("._one")})
        return model

    def predict(self, model: GLOBE, prediction_chunk_size: int | None) -> dict[str, Tensor]:
        """The model's fields by flattened name."""
        out = model(
            self.inputs["prediction_points"],
            self.meshes(),
            self.inputs["reference_lengths"],
            self.inputs.get("global_data"),
            prediction_chunk_size,
        )
        return flatten_data(out)


def golden_cases() -> list[tuple[str, str]]:
    """(case, "f64" or "f32") of all stored cases."""
    out = []
    for path in sorted(GOLDEN.glob("[23]d_*.pt")):
        stored = torch.load(path, weights_only=True)
        out += [(path.stem, precision) for precision in ("f64", "f32") if precision in stored]
    return out


def load_golden(name: str, precision: str) -> GoldenCase:
    """Read a stored case."""
    stored = torch.load(GOLDEN / f"{name}.pt", weights_only=True)
    dtype = {"f64": torch.float64, "f32": torch.float32}[precision]
    expected = stored[precision]
    state = _split(stored["state_values"], stored["state_names"], stored["state_shapes"])
    shapes = [list(state[key].shape) for key in expected["gradient_names"]]
    gradients = _split(expected["gradient_values"], expected["gradient_names"], shapes)
    return GoldenCase(stored["config"], state, expected["inputs"], expected, gradients, dtype)


def _split(values: Tensor, names: list[str], shapes: list[list[int]]) -> dict[str, Tensor]:
    parts = values.split([torch.Size(shape).numel() for shape in shapes])
    return {name: part.reshape(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}


def golden_pieces() -> dict[str, Any]:
    """The stored parts, in float64."""
    return torch.load(GOLDEN / "pieces.pt", weights_only=True)


# Small random models and samples


def model_config(dims: int, **overrides: Any) -> dict[str, Any]:
    """Arguments of a small model with all sorts of fields; two boundary types, "wall" and "far"."""
    config: dict[str, Any] = {
        "n_spatial_dims": dims,
        "output_field_ranks": {"C_p": 0, "vel": {"dU": 1}, "nut": 0, "C_f": 1},
        "boundary_source_data_ranks": {"wall": {"heat": 0, "slip": 1}, "far": {}},
        "reference_length_names": ["chord", "delta"],
        "reference_area": 0.7,
        "global_data_ranks": {"Re": 0, "U_inf": 1},
        "n_communication_hyperlayers": 2,
        "n_latent_scalars": 3,
        "n_latent_vectors": 2,
        "hidden_layer_sizes": [12, 8],
        "n_spherical_harmonics": 2,
        "theta": 0.0,
        "leaf_size": 1,
        "self_regularization_beta": 0.01,
        "latent_compression_scale": 100.0,
    }
    return config | overrides


def make_model(dims: int, dtype: torch.dtype = torch.float64, seed: int = 0, **overrides: Any) -> GLOBE:
    """A small model with random weights; branch scales and calibration differ from 1 and 0 so that they matter."""
    torch.manual_seed(seed)
    model = GLOBE(**model_config(dims, **overrides)).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "log_scalefactors" in name or "final_field" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@dataclass
class Case:
    """The arguments of a model's forward pass."""

    prediction_points: Tensor
    boundary_meshes: dict[str, BoundaryMesh]
    reference_lengths: dict[str, Any]
    global_data: dict[str, Tensor] | None

    def arguments(self) -> tuple[Any, ...]:
        """In the order of ``GLOBE.forward``."""
        return self.prediction_points, self.boundary_meshes, self.reference_lengths, self.global_data


def make_mesh(
    dims: int,
    n_faces: int,
    generator: torch.Generator,
    ranks: Mapping[str, int] | None = None,
    weighted: bool = False,
    dtype: torch.dtype = torch.float64,
) -> BoundaryMesh:
    """Faces of random size and place in a unit box, with random data."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    centres = torch.rand(n_faces, 1, dims, generator=generator, dtype=torch.float64).to(dtype)
    # Large enough that strengths stay of order one from layer to layer.
    corners = centres + (0.1 if dims == 2 else 0.3) * draw(n_faces, dims, dims)
    cells = torch.arange(n_faces * dims).reshape(n_faces, dims)
    data = {name: draw(n_faces, dims) if rank else draw(n_faces) for name, rank in (ranks or {}).items()}
    weights = torch.rand(n_faces, generator=generator, dtype=torch.float64).to(dtype) + 0.5 if weighted else None
    return BoundaryMesh(corners.reshape(-1, dims), cells, data, weights)


def make_case(
    dims: int, n_wall: int = 23, n_far: int = 9, n_points: int = 31, dtype: torch.dtype = torch.float64, seed: int = 1
) -> Case:
    """A random sample that fits :func:`model_config`."""
    generator = torch.Generator().manual_seed(seed)
    meshes = {
        "wall": make_mesh(dims, n_wall, generator, {"heat": 0, "slip": 1}, True, dtype),
        "far": make_mesh(dims, n_far, generator, None, False, dtype),
    }
    points = (1.4 * torch.rand(n_points, dims, generator=generator, dtype=torch.float64) - 0.2).to(dtype)
    lengths = {"chord": torch.tensor(0.8, dtype=dtype), "delta": torch.tensor(0.15, dtype=dtype)}
    conditions = {
        "Re": torch.tensor(0.4, dtype=dtype),
        "U_inf": torch.randn(dims, generator=generator, dtype=torch.float64).to(dtype),
    }
    return Case(points, meshes, lengths, conditions)


def map_mesh(mesh: BoundaryMesh, **changes: Any) -> BoundaryMesh:
    """A copy of a mesh with some constructor arguments replaced."""
    arguments = {
        "points": mesh.points,
        "cells": mesh.cells,
        "cell_data": mesh.cell_data,
        "measure_weights": mesh.measure_weights,
        "face_positions": mesh.face_positions,
    }
    return BoundaryMesh(**(arguments | changes))


def fields_of(model: GLOBE, case: Case, **options: Any) -> dict[str, Tensor]:
    """The model's prediction by flattened field name."""
    return flatten_data(model(*case.arguments(), **options))


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    """Equal up to rounding, over the largest entry of each tensor."""
    assert set(found) == set(expected)
    for name, truth in expected.items():
        scale = float(truth.detach().abs().max()) or 1.0
        torch.testing.assert_close(
            found[name], truth, rtol=0, atol=tolerance * scale, msg=lambda m, n=name: f"{n}: {m}"
        )


def relative_error(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Largest deviation of any field over that field's own variation; NaN counts as infinite."""
    assert set(found) == set(expected)
    worst = 0.0
    for name, truth in expected.items():
        assert found[name].shape == truth.shape, name
        truth = truth.detach().double()
        scale = (truth - truth.mean(dim=0)).square().mean().sqrt()
        assert scale > 0, f"{name} does not vary: the comparison would say nothing"
        error = float((found[name].detach().double() - truth).abs().max() / scale)
        worst = max(worst, error if error == error else float("inf"))
    return worst


def relative_l2(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Root mean square deviation of the worst field over that field's own variation; NaN counts as infinite."""
    assert set(found) == set(expected)
    worst = 0.0
    for name, truth in expected.items():
        assert found[name].shape == truth.shape, name
        truth = truth.detach().double()
        scale = (truth - truth.mean(dim=0)).norm()
        assert scale > 0, f"{name} does not vary: the comparison would say nothing"
        error = float((found[name].detach().double() - truth).norm() / scale)
        worst = max(worst, error if error == error else float("inf"))
    return worst


def gradients_of(model: GLOBE, case: Case, **options: Any) -> dict[str, Tensor]:
    """Gradient of the sum of squares of all fields for each parameter."""
    model.zero_grad()
    sum(field.square().sum() for field in fields_of(model, case, **options).values()).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


# Processes


def quiet_trainer(**options: Any) -> pl.Trainer:
    """A trainer on one CPU that logs, saves and shows nothing."""
    return pl.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def free_port() -> int:
    """A TCP port that is free and stays so: below those that the system hands out to connections."""
    for port in random.SystemRandom().sample(range(15_000, 32_000), 1000):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError("no port from 15000 to 32000 is free")
