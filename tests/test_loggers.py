"""Loggers: the shipped snippets, and the run folder's CSV file beside whatever else is asked for."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import yaml

from globe_lightning.cli import GlobeCLI, main, place_loggers, shipped_configs

SNIPPETS = sorted((shipped_configs() / "logger").glob("*.yaml"))
PACKAGES = {"tensorboard": "tensorboard", "mlflow": "mlflow", "wandb": "wandb"}
SHORT = [
    "--config=configs/quickstart.yaml",
    "--data.init_args.n_train_points=16",
    "--data.init_args.n_train_wall_points=8",
    "--data.init_args.n_validation=1",
    "--model.hidden_layer_sizes=[4]",
    "--trainer.max_epochs=1",
    "--trainer.limit_train_batches=1",
    "--pictures.every_n_epochs=0",
]


def test_there_is_a_snippet_for_each():
    assert {path.stem for path in SNIPPETS} == set(PACKAGES)


@pytest.mark.parametrize("path", SNIPPETS, ids=lambda path: path.stem)
def test_snippets_are_accepted_without_their_packages(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["fit", *SHORT, f"--config=configs/logger/{path.name}", "--print_config"])
    assert ended.value.code in (0, None)
    logger = yaml.safe_load(capsys.readouterr().out)["trainer"]["logger"]
    wanted = yaml.safe_load(path.read_text(encoding="utf-8"))["trainer"]["logger"]
    assert logger["class_path"] == wanted["class_path"]
    assert {key: logger["init_args"][key] for key in wanted["init_args"]} == wanted["init_args"]


@pytest.mark.parametrize("path", SNIPPETS, ids=lambda path: path.stem)
def test_a_missing_package_is_named(path, tmp_path, monkeypatch):
    package = PACKAGES[path.stem]
    if importlib.util.find_spec(package) or importlib.util.find_spec("tensorboardX"):
        pytest.skip(f"{package} is installed")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=rf"trainer\.logger: (.|\n)*pip install(.|\n)*{package}"):
        main(["fit", *SHORT, f"--config={path}"])


def test_the_csv_file_is_written_beside_another_logger(small_root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    logger = "{class_path: lightning.pytorch.loggers.CSVLogger, init_args: {save_dir: other, name: '', version: ''}}"
    main(["fit", *SHORT, f"--data.init_args.root={small_root}", f"--trainer.logger={logger}"])
    run = Path("runs/quickstart")
    assert (run / "metrics.csv").is_file() and (run / "other" / "metrics.csv").is_file()
    # The saved configuration leads to the same place again.
    cli = GlobeCLI(["--config=runs/quickstart/config.yaml"], run=False)
    assert [Path(item.save_dir) for item in cli.trainer.loggers] == [run, run / "other"]


def test_no_logger_at_all(small_root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main(["fit", *SHORT, f"--data.init_args.root={small_root}", "--trainer.logger=false"])
    assert not list(tmp_path.rglob("metrics.csv"))


def test_absolute_folders_stay(tmp_path):
    class Config(dict):
        """As a parser's namespace."""

    loggers = [Config(init_args={"save_dir": str(tmp_path)}), Config(init_args={"save_dir": "here"}), True]
    place_loggers(loggers, Path("runs/a"))
    assert [item["init_args"]["save_dir"] for item in loggers[:2]] == [str(tmp_path), "runs/a/here"]
