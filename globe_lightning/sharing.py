"""Models handed on: a network as a Lightning checkpoint, and a folder to share (weights, configuration, model card)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from globe_lightning.interop import constructor_arguments
from globe_lightning.models.globe import GLOBE
from globe_lightning.module import SCHEMA_KEY, GlobeLightningModule
from globe_lightning.run_folder import written_whole


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """The contents of one of this package's checkpoints, nothing in it executed, on the CPU.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is something else.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected a checkpoint of this package (.ckpt)")
    try:
        found = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    except PermissionError:
        raise
    except Exception as error:  # torch has another one for every kind of damage
        reason = "it holds Python objects, which are not loaded" if "Unsupported" in str(error) else "damaged"
        raise ValueError(f"{path}: not a checkpoint of this package ({reason}); expected one of globe fit") from error
    expected = {"state_dict", "hyper_parameters", "pytorch-lightning_version", SCHEMA_KEY}
    if not isinstance(found, dict) or not expected <= set(found):
        holds = f"a mapping of {sorted(map(str, found))[:8]}" if isinstance(found, dict) else type(found).__name__
        raise ValueError(f"{path}: not a checkpoint of this package (it holds {holds}); expected one of globe fit")
    return found


def write_checkpoint(module: GlobeLightningModule, path: str | Path) -> None:
    """Write a module as a checkpoint that ``test``, ``predict`` and further training accept.

    Training from it starts with a fresh optimizer at epoch 0.
    """
    checkpoint: dict[str, Any] = {
        "epoch": 0,
        "global_step": 0,
        "pytorch-lightning_version": pl.__version__,
        "state_dict": {name: value.detach().cpu() for name, value in module.state_dict().items()},
        "callbacks": {},
        "optimizer_states": [],
        "lr_schedulers": [],
        module.CHECKPOINT_HYPER_PARAMS_KEY: dict(module.hparams),
    }
    module.on_save_checkpoint(checkpoint)
    with written_whole(Path(path)) as beside:
        torch.save(checkpoint, beside)


def module_of(network: GLOBE) -> GlobeLightningModule:
    """A network as a module with the default loss, optimizer and schedule, in float32."""
    module = GlobeLightningModule(**constructor_arguments(network))
    module.network.load_state_dict(network.state_dict())
    return module
