"""Cases in the DrivAerML layout whose forces are known exactly: ellipsoids with analytic C_p and shear.

With C_p = c0 + g . (x - x0) the pressure force over q is -V g, and with a shear of k n . (x - x0) e, e along the car,
the friction force is 3 k V e, V the volume; both act at the centre x0.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyvista as pv

U_INF = 38.889
Q_INF = U_INF**2 / 2
CENTRE = np.array([1.4, 0.0, 0.5])
GRADIENT = np.array([-0.12, 0.0, 0.05])  # of C_p [1/m]
FRICTION = 0.004  # k [1/m]
CONSTANT_AREA = 2.17


def semi_axes(run: int) -> np.ndarray:
    """Half length, width and height [m] of a run's body."""
    return np.array([2.2, 0.9, 0.7]) * (1 + 0.03 * np.sin(run * np.array([1.0, 2.0, 3.0])))


def ellipsoid(axes: np.ndarray, n_along: int, n_around: int, caps: str) -> tuple[np.ndarray, list[np.ndarray]]:
    """Rings of quads around x, closed by fans of triangles or by one polygon at either end; area vectors outward.

    Returns:
        points (n, 3) about the centre, and groups of faces (m, corners).
    """
    angle = np.linspace(0, np.pi, n_along + 1)[1:-1]
    around = np.arange(n_around) * 2 * np.pi / n_around
    unit = np.empty((len(angle), n_around, 3))
    unit[..., 0] = -np.cos(angle)[:, None]
    unit[..., 1] = np.sin(angle)[:, None] * np.cos(around)
    unit[..., 2] = np.sin(angle)[:, None] * np.sin(around)
    points = unit.reshape(-1, 3) * axes
    ring = np.arange(n_around)
    after = (ring + 1) % n_around
    low = np.arange(len(angle) - 1)[:, None] * n_around
    quads = np.stack(np.broadcast_arrays(low + ring, low + after, low + n_around + after, low + n_around + ring), -1)
    quads = quads.reshape(-1, 4)
    last = (len(angle) - 1) * n_around
    if caps == "polygons":
        return points, [quads, np.stack([ring[::-1], last + ring])]
    n = len(points)
    points = np.concatenate([points, [[-axes[0], 0, 0], [axes[0], 0, 0]]])
    front = np.stack([np.full(n_around, n), after, ring], axis=1)
    back = np.stack([np.full(n_around, n + 1), last + ring, last + after], axis=1)
    return points, [quads, front, back]


def exact_forces(run: int, wheelbase: float, area: float) -> dict[str, float]:
    """The coefficients of a run's body for a reference area [m^2]."""
    axes = semi_axes(run)
    volume = 4 / 3 * np.pi * axes.prod()
    drag, _, lift = volume * (-GRADIENT + np.array([3 * FRICTION, 0, 0])) / area
    # The ground touches the body's lowest point.
    pitch = (axes[2] * drag - (CENTRE[0] - wheelbase / 2) * lift) / wheelbase
    return {"Cd": drag, "Cl": lift, "Clf": lift / 2 + pitch, "Clr": lift / 2 - pitch, "Cs": 0.0}


def body(
    run: int, n_along: int = 24, n_around: int = 24, winding: str = "inward", shear_sign: int = -1, caps: str = "fans"
) -> pv.PolyData:
    """A run's surface with the released data's cell arrays.

    Args:
        run: varies the proportions.
        n_along: rings of faces from nose to tail.
        n_around: faces in a ring.
        winding: where area vectors point.
        shear_sign: +1 stores the shear as the force on the body, -1 its opposite.
        caps: "fans" of triangles or single "polygons" at nose and tail.
    """
    axes = semi_axes(run)
    points, groups = ellipsoid(axes, n_along, n_around, caps)
    centres = np.concatenate([points[faces].mean(axis=1) for faces in groups])
    normals = centres / axes**2
    normals /= np.linalg.norm(normals, axis=1, keepdims=True)
    pressure = 0.1 + centres @ GRADIENT
    shear = np.zeros_like(centres)
    shear[:, 0] = shear_sign * Q_INF * FRICTION * (normals * centres).sum(axis=1)
    connectivity = np.concatenate([(faces[:, ::-1] if winding == "inward" else faces).ravel() for faces in groups])
    sizes = np.concatenate([np.full(len(faces), faces.shape[1]) for faces in groups])
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    mesh = pv.PolyData()
    mesh.points = (points + CENTRE).astype(np.float32)
    cells = pv.CellArray()
    cells.SetData(pv.convert_array(offsets.astype(np.int64)), pv.convert_array(connectivity.astype(np.int64)))
    mesh.SetPolys(cells)
    mesh.cell_data["CpMeanTrim"] = pressure.astype(np.float32)
    mesh.cell_data["pMeanTrim"] = (Q_INF * pressure).astype(np.float32)
    mesh.cell_data["pPrime2MeanTrim"] = np.ones(len(sizes), dtype=np.float32)
    mesh.cell_data["wallShearStressMeanTrim"] = shear.astype(np.float32)
    return mesh


def write_case(root: Path, run: int, blanks: bool = False, constant: bool = True, **options: int | str) -> Path:
    """One case; returns its folder.

    Args:
        root: the dataset's folder.
        run: the run's number.
        blanks: write CSV headers in capitals with blanks around them.
        constant: write the forces for the constant area too.
        options: those of :func:`body`.
    """
    folder = Path(root) / f"run_{run}"
    folder.mkdir(parents=True, exist_ok=True)
    body(run, **options).save(str(folder / f"boundary_{run}.vtp"))
    axes = semi_axes(run)
    area, wheelbase = float(np.pi * axes[1] * axes[2]), 2.7 + 0.01 * run

    def write(name: str, row: dict[str, float]) -> None:
        header = [f" {key.upper()} " if blanks else key for key in row]
        values = [f"{value:.12g}" for value in row.values()]
        (folder / f"{name}_{run}.csv").write_text(",".join(header) + "\n" + ", ".join(values) + "\n")

    write("geo_ref", {"aRef": area, "lRef": wheelbase, "aRefRef": CONSTANT_AREA, "lRefRef": 2.786})
    write("force_mom", exact_forces(run, wheelbase, area))
    if constant:
        write("force_mom_constref", exact_forces(run, wheelbase, CONSTANT_AREA))
    return folder


def write_dataset(root: Path, n_train: int = 3, n_test: int = 1, **options: int | str) -> Path:
    """A dataset with ``split.json``; returns the path of that file."""
    runs = list(range(1, n_train + n_test + 1))
    for run in runs:
        write_case(root, run, **options)
    path = Path(root) / "split.json"
    path.write_text(json.dumps({"train": runs[:n_train], "test": runs[n_train:]}))
    return path
