"""The progress bar: losses under short names."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import TQDMProgressBar


class LossBar(TQDMProgressBar):
    """A tqdm bar that shows the train loss, its parts by field and the validation loss.

    Args:
        refresh_rate: steps between two refreshes.
    """

    def __init__(self, refresh_rate: int = 1) -> None:
        super().__init__(refresh_rate=refresh_rate)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start the bar of a resumed epoch too, for which Lightning does not."""
        super().on_train_start(trainer, pl_module)
        if trainer.fit_loop.restarted_mid_epoch:
            self.on_train_epoch_start(trainer)

    def get_metrics(self, trainer: Any, pl_module: Any) -> dict[str, Any]:
        """The numbers beside the bar: "loss", the fields' own, "val_loss"."""
        short = {}
        for name, value in super().get_metrics(trainer, pl_module).items():
            if name.startswith("train/loss") and name.endswith("_step"):
                field = name.removeprefix("train/loss").removesuffix("_step").lstrip("/")
                short[field or "loss"] = value
            elif not name.startswith("train/") and name != "v_num":
                short[name.replace("/", "_")] = value
        return short
