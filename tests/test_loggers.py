"""Loggers: the shipped snippets, and the run folder's CSV file beside whatever else is asked for."""

from __future__ import annotations

import csv
import importlib.util
import re
from pathlib import Path

import pytest
import yaml

from globe_lightning.cli import GlobeCLI, main, place_loggers, shipped_configs
from globe_lightning.loggers import acceptable

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


def values_in_tensorboard(run, name):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return [event.value for event in EventAccumulator(str(run / "tensorboard")).Reload().Scalars(name)]


def values_in_mlflow(run, name):
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{run / 'mlflow.db'}")
    (found,) = client.search_runs([client.get_experiment_by_name("globe").experiment_id])
    return [metric.value for metric in client.get_metric_history(found.info.run_id, name)]


def values_in_wandb(run, name):
    import wandb

    wandb.finish()
    (path,) = run.glob("wandb/offline-run-*/*.wandb")
    # A protocol buffer of keys and of numbers as text (field 16), each record written twice.
    found = re.findall(rb"%s\x82\x01.([-+.\de]+)" % name.encode(), path.read_bytes(), flags=re.DOTALL)
    return [float(value) for value in dict.fromkeys(found)]


READERS = {"tensorboard": values_in_tensorboard, "mlflow": values_in_mlflow, "wandb": values_in_wandb}


@pytest.mark.parametrize("path", SNIPPETS, ids=lambda path: path.stem)
def test_each_logger_has_what_the_csv_file_has(path, small_root, tmp_path, monkeypatch):
    pytest.importorskip(PACKAGES[path.stem])
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    main(["fit", *SHORT, f"--data.init_args.root={small_root}", f"--config={path}", "--trainer.limit_train_batches=3"])
    run = Path("runs/quickstart")
    assert sorted(item.name for item in Path.cwd().iterdir()) == ["runs"], "nothing is written elsewhere"
    with open(run / "metrics.csv", newline="") as file:
        expected = [float(row["train/loss_step"]) for row in csv.DictReader(file) if row["train/loss_step"]]
    assert len(expected) == 3 and READERS[path.stem](run, "train/loss_step") == pytest.approx(expected, rel=1e-6)


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


def test_names_that_mlflow_refuses():
    given = {"train/loss/ln(1+nut/nu)": 1.0, "ranks": {"ΔU/|U_inf|": 1, "C_F,shear": 1}}
    assert acceptable(given) == {"train/loss/ln1nut/nu": 1.0, "ranks": {"U/U_inf": 1, "C_Fshear": 1}}


def test_absolute_places_stay(tmp_path):
    class Config(dict):
        """As a parser's namespace."""

    folder = Path("runs/a")
    given = [
        {"save_dir": str(tmp_path)},
        {"save_dir": "here"},
        {"tracking_uri": "sqlite:///here.db"},
        {"tracking_uri": f"sqlite:///{tmp_path}/here.db"},
        {"tracking_uri": "http://server:5000"},
    ]
    wanted = [given[0], {"save_dir": "runs/a/here"}, {"tracking_uri": "sqlite:///runs/a/here.db"}, *given[3:]]
    loggers = [*(Config(init_args=dict(arguments)) for arguments in given), True]
    for _ in range(2):  # what lies in the folder stays there
        place_loggers(loggers, folder)
        assert [item["init_args"] for item in loggers[:-1]] == wanted
