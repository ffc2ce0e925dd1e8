"""Static byte budgets: how much of a device one chunk of pair evaluations may take.

The figures are read once a process and device, so that the hot path never asks a driver.
"""

from __future__ import annotations

import ctypes
import sys
from functools import lru_cache

import psutil
import torch

# On a CPU chunks should nearly fit the cache, but not be so many that Python, which serves one thread at a time, holds
# the others up; on a GPU large launches are fastest.
CPU_CHUNK_BYTES = 64 << 20
GPU_CHUNK_BYTES = 4 << 30
# One chunk never takes more than this share of the device's memory, however small the device.
MAX_SHARE = 1 / 16

# Blocks up to here are reused from the heap, and so much of it is kept when they are freed.
KEPT_BLOCK_BYTES = 32 << 20
KEPT_HEAP_BYTES = 64 << 20


@lru_cache
def total_memory(device_type: str, device_index: int | None = None) -> int:
    """Total memory of a device in bytes: the machine's for "cpu" and others, the card's for "cuda"; read once."""
    if device_type == "cuda":
        return torch.cuda.get_device_properties(device_index or 0).total_memory
    return psutil.virtual_memory().total


@lru_cache
def chunk_budget(device_type: str, device_index: int | None = None) -> int:
    """Bytes that the temporaries of one chunk of pairs may take on a device."""
    default = GPU_CHUNK_BYTES if device_type == "cuda" else CPU_CHUNK_BYTES
    return int(min(default, total_memory(device_type, device_index) * MAX_SHARE))


def pairs_per_chunk(device: torch.device, bytes_per_pair: int, budget: int | None = None) -> int:
    """How many pairs fit the chunk budget (bytes; the device's default if None), at least 256."""
    budget = chunk_budget(device.type, device.index) if budget is None else budget
    return max(256, budget // max(1, bytes_per_pair))


@lru_cache
def keep_freed_memory() -> bool:
    """Let the C library keep some freed memory of this process; returns whether it does. Once a process, on a CPU.

    The temporaries of a chunk are freed and asked for again thousands of times a pass. The heaps of threads give them
    back to the kernel each time, which must then clear every page anew: a tenth of a training step.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    trim_threshold, mmap_threshold = -1, -3  # glibc's malloc.h; setting one alone makes matters worse
    return bool(mallopt(mmap_threshold, KEPT_BLOCK_BYTES)) and bool(mallopt(trim_threshold, KEPT_HEAP_BYTES))
