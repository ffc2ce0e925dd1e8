from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from globe_lightning import GlobeLightningModule
from globe_lightning.cli import (
    GlobeCLI,
    configure_allocator,
    find_configs,
    main,
    settle_hyperparameters,
    shipped_configs,
)

SHORT = [
    "--config",
    "configs/quickstart.yaml",
    "--model.hidden_layer_sizes=[8]",
    "--model.lr=3e-3",
    "--model.n_latent_scalars=2",
    "--model.n_latent_vectors=1",
    "--model.n_communication_hyperlayers=1",
    "--data.init_args.n_train_points=80",
    "--data.init_args.n_validation=1",
    "--trainer.max_epochs=2",
    "--trainer.check_val_every_n_epoch=1",
    "--pictures.every_n_epochs=1",
    "--pictures.dots_per_inch=40",
]


@pytest.fixture
def short(small_root, tmp_path, monkeypatch):
    """The quickstart on a small dataset, from a working directory that has no configuration."""
    monkeypatch.chdir(tmp_path)
    return [*SHORT, f"--data.init_args.root={small_root}"]


def rows_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_fit_resume_validate_test_predict_from_one_file(short, capsys):
    run = Path("runs/quickstart")
    main(["prepare", *short])
    main(["fit", *short])
    assert "starting fresh" in capsys.readouterr().out
    assert (run / "checkpoints" / "last.ckpt").is_file()
    assert len(list((run / "checkpoints").glob("best-epoch*.ckpt"))) == 1
    assert {path.name for path in (run / "pictures").iterdir()} == {
        "validation_epoch0001.png",
        "validation_epoch0002.png",
    }
    steps = [int(row["step"]) for row in rows_of(run / "metrics.csv") if row["train/loss_step"]]
    assert steps == list(range(8))
    saved = yaml.safe_load((run / "config.yaml").read_text())
    assert saved["model"]["hidden_layer_sizes"] == [8] and saved["trainer"]["max_epochs"] == 2
    assert not Path("config.yaml").exists() and not Path("lightning_logs").exists()

    main(["fit", *short, "--trainer.max_epochs=3", "--ckpt_path=last"])
    assert f"resuming from {run / 'checkpoints' / 'last.ckpt'}" in capsys.readouterr().out
    steps = [int(row["step"]) for row in rows_of(run / "metrics.csv") if row["train/loss_step"]]
    assert steps == list(range(12))
    assert yaml.safe_load((run / "config.yaml").read_text())["trainer"]["max_epochs"] == 3

    main(["validate", *short])
    assert "using runs/quickstart/checkpoints/best-epoch" in capsys.readouterr().out
    main(["test", *short])
    table = capsys.readouterr().out
    assert "test/forces/Cl/mae" in table
    assert len(rows_of(run / "metrics_test.csv")) == 1 and len(rows_of(run / "metrics.csv")) > 12

    main(["predict", *short])
    written = {path.name for path in (run / "predictions").iterdir()}
    assert len(written) == 4 and "forces.csv" in written
    assert {path.with_suffix(".png").name for path in (run / "predictions").glob("*.vtu")} <= {
        path.name for path in (run / "pictures").iterdir()
    }
    assert {path.name for path in run.glob("*.yaml")} == {
        "config.yaml",
        "config_validate.yaml",
        "config_test.yaml",
        "config_predict.yaml",
    }

    state = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    assert state["global_step"] == 12
    assert GlobeLightningModule.load_from_checkpoint(run / "checkpoints" / "last.ckpt").hparams["lr"] == 3e-3


def test_a_second_fit_moves_the_first_ones_results_aside(short, capsys):
    main(["fit", *short, "--trainer.max_epochs=1"])
    main(["fit", *short, "--trainer.max_epochs=1", "--model.lr=1e-5"])
    assert "moved an earlier run's results to runs/quickstart/earlier/1" in capsys.readouterr().out
    old = yaml.safe_load(Path("runs/quickstart/earlier/1/config.yaml").read_text())
    new = yaml.safe_load(Path("runs/quickstart/config.yaml").read_text())
    assert (old["model"]["lr"], new["model"]["lr"]) == (3e-3, 1e-5)
    assert len(rows_of("runs/quickstart/metrics.csv")) == len(rows_of("runs/quickstart/earlier/1/metrics.csv"))
    assert Path("runs/quickstart/earlier/1/checkpoints/last.ckpt").is_file()


def test_flags_and_checkpoint_say_which_value_is_in_force(short, capsys):
    main(["fit", *short, "--trainer.max_epochs=1"])
    main(["fit", *short, "--ckpt_path=last", "--trainer.max_epochs=2", "--model.lr=2e-4"])
    assert "model.lr: 0.0002 from the configuration is in force (the checkpoint has 0.003)" in capsys.readouterr().out
    last = torch.load("runs/quickstart/checkpoints/last.ckpt", weights_only=True)
    assert last["hyper_parameters"]["lr"] == 2e-4
    assert last["optimizer_states"][0]["param_groups"][0]["lr"] < 2e-4  # the cosine of the new rate
    with pytest.raises(SystemExit, match=r"hidden_layer_sizes: the configuration says \[4\], the checkpoint \[8\]"):
        main(["test", *short, "--model.hidden_layer_sizes=[4]"])
    with pytest.raises(SystemExit, match=r"model.reference_length_names.*chord"):
        main(["test", *short, "--model.reference_length_names=[chord]"])


def test_values_left_at_their_default_come_from_the_checkpoint(capsys):
    class Config(dict):
        pass

    config = Config(lr=1e-3, theta=1.0, weight_decay=0.3)
    settle_hyperparameters(
        config, {"lr": 0.5, "theta": 1.0, "weight_decay": 0.1, "gone": 1}, {**config, "weight_decay": 0}
    )
    assert config == {"lr": 0.5, "theta": 1.0, "weight_decay": 0.3}
    out = capsys.readouterr().out
    assert "model.lr: 0.5 from the checkpoint is in force" in out
    assert "model.weight_decay: 0.3 from the configuration is in force" in out and "theta" not in out


def test_a_checkpoint_that_is_not_there(short):
    with pytest.raises(SystemExit, match="train first"):
        main(["test", *short])
    with pytest.raises(SystemExit, match=r"no file 'nowhere.ckpt'"):
        main(["fit", *short, "--ckpt_path=nowhere.ckpt"])


def test_last_without_a_checkpoint_starts_fresh(short, capsys):
    main(["fit", *short, "--ckpt_path=last", "--trainer.max_epochs=1", "--pictures.every_n_epochs=0"])
    assert "starting fresh in runs/quickstart: no last checkpoint there" in capsys.readouterr().out
    assert Path("runs/quickstart/checkpoints/last.ckpt").is_file()


def test_the_untrained_network_can_be_measured(short, capsys):
    main(["validate", *short, "--ckpt_path=untrained"])
    assert "val/loss" in capsys.readouterr().out


def test_fast_dev_run_leaves_a_run_alone(short):
    main(["fit", *short, "--trainer.max_epochs=1"])
    main(["fit", *short, "--trainer.fast_dev_run=true"])
    assert not Path("runs/quickstart/earlier").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "configs/nowhere.yaml"], "configs/nowhere.yaml.*configs/quickstart.yaml"),
        (["--data.init_args.root=/nowhere/at/all"], "/nowhere/at/all"),
        (["--model.loss_scales={C_q: 1}"], "C_q"),
        (["--data.init_args.task=half"], "task"),
    ],
)
def test_mistakes_are_answered_in_one_line(short, arguments, message):
    with pytest.raises(SystemExit, match=f"globe: error: (.|\n)*{message}") as raised:
        main(["fit", *short, *arguments])
    assert raised.value.__cause__ is not None


def test_the_error_itself_on_request(short, monkeypatch):
    monkeypatch.setenv("GLOBE_TRACEBACK", "1")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        main(["fit", *short, "--config=configs/nowhere.yaml"])


@pytest.mark.parametrize("flag", ["--model.lr=1e-5", "--model.lr=1E-5", "--model.lr=.00001"])
def test_numbers_in_any_notation(short, flag, tmp_path):
    assert GlobeCLI([*short, flag], run=False).model.hparams["lr"] == 1e-5
    key, _, number = flag.partition("=")
    (tmp_path / "more.yaml").write_text(f"model:\n  lr: {number}\n  loss_scales:\n    C_p: 1e-2\n")
    hparams = GlobeCLI([*short, "--config=more.yaml"], run=False).model.hparams
    assert hparams["lr"] == 1e-5 and hparams["loss_scales"]["C_p"] == 1e-2 and key == "--model.lr"


def test_networks_in_cpp_or_by_torch_s_operations_train_alike(short):
    losses = []
    for way in ("network", "false"):
        main(["fit", *short, "--model.hidden_layer_sizes=[16,16]", f"--model.compile={way}", f"--run.name={way}"])
        losses.append([float(row["val/loss"]) for row in rows_of(Path("runs", way, "metrics.csv")) if row["val/loss"]])
    assert losses[0] and losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_a_callback_of_the_users_comes_beside_the_built_in_ones(short):
    flag = "--trainer.callbacks=[{class_path: lightning.pytorch.callbacks.Timer}]"
    names = [type(callback).__name__ for callback in GlobeCLI([*short, flag], run=False).trainer.callbacks]
    assert {"Timer", "BestCheckpoint", "PredictionWriter", "PictureWriter", "LossBar"} <= set(names)


@pytest.mark.parametrize("command", ["prepare", "fit", "validate", "test", "predict", "sensitivity"])
def test_bars_are_shown_where_they_are_wanted(short, capsys, command):
    flags = ["--trainer.max_epochs=1", "--pictures.every_n_epochs=0", "--trainer.limit_predict_batches=1"]
    flags += [] if command in ("prepare", "fit") else ["--ckpt_path=untrained"]
    for wanted in ("true", "false"):
        cache = f"--data.init_args.cache_dir=cache-{wanted}"  # an empty one: filling it is shown too
        main([command, *short, *flags, cache, f"--trainer.enable_progress_bar={wanted}"])
        printed = capsys.readouterr()
        assert ("\r" in printed.out + printed.err) == (wanted == "true")


def test_a_bar_of_the_users_takes_the_place_of_ours(short):
    cli = GlobeCLI([*short, "--trainer.callbacks=lightning.pytorch.callbacks.TQDMProgressBar"], run=False)
    assert type(cli.trainer.progress_bar_callback).__name__ == "TQDMProgressBar"
    assert type(GlobeCLI(short, run=False).trainer.progress_bar_callback).__name__ == "LossBar"


def test_a_saved_configuration_is_a_way_into_a_notebook(short):
    main(["fit", *short, "--trainer.max_epochs=1"])
    cli = GlobeCLI(["--config", "runs/quickstart/config.yaml"], run=False)
    assert cli.model.hparams["hidden_layer_sizes"] == [8]
    assert cli.trainer.max_epochs == 1 and cli.datamodule.schema.n_spatial_dims == 2


def test_configurations_are_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shipped = shipped_configs()
    for name in ("configs/quickstart.yaml", "quickstart.yaml"):
        assert find_configs(["fit", "--config", name]) == ["fit", "--config", str(shipped / "quickstart.yaml")]
        assert find_configs(["fit", f"--config={name}"]) == ["fit", f"--config={shipped / 'quickstart.yaml'}"]
    Path("configs").mkdir()
    Path("configs/quickstart.yaml").write_text("")
    assert find_configs(["-c", "configs/quickstart.yaml"]) == ["-c", "configs/quickstart.yaml"]


def test_the_allocator_setting_and_the_users_own():
    assert os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF")  # importing the CLI set it
    name, newer, own = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "max_split_size_mb:64"
    for before, after in (
        ({}, {name: "expandable_segments:True"}),
        ({name: own}, {name: own}),
        ({newer: own}, {newer: own}),
    ):
        configure_allocator(before)
        assert before == after


def test_python_m_is_the_same():
    result = subprocess.run([sys.executable, "-m", "globe_lightning", "--help"], capture_output=True, text=True)
    assert result.returncode == 0
    for subcommand in ("fit", "validate", "test", "predict", "prepare", "sensitivity", "convert", "export"):
        assert subcommand in result.stdout
