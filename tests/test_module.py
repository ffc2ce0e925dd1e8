from __future__ import annotations

import inspect
import math

import lightning.pytorch as pl
import pytest
import torch
import torch.multiprocessing as mp
from conftest import AIRFRANS, TINY, make_sample
from helpers import free_port
from torch.utils.data import DataLoader, Dataset

from globe_lightning import GLOBE, GlobeLightningModule, SampleSchema
from globe_lightning.callbacks.predictions import PredictionWriter
from globe_lightning.fields import flatten_data
from globe_lightning.forces import force_coefficients
from globe_lightning.losses import field_loss
from globe_lightning.module import SCHEMA_KEY
from globe_lightning.plain_values import plain


class Cases(Dataset):
    def __init__(self, n, first=0):
        self.n, self.first = n, first

    def __len__(self):
        return self.n

    def __getitem__(self, number):
        return make_sample(self.first + number)


class Data(pl.LightningDataModule):
    """Made-up cases, one a step."""

    def __init__(self, n_train=4, n_val=5, schema=AIRFRANS):
        super().__init__()
        self.n_train, self.n_val, self.schema = n_train, n_val, schema

    def train_dataloader(self):
        return DataLoader(Cases(self.n_train), batch_size=None)

    def val_dataloader(self):
        return DataLoader(Cases(self.n_val), batch_size=None)

    test_dataloader = predict_dataloader = val_dataloader


def make_trainer(folder, **options):
    settings = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "gradient_clip_val": 1,
        "enable_checkpointing": False,
    }
    return pl.Trainer(default_root_dir=str(folder), **{**settings, **options})


def module(seed=0, **options):
    torch.manual_seed(seed)
    return GlobeLightningModule(**{**AIRFRANS.arguments(), **TINY, **options})


def test_arguments_are_globes_own_with_the_same_defaults():
    ours = inspect.signature(GlobeLightningModule).parameters
    theirs = inspect.signature(GLOBE).parameters
    for name, parameter in theirs.items():
        assert ours[name].default == parameter.default, name


@pytest.mark.parametrize("optimizer", ["muon", "radam", "adamw"])
def test_training_lowers_the_loss_and_counts_every_step_once(tmp_path, optimizer):
    model = module(optimizer=optimizer, lr=3e-2)
    data, trainer = Data(), make_trainer(tmp_path, max_epochs=10, check_val_every_n_epoch=10)
    before = trainer.validate(model, data, verbose=False)[0]["val/loss"]
    trainer.fit(model, data)
    assert trainer.global_step == 10 * 4
    assert trainer.callback_metrics["val/loss"] < 0.9 * before


def test_losses_and_metrics_are_logged(tmp_path):
    trainer = make_trainer(tmp_path)
    model = module(loss_scales={"C_p": 0.5})
    trainer.fit(model, Data())
    logged = trainer.callback_metrics
    names = list(AIRFRANS.output_field_ranks)
    for name in names:
        assert f"train/loss/{name}_epoch" in logged and f"val/loss/{name}" in logged
        for metric in ("mse", "relative_l2", "mse_case_std", "r2_case_std", "mse_train_std", "r2_train_std"):
            assert f"val/{name}/{metric}" in logged, (name, metric)
    for coefficient in ("Cl", "Cd"):
        for metric in ("mae", "rmse", "spearman"):
            assert f"val/forces/{coefficient}/{metric}" in logged
    assert "val/forces/Cd/relative_error" in logged
    assert all(math.isfinite(value) for value in logged.values())
    total = sum(logged[f"val/loss/{name}"] for name in names)
    assert float(logged["val/loss"]) == pytest.approx(float(total), rel=1e-6)


def test_validation_numbers_are_what_they_say(tmp_path):
    model = module()
    found = make_trainer(tmp_path).validate(model, Data(n_val=3), verbose=False)[0]
    losses, errors = [], []
    for index in range(3):
        sample = make_sample(index)
        with torch.no_grad():
            prediction, truth = flatten_data(model(sample)), flatten_data(sample.targets)
        losses.append(float(field_loss(prediction["C_p"], truth["C_p"], 1.0)))
        lifts = [force_coefficients(sample.force_surface, fields).total["Cl"] for fields in (prediction, truth)]
        errors.append(abs(float(lifts[0] - lifts[1])))
    assert found["val/loss/C_p"] == pytest.approx(sum(losses) / 3, rel=1e-5)
    assert found["val/forces/Cl/mae"] == pytest.approx(sum(errors) / 3, rel=1e-5)


def test_a_checkpoint_loads_alone_and_without_pickled_code(tmp_path):
    model = module(loss_scales={"C_p": 0.5}, lr=0.123)
    trainer = make_trainer(tmp_path, enable_checkpointing=True)
    trainer.fit(model, Data())
    path = tmp_path / "a.ckpt"
    trainer.save_checkpoint(path)
    raw = torch.load(path, weights_only=True)
    assert raw[SCHEMA_KEY] == AIRFRANS.arguments()
    assert raw["hyper_parameters"]["lr"] == 0.123 and plain(raw["hyper_parameters"]) == raw["hyper_parameters"]
    loaded = GlobeLightningModule.load_from_checkpoint(path).eval()
    assert loaded.hparams["loss_scales"] == {"C_p": 0.5}
    sample = make_sample(3)
    with torch.no_grad():
        for name, value in flatten_data(model.eval()(sample)).items():
            assert torch.equal(value, flatten_data(loaded(sample))[name])
    variances = loaded.target_variances.compute()
    assert variances == model.target_variances.compute() and variances


def test_a_resumed_training_equals_one_that_never_stopped(tmp_path):
    straight = module(lr=1e-2)
    make_trainer(tmp_path, max_epochs=4).fit(straight, Data())
    stopped = module(lr=1e-2)
    trainer = make_trainer(tmp_path, max_epochs=2)
    trainer.fit(stopped, Data())
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed = module(seed=5, lr=1e-2)
    trainer = make_trainer(tmp_path, max_epochs=4)
    trainer.fit(resumed, Data(), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert trainer.global_step == 16
    for mine, other in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("schedule", ["plateau", "cosine", "constant"])
def test_every_schedule_runs(tmp_path, schedule):
    model = module(schedule=schedule, lr=1e-2, plateau_patience_steps=4, plateau_threshold=0.999)
    trainer = make_trainer(tmp_path, max_epochs=5)
    trainer.fit(model, Data())
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    expected = {"plateau": pytest.approx(1e-2 / 16), "cosine": pytest.approx(1e-2 / 64), "constant": 1e-2}
    assert rate == expected[schedule]


def test_training_and_validation_in_turn(tmp_path):
    """A validation under inference mode must leave nothing behind that training cannot use."""
    model, data = module(), Data()
    trainer = make_trainer(tmp_path, max_epochs=3, check_val_every_n_epoch=1, num_sanity_val_steps=1)
    trainer.fit(model, data)
    trainer.validate(model, data, verbose=False)
    make_trainer(tmp_path).fit(model, data)


def test_bf16_needs_no_scaler_and_stays_close_to_float32(tmp_path):
    model = module(
        hidden_layer_sizes=[32, 32],
        n_latent_scalars=4,
        n_latent_vectors=3,
        self_regularization_beta=0.01,
        latent_compression_scale=100,
        loss_scales={"C_F,shear": 0.003},
        lr=1e-2,
    )
    trainer = make_trainer(tmp_path, precision="bf16-mixed", max_epochs=10, check_val_every_n_epoch=10)
    trainer.fit(model, Data())
    assert trainer.precision_plugin.scaler is None
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    sample = make_sample(2)
    with torch.no_grad():
        exact = flatten_data(model(sample))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rough = flatten_data(model(sample))
    for name, value in exact.items():
        assert rough[name].dtype == torch.float32
        assert 0 < (rough[name] - value).norm() < 0.02 * value.norm(), name


def test_plans_are_built_without_gradient_and_outside_autocast(monkeypatch):
    model, sample = module(), make_sample()
    seen = {}
    original = model.network.build_plans

    def spy(*args, **kwargs):
        seen.update(grad=torch.is_grad_enabled(), autocast=torch.is_autocast_enabled("cpu"))
        return original(*args, **kwargs)

    monkeypatch.setattr(model.network, "build_plans", spy)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(sample)
    assert seen == {"grad": False, "autocast": False}


def test_a_bad_number_names_the_case():
    sample = make_sample(7)
    sample.prediction_points[3, 0] = torch.nan
    with pytest.raises(ValueError, match=r"case7(.|\n)*prediction_points: 1 of 80"):
        module()(sample)


def test_a_missing_target_names_the_case():
    sample = make_sample(7)
    del sample.targets["C_p"]
    with pytest.raises(ValueError, match=r"case7.*'C_p'"):
        module().training_step(sample)


def test_a_prediction_that_is_not_finite_is_told(tmp_path):
    model = module()
    with torch.no_grad():
        next(model.network.parameters()).fill_(torch.nan)
    with pytest.warns(UserWarning, match="val/loss is not finite"):
        found = make_trainer(tmp_path).validate(model, Data(), verbose=False)[0]
    assert found["val/loss"] == math.inf
    assert not any(math.isnan(value) for value in found.values())


def test_data_that_do_not_fit_the_model_are_refused_at_start(tmp_path):
    other = SampleSchema(**{**AIRFRANS.arguments(), "reference_length_names": ["chord"]})
    with pytest.raises(ValueError, match=r"data module.*\n.*reference_length_names"):
        make_trainer(tmp_path).fit(module(), Data(schema=other))


def test_a_checkpoint_of_other_data_is_refused(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.fit(module(), Data())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    other = module(output_field_ranks={"C_p": 0})
    with pytest.raises(ValueError, match=r"checkpoint was trained on other data(.|\n)*'C_pt'"):
        make_trainer(tmp_path).validate(other, DataLoader(Cases(1), batch_size=None), ckpt_path=tmp_path / "a.ckpt")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_scales": {"C_q": 1.0}}, "C_q"),
        ({"loss_scales": {"C_p": 0.0}}, "positive"),
        ({"optimizer": "sgd"}, "optimizer"),
        ({"schedule": "linear"}, "schedule"),
        ({"warmup_steps": 5}, "warmup_steps"),
        ({"output_field_ranks": {"C_p": 2}}, "rank"),
    ],
)
def test_arguments_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        module(**options)


def test_cosine_without_an_end_is_refused(tmp_path):
    with pytest.raises(ValueError, match="max_epochs or max_steps"):
        make_trainer(tmp_path, max_epochs=-1).fit(module(schedule="cosine"), Data())


def test_plain_values():
    assert plain({"a": (1, 2.0), "b": torch.tensor(3)}) == {"a": [1, 2.0], "b": 3}
    assert plain(torch.device("cpu")) == "cpu"
    with pytest.raises(ValueError, match="plain values"):
        plain(object())


def _train_on_two(rank, port, folder):
    import os

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK=str(rank), NODE_RANK="0")
    os.environ.update(WORLD_SIZE="2")
    torch.set_num_threads(1)
    trainer = make_trainer(
        folder,
        devices=2,
        strategy=pl.strategies.DDPStrategy(process_group_backend="gloo"),
        max_epochs=2,
        callbacks=[PredictionWriter()],
    )
    model = module(lr=1e-2)
    trainer.fit(model, Data(n_train=4, n_val=5))
    found = trainer.validate(model, Data(n_val=5), verbose=False)[0]
    trainer.predict(model, Data(n_val=5), return_predictions=False)
    state = {"parameters": [p.detach() for p in model.parameters()], "found": found, "steps": trainer.global_step}
    torch.save(state, f"{folder}/{rank}.pt")


def test_two_processes_train_equal_replicas_and_measure_what_one_does(tmp_path):
    mp.spawn(_train_on_two, args=(free_port(), str(tmp_path)), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert first["steps"] == second["steps"] == 4
    for mine, other in zip(first["parameters"], second["parameters"], strict=True):
        assert torch.equal(mine, other)
    alone = module()
    with torch.no_grad():
        for parameter, value in zip(alone.parameters(), first["parameters"], strict=True):
            parameter.copy_(value)
    expected = make_trainer(tmp_path).validate(alone, Data(n_val=5), verbose=False)[0]
    for name, value in expected.items():
        if "set_std" not in name:  # the trained replicas know the train set's spread, the lone one does not
            assert first["found"][name] == second["found"][name] == pytest.approx(value, rel=1e-12, abs=1e-12), name
    rows = (tmp_path / "predictions" / "forces.csv").read_text().splitlines()[1:]
    assert [row.split(",")[0] for row in rows] == [f"case{index}" for index in range(5) for _ in ("Cd", "Cl")]
