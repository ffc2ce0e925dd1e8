"""Many processes train as one does: equal replicas, the same cases, the same metrics; they fail together."""

from __future__ import annotations

import multiprocessing as mp
import os
import re

import lightning.pytorch as pl
import pytest
import torch
import yaml
from conftest import AIRFRANS, TINY
from data_synthetic import write_dataset
from helpers import free_port, make_mesh
from tensordict import TensorDict
from test_resume import Draws
from torch.utils.data import DataLoader

from datamodules import AirFRANSDataModule
from datamodules.base import EpochDataLoader
from datamodules.dataset import CaseOrder, MeshDataset
from globe_lightning import GlobeLightningModule, SampleSchema
from globe_lightning.callbacks.checkpoints import BestCheckpoint
from globe_lightning.cli import GlobeTrainer, shipped_configs
from globe_lightning.run_folder import RunFolder, RunLogger
from globe_lightning.sample import Sample

pytestmark = pytest.mark.filterwarnings("ignore")

# Many processes


def _entry(rank, world, port, function, arguments):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK=str(rank), NODE_RANK="0")
    os.environ.update(WORLD_SIZE=str(world))
    function(rank, world, *arguments)


def on_processes(world, function, *arguments):
    """Run function(rank, world, *arguments) in so many processes; all must end well."""
    context, port = mp.get_context("fork"), free_port()
    processes = [context.Process(target=_entry, args=(rank, world, port, function, arguments)) for rank in range(world)]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(600)
        assert [process.exitcode for process in processes] == [0] * world, "None hangs"
    finally:
        for process in processes:
            process.kill()


def make_trainer(folder, world, **options):
    return GlobeTrainer(
        accelerator="cpu",
        devices=world,
        strategy="ddp" if world > 1 else "auto",
        default_root_dir=str(folder),
        enable_progress_bar=False,
        enable_model_summary=False,
        **{
            "num_sanity_val_steps": 0,
            "gradient_clip_val": 1,
            "enable_checkpointing": False,
            "logger": False,
            **options,
        },
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A dataset of 6 train, 2 validation and 5 test cases."""
    folder = tmp_path_factory.mktemp("airfoils")
    write_dataset(folder, n_train=8, n_test=5)
    data(folder).prepare(progress=False)
    return folder


def data(root):
    return AirFRANSDataModule(root=str(root), n_train_points=24, n_validation_points=60, n_validation=2, num_workers=0)


def model(**options):
    torch.manual_seed(0)
    return GlobeLightningModule(**{**AIRFRANS.arguments(), **TINY, "lr": 1e-3, **options})


# Equality


def _train(rank, world, root, folder, steps, processes):
    # In double precision what differs by rounding is far from what differs by more.
    module, draws = model().double(), Draws()
    trainer = make_trainer(
        folder,
        world,
        max_steps=steps,
        max_epochs=-1,
        accumulate_grad_batches=processes // world,
        callbacks=[draws],
        limit_val_batches=0,
    )
    trainer.fit(module, data(root))
    found = {
        "parameters": [parameter.detach() for parameter in module.parameters()],
        "cases": [case for case, _ in draws.seen.values()],
        "train": float(trainer.callback_metrics["train/loss_epoch"]),
        "test": trainer.test(module, data(root), verbose=False)[0],
    }
    torch.save(found, f"{folder}/{world}-{rank}-{steps}.pt")


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_many_processes_equal_one_that_accumulates(root, tmp_path, processes):
    steps = 20
    on_processes(processes, _train, root, tmp_path, steps, processes)
    on_processes(1, _train, root, tmp_path, steps, processes)
    many = [torch.load(tmp_path / f"{processes}-{rank}-{steps}.pt", weights_only=True) for rank in range(processes)]
    one = torch.load(tmp_path / f"1-0-{steps}.pt", weights_only=True)
    interleaved = [case for cases in zip(*(found["cases"] for found in many), strict=True) for case in cases]
    assert interleaved == one["cases"] and len(one["cases"]) == steps * processes
    start = list(model().double().parameters())
    moved = rounding = 0.0
    for first, *others, alone, before in zip(
        *(found["parameters"] for found in many), one["parameters"], start, strict=True
    ):
        assert all(torch.equal(first, other) for other in others)
        moved = max(moved, float((first - before).detach().abs().max()))
        rounding = max(rounding, float((first - alone).abs().max()))
    assert moved > 5e-3 and rounding < 1e-9 * moved, (moved, rounding)
    for found in many:
        assert found["train"] == pytest.approx(one["train"], rel=1e-5)
        # The metrics of 5 cases, which no number of processes divides: of nearly the same weights here.
        assert found["test"].keys() == one["test"].keys()
        for name, value in one["test"].items():
            assert found["test"][name] == pytest.approx(value, rel=1e-3, abs=1e-6), name


def _test(rank, world, root, folder):
    found = make_trainer(folder, world).test(model(), data(root), verbose=False)[0]
    torch.save(found, f"{folder}/{world}-{rank}.pt")


def test_metrics_of_five_cases_are_the_same_on_one_two_and_three_processes(root, tmp_path):
    for world in (1, 2, 3):
        on_processes(world, _test, root, tmp_path)
    one = torch.load(tmp_path / "1-0.pt", weights_only=True)
    assert {"test/loss", "test/C_p/mse", "test/forces/Cl/mae"} <= one.keys()
    for world, rank in ((2, 0), (2, 1), (3, 0), (3, 1), (3, 2)):
        assert torch.load(tmp_path / f"{world}-{rank}.pt", weights_only=True) == one


# The order of the cases


class Numbers(MeshDataset):
    """A dataset whose item i is i."""

    def __getitem__(self, index):
        return index


@pytest.fixture
def cases():
    return Numbers(None, None, [f"case{i}" for i in range(11)], "train", seed=3)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 11])
def test_processes_share_one_permutation(cases, world):
    alone = list(CaseOrder(cases))
    assert sorted(alone) == list(range(11))
    shares = [list(CaseOrder(cases, world, rank)) for rank in range(world)]
    together = [case for step in zip(*shares, strict=True) for case in step]
    assert together == alone[: 11 // world * world], "none twice"
    cases.set_epoch(1)
    assert list(CaseOrder(cases)) != alone


def test_more_processes_than_cases(cases):
    with pytest.raises(ValueError, match="11 train cases for 12 processes"):
        CaseOrder(cases, 12, 0)


@pytest.mark.parametrize(("world", "first"), [(1, 4), (2, 4), (4, 4), (3, 3), (5, 0)])
def test_a_loader_goes_on_where_another_number_of_processes_stood(cases, world, first):
    loaders = [EpochDataLoader(cases, batch_size=None, sampler=CaseOrder(cases, world, rank)) for rank in range(world)]
    whole = list(CaseOrder(cases))[: 11 // world * world]
    for loader in loaders:
        loader.load_state_dict({"cases": 4})
    assert [case for step in zip(*loaders, strict=True) for case in step] == whole[first:]
    assert [case for step in zip(*loaders, strict=True) for case in step] == whole, "once only"


def _part(rank, world, root, folder, stop):
    """Train in a run folder, from its last checkpoint if there is one, up to a step."""
    run, draws, module = RunFolder(str(folder), "run"), Draws(), model(plateau_patience_steps=4, plateau_threshold=0.9)
    path = run.last_checkpoint()
    trainer = make_trainer(
        run.path,
        world,
        max_steps=stop,
        max_epochs=-1,
        logger=RunLogger(str(run.path)),
        log_every_n_steps=1,
        enable_checkpointing=True,
        callbacks=[draws, BestCheckpoint(str(run.checkpoints))],
    )
    trainer.fit(module, data(root), ckpt_path=path, weights_only=path and True)
    found = {
        "cases": [case for case, _ in draws.seen.values()],
        "parameters": [p.detach() for p in module.parameters()],
        "sums": module.target_variances.sums,
        "rate": trainer.optimizers[0].param_groups[0]["lr"],
    }
    torch.save(found, f"{folder}/{rank}.pt")


def ranks_of(folder, world):
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(world)]


def test_two_processes_resumed_within_an_epoch(root, tmp_path):
    for folder, stops in (("straight", [8]), ("parts", [4, 8])):
        (tmp_path / folder).mkdir()
        for stop in stops:
            on_processes(2, _part, root, tmp_path / folder, stop)
    for one, other in zip(ranks_of(tmp_path / "parts", 2), ranks_of(tmp_path / "straight", 2), strict=True):
        assert all(map(torch.equal, one["parameters"], other["parameters"]))
        assert torch.equal(one["sums"], other["sums"]) and one["cases"] == other["cases"][4:]
    logs = [(tmp_path / folder / "run" / "metrics.csv").read_text() for folder in ("parts", "straight")]
    assert logs[0] == logs[1]


@pytest.mark.slow
def test_resumed_by_another_number_of_processes(root, tmp_path):
    """Two processes for 4 steps, an epoch and one step; then one or three."""
    on_processes(2, _part, root, tmp_path, 4)
    first = ranks_of(tmp_path, 2)
    checkpoint = tmp_path / "run" / "checkpoints" / "last.ckpt"
    kept = checkpoint.read_bytes()
    on_processes(1, _part, root, tmp_path, 8)
    (one,) = ranks_of(tmp_path, 1)
    epoch = [first[0]["cases"][3], first[1]["cases"][3], *one["cases"]]
    assert len(one["cases"]) == 4 and len(set(epoch)) == 6, "the epoch's other four cases"
    # Patience, 4, counts optimizer steps whoever does them: it is over 5 steps after step 3, that of the best loss.
    assert torch.load(checkpoint, weights_only=True)["global_step"] == 8 and one["rate"] == pytest.approx(1e-3 / 2)
    checkpoint.write_bytes(kept)
    on_processes(3, _part, root, tmp_path, 6)
    three = ranks_of(tmp_path, 3)
    for found in three:
        assert all(map(torch.equal, found["parameters"], three[0]["parameters"])) and len(found["cases"]) == 2
        assert found["rate"] == 1e-3, "3 steps are not 4"


# Gradients


def random_sample(schema, index=0, without=()):
    """A case that fits a schema, with faces of every boundary type but some."""
    generator = torch.Generator().manual_seed(index)
    dims, n = schema.n_spatial_dims, 12

    def fields(ranks, *size):
        return {
            name: fields(rank, *size)
            if isinstance(rank, dict)
            else torch.randn(*size, *[dims] * rank, generator=generator)
            for name, rank in ranks.items()
        }

    return Sample(
        case=f"case{index}",
        index=index,
        prediction_points=torch.rand(n, dims, generator=generator),
        targets=TensorDict(fields(schema.output_field_ranks, n), batch_size=[n]),
        boundary_meshes={
            kind: make_mesh(dims, 7, generator, ranks, dtype=torch.float32)
            for kind, ranks in schema.boundary_source_data_ranks.items()
            if kind not in without
        },
        reference_lengths={name: torch.tensor(0.5 + i) for i, name in enumerate(schema.reference_length_names)},
        global_data=TensorDict(fields(schema.global_data_ranks or {}), batch_size=[]),
    )


def shipped_models():
    """The model arguments of every shipped configuration, with a network of the least width."""
    found = {}
    for path in sorted(shipped_configs().glob("*.yaml")):
        arguments = yaml.safe_load(path.read_text())["model"]
        # PyYAML takes 1e-3 for text.
        arguments = {key: float(v) if re.fullmatch(r"[\d.]+e-?\d+", str(v)) else v for key, v in arguments.items()}
        found[path.stem] = {**arguments, "hidden_layer_sizes": [4] * len(arguments["hidden_layer_sizes"])}
    return found


VARIANTS = {
    **shipped_models(),
    "no communication": {**AIRFRANS.arguments(), **TINY, "n_communication_hyperlayers": 0},
    "no latents": {**AIRFRANS.arguments(), **TINY, "n_latent_scalars": 0, "n_latent_vectors": 0},
    "mlp": {**AIRFRANS.arguments(), **TINY, "network_type": "mlp", "n_communication_hyperlayers": 3},
    "tree": {**AIRFRANS.arguments(), **TINY, "theta": 1.0, "leaf_size": 2, "n_spherical_harmonics": 0},
}
CAR = SampleSchema(
    n_spatial_dims=3,
    output_field_ranks={"C_p": 0, "C_f": 1},
    boundary_source_data_ranks={"vehicle": {}, "floor": {"heat": 0}},
    reference_length_names=["L_ref"],
)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_parameter_gets_a_gradient(name):
    torch.manual_seed(0)
    module = GlobeLightningModule(**VARIANTS[name])
    kinds = list(module.schema.boundary_source_data_ranks)
    for without in [(), *((kind,) for kind in kinds if len(kinds) > 1)]:
        module.zero_grad()
        sample = random_sample(module.schema, without=without)
        next(iter(sample.targets.values())).fill_(torch.nan)  # a field unknown in this case
        losses = module._losses(sample, *(dict(f.flatten_keys(".").items()) for f in (module(sample), sample.targets)))
        sum(losses.values()).backward()
        assert [key for key, value in module.named_parameters() if value.grad is None] == []


class Patchy(pl.LightningDataModule):
    """Cases of which every second lacks a boundary type: with two processes the second one's."""

    def __init__(self, rank, world):
        super().__init__()
        self.rank, self.world = rank, world

    def train_dataloader(self):
        samples = [random_sample(CAR, index, without=("floor",) if index % 2 else ()) for index in range(8)]
        return DataLoader(samples[self.rank :: self.world], batch_size=None)


def _patchy(rank, world, folder):
    torch.manual_seed(0)
    module = GlobeLightningModule(**{**CAR.arguments(), **TINY, "lr": 1e-3})
    options = {"accumulate_grad_batches": 2 // world, "use_distributed_sampler": False}
    trainer = make_trainer(folder, world, max_epochs=2, **options)
    trainer.fit(module, Patchy(rank, world))
    if world > 1:
        assert trainer.strategy._ddp_kwargs == {"gradient_as_bucket_view": True}, "no search for unused parameters"
    torch.save([p.detach() for p in module.parameters()], f"{folder}/{world}-{rank}.pt")


def test_a_boundary_type_missing_in_one_process(tmp_path):
    for world in (2, 1):
        on_processes(world, _patchy, tmp_path)
    first, second, alone = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("2-0", "2-1", "1-0"))
    assert all(map(torch.equal, first, second))
    assert max(float((one - other).abs().max()) for one, other in zip(first, alone, strict=True)) < 1e-6


# Bad batches


def test_a_case_that_is_bad_in_one_process_is_left_out_in_all(tmp_path):
    on_processes(2, _bad_and_stopped, tmp_path)


def _bad_and_stopped(rank, world, folder):
    from test_bad_batches import SpoiltData

    from globe_lightning.bad_batches import BadBatchError

    module = model(max_bad_batches=1, lr=1e-2)
    before = [p.detach().clone() for p in module.parameters()]
    trainer = make_trainer(folder, world, max_epochs=1)
    with pytest.raises(BadBatchError, match="2 steps were left out"):
        # Lightning's sampler shuffles; every step has a bad case in one process or both.
        trainer.fit(module, SpoiltData(4, {0, 1, 2}))
    changed = [not torch.equal(p, q) for p, q in zip(before, module.parameters(), strict=True)]
    assert module.skipped_steps == 2 and not any(changed)
