"""C++ sources compiled for the processor of this machine at their first use, and kept for the next process."""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

# No -ffast-math: rounding to whole numbers and NaN must survive.
FLAGS = ["-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"]
LIBRARY_FLAGS = ["-shared", "-fPIC", "-pthread"]
SECONDS = 300

logger = logging.getLogger(__name__)


class NoNativeCode(RuntimeError):
    """A source could not be compiled or loaded; the message says why."""


def load_library(source: Path) -> ctypes.CDLL:
    """The library of a C++ source.

    It is kept in ``$XDG_CACHE_HOME/globe_lightning`` (or ``~/.cache/globe_lightning``), under a name that depends on
    the source, the compiler and what the processor can do: machines that share a home directory share no library that
    one of them cannot run.

    Raises:
        NoNativeCode: no compiler, or it failed, or the library does not load.
    """
    compiler = find_compiler()
    flags = [*FLAGS, "-march=native" if platform.machine() in ("x86_64", "AMD64", "i686") else "-mcpu=native"]
    macros = _run([*compiler, *flags, "-dM", "-E", "-x", "c++", os.devnull])
    key = hashlib.sha256("\0".join([source.read_text(), *compiler, *flags, *LIBRARY_FLAGS, macros]).encode())
    name = f"{source.stem}-{key.hexdigest()[:16]}.so"
    try:
        folder = cache_folder()
        library = folder / name
        if not library.exists():
            logger.info(
                "Compiling %s for this processor, some seconds; the library is kept as %s", source.name, library
            )
            # Beside it and renamed: a process that loads the library never sees half of one.
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                fresh = Path(scratch) / name
                _run([*compiler, *flags, *LIBRARY_FLAGS, str(source), "-o", str(fresh)])
                os.replace(fresh, library)
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise NoNativeCode(f"{source.name} cannot be kept or loaded as a library: {error}") from error


def find_compiler() -> list[str]:
    """The C++ compiler: ``$CXX`` with its arguments, or the first of c++, g++ and clang++ in the path.

    Raises:
        NoNativeCode: there is none.
    """
    named = shlex.split(os.environ.get("CXX") or "")
    for name in named[:1] or ["c++", "g++", "clang++"]:
        if path := shutil.which(name):
            return [path, *named[1:]]
    raise NoNativeCode(f"no C++ compiler: {named[0]} ($CXX) is not there" if named else "no C++ compiler in the path")


def cache_folder() -> Path:
    """Where libraries are kept; a folder of this process alone if nothing can be written there."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "globe_lightning"
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RuntimeError):  # no home
        own = tempfile.mkdtemp(prefix="globe_lightning_")
        atexit.register(shutil.rmtree, own, ignore_errors=True)
        return Path(own)


def _run(command: list[str]) -> str:
    """What a command says.

    Raises:
        NoNativeCode: it fails.
    """
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS).stdout
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().split("\n")[0]
        raise NoNativeCode(f"{command[0]} failed: {said}") from error
