"""The cases of a split as samples: what a dataset brings, reproducible draws, and the map-style dataset.

Nothing here knows Lightning, so that worker processes start quickly.
"""

from __future__ import annotations

import hashlib
import json
import os
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, DistributedSampler

from datamodules.cache import CaseCache, file_fingerprint
from globe_lightning.sample import Sample, geometry_key


def stable_seed(*keys: Any) -> int:
    """A 63-bit seed that depends on the keys' text alone: the same in every process, on every machine."""
    text = json.dumps([str(key) for key in keys])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def tensor(array: np.ndarray) -> torch.Tensor:
    """An array as a tensor: itself if it owns its memory, else a copy (of a memory map, which is read-only)."""
    return torch.from_numpy(array if array.flags.owndata and array.flags.writeable else np.array(array))


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
    #: Memory that deriving one case takes at most, in bytes, and how many cases are worth a process's start.
    preparation_bytes: int = 500_000_000
    cases_per_preparer: int = 4

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

    Attributes:
        plan_ahead: builds a sample's plans where the sample is made, so that a step finds them ready; None for none.
    """

    def __init__(self, source: MeshSource, cache: CaseCache, cases: Sequence[str], split: str, seed: int) -> None:
        self.source = source
        self.cache = cache
        self.cases = list(cases)
        self.split = split
        self.seed = seed
        self.trainer: Any = None
        self.plan_ahead: Callable[[Sample], Any] | None = None
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
            # trainer.current_epoch still lags by one when a resumed run makes its first iterator.
            self.set_epoch(self.trainer.fit_loop.epoch_progress.current.processed)

    def arrays(self, case: str) -> dict[str, np.ndarray]:
        """The derived arrays of a case, memory-mapped. Nothing stays open when the caller drops them."""
        return self.cache.load(case, self.source.key(case), lambda: self.source.derive(case))

    def __getitem__(self, index: int) -> Sample:
        case = self.cases[index]
        draws = Draws(self.seed, self.split, self.epoch, case)
        sample = self.source.sample(case, index, self.arrays(case), draws)
        if self.split in ("train", "val"):  # which may come again
            sample.geometry_key = geometry_key(sample)
        if self.plan_ahead is not None:
            sample.plans = self.plan_ahead(sample)
        return sample


class CaseOrder(DistributedSampler):
    """The order of the train cases: one permutation an epoch, shared by all processes.

    It depends on (seed, epoch) alone. In step t process r of W takes place t W + r of it, so that W processes see in
    a step what one process sees in W. Cases that W does not divide wait for another epoch's permutation.

    Args:
        dataset: the cases.
        num_replicas: W.
        rank: r.

    Raises:
        ValueError: there are fewer cases than processes.
    """

    def __init__(self, dataset: MeshDataset, num_replicas: int = 1, rank: int = 0) -> None:
        if len(dataset) < num_replicas:
            raise ValueError(f"{len(dataset)} train cases for {num_replicas} processes: each needs one at least")
        super().__init__(dataset, num_replicas, rank, shuffle=True, drop_last=True)
        self.first = 0

    def __iter__(self) -> Iterator[int]:
        """This process's cases from place ``first`` on, which is 0 again for the next pass."""
        dataset: Any = self.dataset
        generator = torch.Generator().manual_seed(stable_seed(dataset.seed, "order", dataset.epoch))
        order = torch.randperm(len(dataset), generator=generator)
        mine = order[self.rank : self.num_samples * self.num_replicas : self.num_replicas].tolist()
        first, self.first = self.first, 0
        return iter(mine[first:])


class PreparationError(ValueError):
    """Cases that could not be prepared.

    Args:
        failures: {case: its error}.
        n_cases: how many cases there are in all.
    """

    def __init__(self, failures: Mapping[str, Exception], n_cases: int) -> None:
        self.failures = dict(failures)
        width = max(map(len, failures))
        table = "\n".join(f"  {case:<{width}}  {error}" for case, error in failures.items())
        super().__init__(
            f"{len(failures)} of {n_cases} cases could not be prepared; the others are ready. Mend these or leave them "
            f"out of the split:\n{table}"
        )


class Preparation(Dataset):
    """Item i fills the cache for case i and is (case, its error or None): lets a loader's workers share the work."""

    def __init__(self, source: MeshSource, cache: CaseCache, cases: Sequence[str], verify: bool) -> None:
        self.source, self.cache, self.cases, self.verify = source, cache, list(cases), verify

    def __len__(self) -> int:
        return len(self.cases)

    def __getitem__(self, index: int) -> tuple[str, Exception | None]:
        case = self.cases[index]
        try:
            self.cache.load(case, self.source.key(case), lambda: self.source.derive(case), verify=self.verify)
        except (OSError, ValueError) as error:
            return case, error
        except Exception as error:
            # An unforeseen error travels as text: not every exception can be sent between processes.
            trace = "".join(traceback.format_exception(error))
            return case, RuntimeError(f"{type(error).__name__}: {error}\n{trace}")
        return case, None
