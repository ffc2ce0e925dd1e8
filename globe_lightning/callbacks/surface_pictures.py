"""Pictures of bodies in space: truth, prediction and error on the surface, from several sides."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from torch import Tensor

from globe_lightning.callbacks.rasterise import Camera, Shown, see_triangles
from globe_lightning.fields import flatten_data
from globe_lightning.sample import Sample

VIEWS = {"side": (-90.0, 0.0), "front": (-142.0, 22.0), "rear": (-38.0, 22.0)}
"""Where the viewer stands, azimuth and elevation [degrees]: the flow comes along +x, z is up."""

SUPERSAMPLING = 2  # image pixels a side of a pixel on the page: smooth edges
SHADE = 0.45  # how much darker a surface is that is seen edge-on


def draw_surface_case(
    sample: Sample,
    prediction: dict[str, Tensor],
    mesh: Any,
    title: str = "",
    place: str = "point",
    dots_per_inch: int = 110,
) -> Any:
    """A figure of a case in space whose prediction points lie on a surface.

    For every field (of vectors the magnitude, and of their error the magnitude of the difference) a row a view of
    :data:`VIEWS`: truth, prediction, error. Below, the pressure coefficient (minus C_p) in the middle plane.

    Args:
        sample: the case.
        prediction: {flattened field name: values at the sample's points}.
        mesh: the surface (pyvista ``PolyData``) whose points or cells the sample's points are. If they are only some
            of them, the surface shows values interpolated from the nearest.
        title: the heading.
        place: "point" or "cell": which of the two they are.
        dots_per_inch: the resolution that the figure will be saved with.

    Returns:
        A matplotlib ``Figure``, bound to no window system.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    points = sample.prediction_points.detach().float().cpu().numpy()
    truth = {name: _numpy(value) for name, value in flatten_data(sample.targets).items()}
    predicted = {name: _numpy(value) for name, value in prediction.items()}
    vertices = np.asarray(mesh.points)
    triangles, cells = fans(mesh)
    if sample.point_ids is not None:
        fields = _interpolated(mesh, points, {**_named(truth, "true"), **_named(predicted, "predicted")})
        truth, predicted = ({name: fields[f"{what} {name}"] for name in truth} for what in ("true", "predicted"))
        points = vertices
    owners = cells if place == "cell" and sample.point_ids is None else None
    names = [name for name in truth if name in predicted and np.isfinite(truth[name]).any()]
    page = _Page(dots_per_inch)
    views = {
        label: see_triangles(camera, vertices, triangles, owners)
        for label, camera in page_cameras(vertices, page.panel_width, page.pixels_per_inch).items()
    }
    curve = sample.force_surface.pressure_field if sample.force_surface is not None else "C_p"
    curves = [curve] if curve in names else []
    heights = [shown.covered.shape[0] / page.pixels_per_inch for shown in views.values()]
    page.layout(len(names), heights, len(curves))
    figure = Figure(figsize=(page.width, page.height))
    FigureCanvasAgg(figure)
    figure.text(0.5, 1 - 0.22 / page.height, title, ha="center", va="center", fontsize=12)
    for number, name in enumerate(names):
        _draw_field(figure, page, number, name, views, truth[name], predicted[name])
    for name in curves:
        _draw_middle(page.curve(figure), name, points, truth[name], predicted[name])
    return figure


class _Page:
    """Where everything stands on the page, in inches."""

    width = 13.4
    panel_width, bar_width, curve_height = 3.85, 0.1, 2.6
    top, gap, field_gap = 0.45, 0.08, 0.42
    lefts = (0.35, 4.25, 8.95)  # truth, prediction, error
    bars = (8.17, 12.87)

    def __init__(self, dots_per_inch: int) -> None:
        self.pixels_per_inch = dots_per_inch * SUPERSAMPLING

    def layout(self, n_fields: int, heights: list[float], n_curves: int) -> None:
        """Settle the height of the page, of panels of some heights for every field, and of curves."""
        self.heights = heights
        self.block = sum(heights) + self.gap * (len(heights) - 1) + self.field_gap
        self.height = self.top + n_fields * self.block + (self.curve_height + 0.75 if n_curves else 0.1)

    def axes(self, figure: Any, left: float, bottom: float, width: float, height: float) -> Any:
        """Axes at a place."""
        return figure.add_axes((left / self.width, bottom / self.height, width / self.width, height / self.height))

    def panel_bottom(self, field: int, view: int) -> float:
        """Where the panels of a field and view stand."""
        below = sum(self.heights[: view + 1]) + self.gap * view
        return self.height - self.top - field * self.block - self.field_gap + 0.12 - below

    def curve(self, figure: Any) -> Any:
        """The axes below all panels."""
        return self.axes(figure, 0.75, 0.5, self.width - 1.1, self.curve_height - 0.3)


def page_cameras(
    points: np.ndarray,
    panel_width: float,
    pixels_per_inch: int,
    views: Mapping[str, tuple[float, float]] = MappingProxyType(VIEWS),
) -> dict[str, Camera]:
    """A camera for every view, of one scale: at which the widest fills a panel [inches] with whole pixels."""
    extents = {label: Camera(*angles).extent(points) for label, angles in views.items()}
    width = int(panel_width * pixels_per_inch) // SUPERSAMPLING * SUPERSAMPLING
    margin = 0.015 * width
    scale = (width - 2 * margin) / max(*(np.ptp(extent[:, 0]) for extent in extents.values()), 1e-30)
    cameras = {}
    for label, (low, high) in extents.items():
        height = int(np.ceil((high[1] - low[1]) * scale + 2 * margin)) // SUPERSAMPLING * SUPERSAMPLING
        origin = ((low[0] + high[0] - width / scale) / 2, low[1] - margin / scale)
        cameras[label] = Camera(*views[label], scale, origin, (height, width))
    return cameras


def is_surface(mesh: Any) -> bool:
    """Whether a mesh (pyvista) consists of polygons."""
    import pyvista as pv

    return isinstance(mesh, pv.PolyData) and mesh.GetNumberOfPolys() == mesh.n_cells > 0


def _named(fields: dict[str, np.ndarray], what: str) -> dict[str, np.ndarray]:
    return {f"{what} {name}": value for name, value in fields.items()}


def _interpolated(mesh: Any, points: np.ndarray, fields: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Fields at the vertices of a surface from those at some points on it: means over the nearest few."""
    import pyvista as pv

    cloud = pv.PolyData(points)
    for name, value in fields.items():
        cloud.point_data[name] = value
    bare = pv.PolyData(np.asarray(mesh.points))
    spacing = float(np.sqrt(mesh.area / max(len(points), 1)))
    found = bare.interpolate(cloud, n_points=min(5, len(points)), radius=spacing, sharpness=1.5)
    return {name: np.asarray(found.point_data[name]) for name in fields}


def fans(mesh: Any) -> tuple[np.ndarray, np.ndarray]:
    """The polygons of a surface as triangles that start at each one's first corner.

    Args:
        mesh: pyvista ``PolyData``.

    Returns:
        Rows of their vertices (t, 3) and the polygon of each (t,).
    """
    import pyvista as pv

    polygons = mesh.GetPolys()
    offsets = np.asarray(pv.convert_array(polygons.GetOffsetsArray())).astype(np.int64)
    corners = np.asarray(pv.convert_array(polygons.GetConnectivityArray()))
    counts = np.maximum(np.diff(offsets) - 2, 0)
    cells = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(len(cells)) - np.repeat(np.cumsum(counts) - counts, counts)
    first = offsets[cells]
    return np.stack([corners[first], corners[first + number + 1], corners[first + number + 2]], axis=1), cells


def _draw_field(
    figure: Any,
    page: _Page,
    number: int,
    name: str,
    views: dict[str, Shown],
    truth: np.ndarray,
    predicted: np.ndarray,
) -> None:
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    vector = truth.ndim == 2
    images = [[shown.values(values) for values in (truth, predicted, predicted - truth)] for shown in views.values()]
    if vector:
        images = [[np.linalg.norm(image, axis=-1) for image in row] for row in images]
    true, error = (np.concatenate([row[column].ravel() for row in images]) for column in (0, 2))
    low, high = _quantiles(true, [0.002, 0.998])
    if not high > low:
        low, high = low - 0.5, high + 0.5
    size = float(_quantiles(np.abs(error), [0.99])[0]) or 1e-12
    label = f"|{name}|" if vector else name
    maps = [
        (f"{label}, truth", Normalize(low, high), "turbo"),
        (f"{label}, prediction", Normalize(low, high), "turbo"),
        (f"|error| of {name}", Normalize(0, size), "magma_r")
        if vector
        else (f"error of {name}", Normalize(-size, size), "RdBu_r"),
    ]
    for view, (heading_of_view, row) in enumerate(zip(views, images, strict=True)):
        bottom, height = page.panel_bottom(number, view), page.heights[view]
        shown = views[heading_of_view]
        for left, (heading, norm, colours), image in zip(page.lefts, maps, row, strict=True):
            axis = page.axes(figure, left, bottom, page.panel_width, height)
            axis.imshow(paint(image, shown, norm, colormaps[colours]), origin="lower", aspect="auto")
            axis.set_axis_off()
            if view == 0:
                axis.set_title(heading, fontsize=10, pad=4)
            if left == page.lefts[0]:
                axis.text(-0.03, 0.5, heading_of_view, transform=axis.transAxes, rotation=90, va="center", fontsize=8)
    bottom = page.panel_bottom(number, len(views) - 1)
    height = page.panel_bottom(number, 0) + page.heights[0] - bottom
    for left, (_, norm, colours) in zip(page.bars, maps[1:], strict=True):
        bar = page.axes(figure, left, bottom + 0.08 * height, page.bar_width, 0.84 * height)
        figure.colorbar(ScalarMappable(norm, colours), cax=bar)
        bar.tick_params(labelsize=7, length=2)


def _quantiles(values: np.ndarray, levels: list[float]) -> np.ndarray:
    values = values[np.isfinite(values)]
    return np.quantile(values, levels) if len(values) else np.zeros(len(levels))


def paint(image: np.ndarray, shown: Shown, norm: Any, colours: Any) -> np.ndarray:
    """The image in colours (height, width, 4), each pixel the mean of several; unknown values are grey."""
    known = np.isfinite(image)
    paint = colours(norm(np.where(known, image, 0.0)))
    paint[~known] = (0.8, 0.8, 0.8, 1.0)
    paint[..., :3] *= (1 - SHADE + SHADE * shown.facing)[..., None]
    paint[..., 3] = shown.covered
    n = SUPERSAMPLING
    height, width = image.shape
    blocks = (paint * np.where(np.arange(4) < 3, paint[..., 3:], 1.0)).reshape(height // n, n, width // n, n, 4)
    mean = blocks.mean(axis=(1, 3))
    mean[..., :3] /= np.maximum(mean[..., 3:], 1e-12)
    return np.clip(mean, 0, 1)


def near_middle(points: np.ndarray) -> np.ndarray:
    """Rows of the points next to the plane through the body's middle, as many as a curve needs, 20,000 at most."""
    across = points[:, 1]
    middle, half = (across.max() + across.min()) / 2, max(np.ptp(across) / 2, 1e-30)
    distance = np.abs(across - middle) / half
    wanted = min(250, len(distance) - 1)  # as many points as a curve needs: of a coarse surface a wide strip
    near = np.flatnonzero(distance <= max(0.004, np.partition(distance, wanted)[wanted]))
    if len(near) > 20_000:
        near = near[:: -(-len(near) // 20_000)]
    return near


def _draw_middle(axis: Any, name: str, points: np.ndarray, true: np.ndarray, predicted: np.ndarray) -> None:
    """Minus a scalar field over x, at the points next to the plane through the body's middle."""
    near = near_middle(points)
    x = points[near, 0]
    for values, colour, dot, label in ((true, "0.5", 14, "truth"), (predicted, "tab:red", 4, "prediction")):
        axis.scatter(x, -values[near], s=dot, color=colour, linewidths=0, label=label, rasterized=True)
    known = np.concatenate([-true[near], -predicted[near]])
    low, high = _quantiles(known, [0.0, 1.0])
    space = 0.06 * (high - low) or 0.5
    axis.set(ylim=(low - space, high + space), xlabel="x [m]", ylabel=f"−{name}")
    axis.set_title("middle plane", fontsize=10)
    axis.grid(alpha=0.3)
    axis.legend(loc="upper right", fontsize=9)
    axis.tick_params(labelsize=8)


def _numpy(tensor: Tensor) -> np.ndarray:
    return tensor.detach().float().cpu().numpy()
