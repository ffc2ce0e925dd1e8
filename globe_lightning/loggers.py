"""Loggers that need more than Lightning's own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.loggers import MLFlowLogger


class MLflowLogger(MLFlowLogger):
    """Lightning's logger of MLflow, for names of fields such as ``ln(1+nut/nu)``: MLflow refuses most signs.

    Of names there remain letters and digits (ASCII), ``_``, ``-``, ``.``, ``/`` and blanks: ``ln1nut/nu``. The
    arguments are those of Lightning's.
    """

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log numbers."""
        super().log_metrics(acceptable(metrics), step)

    def log_hyperparams(self, params: Any) -> None:
        """Log hyperparameters, nested or not."""
        super().log_hyperparams(acceptable(params) if isinstance(params, Mapping) else params)


def acceptable(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values under names that MLflow accepts, in nested mappings too."""
    return {
        re.sub(r"[^a-zA-Z0-9_/. -]", "", name): acceptable(value) if isinstance(value, Mapping) else value
        for name, value in values.items()
    }
