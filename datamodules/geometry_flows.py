"""New shapes as cases of the datasets that models are trained on: an airfoil as AirFRANS has it, a car as DrivAerML.

What a sample holds and how forces integrate is the datasets' own code; here are only the arrays it draws from.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyvista as pv

from datamodules import airfoil_shape, airfrans_source, body_shape, drivaerml_source, polygons
from datamodules.airfrans import AirFRANSDataModule
from datamodules.base import MeshDataModule, require_choice
from datamodules.dataset import Draws
from datamodules.drivaerml import DrivAerMLDataModule
from datamodules.probes import Probes, airfoil_grid, inside_body, inside_outline
from datamodules.shape_report import ShapeReport
from datamodules.vtk_io import polygon_corners
from globe_lightning.sample import Sample

LENGTH_OF_CAR = 0.604  # of DrivAer's wheelbase, the reference length, to its length


@dataclass
class Shape:
    """A shape that was examined.

    Attributes:
        name: the stem of case names.
        body: an outline (n, 2) of an airfoil, or the surface of a car.
        report: what was found.
        grid: points around an airfoil, made once.
        frontal_area: of a car [m^2].
    """

    name: str
    body: Any
    report: ShapeReport
    grid: Probes | None = None
    frontal_area: float | None = None


class Flow(ABC):
    """What one dataset's conventions make of a shape."""

    #: The dataset's name, its data module, the files and the repairs of its shapes, and its conditions, explained.
    name: str
    dataset: type[MeshDataModule]
    suffixes: tuple[str, ...]
    repairs: tuple[str, ...]
    conditions: dict[str, str]

    def known(self, conditions: Mapping[str, float]) -> dict[str, float]:
        """Conditions, checked.

        Raises:
            ValueError: a name is unknown, or a value makes no sense.
        """
        for name, value in conditions.items():
            if name not in self.conditions:
                known = "; ".join(f"{key}: {text}" for key, text in self.conditions.items())
                raise ValueError(f"condition {name!r} is unknown for {self.name}; known are {known}")
            if not math.isfinite(value) or (name != "alpha" and value <= 0):
                raise ValueError(f"condition {name}: expected a positive number, found {value}")
        return dict(conditions)

    def shape(self, geometry: Any, name: str, options: Mapping[str, Any], report: ShapeReport) -> Shape:
        """Read and examine a shape: a path, or what a file of it would hold.

        Raises:
            FileNotFoundError, ValueError: it cannot be read, or not be used; the message says why.
        """
        path = Path(geometry) if isinstance(geometry, (str, Path)) else None
        if path is not None and path.suffix.lower() not in self.suffixes:
            raise ValueError(
                f"{path}: the model is one of {self.name}, whose shapes come in {', '.join(self.suffixes)}; found "
                f"{path.suffix or 'no suffix'}"
            )
        return Shape(name, self._examine(path if path is not None else geometry, report, options), report)

    @abstractmethod
    def _examine(self, geometry: Any, report: ShapeReport, options: Mapping[str, Any]) -> Any: ...

    @abstractmethod
    def sample(
        self, shape: Shape, conditions: Mapping[str, float], options: Mapping[str, Any], draws: Draws, case: str
    ) -> tuple[Sample, pv.DataSet]:
        """The sample of a case at the points where its dataset predicts, and the mesh they belong to."""

    @abstractmethod
    def bounds(self, shape: Shape) -> tuple[np.ndarray, np.ndarray]:
        """What probes show by default, lowest and highest coordinates [m]."""

    @abstractmethod
    def inside(self, shape: Shape, points: np.ndarray) -> np.ndarray:
        """Whether points are inside the body."""


class AirfoilFlow(Flow):
    """Airfoils as AirFRANS has them: chord 1 m, not turned; the freestream is."""

    name = "airfrans"
    dataset = AirFRANSDataModule
    suffixes = airfoil_shape.SUFFIXES
    repairs = airfoil_shape.REPAIRS
    conditions = {  # noqa: RUF012
        "U_inf": f"freestream speed [m/s], at nu = {airfrans_source.NU} m^2/s and a chord of 1 m",
        "Re": "Reynolds number, instead of U_inf",
        "alpha": "angle of attack [degrees], 0 if not given",
    }

    def known(self, conditions: Mapping[str, float]) -> dict[str, float]:
        """Conditions, checked: the speed from either of its two forms.

        Raises:
            ValueError: a name is unknown, a value makes no sense, or the speed is not given just once.
        """
        found = super().known(conditions)
        if ("U_inf" in found) == ("Re" in found):
            raise ValueError("conditions: an airfoil needs U_inf [m/s] or Re, one of the two (--condition U_inf=60)")
        if "Re" in found:
            found["U_inf"] = found.pop("Re") * airfrans_source.NU / airfrans_source.CHORD
        if abs(found.get("alpha", 0)) > 90:
            raise ValueError(f"condition alpha: expected an angle of attack in degrees, found {found['alpha']}")
        return found

    def _examine(self, geometry: Any, report: ShapeReport, options: Mapping[str, Any]) -> np.ndarray:
        if isinstance(geometry, Path):
            rows, headers = airfoil_shape.read_coordinates(geometry)
            report.note("header", headers)
        else:
            rows = np.asarray(geometry, dtype=np.float64)
            if rows.ndim != 2 or rows.shape[1] != 2:
                raise ValueError(f"{report.shape}: expected coordinates (n, 2), found an array {rows.shape}")
        return airfoil_shape.examine_airfoil(rows, report, options.get("n_segments"))

    @staticmethod
    def _outline(shape: Shape) -> tuple[np.ndarray, bool]:
        """The outline's points, each once, and whether it is closed."""
        closed = bool((shape.body[0] == shape.body[-1]).all())
        return (shape.body[:-1] if closed else shape.body), closed

    def sample(
        self, shape: Shape, conditions: Mapping[str, float], options: Mapping[str, Any], draws: Draws, case: str
    ) -> tuple[Sample, pv.DataSet]:
        """The points of a grid around the airfoil, its wall's first, and the grid."""
        outline, closed = self._outline(shape)
        if shape.grid is None:
            shape.grid = airfoil_grid(outline)
        grid = shape.grid
        points = grid.points.astype(np.float32)
        n, m = len(points), len(outline)
        segments = np.stack([np.arange(m), (np.arange(m) + 1) % m], axis=1)[: m if closed else m - 1]
        outward = np.zeros(len(segments), dtype=bool)  # (-e_y, e_x) of a counterclockwise outline points inward
        areas = airfrans_source.segment_areas(points.astype(np.float64), segments, outward)
        lengths = np.linalg.norm(areas, axis=1, keepdims=True)
        normals = airfrans_source.vertex_normals(n, segments, areas)
        angle = math.radians(conditions.get("alpha", 0.0))
        unknown = np.broadcast_to(np.float32(np.nan), (n,))
        arrays = {
            "points": points,
            airfrans_source.VELOCITY: np.broadcast_to(np.float32(np.nan), (n, 2)),
            airfrans_source.PRESSURE: unknown,
            airfrans_source.TOTAL_PRESSURE: unknown,
            airfrans_source.VISCOSITY: unknown,
            "wall_ids": np.arange(m),
            "wall_shear": np.broadcast_to(np.float32(np.nan), (m, 2)),
            "segments": segments,
            "segment_outward": outward,
            "segment_areas": areas,
            "segment_areas_vertex": normals[segments].mean(axis=1) * lengths,
            "U_inf": conditions["U_inf"] * np.array([math.cos(angle), math.sin(angle)]),
        }
        kept = ("n_boundary_faces", "orientation", "force_normals")
        source = airfrans_source.AirFRANSSource(".", **{key: options[key] for key in kept if key in options})
        return source.sample(case, 0, arrays, draws), grid.mesh.copy()

    def bounds(self, shape: Shape) -> tuple[np.ndarray, np.ndarray]:
        """Half a chord ahead of the airfoil, above and below, and a chord behind it."""
        return np.array([-0.5, -0.6]), np.array([2.0, 0.6])

    def inside(self, shape: Shape, points: np.ndarray) -> np.ndarray:
        """Whether points are inside the outline."""
        return inside_outline(points, self._outline(shape)[0])


class CarFlow(Flow):
    """Cars as DrivAerML has them: flow along +x, z up, floors at the lowest z."""

    name = "drivaerml"
    dataset = DrivAerMLDataModule
    suffixes = body_shape.SUFFIXES
    repairs = body_shape.REPAIRS
    conditions = {  # noqa: RUF012
        "U_inf": f"speed of the car [m/s], {drivaerml_source.U_INF} if not given",
        "nu": f"kinematic viscosity [m^2/s], {drivaerml_source.NU} if not given",
        "L_ref": f"reference length, the wheelbase [m], {LENGTH_OF_CAR} of the car's length if not given",
        "A_ref": "reference area of the coefficients named _own [m^2], the car's frontal area if not given",
    }

    def shape(self, geometry: Any, name: str, options: Mapping[str, Any], report: ShapeReport) -> Shape:
        """Read and examine a car, and find its frontal area: that of its shadow along the flow."""
        shape = super().shape(geometry, name, options, report)
        mesh = shape.body
        _, triangles = polygons.fans(*polygon_corners(mesh, report.shape))
        shape.frontal_area = polygons.shadow_area(np.asarray(mesh.points), triangles)
        constant, length = drivaerml_source.REFERENCE_AREA, _wheelbase(mesh)
        report.note(
            "area",
            f"frontal area {shape.frontal_area:.4f} m^2; coefficients named _own refer to it (A_ref sets another), the "
            f"others to {constant} m^2",
        )
        report.note("length", f"reference length {length:.4f} m, {LENGTH_OF_CAR} of the whole (L_ref sets another)")
        return shape

    def _examine(self, geometry: Any, report: ShapeReport, options: Mapping[str, Any]) -> pv.PolyData:
        if isinstance(geometry, Path):
            mesh = body_shape.read_body(geometry)
        elif isinstance(geometry, pv.DataSet):
            mesh = body_shape.polygons_only(geometry, report.shape)
        else:
            raise ValueError(f"{report.shape}: expected a surface (pyvista), found {type(geometry).__name__}")
        return body_shape.examine_body(mesh, report, options.get("units"))

    def sample(
        self, shape: Shape, conditions: Mapping[str, float], options: Mapping[str, Any], draws: Draws, case: str
    ) -> tuple[Sample, pv.DataSet]:
        """The points of the surface (or the middles of its faces), and the surface."""
        mesh = shape.body
        length = conditions.get("L_ref", _wheelbase(mesh))
        own_area = conditions.get("A_ref", shape.frontal_area)
        arrays = body_shape.body_arrays(mesh, shape.name, float(length), own_area)
        kept = ("targets", "n_boundary_faces", "n_floor_cells", "orientation")
        source = drivaerml_source.DrivAerMLSource(".", **{key: options[key] for key in kept if key in options})
        source.speed = conditions.get("U_inf", drivaerml_source.U_INF)
        source.viscosity = conditions.get("nu", drivaerml_source.NU)
        return source.sample(case, 0, arrays, draws), mesh.copy()

    def bounds(self, shape: Shape) -> tuple[np.ndarray, np.ndarray]:
        """Half a length around the car, a length behind it, from the ground up."""
        low, high = np.array(shape.body.bounds).reshape(3, 2).T
        length = high[0] - low[0]
        return low - np.array([0.5 * length, 0.3 * length, 0]), high + np.array([length, 0.3 * length, 0.3 * length])

    def inside(self, shape: Shape, points: np.ndarray) -> np.ndarray:
        """Whether points are inside the surface; of an open one VTK's best guess."""
        return inside_body(points, shape.body)


def _wheelbase(mesh: pv.PolyData) -> float:
    """The reference length of a car as its length suggests it [m]."""
    return LENGTH_OF_CAR * (mesh.bounds[1] - mesh.bounds[0])


FLOWS: dict[str, Flow] = {flow.name: flow for flow in (AirfoilFlow(), CarFlow())}
"""The conventions that new shapes can be prepared by."""


def flow_named(conventions: str) -> Flow:
    """The flow of a dataset's name, with a ValueError that lists them if it is unknown."""
    require_choice("conventions", conventions, tuple(FLOWS))
    return FLOWS[conventions]
