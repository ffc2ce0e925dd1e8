"""``--trainer.deterministic``: the same bits twice, and no operation without a deterministic form on the way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from globe_lightning.cli import main


@pytest.fixture
def as_before():
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("theta", "deterministic"), [(0, "true"), (1, "true"), (1, "warn")])
def test_the_same_bits_twice(theta, deterministic, small_root, tmp_path, monkeypatch, as_before):
    monkeypatch.chdir(tmp_path)
    states = []
    for name in ("first", "second"):
        torch.manual_seed(0)
        main(
            [
                "fit",
                "--config=configs/quickstart.yaml",
                f"--run.name={name}",
                f"--data.init_args.root={small_root}",
                "--data.init_args.n_train_points=60",
                "--data.init_args.n_validation=1",
                f"--model.theta={theta}",
                "--model.hidden_layer_sizes=[8]",
                "--model.use_gradient_checkpointing=true",
                f"--trainer.deterministic={deterministic}",
                "--trainer.max_epochs=1",
                "--pictures.every_n_epochs=0",
            ]
        )
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled() == (deterministic == "warn")
        states.append(torch.load(Path("runs") / name / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"])
    first, second = states
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
