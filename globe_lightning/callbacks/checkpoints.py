"""Checkpoints: the best by validation loss, and the last, from which a training goes on as if it had never stopped."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor

from globe_lightning.run_folder import RunLogger, forget_from, written_whole

SIGTERM_EXIT = 128 + signal.SIGTERM
"""The exit code of a training that SIGTERM has stopped, that of shells."""

LOG_ROWS_KEY = "log_rows"
"""Where a checkpoint keeps how many rows the run's log had."""


class TrainingStopped(SIGTERMException):
    """A training that was asked to stop; what it has done is in ``last.ckpt``. Ends the process with a code.

    Args:
        reason: who asked.
        code: the process's exit code.
    """

    def __init__(self, reason: str, code: int) -> None:
        super().__init__(code)
        self.reason = reason


class WholeCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its place and renames it: whoever is killed leaves the previous one good."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write one file; local paths only."""
        with written_whole(Path(path)) as beside, open(beside, "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())  # a machine that goes down may otherwise keep the new name and lose the content


class BestCheckpoint(ModelCheckpoint):
    """Keeps the best checkpoints, and ``last.ckpt`` of every epoch and, within one, of every so many minutes or steps.

    Both are written only when training stands between two batches with all that went before it done: the optimizer
    step, the validation, the schedule and the log. A training resumed there equals one that never stopped. A loss
    that is not finite is never among the best.

    SIGTERM, and :meth:`request_stop` in any process, end the training before its next batch: all processes agree,
    ``last.ckpt`` is written, and they exit.

    Args:
        dirpath: the folder.
        filename: of the best ones.
        monitor: the metric that says which is best.
        mode: "min" or "max".
        save_top_k: how many best ones are kept; -1 all, 0 none.
        last_every_n_minutes: time between two writes of ``last.ckpt`` within an epoch; None for none.
        last_every_n_steps: optimizer steps between them; None for none.
    """

    def __init__(
        self,
        dirpath: str | None = None,
        filename: str = "best-epoch{epoch:04d}",
        monitor: str = "val/loss",
        mode: str = "min",
        save_top_k: int = 1,
        last_every_n_minutes: float | None = 10,
        last_every_n_steps: int | None = None,
    ) -> None:
        super().__init__(
            dirpath,
            filename,
            monitor,
            mode=mode,
            save_top_k=save_top_k,
            auto_insert_metric_name=False,
            enable_version_counter=False,
        )
        for name, value in (("last_every_n_minutes", last_every_n_minutes), ("last_every_n_steps", last_every_n_steps)):
            if value is not None and value <= 0:
                raise ValueError(f"{name}: expected a positive number, or null for never, found {value}")
        self.last_every_n_minutes, self.last_every_n_steps = last_every_n_minutes, last_every_n_steps
        self._stop: tuple[str, int] | None = None
        self._validated_epoch: int | None = None
        self._last_step = 0
        self._last_time = 0.0
        self._resumed = False
        # Of the checkpoint that is being written: how many epochs are done. None while Lightning's own are.
        self._epochs_done: int | None = None
        self._within_epoch = False

    def request_stop(self, reason: str, code: int = 0) -> None:
        """End the training before its next batch, resumable; from any process, at any time.

        Args:
            reason: what is printed.
            code: the exit code.
        """
        self._stop = (reason, code)

    # When

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Let the strategy write whole files, and remove what a killed run has left half-written."""
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = WholeCheckpointIO()
        if trainer.is_global_zero and self.dirpath and not trainer.fast_dev_run:
            for path in Path(self.dirpath).glob(".*.ckpt"):
                path.unlink(missing_ok=True)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Take over SIGTERM and put right what Lightning takes a resumed epoch for."""
        super().on_train_start(trainer, pl_module)
        self._last_step, self._last_time = trainer.global_step, time.monotonic()
        # Lightning's own handler speaks to other processes from within the signal, amid their collectives.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_sigterm)  # put back by Lightning, which keeps the original
        loop = trainer.fit_loop
        self._resumed = loop.is_resuming
        epochs = loop.epoch_progress.current
        if epochs.ready == epochs.processed:
            # With max_steps Lightning takes every checkpoint for one within an epoch.
            loop.epoch_loop.restarting = False
        elif self._resumed:
            # Of another number of processes: fewer or more batches make the same cases.
            done = getattr(trainer.train_dataloader, "batches_done", None)
            batches = loop.epoch_loop.batch_progress.current
            if done is not None:
                batches.ready = batches.started = batches.processed = batches.completed = done

    def _on_sigterm(self, *args: Any) -> None:
        self.request_stop("SIGTERM", SIGTERM_EXIT)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Write what is due, all before this batch being done."""
        epoch_loop = trainer.fit_loop.epoch_loop
        if epoch_loop.batch_progress.current.completed % trainer.accumulate_grad_batches:
            return  # gradients are being gathered, and no checkpoint holds them
        if self._resumed:
            self._resumed = False
            epoch_loop._batches_that_stepped = trainer.global_step  # the loggers' step
        self._write_due(trainer, _epochs_processed(trainer), within_epoch=True)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Write the checkpoints of the epoch before."""
        if trainer.global_step > 0:
            self._write_due(trainer, _epochs_processed(trainer), within_epoch=False)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Write the checkpoints of the last epoch."""
        if _epoch_is_whole(trainer):
            self._write_due(trainer, _epochs_processed(trainer), within_epoch=False)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Write ``last.ckpt`` before the validation that an early end within an epoch brings."""
        if trainer.should_stop and not _epoch_is_whole(trainer) and not trainer.sanity_checking:
            self._write_due(trainer, _epochs_processed(trainer), within_epoch=True, stopping=True)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Note that there is a new validation loss; its checkpoint follows when the epoch is done."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking and self._last_step != trainer.global_step:
            self._validated_epoch = trainer.current_epoch

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Write ``last.ckpt`` if training ends within an epoch, at max_steps or by an early end."""
        if not _epoch_is_whole(trainer):
            # Lightning has counted the epoch as done.
            self._write_due(trainer, _epochs_processed(trainer) - 1, within_epoch=True, stopping=True)

    def on_train_batch_end(self, *args: Any) -> None:
        """Nothing: the step's log is not written yet."""

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Nothing: an exception may have come amid a step."""

    # What

    def _write_due(self, trainer: Any, epochs_done: int, within_epoch: bool, stopping: bool = False) -> None:
        if trainer.fast_dev_run or trainer.state.fn != "fit":
            return
        new = trainer.global_step != self._last_step
        due = new and (not within_epoch or stopping or self._validated_epoch is not None or self._is_due(trainer))
        # Clocks and signals differ between processes: one that wants to is enough.
        if not trainer.strategy.reduce_boolean_decision(due or self._stop is not None, all=False):
            return
        if new:
            self._epochs_done, self._within_epoch = epochs_done, within_epoch
            try:
                if self._validated_epoch is not None and not stopping:
                    self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer))
                self._save_last(trainer)
            finally:
                self._epochs_done = self._validated_epoch = None
        if trainer.strategy.reduce_boolean_decision(self._stop is not None, all=False):
            reason, code = trainer.strategy.broadcast(self._stop) or ("another process was asked to", SIGTERM_EXIT)
            _say(f"stopped by {reason} after {trainer.global_step} steps; go on with --ckpt_path last")
            raise TrainingStopped(reason, _exit_code(trainer, code))

    def _is_due(self, trainer: Any) -> bool:
        steps, minutes = self.last_every_n_steps, self.last_every_n_minutes
        return (steps is not None and trainer.global_step - self._last_step >= steps) or (
            minutes is not None and time.monotonic() - self._last_time >= 60 * minutes
        )

    def _save_last(self, trainer: Any) -> None:
        self.last_model_path = str(Path(self.dirpath or ".") / "last.ckpt")
        self._save_checkpoint(trainer, self.last_model_path)
        self._last_step, self._last_time = trainer.global_step, time.monotonic()

    def _monitor_candidates(self, trainer: Any) -> dict[str, Tensor]:
        candidates = super()._monitor_candidates(trainer)
        if self._validated_epoch is not None:
            candidates["epoch"] = torch.tensor(self._validated_epoch)
        return candidates

    def check_monitor_top_k(self, trainer: Any, current: Tensor | None = None) -> bool:
        """Whether the current value is among the best ``save_top_k``."""
        if current is not None and not bool(torch.isfinite(torch.as_tensor(current))):
            return False
        return super().check_monitor_top_k(trainer, current)

    # With what state

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """State plainly how far the training is, whatever hook it stands in, and bring the log up to it."""
        if self._epochs_done is None:
            return
        state = checkpoint["loops"]["fit_loop"]
        epochs, batches = state["epoch_progress"], state["epoch_loop.batch_progress"]
        surplus = epochs["current"]["processed"] - self._epochs_done
        for part in ("total", "current"):
            done = epochs[part]["processed"] - surplus
            begun = done + self._within_epoch
            epochs[part].update(ready=begun, started=begun, processed=done, completed=done)
            done = batches[part]["completed"]
            batches[part].update(ready=done, started=done, processed=done)
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.save()
                if isinstance(logger, RunLogger):
                    checkpoint[LOG_ROWS_KEY] = logger.n_rows

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Take back what the logs have from after the checkpoint: it will come again."""
        if trainer.state.fn == "fit" and trainer.is_global_zero:
            for logger in trainer.loggers:
                forget_from(logger, checkpoint["global_step"], checkpoint.get(LOG_ROWS_KEY))


def _epochs_processed(trainer: Any) -> int:
    return trainer.fit_loop.epoch_progress.current.processed


def _epoch_is_whole(trainer: Any) -> bool:
    batches = trainer.fit_loop.epoch_loop.batch_progress
    return batches.is_last_batch or batches.current.completed >= trainer.num_training_batches


def _exit_code(trainer: Any, code: int) -> int:
    # Lightning kills the process that started the others as soon as one of these ends with a code.
    environment = getattr(trainer.strategy, "cluster_environment", None)
    return 0 if isinstance(environment, LightningEnvironment) and trainer.local_rank > 0 else code


_say: Callable[[str], None] = rank_zero_only(lambda text: print(text, flush=True))
