"""Plans of samples that come again: built twice at most, the same numbers, in bounded memory."""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from helpers import fields_of, make_case, make_model, map_mesh, quiet_trainer
from torch import Tensor

from datamodules import DrivAerMLDataModule
from globe_lightning import GlobeLightningModule
from globe_lightning.models.plan_cache import PlanCache, n_bytes
from globe_lightning.models.plans import Planner
from globe_lightning.sample import Sample, geometry_key


def counting(cache: PlanCache, key: Any, size: int = 10) -> tuple[list[Tensor], int]:
    """What a cache gives for a key three times, and how often it had to be built."""
    built: list[Tensor] = []

    def build() -> Tensor:
        built.append(torch.zeros(size, dtype=torch.uint8))
        return built[-1]

    return [cache.get(key, build) for _ in range(3)], len(built)


def test_what_comes_again_is_kept_from_the_second_time_on() -> None:
    cache = PlanCache(25)
    (first, second, third), n_built = counting(cache, "a")
    assert n_built == 2 and first is not second and second is third
    assert counting(cache, "b")[1] == 2 and cache.n_bytes == 20
    assert counting(cache, "c")[1] == 3 and cache.n_bytes == 20, "there is no room for a third"
    assert counting(cache, "a")[1] == 0, "what is kept stays"
    with torch.inference_mode():
        assert counting(cache, "a", 5)[1] == 2, "a tensor of inference mode is another"
    assert counting(cache, None)[1] == 3
    assert counting(PlanCache(0), "a")[1] == 3
    for other in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert other.most_bytes == 25 and not other.kept and other.n_bytes == 0
    cache.clear()
    assert counting(cache, "a")[1] == 2 and cache.n_bytes == 10


def test_what_comes_once_takes_no_room() -> None:
    cache = PlanCache(1 << 20)
    for key in range(1000):
        cache.get(key, lambda: torch.zeros(100))
    assert cache.n_bytes == 0 and not cache.kept


def test_views_of_one_storage_count_once() -> None:
    whole = torch.zeros(100, dtype=torch.uint8)
    assert n_bytes([whole[:50], (whole[50:], None, 3), torch.zeros(7, dtype=torch.uint8)]) == 107


def sample_of(**changes: Any) -> Sample:
    case = make_case(3, 12, 6, 9)
    values = {"prediction_points": case.prediction_points, "boundary_meshes": dict(case.boundary_meshes)}
    return Sample("a", 0, targets=None, reference_lengths={}, **{**values, **changes})  # type: ignore[arg-type]


def test_the_key_tells_where_everything_stands_and_nothing_else() -> None:
    key = geometry_key(sample_of())
    assert geometry_key(replace(sample_of(), case="b", index=3)) == key
    points, meshes = sample_of().prediction_points, sample_of().boundary_meshes
    wall = meshes["wall"]
    shifted = map_mesh(wall, points=wall.points + 1e-9)
    others = [
        sample_of(prediction_points=points.flip(0)),
        sample_of(prediction_points=points.float()),
        sample_of(prediction_points=points[:-1]),
        sample_of(boundary_meshes={**meshes, "wall": shifted}),
        sample_of(boundary_meshes={**meshes, "wall": wall.with_random_positions(torch.Generator().manual_seed(0))}),
        sample_of(boundary_meshes={"far": wall, "wall": meshes["far"]}),
        sample_of(boundary_meshes={"wall": wall}),
    ]
    keys = [geometry_key(other) for other in others]
    assert len({key, *keys}) == 1 + len(others)
    other_data = map_mesh(wall, cell_data={name: value + 1 for name, value in wall.cell_data.items()})
    assert geometry_key(sample_of(boundary_meshes={**meshes, "wall": other_data})) == key


@pytest.mark.parametrize("pointwise", [True, False])
def test_predictions_are_the_same_and_use_the_kept_plans(pointwise: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case, calls = make_case(3, 80, 20, 60), []
    for name in ("plan_faces", "plan_points", "plan_sample"):
        original = getattr(Planner, name)

        def counted(self: Planner, *arguments: Any, name: str = name, original: Any = original) -> Any:
            calls.append(name)
            return original(self, *arguments)

        monkeypatch.setattr(Planner, name, counted)
    model = make_model(3, theta=1.0)

    def predicted(key: str | None) -> list[Tensor]:
        chunks = model.predict_chunks(*case.arguments(), 25, pointwise, key)
        return [chunk["C_p"] for chunk in chunks]

    expected = torch.cat(predicted(None))
    for _ in range(4):
        assert torch.equal(torch.cat(predicted("here")), expected)
    assert calls.count("plan_faces") == 1 + 2 and calls.count("plan_points") == 3 * (1 + 2)
    for _ in range(3):
        plans = model.build_plans(*case.arguments()[:2], geometry_key="here")
    assert calls.count("plan_sample") == 2
    assert torch.equal(fields_of(model, case, plans=plans)["C_p"], fields_of(model, case)["C_p"])
    # Another rule has plans of its own, and sums over all pairs have none.
    model.theta = 0.5
    coarse = torch.cat(predicted("here"))
    assert not torch.equal(coarse, expected) and torch.equal(coarse, torch.cat(predicted(None)))
    n_kept, model.theta = len(model.plan_cache.kept), 0.0
    for _ in range(3):
        predicted("here")
    assert len(model.plan_cache.kept) == n_kept


def test_validation_plans_each_case_twice_in_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[int] = []
    original = Planner.plan_faces

    def counted(self: Planner, meshes: Any) -> Any:
        planned.append(1)
        return original(self, meshes)

    monkeypatch.setattr(Planner, "plan_faces", counted)

    def losses(plan_cache_bytes: int) -> tuple[list[float], int]:
        planned.clear()
        pl.seed_everything(0, verbose=False)
        data = DrivAerMLDataModule(
            root="samples",
            cache_dir=str(tmp_path / "cache"),
            n_boundary_faces=60,
            n_train_points=40,
            n_validation_points=40,
            n_floor_cells=2,
            n_validation=2,
            validation_fraction=0,
            num_workers=0,
        )
        module = GlobeLightningModule(
            **data.schema.arguments(),
            hidden_layer_sizes=[8],
            n_communication_hyperlayers=1,
            initial_amplitude=0.001,
            schedule="constant",
            lr=1e-4,
            plan_cache_bytes=plan_cache_bytes,
        )
        history: list[float] = []

        class Watch(pl.Callback):
            def on_validation_end(self, trainer: Any, module: Any) -> None:
                history.append(float(trainer.callback_metrics["val/loss"]))

        trainer = quiet_trainer(max_epochs=4, limit_train_batches=1, num_sanity_val_steps=0, callbacks=[Watch()])
        trainer.fit(module, data)
        assert not module.network.plan_cache.kept, "nothing stays after the training"
        return history, len(planned)

    kept, n_kept = losses(1 << 20)
    built, n_built = losses(0)
    assert kept == built and len(set(kept)) == 4 and all(math.isfinite(loss) for loss in kept)
    assert (n_kept, n_built) == (2 * 2, 4 * 2)
