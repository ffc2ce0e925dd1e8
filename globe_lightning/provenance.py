"""Where a checkpoint comes from: data, splits, hardware and software of its training, as plain values."""

from __future__ import annotations

import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch


def provenance(trainer: Any) -> dict[str, Any]:
    """What a checkpoint should remember of the training that wrote it.

    Args:
        trainer: Lightning's, in a training.

    Returns:
        ``device``, ``n_processes``, ``n_nodes``, ``precision``; ``software`` {package: version}; ``dataset``, the data
        module's class; ``data_licence``; ``cases`` {split: names}, of the splits that training reads. None or empty
        where unknown.
    """
    data = getattr(trainer, "datamodule", None)
    datasets = getattr(data, "datasets", {})
    return {
        "device": device_name(trainer.strategy.root_device),
        "n_processes": int(trainer.world_size),
        "n_nodes": int(trainer.num_nodes),
        "precision": str(trainer.precision),
        "software": {name: version(name) for name in ("globe-lightning", "torch", "lightning")},
        "dataset": None if data is None else type(data).__name__,
        "data_licence": getattr(data, "licence", None),
        "cases": {split: list(datasets[split].cases) for split in ("train", "val") if split in datasets},
    }


def device_name(device: torch.device) -> str:
    """What a device is sold as, "NVIDIA H200"; of a CPU also the number of threads in use."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or device.type
    return f"{name}, {torch.get_num_threads()} threads"
