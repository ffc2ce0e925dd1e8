"""Small cases in the AirFRANS layout whose wall shear is known: a ring of quads around a circle."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyvista as pv

RADIUS = 0.5
SHEAR_RATE = 1000.0  # du/dn at the wall [1/s]
SPEED = 50.0

MANIFEST_LISTS = (
    "full_train",
    "full_test",
    "scarce_train",
    "reynolds_train",
    "reynolds_test",
    "aoa_train",
    "aoa_test",
)


def ring(n_around: int = 24, n_out: int = 6, thickness: float = 1.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Points (n, 3), quads (m, 4) and the angle of each point; the first ``n_around`` points are the wall."""
    angles = np.arange(n_around) * 2 * np.pi / n_around
    radii = RADIUS + thickness * np.linspace(0, 1, n_out) ** 2
    radius, angle = (grid.ravel() for grid in np.meshgrid(radii, angles, indexing="ij"))
    points = np.stack([radius * np.cos(angle), radius * np.sin(angle), np.full(len(radius), 0.5)], axis=1)
    layer, around = (grid.ravel() for grid in np.meshgrid(np.arange(n_out - 1), np.arange(n_around), indexing="ij"))
    after = (around + 1) % n_around
    low, high = layer * n_around, (layer + 1) * n_around
    return points, np.stack([low + around, low + after, high + after, high + around], axis=1), angle


def write_case(
    root: Path, case: str, incidence: float = 0.1, clockwise: bool = True, n_around: int = 24, n_out: int = 6
) -> None:
    """One case: a shear layer that turns around the circle, ``u = SHEAR_RATE (r - RADIUS)`` along the tangent
    up to the first points off the wall, constant beyond."""
    points, quads, angle = ring(n_around, n_out)
    n = len(points)
    folder = root / case
    folder.mkdir(parents=True)
    distance = np.maximum(np.hypot(points[:, 0], points[:, 1]) - RADIUS, 0.0)
    distance[:n_around] = 0
    tangent = np.stack([-np.sin(angle), np.cos(angle), np.zeros(n)], axis=1)
    generator = np.random.default_rng(abs(hash(incidence)) % 1000)

    mesh = pv.UnstructuredGrid({pv.CellType.QUAD: quads}, points.astype(np.float32))
    mesh.point_data["U"] = (SHEAR_RATE * np.minimum(distance, 0.04)[:, None] * tangent).astype(np.float32)
    mesh.point_data["p"] = (SPEED**2 / 2 * (0.7 * np.cos(angle) - 0.45)).astype(np.float32)
    mesh.point_data["nut"] = generator.uniform(0, 1e-3, n).astype(np.float32)
    mesh.point_data["implicit_distance"] = -distance.astype(np.float32)
    mesh.save(str(folder / f"{case}_internal.vtu"))

    # The airfoil numbers its points differently from the internal mesh.
    order = np.roll(np.arange(n_around), 5)
    place = np.argsort(order)
    ends = np.stack([np.arange(n_around), (np.arange(n_around) + 1) % n_around], axis=1)
    ends = place[ends[:, ::-1] if clockwise else ends]
    lines = np.column_stack([np.full(n_around, 2), ends])
    pv.PolyData(mesh.points[order], lines=lines.ravel()).save(str(folder / f"{case}_aerofoil.vtp"))

    far = pv.PolyData(100 * points[:n_around], lines=np.column_stack([np.full(n_around, 2), ends]).ravel())
    far.cell_data["U"] = SPEED * np.tile([np.cos(incidence), np.sin(incidence), 0.0], (n_around, 1))
    far.save(str(folder / f"{case}_freestream.vtp"))


def write_dataset(root: Path, n_train: int = 5, n_test: int = 2, **options: int) -> list[str]:
    """A whole dataset with a manifest; returns its cases, train first."""
    cases = [f"airFoil2D_SST_50.0_{number}.5_0.0_0.0_12.0" for number in range(n_train + n_test)]
    for number, case in enumerate(cases):
        write_case(root, case, incidence=0.05 * number, **options)
    lists = {name: cases[:n_train] if name.endswith("train") else cases[n_train:] for name in MANIFEST_LISTS}
    lists["scarce_train"] = cases[:3]
    (root / "manifest.json").write_text(json.dumps(lists))
    return cases
