"""The README's commands and its Python are run, shortened."""

from __future__ import annotations

import re
import shlex
from functools import partial
from pathlib import Path
from shutil import copyfile
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from helpers import GOLDEN
from test_geometry_airfoils import SELIG, lines
from test_geometry_bodies import CAR

from globe_lightning import GlobeLightningModule, from_pretrained
from globe_lightning.cli import main
from globe_lightning.commands import COMMANDS
from globe_lightning.interop import from_mdlus

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SHORT = [
    "--data.init_args.n_train_points=16",
    "--data.init_args.n_validation_points=200",
    "--data.init_args.n_boundary_faces=16",
    "--model.hidden_layer_sizes=[4]",
    "--trainer.accelerator=cpu",
    "--trainer.devices=1",
    "--trainer.limit_val_batches=1",
    "--trainer.limit_test_batches=1",
    "--trainer.limit_predict_batches=1",
    "--trainer.limit_train_batches=1",
    "--trainer.precision=32-true",
]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def globe_commands() -> list[list[str]]:
    """Every ``globe …`` of the README's shell blocks, in order, as arguments."""
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    parts = [part.strip() for line in lines for part in line.split("&&")]
    return [shlex.split(part, comments=True)[1:] for part in parts if part.startswith("globe ")]


def write_shapes(folder: Path) -> None:
    """The shapes and the model that the README's commands name: clean, and small."""
    copyfile(GOLDEN / "peer_2d.mdlus", folder / "physicsnemo.mdlus")
    (folder / "wing.dat").write_text("NACA 2412\n" + lines(SELIG))
    CAR.save(folder / "car.stl")


def test_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From an empty folder, in the README's order; the full dataset's place is taken by the embedded cases."""
    import datamodules

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AIRFRANS_DATA_DIR", str(Path(datamodules.__file__).parent / "samples" / "airfoils"))
    commands = globe_commands()
    write_shapes(tmp_path)
    assert {"fit", "test", "predict", "prepare", *COMMANDS} <= {command[0] for command in commands}
    more = 1
    for command in commands:
        if "--geometry" in command:
            main([*command, "--trainer.accelerator=cpu", "--pictures.dots_per_inch=30"])
            continue
        if command[0] in COMMANDS:
            main(command)
            continue
        shortened = [part for part in command if not part.isdigit() and part != "--trainer.max_epochs"]
        short = [f"--data.init_args.cache_dir={tmp_path / 'cache'}"]
        if command[0] != "prepare":
            cars = any("drivaer" in part for part in command)
            own = "n_floor_cells=3" if cars else "n_train_wall_points=4"
            short += [*SHORT, f"--data.init_args.{own}", f"--trainer.max_epochs={more}"]
            more += command[0] == "fit"
        main([*shortened, *short])
    run = tmp_path / "runs" / "quickstart"
    for name in ("config.yaml", "metrics.csv", "checkpoints", "pictures", "predictions"):
        assert (run / name).exists(), f"the README promises {name} in the run folder"
    assert list((run / "predictions").glob("*.vtu")) and (run / "predictions" / "forces.csv").is_file()
    assert list((tmp_path / "runs" / "drivaer_quickstart" / "predictions").glob("*.vtp"))
    for shape, files in (("wing", ["wing_alpha0.vtu", "wing_alpha4.vtu"]), ("car", ["car.vtp", "car_y0.vtu"])):
        folder = tmp_path / "runs" / shape
        assert all((folder / "predictions" / name).is_file() for name in [*files, "forces.csv"])
        assert len(list((folder / "pictures").glob("*.png"))) == 2
    trained = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    for network in (from_mdlus("for_physicsnemo.mdlus"), from_pretrained("shared").network):
        assert all(torch.equal(value, trained[f"network.{name}"]) for name, value in network.state_dict().items())
    converted = GlobeLightningModule.load_from_checkpoint("runs/converted.ckpt").network.state_dict()
    assert all(torch.equal(value, converted[k]) for k, value in from_mdlus("physicsnemo.mdlus").state_dict().items())


def test_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python of the README, on a tenth of a case."""
    from datamodules import AirFRANSDataModule

    monkeypatch.chdir(tmp_path)
    limits = {"limit_train_batches": 1, "limit_val_batches": 1, "limit_test_batches": 1, "logger": False}
    monkeypatch.setattr(pl, "Trainer", partial(pl.Trainer, enable_checkpointing=False, **limits))
    monkeypatch.setattr(
        "datamodules.AirFRANSDataModule",
        partial(AirFRANSDataModule, cache_dir=str(tmp_path / "cache"), n_boundary_faces=16, n_validation_points=100),
    )
    (code,) = blocks("python")
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["trainer"].callback_metrics["test/loss"] > 0


def test_test_command_is_the_one_that_continuous_integration_runs() -> None:
    command = re.search(r"Tests: `([^`]+)`", README)
    assert command and command[1] in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_links_to_files_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("https://") or (ROOT / target).is_file(), f"README.md links to {target}"
