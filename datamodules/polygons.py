"""Surfaces of polygons as fans of triangles: canonical order, area vectors, averages, draws.

A surface of n points and f polygons is ``points`` (n, 3) float32, ``triangles`` (t, 3) int32 and ``starts`` (f+1,)
int32: polygon i is the fan of the triangles ``starts[i]`` to ``starts[i+1]-1``, whose j-th has the polygon's corners
0, j+1 and j+2. Any of the arrays may be a memory map: drawing some triangles reads their rows alone. Passes over a
whole surface go in blocks of bounded memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

BLOCK = 1 << 18  # polygons worked on at once: about 100 MB of temporaries
SHADOW_LINES = 4000  # across a shadow: its area is right to about one part in as many
BAND = 32  # lines worked on at once


def fans(offsets: np.ndarray, connectivity: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``starts`` and ``triangles`` from VTK's offsets (f+1,) and connectivity.

    Each polygon's fan begins at its corner of the smallest index: turning or reversing a polygon leaves its triangles
    the same but for their winding.
    """
    starts = (offsets - 2 * np.arange(len(offsets))).astype(np.int32)
    triangles = np.empty((int(starts[-1]), 3), dtype=np.int32)
    for rows, size in _equal_sizes(starts, BLOCK):
        corners = connectivity[offsets[rows, None] + np.arange(size)]
        first = corners.argmin(axis=1)
        turned = (first[:, None] + np.arange(size)) % size
        _set_corners(triangles, starts[rows], np.take_along_axis(corners, turned, axis=1))
    return starts, triangles


def reverse_winding(starts: np.ndarray, triangles: np.ndarray) -> None:
    """Reverse each polygon, in place; its first corner stays first."""
    for rows, corners in polygons(starts, triangles):
        corners[:, 1:] = corners[:, :0:-1].copy()
        _set_corners(triangles, starts[rows], corners)


def polygons(starts: np.ndarray, triangles: np.ndarray, block: int = BLOCK) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """All polygons in groups of equal size k: (rows (m,), corner indices (m, k) int32)."""
    for rows, size in _equal_sizes(starts, block):
        yield rows, _corners(triangles, starts[rows], size)


def _equal_sizes(starts: np.ndarray, block: int) -> Iterator[tuple[np.ndarray, int]]:
    n = len(starts) - 1
    for begin in range(0, n, block):
        sizes = np.diff(starts[begin : min(begin + block, n) + 1]) + 2
        for size in np.unique(sizes):
            yield np.flatnonzero(sizes == size) + begin, int(size)


def _corners(triangles: np.ndarray, first: np.ndarray, size: int) -> np.ndarray:
    corners = np.empty((len(first), size), dtype=triangles.dtype)
    corners[:, :3] = triangles.take(first, axis=0)
    for corner in range(3, size):
        corners[:, corner] = triangles.take(first + (corner - 2), axis=0)[:, 2]
    return corners


def _set_corners(triangles: np.ndarray, first: np.ndarray, corners: np.ndarray) -> None:
    for j in range(corners.shape[1] - 2):
        triangles[first + j] = corners[:, [0, j + 1, j + 2]]


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
    """Areas of triangles (t, 3, 3), in their precision."""
    a = (corners[:, 1] - corners[:, 0]).T
    b = (corners[:, 2] - corners[:, 0]).T
    # Written out: several times as fast as np.cross and np.linalg.norm.
    x, y, z = a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]
    return np.sqrt(x * x + y * y + z * z) / 2


def fan_area(corners: np.ndarray) -> float:
    """Total area of the fans of polygons (m, k, 3) [m^2]."""
    edges = corners[:, 1:] - corners[:, :1]
    return float(np.linalg.norm(np.cross(edges[:, :-1], edges[:, 1:]), axis=-1).sum() / 2)


def shadow_area(points: np.ndarray, triangles: np.ndarray, axis: int = 0) -> float:
    """Area of the union of triangles seen along an axis [m^2]: of a car along x its frontal area.

    Lines at :data:`SHADOW_LINES` heights across the shadow: along a line each triangle covers an interval, the union of
    these is exact. Winding, openings and parts behind others do not matter.

    Args:
        points: (n, 3) [m].
        triangles: (t, 3).
        axis: the direction of view.
    """
    across, up = (axis + 1) % 3, (axis + 2) % 3
    y, z = points[:, across].astype(np.float64), points[:, up].astype(np.float64)
    y, low = y - y.min(), z.min()
    step = np.ptp(z) / SHADOW_LINES
    if step == 0 or not len(triangles):
        return 0.0
    z = (z - low) / step - 0.5  # lines at whole numbers
    apart = 2 * y.max() + 1  # intervals of different lines stand this far apart
    first, last = z[triangles[:, 0]], z[triangles[:, 0]]
    for corner in (1, 2):
        first, last = np.minimum(first, z[triangles[:, corner]]), np.maximum(last, z[triangles[:, corner]])
    first, last = np.ceil(first).astype(np.int32), np.floor(last).astype(np.int32)
    (rows,) = np.nonzero(last >= first)  # the others lie between lines
    # By size, and within a size by height: what crosses a band of lines stands together.
    heights = last[rows] - first[rows] + 1
    size = np.ceil(np.log2(heights)).astype(np.int64)
    keys = size * (3 * SHADOW_LINES) + first[rows]
    order = np.argsort(keys)
    rows, keys = rows[order], keys[order]
    first, last = first[rows], last[rows]
    sizes, total = np.unique(size), 0.0
    for line in range(0, SHADOW_LINES, BAND):
        here = sizes * (3 * SHADOW_LINES) + line
        begins, ends = np.searchsorted(keys, here - 2**sizes + 1), np.searchsorted(keys, here + BAND)
        near = np.concatenate([*map(np.arange, begins, ends), np.arange(0)])
        low = np.maximum(first[near], line)
        counts = np.maximum(np.minimum(last[near], line + BAND - 1) - low + 1, 0)
        lines = np.repeat(low - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
        begin, end = _crossings(y, z, triangles[np.repeat(rows[near], counts)], lines)
        total += _union(begin, end, (lines - line) * apart)
    return total * step


def _crossings(y: np.ndarray, z: np.ndarray, triangles: np.ndarray, lines: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where triangles (m, 3) begin and end along lines z = const (m,) that cross them."""
    begin, end = np.full(len(lines), np.inf), np.full(len(lines), -np.inf)
    for a, b in ((0, 1), (1, 2), (2, 0)):
        low, high = triangles[:, a], triangles[:, b]
        low, high = np.where(z[low] <= z[high], low, high), np.where(z[low] <= z[high], high, low)
        crossed = (z[low] <= lines) & (lines <= z[high])
        rise = z[high] - z[low]
        share = np.where(rise > 0, (lines - z[low]) / np.where(rise > 0, rise, 1), 0)
        here = y[low] + share * (y[high] - y[low])
        flat = np.where(rise > 0, here, y[high])  # an edge along the line covers all of itself
        begin = np.where(crossed, np.minimum(begin, np.minimum(here, flat)), begin)
        end = np.where(crossed, np.maximum(end, np.maximum(here, flat)), end)
    return begin, end


def _union(begin: np.ndarray, end: np.ndarray, shift: np.ndarray) -> float:
    """Length of the union of intervals; those of different shifts are apart."""
    begin, end = begin + shift, end + shift
    order = np.argsort(begin)
    begin, end = begin[order], np.maximum.accumulate(end[order])
    covered = np.concatenate([[-np.inf], end[:-1]])
    return float((end - np.maximum(begin, covered)).clip(min=0).sum())


def drawn_centres(points: np.ndarray, starts: np.ndarray, triangles: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Means of the vertices of some polygons, (m, 3) float32 [m]."""
    centres = np.empty((len(rows), 3), dtype=np.float32)
    for begin in range(0, len(rows), BLOCK):
        part = rows[begin : begin + BLOCK]
        first = starts.take(part)
        sizes = starts.take(part + 1) - first + 2
        for size in np.flatnonzero(np.bincount(sizes)):
            some = np.flatnonzero(sizes == size)
            corners = points.take(_corners(triangles, first[some], int(size)), axis=0)
            total = corners[:, 0].astype(np.float64)
            for corner in range(1, size):  # NumPy's mean over so short an axis takes several times as long
                total += corners[:, corner]
            centres[begin + some] = total / size
    return centres


def averages_at_points(n_points: int, starts: np.ndarray, triangles: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Plain means over the polygons that meet at each point, (n, k) float32; NaN at points of no polygon.

    Args:
        n_points: number of points n.
        starts: (f+1,).
        triangles: (t, 3).
        values: columns of values of the polygons, (f, k).
    """
    count, *totals = sums_at_points(n_points, starts, triangles, [None, *values.T])
    count[count == 0] = np.nan
    out = np.empty((n_points, len(totals)), dtype=np.float32)
    for column, total in enumerate(totals):
        out[:, column] = total / count
    return out


def sums_at_points(
    n_points: int, starts: np.ndarray, triangles: np.ndarray, columns: Sequence[np.ndarray | None]
) -> list[np.ndarray]:
    """For each column (f,) of values, or None for ones, its sums over the polygons at each point, (n,) float64."""
    totals = [np.zeros(n_points) for _ in columns]
    for rows, corners in polygons(starts, triangles, 16 * BLOCK):
        where = corners.ravel()
        for total, column in zip(totals, columns, strict=True):
            weights = None if column is None else np.repeat(column[rows].astype(np.float64), corners.shape[1])
            total += np.bincount(where, weights=weights, minlength=n_points)
    return totals


def inverted_edges(n_points: int, starts: np.ndarray, triangles: np.ndarray) -> float:
    """Fraction of edges that two polygons run through in the same direction; 0 if all faces look to one side."""
    keys = _edge_keys(n_points, starts, triangles)
    return 2 * float(np.count_nonzero(keys[1:] == keys[:-1])) / len(keys)


def edge_uses(n_points: int, starts: np.ndarray, triangles: np.ndarray) -> tuple[int, int, int]:
    """Numbers of edges: all, those of one polygon alone (the rims of openings), those of three polygons and more."""
    edges = _edge_keys(n_points, starts, triangles)
    edges = edges[edges >= 0] >> 1
    if not len(edges):
        return 0, 0, 0
    firsts = np.flatnonzero(np.concatenate([[True], edges[1:] != edges[:-1]]))
    uses = np.diff(np.append(firsts, len(edges)))
    return len(uses), int((uses == 1).sum()), int((uses > 2).sum())


def _edge_keys(n_points: int, starts: np.ndarray, triangles: np.ndarray) -> np.ndarray:
    """For every corner of every polygon a key of the edge that begins there: twice the edge's plus its direction.

    Sorted; an edge from a point to itself belongs to a degenerate face and has a negative key that no other has.
    """
    keys = np.empty(len(triangles) + 2 * (len(starts) - 1), dtype=np.int64)
    filled = 0
    for _, corners in polygons(starts, triangles):
        start = corners.astype(np.int64)
        end = np.roll(start, -1, axis=1)
        low, high = np.minimum(start, end), np.maximum(start, end)
        key = 2 * (low * n_points + high) + (start < end)
        places = np.arange(filled, filled + key.size).reshape(key.shape)
        keys[filled : filled + key.size] = np.where(start == end, -1 - places, key).ravel()
        filled += key.size
    keys.sort()
    return keys
