"""AirFRANS: two-dimensional RANS flow over airfoils (Bonnet et al., arXiv:2212.07564).

Layout: ``<root>/manifest.json`` with the lists ``full_train``, ``full_test``, ``scarce_train``, ``reynolds_train``,
``reynolds_test``, ``aoa_train``, ``aoa_test``, and per case ``<root>/<case>/<case>_internal.vtu``,
``_aerofoil.vtp`` and ``_freestream.vtp``. Pressure is kinematic, p/rho [m^2/s^2].
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from datamodules.base import Draws, MeshDataModule, MeshSource
from globe_lightning.mesh import BoundaryMesh
from globe_lightning.sample import ForceSurface, Sample, SampleSchema

if TYPE_CHECKING:
    import pyvista as pv

NU = 1.56e-5  # kinematic viscosity of the simulations [m^2/s]
CHORD = 1.0  # [m]
MAX_TOTAL_PRESSURE = 1.02  # above it C_pt is unphysical

TASKS = ("full", "scarce", "reynolds", "aoa")
ENVIRONMENT_VARIABLE = "AIRFRANS_DATA_DIR"
SAMPLES = Path(__file__).parent / "samples" / "airfoils"

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

    Args: as those of :class:`AirFRANSDataModule`.
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
        edges = points[segments[:, 1]] - points[segments[:, 0]]
        areas = np.stack([-edges[:, 1], edges[:, 0]], axis=1) * np.where(outward, 1.0, -1.0)[:, None]
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
        """The sample of a case for one draw; see :class:`AirFRANSDataModule` for which points it holds."""
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
        )


def tensor(array: np.ndarray) -> Tensor:
    """A torch copy of an array that may be a read-only memory map."""
    return torch.from_numpy(np.array(array))


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


def vertex_normals(n: int, segments: np.ndarray, areas: np.ndarray) -> np.ndarray:
    """Unit normals at the points, means of the unit normals of the segments that meet there; (n, 2), 0 elsewhere."""
    lengths = np.linalg.norm(areas, axis=1, keepdims=True)
    units = areas / np.where(lengths > 0, lengths, 1.0)
    total = np.zeros((n, 2))
    np.add.at(total, segments[:, 0], units)
    np.add.at(total, segments[:, 1], units)
    size = np.linalg.norm(total, axis=1, keepdims=True)
    return total / np.where(size > 0, size, 1.0)


class AirFRANSDataModule(MeshDataModule):
    """AirFRANS cases as samples, one case a step.

    Targets: ``ΔU/|U_inf|`` (vector), ``C_p``, ``C_pt``, ``ln(1+nut/nu)`` and, on the airfoil only, ``C_F,shear``
    (vector). Training draws points anew at every epoch. Validation, test and prediction hold all wall points and a
    force surface, so that lift and drag integrate; test and prediction hold all points.

    Args:
        root: the dataset's folder; None takes the environment variable ``AIRFRANS_DATA_DIR``; "samples" the few cases
            that ship with this package.
        task: "full", "scarce", "reynolds" or "aoa"; "scarce" tests on the full task's test list.
        n_train_points: prediction points a training step, drawn without repetition; None takes all.
        n_train_wall_points: that many of them are drawn from the wall; 0 draws all points alike.
        n_validation_points: points of a validation sample, the wall's and a fixed draw of others; None takes all.
        n_boundary_faces: airfoil segments that act as sources, a random subset whose lengths are scaled by one factor
            to the whole airfoil's length; None takes all. Holds in every split, so that a model meets the density it
            was trained at: training draws anew at every epoch, the others once for good. Forces integrate over all.
        random_face_positions: training places each segment at a random point of it instead of its middle.
        orientation: where source normals point: "outward" into the fluid, "inward" into the body, or "file" as the
            file's winding has it.
        force_normals: how forces integrate. "vertex" averages the normals at a segment's ends, as the ``airfrans``
            package does, so that coefficients compare with published ones; at a sharp trailing edge that misses part
            of the pressure drag, up to 9 % of it on the shipped meshes. "face" takes each segment's own normal.
        cache_dir: see :class:`~datamodules.base.MeshDataModule`; the shipped cases are cached in the user's cache.
        validation_fraction: share of the train list set aside for validation, at least one case.
        n_validation: number of cases set aside; goes before the fraction.
        split_seed: chooses which cases are set aside.
        predict_split: what ``predict`` runs over: "test", "val" or "train".
        num_workers: loader processes; None takes what the CPUs allow, at most 4.
        pin_memory: page-locked samples; None where a GPU is present.
        persistent_workers: keep loader processes between epochs.
        seed: seed of all draws.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        root: str | None = None,
        task: str = "full",
        n_train_points: int | None = 2048,
        n_train_wall_points: int = 0,
        n_validation_points: int | None = None,
        n_boundary_faces: int | None = None,
        random_face_positions: bool = True,
        orientation: str = "outward",
        force_normals: str = "vertex",
        cache_dir: str | None = None,
        validation_fraction: float = 0.1,
        n_validation: int | None = None,
        split_seed: int = 0,
        predict_split: str = "test",
        num_workers: int | None = None,
        pin_memory: bool | None = None,
        persistent_workers: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(
            cache_dir=cache_dir,
            validation_fraction=validation_fraction,
            n_validation=n_validation,
            split_seed=split_seed,
            predict_split=predict_split,
            num_workers=num_workers,
            pin_memory=pin_memory,
            persistent_workers=persistent_workers,
            seed=seed,
        )
        for name, value, allowed in (
            ("task", task, TASKS),
            ("orientation", orientation, ("outward", "inward", "file")),
            ("force_normals", force_normals, ("vertex", "face")),
        ):
            if value not in allowed:
                raise ValueError(f"{name}: expected one of {', '.join(map(repr, allowed))}, found {value!r}")
        for name, count in (
            ("n_train_points", n_train_points),
            ("n_validation_points", n_validation_points),
            ("n_boundary_faces", n_boundary_faces),
        ):
            if count is not None and count < 1:
                raise ValueError(f"{name}: expected a positive number or null, found {count}")
        if n_train_wall_points < 0 or (n_train_points is not None and n_train_wall_points > n_train_points):
            raise ValueError(
                f"n_train_wall_points: expected 0 to n_train_points ({n_train_points}), found {n_train_wall_points}"
            )
        self.root = root
        self.task = task
        self._options: dict[str, Any] = {
            "n_train_points": n_train_points,
            "n_train_wall_points": n_train_wall_points,
            "n_validation_points": n_validation_points,
            "n_boundary_faces": n_boundary_faces,
            "random_face_positions": random_face_positions,
            "orientation": orientation,
            "force_normals": force_normals,
        }

    @property
    def schema(self) -> SampleSchema:
        """Fields, boundary types, reference lengths and global data of every sample."""
        return SampleSchema(
            n_spatial_dims=2,
            output_field_ranks={VELOCITY: 1, PRESSURE: 0, TOTAL_PRESSURE: 0, VISCOSITY: 0, SHEAR: 1},
            boundary_source_data_ranks={"no_slip": {}},
            reference_length_names=["chord", "delta_FS"],
            global_data_ranks={FREESTREAM: 1},
        )

    def root_path(self) -> Path:
        """The dataset's folder.

        Raises:
            ValueError: neither ``root`` nor the environment variable is set.
            FileNotFoundError: there is no such folder.
        """
        if self.root == "samples":
            return SAMPLES
        value = self.root or os.environ.get(ENVIRONMENT_VARIABLE)
        if not value:
            raise ValueError(
                f"root: not given. Pass the AirFRANS folder (the one with manifest.json) as root "
                f"(--data.init_args.root), set the environment variable {ENVIRONMENT_VARIABLE} to it, or pass "
                f'"samples" for the cases that ship with the package'
            )
        path = Path(value).expanduser()
        if not path.is_dir():
            origin = "root" if self.root else f"the environment variable {ENVIRONMENT_VARIABLE}"
            raise FileNotFoundError(f"{path}: no such folder, named by {origin}; expected the one with manifest.json")
        return path

    def root_is_read_only(self, root: Path) -> bool:
        """The package's own folder is never written to."""
        return root == SAMPLES.resolve()

    def make_source(self) -> AirFRANSSource:
        """The reader with this module's options."""
        return AirFRANSSource(self.root_path(), **self._options)

    def case_lists(self) -> dict[str, list[str]]:
        """The task's train and test lists.

        Raises:
            FileNotFoundError: no manifest, or it names cases that have no folder.
            ValueError: the manifest is not what it should be, or the lists overlap.
        """
        root = self.root_path()
        path = root / "manifest.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file; expected the manifest of AirFRANS in its root folder")
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path}: not valid JSON ({error})") from error
        names = {"train": f"{self.task}_train", "test": "full_test" if self.task == "scarce" else f"{self.task}_test"}
        lists = {}
        for split, name in names.items():
            cases = manifest.get(name) if isinstance(manifest, dict) else None
            if not isinstance(cases, list) or not cases or not all(isinstance(case, str) for case in cases):
                found = sorted(manifest) if isinstance(manifest, dict) else type(manifest).__name__
                raise ValueError(f"{path}: expected a list of case names under {name!r}, found {found}")
            if len(set(cases)) != len(cases):
                raise ValueError(f"{path}: list {name!r} names a case twice")
            absent = [case for case in cases if not (root / case).is_dir()]
            if absent:
                raise FileNotFoundError(
                    f"{path}: list {name!r} names {len(absent)} of {len(cases)} cases that have no folder in {root}, "
                    f"the first {absent[0]!r}; complete the download or use another task"
                )
            lists[split] = list(cases)
        both = set(lists["train"]) & set(lists["test"])
        if both:
            raise ValueError(f"{path}: {len(both)} cases are in both the train and the test list, one is {min(both)!r}")
        return lists

    def case_mesh(self, case: str) -> pv.UnstructuredGrid:
        """The internal mesh of a case with the file's own arrays, to hang fields on and write as VTU.

        Its points stand in the order that ``Sample.point_ids`` refers to.
        """
        from datamodules.vtk_io import read_mesh

        return read_mesh(self.make_source().file(case, "internal.vtu"))

    def dimensional(self, sample: Sample, fields: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Nondimensional fields at a sample's points in the dataset's units.

        Args:
            sample: the sample that the fields belong to.
            fields: any of the schema's fields, scalars (n,) and vectors (n, 2); unknown names are left out.

        Returns:
            ``U`` (n, 2) [m/s], ``p`` (n,) kinematic [m^2/s^2], ``p_total`` (n,) [m^2/s^2], ``nut`` (n,) [m^2/s],
            ``wallShearStress`` (n, 2) kinematic, the force on the wall [m^2/s^2].
        """
        speed, dynamic_pressure = sample.scales["U_inf"], sample.scales["q_inf"]
        assert sample.global_data is not None
        direction = sample.global_data[FREESTREAM].detach().cpu().double().numpy()
        convert = {
            VELOCITY: ("U", lambda value: (value + direction) * speed),
            PRESSURE: ("p", lambda value: value * dynamic_pressure),
            TOTAL_PRESSURE: ("p_total", lambda value: value * dynamic_pressure),
            VISCOSITY: ("nut", lambda value: np.expm1(value) * sample.scales["nu"]),
            SHEAR: ("wallShearStress", lambda value: value * dynamic_pressure),
        }
        out = {}
        for name, value in fields.items():
            if name in convert:
                unit_name, function = convert[name]
                array = value.detach().cpu() if isinstance(value, Tensor) else torch.as_tensor(value)
                out[unit_name] = function(array.double().numpy())
        return out
