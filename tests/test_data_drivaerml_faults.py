"""Damaged DrivAerML inputs and caches: a clear error or a healed cache, and never something half-written."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import pyvista as pv
from drivaerml_synthetic import write_case, write_dataset

from datamodules import AirFRANSDataModule, DrivAerMLDataModule
from datamodules import cache as cache_module
from datamodules.dataset import Draws, PreparationError
from datamodules.drivaerml_source import DrivAerMLSource


@pytest.fixture
def source(tmp_path):
    write_case(tmp_path, 1)
    return DrivAerMLSource(tmp_path)


@pytest.fixture
def root(tmp_path):
    write_dataset(tmp_path, n_train=3, n_test=1)
    return tmp_path


def module_of(root, **options):
    return DrivAerMLDataModule(root=str(root), split=str(root / "split.json"), **{"num_workers": 0, **options})


def edited(source, edit):
    """Save the surface again after a change."""
    path = source.file("run_1", "boundary.vtp")
    mesh = pv.read(path)
    mesh = edit(mesh) or mesh
    mesh.save(str(path))


def refused(source, *parts, error=ValueError):
    with pytest.raises(error) as caught:
        source.derive("run_1")
    for part in parts:
        assert part in str(caught.value), str(caught.value)


# Files.


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_truncated_surface(source, share):
    path = source.file("run_1", "boundary.vtp")
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    refused(source, "boundary_1.vtp", "again")


@pytest.mark.parametrize("name", ["CpMeanTrim", "wallShearStressMeanTrim"])
def test_missing_array(source, name):
    edited(source, lambda mesh: mesh.cell_data.remove(name))
    refused(source, "boundary_1.vtp", f"cell array '{name}' is missing", "pMeanTrim")


@pytest.mark.parametrize("name", ["CpMeanTrim", "wallShearStressMeanTrim"])
def test_array_with_the_wrong_number_of_components(source, name):
    def edit(mesh):
        mesh.cell_data[name] = np.zeros((mesh.n_cells, 2), dtype=np.float32)

    edited(source, edit)
    refused(source, name, "has shape (576, 2), expected (576")


def test_array_of_the_wrong_length(source):
    path = source.file("run_1", "boundary.vtp")
    mesh = pv.read(path)
    short = pv.convert_array(np.zeros(100, dtype=np.float32), name="CpMeanTrim")
    mesh.GetCellData().RemoveArray("CpMeanTrim")
    mesh.GetCellData().AddArray(short)
    mesh.save(str(path))
    refused(source, "boundary_1.vtp", "CpMeanTrim")


@pytest.mark.parametrize("name", ["CpMeanTrim", "wallShearStressMeanTrim"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_or_infinity_in_a_field(source, name, bad):
    def edit(mesh):
        mesh.cell_data[name][[7, 9]] = bad

    edited(source, edit)
    refused(source, f"'{name}' holds NaN or infinity in 2 of 576 rows")


def test_nan_in_a_coordinate(source):
    def edit(mesh):
        mesh.points[3, 1] = np.nan

    edited(source, edit)
    refused(source, "1 of 554 points have NaN")


def test_other_cells_than_polygons(source):
    def edit(mesh):
        lines = pv.PolyData(mesh.points, lines=[2, 0, 1])
        for name in mesh.cell_data:
            lines.cell_data[name] = mesh.cell_data[name][:1]
        return lines

    edited(source, edit)
    refused(source, "expected polygons only")


@pytest.mark.parametrize("part", ["boundary.vtp", "geo_ref.csv", "force_mom.csv"])
def test_missing_file(source, part):
    path = source.file("run_1", part)
    path.unlink()
    refused(source, path.name, "no such file", error=FileNotFoundError)
    with pytest.raises(FileNotFoundError, match=path.name):
        source.key("run_1")


@pytest.mark.parametrize(
    ("part", "text", "message"),
    [
        ("geo_ref.csv", "aRef,other\n2.1,3\n", "column 'lRef' is missing; found ['aRef', 'other']"),
        ("geo_ref.csv", "aRef,lRef\n2.1,2.7\n2.1,2.7\n", "expected a header and one row, found 2 rows"),
        ("geo_ref.csv", "aRef,lRef\n", "found 0 rows"),
        ("geo_ref.csv", "", "found 0 rows"),
        ("geo_ref.csv", "aRef,lRef\n2.1,-2.7\n", "'lRef' holds -2.7, expected more than 0"),
        ("geo_ref.csv", "aRef,lRef\n0,2.7\n", "'aRef' holds 0.0"),
        ("force_mom.csv", "Cl,Cs\n0.1,0\n", "column 'Cd' is missing"),
        ("force_mom.csv", "Cd,Cl,Cs\nhigh,0.1,0\n", "column 'Cd' holds 'high', expected a finite number"),
        ("force_mom.csv", "Cd,Cl,Cs\nnan,0.1,0\n", "column 'Cd' holds 'nan'"),
        ("force_mom.csv", "Cl,Cs,Cd\n0.1,0\n", "column 'Cd' holds ''"),
        ("force_mom_constref.csv", "Cd,Cl,Cs\n0.1,0,0\n0.1,0,0\n", "found 2 rows"),
        ("force_mom_constref.csv", "\xff", "force_mom_constref_1.csv"),
    ],
)
def test_faulty_csv(source, part, text, message):
    path = source.file("run_1", part)
    path.write_bytes(text.encode("latin-1"))
    refused(source, path.name, message)


def test_forces_that_fit_under_no_convention(source):
    for part in ("force_mom.csv", "force_mom_constref.csv"):
        path = source.file("run_1", part)
        before = path.read_text()
        header, values = before.split("\n")[:2]
        numbers = values.split(",")
        true = float(numbers[0])
        path.write_text(f"{header}\n{1.06 * true},{','.join(numbers[1:])}\n")
        refused(
            source, "boundary_1.vtp", path.name, f"says Cd = {1.06 * true:.6f}", "integrate to Cd = 0.3", "or to 0.3"
        )
        path.write_text(f"{header}\n{1.03 * true},{','.join(numbers[1:])}\n")
        source.derive("run_1")


# Faces.


def test_degenerate_faces_carry_nothing(source):
    before = source.facts(source.derive("run_1"))

    def edit(mesh):
        faces = [*mesh.irregular_faces, np.array([5, 5, 5]), np.array([2, 3, 3, 2]), np.array([8, 9, 8])]
        out = pv.PolyData(mesh.points, np.concatenate([[len(face), *face] for face in faces]))
        for name in mesh.cell_data:
            out.cell_data[name] = np.concatenate([mesh.cell_data[name], mesh.cell_data[name][:3]])
        return out

    edited(source, edit)
    arrays = source.derive("run_1")
    after = source.facts(arrays)
    assert after["area"] == pytest.approx(before["area"]) and after["integrated"] == pytest.approx(before["integrated"])
    source.n_boundary_faces = None
    mesh = source.sample("run_1", 0, arrays, Draws(0, "train", 0, "")).boundary_meshes["vehicle"]
    assert int((mesh.areas < 1e-8).sum()) == 4 and mesh.positions.isfinite().all() and mesh.normals.isfinite().all()


def flipped_faces(rows):
    def edit(mesh):
        faces = [face[::-1] if row in rows else face for row, face in enumerate(mesh.irregular_faces)]
        out = pv.PolyData(mesh.points, np.concatenate([[len(face), *face] for face in faces]))
        for name in mesh.cell_data:
            out.cell_data[name] = mesh.cell_data[name]
        return out

    return edit


def test_some_inverted_faces_are_refused(source):
    edited(source, flipped_faces(set(range(0, 576, 10))))
    refused(source, "boundary_1.vtp", "faces are not oriented alike", "expected at most 1%")


def test_an_inverted_patch_breaks_the_force_balance(source):
    # One connected patch: its inner edges agree, only its rim does not.
    edited(source, flipped_faces(set(range(0, 24 * 10))))
    refused(source, "boundary_1.vtp", "faces")


def test_an_open_sheet_has_no_orientation(source):
    def edit(mesh):
        mesh.points[:, 2] = 0.2

    edited(source, edit)
    refused(source, "encloses a volume of", "closed body")


def test_a_surface_without_area(source):
    def edit(mesh):
        mesh.points[:] = 0

    edited(source, edit)
    refused(source, "area of zero")


# Preparing.


def test_failed_cases_are_listed_and_stop_no_others(root, capsys):
    edited(DrivAerMLSource(root), lambda mesh: mesh.cell_data.remove("CpMeanTrim"))
    DrivAerMLSource(root).file("run_2", "geo_ref.csv").unlink()
    module = module_of(root)
    with pytest.raises(PreparationError) as caught:
        module.prepare()
    assert set(caught.value.failures) == {"run_1", "run_2"}
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("2 of 4 cases could not be prepared")
    assert any(line.startswith("  run_1  ") and "CpMeanTrim" in line for line in lines)
    assert any(line.startswith("  run_2  ") and "geo_ref_2.csv" in line for line in lines)
    shown = capsys.readouterr()
    assert "run_1 failed" in shown.out + shown.err and "3/3" in shown.err
    source, cache = module.make_source(), module.make_cache(module.make_source())
    assert [cache.holds(case, source.key(case)) for case in ("run_1", "run_3", "run_4")] == [False, True, True]
    # Mended, only the two are done again.
    write_case(root, 1)
    write_case(root, 2)
    module.prepare()
    assert "2/2" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["cars", "airfoils"])
def test_parallel_processes_report_failures_too(root, tmp_path, kind, monkeypatch):
    if kind == "cars":
        module = module_of(root, num_workers=2)
        edited(DrivAerMLSource(root), lambda mesh: mesh.cell_data.remove("CpMeanTrim"))
        error = "CpMeanTrim"
    else:
        from data_synthetic import write_dataset as write_airfoils

        folder = tmp_path / "airfoils"
        cases = write_airfoils(folder, n_train=7, n_test=2)
        module = AirFRANSDataModule(root=str(folder), num_workers=2)
        (folder / cases[0] / f"{cases[0]}_internal.vtu").write_bytes(b"")
        error = "internal.vtu: the file is empty"
    source = module.make_source()
    assert module._n_preparers(source, 9) == 2
    with pytest.raises(ValueError, match=error):
        module.prepare(progress=False)
    cache = module.make_cache(source)
    cases = [case for names in module.splits().values() for case in names]
    assert sum(cache.holds(case, source.key(case)) for case in cases) == len(cases) - 1


def test_an_unforeseen_error_keeps_its_trace(root, monkeypatch):
    def fail(self, case):
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(DrivAerMLSource, "derive", fail)
    with pytest.raises(PreparationError, match=r"4 of 4 cases[\s\S]*run_1  ZeroDivisionError: oops[\s\S]*in fail"):
        module_of(root).prepare(progress=False)


def test_a_dead_worker_says_how_to_go_on(root, monkeypatch):
    def die(self, case):
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(DrivAerMLSource, "derive", die)
    with pytest.raises(OSError, match=r"a preparing process died.*run again to go on"):
        module_of(root, num_workers=1).prepare(progress=False)


def test_preparers_follow_cpus_and_memory(root, monkeypatch):
    module, source = module_of(root, num_workers=None), DrivAerMLSource(root)
    memory = type("Memory", (), {"available": 3 * source.preparation_bytes + 1})
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)), raising=False)
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    assert module._n_preparers(source, 400) == 3
    memory.available = 10**13
    assert module._n_preparers(source, 400) == 64
    assert module._n_preparers(source, 5) == 5
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    assert module._n_preparers(source, 400) == 0


def _prepare_two_and_die(root):
    derive, done = DrivAerMLSource.derive, []

    def derive_then_die(self, case):
        if len(done) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        done.append(case)
        return derive(self, case)

    DrivAerMLSource.derive = derive_then_die
    module_of(root).prepare(progress=False)


def test_goes_on_after_a_kill(root, monkeypatch):
    process = multiprocessing.get_context("fork").Process(target=_prepare_two_and_die, args=(root,))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    derive, again = DrivAerMLSource.derive, []
    monkeypatch.setattr(DrivAerMLSource, "derive", lambda self, case: again.append(case) or derive(self, case))
    module = module_of(root)
    module.prepare(progress=False)
    assert len(again) == 2
    module.setup()
    assert len(list(module.test_dataloader())) == 1


# The cache.


def entry_of(module, case="run_4"):
    source = module.make_source()
    return module.make_cache(source).path(case, source.key(case))


def values_of(module):
    module.setup("test")
    return module.datasets["test"][0].targets["C_p"].clone()


def test_a_cache_of_another_version_is_not_read(root, monkeypatch):
    module = module_of(root)
    module.prepare(progress=False)
    old, before = entry_of(module), values_of(module)
    with monkeypatch.context() as patch:
        patch.setattr(cache_module, "_FORMAT", cache_module._FORMAT + 1)
        assert entry_of(module) != old and not entry_of(module).exists()
        assert (values_of(module) == before).all() and entry_of(module).is_dir()
    monkeypatch.setattr(DrivAerMLSource, "derivation_version", 999)
    module.prepare(progress=False)
    assert entry_of(module) != old and not old.exists(), "swept away"


def test_a_half_written_entry_is_rebuilt(root):
    module = module_of(root)
    module.prepare(progress=False)
    before, entry = values_of(module), entry_of(module)
    # What a writer that was killed leaves beside is never looked at; an entry cut short is built again.
    shutil.copytree(entry, entry.with_name(f".{entry.name}.dead.building"))
    for file in sorted(entry.glob("*.npy"))[:3]:
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2])
    assert (values_of(module) == before).all()
    module.prepare(progress=False)
    assert (values_of(module) == before).all()


def test_a_full_disk_is_said_and_leaves_nothing(root, monkeypatch):
    save = np.save

    def full(file, array, **options):
        if Path(file).name == "3.npy":
            Path(file).write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        save(file, array, **options)

    module = module_of(root)
    with monkeypatch.context() as patch:
        patch.setattr(np, "save", full)
        with pytest.raises(PreparationError, match=r"No space left on device.*cache_dir.*free space"):
            module.prepare(progress=False)
    folder = module.make_cache(module.make_source()).folder
    assert list(folder.iterdir()) == [], "nothing half-written"
    module.prepare(progress=False)
    assert len(list(folder.iterdir())) == 4


def _prepare(root, barrier, results):
    derive = DrivAerMLSource.derive

    def together(self, case):
        barrier.wait(60)
        return derive(self, case)

    DrivAerMLSource.derive = together
    module = module_of(root)
    module.prepare(progress=False)
    results.put(float(values_of(module).sum()))


def test_two_processes_prepare_the_same_cases_at_once(root):
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(2), context.Queue()
    workers = [context.Process(target=_prepare, args=(root, barrier, results)) for _ in range(2)]
    for worker in workers:
        worker.start()
    sums = [results.get(timeout=120) for _ in workers]
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert sums[0] == sums[1] == float(values_of(module_of(root)).sum())
    module = module_of(root)
    assert len(list(module.make_cache(module.make_source()).folder.iterdir())) == 4


def test_a_run_folder_that_is_absent(root):
    shutil.rmtree(root / "run_2")
    with pytest.raises(FileNotFoundError, match=r"names 1 of 4 runs that have no folder.*'run_2'"):
        module_of(root).prepare(progress=False)
