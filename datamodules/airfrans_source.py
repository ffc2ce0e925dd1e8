"""Cases of AirFRANS: reading their files, deriving nondimensional fields, drawing samples.

Nothing here knows Lightning, so that worker processes start quickly.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from datamodules.dataset import Draws, MeshSource, tensor
from globe_lightning.mesh import BoundaryMesh
from globe_lightning.sample import ForceSurface, Sample

NU = 1.56e-5  # kinematic viscosity of the simulations [m^2/s]
CHORD = 1.0  # [m]
MAX_TOTAL_PRESSURE = 1.02  # above it C_pt is unphysical

VELOCITY, PRESSURE, TOTAL_PRESSURE = "ΔU/|U_inf|", "C_p", "C_pt"
VISCOSITY, SHEAR = "ln(1+nut/nu)", "C_F,shear"
FREESTREAM = "U_inf / U_inf_magnitude"


def corner_gradients(points: np.ndarray, cells: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Gradients of a nodal vector field at the corners of polygons, averaged over the polygons that share a corner.

    In a bilinear quad and in a triangle the gradient at a corner follows from the two edges that meet there. At a
    wall, where the field is zero, that is the one-sided difference between the wall and the first points off it.

    Args:
        points: (n, 2) [m].
        cells: corner indices in order around each polygon, (m, k).
        values: (n, 2).

    Returns:
        (n, 2, 2) gradients d value_i / d x_j at [:, i, j], NaN where no polygon contributes, and the number of
        contributions (n,).
    """
    total = np.zeros((len(points), 2, 2))
    count = np.zeros(len(points))
    for corner in range(cells.shape[1]):
        here = cells[:, corner]
        ends = (np.roll(cells, -1, axis=1)[:, corner], np.roll(cells, 1, axis=1)[:, corner])
        edges = np.stack([points[end] - points[here] for end in ends], axis=1)
        changes = np.stack([values[end] - values[here] for end in ends], axis=1)
        determinant = edges[:, 0, 0] * edges[:, 1, 1] - edges[:, 0, 1] * edges[:, 1, 0]
        good = determinant != 0
        gradient = np.linalg.solve(edges[good], changes[good]).transpose(0, 2, 1)
        np.add.at(total, here[good], gradient)
        np.add.at(count, here[good], 1)
    with np.errstate(invalid="ignore"):
        return total / np.where(count > 0, count, np.nan)[:, None, None], count


class AirFRANSSource(MeshSource):
    """Reads AirFRANS cases, derives their nondimensional fields and draws samples.

    Args: as those of :class:`~datamodules.airfrans.AirFRANSDataModule`.
    """

    name = "airfrans"
    derivation_version = 1

    def __init__(
        self,
        root: str | os.PathLike[str],
        n_train_points: int | None = 2048,
        n_train_wall_points: int = 0,
        n_validation_points: int | None = None,
        n_boundary_faces: int | None = None,
        random_face_positions: bool = True,
        orientation: str = "outward",
        force_normals: str = "vertex",
    ) -> None:
        super().__init__(root)
        self.n_train_points = n_train_points
        self.n_train_wall_points = n_train_wall_points
        self.n_validation_points = n_validation_points
        self.n_boundary_faces = n_boundary_faces
        self.random_face_positions = random_face_positions
        self.orientation = orientation
        self.force_normals = force_normals

    def file(self, case: str, part: str) -> Path:
        """The path of a part: "internal.vtu", "aerofoil.vtp" or "freestream.vtp"."""
        return self.root / case / f"{case}_{part}"

    def files(self, case: str) -> list[Path]:
        """Internal mesh, airfoil, freestream."""
        return [self.file(case, part) for part in ("internal.vtu", "aerofoil.vtp", "freestream.vtp")]

    # Derivation.

    def derive(self, case: str) -> dict[str, np.ndarray]:
        """Nondimensional fields at the internal mesh's n points, and its s wall segments.

        Returns:
            ``points`` (n, 2) [m]; the fields ``ΔU/|U_inf|`` (n, 2), ``C_p``, ``C_pt``, ``ln(1+nut/nu)`` (n,), NaN
            where C_pt > 1.02; ``wall_ids`` (w,) rows of the points on the wall and ``wall_shear`` (w, 2), their
            C_F,shear; ``segments`` (s, 2) rows of each segment's ends in the file's winding; ``segment_outward`` (s,)
            whether (-e_y, e_x) of that winding points into the fluid; ``segment_areas`` and ``segment_areas_vertex``
            (s, 2) [m] area vectors into the fluid, exact and from averaged vertex normals; ``U_inf`` (2,) [m/s].

        Raises:
            FileNotFoundError, ValueError: a file or an array is missing or wrong; the message names it.
        """
        from datamodules.vtk_io import named_array, read_mesh

        path, wall_path, far_path = self.files(case)
        far = read_mesh(far_path, point_arrays=(), cell_arrays=("U",))
        freestream = named_array(far, "U", far_path, "cell", 3)[:, :2].mean(axis=0)
        speed = float(np.linalg.norm(freestream))
        if speed == 0:
            raise ValueError(f"{far_path}: cell array 'U' has a mean of zero, expected the freestream velocity [m/s]")
        dynamic_pressure = speed**2 / 2

        mesh = read_mesh(path, point_arrays=("U", "p", "nut", "implicit_distance"), cell_arrays=())
        points = np.asarray(mesh.points)[:, :2].astype(np.float64)
        velocity = named_array(mesh, "U", path, "point", 3)[:, :2]
        pressure = named_array(mesh, "p", path) / dynamic_pressure
        viscosity = named_array(mesh, "nut", path)
        if (viscosity < 0).any():
            raise ValueError(
                f"{path}: point array 'nut' is negative in {(viscosity < 0).sum()} rows, expected 0 or more [m^2/s]"
            )
        wall_ids = np.flatnonzero(named_array(mesh, "implicit_distance", path) == 0)
        if len(wall_ids) == 0:
            raise ValueError(f"{path}: point array 'implicit_distance' is 0 nowhere, expected 0 on the airfoil")

        segments = self._segments(read_mesh(wall_path, (), ()), wall_path, mesh.points, wall_ids, path)
        polygons = wall_polygons(mesh, wall_ids, path)
        outward = segment_orientation(points, segments, polygons, wall_path)
        areas = segment_areas(points, segments, outward)
        normals = vertex_normals(len(points), segments, areas)

        gradient = np.full((len(points), 2, 2), 0.0)
        weight = np.zeros(len(points))
        for cells in polygons:
            mean, count = corner_gradients(points, cells, velocity)
            touched = count > 0
            gradient[touched] += mean[touched] * count[touched, None, None]
            weight += count
        if (weight[wall_ids] == 0).any():
            raise ValueError(f"{path}: {int((weight[wall_ids] == 0).sum())} wall points belong to no cell with an area")
        gradient = gradient[wall_ids] / weight[wall_ids, None, None]
        strain_rate = (gradient + gradient.transpose(0, 2, 1)) / 2
        shear = 2 * NU * np.einsum("wij,wj->wi", strain_rate, normals[wall_ids]) / dynamic_pressure

        total_pressure = pressure + (velocity**2).sum(axis=1) / speed**2
        unphysical = total_pressure > MAX_TOTAL_PRESSURE
        fields = {
            VELOCITY: (velocity - freestream) / speed,
            PRESSURE: pressure,
            TOTAL_PRESSURE: total_pressure,
            VISCOSITY: np.log1p(viscosity / NU),
        }
        for value in fields.values():
            value[unphysical] = np.nan
        shear[unphysical[wall_ids]] = np.nan

        lengths = np.linalg.norm(areas, axis=1)
        return {
            "points": np.asarray(mesh.points)[:, :2].astype(np.float32),
            **{name: value.astype(np.float32) for name, value in fields.items()},
            "wall_ids": wall_ids.astype(np.int64),
            "wall_shear": shear.astype(np.float32),
            "segments": segments,
            "segment_outward": outward,
            "segment_areas": areas,
            "segment_areas_vertex": normals[segments].mean(axis=1) * lengths[:, None],
            "U_inf": freestream,
        }

    @staticmethod
    def _segments(wall: Any, wall_path: Path, points: np.ndarray, wall_ids: np.ndarray, path: Path) -> np.ndarray:
        """The airfoil's segments as rows of the internal mesh's points, (s, 2), in the file's winding."""
        lines = np.asarray(wall.lines)
        if len(lines) != 3 * wall.n_cells or (lines.reshape(-1, 3)[:, 0] != 2).any():
            raise ValueError(f"{wall_path}: expected {wall.n_cells} cells that are segments of two points each")
        # The two files number the points differently; the coordinates are bit-equal.
        rows = {
            tuple(xy): int(row) for row, xy in zip(wall_ids[::-1], points[wall_ids[::-1], :2].tolist(), strict=True)
        }
        found = np.array([rows.get(tuple(xy), -1) for xy in np.asarray(wall.points)[:, :2].tolist()])
        if (found < 0).any():
            raise ValueError(
                f"{wall_path}: {int((found < 0).sum())} of {len(found)} points are not among the points of {path.name} "
                f"with implicit_distance 0; expected equal coordinates"
            )
        segments = found[lines.reshape(-1, 3)[:, 1:]].astype(np.int64)
        bare = np.setdiff1d(wall_ids, segments)
        if len(bare):
            raise ValueError(
                f"{path}: {len(bare)} of {len(wall_ids)} wall points belong to no segment of {wall_path.name}"
            )
        return segments[segments[:, 0] != segments[:, 1]]

    # Samples.

    def sample(self, case: str, index: int, arrays: Mapping[str, np.ndarray], draws: Draws) -> Sample:
        """The sample of a case for one draw; ``AirFRANSDataModule`` says which points it holds."""
        n = len(arrays["points"])
        wall_ids = np.asarray(arrays["wall_ids"])
        rows = self._rows(n, wall_ids, draws)

        fields = {name: tensor(arrays[name][rows]) for name in (VELOCITY, PRESSURE, TOTAL_PRESSURE, VISCOSITY)}
        shear = np.full((n, 2), np.nan, dtype=np.float32)
        shear[wall_ids] = arrays["wall_shear"]
        fields[SHEAR] = tensor(shear[rows])

        freestream = np.asarray(arrays["U_inf"])
        speed = float(np.linalg.norm(freestream))
        direction = freestream / speed
        return Sample(
            case=case,
            index=index,
            prediction_points=tensor(arrays["points"][rows]),
            targets=TensorDict(fields, batch_size=[len(rows)]),
            boundary_meshes={"no_slip": self._boundary(arrays, wall_ids, draws)},
            reference_lengths={
                "chord": torch.tensor(CHORD),
                "delta_FS": torch.tensor(float(np.sqrt(NU * CHORD / speed))),
            },
            global_data=TensorDict({FREESTREAM: tensor(direction.astype(np.float32))}, batch_size=[]),
            force_surface=None if draws.split == "train" else self._force_surface(arrays, n, rows, direction),
            point_ids=tensor(rows),
            scales={"U_inf": speed, "q_inf": speed**2 / 2, "nu": NU, "chord": CHORD},
        )

    def _rows(self, n: int, wall_ids: np.ndarray, draws: Draws) -> np.ndarray:
        if draws.split == "train":
            if self.n_train_points is None:
                return np.arange(n)
            n_wall = min(self.n_train_wall_points, len(wall_ids))
            if n_wall == 0:
                return draws.subset("points", n, self.n_train_points)
            wall = wall_ids[draws.subset("wall points", len(wall_ids), n_wall)]
            rest = np.setdiff1d(np.arange(n), wall, assume_unique=True)
            rest = rest[draws.subset("points", len(rest), self.n_train_points - n_wall)]
            return np.sort(np.concatenate([wall, rest]))
        if draws.split == "val" and self.n_validation_points is not None:
            rest = np.setdiff1d(np.arange(n), wall_ids, assume_unique=True)
            rest = rest[draws.subset("points", len(rest), max(0, self.n_validation_points - len(wall_ids)))]
            return np.sort(np.concatenate([wall_ids, rest]))
        return np.arange(n)

    def _boundary(self, arrays: Mapping[str, np.ndarray], wall_ids: np.ndarray, draws: Draws) -> BoundaryMesh:
        segments = np.asarray(arrays["segments"])
        if self.orientation != "file":
            keep = np.asarray(arrays["segment_outward"]) == (self.orientation == "outward")
            segments = np.where(keep[:, None], segments, segments[:, ::-1])
        cells = np.searchsorted(wall_ids, segments)
        weights = None
        if self.n_boundary_faces is not None and self.n_boundary_faces < len(cells):
            lengths = np.linalg.norm(arrays["segment_areas"], axis=1)
            chosen = draws.subset("faces", len(cells), self.n_boundary_faces)
            cells = cells[chosen]
            factor = lengths.sum() / lengths[chosen].sum()
            weights = torch.full((len(chosen),), float(factor))
        mesh = BoundaryMesh(tensor(arrays["points"][wall_ids]), tensor(cells), measure_weights=weights)
        if draws.split == "train" and self.random_face_positions:
            mesh = mesh.with_random_positions(draws.torch("face positions"))
        return mesh

    def _force_surface(
        self, arrays: Mapping[str, np.ndarray], n: int, rows: np.ndarray, direction: np.ndarray
    ) -> ForceSurface:
        place = np.full(n, -1, dtype=np.int64)
        place[rows] = np.arange(len(rows))
        areas = arrays["segment_areas_vertex" if self.force_normals == "vertex" else "segment_areas"]
        return ForceSurface(
            point_indices=tensor(place[arrays["segments"]]),
            area_vectors=tensor(np.asarray(areas, dtype=np.float32)),
            directions={
                "Cd": tensor(direction.astype(np.float32)),
                "Cl": tensor(np.array([-direction[1], direction[0]], dtype=np.float32)),
            },
            reference_areas={"": CHORD},
            pressure_field=PRESSURE,
            shear_field=SHEAR,
            shear_sign=1.0,
            vertex_normals=self.force_normals == "vertex",
        )


def wall_polygons(mesh: Any, wall_ids: np.ndarray, path: Path) -> list[np.ndarray]:
    """The cells that touch the wall, corner indices in order, one array (m, k) per number of corners k.

    Raises:
        ValueError: the mesh has no two-dimensional cell at the wall.
    """
    import pyvista as pv

    # The attribute's name differs between pyvista versions.
    offsets = pv.convert_array(mesh.GetCells().GetOffsetsArray())
    connectivity = np.asarray(mesh.cell_connectivity)
    sizes = np.diff(offsets)
    on_wall = np.zeros(mesh.n_points, dtype=bool)
    on_wall[wall_ids] = True
    groups = []
    for size in np.unique(sizes[sizes >= 3]):
        starts = offsets[:-1][sizes == size]
        cells = connectivity[starts[:, None] + np.arange(size)]
        cells = cells[on_wall[cells].any(axis=1)]
        if len(cells):
            groups.append(cells.astype(np.int64))
    if not groups:
        raise ValueError(f"{path}: no cell touches the wall, expected quads or triangles there")
    return groups


def segment_orientation(
    points: np.ndarray, segments: np.ndarray, polygons: list[np.ndarray], wall_path: Path
) -> np.ndarray:
    """Whether (-e_y, e_x) of each segment points into the fluid: to the side of the cell it is an edge of, (s,).

    Raises:
        ValueError: a segment is an edge of no cell.
    """
    n = len(points)

    def keys(edges: np.ndarray) -> np.ndarray:
        return edges.min(axis=1) * n + edges.max(axis=1)

    edge_keys, centres = [], []
    for cells in polygons:
        for corner in range(cells.shape[1]):
            edge_keys.append(keys(np.stack([cells[:, corner], np.roll(cells, -1, axis=1)[:, corner]], axis=1)))
            centres.append(points[cells].mean(axis=1))
    known, centre = np.concatenate(edge_keys), np.concatenate(centres)
    order = np.argsort(known, kind="stable")
    known, centre = known[order], centre[order]
    wanted = keys(segments)
    found = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    lost = known[found] != wanted
    if lost.any():
        raise ValueError(
            f"{wall_path}: {int(lost.sum())} of {len(segments)} segments are edges of no cell of the internal mesh, so "
            f"the side of the fluid is unknown"
        )
    start = points[segments[:, 0]]
    edge = points[segments[:, 1]] - start
    to_fluid = centre[found] - start
    return edge[:, 0] * to_fluid[:, 1] - edge[:, 1] * to_fluid[:, 0] > 0


def segment_areas(points: np.ndarray, segments: np.ndarray, outward: np.ndarray) -> np.ndarray:
    """Area vectors of segments into the fluid, (s, 2) [m]; ``outward`` says where (-e_y, e_x) points already."""
    edges = points[segments[:, 1]] - points[segments[:, 0]]
    return np.stack([-edges[:, 1], edges[:, 0]], axis=1) * np.where(outward, 1.0, -1.0)[:, None]


def vertex_normals(n: int, segments: np.ndarray, areas: np.ndarray) -> np.ndarray:
    """Unit normals at the points, means of the unit normals of the segments that meet there; (n, 2), 0 elsewhere."""
    lengths = np.linalg.norm(areas, axis=1, keepdims=True)
    units = areas / np.where(lengths > 0, lengths, 1.0)
    total = np.zeros((n, 2))
    np.add.at(total, segments[:, 0], units)
    np.add.at(total, segments[:, 1], units)
    size = np.linalg.norm(total, axis=1, keepdims=True)
    return total / np.where(size > 0, size, 1.0)
