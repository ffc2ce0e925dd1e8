"""Cases of DrivAerML: reading their files, finding out their conventions, drawing samples.

Nothing here knows Lightning, so that worker processes start quickly.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from datamodules import polygons
from datamodules.csv_io import read_row
from datamodules.dataset import Draws, MeshSource, tensor
from globe_lightning.mesh import BoundaryMesh
from globe_lightning.sample import ForceSurface, Sample

U_INF = 38.889  # speed of the car [m/s]
Q_INF = U_INF**2 / 2  # kinematic dynamic pressure [m^2/s^2]
NU = 1.5e-5  # kinematic viscosity [m^2/s]
REFERENCE_AREA = 2.17  # the constant one [m^2]
MAX_MISFIT = 0.05  # of the integrated drag against the force file's
MAX_INVERTED = 0.01  # fraction of edges at which the winding of two faces disagrees

PRESSURE, SHEAR = "C_p", "C_f"
PRESSURE_ARRAY, KINEMATIC_PRESSURE_ARRAY, SHEAR_ARRAY = "CpMeanTrim", "pMeanTrim", "wallShearStressMeanTrim"
COEFFICIENTS = ("Cd", "Cl", "Clf", "Clr", "Cs")
NO_SLIP_FLOOR, SLIP_FLOOR = (-2.339, 10.0), (-10.0, -2.339)  # x [m]
FLOOR_Y = (-11.0, 11.0)  # [m]


class DrivAerMLSource(MeshSource):
    """Reads DrivAerML cases, derives their nondimensional fields and draws samples.

    Args: as those of :class:`~datamodules.drivaerml.DrivAerMLDataModule`.
    """

    name = "drivaerml"
    derivation_version = 3
    # Of a case of 8.8 million faces.
    preparation_bytes = 3_000_000_000
    cases_per_preparer = 1

    def __init__(
        self,
        root: str | os.PathLike[str],
        targets: str = "vertices",
        n_train_points: int | None = 80_000,
        n_validation_points: int | None = 80_000,
        n_boundary_faces: int | None = 80_000,
        n_floor_cells: int = 19,
        random_face_positions: bool = True,
        orientation: str = "outward",
    ) -> None:
        super().__init__(root)
        self.targets = targets
        self.n_train_points = n_train_points
        self.n_validation_points = n_validation_points
        self.n_boundary_faces = n_boundary_faces
        self.n_floor_cells = n_floor_cells
        self.random_face_positions = random_face_positions
        self.orientation = orientation
        self.speed, self.viscosity = U_INF, NU  # of the dataset; a new shape may have others

    def file(self, case: str, part: str) -> Path:
        """The path of a part: "boundary.vtp", "geo_ref.csv", "force_mom.csv" or "force_mom_constref.csv"."""
        stem, suffix = part.split(".")
        return self.root / case / f"{stem}_{case.removeprefix('run_')}.{suffix}"

    def files(self, case: str) -> list[Path]:
        """Surface, reference lengths, forces, and the forces for the constant area where they are given."""
        files = [self.file(case, part) for part in ("boundary.vtp", "geo_ref.csv", "force_mom.csv")]
        constant = self.file(case, "force_mom_constref.csv")
        return [*files, constant] if constant.is_file() else files

    # Derivation.

    def derive(self, case: str) -> dict[str, np.ndarray]:
        """The surface in compact form, its fields, and what was found out about the case.

        Returns:
            ``points`` (n, 3) [m]; ``starts`` (f+1,) and ``triangles`` (t, 3) as in :mod:`datamodules.polygons`, wound
            so that area vectors point into the fluid; ``cell`` (f, 4) the fields of the faces, columns C_p and the
            components of C_f, and ``point`` (n, 4) their plain means at the points, float32; ``facts``, see
            :meth:`facts`.
            ``C_f`` has the sign of the released data, opposite to the force on the body, whatever the file's.

        Raises:
            FileNotFoundError, ValueError: a file, array or column is missing or wrong, or the fields fit the case's
                forces under no convention; the message says what was found and expected.
        """
        path, geometry_path, force_path, *constant_path = self.files(case)
        geometry = read_row(geometry_path, ("lRef", "aRef"))
        for name in ("lRef", "aRef"):
            if geometry[name.lower()] <= 0:
                raise ValueError(
                    f"{geometry_path}: column {name!r} holds {geometry[name.lower()]}, expected more than 0"
                )
        own_area = geometry["aref"]
        forces = read_row(force_path, ("Cd", "Cl", "Cs"))
        constant = read_row(constant_path[0], ("Cd", "Cl", "Cs")) if constant_path else None
        points, starts, triangles, fields = self._read_surface(path)

        surface = SurfaceIntegrals(points, starts, triangles, fields)
        if surface.area == 0:
            raise ValueError(f"{path}: all faces have an area of zero")
        # A closed body of this area has a volume of 0.03 to 0.1 times its 3/2-th power.
        if abs(surface.volume) < 1e-6 * surface.area**1.5:
            raise ValueError(
                f"{path}: the surface encloses a volume of {surface.volume:.3g} m^3 with {surface.area:.3g} m^2, so "
                f"the orientation of its faces is unknown; expected a closed body with faces oriented alike"
            )
        inverted = polygons.inverted_edges(len(points), starts, triangles)
        if inverted > MAX_INVERTED:
            raise ValueError(
                f"{path}: faces are not oriented alike: at {inverted:.1%} of the edges the two faces run the same way, "
                f"expected at most {MAX_INVERTED:.0%}. Reorient them (all inward or all outward will do)"
            )
        winding = "outward" if surface.volume > 0 else "inward"
        if winding == "inward":
            polygons.reverse_winding(starts, triangles)
        integrals = {sign: surface.forces(winding, sign) for sign in (-1, 1)}
        wanted = [(force_path, own_area, forces)] + ([(constant_path[0], REFERENCE_AREA, constant)] if constant else [])
        shear_sign = _shear_sign(path, {sign: force[0] for sign, force in integrals.items()}, wanted, winding)
        fields[:, 1:] *= -shear_sign

        force = integrals[shear_sign]
        solver = {f"{name}_own": forces[name.lower()] for name in COEFFICIENTS if name.lower() in forces}
        for name in COEFFICIENTS:
            if constant is not None and name.lower() in constant:
                solver[name] = constant[name.lower()]
            elif name.lower() in forces:
                solver[name] = forces[name.lower()] * own_area / REFERENCE_AREA
        facts = {
            "winding": winding,
            "shear_sign": shear_sign,
            "area": surface.area,
            "volume": abs(surface.volume),
            "inverted_edges": inverted,
            "ground": float(points[:, 2].min()),
            "a_ref": own_area,
            "l_ref": geometry["lref"],
            "solver": solver,
            "integrated": dict(zip(("Cd_own", "Cs_own", "Cl_own"), (force / own_area).tolist(), strict=True)),
        }
        return {
            "points": points,
            "starts": starts,
            "triangles": triangles,
            "cell": fields,
            "point": polygons.averages_at_points(len(points), starts, triangles, fields),
            "facts": np.frombuffer(json.dumps(facts).encode(), dtype=np.uint8),
        }

    @staticmethod
    def _read_surface(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Points, ``starts``, ``triangles`` in the file's winding, and (f, 4) C_p and C_f with the file's sign."""
        from datamodules.vtk_io import named_array, polygon_corners, read_mesh

        mesh = read_mesh(path, point_arrays=(), cell_arrays=(PRESSURE_ARRAY, SHEAR_ARRAY))
        offsets, connectivity = polygon_corners(mesh, path)
        fields = np.empty((mesh.n_cells, 4), dtype=np.float32)
        fields[:, 0] = named_array(mesh, PRESSURE_ARRAY, path, "cell", dtype=np.float32)
        fields[:, 1:] = named_array(mesh, SHEAR_ARRAY, path, "cell", 3, dtype=np.float32)
        fields[:, 1:] /= Q_INF
        return np.array(mesh.points, dtype=np.float32), *polygons.fans(offsets, connectivity), fields

    @staticmethod
    def facts(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """What was found out about a case.

        Returns:
            ``winding``: where the file's area vectors point, "inward" or "outward"; ``shear_sign``: -1 if the file's
            shear is opposite to the force on the body, as released, +1 if it is that force; ``area`` of all triangles
            of the fans [m^2]; ``volume`` [m^3]; ``inverted_edges``, a fraction; ``ground``, the lowest z [m];
            ``a_ref`` [m^2] (None if unknown) and ``l_ref`` [m]; ``solver``: coefficients of the case's files for the
            constant area and (``_own``) for ``a_ref``; ``integrated``: those of the cell fields.
        """
        return json.loads(bytes(arrays["facts"]))

    # Samples.

    def sample(self, case: str, index: int, arrays: Mapping[str, np.ndarray], draws: Draws) -> Sample:
        """The sample of a case for one draw; ``DrivAerMLDataModule`` says what it holds."""
        # Plain views of the memory maps: indexing them costs less.
        arrays = {name: np.asarray(array) for name, array in arrays.items()}
        facts = self.facts(arrays)
        kind = "point" if self.targets == "vertices" else "cell"
        n = len(arrays[kind])
        rows = self._rows(n, draws)
        if kind == "point":
            points = arrays["points"] if rows is None else arrays["points"].take(rows, axis=0)
        else:
            points = polygons.drawn_centres(
                arrays["points"], arrays["starts"], arrays["triangles"], np.arange(n) if rows is None else rows
            )
        values = arrays[kind] if rows is None else arrays[kind].take(rows, axis=0)
        fields = {PRESSURE: torch.from_numpy(values[:, 0].copy()), SHEAR: torch.from_numpy(values[:, 1:].copy())}
        length = facts["l_ref"]
        return Sample(
            case=case,
            index=index,
            prediction_points=tensor(points),
            targets=TensorDict(fields, batch_size=[len(points)]),
            boundary_meshes=self._boundaries(arrays, facts, draws),
            reference_lengths={
                "L_ref": torch.tensor(length),
                "delta_turb": torch.tensor(0.37 * length * (self.speed * length / self.viscosity) ** -0.2),
            },
            force_surface=self._force_surface(arrays, facts, points) if rows is None else None,
            point_ids=None if rows is None else tensor(rows),
            scales={
                "U_inf": self.speed,
                "q_inf": self.speed**2 / 2,
                "nu": self.viscosity,
                "shear_sign": float(facts["shear_sign"]),
            },
        )

    def _rows(self, n: int, draws: Draws) -> np.ndarray | None:
        """The rows of the prediction points, or None for all of them."""
        wanted = {"train": self.n_train_points, "val": self.n_validation_points}.get(draws.split)
        return None if wanted is None or wanted >= n else draws.subset("points", n, wanted)

    def _boundaries(
        self, arrays: Mapping[str, np.ndarray], facts: dict[str, Any], draws: Draws
    ) -> dict[str, BoundaryMesh]:
        meshes = {
            "vehicle": self._vehicle(arrays, facts, draws),
            "no_slip_floor": floor(NO_SLIP_FLOOR, FLOOR_Y, facts["ground"], self.n_floor_cells),
            "slip_floor": floor(SLIP_FLOOR, FLOOR_Y, facts["ground"], self.n_floor_cells),
        }
        if draws.split == "train" and self.random_face_positions:
            for kind, mesh in meshes.items():
                meshes[kind] = mesh.with_random_positions(draws.torch(f"face positions of {kind}"))
        return meshes

    def _vehicle(self, arrays: Mapping[str, np.ndarray], facts: dict[str, Any], draws: Draws) -> BoundaryMesh:
        n_triangles = len(arrays["triangles"])
        wanted = n_triangles if self.n_boundary_faces is None else self.n_boundary_faces
        drawn = draws.subset("faces", n_triangles, wanted)
        corners = arrays["triangles"].take(drawn, axis=0)
        inward = self.orientation == "inward" or (self.orientation == "file" and facts["winding"] == "inward")
        if inward:
            corners = corners[:, [0, 2, 1]]
        points = arrays["points"].take(corners, axis=0)
        weights = None
        if len(drawn) < n_triangles:
            area = float(polygons.triangle_areas(points).sum(dtype=np.float64))
            weights = torch.full((len(drawn),), facts["area"] / area if area > 0 else 1.0)
        cells = torch.arange(3 * len(drawn)).reshape(-1, 3)
        return BoundaryMesh(tensor(points).reshape(-1, 3), cells, measure_weights=weights)

    def _force_surface(
        self, arrays: Mapping[str, np.ndarray], facts: dict[str, Any], positions: np.ndarray
    ) -> ForceSurface:
        """Of all cells, each with its own value; or of all points, each with its share of the cells around it.

        The mean over a cell's corners times its area, summed over the cells, is the value at a point times its
        shares, summed over the points.
        """
        points, starts, triangles = arrays["points"], arrays["starts"], arrays["triangles"]
        vectors = np.empty((len(starts) - 1, 3), dtype=np.float32)
        for rows, corners in _corner_blocks(points, starts, triangles):
            vectors[rows] = polygons.centres_and_area_vectors(corners)[1]
        areas = np.linalg.norm(vectors, axis=1)
        used = np.arange(len(vectors))
        if self.targets == "vertices":
            sizes = np.diff(starts) + 2
            shares = [column / sizes for column in (*vectors.T, areas)]
            totals = polygons.sums_at_points(len(points), starts, triangles, [None, *shares])
            sums = [total.astype(np.float32) for total in totals]
            used = np.flatnonzero(sums[0])
            vectors, areas = np.stack(sums[1:4], axis=1)[used], sums[4][used]
        length = facts["l_ref"]
        arm = positions[used] - np.array([length / 2, 0, facts["ground"]], dtype=np.float32)
        zero = np.zeros(len(arm), dtype=np.float32)
        return ForceSurface(
            point_indices=tensor(used[:, None]),
            area_vectors=tensor(vectors),
            areas=tensor(areas),
            directions={
                "Cd": torch.tensor([1.0, 0.0, 0.0]),
                "Cl": torch.tensor([0.0, 0.0, 1.0]),
                "Cs": torch.tensor([0.0, 1.0, 0.0]),
                # Half the lift plus and minus the pitching moment about the wheelbase's middle on the ground, over it.
                "Clf": tensor(np.stack([arm[:, 2] / length, zero, 0.5 - arm[:, 0] / length], axis=1)),
                "Clr": tensor(np.stack([-arm[:, 2] / length, zero, 0.5 + arm[:, 0] / length], axis=1)),
            },
            reference_areas={"": REFERENCE_AREA} | ({"_own": facts["a_ref"]} if facts["a_ref"] else {}),
            pressure_field=PRESSURE,
            shear_field=SHEAR,
            shear_sign=-1.0,
            solver_coefficients=dict(facts["solver"]),
        )


class SurfaceIntegrals:
    """Sums over a surface in the file's winding: ``area`` [m^2], ``volume`` [m^3], pressure and shear [m^2].

    Args:
        points: (n, 3) [m].
        starts: (f+1,) and
        triangles: (t, 3), as in :mod:`datamodules.polygons`.
        fields: C_p and C_f of the polygons, (f, 4); None leaves pressure and shear at zero.
    """

    def __init__(
        self, points: np.ndarray, starts: np.ndarray, triangles: np.ndarray, fields: np.ndarray | None = None
    ) -> None:
        self.area = self.volume = 0.0
        self.pressure, self.shear = np.zeros(3), np.zeros(3)
        # Seen from its lowest plane, holes in that plane (where wheels meet the ground) add no volume.
        low, high = points.min(axis=0).astype(np.float64), points.max(axis=0).astype(np.float64)
        origin = np.array([(low[0] + high[0]) / 2, (low[1] + high[1]) / 2, low[2]])
        for rows, corners in _corner_blocks(points, starts, triangles):
            centres, vectors = polygons.centres_and_area_vectors(corners)
            self.area += polygons.fan_area(corners)
            self.volume += float(((centres - origin) * vectors).sum()) / 3
            if fields is None:
                continue
            values = fields[rows].astype(np.float64)
            self.pressure += values[:, 0] @ vectors
            self.shear += np.linalg.norm(vectors, axis=1) @ values[:, 1:]

    def forces(self, winding: str, shear_sign: int) -> np.ndarray:
        """Force over dynamic pressure, (3,) [m^2]."""
        return -self.pressure * (1 if winding == "outward" else -1) + shear_sign * self.shear


def _corner_blocks(
    points: np.ndarray, starts: np.ndarray, triangles: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """All polygons in groups of equal size k: rows (m,) and corners (m, k, 3) float64 [m]."""
    for rows, corners in polygons.polygons(starts, triangles):
        yield rows, points[corners].astype(np.float64)


def _shear_sign(
    path: Path, drag: Mapping[int, float], wanted: list[tuple[Path, float, dict[str, float]]], winding: str
) -> int:
    """The sign under which drag [m^2] fits the case's own coefficient.

    Args:
        path: the surface's file.
        drag: {sign: drag over dynamic pressure [m^2]}.
        wanted: per force file its path, reference area [m^2] and coefficients.
        winding: where the faces' area vectors point.

    Raises:
        ValueError: neither fits, or one that fits the first file doesn't fit another.
    """

    def misfit(sign: int, area: float, truth: float) -> float:
        return abs(drag[sign] / area - truth) / max(abs(truth), 1e-9)

    _, own_area, own = wanted[0]
    misfits = {sign: misfit(sign, own_area, own["cd"]) for sign in (-1, 1)}
    # Without friction to speak of both fit: take that of the released data.
    sign = 1 if misfits[1] < misfits[-1] - 1e-4 else -1
    for force_path, area, truth in wanted:
        if misfit(sign, area, truth["cd"]) > MAX_MISFIT:
            raise ValueError(
                f"{path}: with the reference area of {area:g} m^2 the fields integrate to Cd = {drag[-1] / area:.6f} "
                f"if the shear is opposite to the force on the body (as in the released data), or to "
                f"{drag[1] / area:.6f} if it is that force, but {force_path} says Cd = {truth['cd']:.6f}; expected one "
                f"of them within {MAX_MISFIT:.0%}. (By the sign of the enclosed volume the faces point {winding}.) The "
                f"files belong to different runs, or some faces are inverted"
            )
    return sign


def floor(x: tuple[float, float], y: tuple[float, float], z: float, n: int) -> BoundaryMesh:
    """A horizontal rectangle of n x n x 2 triangles whose normals point up.

    Args:
        x: extent [m].
        y: extent [m].
        z: height [m].
        n: cells in each direction.
    """
    xs, ys = torch.linspace(*x, n + 1), torch.linspace(*y, n + 1)
    grid = torch.cartesian_prod(xs, ys)
    points = torch.cat([grid, torch.full((len(grid), 1), float(z))], dim=1)
    corner = (torch.arange(n).unsqueeze(1) * (n + 1) + torch.arange(n)).reshape(-1)
    right, up, across = corner + n + 1, corner + 1, corner + n + 2
    cells = torch.cat([torch.stack([corner, right, across], dim=1), torch.stack([corner, across, up], dim=1)])
    return BoundaryMesh(points, cells)
