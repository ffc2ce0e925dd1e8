"""Points in the flow around a body: planes and grids in words, points from files, and a grid around an airfoil."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import pyvista as pv

from datamodules.vtk_io import read_mesh

SUFFIXES = (".csv", ".vtp", ".vtu", ".vtk")
AXES = "xyz"
DEFAULT_POINTS = 160  # along the longest side of a plane or grid whose resolution is not given
MOST_POINTS = 50_000_000


@dataclass
class Probes:
    """Points at which fields are wanted.

    Attributes:
        name: short, for file names.
        points: (n, D) [m].
        mesh: what to hang the fields on; its points (or, if made so, its cells) are the ``points`` in order.
    """

    name: str
    points: np.ndarray
    mesh: pv.DataSet


def parse_probes(text: str, low: np.ndarray, high: np.ndarray, association: str = "point") -> Probes:
    """Probes from words: a file's name, or a plane or grid such as ``y=0`` or ``x=-1:6:141,y=0,z=0:2:41``.

    An axis is given as one coordinate, or as lowest, highest and number of points (which may be left out). An axis
    that is not named takes the bounds given here. In the plane there is no z.

    Args:
        text: the words.
        low: lowest coordinates by default, (D,) [m].
        high: highest ones.
        association: whether the points are to be the "point"s or the "cell" centers of the mesh.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the words or the file make no sense; the message says why.
    """
    if "=" not in text:
        return _from_file(Path(text), len(low), association)
    axes: dict[str, list[float]] = {}
    for part in text.split(","):
        axis, _, value = part.partition("=")
        axis = axis.strip().lower()
        if axis not in AXES[: len(low)] or axis in axes or not axis:
            raise ValueError(
                f"plane or grid {text!r}: expected each of the axes {', '.join(AXES[: len(low)])} at most once, found "
                f"{axis!r}"
            )
        try:
            axes[axis] = [float(number) for number in value.split(":")]
        except ValueError:
            axes[axis] = []
        if not 1 <= len(axes[axis]) <= 3 or not all(map(math.isfinite, axes[axis])):
            raise ValueError(f"plane or grid {text!r}: expected {axis}=value or {axis}=low:high[:n], found {value!r}")
    spans = {AXES[i]: axes.get(AXES[i], [float(low[i]), float(high[i])]) for i in range(len(low))}
    spacing = max(span[1] - span[0] for span in spans.values() if len(span) > 1) if _extended(spans) else 0.0
    spacing /= DEFAULT_POINTS
    coordinates = []
    for axis, span in spans.items():
        if len(span) == 1:
            coordinates.append(np.array(span))
            continue
        n = span[2] if len(span) == 3 else round((span[1] - span[0]) / spacing) + 1 if spacing > 0 else 2
        if span[1] <= span[0] or n != int(n) or n < 2:
            raise ValueError(f"plane or grid {text!r}: along {axis} expected low < high and 2 points or more")
        coordinates.append(np.linspace(span[0], span[1], int(n)))
    size = math.prod(map(len, coordinates))
    if size > MOST_POINTS:
        raise ValueError(f"plane or grid {text!r}: {size} points, expected {MOST_POINTS} at most")
    name = "_".join(f"{axis}{span[0]:g}" for axis, span in spans.items() if len(span) == 1) or "grid"
    return Probes(name, *_grid(coordinates, association))


def _extended(spans: dict[str, list[float]]) -> bool:
    return any(len(span) > 1 for span in spans.values())


def _grid(coordinates: list[np.ndarray], association: str) -> tuple[np.ndarray, pv.DataSet]:
    grids = np.meshgrid(*coordinates, indexing="ij")
    points = np.stack([grid.ravel(order="F") for grid in grids], axis=1)
    three = [*coordinates, *[np.zeros(1)] * (3 - len(coordinates))]
    if association == "cell":  # nodes half a step around each point
        three = [_nodes(values) if len(values) > 1 else values for values in three]
    mesh = pv.RectilinearGrid(*three)
    return points.astype(np.float32), mesh.cast_to_structured_grid().cast_to_unstructured_grid()


def _nodes(values: np.ndarray) -> np.ndarray:
    middles = (values[1:] + values[:-1]) / 2
    return np.concatenate([[2 * values[0] - middles[0]], middles, [2 * values[-1] - middles[-1]]])


def _from_file(path: Path, n_dims: int, association: str) -> Probes:
    if not path.is_file():
        raise FileNotFoundError(
            f"points: no file {str(path)!r}; expected {', '.join(SUFFIXES)}, or a plane or grid such as 'y=0'"
        )
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"{path}: expected points in {', '.join(SUFFIXES)}, found {suffix or 'no suffix'}")
    if suffix == ".csv":
        points = _read_table(path, n_dims)
        mesh: pv.DataSet = pv.PolyData(np.pad(points, ((0, 0), (0, 3 - n_dims))))
    else:
        mesh = read_mesh(path)
        mesh.clear_data()
        points = np.asarray(mesh.points)[:, :n_dims]
        if n_dims == 2 and np.ptp(np.asarray(mesh.points)[:, 2]) > 0:
            raise ValueError(f"{path}: z varies, but the model is two-dimensional; expected points of one z")
        if association == "cell":
            mesh = pv.PolyData(np.asarray(mesh.points))
    return Probes(path.stem, points.astype(np.float32), mesh)


def _read_table(path: Path, n_dims: int) -> np.ndarray:
    """Points (n, n_dims) from a CSV file with the columns x, y (and z), named or in that order."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = [[cell.strip() for cell in line] for line in csv.reader(file)]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: not readable as CSV ({error})") from error
    rows = [(number, line) for number, line in enumerate(lines, 1) if any(line)]
    wanted = AXES[:n_dims]
    columns = list(range(n_dims))
    if rows and not _numbers(rows[0][1]):
        names = [name.lstrip("#").strip().lower() for name in rows[0][1]]
        missing = [axis for axis in wanted if axis not in names]
        if missing:
            raise ValueError(f"{path}: column {missing[0]!r} is missing; found {rows[0][1]}")
        columns = [names.index(axis) for axis in wanted]
        rows = rows[1:]
    points = np.empty((len(rows), n_dims))
    for row, (number, line) in enumerate(rows):
        found = _numbers([line[column] for column in columns if column < len(line)])
        if len(found) != n_dims or not all(map(math.isfinite, found)):
            raise ValueError(f"{path}, line {number}: expected the numbers {', '.join(wanted)}, found {line}")
        points[row] = found
    if not len(points):
        raise ValueError(f"{path}: no points; expected a row of {', '.join(wanted)} each")
    return points


def _numbers(cells: list[str]) -> list[float]:
    try:
        return [float(cell) for cell in cells]
    except ValueError:
        return []


def inside_outline(points: np.ndarray, outline: np.ndarray) -> np.ndarray:
    """Whether points (n, 2) are inside an airfoil's outline (m, 2)."""
    from matplotlib.path import Path as Polygon

    return cast(np.ndarray, Polygon(outline).contains_points(points))


def inside_body(points: np.ndarray, surface: pv.PolyData) -> np.ndarray:
    """Whether points (n, 3) are inside a body, (n,); of an open surface VTK's best guess."""
    from vtkmodules.vtkFiltersModeling import vtkSelectEnclosedPoints

    inside = np.zeros(len(points), dtype=bool)
    bounds = np.array(surface.bounds).reshape(3, 2)
    near = np.flatnonzero(((points >= bounds[:, 0]) & (points <= bounds[:, 1])).all(axis=1))
    if len(near):
        select = vtkSelectEnclosedPoints()
        select.SetInputData(pv.PolyData(points[near]))
        select.SetSurfaceData(surface.triangulate())
        select.SetTolerance(1e-6)
        select.CheckSurfaceOff()
        select.Update()
        inside[near] = np.asarray(pv.wrap(select.GetOutput()).point_data["SelectedPoints"]).astype(bool)
    return inside


LAYERS, FIRST_LAYER, GROWTH = 18, 2e-4, 1.22
"""Points in the airfoil's boundary layer: how many, the first's distance from the wall [chords], and their growth."""

BOXES = (
    ((-2.0, 4.0), (-1.5, 1.5), 0.1),
    ((-0.7, 2.4), (-0.6, 0.6), 0.04),
    ((-0.2, 1.8), (-0.25, 0.25), 0.015),
)
"""The grid around an airfoil: x and y of boxes, and the spacing in each [chords]; inner ones replace outer ones."""


def airfoil_grid(outline: np.ndarray) -> Probes:
    """Points around an airfoil, finer towards it, and triangles between them; the outline's points come first.

    Args:
        outline: (m, 2) [m], each point once, around the body counterclockwise.
    """
    from matplotlib.tri import Triangulation

    from datamodules.airfrans_source import vertex_normals

    m = len(outline)
    ends = np.stack([np.arange(m), (np.arange(m) + 1) % m], axis=1)
    edges = outline[ends[:, 1]] - outline[ends[:, 0]]
    normals = vertex_normals(m, ends, np.stack([edges[:, 1], -edges[:, 0]], axis=1))
    distances = FIRST_LAYER * (GROWTH ** np.arange(1, LAYERS + 1) - 1) / (GROWTH - 1)
    layers = (outline[None] + distances[:, None, None] * normals[None]).reshape(-1, 2)
    boxes = []
    for number, (x, y, spacing) in enumerate(BOXES):
        xs, ys = (np.arange(low, high + spacing / 2, spacing) for low, high in (x, y))
        grid = np.stack(np.meshgrid(xs, ys, indexing="ij"), axis=-1).reshape(-1, 2)
        if number + 1 < len(BOXES):
            (x0, x1), (y0, y1), _ = BOXES[number + 1]
            grid = grid[~((grid[:, 0] >= x0) & (grid[:, 0] <= x1) & (grid[:, 1] >= y0) & (grid[:, 1] <= y1))]
        boxes.append(grid)
    others = np.concatenate([layers, *boxes])
    distance = distance_to_outline(others, outline)
    # A layer's point that another part of the wall is nearer to, and grid points among the layers, are left out.
    own = np.repeat(distances, m)
    keep = np.concatenate([distance[: len(layers)] > 0.9 * own, distance[len(layers) :] > distances[-1]])
    others = others[keep & ~inside_outline(others, outline)]
    points = np.concatenate([outline, others])
    triangles = Triangulation(points[:, 0], points[:, 1]).triangles
    triangles = triangles[~inside_outline(points[triangles].mean(axis=1), outline)]
    cells = np.pad(triangles, ((0, 0), (1, 0)), constant_values=3)
    three = np.pad(points, ((0, 0), (0, 1)))
    mesh = pv.UnstructuredGrid(cells.ravel(), np.full(len(cells), pv.CellType.TRIANGLE), three)
    return Probes("", points, mesh)


def distance_to_outline(points: np.ndarray, outline: np.ndarray) -> np.ndarray:
    """Distances of points (n, 2) to the segments of a closed outline (m, 2), (n,)."""
    start, edge = outline, np.roll(outline, -1, axis=0) - outline
    length = np.maximum((edge**2).sum(axis=1), 1e-30)
    out = np.empty(len(points))
    for begin in range(0, len(points), 2048):
        to = points[begin : begin + 2048, None] - start
        along = np.clip((to * edge).sum(axis=-1) / length, 0, 1)
        out[begin : begin + 2048] = np.linalg.norm(to - along[..., None] * edge, axis=-1).min(axis=1)
    return out
