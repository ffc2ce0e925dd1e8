"""Plans built where samples are made: the same training, and a step that finds them ready."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from helpers import quiet_trainer
from syncs import count_syncs

from datamodules import DrivAerMLDataModule
from globe_lightning import GLOBE, GlobeLightningModule
from globe_lightning.sample import Sample


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def data_of(cache: Path, workers: int) -> DrivAerMLDataModule:
    return DrivAerMLDataModule(
        root="samples",
        cache_dir=str(cache),
        n_boundary_faces=80,
        n_train_points=60,
        n_floor_cells=2,
        n_validation=0,
        validation_fraction=0,
        num_workers=workers,
    )


def trained(cache: Path, workers: int, where: str | None) -> dict[str, torch.Tensor]:
    pl.seed_everything(0, verbose=False)
    data = data_of(cache, workers)
    module = GlobeLightningModule(
        **data.schema.arguments(),
        hidden_layer_sizes=[8],
        n_communication_hyperlayers=1,
        theta=1.0,
        far_field_order=1,
        tree_build_device=where,
        optimizer="adamw",
        schedule="constant",
    )
    quiet_trainer(max_steps=3).fit(module, data)
    return module.state_dict()


@pytest.mark.parametrize("workers", [0, 2])
def test_training_is_the_same_and_plans_stand_ready(workers: int, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained(cache, workers, None)
    given, build_plans = [], GLOBE.build_plans

    def watched(self: GLOBE, *arguments: Any, ahead: Any = None, **others: Any) -> Any:
        given.append(ahead)
        return build_plans(self, *arguments, ahead=ahead, **others)

    monkeypatch.setattr(GLOBE, "build_plans", watched)
    found = trained(cache, workers, "workers")
    assert len(given) == 3 and all(plans is not None for plans in given)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def planned_sample(cache: Path) -> tuple[GlobeLightningModule, Sample]:
    data = data_of(cache, 0)
    data.prepare(progress=False)
    data.setup("fit")
    module = GlobeLightningModule(**data.schema.arguments(), hidden_layer_sizes=[4], tree_build_device="workers")
    return module, data.datasets["train"][0]


def test_a_step_reads_the_device_once(cache: Path) -> None:
    """To judge the sample's numbers; else planning alone takes several reads."""
    module, sample = planned_sample(cache)
    with count_syncs() as without:
        module(sample)
    sample.plans = module.network.plan_ahead()(sample)
    with count_syncs() as found:
        module(sample)
    assert len(found) == 1 < len(without)


def test_another_model_on_the_same_data_plans_for_itself(cache: Path) -> None:
    module, sample = planned_sample(cache)
    sample.plans = module.network.plan_ahead()(sample)
    other = GlobeLightningModule(**module.schema.arguments(), hidden_layer_sizes=[4], theta=0)
    assert other.build_plans(sample) is not sample.plans
    data = data_of(cache, 0)
    data.plan_ahead = module.network.plan_ahead()
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.datamodule, other.trainer = data, trainer
    other.setup("fit")
    assert data.plan_ahead is None


def test_they_move_with_their_sample(cache: Path) -> None:
    module, sample = planned_sample(cache)
    sample.plans = module.network.plan_ahead()(sample)
    moved = sample.to("meta").plans
    assert moved.forest.points.device.type == moved.prediction.order.device.type == "meta"
    assert all(pairs.targets.device.type == "meta" for pairs in moved.communication.pairs)


def test_unusable_numbers_are_left_to_the_model(cache: Path) -> None:
    module, sample = planned_sample(cache)
    sample.prediction_points[3, 1] = math.nan
    assert module.network.plan_ahead()(sample) is None
    with pytest.raises(ValueError, match=f"(?s)case '{sample.case}'.*prediction_points"):
        module(sample)


def test_elsewhere_plans_are_built_where_the_sample_is(cache: Path) -> None:
    module, sample = planned_sample(cache)
    assert module.network.tree_build_device is None
    assert module.predict_fields(sample)["C_p"].isfinite().all()
    with pytest.raises(ValueError, match="tree_build_device: expected cpu, cuda, workers or null, found 'loader'"):
        GlobeLightningModule(**module.schema.arguments(), tree_build_device="loader")
