"""Throughput: what an epoch of training spends its time and memory on."""

from __future__ import annotations

import resource
import sys
import time
from collections import deque
from itertools import pairwise
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

PHASES = ("data", "plan", "forward", "backward", "optimizer")
"""The parts of a training step, in order; the forward pass includes the loss."""


class Throughput(Callback):
    """Logs, for each epoch of training, speeds, the seconds in each part of the steps, and peak memory.

    ``throughput/samples_per_second`` counts the cases of all processes, validation's time left out.
    ``throughput/evaluations_per_second`` counts the kernel evaluations of the first process's forward passes, every
    branch and layer. ``throughput/seconds_<phase>`` are the first process's: "data" is waiting for a sample and moving
    it to the device, "plan" building trees and plans, "optimizer" clipping, the step and the schedule.
    ``throughput/peak_memory_gb`` is the first process's: on a GPU what tensors held at most in the epoch, else the
    resident memory of the process at most so far.

    On a GPU the seconds of all phases but "data" are the device's, between events in its stream; nothing waits for the
    device within a step. On a CPU they are wall time.

    Args:
        every_n_epochs: how often; 0 for never.

    Raises:
        ValueError: ``every_n_epochs`` is negative.
    """

    def __init__(self, every_n_epochs: int = 1) -> None:
        if every_n_epochs < 0:
            raise ValueError(f"every_n_epochs: expected 0 (never) or a number of epochs, found {every_n_epochs}")
        self.every_n_epochs = every_n_epochs
        self._clock = StepClock(None)
        self._active = False
        self._reset()

    def _reset(self) -> None:
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._samples = self._evaluations = 0
        self._paused = 0.0
        self._epoch_start = self._idle_since = time.perf_counter()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Time the building of plans too, and count what they ask for."""
        device = pl_module.device
        self._clock = StepClock(device if device.type == "cuda" else None)
        if not hasattr(pl_module, "build_plans"):
            return
        build_plans = pl_module.build_plans

        def timed(sample: Any) -> Any:
            if not self._active or not pl_module.training:
                return build_plans(sample)
            self._clock.mark("forward")  # what stands before the plan
            plans = build_plans(sample)
            self._clock.mark("plan")
            counts, network = plans.n_evaluations, pl_module.hparams
            layers = network["n_communication_hyperlayers"] * counts["communication"] + counts["prediction"]
            self._evaluations += layers * len(network["reference_length_names"])
            return plans

        pl_module.build_plans = timed

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leave the module as it was."""
        vars(pl_module).pop("build_plans", None)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to count."""
        self._active = self.every_n_epochs > 0 and trainer.current_epoch % self.every_n_epochs == 0
        if self._active and self._clock.device is not None:
            torch.cuda.reset_peak_memory_stats(self._clock.device)
        self._reset()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Leave out what validation takes within an epoch."""
        self._validation_start = time.perf_counter()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Go on after a validation."""
        now = time.perf_counter()
        self._paused += now - self._validation_start
        self._idle_since += now - self._validation_start

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """The sample is there."""
        if self._active:
            self._seconds["data"] += time.perf_counter() - self._idle_since
            self._clock.start()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """The forward pass is done."""
        if self._active:
            self._clock.mark("forward")

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """The backward pass is done."""
        if self._active:
            self._clock.mark("backward")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """The step is done."""
        if self._active:
            self._clock.mark("optimizer")
            self._clock.collect(self._seconds)
            self._samples += 1
            self._idle_since = time.perf_counter()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Log the epoch."""
        if not self._active or not self._samples:
            return
        self._active = False
        self._clock.collect(self._seconds, wait=True)
        elapsed = time.perf_counter() - self._epoch_start - self._paused
        values = {
            "samples_per_second": self._samples * trainer.world_size / elapsed,
            "evaluations_per_second": self._evaluations / elapsed,
            **{f"seconds_{phase}": self._seconds[phase] for phase in PHASES},
            "peak_memory_gb": peak_memory(self._clock.device) / 1e9,
        }
        named = {f"throughput/{name}": value for name, value in values.items()}
        pl_module.log_dict(named, batch_size=1, rank_zero_only=True)


class StepClock:
    """Times the parts of steps without waiting for a device.

    Args:
        device: a GPU, whose own time is taken; None for wall time.
    """

    def __init__(self, device: torch.device | None) -> None:
        self.device = device
        self._steps: deque[list[tuple[str, Any]]] = deque()
        self._free: list[torch.cuda.Event] = []

    def _now(self) -> Any:
        if self.device is None:
            return time.perf_counter()
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def start(self) -> None:
        """A step begins."""
        self._steps.append([("", self._now())])

    def mark(self, phase: str) -> None:
        """A phase of the current step ends here; it began at the mark before."""
        if self._steps:
            self._steps[-1].append((phase, self._now()))

    def collect(self, seconds: dict[str, float], wait: bool = False) -> None:
        """Add the phases of all steps that the device is done with; with ``wait``, of all."""
        if wait and self._steps and self.device is not None:
            self._steps[-1][-1][1].synchronize()
        while self._steps and (self.device is None or self._steps[0][-1][1].query()):
            marks = self._steps.popleft()
            for (_, before), (phase, after) in pairwise(marks):
                seconds[phase] += after - before if self.device is None else before.elapsed_time(after) / 1000
            if self.device is not None:
                self._free += [event for _, event in marks]


def peak_memory(device: torch.device | None) -> int:
    """Bytes: of tensors on a GPU since the last reset; without one, resident in this process since its start."""
    if device is not None:
        return torch.cuda.max_memory_allocated(device)
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes if sys.platform == "darwin" else kilobytes * 1024
