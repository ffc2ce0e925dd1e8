"""Geometries and configurations that every implementation is timed on, as plain tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CAR: dict[str, Any] = {
    "n_spatial_dims": 3,
    "output_field_ranks": {"C_p": 0, "C_f": 1},
    "boundary_source_data_ranks": {"vehicle": {}, "no_slip_floor": {}, "slip_floor": {}},
    "reference_length_names": ["L_ref", "delta_turb"],
    "reference_area": 2.17,
    "n_communication_hyperlayers": 2,
    "hidden_layer_sizes": [64, 64, 64],
    "n_latent_scalars": 8,
    "n_latent_vectors": 4,
    "n_spherical_harmonics": 4,
    "self_regularization_beta": 0.01,
    "latent_compression_scale": 100.0,
    "leaf_size": 1,
    "theta": 1.0,
    "expand_far_targets": True,
}
"""Arguments of GLOBE for the surface of a car."""

AIRFOIL: dict[str, Any] = {
    "n_spatial_dims": 2,
    "output_field_ranks": {"ΔU/|U_inf|": 1, "C_p": 0, "C_pt": 0, "ln(1+nut/nu)": 0, "C_F,shear": 1},
    "boundary_source_data_ranks": {"no_slip": {}},
    "reference_length_names": ["chord", "delta_FS"],
    "reference_area": 1.0,
    "global_data_ranks": {"U_inf / U_inf_magnitude": 1},
    "n_communication_hyperlayers": 2,
    "hidden_layer_sizes": [128, 128, 128],
    "n_latent_scalars": 12,
    "n_latent_vectors": 6,
    "n_spherical_harmonics": 1,
    "leaf_size": 1,
    "theta": 0.0,
}
"""Arguments of GLOBE for the flow around an airfoil."""


@dataclass
class Geometry:
    """One boundary-value problem.

    Attributes:
        points: prediction points (n, D) [m].
        meshes: {boundary type: (vertices (v, D) [m], corners of each face (faces, D))}.
        lengths: {name: reference length [m]}.
        conditions: {name: global vector}.
    """

    points: Tensor
    meshes: dict[str, tuple[Tensor, Tensor]]
    lengths: dict[str, Tensor]
    conditions: dict[str, Tensor]


def make(dims: int, n_faces: int, n_points: int | None = None, n_floor: int = 19) -> tuple[dict[str, Any], Geometry]:
    """Configuration and geometry: a car of ``n_faces`` triangles on two floors, or an airfoil of so many segments."""
    if dims == 3:
        return CAR, car(n_faces, n_points or n_faces, n_floor)
    return AIRFOIL, airfoil(n_faces, n_points or 2048)


def car(n_faces: int, n_points: int, n_floor: int = 19) -> Geometry:
    """A car-like closed body over two plane floors of ``n_floor`` x ``n_floor`` x 2 triangles; points on the body."""
    vertices, faces = closed_body(n_faces)
    lowest = float(vertices[:, 2].min())
    generator = torch.Generator().manual_seed(0)
    ids = torch.randperm(max(n_faces, n_points), generator=generator)[:n_points] % n_faces
    weights = torch.rand(n_points, 3, generator=generator) + 0.05
    weights = weights / weights.sum(dim=1, keepdim=True)
    return Geometry(
        points=(vertices[faces[ids]] * weights.unsqueeze(2)).sum(dim=1),
        meshes={
            "vehicle": (vertices, faces),
            "no_slip_floor": floor_mesh(-2.339, 10.0, lowest, n_floor),
            "slip_floor": floor_mesh(-10.0, -2.339, lowest, n_floor),
        },
        lengths={"L_ref": torch.tensor(2.786), "delta_turb": torch.tensor(0.0436)},
        conditions={},
    )


def airfoil(n_segments: int, n_points: int, incidence: float = 4.0) -> Geometry:
    """A NACA 0012 of unit chord; half of the points near its surface, half in the box around it."""
    vertices, segments = naca0012(n_segments)
    generator = torch.Generator().manual_seed(0)
    near = vertices[torch.randint(n_segments, (n_points // 2,), generator=generator)]
    near = near + 0.02 * torch.randn(near.shape, generator=generator)
    far = torch.rand(n_points - len(near), 2, generator=generator) * torch.tensor([6.0, 3.0])
    angle = math.radians(incidence)
    return Geometry(
        points=torch.cat([near, far - torch.tensor([2.0, 1.5])]),
        meshes={"no_slip": (vertices, segments)},
        lengths={"chord": torch.tensor(1.0), "delta_FS": torch.tensor(math.sqrt(1.56e-5 / 60))},
        conditions={"U_inf / U_inf_magnitude": torch.tensor([math.cos(angle), math.sin(angle)])},
    )


def closed_body(n_faces: int) -> tuple[Tensor, Tensor]:
    """Vertices [m] and ``n_faces`` outward triangles of a rounded box with a cabin, 4.6 x 1.9 x 1.4 m.

    Rings of vertices around the x axis and a pole at each end: r rings of u vertices have 2 r u faces.

    Raises:
        ValueError: ``n_faces`` is odd, or half of it has no two factors of similar size.
    """
    half = n_faces // 2
    n_around = max(u for u in range(1, math.isqrt(half) + 1) if half % u == 0)
    if n_faces % 2 or n_around < 3:
        raise ValueError(f"n_faces: expected twice a product of two similar numbers, found {n_faces}")
    n_rings = half // n_around

    def rounded(x: Tensor) -> Tensor:
        return x.sign() * x.abs() ** 0.7

    along = math.pi * (torch.arange(n_rings, dtype=torch.float64) + 1) / (n_rings + 1)
    around = 2 * math.pi * torch.arange(n_around, dtype=torch.float64) / n_around
    v, u = torch.meshgrid(along, around, indexing="ij")
    x = rounded(-v.cos())
    y, z = (rounded(v.sin()) * rounded(part) for part in (u.cos(), u.sin()))
    body = torch.stack([x, y, z], dim=-1).reshape(-1, 3)
    pole = torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64)
    vertices = torch.cat([-pole, body, pole]) * torch.tensor([2.3, 0.95, 0.5])
    cabin = torch.exp(-((vertices[:, 0] - 0.3) ** 2))
    vertices[:, 2] += torch.where(vertices[:, 2] > 0, 0.8 * vertices[:, 2] * cabin, 0)
    vertices += torch.tensor([1.4, 0.0, 0.7])

    ring = 1 + torch.arange(n_rings * n_around).reshape(n_rings, n_around)
    following = ring.roll(-1, dims=1)
    a, b, c, d = ring[:-1], following[:-1], ring[1:], following[1:]
    last = torch.full_like(ring[0], 1 + n_rings * n_around)
    faces = [
        torch.stack([torch.zeros_like(ring[0]), following[0], ring[0]], dim=-1),
        torch.stack([a, b, c], dim=-1).reshape(-1, 3),
        torch.stack([b, d, c], dim=-1).reshape(-1, 3),
        torch.stack([last, ring[-1], following[-1]], dim=-1),
    ]
    return vertices.float(), torch.cat(faces)


def floor_mesh(x_low: float, x_high: float, z: float, n: int = 19) -> tuple[Tensor, Tensor]:
    """Vertices and upward triangles of a plane, ``n`` x ``n`` x 2 of them, y from -11 to 11 m."""
    x, y = torch.meshgrid(torch.linspace(x_low, x_high, n + 1), torch.linspace(-11, 11, n + 1), indexing="ij")
    ids = torch.arange((n + 1) ** 2).reshape(n + 1, n + 1)
    a, b, c, d = ids[:-1, :-1], ids[1:, :-1], ids[:-1, 1:], ids[1:, 1:]
    faces = torch.cat([torch.stack(corners, dim=-1).reshape(-1, 3) for corners in ((a, b, d), (a, d, c))])
    return torch.stack([x, y, torch.full_like(x, z)], dim=-1).reshape(-1, 3), faces


def naca0012(n_segments: int) -> tuple[Tensor, Tensor]:
    """Vertices and segments of the closed outline, finer at both edges."""
    turn = 2 * math.pi * torch.arange(n_segments, dtype=torch.float64) / n_segments
    x = (1 + turn.cos()) / 2
    thickness = 0.6 * (0.2969 * x.sqrt() + x * (-0.126 + x * (-0.3516 + x * (0.2843 - 0.1036 * x))))
    y = torch.where(turn < math.pi, thickness, -thickness)
    ids = torch.arange(n_segments)
    return torch.stack([x, y], dim=1).float(), torch.stack([ids, ids.roll(-1)], dim=1)
