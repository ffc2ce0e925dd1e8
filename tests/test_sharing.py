"""Exported models: what is written, read back, and said on the card; nothing invented."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_sample
from safetensors.torch import load_file, save_file

from globe_lightning import GlobeLightningModule, from_pretrained
from globe_lightning.cli import main
from globe_lightning.sharing import export, write_checkpoint


@pytest.fixture
def checkpoint(tiny_arguments: dict[str, Any], tmp_path: Path) -> Path:
    """A checkpoint without a run folder around it."""
    torch.manual_seed(1)
    module = GlobeLightningModule(**tiny_arguments, lr=2e-3, loss_scales={"C_p": 0.5})
    write_checkpoint(module, tmp_path / "model.ckpt")
    return tmp_path / "model.ckpt"


def test_an_exported_model_predicts_the_same(checkpoint: Path, tmp_path: Path) -> None:
    main(["export", "--ckpt_path", str(checkpoint), str(tmp_path / "shared")])
    assert {path.name for path in (tmp_path / "shared").iterdir()} == {"model.safetensors", "config.json", "README.md"}
    module = from_pretrained(tmp_path / "shared")
    original = GlobeLightningModule.load_from_checkpoint(checkpoint, weights_only=True)
    assert dict(module.hparams) == dict(original.hparams) and not module.training
    for name, value in original.state_dict().items():
        assert torch.equal(module.state_dict()[name], value), name
    sample = make_sample()
    for name, value in original.predict_fields(sample).items():
        assert torch.equal(module.predict_fields(sample)[name], value), name


def test_a_folder_converts_back(checkpoint: Path, tmp_path: Path) -> None:
    export(checkpoint, tmp_path / "shared")
    main(["convert", str(tmp_path / "shared"), str(tmp_path / "again.ckpt")])
    first, second = (torch.load(tmp_path / name, weights_only=True) for name in ("model.ckpt", "again.ckpt"))
    assert first["hyper_parameters"] == second["hyper_parameters"]
    assert all(torch.equal(value, second["state_dict"][name]) for name, value in first["state_dict"].items())
    main(["convert", str(tmp_path / "shared"), str(tmp_path / "again.mdlus")])
    assert (tmp_path / "again.mdlus").is_file()


def test_the_card_says_what_is_not_known(checkpoint: Path, tmp_path: Path) -> None:
    export(checkpoint, tmp_path)
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    for line in (
        "| data module | not recorded |",
        "| licence of the data | not recorded |",
        "| cases | not recorded |",
        "| hardware | not recorded |",
        "| precision | not recorded |",
        "On the test split: not recorded.",
        "Weights: not stated by whoever exported them.",
        "license: unknown",
    ):
        assert line in card, line
    n = sum(p.numel() for p in GlobeLightningModule.load_from_checkpoint(checkpoint, weights_only=True).parameters())
    assert f"{n:,} parameters" in card and "`C_p`: 0" in card and "`ΔU/\\|U_inf\\|`: 1" in card


def test_the_card_of_a_run(small_root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data, splits, metrics and hardware come from the checkpoint and the run folder it lies in."""
    monkeypatch.chdir(tmp_path)
    short = [
        "--config=configs/quickstart.yaml",
        f"--data.init_args.root={small_root}",
        "--data.init_args.n_train_points=40",
        "--data.init_args.n_train_wall_points=4",
        "--data.init_args.n_validation=1",
        "--model.hidden_layer_sizes=[4]",
        "--trainer.max_epochs=1",
        "--trainer.check_val_every_n_epoch=1",
        "--pictures.every_n_epochs=0",
    ]
    main(["fit", *short])
    main(["test", *short, "--ckpt_path=last"])
    folder = Path("runs/quickstart/checkpoints")
    main(["export", f"--ckpt_path={folder / 'last.ckpt'}", "shared", "--licence=CC-BY-4.0"])
    config = json.loads(Path("shared/config.json").read_text(encoding="utf-8"))
    training = config["training"]
    assert training["global_step"] == 4
    source = training["provenance"]
    assert source["dataset"] == "AirFRANSDataModule" and source["data_licence"] == "ODbL-1.0"
    assert len(source["cases"]["train"]) == 4 and len(source["cases"]["val"]) == 1
    assert source["precision"] == "32-true" and source["n_processes"] == 1 and source["device"]
    assert set(source["software"]) == {"globe-lightning", "torch", "lightning"}
    assert training["data"]["n_train_points"] == 40 and training["data"]["task"] == "full"
    assert small_root not in Path("shared/config.json").read_text(encoding="utf-8")
    card = Path("shared/README.md").read_text(encoding="utf-8")
    assert "| cases in train | 4 |" in card and "| cases in val | 1 |" in card
    assert f"| hardware | {source['device']} |" in card and "| normals of boundary faces | outward |" in card
    assert "`test/loss`" in card and "license: CC-BY-4.0" in card and "Weights: CC-BY-4.0. Data: ODbL-1.0." in card

    # The metrics are those of the last checkpoint: another one must not claim them.
    (best,) = folder.glob("best*.ckpt")
    export(best, "best")
    card = Path("best/README.md").read_text(encoding="utf-8")
    assert "On the test split: not recorded." in card and "Best val/loss:" in card
    score = json.loads(Path("best/config.json").read_text(encoding="utf-8"))["training"]["best"]["value"]
    state = torch.load(best, weights_only=True)["callbacks"]
    assert score == pytest.approx(float(next(v for v in state.values() if "best_model_score" in v)["best_model_score"]))


def test_damaged_folders_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    with pytest.raises(FileNotFoundError, match=r"config\.json: no such file"):
        from_pretrained(folder)
    export(checkpoint, folder)
    path = folder / "config.json"
    good = json.loads(path.read_text(encoding="utf-8"))
    for changed, message in (
        ({**good, "format": "other"}, "expected the format"),
        ({**good, "format_version": 2}, "expected the format"),
        ([], "expected the format"),
        ({**good, "model": {**good["model"], "n_moons": 3}}, "n_moons"),
        ({**good, "model": {**good["model"], "theta": -1}}, "theta"),
        ({**good, "schema": {**good["schema"], "n_spatial_dims": 3}}, "its schema"),
        ({**good, "model": {**good["model"], "n_latent_scalars": 5}}, r"model\.safetensors: does not hold the weights"),
    ):
        path.write_text(json.dumps(changed), encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            from_pretrained(folder)
    path.write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="not valid JSON"):
        from_pretrained(folder)
    path.write_text(json.dumps(good), encoding="utf-8")
    weights = load_file(folder / "model.safetensors")
    weights.pop("network.reference_area")
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ValueError, match="reference_area"):
        from_pretrained(folder)
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        from_pretrained(folder)
