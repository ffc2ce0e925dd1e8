"""Error against exact summation over cost, for every kind of far field and opening angles: a Pareto front.

    python tests/benchmarks/far_field.py --out runs/far_field

The car-like body and the untrained kernel of ``rules.py``; only the last layer's far field varies, the latents of the
faces are the same for all rows. Errors are taken at ``--points`` sampled points, of a plan for as many points as
faces. A jump is a field's largest difference between two points that all but coincide, of ``--pairs`` such pairs, over
the field's spread. Seconds are those of the processors, all threads together: of plans and last layer for all points,
and of that with its gradient, and megabytes what the latter takes beside the plan, and the plan. They are measured at
angles ``--timed`` only, those of the gradient up to ``--step-faces`` faces.
Writes ``<out>.md``, ``<out>.json`` and ``<out>.png``.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import cases
import rules
import torch
from measure import timed
from torch import Tensor

from globe_lightning import GLOBE
from globe_lightning.tree import proxies
from globe_lightning.tree.plan import AllPairs, IndexedPairs, InteractionPlan
from globe_lightning.tree.traversal import expand_rows

FIELDS: dict[str, dict[str, Any]] = {
    "order 0": {},
    "order 0, limit": {"max_far_targets": "auto"},
    "order 1, no limit": {"far_field_order": 1},
    "order 1": {"far_field_order": 1, "max_far_targets": "auto"},
    "pointwise": {"pointwise": True},
    "expanded": {"expand_far_targets": True},
}
"""Far fields by name; the limit is on the targets that share an evaluation, the default of order 1."""


def main(args: list[str] | None = None) -> list[dict[str, Any]]:
    """Measure, write the files, return the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faces", nargs="*", type=int, default=[5000, 20_000, 80_000])
    parser.add_argument("--thetas", nargs="*", type=float, default=[0.5, 0.7, 0.8, 1.0, 1.4, 2.0])
    parser.add_argument("--far-fields", nargs="*", default=list(FIELDS), choices=FIELDS)
    parser.add_argument("--limits", nargs="*", type=int, default=[], help="both orders with these limits, too")
    reach = "of proxies over half-widths; near 0: the tangent at the center"
    parser.add_argument("--reach", type=float, default=proxies.REACH, help=reach)
    parser.add_argument("--timed", nargs="*", type=float, default=[1.0])
    parser.add_argument("--step-faces", type=int, default=80_000)
    parser.add_argument("--points", type=int, default=300)
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--floor", type=int, default=19)
    parser.add_argument("--hidden", nargs="*", type=int, default=[64, 64, 64])
    parser.add_argument("--out", default="far_field")
    a = parser.parse_args(args)
    a.fields = {name: FIELDS[name] for name in a.far_fields}
    for limit in a.limits:
        for order in (0, 1):
            a.fields[f"order {order}, limit {limit}"] = {"far_field_order": order, "max_far_targets": limit}
    config = {**cases.CAR, "hidden_layer_sizes": a.hidden, "theta": 0.0, "expand_far_targets": False}
    config["initial_amplitude"] = 0.005  # as in rules.py
    torch.manual_seed(0)
    model = GLOBE(**config)
    Path(a.out).parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for n_faces in a.faces:
        with patch.object(proxies, "REACH", a.reach):
            rows += measure(model, config, n_faces, a)
        Path(f"{a.out}.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        Path(f"{a.out}.md").write_text(table(rows), encoding="utf-8")
    draw(rows, f"{a.out}.png")
    print(table(rows))
    return rows


def measure(model: GLOBE, config: dict[str, Any], n_faces: int, a: argparse.Namespace) -> list[dict[str, Any]]:
    """Every far field and opening angle on one body."""
    everywhere, sampled, meshes, lengths = rules.problem(n_faces, a.points, a.floor)
    left = everywhere[torch.linspace(0, len(everywhere) - 1, a.pairs).long()]
    generator = torch.Generator().manual_seed(0)
    size = (meshes["vehicle"].points.amax(dim=0) - meshes["vehicle"].points.amin(dim=0)).norm()
    right = left + 1e-5 * size * torch.randn(left.shape, generator=generator)
    with torch.no_grad():
        source = rules.like(model, config, theta=1.0)
        faces = source._planner(sampled.device).plan_faces(source._checked_meshes(sampled, meshes, None, None))[0]
        tables = source._communicate(meshes, lengths, None, faces, sampled.device, True)
        truth = rules.fields_at(model, sampled, *rules.planned(sampled, faces.forest, 0.0, {}), tables)
    # What is looked at stands first among the points that the plans are made for.
    points = torch.cat([sampled, left, right, everywhere])
    chosen = torch.arange(len(points)) < len(sampled) + 2 * a.pairs
    rows = []
    for theta in sorted(a.thetas, reverse=True):
        for name, changes in a.fields.items():
            seconds: dict[str, float] = {}
            if "expand_far_targets" in changes and theta not in a.timed:  # whole, its plan would take gigabytes
                order, plan = rules.planned(points, faces.forest, theta, {})
                few, n_evaluations = expanded(plan, chosen.index_select(0, order))
            else:
                start = time.process_time()
                order, plan = rules.planned(points, faces.forest, theta, changes)
                seconds["plan_seconds"] = time.process_time() - start
                few, n_evaluations = restricted(plan, chosen.index_select(0, order)), plan.n_evaluations
            with torch.no_grad():
                fields = rules.fields_at(model, points, order, few, tables)
                parts = {key: value.split([len(sampled), a.pairs, a.pairs, n_faces]) for key, value in fields.items()}
                if theta in a.timed:
                    start = time.process_time()
                    rules.fields_at(model, points, order, plan, tables)
                    seconds["forward_seconds"] = seconds["plan_seconds"] + time.process_time() - start
            if theta in a.timed and n_faces <= a.step_faces and not changes.get("pointwise"):
                step = timed_step(model, meshes, lengths, faces, points, order, plan)
                seconds["step_seconds"] = seconds["plan_seconds"] + step["cpu_seconds"]
                seconds["step_mb"] = step["peak_mb"]
                seconds["plan_mb"] = sum(p.targets.nbytes + p.sources.nbytes for p in plan.pairs) / 2**20
            row = {"faces": n_faces, "theta": theta, "far field": name, "evaluations": n_evaluations / len(points)}
            rows.append({**row, **errors(parts, truth), **seconds})
            print(rows[-1], flush=True)
    return rows


def restricted(plan: InteractionPlan, chosen: Tensor) -> InteractionPlan:
    """The pairs of a plan that reach some of its (sorted) points."""
    counts = torch.cat([torch.zeros(1, dtype=torch.int64), chosen.long().cumsum(0)])
    reached = (counts[plan.node_end] > counts[plan.node_start]).repeat_interleave(plan.n_proxies)
    rows = torch.cat([chosen, reached, torch.ones(plan.n_rows, dtype=torch.bool)])[: plan.n_rows]
    pairs: list[IndexedPairs | AllPairs] = []
    for own in plan.pairs:
        if isinstance(own, IndexedPairs):
            kept = rows[own.targets.long()]
            own = IndexedPairs(own.targets[kept], own.sources[kept])
        pairs.append(own)
    return replace(plan, pairs=pairs)


def expanded(plan: InteractionPlan, chosen: Tensor) -> tuple[InteractionPlan, int]:
    """Far pairs of a plan of order 0 at every chosen point of their nodes, and the evaluations that all points take."""
    counts = torch.cat([torch.zeros(1, dtype=torch.int64), chosen.long().cumsum(0)])
    points, n_evaluations = chosen.nonzero().squeeze(1).int(), 0
    pairs: list[IndexedPairs | AllPairs] = []
    for own in plan.pairs:
        assert isinstance(own, IndexedPairs)
        node = own.targets.long() - plan.n_points
        far = (node >= 0) & (node < plan.n_nodes)
        start, end = plan.node_start[node[far]], plan.node_end[node[far]]
        n_evaluations += int((end - start).sum()) + int((~far).sum())
        n_chosen = counts[end] - counts[start]
        pair, rank = expand_rows(n_chosen, int(n_chosen.sum()))
        targets = points[counts[start][pair] + rank]
        pairs.append(
            IndexedPairs(
                torch.cat([own.targets[~far], targets]), torch.cat([own.sources[~far], own.sources[far][pair]])
            )
        )
    return restricted(replace(plan, pairs=pairs), chosen), n_evaluations


def timed_step(
    model: GLOBE, meshes: Any, lengths: Any, faces: Any, points: Tensor, order: Tensor, plan: InteractionPlan
) -> dict[str, float]:
    """Seconds and memory of the last layer and its gradient."""
    last = GLOBE(**{**cases.CAR, "n_communication_hyperlayers": 0, "hidden_layer_sizes": hidden_of(model)})
    tables = last._communicate(meshes, lengths, None, faces, points.device, True)

    def work() -> None:
        fields = rules.fields_at(last, points, order, plan, tables)
        sum(value.square().mean() for value in fields.values()).backward()  # type: ignore[union-attr]

    return timed(work)


def hidden_of(model: GLOBE) -> list[int]:
    """Widths of a model's networks."""
    kernel: Any = next(iter(next(iter(model.kernel_layers[0].values())).kernels.values()))  # type: ignore[operator]
    return [linear.out_features for linear in kernel.network.perceptron().linears()[:-1]]


def errors(parts: dict[str, tuple[Tensor, ...]], truth: dict[str, Tensor]) -> dict[str, float]:
    """Errors over the fields' variation, of each and of all together, and the largest jumps.

    Args:
        parts: each field at the sampled points, at both points of the pairs, and elsewhere.
        truth: each field at the sampled points.
    """
    out: dict[str, float] = {}
    squares, scales = 0.0, 0.0
    for name, true in truth.items():
        found, left, right, _ = parts[name]
        variation = float((true - true.mean(dim=0)).square().sum())
        error = float((found - true).square().sum())
        out[f"error {name}"] = (error / variation) ** 0.5
        squares, scales = squares + error, scales + variation
        jump = (left - right).reshape(len(left), -1).norm(dim=1).max()
        out[f"jump {name}"] = float(jump) / (variation / len(true)) ** 0.5
    return {"error": (squares / scales) ** 0.5, **out}


def table(rows: list[dict[str, Any]]) -> str:
    """One line a row; empty where not measured."""
    keys = ["faces", "theta", "far field", "evaluations"]
    keys += [key for key in rows[0] if key.startswith(("error", "jump"))] + ["forward_seconds", "step_seconds"]
    keys += ["step_mb", "plan_mb"]
    lines = ["| " + " | ".join(key.replace("_", " ") for key in keys) + " |", "| --- " * len(keys) + "|"]
    formats = {"faces": "{:,}", "theta": "{:g}", "far field": "{}", "evaluations": "{:.0f}"}
    formats |= dict.fromkeys(("forward_seconds", "step_seconds", "step_mb", "plan_mb"), "{:.3g}")
    for row in rows:
        cells = [formats.get(key, "{:.2g}").format(row[key]) if key in row else "" for key in keys]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def draw(rows: list[dict[str, Any]], path: str) -> None:
    """Error over evaluations, a panel for each number of faces."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    sizes = sorted({row["faces"] for row in rows})
    figure, axes = plt.subplots(1, len(sizes), figsize=(4.6 * len(sizes), 4.2), sharey=True, constrained_layout=True)
    panels = [axes] if len(sizes) == 1 else list(axes)
    for axis, n_faces in zip(panels, sizes, strict=True):
        for name in dict.fromkeys(row["far field"] for row in rows):
            own = [row for row in rows if row["faces"] == n_faces and row["far field"] == name]
            axis.plot([row["evaluations"] for row in own], [row["error"] for row in own], "o-", ms=4, label=name)
            for row in own:
                axis.annotate(f"{row['theta']:g}", (row["evaluations"], row["error"]), fontsize=7, xytext=(3, 3),
                              textcoords="offset points")  # fmt: skip
        axis.set(xscale="log", yscale="log", title=f"{n_faces:,} faces", xlabel="kernel evaluations a target")
        axis.grid(True, which="both", alpha=0.25)
    panels[0].set_ylabel("error over the fields' variation")
    panels[0].legend(title="far field (theta beside)", loc="lower left", fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
