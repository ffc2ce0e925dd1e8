"""Measuring in one process, by the same rules for every implementation: time, memory, matrix products. Pure torch."""

from __future__ import annotations

import ctypes
import gc
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def timed(work: Callable[[], Any]) -> dict[str, float]:
    """Wall and CPU seconds of a call and by how many MB its peak of memory rises above what was held before."""
    gc.collect()
    _give_back_memory()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak of memory starts anew
    before = _status("VmRSS")
    start, cpu = time.perf_counter(), time.process_time()
    work()
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "cpu_seconds": time.process_time() - cpu, "peak_mb": _status("VmHWM") - before}


def _give_back_memory() -> None:
    """Return what the allocator holds to the system, so that peaks do not hide in it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _status(name: str) -> float:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith(name))


_PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::baddbmm_"}
Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


class _ProductRecorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[Layout, Layout]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in _PRODUCTS:
            a, b = args[-2:]
            self.found[_layout(a), _layout(b)] += 1
        return func(*args, **(kwargs or {}))


def _layout(x: Tensor) -> Layout:
    return tuple(x.shape), tuple(x.stride()), x.dtype


def record_products(work: Callable[[], Any]) -> Counter[tuple[Layout, Layout]]:
    """The matrix products of a call: how often which layouts are multiplied."""
    with _ProductRecorder() as recorder:
        work()
    return recorder.found


def bare_products(products: Counter[tuple[Layout, Layout]]) -> Callable[[], None]:
    """A call that does the same matrix products and nothing else, into memory that stands ready."""
    operands: dict[Layout, Tensor] = {}
    outputs: dict[tuple[tuple[int, ...], torch.dtype], Tensor] = {}

    def operand(layout: Layout) -> Tensor:
        if layout not in operands:
            shape, stride, dtype = layout
            size = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
            operands[layout] = torch.randn(size).to(dtype).as_strided(shape, stride)
        return operands[layout]

    def output(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if (shape, dtype) not in outputs:
            outputs[shape, dtype] = torch.empty(shape, dtype=dtype)
        return outputs[shape, dtype]

    calls = []
    for (a, b), times in products.items():
        shape = (*a[0][:-1], b[0][-1])
        calls.append((operand(a), operand(b), output(shape, a[2]), times))

    def work() -> None:
        for a, b, out, times in calls:
            for _ in range(times):
                torch.matmul(a, b, out=out)

    return work
