"""Predictions on disk: one VTK file per case, and a table of force coefficients."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from globe_lightning.fields import flatten_data
from globe_lightning.forces import can_integrate, force_coefficients
from globe_lightning.run_folder import safe_name, written_whole
from globe_lightning.sample import Sample

FORCE_COLUMNS = (
    "case",
    "coefficient",
    "true",
    "predicted",
    "error",
    "true_pressure",
    "predicted_pressure",
    "true_friction",
    "predicted_friction",
    "solver",
)
"""The columns of ``forces.csv``: one row per case and coefficient; "solver" is the solver's own value if known."""


class PredictionWriter(Callback):
    """Writes every predicted case as it comes and keeps nothing of it but its force coefficients.

    ``<folder>/<case>.vtu`` is the data module's ``case_mesh(case)`` with, for every field, three point arrays: the
    truth under the field's name, the prediction (suffix ``Pred``) and prediction minus truth (suffix ``Error``); NaN
    where a point was not predicted or its truth is unknown. ``<folder>/forces.csv`` has :data:`FORCE_COLUMNS`.

    Args:
        folder: where to write; ``predictions`` in the trainer's root folder if None.
        vtk: whether to write the VTK files.
    """

    def __init__(self, folder: str | None = None, vtk: bool = True) -> None:
        self.folder = folder
        self.vtk = vtk
        self._forces: list[list[Any]] = []

    def _folder(self, trainer: Any) -> Path:
        return Path(self.folder or Path(trainer.default_root_dir) / "predictions")

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin an empty table."""
        self._forces = []

    def on_predict_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Sample, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Write one case."""
        prediction, truth = pl_module.latest_prediction, flatten_data(batch.targets)
        if self.vtk and hasattr(trainer.datamodule, "case_mesh"):
            mesh = with_fields(trainer.datamodule.case_mesh(batch.case), batch, prediction, truth)
            with written_whole(self._folder(trainer) / f"{safe_name(batch.case)}.vtu") as path:
                mesh.save(path)
        if can_integrate(batch.force_surface, list(prediction)):
            assert batch.force_surface is not None
            predicted, true = (force_coefficients(batch.force_surface, fields) for fields in (prediction, truth))
            for name in true.total:
                pairs = [(float(t[name]), float(p[name])) for t, p in zip(true, predicted, strict=True)]
                (total, total_pred), (pressure, pressure_pred), (friction, friction_pred) = pairs
                solver = batch.force_surface.solver_coefficients.get(name, "")
                parts = [pressure, pressure_pred, friction, friction_pred]
                self._forces.append([batch.case, name, total, total_pred, total_pred - total, *parts, solver])

    def on_predict_end(self, trainer: Any, pl_module: Any) -> None:
        """Write the table of forces of all processes, each case once."""
        rows = self._forces
        if trainer.world_size > 1:
            gathered: list[Any] = [None] * trainer.world_size
            torch.distributed.all_gather_object(gathered, rows)
            rows = [row for part in gathered for row in part]
        self._forces = []
        if not trainer.is_global_zero or not rows:
            return
        unique = {(row[0], row[1]): row for row in rows}
        with (
            written_whole(self._folder(trainer) / "forces.csv") as path,
            open(path, "w", newline="", encoding="utf-8") as file,
        ):
            writer = csv.writer(file)
            writer.writerow(FORCE_COLUMNS)
            writer.writerows(unique[key] for key in sorted(unique))
        print(f"wrote the predictions of {len({row[0] for row in rows})} cases to {self._folder(trainer)}", flush=True)


def with_fields(mesh: Any, sample: Sample, prediction: dict[str, Tensor], truth: dict[str, Tensor]) -> Any:
    """The case's mesh (pyvista, changed in place) with truth, prediction and error of every field at its points.

    Raises:
        ValueError: the sample's points do not number those of the mesh.
    """
    rows = None if sample.point_ids is None else sample.point_ids.cpu().numpy()
    n = sample.prediction_points.shape[0]
    if (rows is None and n != mesh.n_points) or (rows is not None and len(rows) and rows.max() >= mesh.n_points):
        raise ValueError(
            f"case {sample.case!r}: the sample has {n} points{'' if rows is None else f' up to row {rows.max()}'}, "
            f"its mesh {mesh.n_points}"
        )
    for name, predicted in prediction.items():
        pred = predicted.detach().float().cpu().numpy()
        true = truth[name].detach().float().cpu().numpy() if name in truth else np.full_like(pred, np.nan)
        for suffix, values in (("", true), ("Pred", pred), ("Error", pred - true)):
            mesh.point_data[f"{name}{suffix}"] = _on_mesh(values, rows, mesh.n_points)
    return mesh


def _on_mesh(values: np.ndarray, rows: np.ndarray | None, n_points: int) -> np.ndarray:
    if values.ndim == 2 and values.shape[1] == 2:  # VTK's vectors have three components
        values = np.concatenate([values, np.zeros_like(values[:, :1])], axis=1)
    if rows is None:
        return values
    full = np.full((n_points, *values.shape[1:]), np.nan, dtype=values.dtype)
    full[rows] = values
    return full
