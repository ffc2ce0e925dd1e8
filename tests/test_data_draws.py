"""Draws depend on (seed, split, epoch, case) alone: not on workers, how they start, order or resumption."""

from __future__ import annotations

import itertools

import lightning.pytorch as pl
import pytest
import torch
from data_synthetic import write_dataset
from torch import Tensor

from datamodules import AirFRANSDataModule
from datamodules.base import MeshDataModule
from datamodules.dataset import Draws, stable_seed


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("draws") / "data"
    write_dataset(folder, n_train=6, n_test=2)
    AirFRANSDataModule(root=str(folder), num_workers=0).prepare(progress=False)
    return str(folder)


def module_of(root, **options):
    options = {"n_train_points": 20, "n_boundary_faces": 10, "num_workers": 0, "n_validation": 1, **options}
    return AirFRANSDataModule(root=root, **options)


def draws_of(sample):
    mesh = sample.boundary_meshes["no_slip"]
    return torch.cat([sample.point_ids.double(), mesh.cells.flatten().double(), mesh.face_positions.flatten().double()])


def collect(loader):
    return {sample.case: draws_of(sample) for sample in loader}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[case], b[case]) for case in a)


@pytest.fixture(scope="module")
def reference(root):
    """Draws of epochs 0, 1 and 2 in one process."""
    module = module_of(root)
    module.setup("fit")
    out = []
    for epoch in range(3):
        module.set_epoch(epoch)
        out.append(collect(module.train_dataloader()))
    return out


def test_epochs_seeds_and_cases_differ(root, reference):
    for a, b in itertools.combinations(reference, 2):
        assert all(not torch.equal(a[case], b[case]) for case in a)
    for a, b in itertools.combinations(reference[0].values(), 2):
        assert not torch.equal(a, b)
    other = module_of(root, seed=1)
    other.setup("fit")
    assert not any(torch.equal(value, reference[0][case]) for case, value in collect(other.train_dataloader()).items())


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator")
@pytest.mark.parametrize(
    ("workers", "start", "persistent", "pinned"),
    [
        (0, None, True, True),
        (1, "fork", False, False),
        (2, "fork", False, True),
        (2, "fork", True, False),
        (2, "spawn", True, False),
    ],
)
def test_same_stream_for_any_workers(root, reference, workers, start, persistent, pinned):
    """Order and draws of the module's own loader."""
    module = module_of(root, num_workers=workers, persistent_workers=persistent, pin_memory=pinned)
    module.setup("fit")
    loader = module.train_dataloader()
    loader.multiprocessing_context = start
    assert (loader.num_workers, loader.pin_memory) == (workers, pinned)
    assert loader.persistent_workers == (persistent and workers > 0)
    for epoch in (0, 1, 2, 1):
        module.set_epoch(epoch)  # reaches workers that are running already
        found = collect(loader)
        assert same(found, reference[epoch]) and list(found) == list(reference[epoch])
    assert list(reference[0]) != list(reference[1])


def test_stable_seed_is_a_plain_function_of_its_keys():
    assert stable_seed(1, "train", 2, "case") == stable_seed(1, "train", 2, "case")
    seeds = [stable_seed(*keys) for keys in [(1, "23"), (12, "3"), ("1", "2", "3"), (), ("",)]]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**63 for seed in seeds)


def test_subsets_are_uniform_ascending_and_without_repetition():
    counts = torch.zeros(10)
    for epoch in range(2000):
        chosen = Draws(0, "train", epoch, "case").subset("points", 10, 3)
        assert len(set(chosen)) == 3 and (chosen[1:] > chosen[:-1]).all()
        counts[torch.from_numpy(chosen)] += 1
    # 600 expected, standard deviation 20.5: six of them.
    assert (counts - 600).abs().max() < 123
    assert Draws(0, "val", 0, "case").subset("points", 4, 9).tolist() == [0, 1, 2, 3]
    assert len(Draws(0, "test", 0, "case").subset("points", 4, 0)) == 0


def test_fixed_splits_don_t_follow_the_epoch():
    def numbers(split, epoch):
        draws = Draws(3, split, epoch, "case")
        return draws.numpy("a").random(4).tolist() + torch.rand(4, generator=draws.torch("b")).tolist()

    assert numbers("val", 0) == numbers("val", 9) == numbers("test", 0)
    assert numbers("train", 0) != numbers("train", 9) and numbers("train", 0) != numbers("val", 0)


class Recorder(pl.LightningModule):
    """Notes the draws of every training step."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[tuple[int, str, Tensor]] = []
        self.validated: list[str] = []

    def training_step(self, sample, index):
        self.seen.append((self.current_epoch, sample.case, draws_of(sample)))
        return self.weight.square()

    def validation_step(self, sample, index):
        self.validated.append(sample.case)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(root, folder, epochs, checkpoint=None, **options):
    recorder, module = Recorder(), module_of(root, **options)
    trainer = pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[pl.callbacks.ModelCheckpoint(dirpath=folder, save_last=True)],
    )
    trainer.fit(recorder, module, ckpt_path=checkpoint, weights_only=checkpoint and True)
    return recorder, module


@pytest.mark.filterwarnings("ignore")
def test_under_the_trainer_epochs_workers_and_resumption(root, reference, tmp_path):
    straight, module = fit(root, tmp_path / "a", 3)
    assert len(straight.seen) == 3 * 5
    for epoch in range(3):
        seen = {case: draws for at, case, draws in straight.seen if at == epoch}
        assert same(seen, reference[epoch])
    orders = [[case for at, case, _ in straight.seen if at == epoch] for epoch in range(3)]
    assert len({tuple(order) for order in orders}) > 1, "shuffled"
    assert set(straight.validated) == set(module.splits()["val"])

    first, _ = fit(root, tmp_path / "b", 1, num_workers=2)
    resumed, _ = fit(root, tmp_path / "b", 3, checkpoint=str(tmp_path / "b" / "last.ckpt"), num_workers=2)
    together = first.seen + resumed.seen
    assert [step[:2] for step in together] == [step[:2] for step in straight.seen], "the same order too"
    assert all(torch.equal(a[2], b[2]) for a, b in zip(together, straight.seen, strict=True))


def test_worker_count_follows_cpus_and_ranks(root, monkeypatch):
    module = module_of(root, num_workers=None)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)), raising=False)
    assert module._n_workers() == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "32")
    assert module._n_workers() == 1
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    assert module._n_workers() == 0
    # Under Slurm the affinity is a task's own, not shared by the machine's tasks.
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "3")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    assert module._n_workers() == 2
    assert module_of(root, num_workers=7)._n_workers() == 7


def test_a_source_with_its_own_validation_list(root):
    class WithList(AirFRANSDataModule):
        def case_lists(self):
            lists = super().case_lists()
            return {"train": lists["train"][1:], "val": lists["train"][:1], "test": lists["test"]}

    module = WithList(root=root)
    assert module.splits() == module.case_lists()
    with pytest.raises(TypeError, match="abstract"):
        MeshDataModule()
