"""What the throughput callback costs: the time within it over the time of a whole training, both taken in one run.

    python tests/benchmarks/throughput_cost.py --epochs 20

Trains a configuration, the quickstart if none is given, in a temporary folder. Counted are the callback's hooks, what
it puts around the building of plans, and every row that the logger writes because of it. Arguments that are not this
script's go to ``globe fit``.
"""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl

from globe_lightning import GlobeLightningModule
from globe_lightning.callbacks.throughput import Throughput
from globe_lightning.cli import main as globe
from globe_lightning.run_folder import RunLogger

HOOKS = [name for name in vars(Throughput) if name.startswith("on_")]


class Count:
    """Seconds and calls by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}

    def counted(
        self, name: str, function: Callable[..., Any], when: Callable[..., bool] = lambda *_, **__: True
    ) -> Any:
        """The function, its calls counted if ``when`` says so of their arguments."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                if when is None or when(*args, **kwargs):
                    self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
                    self.calls[name] = self.calls.get(name, 0) + 1

        return call


def main(args: list[str] | None = None) -> dict[str, Any]:
    """Train, print and return what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/quickstart.yaml")
    parser.add_argument("--epochs", type=int, default=20)
    own, others = parser.parse_known_args(args)
    count = Count()
    on_fit_start = Throughput.on_fit_start

    def start(self: Throughput, trainer: Any, pl_module: Any) -> None:
        count.counted("on_fit_start", on_fit_start)(self, trainer, pl_module)
        pl_module.build_plans = count.counted("around plans", pl_module.build_plans)

    def of_throughput(logger: RunLogger, metrics: dict[str, Any], step: int | None = None) -> bool:
        return any(name.startswith("throughput/") for name in metrics)

    patches = [
        mock.patch.object(
            Throughput, name, start if name == "on_fit_start" else count.counted(name, vars(Throughput)[name])
        )
        for name in HOOKS
    ]
    patches += [
        mock.patch.object(
            GlobeLightningModule, "build_plans", count.counted("plans", GlobeLightningModule.build_plans)
        ),
        mock.patch.object(RunLogger, "log_metrics", count.counted("rows", RunLogger.log_metrics, of_throughput)),
        mock.patch.object(pl.Trainer, "fit", count.counted("fit", pl.Trainer.fit)),
    ]
    with tempfile.TemporaryDirectory() as folder:
        for patch in patches:
            patch.start()
        try:
            flags = [f"--run.root={folder}", f"--trainer.max_epochs={own.epochs}", "--pictures.every_n_epochs=0"]
            globe(["fit", f"--config={Path(own.config)}", *flags, *others])
        finally:
            mock.patch.stopall()
    seconds = dict(count.seconds)
    fit, plans = seconds.pop("fit"), seconds.pop("plans")
    seconds["around plans"] -= plans
    found = {
        "fit_seconds": fit,
        "steps": count.calls["on_train_batch_start"],
        "callback_seconds": sum(seconds.values()),
        "microseconds_a_step": 1e6 * sum(seconds.values()) / count.calls["on_train_batch_start"],
        "share": sum(seconds.values()) / fit,
        "seconds": seconds,
    }
    print(json.dumps(found, indent=1))
    return found


if __name__ == "__main__":
    main()
