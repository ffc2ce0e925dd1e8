"""A case whose loss or gradient is not finite is named, left out and counted; too many of them end the training."""

from __future__ import annotations

import logging

import lightning.pytorch as pl
import pytest
import torch
from conftest import make_sample
from test_module import Cases, Data, make_trainer, module
from torch.utils.data import DataLoader

from globe_lightning.bad_batches import BadBatchError, all_finite, describe

pytestmark = pytest.mark.filterwarnings("ignore")


class Spoilt(Cases):
    """Made-up cases, some of which have infinite truths."""

    def __init__(self, n, spoilt):
        super().__init__(n)
        self.spoilt = spoilt

    def __getitem__(self, number):
        sample = super().__getitem__(number)
        if number in self.spoilt:
            sample.targets["C_p"][3:6] = torch.inf
        return sample


class SpoiltData(Data):
    def __init__(self, n_train, spoilt):
        super().__init__(n_train)
        self.spoilt = spoilt

    def train_dataloader(self):
        return DataLoader(Spoilt(self.n_train, self.spoilt), batch_size=None)


class Watch(pl.Callback):
    """Notes which steps left weights and optimizer state as they were."""

    def __init__(self):
        self.unchanged = []

    def on_train_batch_start(self, trainer, pl_module, *args):
        self.before = state_of(trainer, pl_module)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        after = state_of(trainer, pl_module)
        same = len(after) == len(self.before) and all(map(torch.equal, after, self.before))
        if same:
            self.unchanged.append(batch_idx)


def state_of(trainer, pl_module):
    optimizer = trainer.optimizers[0]
    state = [value for entry in optimizer.state.values() for value in entry.values() if torch.is_tensor(value)]
    return [tensor.detach().clone() for tensor in [*pl_module.network.parameters(), *state]]


@pytest.mark.parametrize("optimizer", ["muon", "radam", "adamw"])
def test_a_bad_case_is_named_left_out_and_counted(tmp_path, caplog, optimizer):
    watch, model = Watch(), module(lr=1e-2, optimizer=optimizer)
    trainer = make_trainer(tmp_path, max_epochs=2, callbacks=[watch])
    with caplog.at_level(logging.WARNING):
        trainer.fit(model, SpoiltData(4, {2}))
    assert watch.unchanged == [2, 2]
    lines = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert lines == [
        f"step {step} is left out: case 'case2': field 'C_p' has 3 of 40 true points not finite" for step in (2, 6)
    ]
    assert float(trainer.callback_metrics["train/skipped"]) == 2 and trainer.global_step == 8
    assert bool(torch.isfinite(trainer.callback_metrics["train/loss_epoch"]))
    assert all_finite(model.parameters()) and all_finite([model.target_variances.sums])
    without = module(lr=1e-2, optimizer=optimizer)
    make_trainer(tmp_path, max_epochs=1).fit(without, SpoiltData(2, {}))
    again = module(lr=1e-2, optimizer=optimizer)
    make_trainer(tmp_path, max_epochs=1).fit(again, SpoiltData(3, {2}))
    assert all(map(torch.equal, again.parameters(), without.parameters())), "as if the case had not come"


def test_a_gradient_alone_can_be_bad(tmp_path, caplog):
    class Steep(type(module())):
        def _losses(self, sample, prediction, truth):
            losses = super()._losses(sample, prediction, truth)
            if sample.index == 1:  # the square root's slope at zero is infinite
                losses["C_p"] = losses["C_p"] + (prediction["C_p"].sum() * 0).sqrt()
            return losses

    torch.manual_seed(0)
    model, watch = Steep(**module().hparams), Watch()
    trainer = make_trainer(tmp_path, callbacks=[watch])
    with caplog.at_level(logging.WARNING):
        trainer.fit(model, Data(3))
    assert watch.unchanged == [1] and float(trainer.callback_metrics["train/skipped"]) == 1
    assert "case 'case1': the loss of its 40 points" in caplog.text and "its gradient is not" in caplog.text


def test_one_bad_case_spoils_its_accumulated_step_alone(tmp_path, caplog):
    watch, model = Watch(), module(lr=1e-2)
    with caplog.at_level(logging.WARNING):
        make_trainer(tmp_path, accumulate_grad_batches=2, callbacks=[watch]).fit(model, SpoiltData(6, {2}))
    assert watch.unchanged == [0, 2, 3, 4], "steps end with cases 1, 3 and 5"
    assert "case2" in caplog.text and "case3" not in caplog.text


def test_too_many_end_the_training(tmp_path):
    trainer = make_trainer(tmp_path, max_epochs=9)
    with pytest.raises(
        BadBatchError, match=r"3 steps were left out up to step 7.*max_bad_batches is 2.*lower model.lr"
    ):
        trainer.fit(module(max_bad_batches=2), SpoiltData(3, {0}))
    with pytest.raises(ValueError, match="max_bad_batches: expected 0 or more"):
        module(max_bad_batches=-1)


def test_the_count_outlives_a_restart(tmp_path):
    trainer = make_trainer(tmp_path, max_epochs=2)
    trainer.fit(module(), SpoiltData(2, {1}))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    model, trainer = module(), make_trainer(tmp_path, max_epochs=3)
    trainer.fit(model, SpoiltData(2, {1}), ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    assert model.skipped_steps == 3 and float(trainer.callback_metrics["train/skipped"]) == 3
    weights = type(model).load_from_checkpoint(tmp_path / "a.ckpt")
    trainer = make_trainer(tmp_path, max_epochs=1)
    trainer.fit(weights, SpoiltData(2, {1}))
    assert weights.skipped_steps == 1, "a training of its own"


def test_a_network_that_is_not_finite_names_every_field(tmp_path, caplog):
    model = module(max_bad_batches=0)
    with torch.no_grad():
        next(model.network.parameters()).fill_(torch.nan)
    with pytest.raises(BadBatchError), caplog.at_level(logging.WARNING):
        make_trainer(tmp_path).fit(model, Data())
    assert caplog.text.count("40 of 40 predicted points not finite") == 5


def test_all_finite_of_numbers_whose_squares_overflow():
    assert all_finite([torch.tensor([1e30, -3e38]), None, torch.zeros(2, 2)])
    for bad in (torch.nan, torch.inf, -torch.inf):
        assert not all_finite([torch.ones(3), torch.tensor([[0.0, bad]])])


def test_nothing_to_tell_of_a_good_case():
    sample = make_sample(0)
    fields = {"C_p": sample.targets["C_p"]}
    assert describe("a", {"C_p": torch.tensor(1.0)}, fields, fields, {"w": torch.ones(2)}) is None
