"""The budget of a chunk bounds memory and changes no result, and chunks reuse what others have freed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_same, fields_of, gradients_of, make_case, make_model

import globe_lightning.memory as memory
import globe_lightning.models.interactions as interactions
from globe_lightning.models.interactions import bytes_per_pair
from globe_lightning.models.multiscale import SourceTable


@pytest.mark.parametrize("theta", [0.0, 1.0])
@pytest.mark.parametrize("dims", [2, 3])
def test_a_smaller_chunk_budget_changes_nothing(dims: int, theta: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model, case = make_model(dims, theta=theta), make_case(dims, 24, 12, 30)
    asked = []
    pairs_per_chunk = memory.pairs_per_chunk

    def watched(*arguments: Any) -> int:
        asked.append(pairs_per_chunk(*arguments))
        return asked[-1]

    monkeypatch.setattr("globe_lightning.models.interactions.pairs_per_chunk", watched)
    whole = fields_of(model, case)
    whole_gradients = gradients_of(model, case)
    largest = max(asked)
    for budget in (memory.chunk_budget("cpu") // 2, 1):
        asked.clear()
        monkeypatch.setattr(memory, "chunk_budget", lambda *_, budget=budget: budget)
        assert_same(fields_of(model, case), whole)
        assert_same(gradients_of(model, case), whole_gradients)
        assert max(asked) < largest
    assert max(asked) == 256


@pytest.mark.parametrize("dims", [2, 3])
def test_the_budget_bounds_what_chunks_take(dims: int) -> None:
    """Live bytes of all tensors: with twice the budget no more than once the budget is added."""
    case = make_case(dims, 60, 40, 300, dtype=torch.float32)

    def peaks(budget: int) -> tuple[int, int]:
        model = make_model(dims, torch.float32, hidden_layer_sizes=[48, 48], chunk_bytes=budget)
        with torch.no_grad():
            forward = peak_of_live_bytes(lambda: fields_of(model, case))
        return forward, peak_of_live_bytes(lambda: gradients_of(model, case))

    budget = 4 << 20
    for once, twice in zip(peaks(budget), peaks(2 * budget), strict=True):
        assert 0.4 * budget < twice - once < 1.1 * budget


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize(
    "changes",
    [{}, {"hidden_layer_sizes": [16]}, {"network_type": "mlp"}, {"compile": False}, {"hidden_layer_sizes": [20, 20]}],
    ids=str,
)
def test_a_pair_takes_what_it_is_thought_to(
    dims: int, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Live bytes for so many more pairs in one chunk, over the bytes that chunks are sized by."""
    thought: dict[bool, int] = {}

    def watched(table: SourceTable, itemsize: int, with_gradient: bool, fused: bool) -> int:
        thought[with_gradient] = bytes_per_pair(table, itemsize, with_gradient, fused)
        return thought[with_gradient]

    monkeypatch.setattr(interactions, "bytes_per_pair", watched)
    arguments = {"hidden_layer_sizes": [48, 48, 48], "theta": 0.0, "chunk_bytes": 1 << 40, **changes}
    n_sources, n_targets = 60, 500

    def peaks(n_targets: int) -> tuple[int, int]:
        model = make_model(dims, torch.float32, **arguments)
        case = make_case(dims, n_sources, 40, n_targets, dtype=torch.float32)
        with torch.no_grad():
            forward = peak_of_live_bytes(lambda: fields_of(model, case))
        return forward, peak_of_live_bytes(lambda: gradients_of(model, case))

    few, many = peaks(n_targets), peaks(2 * n_targets)
    for with_gradient in (False, True):
        taken = (many[with_gradient] - few[with_gradient]) / (n_targets * n_sources)
        assert 0.85 < taken / thought[with_gradient] < 1.05


@pytest.mark.parametrize("use_gradient_checkpointing", [True, False])
def test_a_forward_pass_that_keeps_nothing_has_larger_chunks(
    use_gradient_checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks: dict[str, int] = {}
    for name in ("_add_block", "_add_gradients"):
        counted = partial(_counted, getattr(interactions, name), blocks, name)
        monkeypatch.setattr(interactions, name, counted)
    arguments = {"hidden_layer_sizes": [48, 48, 48], "chunk_bytes": 8 << 20}
    model = make_model(3, use_gradient_checkpointing=use_gradient_checkpointing, **arguments)
    gradients_of(model, make_case(3, 60, 40, 300))
    if use_gradient_checkpointing:
        assert blocks["_add_block"] < 0.6 * blocks["_add_gradients"]
    else:
        assert blocks["_add_block"] == blocks["_add_gradients"]


def _counted(function: Callable[..., Any], calls: dict[str, int], name: str, *arguments: Any) -> Any:
    calls[name] = calls.get(name, 0) + 1
    return function(*arguments)


def peak_of_live_bytes(work: Callable[[], Any]) -> int:
    """The most that tensors made by a call take at a time, by the allocator's own record; on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
            work()
    finally:
        torch.set_num_threads(threads)
    events = profiler.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return max(accumulate(nbytes for _, nbytes in changes))


def test_memory_figures_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory.chunk_budget("cpu") <= memory.total_memory("cpu") * memory.MAX_SHARE
    assert memory.pairs_per_chunk(torch.device("cpu"), 1000, 1_000_000) == 1000
    assert memory.pairs_per_chunk(torch.device("cpu"), 10**9, 1) == 256
    before = memory.total_memory("cpu")
    monkeypatch.setattr("psutil.virtual_memory", lambda: pytest.fail("asked the driver again"))
    assert memory.total_memory("cpu") == before


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's counter of page faults")
def test_chunks_reuse_their_memory() -> None:
    """Pages that a training step asks the kernel for, in a process of its own with two threads."""
    script = """
import resource, sys
import torch
from helpers import fields_of, make_case, make_model
from globe_lightning import memory
torch.set_num_threads(2)
model = make_model(3, torch.float32, hidden_layer_sizes=[64, 64], n_communication_hyperlayers=0)
case = make_case(3, 200, 100, 200, dtype=torch.float32)
if sys.argv[1] == "off":
    memory.keep_freed_memory = lambda: False
    import globe_lightning.models.interactions as interactions
    interactions.keep_freed_memory = lambda: False
def step():
    sum(field.square().sum() for field in fields_of(model, case).values()).backward()
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(2):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    found = {}
    for mode in ("off", "on"):
        command = [sys.executable, "-c", script, mode]
        out = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent)
        found[mode] = int(out.stdout)
    print(f"\npages asked for in two steps: {found}")
    assert found["on"] < found["off"] / 2
