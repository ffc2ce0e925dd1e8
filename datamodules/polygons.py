"""Surfaces of polygons in compact arrays: canonical order, area vectors, fans of triangles, averages.

A surface of n points and f polygons is ``points`` (n, 3) float32, ``connectivity`` int32, the corners of all polygons
one after the other, and ``starts`` (f+1,) int32: polygon i fans into the triangles ``starts[i]`` to ``starts[i+1]-1``
(corners 0, j+1, j+2 for its j-th), and its corners begin at ``starts[i] + 2 i``. Any of the arrays may be
a memory map: drawing some faces reads their rows alone. Passes over a whole surface go in blocks of bounded memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

BLOCK = 1 << 18  # polygons worked on at once: about 100 MB of temporaries


def fan_starts(offsets: np.ndarray) -> np.ndarray:
    """``starts`` from VTK's offsets of the corners, (f+1,)."""
    return (offsets - 2 * np.arange(len(offsets))).astype(np.int32)


def corner_offsets(starts: np.ndarray, begin: int, end: int) -> np.ndarray:
    """Where the corners of polygons ``begin`` to ``end`` (that one included) begin, int64."""
    return starts[begin : end + 1].astype(np.int64) + 2 * np.arange(begin, end + 1)


def blocks(starts: np.ndarray, block: int = BLOCK) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """All polygons in groups of equal size k: (rows (m,), positions of their corners in the connectivity (m, k))."""
    n = len(starts) - 1
    for begin in range(0, n, block):
        end = min(begin + block, n)
        offsets = corner_offsets(starts, begin, end)
        sizes = np.diff(offsets)
        for size in np.unique(sizes):
            local = np.flatnonzero(sizes == size)
            yield local + begin, offsets[local, None] + np.arange(size)


def canonical_order(starts: np.ndarray, connectivity: np.ndarray) -> None:
    """Turn each polygon's corners, in place, so that the smallest index comes first.

    Reversing a polygon then leaves its fan of triangles the same.
    """
    for _, positions in blocks(starts):
        corners = connectivity[positions]
        first = corners.argmin(axis=1)
        turned = (first[:, None] + np.arange(corners.shape[1])) % corners.shape[1]
        connectivity[positions] = np.take_along_axis(corners, turned, axis=1)


def reverse_winding(starts: np.ndarray, connectivity: np.ndarray) -> None:
    """Reverse each polygon, in place; its first corner stays first."""
    for _, positions in blocks(starts):
        connectivity[positions[:, 1:]] = connectivity[positions[:, :0:-1]]


def centres_and_area_vectors(corners: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Means of the vertices c and area vectors 1/2 sum_i (v_i - c) x (v_(i+1) - c) of polygons.

    Args:
        corners: (m, k, 3) float64 [m].

    Returns:
        (m, 3) [m] and (m, 3) [m^2].
    """
    centres = corners.mean(axis=1)
    spokes = corners - centres[:, None]
    return centres, np.cross(spokes, np.roll(spokes, -1, axis=1)).sum(axis=1) / 2


def triangle_areas(corners: np.ndarray) -> np.ndarray:
    """Areas of triangles (..., 3, 3), float64."""
    edges = corners[..., 1:, :] - corners[..., :1, :]
    return np.linalg.norm(np.cross(edges[..., 0, :], edges[..., 1, :]), axis=-1) / 2


def fan_area(corners: np.ndarray) -> float:
    """Total area of the fans of polygons (m, k, 3) [m^2]."""
    edges = corners[:, 1:] - corners[:, :1]
    return float(np.linalg.norm(np.cross(edges[:, :-1], edges[:, 1:]), axis=-1).sum() / 2)


def drawn_triangles(starts: np.ndarray, connectivity: np.ndarray, triangles: np.ndarray) -> np.ndarray:
    """Corner indices of some triangles of the fans, (t, 3) int64, by their numbers in 0 to ``starts[-1]-1``."""
    # Another type than that of starts would make NumPy convert all of it.
    wanted = triangles.astype(starts.dtype)
    polygons = np.searchsorted(starts, wanted, side="right") - 1
    within = wanted - starts[polygons]
    first = starts[polygons].astype(np.int64) + 2 * polygons
    positions = np.stack([first, first + within + 1, first + within + 2], axis=1)
    return connectivity[positions].astype(np.int64)


def drawn_centres(points: np.ndarray, starts: np.ndarray, connectivity: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Means of the vertices of some polygons, (m, 3) float32 [m]."""
    centres = np.empty((len(rows), 3), dtype=np.float32)
    for begin in range(0, len(rows), BLOCK):
        part = rows[begin : begin + BLOCK]
        first = starts[part].astype(np.int64) + 2 * part
        sizes = starts[part + 1] - starts[part] + 2
        for size in np.unique(sizes):
            some = np.flatnonzero(sizes == size)
            corners = connectivity[first[some, None] + np.arange(size)]
            centres[begin + some] = points[corners].mean(axis=1, dtype=np.float64)
    return centres


def averages_at_points(n_points: int, starts: np.ndarray, connectivity: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Plain means over the polygons that meet at each point, float32; NaN at points of no polygon.

    Args:
        n_points: number of points n.
        starts: (f+1,).
        connectivity: corner indices.
        values: scalars (f,) or vectors (f, k) of the polygons.
    """
    columns = values.reshape(len(values), -1)
    totals = sums_at_points(n_points, starts, connectivity, [None, *(columns[:, i] for i in range(columns.shape[1]))])
    count = next(totals)
    count[count == 0] = np.nan
    out = np.empty((n_points, columns.shape[1]), dtype=np.float32)
    for column, total in enumerate(totals):
        out[:, column] = total / count
    return out.reshape(n_points, *values.shape[1:])


def sums_at_points(
    n_points: int, starts: np.ndarray, connectivity: np.ndarray, columns: list[np.ndarray | None]
) -> Iterator[np.ndarray]:
    """For each column (f,) of values, or None for ones, its sums over the polygons at each point, (n,) float64."""
    for column in columns:
        total = np.zeros(n_points)
        for begin in range(0, len(starts) - 1, 16 * BLOCK):
            end = min(begin + 16 * BLOCK, len(starts) - 1)
            offsets = corner_offsets(starts, begin, end)
            weights = None if column is None else np.repeat(column[begin:end].astype(np.float64), np.diff(offsets))
            total += np.bincount(connectivity[offsets[0] : offsets[-1]], weights=weights, minlength=n_points)
        yield total


def inverted_edges(n_points: int, starts: np.ndarray, connectivity: np.ndarray) -> float:
    """Fraction of edges that two polygons run through in the same direction; 0 if all faces look to one side."""
    keys = np.empty(len(connectivity), dtype=np.int64)
    for _, positions in blocks(starts):
        start = connectivity[positions].astype(np.int64)
        end = np.roll(start, -1, axis=1)
        low, high = np.minimum(start, end), np.maximum(start, end)
        key = 2 * (low * n_points + high) + (start < end)
        # An edge from a point to itself belongs to a degenerate face: a key that no other has.
        keys[positions] = np.where(start == end, -1 - positions, key)
    keys.sort()
    return 2 * float(np.count_nonzero(keys[1:] == keys[:-1])) / len(keys)
