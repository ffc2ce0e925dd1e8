"""Pictures of predictions whose truth nobody knows: new shapes, and probes in the flow around them."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from globe_lightning.callbacks.plane import (
    along_body,
    body_outline,
    loops,
    numpy_of,
    size_of,
    triangulate,
    window_around,
)
from globe_lightning.callbacks.rasterise import see_triangles
from globe_lightning.callbacks.surface_pictures import (
    SUPERSAMPLING,
    VIEWS,
    fans,
    is_surface,
    near_middle,
    page_cameras,
    paint,
)
from globe_lightning.forces import can_integrate, force_coefficients
from globe_lightning.sample import ForceSurface, Sample

WIDTH = 13.4  # of the page [inches]
TOP, BOTTOM, GAP, BAR = 0.5, 0.12, 0.5, 0.1


def draw_prediction(
    sample: Sample,
    prediction: dict[str, Tensor],
    mesh: Any = None,
    title: str = "",
    place: str = "point",
    dots_per_inch: int = 110,
) -> Any:
    """A figure of predicted fields alone.

    In the plane every field is painted around the body (of vectors the magnitude), with the pressure coefficient (minus
    C_p) and the magnitude of the wall shear along the body below. On a surface in space every field is seen from three
    sides, with the pressure coefficient in the middle plane below. Probes in a plane in space are painted in it.

    Args:
        sample: the case.
        prediction: {flattened field name: values at the sample's points}.
        mesh: in space, the mesh (pyvista) whose points or cells the sample's points are.
        title: the heading; force coefficients are added to it.
        place: "point" or "cell": which of the two they are.
        dots_per_inch: the resolution that the figure will be saved with.

    Returns:
        A matplotlib ``Figure``, bound to no window system; None for points in space that are no surface and no plane.
    """
    fields = {name: numpy_of(value) for name, value in prediction.items()}
    title = "      ".join(text for text in (title, coefficient_text(sample, prediction)) if text)
    if sample.prediction_points.shape[1] == 2:
        return _draw_flow(sample, fields, title)
    if is_surface(mesh) and sample.point_ids is None:
        return _draw_surface(sample, fields, mesh, title, place, dots_per_inch)
    return _draw_plane(sample, fields, title)


def coefficient_text(sample: Sample, prediction: dict[str, Tensor], names: tuple[str, ...] = ("Cl", "Cd")) -> str:
    """The predicted force coefficients in words, "Cl 0.498   Cd 0.012"; "" without a surface."""
    surface = sample.force_surface
    if surface is None or not can_integrate(surface, list(prediction)):
        return ""
    values = force_coefficients(surface, prediction).total
    return "   ".join(f"{name} {float(values[name]):.4f}" for name in names if name in values)


def _figure(height: float, title: str) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height))
    FigureCanvasAgg(figure)
    figure.text(0.5, 1 - 0.22 / height, title, ha="center", va="center", fontsize=12)
    return figure


def _axes(figure: Any, left: float, bottom: float, width: float, height: float) -> Any:
    page = figure.get_size_inches()
    return figure.add_axes((left / page[0], bottom / page[1], width / page[0], height / page[1]))


def _range(low: float, high: float) -> tuple[float, float]:
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _tiles(n: int, aspect: float, curves: float) -> tuple[float, list[tuple[float, float, float, float]]]:
    """The height of a page of n panels in two columns above curves, and each panel's place [inches]."""
    width = 5.6
    height = min(width * aspect, 6.0)
    rows = -(-n // 2)
    page = TOP + rows * (height + GAP) + (curves if curves else BOTTOM)
    places = []
    for number in range(n):
        row, column = divmod(number, 2)
        places.append((0.55 + column * 6.7, page - TOP - (row + 1) * (height + GAP) + 0.25, width, height))
    return page, places


def _draw_flow(sample: Sample, fields: dict[str, np.ndarray], title: str) -> Any:
    from matplotlib.collections import LineCollection, PolyCollection

    points = numpy_of(sample.prediction_points)
    outline = body_outline(sample)
    surface = sample.force_surface
    if surface is not None:
        window = window_around(outline)
    else:
        (x0, y0), (x1, y1) = points.min(axis=0), points.max(axis=0)
        window = (x0, x1, y0, y1)
    shown = [name for name in fields if surface is None or name != surface.shear_field]
    flat = min(window[1] - window[0], window[3] - window[2]) <= 0 or len(points) < 3
    aspect = 0.4 if flat else (window[3] - window[2]) / (window[1] - window[0])
    height, places = _tiles(len(shown), aspect, 3.5 if surface is not None else 0.0)
    figure = _figure(height, title)
    mesh = None if flat else triangulate(points, outline, window)
    for name, (left, bottom, width, tall) in zip(shown, places, strict=True):
        axis = _axes(figure, left, bottom, width, tall)
        axis.set_title(f"|{name}|" if fields[name].ndim == 2 else name, fontsize=10, pad=4)
        axis.tick_params(labelsize=7, length=2)
        if mesh is None:
            _draw_line(axis, points, size_of(fields[name]))
            continue
        values = size_of(fields[name][mesh.rows])
        low, high = _range(*mesh.quantiles(values, [0.001, 0.999], window))
        image = axis.tripcolor(mesh.triangulation, values, shading="gouraud", cmap="turbo", vmin=low, vmax=high)
        image.set_rasterized(True)
        axis.add_collection(PolyCollection(loops(outline), facecolors="0.85", edgecolors="0.2", linewidths=0.6))
        axis.set(xlim=window[:2], ylim=window[2:])
        bar = _axes(figure, left + width + 0.08, bottom, BAR, tall)
        figure.colorbar(image, cax=bar)
        bar.tick_params(labelsize=7, length=2)
    for number, (label, along, values) in enumerate(_curves(surface, points, fields)):
        axis = _axes(figure, 0.8 + number * 6.5, 0.5, 5.6, 2.7)
        axis.add_collection(LineCollection(list(np.stack([along, values], axis=-1)), colors="tab:red", linewidths=1.3))
        known = values[np.isfinite(values)]
        low, high = (known.min(), known.max()) if len(known) else (0.0, 1.0)
        space = 0.06 * (high - low) or 0.5
        axis.set(xlim=(-0.02, 1.02), ylim=(low - space, high + space), xlabel="position along the chord", ylabel=label)
        axis.grid(alpha=0.3)
        axis.tick_params(labelsize=8)
    return figure


def _draw_line(axis: Any, points: np.ndarray, values: np.ndarray) -> None:
    """Values along the longest direction of points that span no area."""
    along = int(np.argmax(np.ptp(points, axis=0)))
    axis.plot(points[:, along], values, ".-", color="tab:red", markersize=3, linewidth=1)
    axis.grid(alpha=0.3)
    axis.set_xlabel(f"{'xyz'[along]} [m]", fontsize=8)


def _curves(surface: ForceSurface | None, points: np.ndarray, fields: dict[str, np.ndarray]) -> list[tuple]:
    """What to draw along the body: (label, positions, values) with arrays (faces, corners)."""
    if surface is None or surface.point_indices.shape[1] != 2:
        return []
    corners, along = along_body(surface, points)
    kinds = ((surface.pressure_field, -1.0, "−{}"), (surface.shear_field, 1.0, "|{}|"))
    return [
        (label.format(name), along, sign * size_of(fields[name])[corners])
        for name, sign, label in kinds
        if name in fields
    ]


def _draw_surface(
    sample: Sample, fields: dict[str, np.ndarray], mesh: Any, title: str, place: str, dots_per_inch: int
) -> Any:
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    vertices = np.asarray(mesh.points)
    triangles, cells = fans(mesh)
    pixels = dots_per_inch * SUPERSAMPLING
    panel = (WIDTH - 1.5) / len(VIEWS) - 0.1
    cameras = page_cameras(vertices, panel, pixels)
    views = {
        label: see_triangles(camera, vertices, triangles, cells if place == "cell" else None)
        for label, camera in cameras.items()
    }
    curve = sample.force_surface.pressure_field if sample.force_surface is not None else ""
    curves = 3.1 if curve in fields else 0.0
    tall = max(camera.shape[0] for camera in cameras.values()) / pixels
    height = TOP + len(fields) * (tall + GAP) + (curves or BOTTOM)
    figure = _figure(height, title)
    for row, (name, values) in enumerate(fields.items()):
        bottom = height - TOP - (row + 1) * (tall + GAP) + 0.2
        images = [_size_of_image(shown.values(values)) for shown in views.values()]
        known = np.concatenate([image[np.isfinite(image)] for image in images])
        low, high = np.quantile(known, [0.002, 0.998]) if len(known) else (0.0, 1.0)
        norm = Normalize(*_range(float(low), float(high)))
        for column, ((label, shown), image) in enumerate(zip(views.items(), images, strict=True)):
            size = image.shape[0] / pixels
            axis = _axes(figure, 0.3 + column * (panel + 0.1), bottom, image.shape[1] / pixels, size)
            axis.imshow(paint(image, shown, norm, colormaps["turbo"]), origin="lower", aspect="auto")
            axis.set_axis_off()
            heading = f"|{name}|" if values.ndim == 2 else name
            axis.set_title(f"{heading}, {label}" if column == 0 else label, fontsize=10, pad=4)
        bar = _axes(figure, WIDTH - 0.85, bottom + 0.08 * tall, BAR, 0.84 * tall)
        figure.colorbar(ScalarMappable(norm, "turbo"), cax=bar)
        bar.tick_params(labelsize=7, length=2)
    if curves:
        axis = _axes(figure, 0.75, 0.5, WIDTH - 1.1, curves - 0.8)
        _draw_middle(axis, curve, numpy_of(sample.prediction_points), fields)
    return figure


def _size_of_image(image: np.ndarray) -> np.ndarray:
    """An image (rows, columns) of scalars as it is, one of vectors as magnitudes."""
    return np.linalg.norm(image, axis=-1) if image.ndim == 3 else image


def _draw_middle(axis: Any, name: str, points: np.ndarray, fields: dict[str, np.ndarray]) -> None:
    """Minus a scalar field over x, next to the plane through the body's middle."""
    near = near_middle(points)
    axis.scatter(points[near, 0], -fields[name][near], s=4, color="tab:red", linewidths=0, rasterized=True)
    axis.set(xlabel="x [m]", ylabel=f"−{name}")
    axis.set_title("middle plane", fontsize=10)
    axis.grid(alpha=0.3)
    axis.tick_params(labelsize=8)


def _draw_plane(sample: Sample, fields: dict[str, np.ndarray], title: str) -> Any:
    """Fields at points in a plane across one of the axes; None if the points span no such plane."""
    from matplotlib.tri import Triangulation

    points = numpy_of(sample.prediction_points)
    if len(points) < 3:
        return None
    extents = np.ptp(points, axis=0)
    across = int(np.argmin(extents))
    one, two = (axis for axis in range(3) if axis != across)
    if extents[across] > 1e-4 * extents.max() or min(extents[one], extents[two]) < 1e-3 * extents.max():
        return None
    height, places = _tiles(len(fields), extents[two] / extents[one], 0.0)
    figure = _figure(height, f"{title}      {'xyz'[across]} = {points[:, across].mean():.3g} m")
    triangulation = Triangulation(points[:, one], points[:, two])
    # Where points are missing, inside the body, triangles are long.
    corners = points[:, [one, two]][triangulation.triangles]
    longest = np.linalg.norm(corners - np.roll(corners, 1, axis=1), axis=-1).max(axis=1)
    triangulation.set_mask(longest > 2 * np.median(longest))
    for (name, values), (left, bottom, width, tall) in zip(fields.items(), places, strict=True):
        shown = size_of(values)
        low, high = _range(*np.nanquantile(shown, [0.005, 0.995]))
        axis = _axes(figure, left, bottom, width, tall)
        image = axis.tripcolor(triangulation, shown, shading="gouraud", cmap="turbo", vmin=low, vmax=high)
        image.set_rasterized(True)
        axis.set_facecolor("0.85")
        axis.set(xlim=(points[:, one].min(), points[:, one].max()), ylim=(points[:, two].min(), points[:, two].max()))
        axis.set_title(f"|{name}|" if values.ndim == 2 else name, fontsize=10, pad=4)
        axis.set_xlabel(f"{'xyz'[one]} [m]", fontsize=8, labelpad=1)
        axis.tick_params(labelsize=7, length=2)
        bar = _axes(figure, left + width + 0.08, bottom, BAR, tall)
        figure.colorbar(image, cax=bar)
        bar.tick_params(labelsize=7, length=2)
    return figure
