"""The cache of derived arrays: whole or absent, keyed by content, healed when damaged."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from datamodules import cache as cache_module
from datamodules.cache import CaseCache, file_fingerprint, user_cache_dir

KEY = {"version": 1, "files": [["a", 1, 2]]}
ARRAYS = {
    "ΔU/|U_inf|": np.arange(6.0, dtype=np.float32).reshape(3, 2),
    "ids": np.arange(4),
    "flags": np.array([True, False]),
    "empty": np.zeros((0, 2)),
    "strided": np.arange(12.0).reshape(3, 4)[:, ::2],
    "scalar": np.array(2.5),
}


def equal(found, expected=ARRAYS):
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        np.testing.assert_array_equal(found[name], value)


def never():
    raise AssertionError("built although a good entry is there")


def test_built_once_and_read_back_as_read_only_maps(tmp_path):
    cache = CaseCache(tmp_path / "deep" / "cache")
    assert not cache.holds("case", KEY)
    equal(cache.load("case", KEY, lambda: ARRAYS))
    again = cache.load("case", KEY, never, verify=True)
    equal(again)
    assert cache.holds("case", KEY, verify=True)
    assert isinstance(again["ids"], np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        again["ids"][0] = 7
    files = {path.suffix for path in cache.path("case", KEY).iterdir()}
    assert files == {".npy", ".json"}, "nothing else, and nothing pickled"


def test_every_part_of_the_key_counts(tmp_path):
    cache = CaseCache(tmp_path)
    cache.load("case", KEY, lambda: {"x": np.array([1])})
    for other in ({**KEY, "version": 2}, {**KEY, "files": [["a", 1, 3]]}, {**KEY, "files": [["a", 2, 2]]}):
        assert cache.load("case", other, lambda: {"x": np.array([2])})["x"][0] == 2
    assert cache.load("case", KEY, never)["x"][0] == 1


def damage_truncate(entry):
    (entry / "0.npy").write_bytes((entry / "0.npy").read_bytes()[:-3])


def damage_header(entry):
    size = (entry / "0.npy").stat().st_size
    (entry / "0.npy").write_bytes(b"\0" * size)


def damage_missing(entry):
    (entry / "1.npy").unlink()


def damage_meta(entry):
    (entry / "meta.json").write_text('{"arrays": {"x":')


def damage_meta_type(entry):
    (entry / "meta.json").write_text('["not", "a", "mapping"]')


def damage_no_meta(entry):
    (entry / "meta.json").unlink()


def damage_dtype(entry):
    array = np.load(entry / "0.npy")
    np.save(entry / "0.npy", array.view(np.int32))


def damage_pickle(entry):
    np.save(entry / "0.npy", np.array([{"a": 1}, None], dtype=object), allow_pickle=True)
    meta = json.loads((entry / "meta.json").read_text())
    next(iter(meta["arrays"].values()))["bytes"] = (entry / "0.npy").stat().st_size
    (entry / "meta.json").write_text(json.dumps(meta))


@pytest.mark.parametrize(
    "damage",
    [
        damage_truncate,
        damage_header,
        damage_missing,
        damage_meta,
        damage_meta_type,
        damage_no_meta,
        damage_dtype,
        damage_pickle,
    ],
    ids=lambda f: f.__name__.removeprefix("damage_"),
)
def test_damaged_entry_is_healed(tmp_path, damage):
    cache = CaseCache(tmp_path)
    cache.load("case", KEY, lambda: ARRAYS)
    damage(cache.path("case", KEY))
    assert not cache.holds("case", KEY)
    equal(cache.load("case", KEY, lambda: ARRAYS))
    equal(cache.load("case", KEY, never, verify=True))
    assert [path.name for path in tmp_path.iterdir()] == [cache.path("case", KEY).name], "no rests"


def test_flipped_bit_is_found_by_the_checksum(tmp_path):
    cache = CaseCache(tmp_path)
    cache.load("case", KEY, lambda: ARRAYS)
    file = cache.path("case", KEY) / "0.npy"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert cache.holds("case", KEY) and not cache.holds("case", KEY, verify=True)
    equal(cache.load("case", KEY, lambda: ARRAYS, verify=True))
    equal(cache.load("case", KEY, never, verify=True))


def test_failing_build_leaves_nothing(tmp_path):
    cache = CaseCache(tmp_path)

    def fail():
        raise ValueError("bad file")

    with pytest.raises(ValueError, match="bad file"):
        cache.load("case", KEY, fail)
    with pytest.raises(ValueError):
        cache.load("case", KEY, lambda: {"x": np.array([1]), "bad": np.array([object()])})
    assert list(tmp_path.iterdir()) == []


def test_unwritable_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match=r"file.*cache_dir"):
        CaseCache(tmp_path / "file").load("case", KEY, lambda: ARRAYS)


def test_sweep_removes_stale_and_abandoned_only(tmp_path):
    cache = CaseCache(tmp_path)
    stale = {**KEY, "version": 0}
    for case in ("a", "a-b", "c"):
        for key in (KEY, stale):
            cache.load(case, key, lambda: ARRAYS)
    fresh, old = tmp_path / ".x.1.building", tmp_path / ".x.2.building"
    for folder in (fresh, old):
        folder.mkdir()
    long_ago = time.time() - 7 * 86400
    os.utime(old, (long_ago, long_ago))
    cache.sweep([cache.path(case, KEY) for case in ("a", "a-b")], ["a", "a-b"])
    left = {path.name for path in tmp_path.iterdir()}
    kept = {cache.path(case, KEY).name for case in ("a", "a-b", "c")} | {cache.path("c", stale).name, fresh.name}
    assert left == kept
    CaseCache(tmp_path / "absent").sweep([], [])


def _build_slowly(folder, barrier, results, number):
    def build():
        barrier.wait(30)  # all of them found no entry and build now
        return {"x": np.full(200_000, 3.0)}

    found = CaseCache(folder).load("case", KEY, build)
    results.put((number, float(found["x"].sum())))


def test_many_processes_build_at_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(3), context.Queue()
    workers = [
        context.Process(target=_build_slowly, args=(str(tmp_path), barrier, results, number)) for number in range(3)
    ]
    for worker in workers:
        worker.start()
    found = dict(results.get(timeout=60) for _ in workers)
    for worker in workers:
        worker.join(30)
        assert worker.exitcode == 0
    assert found == {0: 600_000.0, 1: 600_000.0, 2: 600_000.0}
    assert [path.name for path in tmp_path.iterdir()] == [CaseCache(tmp_path).path("case", KEY).name]


def test_the_loser_replaces_a_damaged_entry_but_not_a_good_one(tmp_path):
    cache = CaseCache(tmp_path)

    def build_late(damaged):
        cache.load("case", KEY, lambda: ARRAYS)  # another process was first
        if damaged:
            damage_truncate(cache.path("case", KEY))
        return ARRAYS

    equal(cache.load("case", KEY, lambda: build_late(False)))
    damage_truncate(cache.path("case", KEY))
    equal(cache.load("case", KEY, lambda: build_late(True)))
    equal(cache.load("case", KEY, never, verify=True))


def test_killed_writer_leaves_nothing_half_read(tmp_path):
    script = f"""
import os, signal
import numpy as np
from datamodules.cache import CaseCache
save, calls = np.save, []
def save_then_die(file, array, **options):
    if len(calls) == 2:
        open(file, "wb").write(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    calls.append(file)
    save(file, array, **options)
np.save = save_then_die
CaseCache({str(tmp_path)!r}).load("case", {KEY!r}, lambda: {{str(i): np.arange(9) for i in range(5)}})
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    cache = CaseCache(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1, "the killed writer's rest is there"
    assert not cache.holds("case", KEY)
    equal(cache.load("case", KEY, lambda: ARRAYS))
    equal(cache.load("case", KEY, never, verify=True))


def test_entry_that_cannot_be_replaced_is_an_error(tmp_path, monkeypatch):
    cache = CaseCache(tmp_path)
    cache.load("case", KEY, lambda: ARRAYS)
    damage_truncate(cache.path("case", KEY))
    monkeypatch.setattr(cache_module.CaseCache, "_discard", staticmethod(lambda entry: None))
    with pytest.raises(OSError, match="cannot be replaced"):
        cache.load("case", KEY, lambda: ARRAYS)


def test_fingerprint_sees_size_and_time(tmp_path):
    file = tmp_path / "a.vtu"
    with pytest.raises(FileNotFoundError, match=r"a\.vtu"):
        file_fingerprint(file)
    file.write_bytes(b"one")
    first = file_fingerprint(file)
    assert file_fingerprint(str(file)) == first
    os.utime(file, ns=(1, first[2] + 1))
    assert file_fingerprint(file) != first


def test_user_cache_dir_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache_dir() == tmp_path / "globe_lightning"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert user_cache_dir() == tmp_path / "home" / ".cache" / "globe_lightning"
