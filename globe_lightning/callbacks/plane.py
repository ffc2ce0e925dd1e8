"""What pictures of the flow in a plane share: the body's outline, the window around it, triangles to paint."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from globe_lightning.sample import ForceSurface, Sample

MARGINS = (0.35, 0.75, 0.35)
"""What a plane picture shows around the body: to its left, to its right and above and below, in body lengths."""


def body_outline(sample: Sample) -> np.ndarray:
    """The segments of a two-dimensional case's boundaries, (s, 2, 2) [m]."""
    return np.concatenate([numpy_of(mesh.corners) for mesh in sample.boundary_meshes.values() if mesh.n_faces])


def window_around(outline: np.ndarray) -> tuple[float, float, float, float]:
    """Lowest and highest x, lowest and highest y of what is shown of the flow around a body."""
    low, high = outline.min(axis=(0, 1)), outline.max(axis=(0, 1))
    length = float(max(high - low))
    left, right, side = (margin * length for margin in MARGINS)
    return low[0] - left, high[0] + right, low[1] - side, high[1] + side


class FieldTriangles:
    """A triangulation of the points near the body, without the triangles inside it."""

    def __init__(self, triangulation: Any, rows: np.ndarray) -> None:
        self.triangulation = triangulation
        self.rows = rows

    def quantiles(
        self, values: np.ndarray, levels: list[float], window: tuple[float, float, float, float]
    ) -> np.ndarray:
        """Quantiles over the visible area of values at the points; over the points alone, the wall's would rule."""
        t = self.triangulation
        corners = t.get_masked_triangles()
        x, y, means = t.x[corners], t.y[corners], values[corners].mean(axis=1)
        areas = np.abs((x[:, 1] - x[:, 0]) * (y[:, 2] - y[:, 0]) - (x[:, 2] - x[:, 0]) * (y[:, 1] - y[:, 0]))
        cx, cy = x.mean(axis=1), y.mean(axis=1)
        visible = (cx > window[0]) & (cx < window[1]) & (cy > window[2]) & (cy < window[3])
        use = np.isfinite(means) & (areas > 0) & (visible if visible.any() else True)
        if not use.any():
            return np.zeros(len(levels))
        order = np.argsort(means[use])
        cumulative = np.cumsum(areas[use][order])
        return np.interp(np.array(levels) * cumulative[-1], cumulative, means[use][order])


def triangulate(points: np.ndarray, outline: np.ndarray, window: tuple[float, float, float, float]) -> FieldTriangles:
    """The points in and near the window as triangles, without those inside the body."""
    from matplotlib.tri import Triangulation

    reach = 0.15 * (window[1] - window[0])
    near = (points[:, 0] > window[0] - reach) & (points[:, 0] < window[1] + reach)
    near &= (points[:, 1] > window[2] - reach) & (points[:, 1] < window[3] + reach)
    rows = np.flatnonzero(near)
    if len(rows) < 3:
        rows = np.arange(len(points))
    _, first = np.unique(points[rows], axis=0, return_index=True)  # coincident points break the triangulation
    rows = rows[np.sort(first)]
    triangulation = Triangulation(points[rows, 0], points[rows, 1])
    centres = points[rows][triangulation.triangles].mean(axis=1)
    triangulation.set_mask(inside_loops(centres, outline))
    return FieldTriangles(triangulation, rows)


def inside_loops(points: np.ndarray, outline: np.ndarray) -> np.ndarray:
    """Whether points are inside closed loops of segments (s, 2, 2): a ray to the right crosses an odd number."""
    inside = np.zeros(len(points), dtype=bool)
    low, high = outline.min(axis=(0, 1)), outline.max(axis=(0, 1))
    rows = np.flatnonzero(((points >= low) & (points <= high)).all(axis=1))
    a, b = outline[:, 0], outline[:, 1]
    rise = np.where(b[:, 1] == a[:, 1], 1.0, b[:, 1] - a[:, 1])
    for start in range(0, len(rows), 4096):
        part = rows[start : start + 4096]
        x, y = points[part, :1], points[part, 1:]
        between = (a[:, 1] > y) != (b[:, 1] > y)
        crossing = a[:, 0] + (y - a[:, 1]) / rise * (b[:, 0] - a[:, 0])
        inside[part] = (between & (x < crossing)).sum(axis=1) % 2 == 1
    return inside


def loops(outline: np.ndarray) -> list[np.ndarray]:
    """Segments (s, 2, 2) chained into polygons by their equal ends."""
    following: dict[tuple[float, ...], list[tuple[float, ...]]] = {}
    for start, end in outline:
        following.setdefault(tuple(start), []).append(tuple(end))
    found = []
    while following:
        point = next(iter(following))
        loop = [point]
        while following.get(point):
            ends = following[point]
            end = ends.pop()
            if not ends:
                del following[point]
            loop.append(end)
            point = end
        found.append(np.array(loop))
    return found


def along_body(surface: ForceSurface, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows of the points at the ends of each segment, and their places along the body's longest direction, 0 to 1."""
    corners = surface.point_indices.cpu().numpy()
    positions = points[corners]
    low, high = positions.min(axis=(0, 1)), positions.max(axis=(0, 1))
    axis = int(np.argmax(high - low))
    return corners, (positions[..., axis] - low[axis]) / (high - low)[axis]


def size_of(values: np.ndarray) -> np.ndarray:
    """Scalars as they are, vectors' magnitudes; (n,)."""
    return np.linalg.norm(values, axis=-1) if values.ndim == 2 else values


def numpy_of(tensor: Tensor) -> np.ndarray:
    """A tensor as a float64 array."""
    return tensor.detach().double().cpu().numpy()
