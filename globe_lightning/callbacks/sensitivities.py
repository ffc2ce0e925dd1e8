"""Sensitivities on disk: for every case the derivative of a coefficient with respect to its shape, VTK and picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from globe_lightning.callbacks.rasterise import see_triangles
from globe_lightning.callbacks.surface_pictures import SUPERSAMPLING, VIEWS, is_surface, page_cameras, paint
from globe_lightning.run_folder import safe_name, written_whole
from globe_lightning.sample import Sample
from globe_lightning.sensitivity import ShapeSensitivity, shape_sensitivity
from globe_lightning.surfaces import BodySurface

ALL_VIEWS = {**VIEWS, "below": (-38.0, -28.0)}
DOTS_PER_INCH = 110


def write_sensitivities(
    module: Any,
    datamodule: Any,
    of: str,
    folder: Path,
    device: torch.device,
    case: str | None = None,
    smoothing_length: float | None = None,
    progress: bool = True,
) -> list[Path]:
    """Differentiate a coefficient of every case of the predict split, or of one.

    Writes ``<case>_<of>.vtp`` and ``<case>_<of>.png``.

    Args:
        module: a ``GlobeLightningModule``.
        datamodule: whose samples fit it.
        of: the coefficient, "Cd".
        folder: where to write.
        device: where to compute.
        case: the one case; all if None.
        smoothing_length: of ``ShapeSensitivity.smoothed`` [m].
        progress: show a bar over the points of each case.

    Returns:
        The VTK files.

    Raises:
        ValueError: the data do not fit the model, there is no such case or coefficient, or a case's surface is unknown.
    """
    lines = module.schema.differences(datamodule.schema)
    if lines:
        raise ValueError("the data module's samples do not fit the model:\n  " + "\n  ".join(lines))
    module = module.to(device).eval()
    datamodule.prepare_data()
    datamodule.setup("predict")
    dataset = datamodule.predict_dataloader().dataset
    cases = list(dataset.cases)
    if case is not None and case not in cases:
        raise ValueError(f"case: expected one of the split to predict, {cases}, found {case!r}")
    written = []
    for index in range(len(cases)) if case is None else [cases.index(case)]:
        sample = dataset[index].to(device)
        shape = shape_sensitivity(module, sample, of, surface_of(datamodule, sample), progress=progress)
        stem = f"{safe_name(sample.case)}_{safe_name(of)}"
        with written_whole(folder / f"{stem}.vtp") as path:
            sensitivity_mesh(shape, smoothing_length).save(path)
        title = f"{sample.case}   {of} = {shape.value:.4f} (predicted)"
        with written_whole(folder / f"{stem}.png") as path:
            draw_sensitivity(shape, title, smoothing_length).savefig(path, dpi=DOTS_PER_INCH)
        written.append(folder / f"{stem}.vtp")
        print(f"{sample.case}: {of} = {shape.value:.5f}; wrote {written[-1]} and .png", flush=True)
    return written


def surface_of(datamodule: Any, sample: Sample) -> BodySurface | None:
    """The surface of a case from its mesh, where the data module has one; None leaves it to the sample."""
    if sample.prediction_points.shape[1] == 2 or not hasattr(datamodule, "case_mesh"):
        return None
    mesh = datamodule.case_mesh(sample.case)
    return polygon_surface(mesh) if is_surface(mesh) else None


def polygon_surface(mesh: Any) -> BodySurface:
    """The polygons of a pyvista ``PolyData``."""
    import pyvista as pv

    polygons = mesh.GetPolys()
    offsets, corners = (
        torch.from_numpy(np.asarray(pv.convert_array(array)).astype(np.int64))
        for array in (polygons.GetOffsetsArray(), polygons.GetConnectivityArray())
    )
    return BodySurface(torch.from_numpy(np.asarray(mesh.points, dtype=np.float32).copy()), offsets, corners)


def sensitivity_mesh(shape: ShapeSensitivity, smoothing_length: float | None = None) -> Any:
    """A pyvista ``PolyData`` of the body with the derivative at its points.

    Arrays, for a number "Cd": ``CdGradient``, a vector, change per displacement of the point [1/m]; ``CdNormal``,
    change per volume that pushing outward adds [1/m^3; 1/m^2 in 2D]; ``CdSmooth``, the same without variations shorter
    than the smoothing length, which is what to look at; ``Normals``, into the fluid; ``Area`` around the point [m^2 or
    m].

    Args:
        shape: what :func:`~globe_lightning.sensitivity.shape_sensitivity` found.
        smoothing_length: of ``ShapeSensitivity.smoothed`` [m].
    """
    import pyvista as pv

    surface, dims = shape.surface, shape.gradient.shape[1]
    offsets, corners = surface.offsets.cpu().numpy(), surface.corners.cpu().numpy()
    sizes = np.diff(offsets)
    cells = np.insert(corners, offsets[:-1], sizes)
    cloud = _in_space(surface.points)
    mesh = pv.PolyData(cloud, lines=cells) if dims == 2 else pv.PolyData(cloud, faces=cells)
    mesh.point_data[f"{shape.name}Gradient"] = _in_space(shape.gradient)
    mesh.point_data[f"{shape.name}Normal"] = shape.normal_gradient.float().cpu().numpy()
    mesh.point_data[f"{shape.name}Smooth"] = shape.smoothed(smoothing_length).float().cpu().numpy()
    mesh.point_data["Normals"] = _in_space(shape.normals)
    mesh.point_data["Area"] = shape.areas.float().cpu().numpy()
    return mesh


def _in_space(vectors: torch.Tensor) -> np.ndarray:
    """Three components, as VTK has them."""
    array = vectors.detach().float().cpu().numpy()
    return np.concatenate([array, np.zeros_like(array[:, :1])], axis=1) if array.shape[1] == 2 else array


def draw_sensitivity(shape: ShapeSensitivity, title: str = "", smoothing_length: float | None = None) -> Any:
    """A figure of where pushing the surface outward raises (red) or lowers (blue) a number.

    In the plane, arrows along the contour as long as the normal gradient (inward where it is negative), and the same
    as curves along the chord; in space, the surface from several sides.

    Args:
        shape: what :func:`~globe_lightning.sensitivity.shape_sensitivity` found.
        title: the heading.
        smoothing_length: of ``ShapeSensitivity.smoothed`` [m].

    Returns:
        A matplotlib ``Figure``, bound to no window system.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    values = shape.smoothed(smoothing_length).cpu().numpy()
    size = float(np.quantile(np.abs(values), 0.98)) or 1e-30
    figure = Figure()
    FigureCanvasAgg(figure)
    (_draw_contour if shape.gradient.shape[1] == 2 else _draw_views)(figure, shape, values, size)
    figure.suptitle(title, fontsize=12)
    return figure


def _draw_contour(figure: Any, shape: ShapeSensitivity, values: np.ndarray, size: float) -> None:
    points = shape.surface.points.detach().double().cpu().numpy()
    normals = shape.normals.cpu().numpy()
    corners = shape.surface.corners.reshape(-1, 2).cpu().numpy()
    low, high = points.min(axis=0), points.max(axis=0)
    length = float((high - low).max())
    figure.set_size_inches(11, 8)
    above, below = figure.subplots(2, 1, height_ratios=[1.4, 1])
    figure.subplots_adjust(left=0.08, right=0.97, bottom=0.07, top=0.91, hspace=0.2)
    for start, end in points[corners]:
        above.plot([start[0], end[0]], [start[1], end[1]], color="0.25", linewidth=1)
    clipped = np.clip(values / size, -1.5, 1.5)
    arrows = 0.14 * length * clipped[:, None] * normals
    above.quiver(
        *points.T,
        *arrows.T,
        clipped,
        cmap="coolwarm",
        clim=(-1, 1),
        angles="xy",
        scale_units="xy",
        scale=1,
        width=0.002,
    )
    margin = 0.16 * length
    above.set(xlim=(low[0] - 0.2 * length, high[0] + 0.2 * length), ylim=(low[1] - margin, high[1] + margin))
    above.set_aspect("equal")
    above.set_title(f"where to push the surface to raise {shape.name}; the longest arrows are cut", fontsize=10)
    position = (points[:, 0] - low[0]) / max(high[0] - low[0], 1e-30)
    for side, colour, label in (
        (normals[:, 1] >= 0, "tab:red", "upper side"),
        (normals[:, 1] < 0, "tab:blue", "lower side"),
    ):
        order = np.argsort(position[side], kind="stable")
        below.plot(position[side][order], values[side][order], color=colour, marker=".", markersize=3, label=label)
    below.axhline(0, color="0.5", linewidth=0.8)
    below.set(
        xlabel="position along the chord",
        ylabel=f"d{shape.name} per area added [1/m²]",
        ylim=(-1.6 * size, 1.6 * size),
    )
    below.grid(alpha=0.3)
    below.legend(fontsize=9)


def _draw_views(figure: Any, shape: ShapeSensitivity, values: np.ndarray, size: float) -> None:
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    vertices, triangles = _in_space(shape.surface.points), shape.surface.triangles.cpu().numpy()
    pixels, panel = DOTS_PER_INCH * SUPERSAMPLING, 3.85
    cameras = page_cameras(vertices, panel, pixels, ALL_VIEWS)
    heights = [camera.shape[0] / pixels for camera in cameras.values()]
    upper, lower = max(heights[:2]), max(heights[2:])
    width, height = 9.0, upper + lower + 1.1
    figure.set_size_inches(width, height)

    def place(left: float, bottom: float, wide: float, high: float) -> Any:
        return figure.add_axes((left / width, bottom / height, wide / width, high / height))

    norm, colours = Normalize(-size, size), colormaps["coolwarm"]
    for number, (label, camera) in enumerate(cameras.items()):
        shown = see_triangles(camera, vertices, triangles)
        left, bottom = 0.2 + (number % 2) * (panel + 0.15), 0.1 + (lower + 0.35 if number < 2 else 0)
        axis = place(left, bottom, camera.shape[1] / pixels, heights[number])
        axis.imshow(paint(shown.values(values), shown, norm, colours), origin="lower", aspect="auto")
        axis.set_axis_off()
        axis.set_title(label, fontsize=9, pad=3)
    bar = place(width - 0.75, 0.12 * height, 0.1, 0.7 * height)
    figure.colorbar(ScalarMappable(norm, colours), cax=bar)
    bar.set_title(f"d{shape.name} per\nvolume added\n[1/m³]", fontsize=8)
    bar.tick_params(labelsize=7, length=2)
