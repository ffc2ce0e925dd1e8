"""Predictions on disk: one VTK file per case, and a table of force coefficients."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from globe_lightning.callbacks.tables import (
    FORCE_COLUMNS,
    coefficient_table,
    distinct_forces,
    force_rows,
    gathered,
    write_table,
)
from globe_lightning.fields import flatten_data
from globe_lightning.run_folder import safe_name, written_whole
from globe_lightning.sample import Sample

ARRAYS = ("both", "dataset", "nondimensional")


class PredictionWriter(Callback):
    """Writes every predicted case as it comes and keeps nothing of it but its force coefficients.

    ``<folder>/<case>.vtp`` (a surface) or ``.vtu`` (a volume) is the data module's ``case_mesh(case)`` with three
    arrays a field, at the points or in the cells, where the data module's ``field_association`` says: the truth under
    the field's name (the file's own array where it has one), the prediction (suffix ``Pred``) and prediction minus
    truth (suffix ``Error``); NaN where a point was not predicted or its truth is unknown. Of fields whose truth the
    sample lacks altogether there is the prediction alone. Fields are nondimensional,
    and also in the dataset's names and units where the data module has ``dimensional(sample, fields)``.
    ``<folder>/forces.csv`` has the columns of ``globe_lightning.callbacks.tables.FORCE_COLUMNS``.

    Args:
        folder: where to write; ``predictions`` in the trainer's root folder if None.
        vtk: whether to write the VTK files.
        arrays: which arrays: "nondimensional", "dataset" (the dataset's names and units) or "both".

    Raises:
        ValueError: ``arrays`` is something else.
    """

    def __init__(
        self,
        folder: str | None = None,
        vtk: bool = True,
        arrays: Literal["both", "dataset", "nondimensional"] = "both",
    ) -> None:
        if arrays not in ARRAYS:
            raise ValueError(f"arrays: expected one of {ARRAYS}, found {arrays!r}")
        self.folder = folder
        self.vtk = vtk
        self.arrays = arrays
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
        prediction = pl_module.latest_prediction
        if self.vtk and hasattr(trainer.datamodule, "case_mesh"):
            self._write(trainer, pl_module, batch, prediction)
        self._forces += force_rows(batch, prediction)

    def _write(self, trainer: Any, pl_module: Any, sample: Sample, prediction: dict[str, Tensor]) -> None:
        import pyvista as pv

        data, truth = trainer.datamodule, flatten_data(sample.targets)
        mesh = shared_mesh(trainer, pl_module, sample.case).copy(deep=False)
        place = getattr(data, "field_association", "point")
        named = getattr(data, "dimensional", None)
        if self.arrays != "dataset" or named is None:
            with_fields(mesh, sample, prediction, truth, place)
        if self.arrays != "nondimensional" and named is not None:
            with_fields(mesh, sample, named(sample, prediction), named(sample, truth), place)
        suffix = "vtp" if isinstance(mesh, pv.PolyData) else "vtu"
        with written_whole(self._folder(trainer) / f"{safe_name(sample.case)}.{suffix}") as path:
            mesh.save(path)

    def on_predict_end(self, trainer: Any, pl_module: Any) -> None:
        """Write the table of forces of all processes, each case once."""
        rows = gathered(trainer, self._forces)
        self._forces = []
        pl_module.latest_mesh = None
        if not trainer.is_global_zero or not rows:
            return
        rows = distinct_forces(rows)
        write_table(self._folder(trainer) / "forces.csv", FORCE_COLUMNS, rows)
        print(coefficient_table(rows), end="")
        print(f"wrote the predictions of {len({row[0] for row in rows})} cases to {self._folder(trainer)}", flush=True)


def shared_mesh(trainer: Any, pl_module: Any, case: str) -> Any:
    """The data module's mesh of a case, read once for all callbacks; not to be changed."""
    if pl_module.latest_mesh is None or pl_module.latest_mesh[0] != case:
        pl_module.latest_mesh = None  # let go of the last one before the next is read
        pl_module.latest_mesh = (case, trainer.datamodule.case_mesh(case))
    return pl_module.latest_mesh[1]


def with_fields(
    mesh: Any,
    sample: Sample,
    prediction: dict[str, Any],
    truth: dict[str, Any],
    place: str = "point",
) -> Any:
    """The case's mesh (pyvista, changed in place) with truth, prediction and error of every field.

    Args:
        mesh: the case's.
        sample: whose points they are.
        prediction: {name: values at the sample's points}, tensors or arrays.
        truth: the same; of what it lacks there is the prediction alone.
        place: "point" or "cell", where the sample's points are in the mesh.

    Raises:
        ValueError: the sample's points do not number those of the mesh.
    """
    arrays = mesh.cell_data if place == "cell" else mesh.point_data
    size = mesh.n_cells if place == "cell" else mesh.n_points
    rows = None if sample.point_ids is None else sample.point_ids.cpu().numpy()
    n = sample.prediction_points.shape[0]
    if (rows is None and n != size) or (rows is not None and len(rows) and rows.max() >= size):
        raise ValueError(
            f"case {sample.case!r}: the sample has {n} points{'' if rows is None else f' up to row {rows.max()}'}, "
            f"its mesh {size} {place}s"
        )
    for name, predicted in prediction.items():
        pred = _float32(predicted)
        arrays[f"{name}Pred"] = _on_mesh(pred, rows, size)
        if name not in truth:
            continue
        true = _float32(truth[name])
        if name not in arrays:
            arrays[name] = _on_mesh(true, rows, size)
        arrays[f"{name}Error"] = _on_mesh(pred - true, rows, size)
    return mesh


def _float32(values: Any) -> np.ndarray:
    if isinstance(values, Tensor):
        values = values.detach().to("cpu", torch.float32).numpy()
    return np.asarray(values, dtype=np.float32)


def _on_mesh(values: np.ndarray, rows: np.ndarray | None, size: int) -> np.ndarray:
    if values.ndim == 2 and values.shape[1] == 2:  # VTK's vectors have three components
        values = np.concatenate([values, np.zeros_like(values[:, :1])], axis=1)
    if rows is None:
        return values
    full = np.full((size, *values.shape[1:]), np.nan, dtype=values.dtype)
    full[rows] = values
    return full
