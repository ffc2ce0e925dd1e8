"""The run folder: the one place that names what a run writes, and where.

``<root>/<name>/`` holds ``config.yaml``, ``metrics.csv``, ``checkpoints/``, ``predictions/`` and ``pictures/``.
"""

from __future__ import annotations

import csv
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.loggers.logger import rank_zero_experiment


class RunFolder:
    """The folder of one run.

    Args:
        root: where runs live.
        name: the run's own folder in it.
    """

    def __init__(self, root: str = "runs", name: str = "default") -> None:
        self.path = Path(root) / name
        self.checkpoints = self.path / "checkpoints"
        self.predictions = self.path / "predictions"
        self.pictures = self.path / "pictures"
        self.sensitivities = self.path / "sensitivities"

    def require_writable(self) -> None:
        """Create the folder and try to write in it.

        Raises:
            OSError: it cannot be written to; the message says what to set.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass
        except OSError as error:
            raise OSError(
                f"run.root: cannot write to {self.path} ({error.strerror}); set run.root (--run.root) and run.name to "
                "a folder that can be written to"
            ) from error

    def last_checkpoint(self) -> Path | None:
        """The checkpoint to resume from, None if there is none."""
        path = self.checkpoints / "last.ckpt"
        return path if path.is_file() else None

    def best_checkpoint(self) -> Path | None:
        """The checkpoint of lowest validation loss, None if there is none."""
        found = sorted(self.checkpoints.glob("best*.ckpt"))
        last = self.last_checkpoint()
        if len(found) > 1 and last is not None:
            # Several are kept: the checkpoint callback's own state knows which of them is the best.
            states = torch.load(last, weights_only=True, map_location="cpu").get("callbacks", {}).values()
            names = {Path(state["best_model_path"]).name for state in states if state.get("best_model_path")}
            found = [path for path in found if path.name in names] or found
        return max(found, key=lambda path: path.stat().st_mtime) if found else None

    def set_aside(self) -> Path | None:
        """Move an earlier training's results into ``earlier/<n>/``; returns that folder, None if there were none."""
        if not any(path.exists() for path in (self.checkpoints, self.path / "metrics.csv")):
            return None
        earlier = self.path / "earlier"
        earlier.mkdir(parents=True, exist_ok=True)
        numbers = [int(path.name) for path in earlier.iterdir() if path.name.isdigit()]
        target = earlier / str(max(numbers, default=0) + 1)
        target.mkdir()
        for path in sorted(self.path.iterdir()):
            if path != earlier:
                os.replace(path, target / path.name)
        return target


def safe_name(case: str) -> str:
    """A case's name as the stem of a file name."""
    return "".join(letter if letter.isalnum() or letter in "-_.+" else "_" for letter in case) or "_"


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A path beside ``path``, with the same suffix, to write to; renamed to it when the block ends well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield beside
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


class RunLogger(CSVLogger):
    """Writes metrics to one CSV file of a folder and keeps what an earlier part of the same run wrote there.

    Args:
        folder: the run's folder.
        file_name: the file in it.
        flush_logs_every_n_steps: how often rows are written to disk.
    """

    def __init__(self, folder: str, file_name: str = "metrics.csv", flush_logs_every_n_steps: int = 20) -> None:
        super().__init__(folder, name="", version="", flush_logs_every_n_steps=flush_logs_every_n_steps)
        self._file_name = file_name

    @property
    @rank_zero_experiment
    def experiment(self) -> ExperimentWriter:
        """The writer of the file."""
        if not isinstance(self._experiment, _AppendingWriter):
            self._experiment = _AppendingWriter(self.log_dir, self._file_name)
        return self._experiment

    @property
    def n_rows(self) -> int:
        """Rows on disk."""
        return self.experiment.n_rows  # type: ignore[attr-defined]

    def keep(self, n_rows: int | None, before_step: int) -> None:
        """Remove what a resumed training will write again, and a row that a killed process has left half-written.

        Args:
            n_rows: rows that the file had when the checkpoint was taken; None if that is unknown.
            before_step: the checkpoint's step.
        """
        path = Path(self.log_dir) / self._file_name
        if not path.is_file():
            return
        with open(path, newline="", encoding="utf-8") as file:
            whole = [line for line in file.read().splitlines(keepends=True) if line.endswith("\n")]
        names, *rows = csv.reader(whole) if whole else [[]]
        kept = [row for row in rows[:n_rows] if len(row) == len(names) and int(row[names.index("step")]) < before_step]
        with written_whole(path) as beside, open(beside, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([names, *kept])
        self._experiment = None


def forget_from(logger: Logger, step: int, n_rows: int | None = None) -> None:
    """Let a logger take back what it has from a step on, which a resumed training will log again.

    The run's own file is cut; TensorBoard is told not to show it. Other loggers keep it.

    Args:
        logger: any.
        step: the checkpoint's.
        n_rows: rows that the run's own file had when the checkpoint was taken; None if that is unknown.
    """
    if isinstance(logger, RunLogger):
        logger.keep(n_rows, step)
    elif isinstance(logger, TensorBoardLogger):
        # Lightning has opened the file already; the next one begins with the mark that hides what was after the step.
        logger.experiment.close()
        logger._experiment = None
        logger._kwargs["purge_step"] = step


class _AppendingWriter(ExperimentWriter):
    def __init__(self, log_dir: str, file_name: str) -> None:
        self.NAME_METRICS_FILE = file_name
        super().__init__(log_dir)
        path = Path(self.metrics_file_path)
        self.n_rows = 0
        if path.is_file():
            with open(path, newline="", encoding="utf-8") as file:
                self.metrics_keys, *rows = [*csv.reader(file)] or [[]]
            self.n_rows = len(rows)

    def _check_log_dir_exists(self) -> None:
        """Keep what is there."""

    def log_hparams(self, params: dict) -> None:
        """Nothing: ``config.yaml`` says it all."""

    def save(self) -> None:
        """Append the rows, under the columns that the file has already."""
        self.n_rows += len(self.metrics)
        super().save()

    def _rewrite_with_new_header(self, fieldnames: list[str]) -> None:
        """Write the file anew under more columns."""
        path = Path(self.metrics_file_path)
        with open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        with written_whole(path) as beside, open(beside, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=fieldnames)
            writer.writeheader()
            writer.writerows(rows)
