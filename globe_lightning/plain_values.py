"""Values in plain Python: what checkpoints and configurations hold, so that anyone can read them."""

from __future__ import annotations

from typing import Any

import torch


def plain(value: Any) -> Any:
    """A value in plain Python: mappings to dicts, sequences to lists, numpy and 0-d tensor numbers to numbers.

    Raises:
        ValueError: something else.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if hasattr(value, "items"):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, torch.device):
        return str(value)
    if hasattr(value, "item"):
        return value.item()
    if isinstance(value, (bool, int, float, str)):
        for kind in (bool, int, float, str):
            if isinstance(value, kind):
                return kind(value)
    raise ValueError(f"expected plain values (numbers, text, lists, mappings), found {type(value).__name__}: {value!r}")
