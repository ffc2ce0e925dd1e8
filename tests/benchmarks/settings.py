"""What settings trade: evaluations and error of every opening rule; memory, time and operations of a training step.

    python tests/benchmarks/settings.py --out runs/settings

The car-like body of ``cases.py``. Evaluations are exact counts, from plans. The error is that of the whole model, all
layers by the same rule, with fresh weights in float64, against theta 0 (of precisions: at theta 0). Memory is by how
much the peak of a process of its own rises in one forward and backward pass in float32; time is the processor's,
the median of ``--repetitions``. Writes ``<out>.md``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import cases
import measure
import torch
from torch import Tensor

from globe_lightning import GLOBE, BoundaryMesh
from globe_lightning.fields import flatten_data

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from syncs import count_operations

RULES: list[tuple[str, dict[str, Any], tuple[int, ...]]] = [
    ("dual", {}, (1, 4, 8)),
    ("dual, target weight 2", {"target_size_weight": 2.0}, (1,)),
    ("dual, target weight 4", {"target_size_weight": 4.0}, (1,)),
    ("dual, target weight 8", {"target_size_weight": 8.0}, (1,)),
    ("expanded", {"expand_far_targets": True}, (1,)),
    ("pointwise", {}, (1,)),
]
"""Name, arguments of GLOBE, leaf sizes; "pointwise" is an argument of prediction."""


def main(args: list[str] | None = None) -> dict[str, list[dict[str, Any]]]:
    """Measure, write ``<out>.md``, return the rows of all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counted", type=int, default=4000, metavar="FACES", help="of the body that is counted on")
    parser.add_argument("--faces", type=int, default=1000, help="of the body that errors are measured on")
    parser.add_argument("--step-faces", type=int, default=500, help="of the body that a step is measured on")
    parser.add_argument("--floor", type=int, default=8, help="cells along an edge of either floor")
    parser.add_argument("--thetas", nargs="*", type=float, default=[0.5, 1.0, 1.5])
    parser.add_argument("--hidden", nargs="*", type=int, default=[16, 16], help="layers for the error")
    parser.add_argument("--step-hidden", nargs="*", type=int, default=[64, 64, 64], help="layers of the step")
    parser.add_argument("--chunks", nargs="*", type=int, default=[8, 32, 64, 128, 512, 2048], metavar="MIB")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--out", default="settings")
    a = parser.parse_args(args)
    # Steps first: their processes are started while this one is small.
    found = {"step": steps(a), "rules": rules(a), "precision": precisions(a)}
    lines = ["| theta | rule | leaf size | evaluations a face | a point | error |", "|---|---|---|---|---|---|"]
    for r in found["rules"]:
        counts = f"{r['a_face']:,.0f} | {r['a_point']:,.0f}"
        lines.append(f"| {r['theta']:g} | {r['rule']} | {r['leaf_size']} | {counts} | {r['error']:.1e} |")
    lines += ["", "| use_gradient_checkpointing | chunk_bytes | peak MB of a step | CPU seconds | operations |"]
    lines += ["|---|---|---|---|---|"]
    for r in found["step"]:
        costs = f"{r['peak_mb']:.0f} | {r['cpu_seconds']:.3g} | {r['dispatched']:,}"
        lines.append(f"| {str(r['checkpointing']).lower()} | {r['chunk_mib']} MiB | {costs} |")
    lines += ["", "| precision | error |", "|---|---|"]
    lines += [f"| {r['precision']} | {r['error']:.1e} |" for r in found["precision"]]
    Path(a.out).parent.mkdir(parents=True, exist_ok=True)
    Path(f"{a.out}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))
    return found


def problem(n_faces: int, n_floor: int) -> tuple[Tensor, dict[str, BoundaryMesh], dict[str, Tensor]]:
    """Points, as many as the body has faces; meshes; reference lengths."""
    _, geometry = cases.make(3, n_faces, n_faces, n_floor)
    return geometry.points, {kind: BoundaryMesh(*mesh) for kind, mesh in geometry.meshes.items()}, geometry.lengths


def network(**changes: Any) -> GLOBE:
    """The same fresh weights whatever the rule."""
    torch.manual_seed(0)
    # The floors are some 200 reference areas: else latents would grow by such a factor from layer to layer.
    return GLOBE(**{**cases.CAR, "initial_amplitude": 0.005, "expand_far_targets": False, **changes})


@torch.no_grad()
def rules(a: argparse.Namespace) -> list[dict[str, Any]]:
    """Evaluations for every face and point, and the error, of every rule."""
    points, meshes, lengths = problem(a.faces, a.floor)
    fine_points, fine_meshes, _ = problem(a.counted, a.floor)
    n_faces = sum(mesh.n_faces for mesh in fine_meshes.values())
    truth = fields(network(hidden_layer_sizes=a.hidden, theta=0.0).double(), points, meshes, lengths)
    exact = {"theta": 0.0, "rule": "exact", "leaf_size": 1, "a_face": n_faces, "a_point": n_faces, "error": 0.0}
    rows = [exact]
    for theta in a.thetas:
        for name, changes, leaf_sizes in RULES:
            for leaf_size in leaf_sizes:
                model = network(hidden_layer_sizes=a.hidden, theta=theta, leaf_size=leaf_size, **changes)
                pointwise = name == "pointwise"
                counts = model.build_plans(fine_points, fine_meshes, None).n_evaluations
                if pointwise:
                    planner = model._planner(fine_points.device)
                    forest = planner.plan_faces(fine_meshes)[1]
                    own = planner.plan_points(fine_points, 0, len(fine_points), forest, True)
                    counts["prediction"] = own.plan.n_evaluations
                row = {"theta": theta, "rule": name, "leaf_size": leaf_size}
                row |= {"a_face": counts["communication"] / n_faces, "a_point": counts["prediction"] / len(fine_points)}
                found = fields(model.double(), points, meshes, lengths, pointwise)
                rows.append({**row, "error": error(found, truth)})
    return rows


@torch.no_grad()
def precisions(a: argparse.Namespace) -> list[dict[str, Any]]:
    """The error of float32 and of bf16-mixed against float64, without trees."""
    points, meshes, lengths = problem(a.faces, a.floor)
    model = network(hidden_layer_sizes=a.hidden, theta=0.0)
    single = fields(model, points, meshes, lengths)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = fields(model, points, meshes, lengths)
    double = fields(model.double(), points, meshes, lengths)
    return [{"precision": n, "error": error(f, double)} for n, f in (("32-true", single), ("bf16-mixed", mixed))]


def fields(
    model: GLOBE, points: Tensor, meshes: dict[str, BoundaryMesh], lengths: dict[str, Tensor], pointwise: bool = False
) -> dict[str, Tensor]:
    """The predicted fields, in one chunk."""
    (chunk,) = model.predict_chunks(points, meshes, lengths, prediction_chunk_size=None, pointwise=pointwise)
    return flatten_data(chunk)


def error(found: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """The norm of the error over that of the truth's variation, of the worse field."""
    return max(float((found[name] - true).norm() / (true - true.mean(dim=0)).norm()) for name, true in truth.items())


def steps(a: argparse.Namespace) -> list[dict[str, Any]]:
    """Costs of a training step, with and without recomputation, by the budget of a chunk."""
    rows = []
    for checkpointing in (True, False):
        for mib in a.chunks:
            arguments = (a.step_faces, a.floor, a.step_hidden, checkpointing, mib << 20, a.repetitions)
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                rows.append({"checkpointing": checkpointing, "chunk_mib": mib, **pool.apply(costs_of_step, arguments)})
    return rows


def costs_of_step(
    n_faces: int, n_floor: int, hidden: list[int], checkpointing: bool, chunk_bytes: int, repetitions: int
) -> dict[str, float]:
    """MB by which a forward and backward pass raises this process's peak, its CPU seconds, operations dispatched.

    On one thread; plans are there already.
    """
    torch.set_num_threads(1)
    model = network(
        hidden_layer_sizes=hidden,
        expand_far_targets=True,
        use_gradient_checkpointing=checkpointing,
        chunk_bytes=chunk_bytes,
    )

    def step(points: Tensor, meshes: dict[str, BoundaryMesh], lengths: dict[str, Tensor], plans: Any) -> None:
        out = flatten_data(model(points, meshes, lengths, plans=plans))
        sum(field.square().mean() for field in out.values()).backward()

    for size in (96, n_faces):  # the small one first: it loads what a first pass loads
        points, meshes, lengths = problem(size, n_floor if size == n_faces else 2)
        given = (points, meshes, lengths, model.build_plans(points, meshes))
        found = [measure.timed(partial(step, *given)) for _ in range(repetitions)]
    with count_operations() as operations:
        step(*given)
    seconds = statistics.median(one["cpu_seconds"] for one in found)
    return {"peak_mb": found[0]["peak_mb"], "cpu_seconds": seconds, "dispatched": operations.n_dispatched}


if __name__ == "__main__":
    main()
