"""Meshes and named arrays in and out of VTK files, checked at the door.

Every error names the file, the array, what was expected and what was found.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyvista as pv


def read_mesh(
    path: str | os.PathLike[str],
    point_arrays: Iterable[str] | None = None,
    cell_arrays: Iterable[str] | None = None,
) -> pv.DataSet:
    """Read a VTK XML file (.vtu, .vtp), or another that VTK reads (.stl, .obj, .ply).

    Args:
        path: the file.
        point_arrays: names of the point arrays to load (VTK XML only); None loads all. Absent names are left to
            :func:`named_array`.
        cell_arrays: the same for cell arrays.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is truncated or no VTK file, or its mesh has no points or no cells.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected a VTK file there. Check the dataset's root folder")
    if path.stat().st_size == 0:
        raise ValueError(f"{path}: the file is empty (0 bytes), expected a VTK file. Download or copy it again")
    try:
        reader = pv.get_reader(str(path))
    except Exception as error:
        raise ValueError(f"{path}: not a readable VTK file ({error}). Expected .vtu or .vtp") from error

    # VTK reports a damaged file through events and then returns what it has.
    problems: list[str] = []

    def note(_source: object, _event: str, message: str = "") -> None:
        text = " ".join(str(message).split())
        # Stored ranges of arrays with NaN or infinity don't parse; the values do and are checked by themselves.
        if "InformationKey" not in text:
            problems.append(text)

    note.CallDataType = "string0"  # type: ignore[attr-defined]
    reader.reader.AddObserver("ErrorEvent", note)
    parser = getattr(reader.reader, "GetXMLParser", lambda: None)()
    if parser is not None:
        parser.AddObserver("ErrorEvent", note)
    try:
        reader.reader.UpdateInformation()
        if not problems:
            _select(reader, "point", point_arrays)
            _select(reader, "cell", cell_arrays)
            mesh = reader.read()
    except Exception as error:
        problems.append(str(error))
    if problems:
        raise ValueError(
            f"{path}: VTK cannot read the file ({path.stat().st_size} bytes), it may be truncated or damaged: "
            f"{problems[0][:300]}. Download or copy it again"
        )
    if mesh.n_points == 0 or mesh.n_cells == 0:
        raise ValueError(
            f"{path}: the mesh is empty: expected points and cells, found {mesh.n_points} points and "
            f"{mesh.n_cells} cells"
        )
    if not np.isfinite(mesh.points).all():
        bad = int((~np.isfinite(mesh.points)).any(axis=1).sum())
        raise ValueError(f"{path}: {bad} of {mesh.n_points} points have NaN or infinite coordinates, expected none")
    return mesh


def _select(reader: pv.BaseReader, association: str, names: Iterable[str] | None) -> None:
    if names is None:
        return
    getattr(reader, f"disable_all_{association}_arrays")()
    present = getattr(reader, f"{association}_array_names")
    for name in names:
        if name in present:
            getattr(reader, f"enable_{association}_array")(name)


def polygon_corners(mesh: pv.DataSet, path: str | os.PathLike[str]) -> tuple[np.ndarray, np.ndarray]:
    """The polygons of a surface, checked: VTK's offsets (f+1,) and connectivity.

    Raises:
        ValueError: other cells than polygons, too many of them, fewer than three corners, or corners that are no point.
    """
    if not isinstance(mesh, pv.PolyData) or mesh.GetNumberOfPolys() != mesh.n_cells:
        raise ValueError(f"{path}: expected polygons only (VTK PolyData), found other cells among {mesh.n_cells}")
    cells = mesh.GetPolys()
    offsets = np.asarray(pv.convert_array(cells.GetOffsetsArray()))
    connectivity = np.asarray(pv.convert_array(cells.GetConnectivityArray()))
    if max(len(connectivity), mesh.n_points) >= 2**31:
        raise ValueError(f"{path}: {len(connectivity)} corners, expected fewer than 2^31")
    thin = np.count_nonzero(np.diff(offsets) < 3)
    if thin:
        raise ValueError(f"{path}: {thin} of {mesh.n_cells} faces have fewer than three corners")
    if connectivity.min() < 0 or connectivity.max() >= mesh.n_points:
        raise ValueError(
            f"{path}: faces name the points {connectivity.min()} to {connectivity.max()}, there are {mesh.n_points}"
        )
    return offsets, connectivity


def named_array(
    mesh: pv.DataSet,
    name: str,
    path: str | os.PathLike[str],
    association: str = "point",
    components: int = 1,
    dtype: type[np.floating] = np.float64,
) -> np.ndarray:
    """A mesh's array by name, checked.

    Args:
        mesh: the mesh, as read.
        name: the array's name.
        path: the mesh's file, for messages.
        association: "point" or "cell".
        components: 1 gives (n,), more gives (n, components).
        dtype: the precision; an array that has it already is not copied.

    Raises:
        ValueError: the array is missing, has another shape or is not numeric, or holds NaN or infinity.
    """
    data = mesh.point_data if association == "point" else mesh.cell_data
    n = mesh.n_points if association == "point" else mesh.n_cells
    if name not in data:
        found = ", ".join(map(repr, data.keys())) or "none"
        raise ValueError(f"{path}: {association} array {name!r} is missing; found {found}")
    value = np.asarray(data[name])
    expected = (n,) if components == 1 else (n, components)
    if value.shape != expected:
        raise ValueError(f"{path}: {association} array {name!r} has shape {value.shape}, expected {expected}")
    if not np.issubdtype(value.dtype, np.number):
        raise ValueError(f"{path}: {association} array {name!r} has type {value.dtype}, expected numbers")
    value = value.astype(dtype, copy=False)
    bad = int((~np.isfinite(value)).reshape(n, -1).any(axis=1).sum())
    if bad:
        raise ValueError(
            f"{path}: {association} array {name!r} holds NaN or infinity in {bad} of {n} rows, expected finite numbers"
        )
    return value


def write_mesh(mesh: pv.DataSet, path: str | os.PathLike[str]) -> Path:
    """Write a mesh with its arrays, beside and renamed into place; makes the folder. Returns the path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.stem}.{uuid.uuid4().hex}{path.suffix}")
    try:
        mesh.save(str(beside))
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    return path
