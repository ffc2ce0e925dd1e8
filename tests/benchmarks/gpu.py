"""Steps on a GPU (or, small, on a CPU): seconds, peak of memory, and whether the network ever waits for the device.

    python tests/benchmarks/gpu.py --faces 2000 20000 80000 --out runs/gpu

The car-like body, theta 1, expanded targets, in float32 and bf16. Plans are built first; the forward and backward pass
then run with ``torch.cuda.set_sync_debug_mode("error")``: an operation that waits for the device fails the run. Where
the reference (``nvidia-physicsnemo``) is importable and ``--reference`` is given, its step is timed, too, with the same
weights. Writes ``<out>.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cases
import torch
from sides import Ours, Reference, Side


def main(args: list[str] | None = None) -> list[dict[str, Any]]:
    """Measure, write, return what was written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--faces", nargs="*", type=int, default=[2000, 20_000, 80_000])
    parser.add_argument("--floor", type=int, default=19)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--far-field-order", type=int, choices=[0, 1], help="instead of expanded targets")
    parser.add_argument("--reference", type=int, default=0, metavar="FACES", help="time it up to so many faces")
    parser.add_argument("--out", default="gpu")
    a = parser.parse_args(args)
    device, out = torch.device(a.device), []
    for n_faces in a.faces:
        for bf16 in (False, True):
            out.append(measure(n_faces, bf16, device, a))
            print(out[-1], flush=True)
    Path(a.out).parent.mkdir(parents=True, exist_ok=True)
    Path(f"{a.out}.json").write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")
    return out


def measure(n_faces: int, bf16: bool, device: torch.device, a: argparse.Namespace) -> dict[str, Any]:
    """Plans and steps of one size and precision."""
    torch.manual_seed(0)
    config, geometry = cases.make(3, n_faces, n_floor=a.floor)
    if a.far_field_order is not None:
        config = {**config, "expand_far_targets": False, "far_field_order": a.far_field_order}
    ours = Ours(compiled=a.compile)
    prepare(ours, ours.build(config).to(device), geometry, device)
    points, meshes, lengths, conditions = ours.given
    found: dict[str, Any] = {"faces": n_faces, "bf16": bf16, "plans_s": timed(ours.plans, device, a.repetitions)}
    plans = ours.plans()
    found["evaluations"] = plans.n_evaluations

    def step() -> None:
        ours.model.zero_grad(set_to_none=True)
        with waits_forbidden(device):
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                fields = ours.model(points, meshes, lengths, conditions, plans=plans)
                loss = sum(field.float().square().mean() for field in fields.values(True, True))
            loss.backward()

    found["step_s"] = timed(step, device, a.repetitions)
    if device.type == "cuda":
        found["peak_mb"] = torch.cuda.max_memory_allocated(device) / 2**20
    if n_faces <= a.reference and not bf16:
        theirs = Reference()
        model = theirs.build(config)
        model.load_state_dict(ours.model.state_dict(), strict=False)
        prepare(theirs, model.to(device), geometry, device)
        found["reference_step_s"] = timed(theirs._step, device, a.repetitions)
        found["step_with_plans_s"] = timed(ours._step, device, a.repetitions)
    return found


def prepare(side: Side, model: Any, geometry: cases.Geometry, device: torch.device) -> None:
    """Give a side its model and the geometry on a device."""
    moved = cases.Geometry(
        geometry.points.to(device),
        {kind: (points.to(device), faces.to(device)) for kind, (points, faces) in geometry.meshes.items()},
        {name: value.to(device) for name, value in geometry.lengths.items()},
        {name: value.to(device) for name, value in geometry.conditions.items()},
    )
    side.model, side.given = model, side.inputs(moved)


def timed(work: Callable[[], Any], device: torch.device, repetitions: int) -> float:
    """Median seconds after one call that does not count; the peak of memory is that of the timed calls."""
    work()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = []
    for _ in range(repetitions):
        wait(device)
        start = time.perf_counter()
        work()
        wait(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def wait(device: torch.device) -> None:
    """Let the device finish."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def waits_forbidden(device: torch.device) -> Any:
    """Operations that wait for the device fail; on a CPU there are none to see."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


if __name__ == "__main__":
    main()
