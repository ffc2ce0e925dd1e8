"""The quickstarts, whole: what the README promises of them. Minutes long, without a clock."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from globe_lightning.cli import main


def table(path: Path) -> dict[str, float]:
    """The last value of every column of a metrics file."""
    values: dict[str, float] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            values |= {name: float(value) for name, value in row.items() if value}
    return values


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def losses_around_training(config: str, run: Path) -> tuple[float, float]:
    """Validation loss of the untrained network, and of the best checkpoint after training."""
    main(["validate", f"--config={config}", "--ckpt_path=untrained"])
    untrained = table(run / "metrics_validate.csv")["val/loss"]
    main(["fit", f"--config={config}"])
    main(["validate", f"--config={config}"])
    trained = table(run / "metrics_validate.csv")["val/loss"]
    print(f"{config}: untrained {untrained}, trained {trained}, ratio {untrained / trained}")
    return untrained, trained


@pytest.mark.slow
def test_airfoil_quickstart_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two_threads: None) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "quickstart"
    untrained, trained = losses_around_training("configs/quickstart.yaml", run)
    assert trained < untrained / 20
    main(["test", "--config=configs/quickstart.yaml"])
    assert table(run / "metrics_test.csv")["test/forces/Cl/mae"] < 0.12
    assert list((run / "pictures").glob("*.png"))


@pytest.mark.slow
def test_car_quickstart_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two_threads: None) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "drivaer_quickstart"
    untrained, trained = losses_around_training("configs/drivaer_quickstart.yaml", run)
    assert trained < untrained / 5
