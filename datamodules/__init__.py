"""Lightning data modules that turn simulation files into samples for ``globe_lightning``.

The public names are imported on first use: importing the package loads neither Lightning nor pyvista.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datamodules.airfrans import AirFRANSDataModule
    from datamodules.base import MeshDataModule
    from datamodules.drivaerml import DrivAerMLDataModule
    from datamodules.geometry import GeometryDataModule

_HOMES = {
    "AirFRANSDataModule": "datamodules.airfrans",
    "DrivAerMLDataModule": "datamodules.drivaerml",
    "GeometryDataModule": "datamodules.geometry",
    "MeshDataModule": "datamodules.base",
}

__all__ = ["AirFRANSDataModule", "DrivAerMLDataModule", "GeometryDataModule", "MeshDataModule"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
