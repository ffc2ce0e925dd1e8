"""Shapes that nobody has simulated as cases to predict: from a file and the flow's conditions to samples."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only
from tensordict import TensorDict
from torch.utils.data import DataLoader, Dataset

from datamodules.base import ORIENTATIONS, require_choice, require_counts
from datamodules.dataset import Draws, tensor
from globe_lightning.sample import Sample, SampleSchema

if TYPE_CHECKING:
    import pyvista as pv

    from datamodules.geometry_flows import Shape
    from datamodules.probes import Probes

CONVENTIONS = ("airfrans", "drivaerml")


def conventions_for(schema: SampleSchema) -> str:
    """Whose conventions a model's samples follow, by its schema: "airfrans" or "drivaerml".

    Raises:
        ValueError: neither dataset's samples fit the model; the message lists how they differ.
    """
    from datamodules.geometry_flows import FLOWS

    lines = []
    for name, flow in FLOWS.items():
        other: SampleSchema = flow.dataset().schema  # type: ignore[assignment]
        differences = schema.differences(other)
        if not differences:
            return name
        lines += [f"{name}: {line}" for line in differences]
    raise ValueError(
        "new shapes can be prepared for models of airfrans and drivaerml samples; this one fits neither:\n  "
        + "\n  ".join(lines)
        + "\nmake a Sample of your own and pass it to model.predict_fields"
    )


@dataclass
class _Case:
    """A shape under conditions, at its own points or at probes."""

    name: str
    shape: int
    conditions: dict[str, float]
    probes: str | None = None


class GeometryDataModule(LightningDataModule):
    """New shapes as samples to predict, prepared as a dataset prepares its cases; without any truth.

    Args:
        geometry: files: airfoil coordinates (.dat, .csv, .txt) for models of airfrans, surfaces (.stl, .vtp, .obj,
            .ply) for models of drivaerml. In Python also arrays (n, 2) and pyvista surfaces.
        conventions: the dataset whose conventions hold, "airfrans" or "drivaerml".
        conditions: {name: value or values}; several values make a case each. Airfoils: ``U_inf`` [m/s] or ``Re``, and
            ``alpha`` [degrees]. Cars: ``U_inf`` [m/s], ``nu`` [m^2/s], ``L_ref`` [m], ``A_ref`` [m^2].
        repair: what to mend in the shapes, by the names in the report that is printed; "all" for everything.
        accept: faults to leave as they are, though they would forbid a prediction.
        units: the files' unit of length: m, mm, cm, in or ft; null takes meters. Cars only.
        probes: where else to predict: files of points (.csv, .vtp, .vtu), planes ("y=0") or grids
            ("x=-1:6:141,y=0,z=0:2:41").
        targets: "vertices" of the surface or "cells", the middles of its faces. Cars only.
        n_boundary_faces: faces that act as sources, a random subset whose areas are scaled to the whole; null for all.
        n_floor_cells: each floor has n x n x 2 triangles. Cars only.
        orientation: where source normals point: "outward", "inward", or "file" as the file's winding has it.
        force_normals: see :class:`~datamodules.airfrans.AirFRANSDataModule`. Airfoils only.
        n_segments: resample airfoils to that many segments; null takes the files' own points.
        seed: seed of the subset.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        geometry: Any,
        conventions: str,
        conditions: dict[str, float | list[float]] | None = None,
        repair: Sequence[str] = (),
        accept: Sequence[str] = (),
        units: str | None = None,
        probes: Sequence[str] = (),
        targets: str = "vertices",
        n_boundary_faces: int | None = None,
        n_floor_cells: int = 19,
        orientation: str = "outward",
        force_normals: str = "vertex",
        n_segments: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        require_choice("conventions", conventions, CONVENTIONS)
        require_choice("targets", targets, ("vertices", "cells"))
        require_choice("orientation", orientation, ORIENTATIONS)
        require_choice("force_normals", force_normals, ("vertex", "face"))
        require_counts(n_boundary_faces=n_boundary_faces, n_floor_cells=n_floor_cells, n_segments=n_segments)
        if n_segments is not None and n_segments < 10:
            raise ValueError(f"n_segments: expected 10 or more, found {n_segments}")
        self.geometries = [geometry] if _is_single(geometry) else list(geometry)
        if not self.geometries:
            raise ValueError("geometry: expected at least one shape, found none")
        self.conventions = conventions
        self.conditions = {
            str(name): [float(item) for item in (value if isinstance(value, (list, tuple)) else [value])]
            for name, value in (conditions or {}).items()
        }
        self.repair = [repair] if isinstance(repair, str) else list(repair)
        self.accept = [accept] if isinstance(accept, str) else list(accept)
        self.probes = [probes] if isinstance(probes, str) else list(probes)
        self.seed = seed
        self.field_association = "point" if conventions == "airfrans" or targets == "vertices" else "cell"
        self._options: dict[str, Any] = {
            "units": units,
            "targets": targets,
            "n_boundary_faces": n_boundary_faces,
            "n_floor_cells": n_floor_cells,
            "orientation": orientation,
            "force_normals": force_normals,
            "n_segments": n_segments,
        }
        self._shapes: list[Shape] = []
        self._cases: list[_Case] = []
        self._meshes: dict[str, pv.DataSet] = {}

    @property
    def schema(self) -> SampleSchema:
        """What every sample holds: the dataset's schema."""
        return self._dataset().schema  # type: ignore[return-value]

    def _dataset(self) -> Any:
        return self._flow.dataset()

    @property
    def _flow(self) -> Any:
        from datamodules.geometry_flows import flow_named

        return flow_named(self.conventions)

    def shapes(self) -> list[Shape]:
        """The shapes, read and examined once.

        Raises:
            FileNotFoundError, ValueError: a file cannot be read, or a shape cannot be used as it is.
        """
        from datamodules.shape_report import ShapeReport

        if not self._shapes:
            names: list[str] = []
            shapes = []
            for geometry in self.geometries:
                stem = Path(geometry).stem if isinstance(geometry, (str, Path)) else "shape"
                names.append(stem if stem not in names else f"{stem}_{len(names) + 1}")
                label = str(geometry) if isinstance(geometry, (str, Path)) else names[-1]
                report = ShapeReport(label, self._flow.repairs, self.repair, self.accept)
                shapes.append(self._flow.shape(geometry, names[-1], self._options, report))
            self._shapes = shapes
        return self._shapes

    def cases(self) -> list[_Case]:
        """Every shape under every combination of conditions, at its own points and at every set of probes."""
        if not self._cases:
            swept = [name for name, values in self.conditions.items() if len(values) > 1]
            for number, shape in enumerate(self.shapes()):
                for values in itertools.product(*self.conditions.values()):
                    given = dict(zip(self.conditions, values, strict=True))
                    name = "_".join([shape.name, *(f"{key}{given[key]:g}" for key in swept)])
                    conditions = self._flow.known(given)
                    self._cases.append(_Case(name, number, conditions))
                    for text in self.probes:
                        probe = f"{name}_{self._parsed(text, shape).name}"
                        self._cases.append(_Case(_unused(probe, self._cases), number, conditions, text))
        return self._cases

    def _parsed(self, text: str, shape: Shape) -> Probes:
        from datamodules.probes import parse_probes

        low, high = self._flow.bounds(shape)
        return parse_probes(text, low, high, self.field_association)

    def sample(self, index: int) -> Sample:
        """The sample of a case, with no targets."""
        case = self.cases()[index]
        shape = self.shapes()[case.shape]
        draws = Draws(self.seed, "predict", 0, shape.name)
        sample, mesh = self._flow.sample(shape, case.conditions, self._options, draws, case.name)
        points, rows, surface = sample.prediction_points, None, sample.force_surface
        if case.probes is not None:
            probes = self._parsed(case.probes, shape)
            mesh, surface = probes.mesh, None
            outside = np.flatnonzero(~self._flow.inside(shape, probes.points))
            points = tensor(probes.points[outside])
            rows = torch.from_numpy(outside)
        self._meshes[case.name] = mesh
        return replace(
            sample,
            index=index,
            prediction_points=points,
            point_ids=rows,
            force_surface=surface,
            targets=TensorDict({}, batch_size=[len(points)]),
        )

    def case_mesh(self, case: str) -> pv.DataSet:
        """The mesh of a case: a car's surface, a grid around an airfoil, or probes."""
        if case not in self._meshes:
            self.sample([item.name for item in self.cases()].index(case))
        return self._meshes[case]

    def dimensional(self, sample: Sample, fields: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Nondimensional fields in the dataset's names and units, as its own data module has them."""
        return self._dataset().dimensional(sample, fields)

    def prepare_data(self) -> None:
        """Read and examine the shapes, and print what was found."""
        for shape in self.shapes():
            _say(str(shape.report))
        self.cases()
        if self.probes and self.conventions == "drivaerml":
            rank_zero_info(
                "models of cars are trained on the surface alone: what they give at probes in the air is extrapolated"
            )

    def predict_dataloader(self) -> DataLoader:
        """One sample a step."""
        return DataLoader(_Samples(self), batch_size=None, num_workers=0)


class _Samples(Dataset[Sample]):
    def __init__(self, data: GeometryDataModule) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data.cases())

    def __getitem__(self, index: int) -> Sample:
        return self.data.sample(index)


def _unused(name: str, cases: list[_Case]) -> str:
    """The name, with a number if another case has it already."""
    taken = {case.name for case in cases}
    return next(new for new in itertools.chain([name], (f"{name}_{i}" for i in itertools.count(2))) if new not in taken)


def _is_single(geometry: Any) -> bool:
    return isinstance(geometry, (str, Path)) or not isinstance(geometry, (list, tuple))


@rank_zero_only
def _say(text: str) -> None:
    print(text, flush=True)
