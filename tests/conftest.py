"""What the tests of the training side share: small datasets, a small network, a short command line."""

from __future__ import annotations

import os

os.environ.setdefault("MPLBACKEND", "Agg")

import pytest
import torch
from data_synthetic import write_dataset
from tensordict import TensorDict

from globe_lightning.mesh import BoundaryMesh
from globe_lightning.sample import ForceSurface, Sample, SampleSchema

torch.set_num_threads(1)

AIRFRANS = SampleSchema(
    n_spatial_dims=2,
    output_field_ranks={"ΔU/|U_inf|": 1, "C_p": 0, "C_pt": 0, "ln(1+nut/nu)": 0, "C_F,shear": 1},
    boundary_source_data_ranks={"no_slip": {}},
    reference_length_names=["chord", "delta_FS"],
    global_data_ranks={"U_inf / U_inf_magnitude": 1},
)

TINY = {
    "hidden_layer_sizes": [8],
    "n_latent_scalars": 2,
    "n_latent_vectors": 1,
    "n_communication_hyperlayers": 1,
    "n_spherical_harmonics": 1,
    "theta": 0.0,
}


@pytest.fixture(scope="session")
def small_root(tmp_path_factory) -> str:
    """A dataset in the AirFRANS layout: 5 train and 3 test cases of 144 points."""
    root = tmp_path_factory.mktemp("airfoils")
    write_dataset(root, n_train=5, n_test=3)
    return str(root)


@pytest.fixture
def tiny_arguments() -> dict:
    """Constructor arguments of a GlobeLightningModule that costs nothing."""
    return {**AIRFRANS.arguments(), **TINY}


def make_sample(index: int = 0, n: int = 40, seed: int | None = None) -> Sample:
    """A circle in a made-up flow: smooth fields that depend on the case, shear known at the wall only."""
    generator = torch.Generator().manual_seed(index if seed is None else seed)
    n_wall = 16
    angle = torch.arange(n_wall) * (2 * torch.pi / n_wall)
    wall = 0.5 * torch.stack([angle.cos(), angle.sin()], dim=1)
    cells = torch.stack([torch.arange(n_wall), (torch.arange(n_wall) + 1) % n_wall], dim=1).flip(1)
    others = 0.6 + torch.rand(n - n_wall, 2, generator=generator)
    points = torch.cat([wall, others])
    incidence = torch.tensor(0.1 * index)
    direction = torch.stack([incidence.cos(), incidence.sin()])
    radius = points.norm(dim=1)
    pressure = (points @ direction) / radius**2 * (1 + 0.1 * index)
    velocity = points / radius.unsqueeze(1) ** 3
    shear = torch.full((n, 2), torch.nan)
    shear[:n_wall] = 0.004 * torch.stack([-angle.sin(), angle.cos()], dim=1) * (1 + index)
    mesh = BoundaryMesh(wall, cells)
    return Sample(
        case=f"case{index}",
        index=index,
        prediction_points=points,
        targets=TensorDict(
            {
                "ΔU/|U_inf|": velocity,
                "C_p": pressure,
                "C_pt": pressure + velocity.norm(dim=1) ** 2,
                "ln(1+nut/nu)": radius,
                "C_F,shear": shear,
            },
            batch_size=[n],
        ),
        boundary_meshes={"no_slip": mesh},
        reference_lengths={"chord": torch.tensor(1.0), "delta_FS": torch.tensor(1e-3)},
        global_data=TensorDict({"U_inf / U_inf_magnitude": direction}, batch_size=[]),
        force_surface=ForceSurface(
            point_indices=cells,
            area_vectors=mesh.normals * mesh.areas.unsqueeze(1),
            directions={"Cd": direction, "Cl": torch.stack([-direction[1], direction[0]])},
            shear_field="C_F,shear",
        ),
    )
