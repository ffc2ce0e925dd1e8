"""What every mesh data module shares: splits, the cache's place and filling, loaders, workers, seeds.

A dataset brings a :class:`~datamodules.dataset.MeshSource`: which files a case has, how fields are derived from them
(expensive, cached) and how one sample is drawn from the derived arrays (cheap, at every step).
:class:`MeshDataModule` does the rest.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from datamodules.cache import CaseCache, user_cache_dir
from datamodules.dataset import CaseOrder, MeshDataset, MeshSource, Preparation, PreparationError, stable_seed
from globe_lightning.sample import Sample, SampleSchema

SPLITS = ("train", "val", "test", "predict")
MAX_WORKERS = 4
SAMPLES_LICENCE = "CC0-1.0"
"""Of the cases that ship with the package."""


def dataset_root(root: str | None, variable: str, samples: Path, dataset: str, marker: str) -> Path:
    """A dataset's folder, from an argument or an environment variable.

    Args:
        root: the argument; "samples" names the cases that ship with the package; None asks the variable.
        variable: the environment variable's name.
        samples: the folder of the shipped cases.
        dataset: the dataset's name, for messages.
        marker: what stands in its folder, for messages.

    Raises:
        ValueError: neither is set.
        FileNotFoundError: there is no such folder.
    """
    if root == "samples":
        return samples
    value = root or os.environ.get(variable)
    if not value:
        raise ValueError(
            f"root: not given. Pass the {dataset} folder (the one with {marker}) as root (--data.init_args.root), set "
            f'the environment variable {variable} to it, or pass "samples" for the cases that ship with the package'
        )
    path = Path(value).expanduser()
    if not path.is_dir():
        origin = "root" if root else f"the environment variable {variable}"
        raise FileNotFoundError(f"{path}: no such folder, named by {origin}; expected the one with {marker}")
    return path


class EpochDataLoader(DataLoader):
    """A loader that tells its dataset the trainer's epoch before each pass, ahead of any worker's first fetch.

    Its state is how many cases of the epoch all processes have seen together: a training resumed within an epoch, by
    as many processes or others, goes on with the case after them.

    Attributes:
        batches_done: batches that the latest pass left out at its start.
    """

    batches_done = 0
    _cases_to_skip = 0

    def __iter__(self) -> Any:
        if isinstance(self.dataset, MeshDataset):
            self.dataset.follow_trainer()
        if isinstance(self.sampler, CaseOrder):
            cases, self._cases_to_skip = self._cases_to_skip, 0
            # One is left in any case: an epoch does not end without a batch.
            done = min(cases // self.sampler.num_replicas, len(self) - 1)
            trainer = getattr(self.dataset, "trainer", None)
            if trainer is not None:
                done -= done % trainer.accumulate_grad_batches
            self.batches_done = self.sampler.first = done
        return super().__iter__()

    def state_dict(self) -> dict[str, int]:
        """The number of cases that all processes have seen of the epoch."""
        trainer = getattr(self.dataset, "trainer", None)
        if trainer is None or not isinstance(self.sampler, CaseOrder):
            return {"cases": 0}
        batches = trainer.fit_loop.epoch_loop.batch_progress.current.completed % trainer.num_training_batches
        return {"cases": batches * self.sampler.num_replicas}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Leave out at the start of the next pass what was seen before the checkpoint."""
        self._cases_to_skip = state_dict["cases"]


ORIENTATIONS = ("outward", "inward", "file")
"""Where source normals may point: into the fluid, into the body, or as the files' winding has them."""


def require_choice(argument: str, value: object, allowed: Collection[str]) -> None:
    """Refuse a value that is not among the allowed ones, with a ValueError that names the argument."""
    if value not in allowed:
        raise ValueError(f"{argument}: expected one of {', '.join(map(repr, allowed))}, found {value!r}")


def require_counts(**counts: int | None) -> None:
    """Refuse counts that are neither None nor positive, with a ValueError that names the argument."""
    for argument, count in counts.items():
        if count is not None and count < 1:
            raise ValueError(f"{argument}: expected a positive number or null, found {count}")


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
        num_workers: loader processes; None takes the CPUs that this process may run on, its share of them if the
            machine's training processes run on the same, less one for training, at most 4.
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
        self.plan_ahead: Callable[[Sample], Any] | None = None  # of train samples; a model sets it

    #: Where the targets live in ``case_mesh``: "point" or "cell".
    field_association: str = "point"

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
        """Fill the cache for every case of the task, in parallel, and remove stale entries.

        Entries that are there already are kept: after a kill it goes on where it stopped. A case that fails does not
        stop the others.

        Args:
            progress: show a bar, and each failure as it comes.
            verify: compare checksums of entries that are there already.

        Raises:
            PreparationError: several cases failed; the message is a table of them with the reasons. Of a single case
                that failed, its own error.
        """
        from tqdm.auto import tqdm

        source = self.make_source()
        cache = self.make_cache(source)
        cases = list(dict.fromkeys(case for names in self.splits().values() for case in names))
        keys: dict[str, dict[str, Any]] = {}
        failures: dict[str, Exception] = {}
        for case in cases:
            try:
                keys[case] = source.key(case)
            except OSError as error:
                failures[case] = error
        missing = [case for case, key in keys.items() if not cache.holds(case, key, verify=verify)]
        with tqdm(
            total=len(missing), desc=f"Preparing {source.name}", unit="case", disable=not (progress and missing)
        ) as bar:
            for case, failure in failures.items():
                bar.write(f"{case} failed: {failure}") if progress else None
            loader = DataLoader(
                Preparation(source, cache, missing, verify),
                batch_size=None,
                num_workers=self._n_preparers(source, len(missing)),
            )
            for case, found in _until_a_worker_dies(loader) if missing else ():
                if found is not None:
                    failures[case] = found
                    bar.write(f"{case} failed: {found}") if progress else None
                    bar.set_postfix(failed=len(failures))
                bar.update()
        cache.sweep([cache.path(case, key) for case, key in keys.items()], keys)
        if len(failures) == 1:
            raise next(iter(failures.values()))
        if failures:
            raise PreparationError(failures, len(cases))

    def prepare_data(self) -> None:
        """Lightning's hook, on one process a node: fills the cache. Assigns no state."""
        self.prepare(self.trainer is None or self.trainer.progress_bar_callback is not None, verify=False)

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

    def _n_preparers(self, source: MeshSource, n_cases: int) -> int:
        """Processes that fill the cache: no training runs beside them, but memory bounds them."""
        wanted = self.num_workers
        if wanted is None:
            memory = psutil.virtual_memory().available // source.preparation_bytes
            wanted = max(0, min(_cpus_of_a_rank(self._ranks()), memory))
            wanted = 0 if wanted == 1 else wanted  # one process more would only cost its start
        return min(wanted, n_cases // source.cases_per_preparer)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the training draws, in a loop without a trainer."""
        if "train" in self.datasets:
            self.datasets["train"].set_epoch(epoch)

    def _n_workers(self) -> int:
        if self.num_workers is not None:
            return self.num_workers
        return max(0, min(MAX_WORKERS, _cpus_of_a_rank(self._ranks()) - 1))

    def _ranks(self) -> int:
        trainer = self.trainer
        return max(1, trainer.num_devices if trainer is not None else int(os.environ.get("LOCAL_WORLD_SIZE", 1)))

    def _dataloader_factory(self, split: str) -> DataLoader:
        if split not in self.datasets:
            raise RuntimeError(f"the {split} dataset is not built yet; call setup() first")
        dataset = self.datasets[split]
        dataset.trainer = self.trainer
        # Other splits are predicted chunk by chunk, in memory that does not grow with the case.
        dataset.plan_ahead = self.plan_ahead if split == "train" else None
        workers = min(self._n_workers(), len(dataset))
        return EpochDataLoader(
            dataset,
            batch_size=None,
            sampler=self._train_order(dataset) if split == "train" else None,
            num_workers=workers,
            pin_memory=torch.cuda.is_available() if self.pin_memory is None else self.pin_memory,
            persistent_workers=self.persistent_workers and workers > 0 and split in ("train", "val"),
        )

    def _train_order(self, dataset: MeshDataset) -> CaseOrder:
        trainer = self.trainer
        return CaseOrder(dataset) if trainer is None else CaseOrder(dataset, trainer.world_size, trainer.global_rank)

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


def _cpus() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _cpus_of_a_rank(ranks: int) -> int:
    """CPUs for one of a machine's training processes, from its affinity; tasks of Slurm have their own."""
    own = os.environ.get("SLURM_CPUS_PER_TASK", "") if "SLURM_PROCID" in os.environ else ""
    return min(int(own), _cpus()) if own.isdigit() else _cpus() // ranks


def _until_a_worker_dies(loader: DataLoader) -> Iterator[Any]:
    try:
        yield from loader
    except RuntimeError as error:
        if "worker" not in str(error):
            raise
        raise OSError(
            f"a preparing process died, for lack of memory perhaps ({error}). What is done is kept: run again to go "
            f"on, with a smaller num_workers"
        ) from error
