"""Pictures of cases: truth, prediction and error fields, and curves along the surface."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from globe_lightning.callbacks.plane import (
    FieldTriangles,
    along_body,
    body_outline,
    loops,
    numpy_of,
    size_of,
    triangulate,
    window_around,
)
from globe_lightning.callbacks.prediction_pictures import draw_prediction
from globe_lightning.callbacks.predictions import shared_mesh
from globe_lightning.callbacks.surface_pictures import draw_surface_case, is_surface
from globe_lightning.fields import flatten_data
from globe_lightning.forces import can_integrate, force_coefficients
from globe_lightning.run_folder import safe_name, written_whole
from globe_lightning.sample import Sample


class PictureWriter(Callback):
    """Draws one PNG per case: of the first validation case every few epochs, and of every predicted case.

    Cases in the plane are drawn by :func:`draw_case`; cases in space whose ``case_mesh`` (of the data module) is a
    surface by :func:`~globe_lightning.callbacks.surface_pictures.draw_surface_case`; cases without truth by
    :func:`~globe_lightning.callbacks.prediction_pictures.draw_prediction`; others not at all.

    Args:
        folder: where to write; ``pictures`` in the trainer's root folder if None.
        every_n_epochs: draw the first validation case each that many epochs; 0 never.
        predicted: draw every predicted case.
        dots_per_inch: resolution.
    """

    def __init__(
        self, folder: str | None = None, every_n_epochs: int = 10, predicted: bool = True, dots_per_inch: int = 110
    ) -> None:
        if every_n_epochs < 0:
            raise ValueError(f"every_n_epochs: expected 0 (never) or a number of epochs, found {every_n_epochs}")
        if dots_per_inch < 1:
            raise ValueError(f"dots_per_inch: expected a positive number, found {dots_per_inch}")
        self.folder = folder
        self.every_n_epochs = every_n_epochs
        self.predicted = predicted
        self.dots_per_inch = dots_per_inch

    def _write(self, trainer: Any, pl_module: Any, sample: Sample, name: str, title: str) -> None:
        prediction, data = pl_module.latest_prediction, trainer.datamodule
        if not len(sample.prediction_points):
            return
        flat = sample.prediction_points.shape[1] == 2
        mesh = shared_mesh(trainer, pl_module, sample.case) if not flat and hasattr(data, "case_mesh") else None
        place = getattr(data, "field_association", "point")
        if not len(sample.targets.keys()):
            figure = draw_prediction(sample, prediction, mesh, title, place, self.dots_per_inch)
            if figure is None:
                return
        elif flat:
            figure = draw_case(sample, prediction, title)
        elif mesh is not None and is_surface(mesh):
            heading = "      ".join(text for text in (title, force_text(sample, prediction, ("Cd", "Cl"))) if text)
            figure = draw_surface_case(sample, prediction, mesh, heading, place, self.dots_per_inch)
        else:
            return
        folder = Path(self.folder or Path(trainer.default_root_dir) / "pictures")
        with written_whole(folder / f"{safe_name(name)}.png") as path:
            figure.savefig(path, dpi=self.dots_per_inch)

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Sample, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Draw the first case, if it is time."""
        epoch = trainer.current_epoch + 1
        wanted = batch_idx == 0 and self.every_n_epochs > 0 and not trainer.sanity_checking and trainer.is_global_zero
        if not wanted or (trainer.state.fn == "fit" and epoch % self.every_n_epochs and epoch != trainer.max_epochs):
            return
        title = f"{batch.case}   epoch {epoch}, step {trainer.global_step}" if trainer.state.fn == "fit" else batch.case
        name = f"validation_epoch{epoch:04d}" if trainer.state.fn == "fit" else f"validation_{batch.case}"
        self._write(trainer, pl_module, batch, name, title)
        pl_module.latest_mesh = None  # of a training: not to be kept

    def on_predict_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Sample, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Draw a predicted case."""
        if self.predicted:
            self._write(trainer, pl_module, batch, batch.case, batch.case)


def draw_case(sample: Sample, prediction: dict[str, Tensor], title: str = "") -> Any:
    """A figure of a two-dimensional case.

    One row per field known nearly everywhere (of vectors the magnitude, and of their error the magnitude of the
    difference): truth, prediction, error, near the body. Below, along the body's longest direction: the pressure
    coefficient (minus C_p), and the magnitude of the wall shear.

    Args:
        sample: the case; its boundary faces are the body's outline.
        prediction: {flattened field name: values at the sample's points}.
        title: the heading.

    Returns:
        A matplotlib ``Figure``, bound to no window system.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    points = sample.prediction_points.detach().double().cpu().numpy()
    truth = {name: numpy_of(value) for name, value in flatten_data(sample.targets).items()}
    predicted = {name: numpy_of(value) for name, value in prediction.items() if name in truth}
    outline = body_outline(sample)
    window = window_around(outline)

    mesh = triangulate(points, outline, window)
    # A field known only at the wall is no picture of the flow: it is drawn as a curve.
    shown = [name for name, value in truth.items() if name in predicted and np.isfinite(value[mesh.rows]).mean() > 0.9]
    surface = _surface(sample, truth, predicted)
    page = _Page(len(shown), len(surface), (window[3] - window[2]) / (window[1] - window[0]))
    figure = Figure(figsize=(page.width, page.height))
    FigureCanvasAgg(figure)
    figure.text(0.5, 1 - 0.22 / page.height, title, ha="center", va="center", fontsize=12)
    for row, name in enumerate(shown):
        axes = [(page.panel(figure, row, column), page.bar(figure, row, column)) for column in range(3)]
        _draw_field(figure, axes, name, mesh, truth[name], predicted[name], outline, window)
    forces = force_text(sample, prediction)
    for number, curve in enumerate(surface):
        _draw_curve(page.curve(figure, number), "" if number else forces, *curve)
    return figure


class _Page:
    """Where everything stands on the page, in inches; a layout engine would draw every picture twice."""

    width = 13.4
    panel_width, bar_width, curve_height = 3.5, 0.1, 3.0
    left, top, row_gap, column_step = 0.5, 0.45, 0.6, 4.35

    def __init__(self, n_rows: int, n_curves: int, aspect: float) -> None:
        self.panel_height = self.panel_width * aspect
        self.n_curves = n_curves
        rows = n_rows * (self.panel_height + self.row_gap)
        self.height = self.top + rows + (self.curve_height + 0.95 if n_curves else 0.1)

    def _axes(self, figure: Any, left: float, bottom: float, width: float, height: float) -> Any:
        return figure.add_axes((left / self.width, bottom / self.height, width / self.width, height / self.height))

    def _bottom(self, row: int) -> float:
        return self.height - self.top - 0.25 - (row + 1) * self.panel_height - row * self.row_gap

    def panel(self, figure: Any, row: int, column: int) -> Any:
        """The axes of a field."""
        left = self.left + column * self.column_step
        return self._axes(figure, left, self._bottom(row), self.panel_width, self.panel_height)

    def bar(self, figure: Any, row: int, column: int) -> Any:
        """The axes of its colour bar."""
        left = self.left + column * self.column_step + self.panel_width + 0.08
        return self._axes(figure, left, self._bottom(row), self.bar_width, self.panel_height)

    def curve(self, figure: Any, number: int) -> Any:
        """The axes of a curve along the surface."""
        step = (self.width - 0.4) / self.n_curves
        return self._axes(figure, 0.8 + number * step, 0.55, step - 0.9, self.curve_height)


def _draw_field(
    figure: Any,
    axes: list[tuple[Any, Any]],
    name: str,
    mesh: FieldTriangles,
    truth: np.ndarray,
    predicted: np.ndarray,
    outline: np.ndarray,
    window: tuple[float, float, float, float],
) -> None:
    from matplotlib.collections import PolyCollection

    vector = truth.ndim == 2
    error = predicted[mesh.rows] - truth[mesh.rows]
    true, pred = (size_of(values[mesh.rows]) for values in (truth, predicted))
    label = f"|{name}|" if vector else name
    known = np.isfinite(true)
    low, high = mesh.quantiles(true, [0.001, 0.999], window)
    if not high > low:
        low, high = low - 0.5, high + 0.5
    size = float(mesh.quantiles(np.abs(size_of(error)), [0.998], window)[0]) or 1e-12
    error_range = (0.0, size) if vector else (-size, size)
    panels = (
        (f"{label}, truth", true, (low, high), "turbo"),
        (f"{label}, prediction", pred, (low, high), "turbo"),
        (
            f"{'|error|' if vector else 'error'} of {name}",
            size_of(error),
            error_range,
            "magma_r" if vector else "RdBu_r",
        ),
    )
    triangulation = mesh.triangulation
    unknown = ~known[triangulation.triangles].all(axis=1)
    mask = triangulation.mask | unknown if triangulation.mask is not None else unknown
    for (axis, bar), (heading, values, (bottom, top), colours) in zip(axes, panels, strict=True):
        clone = type(triangulation)(triangulation.x, triangulation.y, triangulation.triangles, mask)
        filled = np.where(np.isfinite(values), values, bottom)
        image = axis.tripcolor(clone, filled, shading="gouraud", cmap=colours, vmin=bottom, vmax=top, rasterized=True)
        axis.add_collection(PolyCollection(loops(outline), facecolors="0.85", edgecolors="0.2", linewidths=0.6))
        axis.set(xlim=window[:2], ylim=window[2:])
        axis.set_title(heading, fontsize=10, pad=4)
        axis.tick_params(labelsize=7, length=2)
        figure.colorbar(image, cax=bar)
        bar.tick_params(labelsize=7, length=2)


def _surface(sample: Sample, truth: dict[str, np.ndarray], predicted: dict[str, np.ndarray]) -> list[tuple]:
    """What to draw along the surface: (label, positions, true, predicted) with arrays (faces, corners)."""
    surface = sample.force_surface
    if surface is None or surface.point_indices.shape[1] != 2:
        return []
    corners, along = along_body(surface, numpy_of(sample.prediction_points))
    curves = []
    for name, sign, label in ((surface.pressure_field, -1.0, "−{}"), (surface.shear_field, 1.0, "|{}|")):
        if name in truth and name in predicted:
            values = [sign * size_of(fields[name])[corners] for fields in (truth, predicted)]
            curves.append((label.format(name), along, *values))
    return curves


def _draw_curve(
    axis: Any, heading: str, label: str, along: np.ndarray, true: np.ndarray, predicted: np.ndarray
) -> None:
    from matplotlib.collections import LineCollection

    for values, colour, line, name in ((true, "0.55", 3.5, "truth"), (predicted, "tab:red", 1.3, "prediction")):
        segments = np.stack([along, values], axis=-1)
        axis.add_collection(LineCollection(list(segments), colors=colour, linewidths=line, capstyle="round"))
        axis.plot([], [], color=colour, linewidth=line, label=name)
    everything = np.concatenate([true[np.isfinite(true)], predicted[np.isfinite(predicted)]])
    low, high = (everything.min(), everything.max()) if len(everything) else (0.0, 1.0)
    space = 0.06 * (high - low) or 0.5
    axis.set(xlim=(-0.02, 1.02), ylim=(low - space, high + space), xlabel="position along the chord", ylabel=label)
    axis.set_title(heading, fontsize=10)
    axis.grid(alpha=0.3)
    axis.legend(loc="upper right", fontsize=9)
    axis.tick_params(labelsize=8)


def force_text(sample: Sample, prediction: dict[str, Tensor], names: tuple[str, ...] | None = None) -> str:
    """The force coefficients in words, all or the named ones: "Cl 0.512 (predicted 0.498)"; "" without a surface."""
    if not can_integrate(sample.force_surface, list(prediction)):
        return ""
    assert sample.force_surface is not None
    true = force_coefficients(sample.force_surface, flatten_data(sample.targets)).total
    predicted = force_coefficients(sample.force_surface, prediction).total
    shown = [name for name in names or true if name in true]
    return "   ".join(f"{name} {float(true[name]):.4f} (predicted {float(predicted[name]):.4f})" for name in shown)
