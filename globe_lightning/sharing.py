"""Models handed on: a network as a Lightning checkpoint, and a folder to share (weights, configuration, model card).

An exported folder holds ``model.safetensors``, ``config.json`` and ``README.md``, the model card. ``config.json`` has
``format`` and ``format_version``; ``model``, the arguments of ``GlobeLightningModule``; ``schema``, what the samples
hold; ``geometry_arguments``, how its training prepared a case's geometry; ``training``: ``epoch``, ``global_step``,
``best`` {monitor, value}, ``provenance`` (see ``globe_lightning.provenance``), ``data`` and ``test`` (see
``globe_lightning.model_card``).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from globe_lightning.interop import constructor_arguments
from globe_lightning.model_card import model_card, run_facts
from globe_lightning.models.globe import GLOBE
from globe_lightning.module import GEOMETRY_KEY, PROVENANCE_KEY, SCHEMA_KEY, GlobeLightningModule
from globe_lightning.run_folder import written_whole
from globe_lightning.sample import SampleSchema

FORMAT, FORMAT_VERSION = "globe_lightning", 1
WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"


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


def load_weights(module: GlobeLightningModule, path: str | Path) -> None:
    """Load a checkpoint's weights into a module.

    Raises:
        FileNotFoundError, ValueError: of :func:`read_checkpoint`, or the weights are those of another model.
    """
    checkpoint = read_checkpoint(path)
    module.on_load_checkpoint(checkpoint)
    try:
        module.load_state_dict(checkpoint["state_dict"])
    except RuntimeError as error:
        raise ValueError(f"{path}: the weights do not fit the model: {error}") from error


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


def export(checkpoint_path: str | Path, folder: str | Path, licence: str | None = None) -> None:
    """Write a folder to share: weights as safetensors, configuration with the data schema, a filled model card.

    Splits, hardware and versions come from the checkpoint, arguments of the data and test metrics from the run folder
    it lies in; what neither knows is said to be not recorded.

    Args:
        checkpoint_path: of this package.
        folder: made if need be; files of an earlier export are replaced.
        licence: of the weights, e.g. "CC-BY-4.0".

    Raises:
        FileNotFoundError, ValueError: of :func:`read_checkpoint`.
    """
    from safetensors.torch import save_file

    path, folder = Path(checkpoint_path), Path(folder)
    found = read_checkpoint(path)
    weights = {name: value.contiguous() for name, value in found["state_dict"].items()}
    config = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "model": found["hyper_parameters"],
        "schema": found[SCHEMA_KEY],
        "geometry_arguments": found.get(GEOMETRY_KEY, {}),
        "training": {
            "epoch": found.get("epoch"),
            "global_step": found.get("global_step"),
            "best": _best(found, path),
            "provenance": found.get(PROVENANCE_KEY),
            **run_facts(path),
        },
    }
    learned = [name for name in weights if name.startswith("network.") and name != "network.reference_area"]
    with written_whole(folder / WEIGHTS) as beside:
        save_file(weights, beside, metadata={"format": "pt"})
    with written_whole(folder / CONFIG) as beside:
        beside.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    with written_whole(folder / CARD) as beside:
        beside.write_text(model_card(config, sum(weights[name].numel() for name in learned), licence), encoding="utf-8")


def _best(checkpoint: dict[str, Any], path: Path) -> dict[str, Any] | None:
    """The monitored metric of a checkpoint that was kept because it was the best."""
    for state in checkpoint.get("callbacks", {}).values():
        score = state.get("best_model_score") if isinstance(state, dict) else None
        if score is not None and Path(str(state.get("best_model_path"))).name == path.name:
            return {"monitor": state.get("monitor"), "value": float(score)}
    return None


def from_pretrained(folder: str | Path) -> GlobeLightningModule:
    """The module of an exported folder, ready to predict; nothing in the folder is executed.

    Args:
        folder: as :func:`export` wrote it.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is not what it should be; the message names it.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = Path(folder)
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name}: no such file; expected a folder that globe export wrote")
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(config, dict) or config.get("format") != FORMAT or config.get("format_version") != FORMAT_VERSION:
        raise ValueError(f"{path}: expected the format {FORMAT!r}, version {FORMAT_VERSION}")
    try:
        module = GlobeLightningModule(**config["model"])
        lines = module.schema.differences(SampleSchema(**config["schema"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: does not describe a model of this version of the package: {error}") from error
    if lines:
        raise ValueError(f"{path}: its schema ('the data' below) is not that of its model:\n  " + "\n  ".join(lines))
    try:
        module.load_state_dict(load_file(folder / WEIGHTS))
    except (SafetensorError, RuntimeError, OSError) as error:
        raise ValueError(f"{folder / WEIGHTS}: does not hold the weights of {CONFIG}: {error}") from error
    module.geometry_arguments = dict(config.get("geometry_arguments") or {})
    return module.eval()
