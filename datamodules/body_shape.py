"""Surfaces of bodies from STL, VTP, OBJ and PLY files, checked as cars and mended.

A surface is pyvista ``PolyData`` of polygons. As in the DrivAerML data lengths are in meters, the flow comes along +x,
z is up, and the front axle stands at x = 0, so that the nose is at about -0.85.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pyvista as pv

from datamodules import polygons
from datamodules.drivaerml_source import MAX_INVERTED, NO_SLIP_FLOOR, SurfaceIntegrals
from datamodules.probes import inside_body
from datamodules.shape_report import ShapeReport
from datamodules.vtk_io import polygon_corners, read_mesh

SUFFIXES = (".stl", ".vtp", ".obj", ".ply", ".vtk")
REPAIRS = (
    "units",
    "up",
    "flow",
    "position",
    "duplicates",
    "degenerate",
    "solids",
    "holes",
    "normals",
)
UNITS = {"m": 1.0, "mm": 1e-3, "cm": 1e-2, "in": 0.0254, "ft": 0.3048}
"""Lengths of units [m]."""

LENGTHS = (2.0, 30.0)  # of vehicles [m]
TYPICAL_LENGTH = 4.6
NOSE = -0.85  # where a car's lowest x is [m]
MAX_PARTS = 100  # of which it is found out whether they are inside another


def read_body(path: Path) -> pv.PolyData:
    """A surface from a file, without its arrays.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file cannot be read, or holds no polygons; the message says what was found.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected a surface ({', '.join(SUFFIXES)})")
    if path.suffix.lower() == ".ply":
        _refuse_short_ply(path)
    xml = path.suffix.lower() == ".vtp"
    return polygons_only(read_mesh(path, () if xml else None, () if xml else None), str(path))


def polygons_only(mesh: pv.DataSet, name: str) -> pv.PolyData:
    """The polygons of a mesh as a surface of their own, without arrays; its other cells are left out.

    Raises:
        ValueError: there are none, or a coordinate is NaN or infinite.
    """
    surface = mesh if isinstance(mesh, pv.PolyData) else mesh.extract_surface()
    if surface.GetNumberOfPolys() == 0 and surface.GetNumberOfStrips() == 0:
        raise ValueError(f"{name}: no polygons among {mesh.n_cells} cells; expected the surface of a body")
    if surface.GetNumberOfStrips():
        surface = surface.triangulate()
    bare = pv.PolyData()
    bare.points = np.asarray(surface.points)
    bare.SetPolys(surface.GetPolys())
    if not np.isfinite(bare.points).all():
        raise ValueError(f"{name}: {(~np.isfinite(bare.points)).any(axis=1).sum()} points are NaN or infinite")
    return bare


def _refuse_short_ply(path: Path) -> None:
    """Raise a ValueError for a PLY file that is shorter than its header says; VTK would read past its end."""
    sizes = {"char": 1, "uchar": 1, "int8": 1, "uint8": 1, "short": 2, "ushort": 2, "int16": 2, "uint16": 2}
    sizes |= dict.fromkeys(("int", "uint", "int32", "uint32", "float", "float32"), 4) | {"double": 8, "float64": 8}
    with path.open("rb") as file:
        head = file.read(1 << 16)
    end = re.search(rb"end_header\r?\n", head)
    if not head.startswith(b"ply") or end is None:
        raise ValueError(f"{path}: not a PLY file: its header does not begin with 'ply' and close with 'end_header'")
    least, rows = 0, 0
    count = 0
    for line in head[: end.start()].decode("ascii", "replace").splitlines():
        words = line.split()
        if words[:1] == ["element"] and len(words) == 3 and words[2].isdigit():
            count = int(words[2])
            rows += count
        elif words[:1] == ["property"]:
            if words[1] == "list":  # an empty list at least, and three corners of a face
                least += count * (sizes.get(words[2], 1) + 3 * sizes.get(words[3], 1))
            else:
                least += count * sizes.get(words[1], 1)
    found = path.stat().st_size - end.end()
    if b"format ascii" in head:
        with path.open("rb") as file:
            file.seek(end.end())
            found, least = sum(1 for line in file if line.strip()), rows
    if found < least:
        kind = "lines" if b"format ascii" in head else "bytes"
        raise ValueError(
            f"{path}: the file is truncated: its header promises {least} {kind} or more, found {found}. Copy it again"
        )


class _Faces:
    """The faces of a surface as the checks need them: points of equal coordinates are one.

    Attributes:
        points: (n, 3), starts and triangles as in :mod:`datamodules.polygons`, and how many points were merged.
    """

    def __init__(self, mesh: pv.PolyData, name: str, merge: bool = True) -> None:
        self.offsets, connectivity = polygon_corners(mesh, name)
        points = np.asarray(mesh.points, dtype=np.float32) + np.float32(0)  # no negative zeros
        self.n_merged = 0
        if merge:
            keys = np.ascontiguousarray(points).view(np.dtype((np.void, 12))).ravel()
            _, first, place = np.unique(keys, return_index=True, return_inverse=True)
            order = np.argsort(first, kind="stable")  # points keep the order of the file
            rank = np.empty_like(order)
            rank[order] = np.arange(len(order))
            self.n_merged = len(points) - len(first)
            points, connectivity = points[first[order]], rank[place.ravel()][connectivity]
        self.points, self.connectivity = points, connectivity.astype(np.int64)
        self.starts, self.triangles = polygons.fans(self.offsets, self.connectivity)

    def surface(self, keep: np.ndarray | None = None) -> pv.PolyData:
        """The faces, or some of them (a mask), as a mesh with the points they use."""
        offsets, connectivity, points = self.offsets, self.connectivity, self.points
        if keep is not None:
            sizes = np.diff(offsets)
            connectivity = connectivity[np.repeat(keep, sizes)]
            offsets = np.concatenate([[0], np.cumsum(sizes[keep])])
            used, connectivity = np.unique(connectivity, return_inverse=True)
            points = points[used]
        return build_surface(points, offsets, connectivity)


def build_surface(points: np.ndarray, offsets: np.ndarray, connectivity: np.ndarray) -> pv.PolyData:
    """A surface from points (n, 3) and VTK's offsets and connectivity of its polygons."""
    mesh = pv.PolyData()
    mesh.points = points
    cells = pv.CellArray()
    cells.SetData(pv.convert_array(offsets.astype(np.int64)), pv.convert_array(connectivity.astype(np.int64)))
    mesh.SetPolys(cells)
    return mesh


def examine_body(mesh: pv.PolyData, report: ShapeReport, unit: str | None = None) -> pv.PolyData:
    """A car's surface, checked and mended.

    Args:
        mesh: as read; not changed.
        report: takes what is found; knows what to mend.
        unit: the file's unit of length, one of :data:`UNITS`; None takes meters, if that can be.

    Raises:
        ShapeError: something was found that was neither mended nor accepted.
        ValueError: the surface has no area, or the unit is unknown.
    """
    if unit is not None and unit not in UNITS:
        raise ValueError(f"units: expected one of {', '.join(UNITS)}, found {unit!r}")
    name = report.shape
    mesh = mesh.copy()
    mesh.points = np.asarray(mesh.points, dtype=np.float32)
    if unit is not None and unit != "m":
        mesh.points *= np.float32(UNITS[unit])
        report.note("units", f"lengths were converted from {unit} to m")
    _examine_units(mesh, report)
    _examine_axes(mesh, report)
    _examine_position(mesh, report)

    faces = _Faces(mesh, name)
    if faces.n_merged and report.warn(
        "duplicates", f"{faces.n_merged} of {mesh.n_points} points have the coordinates of another", "merge them"
    ):
        mesh = faces.surface()
    mesh, faces = _examine_degenerate(mesh, faces, report)
    mesh, faces = _examine_parts(mesh, faces, report)
    mesh, faces = _examine_openings(mesh, faces, report)
    mesh = _examine_normals(mesh, faces, report)
    report.refuse()
    return mesh


def _extents(mesh: pv.PolyData) -> np.ndarray:
    bounds = np.array(mesh.bounds).reshape(3, 2)
    return bounds[:, 1] - bounds[:, 0]


def _examine_units(mesh: pv.PolyData, report: ShapeReport) -> None:
    length = float(_extents(mesh).max())
    if length == 0:
        raise ValueError(f"{report.shape}: all points are at one place; expected the surface of a body")
    if LENGTHS[0] <= length <= LENGTHS[1]:
        return
    fits = {unit: factor for unit, factor in UNITS.items() if LENGTHS[0] <= length * factor <= LENGTHS[1]}
    likely = min(fits, key=lambda unit: abs(np.log(length * fits[unit] / TYPICAL_LENGTH)), default=None)
    expected = f"expected {LENGTHS[0]:g} to {LENGTHS[1]:g} m"
    if likely is None:
        remedy = "name the unit with --units, or scale the shape to full size"
        report.fault("units", f"the longest extent is {length:.4g}, {expected}; no usual unit fits", remedy)
        if "units" in report.names("mended"):
            raise ValueError(f"{report.shape}: units cannot be mended: a length of {length:.4g} fits no unit; {remedy}")
        return
    words = {"mm": "millimeters", "cm": "centimeters", "in": "inches", "ft": "feet"}[likely]
    found = f"the longest extent is {length:.4g}, {expected}: {words}?"
    if report.fault("units", found, f"scale by {UNITS[likely]:g} (or name another unit with --units)"):
        mesh.points *= np.float32(UNITS[likely])


def _examine_axes(mesh: pv.PolyData, report: ShapeReport) -> None:
    """Which axis is which: a car is a mirror image of itself across, longest along the flow."""
    extents = _extents(mesh)
    along = int(extents.argmax())
    others = [axis for axis in range(3) if axis != along]
    if extents[along] < 1.25 * extents[others].max():
        report.note("flow", "no extent is clearly the longest; whether x is the flow's direction is unknown")
        return
    asymmetry = np.array([_asymmetry(mesh, axis) for axis in others])
    first, second = others
    if max(asymmetry) > 0.05 and min(asymmetry) < 0.4 * max(asymmetry):
        up = second if asymmetry[0] < asymmetry[1] else first
        reason = "the body is its own mirror image across the other"
    elif max(extents[others]) > 1.25 * min(extents[others]):
        up = first if extents[first] < extents[second] else second
        reason = "it is the shortest"
    else:
        up = 2 if along != 2 else 1
        reason = ""
    names = "xyz"
    faults = []
    if along != 0:
        found = f"the body is longest along {names[along]} ({extents[along]:.3g} m), expected x, the flow's direction"
        faults.append(("flow", found, f"turn {names[along]} to x"))
    if up != 2 and reason:
        found = f"{names[up]} seems to point up ({reason}), expected z"
        faults.append(("up", found, f"turn {names[up]} to z"))
    answers = [report.fault(*fault) for fault in faults]
    if faults and all(answers):
        turn = np.zeros((3, 3), dtype=np.float32)
        turn[0, along] = turn[2, up] = 1
        turn[1] = np.cross(turn[2], turn[0])
        mesh.points = np.asarray(mesh.points) @ turn.T
    if faults:
        report.note("nose", "whether the nose looks upstream (to low x) cannot be told: see the picture")


def _asymmetry(mesh: pv.PolyData, axis: int) -> float:
    """How far the area's cumulative distribution along an axis is from that of its mirror image, 0 to 1 on average."""
    sizes = np.asarray(mesh.compute_cell_sizes(length=False, volume=False).cell_data["Area"], dtype=np.float64)
    centers = np.asarray(mesh.cell_centers().points)[:, axis]
    low, high = mesh.bounds[2 * axis : 2 * axis + 2]
    shares, _ = np.histogram(centers, bins=60, range=(low, high), weights=sizes)
    below = np.concatenate([[0.0], np.cumsum(shares) / max(shares.sum(), 1e-30)])
    return float(np.abs(below + below[::-1] - 1).mean())


def _examine_position(mesh: pv.PolyData, report: ShapeReport) -> None:
    low, high = np.array(mesh.bounds).reshape(3, 2).T
    shift = np.array([NOSE - low[0], -(low[1] + high[1]) / 2, 0])
    # The front axle's place varies by decimeters between cars.
    off = [
        f"{axis} {text}"
        for axis, text, bad in (
            ("x", f"begins at {low[0]:.3g} m, expected about {NOSE}: the front axle at 0", abs(shift[0]) > 0.6),
            ("y", f"has its middle at {-shift[1]:.3g} m, expected 0", abs(shift[1]) > 0.1),
        )
        if bad
    ]
    if not off:
        return
    found = "; ".join(off) + "; the floors under and ahead of the car stand still"
    remedy = f"move the body by ({shift[0]:.3g}, {shift[1]:.3g}, 0) m"
    outside = low[0] < NO_SLIP_FLOOR[0] or high[0] > NO_SLIP_FLOOR[1]
    if (report.fault if outside else report.warn)("position", found, remedy):
        mesh.points += shift.astype(np.float32)


def _examine_degenerate(mesh: pv.PolyData, faces: _Faces, report: ShapeReport) -> tuple[pv.PolyData, _Faces]:
    areas = np.zeros(mesh.n_cells)
    for rows, corners in polygons.polygons(faces.starts, faces.triangles):
        vectors = polygons.centres_and_area_vectors(faces.points[corners].astype(np.float64))[1]
        areas[rows] = np.linalg.norm(vectors, axis=1)
    if areas.sum() == 0:
        raise ValueError(f"{report.shape}: all faces have an area of zero")
    thin = areas <= 1e-12 * areas.mean()
    if thin.any() and report.warn("degenerate", f"{thin.sum()} of {len(thin)} faces have no area", "remove them"):
        mesh = _Faces(mesh, report.shape, merge=False).surface(~thin)
        faces = _Faces(mesh, report.shape)
    # Random weights: their sum over the corners names a face whatever its order.
    weights = np.random.default_rng(0).integers(0, 2**62, len(faces.points), dtype=np.int64)
    sums = np.add.reduceat(weights[faces.connectivity], faces.offsets[:-1])
    _, first = np.unique(sums, return_index=True)
    twice = mesh.n_cells - len(first)
    if twice and report.warn("duplicates", f"{twice} of {mesh.n_cells} faces are there twice", "keep one of each"):
        keep = np.zeros(mesh.n_cells, dtype=bool)
        keep[first] = True
        mesh = _Faces(mesh, report.shape, merge=False).surface(keep)
        faces = _Faces(mesh, report.shape)
    return mesh, faces


def _parts(faces: _Faces) -> np.ndarray:
    """The number of the connected part of every face, by falling number of faces."""
    labels = np.asarray(faces.surface().connectivity("all").cell_data["RegionId"])
    order = np.argsort(np.argsort(-np.bincount(labels), kind="stable"))
    return order[labels]


def _examine_parts(mesh: pv.PolyData, faces: _Faces, report: ShapeReport) -> tuple[pv.PolyData, _Faces]:
    parts = _parts(faces)
    n = int(parts.max()) + 1
    if n == 1:
        return mesh, faces
    hull = faces.surface(parts == 0).triangulate()
    inner = []
    for part in range(1, min(n, MAX_PARTS + 1)):
        corners = faces.connectivity[np.repeat(parts == part, np.diff(faces.offsets))]
        points = faces.points[np.unique(corners)]
        points = points[:: max(1, len(points) // 40)]
        if inside_body(points, hull).all():
            inner.append(part)
    report.note("solids", f"{n} connected parts, taken as one surface")
    if inner and report.warn(
        "solids", f"{len(inner)} of {n} parts lie inside the largest, where no air flows", "leave them out"
    ):
        mesh = _Faces(mesh, report.shape, merge=False).surface(~np.isin(parts, inner))
        faces = _Faces(mesh, report.shape)
    return mesh, faces


def _examine_openings(mesh: pv.PolyData, faces: _Faces, report: ShapeReport) -> tuple[pv.PolyData, _Faces]:
    n_edges, rims, crowded = polygons.edge_uses(len(faces.points), faces.starts, faces.triangles)
    if crowded:
        report.note("edges", f"{crowded} of {n_edges} edges belong to three faces or more")
    if rims and report.warn(
        "holes", f"the surface is open: {rims} of {n_edges} edges belong to one face only", "close it with flat faces"
    ):
        filled = faces.surface().fill_holes(1e6)
        mesh = polygons_only(
            filled.compute_normals(
                point_normals=False, cell_normals=True, consistent_normals=True, split_vertices=False
            ),
            report.shape,
        )
        faces = _Faces(mesh, report.shape)
        _, left, _ = polygons.edge_uses(len(faces.points), faces.starts, faces.triangles)
        if left:
            report.note("holes", f"{left} edges could not be closed")
    return mesh, faces


def _examine_normals(mesh: pv.PolyData, faces: _Faces, report: ShapeReport) -> pv.PolyData:
    name = report.shape
    inverted = polygons.inverted_edges(len(faces.points), faces.starts, faces.triangles)
    mixed = inverted > MAX_INVERTED
    found = f"at {inverted:.1%} of the edges the two faces look to opposite sides"
    if mixed and report.fault("normals", found, "turn faces alike, outward"):
        turned = faces.surface().compute_normals(
            point_normals=False, cell_normals=True, consistent_normals=True, split_vertices=False
        )
        mesh = polygons_only(turned, name)
        faces = _Faces(mesh, name)
    backward = _backward(faces)
    volume = SurfaceIntegrals(faces.points, faces.starts, faces.triangles).volume
    if mixed and "normals" in report.names("mended"):
        return _reversed(mesh, backward, name)
    if backward.all() and report.warn(
        "normals", "faces look into the body; sources take their opposite (orientation)", "turn them outward"
    ):
        return _reversed(mesh, backward, name)
    if not mixed and backward.any() and not backward.all():
        share = min(backward.mean(), 1 - backward.mean())
        found = f"some connected parts look into the body and others out of it ({share:.1%} of the faces)"
        if report.fault("normals", found, "turn all outward") and "normals" in report.names("mended"):
            return _reversed(mesh, backward, name)
    if not backward.any() and volume <= 0:
        report.note("normals", "the enclosed volume is not positive; whether faces look outward is unknown")
    return mesh


def _backward(faces: _Faces) -> np.ndarray:
    """Whether each face belongs to a connected part that looks inward, by the sign of the volume it encloses."""
    parts = _parts(faces)
    backward = np.zeros(len(parts), dtype=bool)
    if parts.max() > MAX_PARTS:  # of a heap of loose pieces the sum is what counts
        parts = np.zeros_like(parts)
    sizes = np.diff(faces.starts)
    for part in range(int(parts.max()) + 1):
        mask = parts == part
        starts = np.concatenate([[0], np.cumsum(sizes[mask])])
        triangles = faces.triangles[np.repeat(mask, sizes)]
        used, corners = np.unique(triangles, return_inverse=True)
        sums = SurfaceIntegrals(faces.points[used], starts, corners.reshape(-1, 3))
        if sums.volume < -1e-6 * sums.area**1.5:
            backward[mask] = True
    return backward


def _reversed(mesh: pv.PolyData, which: np.ndarray, name: str) -> pv.PolyData:
    """A surface with some faces (a mask) wound the other way."""
    offsets, connectivity = polygon_corners(mesh, name)
    connectivity = connectivity.copy()
    sizes = np.diff(offsets)
    for size in np.unique(sizes[which]):
        rows = offsets[:-1][which & (sizes == size)][:, None] + np.arange(size)
        connectivity[rows[:, 1:]] = connectivity[rows[:, :0:-1]]
    return build_surface(np.asarray(mesh.points), offsets, connectivity)


def body_arrays(mesh: pv.PolyData, name: str, l_ref: float, a_ref: float | None) -> dict[str, np.ndarray]:
    """A surface as the arrays that :class:`~datamodules.drivaerml_source.DrivAerMLSource` draws samples from.

    Its faces are wound outward there, whatever the mesh's winding; all fields are NaN.

    Args:
        mesh: the surface [m].
        name: its name, for messages.
        l_ref: reference length [m].
        a_ref: the body's own reference area [m^2], if known.
    """
    offsets, connectivity = polygon_corners(mesh, name)
    points = np.asarray(mesh.points, dtype=np.float32)
    starts, triangles = polygons.fans(offsets, connectivity)
    sums = SurfaceIntegrals(points, starts, triangles)
    winding = "outward" if sums.volume >= 0 else "inward"
    if winding == "inward":
        polygons.reverse_winding(starts, triangles)
    facts = {
        "winding": winding,
        "shear_sign": -1,
        "area": sums.area,
        "ground": float(points[:, 2].min()),
        "a_ref": a_ref,
        "l_ref": l_ref,
        "solver": {},
    }
    unknown = np.full((1, 4), np.nan, dtype=np.float32)
    return {
        "points": points,
        "starts": starts,
        "triangles": triangles,
        "cell": np.broadcast_to(unknown, (mesh.n_cells, 4)),
        "point": np.broadcast_to(unknown, (mesh.n_points, 4)),
        "facts": np.frombuffer(json.dumps(facts).encode(), dtype=np.uint8),
    }
