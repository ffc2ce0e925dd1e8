"""Sources compiled at their first use: once for a processor, whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from globe_lightning import native_code
from globe_lightning.native_code import NoNativeCode, cache_folder, find_compiler, load_library

SOURCE = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "answer.cpp"
    path.write_text(SOURCE)
    return path


def test_compiled_once_and_kept(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_library(source).answer() == 42
    (library,) = cache_folder().iterdir()
    assert library.name.startswith("answer-") and library.suffix == ".so"
    run, commands = native_code._run, []

    def watched(command: list[str]) -> str:
        commands.append(command)
        return run(command)

    monkeypatch.setattr(native_code, "_run", watched)
    assert load_library(source).answer() == 42
    assert all("-E" in command for command in commands)  # asked what the processor can do, compiled nothing
    source.write_text(SOURCE.replace("42", "43"))
    assert load_library(source).answer() == 43
    assert len(list(cache_folder().iterdir())) == 2


def test_another_processor_has_a_library_of_its_own(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_library(source)
    run = native_code._run
    other = "#define __ANOTHER_PROCESSOR__ 1\n"
    monkeypatch.setattr(native_code, "_run", lambda command: run(command) + (other if "-E" in command else ""))
    load_library(source)
    assert len(list(cache_folder().iterdir())) == 2


def test_an_error_in_the_source_is_told_and_nothing_is_kept(source: Path) -> None:
    source.write_text("int broken(\n")
    with pytest.raises(NoNativeCode, match=r"failed: .*answer\.cpp"):
        load_library(source)
    assert not list(cache_folder().iterdir())


def test_a_library_that_does_not_load_is_named(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_library(source)
    (library,) = cache_folder().iterdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    (cache_folder() / library.name).write_bytes(b"no library")
    with pytest.raises(NoNativeCode, match=r"answer\.cpp cannot be kept or loaded as a library: .*another.*answer-"):
        load_library(source)


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(NoNativeCode, match="no-such-compiler"):
        find_compiler()
    monkeypatch.setenv("CXX", "env g++ -pipe")
    assert find_compiler()[1:] == ["g++", "-pipe"]
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NoNativeCode, match="no C\\+\\+ compiler in the path"):
        find_compiler()


def test_where_nothing_can_be_kept_a_folder_of_this_process_serves(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path / "file"))
    folder = cache_folder()
    assert folder.is_dir() and tmp_path not in folder.parents
    assert load_library(source).answer() == 42
