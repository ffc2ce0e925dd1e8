"""Plans of samples that come again, kept in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

Built = TypeVar("Built")

MOST_SEEN = 100_000


class PlanCache:
    """Keeps what is built for a key from the second time on that it is asked for, as long as there is room.

    Samples that are drawn anew at every step never come twice, and so take no room from those that do. These stay: they
    come in turn, each as often as the others. A copy of a cache is empty.

    Args:
        most_bytes: what all that is kept may take together; 0 keeps nothing.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.clear()

    def __reduce__(self) -> tuple[Any, ...]:
        return PlanCache, (self.most_bytes,)

    def clear(self) -> None:
        """Let go of all."""
        self.n_bytes = 0
        self.kept: dict[Hashable, Any] = {}
        self._seen: set[Hashable] = set()

    def get(self, key: Hashable | None, build: Callable[[], Built]) -> Built:
        """What was built for a key, or what is built now; always the latter if the key is None."""
        if key is None or not self.most_bytes:
            return build()
        # A tensor of inference mode is of no use where gradients are wanted.
        key = (key, torch.is_inference_mode_enabled())
        if key in self.kept:
            return self.kept[key]
        built = build()
        if key in self._seen:
            size = n_bytes(built)
            if self.n_bytes + size <= self.most_bytes:
                self.n_bytes += size
                self.kept[key] = built
        else:
            if len(self._seen) >= MOST_SEEN:
                self._seen.clear()
            self._seen.add(key)
        return built


def n_bytes(value: Any) -> int:
    """Memory of all tensors in dataclasses, lists and tuples; what several are views of counts once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in _tensors(value)}
    return sum(storages.values())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif is_dataclass(value):
        for item in fields(value):
            yield from _tensors(getattr(value, item.name))
