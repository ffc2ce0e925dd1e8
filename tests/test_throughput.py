"""The throughput callback: complete, consistent, and no burden on a step."""

from __future__ import annotations

import csv
import functools
from collections import deque

import lightning.pytorch as pl
import pytest
import torch
from conftest import make_sample
from syncs import count_syncs

from globe_lightning import GlobeLightningModule
from globe_lightning.callbacks.throughput import PHASES, StepClock, Throughput, peak_memory
from globe_lightning.run_folder import RunLogger


def fit(arguments, folder, callback, n=4, **trainer):
    model = GlobeLightningModule(**arguments)
    samples = [make_sample(index, n=24) for index in range(n)]
    loader = torch.utils.data.DataLoader(samples, batch_size=None)
    defaults = {"max_epochs": 1, "accelerator": "cpu", "devices": 1, "enable_checkpointing": False}
    options = {**defaults, "enable_progress_bar": False, "enable_model_summary": False, **trainer}
    loop = pl.Trainer(logger=RunLogger(str(folder)), callbacks=[callback], **options)
    validation = torch.utils.data.DataLoader(samples[:1], batch_size=None)
    loop.fit(model, loader, validation if options.get("val_check_interval") else None)
    return model, loop


def test_every_epoch_has_its_numbers(tiny_arguments, tmp_path):
    model, _ = fit(tiny_arguments, tmp_path, Throughput(), max_epochs=2)
    with open(tmp_path / "metrics.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["throughput/samples_per_second"]]
    assert len(rows) == 2
    for row in rows:
        numbers = {name: float(value) for name, value in row.items() if name.startswith("throughput/")}
        seconds = [numbers[f"throughput/seconds_{phase}"] for phase in PHASES]
        elapsed = 4 / numbers["throughput/samples_per_second"]
        assert all(value > 0 for value in seconds) and sum(seconds) <= elapsed
        assert 0.05 < numbers["throughput/peak_memory_gb"] < 1000
        plans = [model.build_plans(make_sample(index, n=24)).n_evaluations for index in range(4)]
        # one communication layer and the last layer, two reference lengths
        evaluations = sum(2 * (plan["communication"] + plan["prediction"]) for plan in plans)
        rate = numbers["throughput/evaluations_per_second"]
        assert rate * elapsed == pytest.approx(evaluations, rel=1e-3)


class FakeTime:
    """A clock that stands unless it is moved."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


def test_time_is_booked_where_it_is_spent(tiny_arguments, tmp_path, monkeypatch):
    """On a clock that only moves where the test says so; validation within the epoch is left out."""
    clock = FakeTime()
    monkeypatch.setattr("globe_lightning.callbacks.throughput.time", clock)

    def taking(seconds, name, owner=GlobeLightningModule):
        original = getattr(owner, name)

        def slow(self, *args, **kwargs):
            if name != "build_plans" or self.training:
                clock.now += seconds
            return original(self, *args, **kwargs)

        monkeypatch.setattr(owner, name, functools.wraps(original)(slow))

    taking(1.0, "build_plans")
    taking(10.0, "_losses")  # in validation too
    taking(100.0, "backward")
    taking(1000.0, "configure_gradient_clipping")
    taking(7777.0, "validation_step")
    fit(tiny_arguments, tmp_path, Throughput(), n=2, val_check_interval=1, num_sanity_val_steps=0)
    with open(tmp_path / "metrics.csv", newline="") as file:
        (row,) = [row for row in csv.DictReader(file) if row["throughput/samples_per_second"]]
    found = {phase: float(row[f"throughput/seconds_{phase}"]) for phase in PHASES}
    assert found == {"data": 0, "plan": 2, "forward": 20, "backward": 200, "optimizer": 2000}
    assert 2 / float(row["throughput/samples_per_second"]) == pytest.approx(2222)


def test_the_module_is_left_as_it_was(tiny_arguments, tmp_path):
    model, _ = fit(tiny_arguments, tmp_path, Throughput())
    assert "build_plans" not in vars(model)


def test_never_and_now_and_then(tiny_arguments, tmp_path):
    for every, epochs in ((0, []), (2, [0, 2])):
        fit(tiny_arguments, tmp_path / str(every), Throughput(every), n=1, max_epochs=3)
        with open(tmp_path / str(every) / "metrics.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        found = [int(row["epoch"]) for row in rows if row.get("throughput/samples_per_second")]
        assert found == epochs
    with pytest.raises(ValueError, match="every_n_epochs: expected 0"):
        Throughput(-1)


def test_nothing_in_a_step_waits_for_the_device(tiny_arguments):
    """The callback's hooks, on a device whose events are not done yet."""
    model = GlobeLightningModule(**tiny_arguments)
    callback = Throughput()
    plans = model.build_plans(make_sample(0, n=24))
    model.build_plans = lambda sample: plans  # the plan itself has syncs of its own
    callback.on_fit_start(None, model)
    callback._active = True
    with count_syncs() as found:
        for _ in range(3):
            callback.on_train_batch_start(None, model, None, 0)
            model.build_plans(None)
            callback.on_before_backward(None, model, None)
            callback.on_after_backward(None, model)
            callback.on_train_batch_end(None, model, None, None, 0)
    assert found == [] and callback._samples == 3 and callback._evaluations > 0


class FakeEvent:
    """A device's event: happens when the device gets there."""

    def __init__(self, at: float) -> None:
        self.at, self.done = at, False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True

    def elapsed_time(self, other: FakeEvent) -> float:
        return 1000 * (other.at - self.at)


def test_a_device_is_asked_only_for_what_is_done(monkeypatch):
    clock, times = StepClock(torch.device("cuda", 0)), iter(range(100))
    events: deque[FakeEvent] = deque()
    monkeypatch.setattr(StepClock, "_now", lambda self: events.append(FakeEvent(float(next(times)))) or events[-1])
    seconds = dict.fromkeys(PHASES, 0.0)
    for _ in range(2):
        clock.start()
        for phase in ("plan", "forward", "backward", "optimizer"):
            clock.mark(phase)
    clock.collect(seconds)
    assert sum(seconds.values()) == 0 and not any(event.done for event in events)
    events[4].done = True  # the first step's last
    clock.collect(seconds)
    assert seconds == {"data": 0, "plan": 1, "forward": 1, "backward": 1, "optimizer": 1}
    clock.collect(seconds, wait=True)
    assert seconds == {"data": 0, "plan": 2, "forward": 2, "backward": 2, "optimizer": 2} and not clock._steps


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu(tiny_arguments, tmp_path):
    _, trainer = fit(tiny_arguments, tmp_path, Throughput(), accelerator="gpu")
    found = {name.partition("/")[2]: float(value) for name, value in trainer.callback_metrics.items()}
    assert all(found[f"seconds_{phase}"] > 0 for phase in PHASES) and found["peak_memory_gb"] > 0


def test_resident_memory_is_in_bytes():
    assert 1e8 < peak_memory(None) < 1e12
