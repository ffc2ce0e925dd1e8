"""Sizes and times on a car of 8.8 million faces: ``pytest -m slow -s tests/benchmarks/test_bench_drivaerml.py``.

It needs about 4 GB of free disk and 8 GB of memory. ``GLOBE_BENCH_FACES`` sets another number of faces,
``GLOBE_BENCH_DIR`` a folder that keeps the case between runs.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from drivaerml_synthetic import write_case

from datamodules import DrivAerMLDataModule
from datamodules.drivaerml_source import DrivAerMLSource

FACES = int(float(os.environ.get("GLOBE_BENCH_FACES", 8.8e6)))
DRAWN = 80_000

pytestmark = pytest.mark.slow


def _apart(function, *arguments):
    """Run in a process of its own, so that its peak of memory is its own; returns what it returns."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def _write(root):
    n = round(FACES**0.5)
    write_case(Path(root), 1, n_along=n, n_around=n)


def _module(root, **options):
    (Path(root) / "split.json").write_text('{"train": [1], "test": [1]}')
    module = DrivAerMLDataModule(root=str(root), num_workers=0, **options)
    module.case_lists = lambda: {"train": ["run_1"], "val": [], "test": ["run_1"]}
    return module


def _prepare(root):
    start = time.perf_counter()
    _module(root).prepare(progress=False, verify=False)
    seconds = time.perf_counter() - start
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _draw(root, targets):
    """Of 22 draws the seconds, CPU seconds and resident bytes; of 5 loads of it whole the same, and its bytes."""
    module = _module(root, targets=targets)
    module.setup("fit")
    dataset = module.datasets["train"]
    process, seconds, resident, busy = psutil.Process(), [], [], []
    for epoch in range(22):
        module.set_epoch(epoch)
        start, start_busy = time.perf_counter(), time.process_time()
        sample = dataset[0]
        seconds.append(time.perf_counter() - start)
        busy.append(time.process_time() - start_busy)
        resident.append(process.memory_info().rss)
        assert len(sample.prediction_points) == DRAWN and sample.boundary_meshes["vehicle"].n_faces == DRAWN
    del sample
    whole = Path(root) / "whole.pt"
    # The same case as one would otherwise hold it: a mesh of triangles with the fields of its faces and points.
    arrays = dataset.arrays("run_1")
    case = {name: arrays[name] for name in ("points", "cell", "point")}
    case["triangles"] = arrays["triangles"].astype(np.int64)
    torch.save({name: torch.from_numpy(np.array(array)) for name, array in case.items()}, whole)
    size = whole.stat().st_size
    del arrays, case
    loads, loads_busy = [], []
    for _ in range(5):
        start, start_busy = time.perf_counter(), time.process_time()
        torch.load(whole, weights_only=True)
        loads.append(time.perf_counter() - start)
        loads_busy.append(time.process_time() - start_busy)
    whole.unlink()
    return seconds, busy, resident, loads, loads_busy, size


def _whole(root, targets):
    module = _module(root, targets=targets)
    module.setup("test")
    start = time.perf_counter()
    sample = module.datasets["test"][0]
    seconds = time.perf_counter() - start
    assert sample.force_surface is not None
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = Path(os.environ.get("GLOBE_BENCH_DIR") or tmp_path_factory.mktemp("large"))
    if not DrivAerMLSource(folder).file("run_1", "boundary.vtp").is_file():
        _apart(_write, str(folder))
    return folder


def test_preparing_is_bounded_in_memory_and_the_cache_is_small(root):
    seconds, peak = _apart(_prepare, str(root))
    size = sum(path.stat().st_size for path in (root / ".globe_cache").rglob("*") if path.is_file())
    file = DrivAerMLSource(root).file("run_1", "boundary.vtp").stat().st_size
    print(
        f"\n{FACES:.3g} faces, file {file / 1e6:.0f} MB: prepared in {seconds:.0f} s, peak {peak / 1e9:.2f} GB, "
        f"cache {size / 1e6:.0f} MB"
    )
    assert peak < 8e9 and size < 700e6


@pytest.mark.parametrize("targets", ["vertices", "cells"])
def test_draws_read_only_what_they_use(root, targets):
    seconds, busy, resident, loads, loads_busy, size = _apart(_draw, str(root), targets)
    warm, warm_busy = np.median(seconds[2:]), np.median(busy[2:])
    load, load_busy = np.median(loads), np.median(loads_busy)
    print(
        f"\n{targets}: first draw {seconds[0]:.3f} s, then median {warm:.3f} s ({warm_busy:.3f} s of CPU), least "
        f"{min(seconds[2:]):.3f} s; torch.load of the whole case ({size / 1e6:.0f} MB) {load:.2f} s ({load_busy:.2f} s "
        f"of CPU), least {min(loads):.2f} s; ratio {warm / load:.1%} ({warm_busy / load_busy:.1%} of CPU); resident "
        f"{resident[2] / 1e6:.0f} MB after 3 draws, {resident[-1] / 1e6:.0f} MB after 22, most "
        f"{max(resident) / 1e6:.0f} MB"
    )
    assert max(resident[2:]) - min(resident[2:]) < 100e6, "flat over 20 draws"


@pytest.mark.parametrize("targets", ["vertices", "cells"])
def test_the_whole_case_as_a_sample(root, targets):
    seconds, peak = _apart(_whole, str(root), targets)
    print(f"\n{targets}: the whole case as a sample in {seconds:.1f} s, peak {peak / 1e9:.2f} GB")
    assert peak < 8e9
