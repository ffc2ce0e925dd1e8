"""The time limit: training ends cleanly, to be resumed, before the wall time of its job is over."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from typing import Any

import psutil
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from globe_lightning.callbacks.checkpoints import BestCheckpoint

LIMIT_EXIT = os.EX_TEMPFAIL if hasattr(os, "EX_TEMPFAIL") else 75
"""The exit code of a training that its time limit has stopped: to be started again."""

SLURM_END = "SLURM_JOB_END_TIME"
"""The variable in which Slurm says when a job ends, in seconds since 1970."""


class TimeLimit(Callback):
    """Ends training before its job's wall time is over: all processes after the same step, ``last.ckpt`` written.

    The end comes before the first step that might pass the limit: the limit less the margin, less the longest time
    between two steps so far (which a validation may lie in). SIGUSR1 ends training at once in the same way, in place
    of whatever else handles it. The exit code is 75.

    Args:
        wall_time: how long the process may run since its start, as "HH:MM:SS", "D-HH:MM:SS" or in seconds; null takes
            the end of the Slurm job if there is one.
        margin: time that is left for writing the checkpoint, in the same forms.

    Raises:
        ValueError: a time is of another form; the message names it.
    """

    def __init__(self, wall_time: str | int | None = None, margin: str | int = "00:05:00") -> None:
        self._wall_seconds = None if wall_time is None else seconds_of(wall_time, "wall_time")
        self._margin = seconds_of(margin, "margin")
        self._deadline: float | None = None
        self._longest = 0.0
        self._before = 0.0
        self._earlier_handler: Any = None
        self._checkpoints: Any = None

    def deadline(self) -> float | None:
        """When training must have ended, in seconds since 1970; None if nothing is known.

        Raises:
            ValueError: Slurm's variable holds something else than a time.
        """
        if self._wall_seconds is not None:
            return psutil.Process().create_time() + self._wall_seconds - self._margin
        text = os.environ.get(SLURM_END)
        if not text:
            return None
        try:
            return float(text) - self._margin
        except ValueError as error:
            raise ValueError(f"{SLURM_END}: expected seconds since 1970, found {text!r}; unset it") from error

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to watch the clock and SIGUSR1."""
        checkpoints = next((item for item in trainer.callbacks if isinstance(item, BestCheckpoint)), None)
        if checkpoints is None:
            raise ValueError("TimeLimit: the trainer has no BestCheckpoint among its callbacks to write last.ckpt")
        self._checkpoints = checkpoints
        self._deadline = self.deadline()
        self._longest, self._before = 0.0, time.time()
        if self._deadline is not None:
            until = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self._deadline))
            rank_zero_info(f"time limit: training ends before {until}")
        if threading.current_thread() is threading.main_thread() and hasattr(signal, "SIGUSR1"):
            self._earlier_handler = signal.signal(signal.SIGUSR1, self._on_signal)

    def _on_signal(self, *args: Any) -> None:
        self._checkpoints.request_stop("SIGUSR1", LIMIT_EXIT)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Ask for the end if another step, as long as the longest, would pass the limit."""
        now = time.time()
        self._longest, self._before = max(self._longest, now - self._before), now
        if self._deadline is not None and now + self._longest > self._deadline:
            self._checkpoints.request_stop("the time limit", LIMIT_EXIT)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Put the signal's handler back."""
        if self._earlier_handler is not None:
            signal.signal(signal.SIGUSR1, self._earlier_handler)
            self._earlier_handler = None


def seconds_of(value: str | int, name: str) -> float:
    """A duration in seconds, from "HH:MM:SS", "D-HH:MM:SS" or a number of seconds.

    Raises:
        ValueError: it is something else, or negative; the message begins with ``name``.
    """
    found = re.fullmatch(r"(?:(\d+)-)?(\d+):([0-5]?\d):([0-5]?\d)", str(value))
    if found:
        days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    if re.fullmatch(r"\d+", str(value)):
        return float(value)
    raise ValueError(f'{name}: expected "HH:MM:SS", "D-HH:MM:SS" or a number of seconds, found {value!r}')
