"""Train on the shipped cars with every far field for equal time, and compare what was learned.

    python tests/benchmarks/far_field_training.py --faces 4000 --seconds 600 --processes 2 --out runs/far_field_training

The model of ``configs/drivaer_quickstart.yaml`` but for its far field, every run on one thread. A step of each rule is
timed first, all in turn, by the processor's time; then each rule gets as many steps as fit the time given, so that
other work on the machine favors none. Every model is tested on the two test cars by the rule it was trained with, and
by the pointwise rule. Writes ``<out>.md``, ``<out>.json`` and ``<out>.png``: how the pressure of one and the same model
(the first seed's, trained with order 1) by each rule deviates from exact summation.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import Trainer, seed_everything
from sides import one_thread

from datamodules import DrivAerMLDataModule
from globe_lightning import GlobeLightningModule
from globe_lightning.fields import flatten_data

CONFIG = Path(__file__).parents[2] / "configs" / "drivaer_quickstart.yaml"
RULES: dict[str, dict[str, Any]] = {
    "order 0": {},
    "order 0, limit 64": {"max_far_targets": 64},
    "order 1": {"far_field_order": 1, "max_far_targets": "auto"},
    "expanded": {"expand_far_targets": True},
}


def main(args: list[str] | None = None) -> dict[str, Any]:
    """Time, train, test, write; returns what the JSON holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=200, help="of optimizer steps a run, by the processor")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--rules", nargs="*", choices=list(RULES), default=list(RULES))
    parser.add_argument("--faces", type=int, default=1000)
    parser.add_argument("--points", type=int, default=800)
    parser.add_argument("--timed-steps", type=int, default=5)
    parser.add_argument("--processes", type=int, default=1, help="runs side by side")
    parser.add_argument("--out", default="far_field_training")
    a = parser.parse_args(args)
    Path(a.out).parent.mkdir(parents=True, exist_ok=True)
    # In a process of its own, so that its memory is given back before the runs.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        seconds = pool.submit(time_steps, a).result()
    steps = {rule: max(1, round(a.seconds / value)) for rule, value in seconds.items()}
    print(f"seconds a step {seconds}, steps {steps}", flush=True)
    out: dict[str, Any] = {"seconds_a_step": seconds, "steps": steps, "runs": []}
    with ProcessPoolExecutor(a.processes, mp_context=get_context("spawn")) as pool:
        runs = [pool.submit(train, rule, seed, steps[rule], a) for seed in a.seeds for rule in a.rules]
        for run in as_completed(runs):
            out["runs"].append(run.result())
            print(out["runs"][-1], flush=True)
            Path(f"{a.out}.json").write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")
            Path(f"{a.out}.md").write_text(table(out), encoding="utf-8")
    print(table(out))
    return out


def train(rule: str, seed: int, steps: int, a: argparse.Namespace) -> dict[str, Any]:
    """One run, in a process of its own: its errors on the test cars, and the picture if it is its turn."""
    with one_thread():
        module, data = make(rule, seed, a)
        trainer = quiet_trainer(max_steps=steps)
        trainer.fit(module, datamodule=data)
        found: dict[str, Any] = {"rule": rule, "seed": seed, "train": float(trainer.callback_metrics["train/loss"])}
        for name, pointwise in (("own", False), ("pointwise", True)):
            module.hparams["pointwise_prediction"] = pointwise
            (metrics,) = trainer.test(module, datamodule=data, verbose=False)
            found[name] = {key: metrics[f"test/{key}"] for key in ("loss", "C_p/relative_l2", "C_f/relative_l2")}
        if seed == a.seeds[0] and rule == ("order 1" if "order 1" in a.rules else a.rules[-1]):
            draw(module, data, f"{a.out}.png")
    return found


def make(rule: str, seed: int, a: argparse.Namespace) -> tuple[Any, Any]:
    """A fresh model, the same weights for every rule, and its data."""
    config = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    seed_everything(seed, verbose=False)
    # YAML 1.1 reads 3e-2 as text.
    numbers = {key: float(config["model"][key]) for key in ("lr", "weight_decay")}
    module = GlobeLightningModule(**{**config["model"], **numbers, **RULES[rule], "warmup_steps": 10})
    data = {**config["data"]["init_args"], "n_boundary_faces": a.faces, "n_train_points": a.points}
    return module, DrivAerMLDataModule(**data)


def quiet_trainer(**options: Any) -> Trainer:
    """On a CPU, without files."""
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "num_sanity_val_steps": 0}
    return Trainer(
        accelerator="cpu",
        devices=1,
        gradient_clip_val=1.0,
        limit_val_batches=0,
        max_epochs=-1,
        enable_model_summary=False,
        **quiet,
        **options,
    )


def time_steps(a: argparse.Namespace) -> dict[str, float]:
    """Median seconds of an optimizer step of each rule by the processor, all in turn."""
    pairs = {rule: make(rule, 0, a) for rule in a.rules}
    times: dict[str, list[float]] = {rule: [] for rule in a.rules}
    with one_thread():
        for _ in range(a.timed_steps + 1):
            for rule, (module, data) in pairs.items():
                data.setup("fit")
                sample = next(iter(data.train_dataloader()))
                sample = data.transfer_batch_to_device(sample, torch.device("cpu"), 0)
                start = time.process_time()
                fields, truth = flatten_data(module(sample)), flatten_data(sample.targets)
                sum(
                    ((fields[name] - value).square().mean() for name, value in truth.items()), torch.zeros(())
                ).backward()
                times[rule].append(time.process_time() - start)
    return {rule: statistics.median(values[1:]) for rule, values in times.items()}


def table(out: dict[str, Any]) -> str:
    """Means over the seeds, with their smallest and largest value."""
    lines = [
        "| far field | seconds a step | steps | tested by | loss | relative L2 of C_p | relative L2 of C_f |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for rule in RULES:
        for name in ("own", "pointwise"):
            runs = [run[name] for run in out["runs"] if run["rule"] == rule]
            if runs:
                cells = [spread([run[key] for run in runs]) for key in runs[0]]
                first = f"| {rule} | {out['seconds_a_step'][rule]:.2f} | {out['steps'][rule]} "
                lines.append(first + f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def spread(values: list[float]) -> str:
    """Mean (smallest to largest)."""
    return f"{statistics.mean(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def draw(module: GlobeLightningModule, data: DrivAerMLDataModule, path: str) -> None:
    """The pressure of the first test car by exact summation, and how each rule's deviates, with the same weights."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    data.setup("test")
    sample = data.transfer_batch_to_device(next(iter(data.test_dataloader())), torch.device("cpu"), 0)
    side = sample.prediction_points[:, 1] < 0
    x, _, z = sample.prediction_points[side].T
    settings = {"exact": {"theta": 0.0}, **RULES}
    figure, axes = plt.subplots(2, -(-len(settings) // 2), figsize=(19, 5.6), constrained_layout=True)
    none = {"far_field_order": 0, "max_far_targets": None, "expand_far_targets": False}
    for axis in axes.flat:
        axis.set_axis_off()
    exact = None
    for axis, (name, changes) in zip(axes.flat[: len(settings)], settings.items(), strict=True):
        for key, value in {**none, "theta": 1.0, **changes}.items():
            setattr(module.network, key, value)
        with torch.no_grad():
            found = module.predict_fields(sample, pointwise=False)["C_p"]
        if exact is None:
            exact, values, limit, title = found, found, 0.8, "C_p by exact summation"
        else:
            error = float((found - exact).norm() / (exact - exact.mean()).norm())
            values, limit, title = found - exact, 0.15, f"deviation at theta 1, {name}: {error:.1%}"
        picture = axis.scatter(x, z, c=values[side], s=7, cmap="RdBu_r", vmin=-limit, vmax=limit, linewidths=0)
        axis.set_title(title)
        axis.set_aspect("equal")
        figure.colorbar(picture, ax=axis, shrink=0.8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
