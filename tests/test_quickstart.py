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


@pytest.mark.slow
def test_airfoil_quickstart_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two_threads: None) -> None:
    monkeypatch.chdir(tmp_path)
    config = "--config=configs/quickstart.yaml"
    run = tmp_path / "runs" / "quickstart"
    main(["validate", config, "--ckpt_path=untrained"])
    untrained = table(run / "metrics_validate.csv")["val/loss"]
    main(["fit", config])
    main(["validate", config])
    trained = table(run / "metrics_validate.csv")["val/loss"]
    assert trained < untrained / 12  # about 20 on two quiet cores; sums in another order end elsewhere
    main(["test", config])
    assert table(run / "metrics_test.csv")["test/forces/Cl/mae"] < 0.15
    assert list((run / "pictures").glob("*.png"))


@pytest.mark.slow
def test_car_quickstart_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two_threads: None) -> None:
    monkeypatch.chdir(tmp_path)
    config = "--config=configs/drivaer_quickstart.yaml"
    run = tmp_path / "runs" / "drivaer_quickstart"
    main(["validate", config, "--ckpt_path=untrained"])
    untrained = table(run / "metrics_validate.csv")["val/loss"]
    main(["fit", config])
    main(["validate", config])
    assert table(run / "metrics_validate.csv")["val/loss"] < untrained / 5
