"""Checkpoints: the best by validation loss, and the last."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor


class BestCheckpoint(ModelCheckpoint):
    """Lightning's checkpoint callback, for which a loss that is not finite is never among the best.

    The arguments are those of ``lightning.pytorch.callbacks.ModelCheckpoint``.
    """

    def check_monitor_top_k(self, trainer: Any, current: Tensor | None = None) -> bool:
        """Whether the current value is among the best ``save_top_k``."""
        if current is not None and not bool(torch.isfinite(torch.as_tensor(current))):
            return False
        return super().check_monitor_top_k(trainer, current)
