"""A training that is interrupted and resumed equals, to the bit, one that never stopped."""

from __future__ import annotations

import csv
import multiprocessing as mp
import os
import signal
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from conftest import AIRFRANS, TINY
from data_synthetic import write_dataset
from lightning.pytorch.loggers import TensorBoardLogger

from datamodules import AirFRANSDataModule
from globe_lightning import GlobeLightningModule
from globe_lightning.callbacks.checkpoints import LOG_ROWS_KEY, BestCheckpoint
from globe_lightning.run_folder import RunFolder, RunLogger

PLATEAU = {"plateau_patience_steps": 5, "plateau_threshold": 0.9}
"""Lowers the learning rate within a few epochs."""

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A dataset of which 6 cases train and 2 validate."""
    folder = tmp_path_factory.mktemp("airfoils")
    write_dataset(folder, n_train=8, n_test=1)
    AirFRANSDataModule(**data_arguments(folder)).prepare(progress=False)
    return folder


def data_arguments(root):
    return {"root": str(root), "n_train_points": 24, "n_validation_points": 60, "n_validation": 2, "num_workers": 0}


class Draws(pl.Callback):
    """Writes down what every training step was given."""

    def __init__(self):
        self.seen = {}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.seen[trainer.global_step, batch_idx] = (batch.case, batch.prediction_points.clone())


def fit(root, folder, *callbacks, resume=True, seed=0, model=None, checkpoint=None, loggers=(), **options):
    """Train in a folder, from its last checkpoint if there is one."""
    # Neither first weights, nor draws, nor order come from the global generators after a resumption.
    run = RunFolder(str(folder), "run")
    path = run.last_checkpoint() if resume else None
    torch.manual_seed(0 if path is None else 1234 + seed)
    module = GlobeLightningModule(**{**AIRFRANS.arguments(), **TINY, "lr": 1e-2, **PLATEAU, **(model or {})})
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        logger=[RunLogger(str(run.path)), *loggers],
        callbacks=[
            *callbacks,
            BestCheckpoint(str(run.checkpoints), last_every_n_minutes=None, **(checkpoint or {})),
        ],
        default_root_dir=str(run.path),
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"log_every_n_steps": 1, "max_epochs": 3, "num_sanity_val_steps": 0, "gradient_clip_val": 1, **options},
    )
    trainer.fit(module, AirFRANSDataModule(**data_arguments(root)), ckpt_path=path, weights_only=path and True)


def flat(value, name=""):
    """Every leaf of nested dicts and lists by its path."""
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    else:
        return {name: value}
    return {key: leaf for at, item in items for key, leaf in flat(item, f"{name}/{at}").items()}


def equal(mine, other):
    return torch.equal(mine, other) if isinstance(mine, torch.Tensor) else mine == other


def assert_same_run(folder, straight):
    """The same checkpoints, except for where they lie, and the same log, letter by letter."""
    mine, other = (RunFolder(str(path), "run") for path in (folder, straight))
    names = sorted(path.name for path in other.checkpoints.iterdir())
    assert sorted(path.name for path in mine.checkpoints.iterdir()) == names and len(names) >= 2
    for name in names:
        states = [torch.load(run.checkpoints / name, weights_only=True) for run in (mine, other)]
        for state in states:
            state.pop("callbacks")  # paths; the names of the best were compared
        left, right = map(flat, states)
        # Lightning counts these since the process's start.
        differing = {key for key in left.keys() | right.keys() if not equal(left.get(key), right.get(key))}
        assert not {key for key in differing if "val_loop" not in key}, (name, differing)
    assert (mine.path / "metrics.csv").read_text() == (other.path / "metrics.csv").read_text()


class Interrupt(pl.Callback):
    """Does something at one moment of a training, named by hook and step."""

    def __init__(self, hook, step, action):
        self.step, self.action, self.done = step, action, False
        setattr(self, hook, self._act)

    def _act(self, trainer, *args, **kwargs):
        if trainer.global_step == self.step and not self.done and not trainer.sanity_checking:
            self.done = True
            self.action()


def sigterm():
    os.kill(os.getpid(), signal.SIGTERM)


class Killed(BaseException):
    pass


def kill():
    raise Killed


SETTINGS = {
    "validation every epoch": {},
    "validation twice an epoch, max_steps": {"val_check_interval": 0.5, "max_epochs": -1, "max_steps": 16},
    "accumulation, validation every second epoch": {
        "accumulate_grad_batches": 2,
        "check_val_every_n_epoch": 2,
        "max_epochs": 4,
    },
}


@pytest.mark.parametrize(
    "setting",
    [pytest.param(name, marks=[] if "max_steps" in name else pytest.mark.slow) for name in SETTINGS],
)
def test_sigterm_at_every_single_step(root, tmp_path, setting):
    options = SETTINGS[setting]
    drawn, drawn_again = Draws(), Draws()
    fit(root, tmp_path / "a", drawn, **options)
    last = max(step for step, _ in drawn.seen)
    assert len(drawn.seen) in (16, 18, 24) and last in (11, 15, 17)
    for step in range(1, last + 1):
        stopper = Interrupt("on_train_batch_end", step, sigterm)
        with pytest.raises(SystemExit) as stop:
            fit(root, tmp_path / "b", drawn_again, stopper, seed=step, **options)
        assert stop.value.code == 143 and stopper.done
        state = torch.load(tmp_path / "b" / "run" / "checkpoints" / "last.ckpt", weights_only=True)
        assert state["global_step"] == step
    fit(root, tmp_path / "b", drawn_again, **options)
    assert drawn_again.seen.keys() == drawn.seen.keys()
    for step, (case, points) in drawn.seen.items():
        assert drawn_again.seen[step][0] == case and torch.equal(drawn_again.seen[step][1], points)
    assert_same_run(tmp_path / "b", tmp_path / "a")


MOMENTS = [
    ("on_after_backward", 7),
    ("on_before_optimizer_step", 8),
    ("on_train_batch_end", 9),
    ("on_validation_start", 6),
    ("on_validation_batch_end", 12),
    ("on_validation_end", 6),
    ("on_train_epoch_end", 12),
    ("on_train_epoch_start", 12),
    ("on_train_end", 18),
]


@pytest.fixture(scope="module")
def straight(root, tmp_path_factory):
    """A run of 18 steps that nothing disturbs."""
    folder = tmp_path_factory.mktemp("straight")
    fit(root, folder)
    return folder


@pytest.mark.parametrize(("hook", "step"), MOMENTS)
def test_killed_at_any_moment(root, tmp_path, straight, hook, step):
    options = {"checkpoint": {"last_every_n_steps": 2}}
    with pytest.raises(Killed):
        fit(root, tmp_path, Interrupt(hook, step, kill), **options)
    with open(tmp_path / "run" / "metrics.csv", "a") as file:
        file.write("1,0.25,1")  # a row half-written
    fit(root, tmp_path, **options)
    assert_same_run(tmp_path, straight)


def test_sigterm_during_validation_lets_it_end(root, tmp_path, straight):
    with pytest.raises(SystemExit):
        fit(root, tmp_path, Interrupt("on_validation_batch_start", 6, sigterm))
    state = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    assert state["global_step"] == 6 and state["callbacks"], "the epoch with its validation is done"
    assert (tmp_path / "run" / "checkpoints" / "best-epoch0000.ckpt").is_file()
    fit(root, tmp_path)
    assert_same_run(tmp_path, straight)


def test_an_early_end_within_an_epoch_can_be_resumed(root, tmp_path, straight):
    class Early(pl.Callback):
        def on_train_batch_end(self, trainer, *args):
            trainer.should_stop = trainer.global_step == 8

    fit(root, tmp_path, Early())
    rows = list(csv.DictReader((tmp_path / "run" / "metrics.csv").open()))
    assert rows[-1]["train/loss_epoch"], "the epoch was closed"
    fit(root, tmp_path)
    assert_same_run(tmp_path, straight)


def test_max_steps_within_an_epoch_can_be_raised(root, tmp_path):
    fit(root, tmp_path / "a", max_epochs=-1, max_steps=18)
    for steps in (4, 6, 10, 18):
        fit(root, tmp_path / "b", max_epochs=-1, max_steps=steps)
    assert_same_run(tmp_path / "b", tmp_path / "a")


def test_the_best_checkpoint_is_a_place_to_go_on_from(root, tmp_path, straight):
    options = {"checkpoint": {"save_top_k": -1}}
    fit(root, tmp_path, **options)
    folder = tmp_path / "run" / "checkpoints"
    (folder / "last.ckpt").unlink()
    (folder / "best-epoch0002.ckpt").unlink()
    os.replace(folder / "best-epoch0001.ckpt", folder / "last.ckpt")
    fit(root, tmp_path, **options)
    one, other = (torch.load(path / "run/checkpoints/last.ckpt", weights_only=True) for path in (tmp_path, straight))
    assert all(torch.equal(value, other["state_dict"][name]) for name, value in one["state_dict"].items())
    assert (tmp_path / "run/metrics.csv").read_text() == (straight / "run/metrics.csv").read_text()


def test_tensorboard_shows_a_resumed_run_as_one(root, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def run(folder, *callbacks):
        logger = TensorBoardLogger(str(folder), name="board", version="", default_hp_metric=False)
        try:
            fit(root, folder, *callbacks, loggers=[logger], checkpoint={"last_every_n_steps": 2})
        finally:
            logger.save()  # what was logged after the checkpoint is on disk

    run(tmp_path / "a")
    with pytest.raises(Killed):
        run(tmp_path / "b", Interrupt("on_train_batch_end", 10, kill))
    run(tmp_path / "b")
    curves = []
    for folder in ("a", "b"):
        events = EventAccumulator(str(tmp_path / folder / "board"), size_guidance={"scalars": 0}).Reload()
        curves.append({tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]})
    assert curves[0] == curves[1]
    assert [step for step, _ in curves[0]["train/loss_step"]] == list(range(18)) and len(curves[0]["val/loss"]) == 3


def test_the_plateau_was_met(straight):
    """Without it a lost step of the schedule would go unseen."""
    rates = {row["train/lr"] for row in csv.DictReader((straight / "run" / "metrics.csv").open())} - {""}
    assert len(rates) == 2
    state = torch.load(straight / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    assert state[LOG_ROWS_KEY] == 18 + 3 + 3


def _killed_while_writing(root, folder, n):
    """Train until the n-th checkpoint is half on disk, then die at once."""
    torch.set_num_threads(1)
    whole, count = torch.save, 0

    def half(checkpoint, file, **options):
        nonlocal count
        count += 1
        whole(checkpoint, file, **options)
        if count == n:
            file.flush()
            file.truncate(file.tell() // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    torch.save = half
    fit(root, folder, checkpoint={"last_every_n_steps": 1})


@pytest.mark.parametrize("n", [5, 6, 7])
def test_killed_while_a_checkpoint_is_being_written(root, tmp_path, straight, n):
    """The fifth is within an epoch, the sixth the best, the seventh the last after it."""
    process = mp.get_context("fork").Process(target=_killed_while_writing, args=(root, tmp_path, n))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    folder = tmp_path / "run" / "checkpoints"
    torch.load(folder / "last.ckpt", weights_only=True)
    assert len(list(folder.glob(".*.ckpt"))) == 1, "the half-written one lies beside"
    fit(root, tmp_path)
    assert not list(Path(folder).glob(".*.ckpt"))
    assert_same_run(tmp_path, straight)


@pytest.mark.parametrize("name", ["last_every_n_minutes", "last_every_n_steps"])
def test_intervals_are_positive(name):
    with pytest.raises(ValueError, match=f"{name}: expected a positive number"):
        BestCheckpoint(**{name: 0})
