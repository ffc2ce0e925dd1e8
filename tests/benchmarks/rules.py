"""Error against exact summation over evaluations per target, for every opening rule: which to choose.

    python tests/benchmarks/rules.py --out runs/rules

The car-like body of ``compare.py``, hidden layers 64,64,64 as there, in float32. Only the last layer's rule varies: the
latents of the faces are the same for all rows (theta 1, dual), so that the error is that of the rule, at the
same points.
Untrained: fresh weights. Trained: fitted by Adam for ``--steps`` steps, exactly (theta 0), on a body of
``--train-faces`` faces, to a made-up smooth pressure and shear.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

import cases
import torch
from torch import Tensor

from globe_lightning import GLOBE, BoundaryMesh
from globe_lightning.fields import flatten_data
from globe_lightning.models.outputs import calibrate
from globe_lightning.models.plans import PredictionPlan
from globe_lightning.tree.cluster_tree import build_forest
from globe_lightning.tree.opening_rule import OpeningRule
from globe_lightning.tree.plan import InteractionPlan, build_plan
from globe_lightning.tree.pointwise import build_pointwise_plan

RULES: dict[str, dict[str, Any]] = {
    "dual": {},
    "dual, target weight 2": {"target_size_weight": 2.0},
    "dual, target weight 4": {"target_size_weight": 4.0},
    "dual, target weight 8": {"target_size_weight": 8.0},
    "expanded": {"expand_far_targets": True},
    "pointwise": {"pointwise": True},
}


def main(args: list[str] | None = None) -> list[dict[str, Any]]:
    """Measure, write ``<out>.md``, return the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faces", nargs="*", type=int, default=[3000, 20_000])
    parser.add_argument("--thetas", nargs="*", type=float, default=[1.0])
    parser.add_argument("--points", type=int, default=500)
    parser.add_argument("--floor", type=int, default=19)
    parser.add_argument("--hidden", nargs="*", type=int, default=[64, 64, 64])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--train-faces", type=int, default=96)
    parser.add_argument("--out", default="rules")
    a = parser.parse_args(args)
    config = {**cases.CAR, "hidden_layer_sizes": a.hidden, "theta": 0.0, "expand_far_targets": False}
    # The floors are some 200 reference areas: else latents would grow by such a factor from layer to layer.
    config["initial_amplitude"] = 0.005
    torch.manual_seed(0)
    untrained = GLOBE(**config)
    trained = train(copy.deepcopy(untrained), a)
    rows = []
    for n_faces in a.faces:
        for name, model in (("untrained", untrained), ("trained", trained)):
            rows += measure(model, name, config, n_faces, a)
    lines = ["| faces | kernel | theta | rule | evaluations a target | error |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {r['faces']:,} | {r['kernel']} | {r['theta']:g} | {r['rule']} | {r['evaluations']:.0f} | {r['error']:.1e} |"
        for r in rows
    ]
    Path(a.out).parent.mkdir(parents=True, exist_ok=True)
    Path(f"{a.out}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))
    return rows


def problem(n_faces: int, n_points: int, n_floor: int) -> tuple[Any, ...]:
    """The arguments of a forward pass."""
    _, geometry = cases.make(3, n_faces, n_faces, n_floor)
    meshes = {kind: BoundaryMesh(*mesh) for kind, mesh in geometry.meshes.items()}
    # Every so many of as many points as faces: the table compares rules where they will be used.
    points = geometry.points[:: max(1, n_faces // n_points)][:n_points]
    return geometry.points, points, meshes, geometry.lengths


def train(model: GLOBE, a: argparse.Namespace) -> GLOBE:
    """Fit a smooth made-up flow on a small body, exactly."""
    _, points, meshes, lengths = problem(a.train_faces, a.train_faces, 3)
    body = meshes["vehicle"]
    place = (points - body.points.mean(dim=0)) / body.points.std(dim=0)
    targets = {
        "C_p": 0.5 * torch.cos(2 * place[:, 0]) - 0.3 * place[:, 2],
        "C_f": 0.5 * torch.stack([place[:, 2].cos(), place[:, 1].sin(), place[:, 0].sin()], dim=1),
    }
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(a.steps):
        optimizer.zero_grad()
        fields = flatten_data(model(points, meshes, lengths))
        loss = sum((fields[name] - truth).square().mean() for name, truth in targets.items())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    print(f"trained: loss {float(loss.detach()):.3f}", flush=True)
    return model


@torch.no_grad()
def measure(
    model: GLOBE, name: str, config: dict[str, Any], n_faces: int, a: argparse.Namespace
) -> list[dict[str, Any]]:
    """Every rule's error and evaluations with one kernel on one body."""
    everywhere, points, meshes, lengths = problem(n_faces, a.points, a.floor)
    # The latents that the last layer reads, once for all rules.
    source = like(model, config, theta=1.0)
    faces = source._planner(points.device).plan_faces(source._checked_meshes(points, meshes, None, None))[0]
    tables = source._communicate(meshes, lengths, None, faces, points.device, True)
    exact = like(model, config, theta=0.0)
    truth = evaluate(exact, points, points, faces, tables, {})[0]
    rows = []
    for theta in a.thetas:
        for rule, changes in RULES.items():
            # Dual rules need all points as neighbors; pointwise ones do not.
            asked = points if "pointwise" in changes else everywhere
            fields, evaluations = evaluate(like(model, config, theta=theta), points, asked, faces, tables, changes)
            error = max(
                float((fields[key] - value).norm() / (value - value.mean(dim=0)).norm()) for key, value in truth.items()
            )
            row = {"faces": n_faces, "kernel": name, "theta": theta, "rule": rule}
            rows.append({**row, "evaluations": evaluations, "error": error})
            print(rows[-1], flush=True)
    return rows


def like(model: GLOBE, config: dict[str, Any], **changes: Any) -> GLOBE:
    """The same weights with other settings."""
    other = GLOBE(**{**config, **changes})
    other.load_state_dict(model.state_dict())
    return other


def planned(points: Tensor, forest: Any, theta: float, changes: dict[str, Any]) -> tuple[Tensor, InteractionPlan]:
    """The order of points and their plan by a rule."""
    changes = dict(changes)
    if changes.pop("pointwise", False):
        return torch.arange(len(points)), build_pointwise_plan(points, forest, theta)
    own = build_forest([points])
    return own.order, build_plan(own, forest, OpeningRule(theta, **changes))


def fields_at(model: GLOBE, points: Tensor, order: Tensor, plan: InteractionPlan, tables: Any) -> dict[str, Tensor]:
    """The fields of the last layer by a plan."""
    packed = model._evaluate_chunk(points, PredictionPlan(0, len(points), order, plan), tables)
    return flatten_data(calibrate(packed, model.output_layout, model.final_field_transforms))


def evaluate(
    model: GLOBE, points: Tensor, everywhere: Tensor, faces: Any, tables: Any, changes: dict[str, Any]
) -> tuple[dict[str, Tensor], float]:
    """The last layer by a rule, at ``points``; evaluations a target of the plan of all points ``everywhere``."""
    order, plan = planned(everywhere, faces.forest, model.theta, changes)
    fields = fields_at(model, everywhere, order, plan, tables)
    if len(everywhere) != len(points):
        step = max(1, len(everywhere) // len(points))
        fields = {key: value[::step][: len(points)] for key, value in fields.items()}
    return fields, plan.n_evaluations / len(everywhere)


if __name__ == "__main__":
    main()
