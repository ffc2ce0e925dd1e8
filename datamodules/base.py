"""What every mesh data module shares: splits, cached cases, reproducible draws, loaders.

A dataset brings a :class:`MeshSource`: which files a case has, how fields are derived from them (expensive, cached)
and how one sample is drawn from the derived arrays (cheap, at every step). :class:`MeshDataModule` does the rest.
"""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset

from datamodules.cache import CaseCache, file_fingerprint, user_cache_dir
from globe_lightning.sample import Sample, SampleSchema

SPLITS = ("train", "val", "test", "predict")
MAX_WORKERS = 4


def stable_seed(*keys: Any) -> int:
    """A 63-bit seed that depends on the keys' text alone: the same in every process, on every machine."""
    text = json.dumps([str(key) for key in keys])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


class Draws:
    """Random numbers of one sample: they depend on (seed, split, epoch, case) and a purpose alone.

    Attributes:
        split: "train", "val", "test" or "predict".
    """

    def __init__(self, seed: int, split: str, epoch: int, case: str) -> None:
        self.split = split
        # Outside training there is one draw for good, the same in validation, test and prediction.
        self._keys = (seed, "train", epoch, case) if split == "train" else (seed, "fixed", 0, case)

    def numpy(self, purpose: str) -> np.random.Generator:
        """A fresh NumPy generator for one purpose."""
        return np.random.Generator(np.random.PCG64(stable_seed(*self._keys, purpose)))

    def torch(self, purpose: str) -> torch.Generator:
        """A fresh torch generator (CPU) for one purpose."""
        return torch.Generator().manual_seed(stable_seed(*self._keys, purpose))

    def subset(self, purpose: str, n: int, k: int) -> np.ndarray:
        """k of n rows without repetition, in ascending order; all of them if k >= n."""
        if k >= n:
            return np.arange(n)
        return np.sort(self.numpy(purpose).choice(n, size=k, replace=False, shuffle=False))


class MeshSource(ABC):
    """How one dataset's cases become samples. Plain values only: it travels to worker processes."""

    #: Short name of the dataset, the cache's folder.
    name: str = "mesh"
    #: Raise it whenever :meth:`derive` computes something else, so that old cache entries turn stale.
    derivation_version: int = 1

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)

    @abstractmethod
    def files(self, case: str) -> list[Path]:
        """The files a case is made of."""

    @abstractmethod
    def derive(self, case: str) -> dict[str, np.ndarray]:
        """Read the files and derive the arrays that are cached."""

    @abstractmethod
    def sample(self, case: str, index: int, arrays: Mapping[str, np.ndarray], draws: Draws) -> Sample:
        """Draw one sample from the derived arrays."""

    def parameters(self) -> dict[str, Any]:
        """Plain values that change what :meth:`derive` returns."""
        return {}

    def key(self, case: str) -> dict[str, Any]:
        """Everything that changes the content of a case's cache entry."""
        return {
            "dataset": self.name,
            "version": self.derivation_version,
            "parameters": self.parameters(),
            "files": [file_fingerprint(path) for path in self.files(case)],
        }


class MeshDataset(Dataset[Sample]):
    """The cases of one split, map-style: item i is the sample of case i in the current epoch.

    The epoch lives in shared memory: worker processes that outlive an epoch see it change.

    Args:
        source: the dataset's reader.
        cache: where derived arrays are kept.
        cases: names, in the split's order.
        split: "train", "val", "test" or "predict".
        seed: seed of the draws.
    """

    def __init__(self, source: MeshSource, cache: CaseCache, cases: Sequence[str], split: str, seed: int) -> None:
        self.source = source
        self.cache = cache
        self.cases = list(cases)
        self.split = split
        self.seed = seed
        self.trainer: Any = None
        self._epoch = torch.zeros(1, dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return len(self.cases)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "trainer": None}

    @property
    def epoch(self) -> int:
        """The epoch that training draws belong to."""
        return int(self._epoch[0])

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch; takes effect in running workers too. Call it before iterating over a loader."""
        self._epoch[0] = epoch

    def follow_trainer(self) -> None:
        """Take over the epoch of the trainer, if there is one; it is right after a resume too."""
        if self.trainer is not None:
            self.set_epoch(self.trainer.current_epoch)

    def arrays(self, case: str) -> dict[str, np.ndarray]:
        """The derived arrays of a case, memory-mapped. Nothing stays open when the caller drops them."""
        return self.cache.load(case, self.source.key(case), lambda: self.source.derive(case))

    def __getitem__(self, index: int) -> Sample:
        case = self.cases[index]
        draws = Draws(self.seed, self.split, self.epoch, case)
        return self.source.sample(case, index, self.arrays(case), draws)


class EpochDataLoader(DataLoader):
    """A loader that tells its dataset the trainer's epoch before each pass, ahead of any worker's first fetch."""

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self.dataset, MeshDataset):
            self.dataset.follow_trainer()
            if self.generator is not None:
                # The order of an epoch is the same in a resumed run.
                self.generator.manual_seed(stable_seed(self.dataset.seed, "order", self.dataset.epoch))
        return super().__iter__()


class _Preparation(Dataset):
    """Item i fills the cache for case i: lets a loader's workers share the work."""

    def __init__(self, source: MeshSource, cache: CaseCache, cases: Sequence[str], verify: bool) -> None:
        self.source, self.cache, self.cases, self.verify = source, cache, list(cases), verify

    def __len__(self) -> int:
        return len(self.cases)

    def __getitem__(self, index: int) -> str:
        case = self.cases[index]
        self.cache.load(case, self.source.key(case), lambda: self.source.derive(case), verify=self.verify)
        return case


class MeshDataModule(LightningDataModule, ABC):
    """Base of the data modules: one case a step, as :class:`~globe_lightning.sample.Sample`.

    Derived classes state :meth:`make_source`, :meth:`case_lists` and :attr:`schema`.

    Args:
        cache_dir: folder of the derived arrays; None takes ``<root>/.globe_cache`` where that is writable, else a
            folder in the user's cache.
        validation_fraction: share of the train cases that is set aside for validation.
        n_validation: how many train cases are set aside; goes before the fraction.
        split_seed: chooses which ones. The choice depends on this and the cases' names alone.
        predict_split: the split that ``predict`` runs over: "test", "val" or "train".
        num_workers: loader processes; None takes what the CPUs allow beside the training processes, at most 4.
        pin_memory: hand samples over in page-locked memory; None where a GPU is present.
        persistent_workers: keep the loader processes between epochs.
        seed: seed of all draws. A draw depends on (seed, split, epoch, case) alone, not on workers or ranks.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        cache_dir: str | None = None,
        validation_fraction: float = 0.1,
        n_validation: int | None = None,
        split_seed: int = 0,
        predict_split: str = "test",
        num_workers: int | None = None,
        pin_memory: bool | None = None,
        persistent_workers: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not 0 <= validation_fraction < 1:
            raise ValueError(f"validation_fraction: expected 0 <= fraction < 1, found {validation_fraction}")
        if n_validation is not None and n_validation < 0:
            raise ValueError(f"n_validation: expected 0 or more cases, found {n_validation}")
        if predict_split not in ("train", "val", "test"):
            raise ValueError(f"predict_split: expected 'train', 'val' or 'test', found {predict_split!r}")
        if num_workers is not None and num_workers < 0:
            raise ValueError(f"num_workers: expected 0 or more, or null, found {num_workers}")
        self.cache_dir = cache_dir
        self.validation_fraction = validation_fraction
        self.n_validation = n_validation
        self.split_seed = split_seed
        self.predict_split = predict_split
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        self.persistent_workers = persistent_workers
        self.seed = seed
        self.datasets: dict[str, MeshDataset] = {}

    # What a dataset brings.

    @abstractmethod
    def make_source(self) -> MeshSource:
        """The reader with its options; checks that the dataset's root is there."""

    @abstractmethod
    def case_lists(self) -> dict[str, list[str]]:
        """The dataset's own lists: {"train": names, "test": names}; "val" too if it has one of its own."""

    @property
    @abstractmethod
    def schema(self) -> SampleSchema:
        """What every sample holds."""

    # What all share.

    def splits(self) -> dict[str, list[str]]:
        """Case names per split: "train", "val" (carved from the train list by ``split_seed``) and "test".

        Raises:
            ValueError: the validation split would leave no case to train on.
        """
        lists = self.case_lists()
        train = list(lists["train"])
        val = lists.get("val")
        if val is None:
            n = self.n_validation
            if n is None:
                n = 0 if self.validation_fraction == 0 else max(1, round(self.validation_fraction * len(train)))
            if n >= len(train):
                raise ValueError(
                    f"validation split: {n} of {len(train)} train cases would be set aside and none be left; lower "
                    f"n_validation or validation_fraction"
                )
            ranked = sorted(train, key=lambda case: stable_seed(self.split_seed, "validation", case))
            chosen = set(ranked[:n])
            val = [case for case in train if case in chosen]
            train = [case for case in train if case not in chosen]
        return {"train": train, "val": list(val), "test": list(lists["test"])}

    def make_cache(self, source: MeshSource) -> CaseCache:
        """The cache of a source's derived arrays."""
        root = source.root.resolve()
        if self.cache_dir is not None:
            folder = Path(self.cache_dir).expanduser()
        elif os.access(root, os.W_OK) and not self.root_is_read_only(root):
            return CaseCache(root / ".globe_cache" / source.name)
        else:
            folder = user_cache_dir()
        # One cache folder may serve several copies of a dataset, which must not sweep each other's entries.
        return CaseCache(folder / f"{source.name}-{stable_seed(root):016x}")

    def root_is_read_only(self, root: Path) -> bool:
        """Whether the cache must not stand inside the root even if it is writable."""
        return False

    def prepare(self, progress: bool = True, verify: bool = True) -> None:
        """Fill the cache for every case of the task, and remove stale entries.

        Args:
            progress: show a bar.
            verify: compare checksums of entries that are there already.
        """
        from tqdm.auto import tqdm

        source = self.make_source()
        cache = self.make_cache(source)
        cases = list(dict.fromkeys(case for names in self.splits().values() for case in names))
        keys = {case: source.key(case) for case in cases}
        missing = [case for case in cases if not cache.holds(case, keys[case], verify=verify)]
        if missing:
            workers = self._n_workers()
            loader = DataLoader(
                _Preparation(source, cache, missing, verify),
                batch_size=None,
                num_workers=workers if len(missing) > 4 * workers else 0,
            )
            bar = tqdm(loader, total=len(missing), desc=f"Preparing {source.name}", unit="case", disable=not progress)
            for _ in bar:
                pass
        cache.sweep([cache.path(case, key) for case, key in keys.items()], cases)

    def prepare_data(self) -> None:
        """Lightning's hook, on one process a node: fills the cache. Assigns no state."""
        self.prepare(progress=True, verify=False)

    def setup(self, stage: str | None = None) -> None:
        """Build the datasets that a stage needs: fit train and val, validate val, test test, predict its split."""
        wanted = {
            "fit": ("train", "val"),
            "validate": ("val",),
            "test": ("test",),
            "predict": ("predict",),
            None: SPLITS,
        }[None if stage is None else str(getattr(stage, "value", stage))]
        source = self.make_source()
        cache = self.make_cache(source)
        names = self.splits()
        names["predict"] = names[self.predict_split]
        for split in wanted:
            self.datasets[split] = MeshDataset(source, cache, names[split], split, self.seed)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the training draws, in a loop without a trainer."""
        if "train" in self.datasets:
            self.datasets["train"].set_epoch(epoch)

    def _n_workers(self) -> int:
        if self.num_workers is not None:
            return self.num_workers
        affinity = getattr(os, "sched_getaffinity", None)
        cpus = len(affinity(0)) if affinity else os.cpu_count() or 1
        trainer = self.trainer
        ranks = trainer.num_devices if trainer is not None else int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        return max(0, min(MAX_WORKERS, cpus // max(1, ranks) - 1))

    def _dataloader_factory(self, split: str) -> DataLoader:
        if split not in self.datasets:
            raise RuntimeError(f"the {split} dataset is not built yet; call setup() first")
        dataset = self.datasets[split]
        dataset.trainer = self.trainer
        train = split == "train"
        workers = min(self._n_workers(), len(dataset))
        return EpochDataLoader(
            dataset,
            batch_size=None,
            shuffle=train,
            num_workers=workers,
            pin_memory=torch.cuda.is_available() if self.pin_memory is None else self.pin_memory,
            persistent_workers=self.persistent_workers and workers > 0 and split in ("train", "val"),
            generator=torch.Generator() if train else None,
        )

    def train_dataloader(self) -> DataLoader:
        """One sample a step, cases shuffled."""
        return self._dataloader_factory("train")

    def val_dataloader(self) -> DataLoader | list:
        """The cases set aside from the train list; no loader if there are none."""
        return self._dataloader_factory("val") if len(self.datasets["val"]) else []

    def test_dataloader(self) -> DataLoader:
        """The test cases at all points."""
        return self._dataloader_factory("test")

    def predict_dataloader(self) -> DataLoader:
        """The cases of ``predict_split`` at all points."""
        return self._dataloader_factory("predict")
