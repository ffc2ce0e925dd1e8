"""Surfaces seen from a direction, as images: which triangle each pixel shows.

Plain NumPy, because it must run where neither a display nor an OpenGL library is: on compute nodes. Memory is bounded,
and a pixel is the unit of work: millions of triangles cost little more than their projection.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

TRIANGLES = 1 << 19  # projected at once
CANDIDATES = 1 << 21  # pairs of a triangle and a pixel, tested at once


@dataclass
class Camera:
    """A parallel projection onto pixels; z is up.

    Attributes:
        azimuth: where the viewer stands around the body [degrees]; 0 at +x, 90 at +y.
        elevation: how far above the horizon [degrees].
        scale: pixels a metre.
        origin: what the lower left corner shows, along the image's two axes [m].
        shape: rows and columns of the image.
    """

    azimuth: float
    elevation: float
    scale: float = 1.0
    origin: tuple[float, float] = (0.0, 0.0)
    shape: tuple[int, int] = (1, 1)

    @property
    def axes(self) -> Float[np.ndarray, "3 3"]:
        """Unit vectors to the image's right, up, and towards the viewer."""
        a, e = np.deg2rad([self.azimuth, self.elevation])
        toward = np.array([np.cos(e) * np.cos(a), np.cos(e) * np.sin(a), np.sin(e)])
        right = np.array([-np.sin(a), np.cos(a), 0.0])
        return np.stack([right, np.cross(toward, right), toward])

    def extent(self, points: Float[np.ndarray, "n 3"]) -> Float[np.ndarray, "2 2"]:
        """Lowest and highest position of points along the image's two axes [m]."""
        flat = points @ self.axes[:2].T.astype(points.dtype)
        return np.stack([flat.min(axis=0), flat.max(axis=0)]).astype(np.float64)

    def project(self, points: Float[np.ndarray, "n 3"]) -> Float[np.ndarray, "n 3"]:
        """Column and row (pixel centres at whole numbers, rows upwards) and nearness to the viewer, in pixels."""
        out = points.astype(np.float64) @ self.axes.T
        out[:, :2] -= self.origin
        return out * self.scale


@dataclass
class Shown:
    """What every pixel shows: a mixture of values, and how squarely the surface faces the viewer.

    Attributes:
        rows: rows of the values mixed, (height, width, k).
        weights: theirs, (height, width, k).
        facing: |cosine| of the angle between the surface's normal and the direction to the viewer, (height, width).
        covered: whether anything is shown, (height, width).
    """

    rows: Int[np.ndarray, "height width k"]
    weights: Float[np.ndarray, "height width k"]
    facing: Float[np.ndarray, "height width"]
    covered: np.ndarray

    def values(self, values: Float[np.ndarray, "n ..."]) -> Float[np.ndarray, "height width ..."]:
        """The image of a field: scalars or vectors by row; NaN where nothing is shown."""
        weights = self.weights.reshape(*self.weights.shape, *[1] * (values.ndim - 1))
        image = (values[self.rows] * weights).sum(axis=2)
        image[~self.covered] = np.nan
        return image


def see_triangles(
    camera: Camera,
    points: Float[np.ndarray, "n 3"],
    triangles: Int[np.ndarray, "t 3"],
    cells: Int[np.ndarray, " t"] | None = None,
) -> Shown:
    """The triangles that a camera sees.

    Args:
        camera: the view.
        points: vertices [m].
        triangles: rows of the vertices.
        cells: the row of the values that each triangle shows; None mixes the values of its vertices.
    """
    height, width = camera.shape
    nearest = np.full(height * width, -np.inf)
    owner = np.full(height * width, -1, dtype=np.int64)
    weights = np.zeros((height * width, 3))
    projected = camera.project(points)
    for first in range(0, len(triangles), TRIANGLES):
        corners = projected[triangles[first : first + TRIANGLES]]
        flat = corners[..., :2]
        low = np.maximum(np.ceil(flat.min(axis=1)), 0).astype(np.int64)
        high = np.minimum(np.floor(flat.max(axis=1)), [width - 1, height - 1]).astype(np.int64)
        span = high - low + 1
        (rows,) = np.nonzero((span > 0).all(axis=1))  # the others lie between pixel centres
        counts = span[rows].prod(axis=1)
        ends = np.cumsum(counts)
        start = 0
        while start < len(rows):
            before = ends[start - 1] if start else 0
            stop = max(start + 1, int(np.searchsorted(ends, before + CANDIDATES, side="right")))
            part, n = rows[start:stop], counts[start:stop]
            start = stop
            which = np.repeat(part, n)
            number = np.arange(n.sum()) - np.repeat(np.cumsum(n) - n, n)
            x = low[which, 0] + number % span[which, 0]
            y = low[which, 1] + number // span[which, 0]
            a, b, c = (corners[which, i] for i in range(3))
            double_area = (b[:, 0] - a[:, 0]) * (c[:, 1] - a[:, 1]) - (c[:, 0] - a[:, 0]) * (b[:, 1] - a[:, 1])
            safe = np.where(double_area == 0, 1.0, double_area)
            w1 = ((x - a[:, 0]) * (c[:, 1] - a[:, 1]) - (c[:, 0] - a[:, 0]) * (y - a[:, 1])) / safe
            w2 = ((b[:, 0] - a[:, 0]) * (y - a[:, 1]) - (x - a[:, 0]) * (b[:, 1] - a[:, 1])) / safe
            w0 = 1 - w1 - w2
            near = w0 * a[:, 2] + w1 * b[:, 2] + w2 * c[:, 2]
            pixel = y * width + x
            inside = (np.minimum(np.minimum(w0, w1), w2) >= -1e-9) & (double_area != 0) & (near > nearest[pixel])
            (seen,) = np.nonzero(inside)
            seen = seen[np.argsort(near[seen], kind="stable")]  # of several on one pixel the nearest is set last
            at = pixel[seen]
            nearest[at] = near[seen]
            owner[at] = first + which[seen]
            weights[at] = np.stack([w0[seen], w1[seen], w2[seen]], axis=1)
    covered = owner >= 0
    shown = triangles[np.maximum(owner, 0)]
    corners = points[shown].astype(np.float64)
    normals = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
    length = np.linalg.norm(normals, axis=1)
    facing = np.abs(normals @ camera.axes[2]) / np.where(length > 0, length, 1.0)
    if cells is not None:
        shown, weights = cells[np.maximum(owner, 0)][:, None], covered[:, None].astype(np.float64)
    shape = (height, width, shown.shape[1])
    return Shown(
        shown.reshape(shape), weights.reshape(shape), facing.reshape(camera.shape), covered.reshape(camera.shape)
    )
