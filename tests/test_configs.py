from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from globe_lightning.cli import main, shipped_configs

ALL = sorted(shipped_configs().rglob("*.yaml"))
CONFIGS = sorted(shipped_configs().glob("*.yaml"))  # those in folders are given after one of these
KEY = re.compile(r"^\s*(- )?[^#\s].*")


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_every_key_has_a_comment(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    bare = [line for line in lines if KEY.match(line) and not re.search(r"\s#\s\S", line)]
    assert not bare and len([line for line in lines if KEY.match(line)]) > (20 if path in CONFIGS else 4)


def short(path, folder):
    """Arguments that train a configuration for a moment, on the cases that ship with the package."""
    arguments = [
        f"--config={path}",
        "--data.init_args.root=samples",
        f"--data.init_args.cache_dir={folder / 'cache'}",
        "--data.init_args.n_train_points=80",
        "--data.init_args.num_workers=0",
        "--data.init_args.persistent_workers=false",
        "--trainer.max_epochs=1",
        "--trainer.limit_train_batches=2",
        "--trainer.limit_val_batches=1",
        "--trainer.check_val_every_n_epoch=1",
        "--data.init_args.n_validation_points=200",
        "--data.init_args.n_boundary_faces=64",
        "--model.hidden_layer_sizes=[8]",
        "--trainer.accelerator=cpu",
    ]
    return arguments + (["--data.init_args.n_floor_cells=3"] if path.stem.startswith("drivaer") else [])


def run_name(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))["run"]["name"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_trains_and_tests(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = [*short(path, tmp_path), "--trainer.devices=1"]
    main(["fit", *arguments])
    run = Path("runs") / run_name(path)
    assert (run / "checkpoints" / "last.ckpt").is_file() and (run / "metrics.csv").is_file()
    main(["validate", *arguments])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["airfrans", "drivaer"])
def test_the_full_size_recipes_train_on_two_processes(name, tmp_path):
    """With the strategy that they come with."""
    path = shipped_configs() / f"{name}.yaml"
    command = [sys.executable, "-m", "globe_lightning", "fit", *short(path, tmp_path), "--trainer.devices=2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "distributed_backend=gloo" in done.stdout + done.stderr
    state = torch.load(tmp_path / "runs" / run_name(path) / "checkpoints" / "last.ckpt", weights_only=True)
    assert state["provenance"]["n_processes"] == 2 and state["global_step"] == 2


@pytest.mark.parametrize(("name", "variable"), [("airfrans", "AIRFRANS_DATA_DIR"), ("drivaer", "DRIVAER_DATA_DIR")])
def test_the_full_size_recipes_ask_for_their_data(tmp_path, monkeypatch, name, variable):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(variable, raising=False)
    with pytest.raises(SystemExit, match=variable):
        main(["fit", f"--config=configs/{name}.yaml", "--trainer.accelerator=cpu", "--trainer.devices=1"])


def test_the_full_size_recipe_is_that_of_the_benchmark():
    config = yaml.safe_load((shipped_configs() / "airfrans.yaml").read_text(encoding="utf-8"))
    model = config["model"]
    assert config["trainer"]["precision"] == "bf16-mixed" and config["trainer"]["gradient_clip_val"] == 1
    assert model["hidden_layer_sizes"] == [128, 128, 128] and model["theta"] == 0
    assert model["plateau_patience_steps"] == 1600 and model["min_lr_factor"] == 1 / 64
    assert config["data"]["init_args"]["n_train_points"] == 2048


def test_the_full_size_car_recipe_is_that_of_the_benchmark():
    config = yaml.safe_load((shipped_configs() / "drivaer.yaml").read_text(encoding="utf-8"))
    model, data = config["model"], config["data"]["init_args"]
    assert config["trainer"]["precision"] == "bf16-mixed" and config["trainer"]["gradient_clip_val"] == 1
    assert model["hidden_layer_sizes"] == [256] * 3 and model["theta"] == 1 and model["max_far_targets"] == 64
    assert (model["n_latent_scalars"], model["n_latent_vectors"], model["n_spherical_harmonics"]) == (8, 4, 4)
    assert model["plateau_patience_steps"] == 1600 and model["min_lr_factor"] == 1 / 64
    assert float(model["lr"]) == 1e-2 and model["loss_scales"] == {"C_p": 1, "C_f": 0.01}
    assert data["n_train_points"] == data["n_boundary_faces"] == 80_000
