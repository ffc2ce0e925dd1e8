"""A memory-mapped cache of arrays per case: atomic, keyed by everything that changes its content.

An entry is one folder ``<case>-<digest>`` holding one ``.npy`` file per array and ``meta.json``. The digest is that of
the entry's key (source files' sizes and times, parameters, version of the derivation), so a stale entry is never
found under the new name. An entry is built beside and renamed into place: a reader sees a whole entry or none, and of
several processes that build at once the first wins and the others discard. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

_FORMAT = 1
_BUILDING = ".building"
_ABANDONED_AFTER = 6 * 3600.0  # seconds; a builder that has not touched its folder for so long was killed


def file_fingerprint(path: str | os.PathLike[str]) -> list[Any]:
    """A file's name, size [bytes] and time of last change [ns]: what tells an edited file from the one cached.

    Raises:
        FileNotFoundError: no such file.
    """
    path = Path(path)
    try:
        status = path.stat()
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file; check the dataset's root folder") from None
    return [path.name, status.st_size, status.st_mtime_ns]


def user_cache_dir() -> Path:
    """The folder for caches of this package in the user's home: ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "globe_lightning"


class CaseCache:
    """Arrays per case in a folder.

    Args:
        folder: where the entries stand; made when first written to.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def __repr__(self) -> str:
        return f"CaseCache({str(self.folder)!r})"

    def path(self, case: str, key: Mapping[str, Any]) -> Path:
        """The entry's folder for a key of plain values."""
        text = json.dumps({"format": _FORMAT, **key}, sort_keys=True)
        return self.folder / f"{case}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def load(
        self,
        case: str,
        key: Mapping[str, Any],
        build: Callable[[], Mapping[str, np.ndarray]],
        verify: bool = False,
    ) -> dict[str, np.ndarray]:
        """The entry's arrays, read-only and memory-mapped; built first where it is absent, stale or damaged.

        Args:
            case: the case's name.
            key: plain values that change whenever the content would.
            build: computes the arrays; called only when needed.
            verify: compare the checksums too (reads every byte), not only names, shapes and sizes.

        Raises:
            OSError: the entry cannot be written.
            Exception: whatever ``build`` raises.
        """
        entry = self.path(case, key)
        arrays = self._open(entry, verify)
        if arrays is None:
            self._write(entry, case, build())
            arrays = self._open(entry, verify=False)
            if arrays is None:
                raise OSError(f"{entry}: the cache entry cannot be read back just after it was written")
        return arrays

    def holds(self, case: str, key: Mapping[str, Any], verify: bool = False) -> bool:
        """Whether a whole entry stands there."""
        return self._open(self.path(case, key), verify) is not None

    def sweep(self, keep: Iterable[Path], cases: Iterable[str]) -> None:
        """Remove entries of the named cases that are not among ``keep``, and what killed builders left long ago."""
        if not self.folder.is_dir():
            return
        kept, names = {path.name for path in keep}, set(cases)
        for found in self.folder.iterdir():
            if found.name.endswith(_BUILDING):
                try:
                    abandoned = time.time() - found.stat().st_mtime > _ABANDONED_AFTER
                except OSError:
                    continue
                if abandoned:
                    shutil.rmtree(found, ignore_errors=True)
            elif found.name.rpartition("-")[0] in names and found.name not in kept:
                self._discard(found)

    def _open(self, entry: Path, verify: bool) -> dict[str, np.ndarray] | None:
        """The arrays, or None if the entry is absent or not exactly what its meta.json says."""
        try:
            meta = json.loads((entry / "meta.json").read_text(encoding="utf-8"))
            arrays = {}
            for name, fact in meta["arrays"].items():
                file = entry / fact["file"]
                if file.stat().st_size != fact["bytes"]:
                    return None
                if verify and _checksum(file) != fact["crc32"]:
                    return None
                # A memory map of no bytes is an error.
                mode: Any = "r" if 0 not in fact["shape"] else None
                # Of a Path NumPy asks the file system about every part.
                array = np.load(str(file), mmap_mode=mode, allow_pickle=False)
                if list(array.shape) != fact["shape"] or array.dtype.str != fact["dtype"]:
                    return None
                arrays[name] = array
        except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError):
            return None
        return arrays

    def _write(self, entry: Path, case: str, arrays: Mapping[str, np.ndarray]) -> None:
        beside = self.folder / f".{entry.name}.{uuid.uuid4().hex}{_BUILDING}"
        try:
            beside.mkdir(parents=True)
            facts = {}
            for number, (name, value) in enumerate(arrays.items()):
                file = beside / f"{number}.npy"
                array = np.ascontiguousarray(value).reshape(np.shape(value))
                np.save(file, array, allow_pickle=False)
                facts[name] = {
                    "file": file.name,
                    "shape": list(array.shape),
                    "dtype": array.dtype.str,
                    "bytes": file.stat().st_size,
                    "crc32": _checksum(file),
                }
            (beside / "meta.json").write_text(
                json.dumps({"case": case, "arrays": facts}, indent=1, ensure_ascii=False), encoding="utf-8"
            )
            self._install(beside, entry)
        except OSError as error:
            raise OSError(
                f"{entry}: cannot write the cache entry ({error}). Set cache_dir to a writable folder with free space"
            ) from error
        finally:
            shutil.rmtree(beside, ignore_errors=True)

    def _install(self, beside: Path, entry: Path) -> None:
        for _ in range(20):
            try:
                os.rename(beside, entry)
                return
            except OSError:
                if not entry.exists():
                    raise
            if self._open(entry, verify=True) is not None:
                return  # another process was first; its entry has the same key and so the same content
            self._discard(entry)
        raise OSError("the damaged entry that stands there cannot be replaced")

    @staticmethod
    def _discard(entry: Path) -> None:
        """Take an entry away in one step, so that nobody reads it half removed."""
        aside = entry.with_name(f".{entry.name}.{uuid.uuid4().hex}{_BUILDING}")
        try:
            os.rename(entry, aside)
        except OSError:
            return  # another process was first
        shutil.rmtree(aside, ignore_errors=True)


def _checksum(file: Path) -> int:
    total = 0
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            total = zlib.crc32(block, total)
    return total
