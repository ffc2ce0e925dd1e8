"""Tables by case: force coefficients and errors, as CSV."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from globe_lightning.fields import flatten_data
from globe_lightning.forces import can_integrate, force_coefficients
from globe_lightning.run_folder import written_whole
from globe_lightning.sample import Sample

FORCE_COLUMNS = (
    "case",
    "coefficient",
    "solver",
    "true",
    "predicted",
    "error",
    "true_pressure",
    "predicted_pressure",
    "true_friction",
    "predicted_friction",
)
"""The columns of a table of forces, one row per case and coefficient.

"solver" is the solver's own value if known, "true" and "predicted" are integrated from the true and the predicted
fields, "error" is predicted minus true; what needs a truth that is not known is empty. A coefficient named ``Cd_own``
is referred to the case's own area, ``Cd`` to the area common to all cases.
"""


class CaseTables(Callback):
    """Writes, at test, what was found of every case: ``metrics_by_case.csv`` and ``forces_test.csv``.

    The first has a column per metric that is defined for one case (see ``globe_lightning.metrics.FieldErrors`` for how
    each is normalised), the second :data:`FORCE_COLUMNS`.

    Args:
        folder: where to write; the trainer's root folder if None.
    """

    def __init__(self, folder: str | None = None) -> None:
        self.folder = folder
        self._metrics: list[tuple[str, dict[str, float]]] = []
        self._forces: list[list[Any]] = []

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin empty tables."""
        self._metrics, self._forces = [], []

    def on_test_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Sample, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Add one case."""
        self._metrics.append((batch.case, pl_module.latest_case_metrics()))
        self._forces += force_rows(batch, pl_module.latest_prediction)

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        """Write the tables of all processes, each case once."""
        metrics, forces = gathered(trainer, self._metrics), gathered(trainer, self._forces)
        self._metrics, self._forces = [], []
        if not trainer.is_global_zero:
            return
        folder = Path(self.folder or trainer.default_root_dir)
        if metrics:
            by_case = dict(sorted(metrics))
            names = list(dict.fromkeys(name for values in by_case.values() for name in values))
            rows = [[case, *(values.get(name, "") for name in names)] for case, values in by_case.items()]
            write_table(folder / "metrics_by_case.csv", ["case", *names], rows)
        if forces:
            write_table(folder / "forces_test.csv", FORCE_COLUMNS, distinct_forces(forces))


def force_rows(sample: Sample, prediction: dict[str, Tensor]) -> list[list[Any]]:
    """The rows of a case in a table of :data:`FORCE_COLUMNS`; none if it has no surface to integrate over."""
    surface, rows = sample.force_surface, []
    if surface is None or not can_integrate(surface, list(prediction)):
        return []
    predicted, truth = force_coefficients(surface, prediction), flatten_data(sample.targets)
    if not can_integrate(surface, truth):
        for name in predicted.total:
            whole, pressure, friction = (float(part[name]) for part in predicted)
            rows.append([sample.case, name, "", "", whole, "", "", pressure, "", friction])
        return rows
    true = force_coefficients(surface, truth)
    for name in true.total:
        pairs = [(float(t[name]), float(p[name])) for t, p in zip(true, predicted, strict=True)]
        total, total_pred = pairs[0]
        parts = [number for pair in pairs[1:] for number in pair]
        solver = surface.solver_coefficients.get(name, "")
        rows.append([sample.case, name, solver, total, total_pred, total_pred - total, *parts])
    return rows


def distinct_forces(rows: Iterable[list[Any]]) -> list[list[Any]]:
    """The rows sorted by case and coefficient, each of these once."""
    unique = {(row[0], row[1]): row for row in rows}
    return [unique[key] for key in sorted(unique)]


def coefficient_table(rows: Sequence[list[Any]]) -> str:
    """The coefficients of cases without truth, lines to print: total, pressure and friction; "" if there are none."""
    wanted = ("case", "coefficient", "predicted", "predicted_pressure", "predicted_friction")
    columns = [FORCE_COLUMNS.index(name) for name in wanted]
    known = FORCE_COLUMNS.index("true")
    lines = [[str(row[c]) if c < 2 else f"{row[c]:.4f}" for c in columns] for row in rows if row[known] == ""]
    if not lines:
        return ""
    table = [[*wanted[:2], "total", "pressure", "friction"], *lines]
    widths = [max(len(line[column]) for line in table) for column in range(len(wanted))]
    return "".join(
        "  ".join([*map(str.ljust, line[:2], widths[:2]), *map(str.rjust, line[2:], widths[2:])]).rstrip() + "\n"
        for line in table
    )


def gathered(trainer: Any, items: list[Any]) -> list[Any]:
    """The items of all processes."""
    if trainer.world_size == 1:
        return items
    parts: list[Any] = [None] * trainer.world_size
    torch.distributed.all_gather_object(parts, items)
    return [item for part in parts for item in part]


def write_table(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a CSV file whole."""
    with written_whole(path) as beside, open(beside, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)
