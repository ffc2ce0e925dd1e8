"""The time limit: training ends before it, at a whole step, and goes on from there as if it had never stopped."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from globe_lightning import GlobeLightningModule
from globe_lightning.callbacks import time_limit
from globe_lightning.callbacks.time_limit import LIMIT_EXIT, SLURM_END, TimeLimit, seconds_of
from globe_lightning.cli import main

EPOCH = 4  # steps
START = 1_000_000.0


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("00:10:00", 600), ("04:00:00", 14400), ("1-00:00:01", 86401), ("100:00:00", 360000), (90, 90), ("90", 90)],
)
def test_durations(value, seconds):
    assert seconds_of(value, "margin") == seconds


@pytest.mark.parametrize("value", ["soon", "4h", "1:2", "-00:10:00", -5, "00:61:00", ""])
def test_durations_of_another_form(value):
    with pytest.raises(ValueError, match="margin: expected"):
        TimeLimit(margin=value)


def test_where_the_limit_comes_from(monkeypatch):
    monkeypatch.delenv(SLURM_END, raising=False)
    assert TimeLimit().deadline() is None
    monkeypatch.setenv(SLURM_END, "1000000")
    assert TimeLimit(margin="00:10:00").deadline() == 1000000 - 600
    own = TimeLimit(wall_time="01:00:00", margin=60).deadline()
    started = own - 3600 + 60  # the argument goes before the job's end, and counts from the process's start
    assert own > 1000000 and time_limit.time.time() - started >= 0
    monkeypatch.setenv(SLURM_END, "tomorrow")
    with pytest.raises(ValueError, match=f"{SLURM_END}: expected seconds since 1970, found 'tomorrow'"):
        TimeLimit().deadline()


def command(root, *more):
    return [
        "fit",
        "--config=configs/quickstart.yaml",
        f"--data.init_args.root={root}",
        "--data.init_args.n_train_points=24",
        "--data.init_args.n_train_wall_points=8",
        "--data.init_args.n_validation=1",
        "--model.hidden_layer_sizes=[4]",
        "--model.n_communication_hyperlayers=1",
        "--trainer.max_epochs=3",
        "--trainer.check_val_every_n_epoch=1",
        "--pictures.every_n_epochs=0",
        "--ckpt_path=last",
        *more,
    ]


def state(name):
    found = torch.load(Path("runs") / name / "checkpoints" / "last.ckpt", weights_only=True)
    weights = {key: value for key, value in found["state_dict"].items() if key.startswith("network.")}
    return found["global_step"], weights, found["optimizer_states"][0]["state"]


def same(a, b):
    if isinstance(a, tuple):
        return all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


class FakeTime:
    """A clock that every training step moves on by a minute."""

    now = START
    strftime, localtime = staticmethod(time_limit.time.strftime), staticmethod(time_limit.time.localtime)

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    """The clock in the place of the callback's."""
    clock = FakeTime()
    monkeypatch.setattr(time_limit, "time", clock)
    step = GlobeLightningModule.training_step

    def slow(self, sample, batch_idx=0):
        clock.now += 60
        return step(self, sample, batch_idx)

    monkeypatch.setattr(GlobeLightningModule, "training_step", slow)
    return clock


def test_interrupted_and_resumed_equals_uninterrupted(clock, small_root, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(SLURM_END, raising=False)
    main(command(small_root, "--run.name=straight"))
    total = 3 * EPOCH
    assert state("straight")[0] == total

    # A margin of a minute and steps of a minute: six and a half minutes leave five steps, amid the second epoch.
    clock.now = START
    monkeypatch.setenv(SLURM_END, str(START + 390))
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(command(small_root, "--run.name=parts", "--time_limit.margin=00:01:00"))
    assert ended.value.code == LIMIT_EXIT and clock.now <= START + 390 - 60
    out = capsys.readouterr().out
    assert "starting fresh in runs/parts" in out and "stopped by the time limit after 5 steps" in out
    assert state("parts")[0] == 5

    clock.now = START
    monkeypatch.setenv(SLURM_END, str(START + 10_000))
    main(command(small_root, "--run.name=parts", "--time_limit.margin=00:01:00"))
    assert "resuming from runs/parts/checkpoints/last.ckpt" in capsys.readouterr().out
    assert same(state("straight"), state("parts"))


def test_the_signal_of_slurm(clock, small_root, tmp_path, monkeypatch, capsys):
    """SIGUSR1 ends training after the step it comes in; afterwards its handler is what it was."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(SLURM_END, raising=False)
    earlier = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    step = GlobeLightningModule.training_step

    def signalled(self, sample, batch_idx=0):
        if self.trainer.global_step == 2:
            os.kill(os.getpid(), signal.SIGUSR1)
        return step(self, sample, batch_idx)

    monkeypatch.setattr(GlobeLightningModule, "training_step", signalled)
    try:
        with pytest.raises(SystemExit) as ended:
            main(command(small_root))
        assert ended.value.code == LIMIT_EXIT
        assert "stopped by SIGUSR1 after 3 steps" in capsys.readouterr().out
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, earlier)


def test_no_limit_no_end(small_root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(SLURM_END, raising=False)
    main(command(small_root, "--trainer.max_epochs=1"))
    assert state("quickstart")[0] == EPOCH
