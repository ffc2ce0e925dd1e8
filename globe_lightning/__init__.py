"""GLOBE, a neural surrogate for boundary-driven PDEs, in PyTorch Lightning.

The public names are imported on first use: importing the package loads neither Lightning nor pyvista nor matplotlib.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from globe_lightning.callbacks.pictures import PictureWriter
    from globe_lightning.callbacks.predictions import PredictionWriter
    from globe_lightning.callbacks.sensitivities import draw_sensitivity, surface_of
    from globe_lightning.forces import force_coefficients
    from globe_lightning.geometry import ShapePrediction, predict_geometry
    from globe_lightning.mesh import BoundaryMesh
    from globe_lightning.models.globe import GLOBE
    from globe_lightning.module import GlobeLightningModule
    from globe_lightning.sample import ForceSurface, Sample, SampleSchema
    from globe_lightning.sensitivity import shape_sensitivity
    from globe_lightning.sharing import from_pretrained
    from globe_lightning.surfaces import displaced

__version__ = "0.1.0"

_HOMES = {
    "GLOBE": "globe_lightning.models.globe",
    "BoundaryMesh": "globe_lightning.mesh",
    "ForceSurface": "globe_lightning.sample",
    "GlobeLightningModule": "globe_lightning.module",
    "PictureWriter": "globe_lightning.callbacks.pictures",
    "PredictionWriter": "globe_lightning.callbacks.predictions",
    "Sample": "globe_lightning.sample",
    "SampleSchema": "globe_lightning.sample",
    "ShapePrediction": "globe_lightning.geometry",
    "displaced": "globe_lightning.surfaces",
    "draw_sensitivity": "globe_lightning.callbacks.sensitivities",
    "force_coefficients": "globe_lightning.forces",
    "predict_geometry": "globe_lightning.geometry",
    "from_pretrained": "globe_lightning.sharing",
    "shape_sensitivity": "globe_lightning.sensitivity",
    "surface_of": "globe_lightning.callbacks.sensitivities",
}

__all__ = [
    "GLOBE",
    "BoundaryMesh",
    "ForceSurface",
    "GlobeLightningModule",
    "PictureWriter",
    "PredictionWriter",
    "Sample",
    "SampleSchema",
    "ShapePrediction",
    "displaced",
    "draw_sensitivity",
    "force_coefficients",
    "from_pretrained",
    "predict_geometry",
    "shape_sensitivity",
    "surface_of",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
