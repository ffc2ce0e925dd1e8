"""Optimizers and learning-rate schedules: plain torch, driven by the Lightning module.

A schedule multiplies the learning rates that the optimizer was built with. Its hyperparameters always come from its
constructor; only what it has found out so far is kept in a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Muon, Optimizer, RAdam

OPTIMIZERS = ("muon", "radam", "adamw")
SCHEDULES = ("plateau", "cosine", "constant")


TRAINING_ARGUMENTS = (
    "optimizer",
    "lr",
    "weight_decay",
    "schedule",
    "warmup_steps",
    "plateau_factor",
    "plateau_patience_steps",
    "plateau_threshold",
    "min_lr_factor",
)
"""The arguments that describe an optimizer and its schedule."""


def check_training_arguments(
    optimizer: str,
    lr: float,
    weight_decay: float,
    schedule: str,
    warmup_steps: int,
    plateau_factor: float,
    plateau_patience_steps: int,
    plateau_threshold: float,
    min_lr_factor: float,
) -> None:
    """Judge the arguments of an optimizer and its schedule, before anything is built.

    Raises:
        ValueError: one is out of range; the message names it.
    """
    checks = {
        "optimizer": (optimizer in OPTIMIZERS, optimizer, f"one of {OPTIMIZERS}"),
        "lr": (0 < lr < math.inf, lr, "a positive number"),
        "weight_decay": (0 <= weight_decay < math.inf, weight_decay, "0 or a positive number"),
        "schedule": (schedule in SCHEDULES, schedule, f"one of {SCHEDULES}"),
        "warmup_steps": (warmup_steps >= 0, warmup_steps, "0 or a number of steps"),
        "plateau_factor": (0 < plateau_factor < 1, plateau_factor, "a number between 0 and 1"),
        "plateau_patience_steps": (plateau_patience_steps >= 1, plateau_patience_steps, "1 or more steps"),
        "plateau_threshold": (0 <= plateau_threshold < 1, plateau_threshold, "0 <= threshold < 1"),
        "min_lr_factor": (0 <= min_lr_factor <= 1, min_lr_factor, "a fraction from 0 to 1"),
    }
    for name, (good, found, expected) in checks.items():
        if not good:
            raise ValueError(f"{name}: expected {expected}, found {found!r}")
    if schedule == "plateau" and warmup_steps:
        raise ValueError("warmup_steps: the plateau schedule has no warm-up; set 0, or schedule cosine or constant")


class MuonRAdam(Optimizer):
    """Muon for matrices and RAdam for everything else, as one optimizer.

    One closure call, then one step of each part, so that a training loop counts one step. Muon scales its steps to
    the size of AdamW's (``match_rms_adamw``); RAdam decays weights decoupled from the gradient.

    Args:
        parameters: all parameters; those with two dimensions, both larger than 1, go to Muon.
        lr: learning rate of both.
        weight_decay: decay of both.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 1e-3, weight_decay: float = 1e-4) -> None:
        matrices, others = split_parameters(parameters)
        self._muon = Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        self._radam = RAdam(others, lr=lr, weight_decay=weight_decay, decoupled_weight_decay=True)
        super().__init__([*self._muon.param_groups, *self._radam.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Let both parts work on this optimizer's groups and state, so that saving and loading need no more."""
        self._muon.param_groups, self._radam.param_groups = self.param_groups[:1], self.param_groups[1:]
        self._muon.state = self._radam.state = self.state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step of both parts; the closure, if any, is evaluated once. Returns its result."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._muon.step()
        self._radam.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore momenta and counters; learning rate, decay and the like stay as constructed."""
        super().load_state_dict(keep_hyperparameters(self, state_dict))
        self._share()


class _KeepsHyperparameters(Optimizer):
    """Restores only the state of an optimizer, never its hyperparameters."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(keep_hyperparameters(self, state_dict))


class _RAdam(_KeepsHyperparameters, RAdam):
    pass


class _AdamW(_KeepsHyperparameters, torch.optim.AdamW):
    pass


def keep_hyperparameters(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A saved optimizer state with its hyperparameters replaced by those of ``optimizer``."""
    own, saved = optimizer.state_dict()["param_groups"], state_dict["param_groups"]
    if [len(group["params"]) for group in own] != [len(group["params"]) for group in saved]:
        raise ValueError(
            f"the checkpoint's optimizer has groups of {[len(group['params']) for group in saved]} parameters, this "
            f"one of {[len(group['params']) for group in own]}: it was saved by another optimizer; train on with that "
            "one, or start afresh from the weights"
        )
    groups = [{**mine, "params": theirs["params"]} for mine, theirs in zip(own, saved, strict=True)]
    return {**state_dict, "param_groups": groups}


def split_parameters(parameters: Iterable[nn.Parameter]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Trainable parameters as (matrices, others): a matrix has two dimensions, both larger than 1."""
    trainable = [p for p in parameters if p.requires_grad]
    matrices = [p for p in trainable if p.ndim == 2 and min(p.shape) > 1]
    chosen = {id(p) for p in matrices}
    return matrices, [p for p in trainable if id(p) not in chosen]


def build_optimizer(name: str, parameters: Iterable[nn.Parameter], lr: float, weight_decay: float) -> Optimizer:
    """An optimizer by name: "muon" (Muon and RAdam in one), "radam" or "adamw".

    Raises:
        ValueError: unknown name.
    """
    if name == "muon":
        return MuonRAdam(parameters, lr, weight_decay)
    trainable = [p for p in parameters if p.requires_grad]
    if name == "radam":
        return _RAdam(trainable, lr=lr, weight_decay=weight_decay, decoupled_weight_decay=True)
    if name == "adamw":
        return _AdamW(trainable, lr=lr, weight_decay=weight_decay)
    raise ValueError(f"optimizer: expected one of {OPTIMIZERS}, found {name!r}")


class Schedule:
    """Base of the schedules: keeps every group's learning rate at its constructed value times ``multiplier``.

    Args:
        optimizer: whose learning rates to set.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.base_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self.multiplier = 1.0

    def apply(self) -> None:
        """Set the learning rates."""
        for group, lr in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = lr * self.multiplier

    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart; plain values."""
        return {"multiplier": self.multiplier}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore and set the learning rates."""
        for name in self.state_dict():
            if name in state_dict:
                setattr(self, name, state_dict[name])
        self.apply()


class PlateauSchedule(Schedule):
    """Lower the learning rate when a loss has not improved for a number of optimizer steps.

    Patience counts optimizer steps, not calls, so it means the same whatever the length of an epoch and the number of
    processes. A loss improves when it falls below ``best * (1 - threshold)``; NaN never does.

    Args:
        optimizer: whose learning rates to set.
        factor: what the learning rate is multiplied with.
        patience_steps: optimizer steps without improvement before that.
        min_lr_factor: floor of the learning rate, as a fraction of the constructed one.
        threshold: relative improvement that counts.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        factor: float = 0.5,
        patience_steps: int = 1600,
        min_lr_factor: float = 1 / 64,
        threshold: float = 1e-3,
    ) -> None:
        super().__init__(optimizer)
        if not 0 < factor < 1:
            raise ValueError(f"plateau_factor: expected a number between 0 and 1, found {factor}")
        self.factor, self.patience_steps = factor, patience_steps
        self.min_lr_factor, self.threshold = min_lr_factor, threshold
        self.best = math.inf
        self.best_step = 0

    def step(self, metric: float | Tensor, global_step: int) -> None:
        """Report a loss at an optimizer step, lower the learning rate if it is time."""
        value = float(metric)
        if value < self.best * (1 - self.threshold) or (value < self.best and math.isinf(self.best)):
            self.best, self.best_step = value, global_step
        elif global_step - self.best_step >= self.patience_steps:
            self.multiplier = max(self.multiplier * self.factor, self.min_lr_factor)
            self.best_step = global_step
        self.apply()

    def state_dict(self) -> dict[str, Any]:
        """Multiplier, best loss and the step it was seen at; plain values."""
        return {"multiplier": self.multiplier, "best": self.best, "best_step": self.best_step}


class StepSchedule(Schedule):
    """A learning rate that depends on the step alone: linear warm-up, then constant or a half cosine to the floor.

    Args:
        optimizer: whose learning rates to set.
        warmup_steps: steps of the warm-up.
        total_steps: where the cosine reaches its floor; None for a constant rate.
        min_lr_factor: the floor, as a fraction of the constructed learning rate.
    """

    def __init__(
        self, optimizer: Optimizer, warmup_steps: int = 0, total_steps: int | None = None, min_lr_factor: float = 1 / 64
    ) -> None:
        super().__init__(optimizer)
        self.warmup_steps, self.total_steps, self.min_lr_factor = warmup_steps, total_steps, min_lr_factor
        self.step(0)

    def step(self, global_step: int) -> None:
        """Set the learning rates for the step after ``global_step`` done steps."""
        self.multiplier = self._at(global_step)
        self.apply()

    def _at(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        if self.total_steps is None:
            return 1.0
        progress = min((step - self.warmup_steps) / max(self.total_steps - self.warmup_steps, 1), 1.0)
        return self.min_lr_factor + (1 - self.min_lr_factor) * 0.5 * (1 + math.cos(math.pi * progress))
