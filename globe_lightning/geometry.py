"""Predictions for shapes that nobody has simulated, in two lines of Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from globe_lightning.callbacks.prediction_pictures import draw_prediction
from globe_lightning.callbacks.predictions import with_fields
from globe_lightning.callbacks.tables import FORCE_COLUMNS, force_rows, write_table
from globe_lightning.module import GlobeLightningModule
from globe_lightning.run_folder import safe_name, written_whole
from globe_lightning.sample import Sample, SampleSchema

if TYPE_CHECKING:
    import pyvista as pv
    from matplotlib.figure import Figure

CAR_FACES = 80_000
"""Source faces of a car if the checkpoint does not say how many its training had."""


def prepared_as_trained(schema: SampleSchema, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of ``GeometryDataModule`` under which a model meets what its training showed it.

    Args:
        schema: the model's.
        stored: the model's ``geometry_arguments``, {} if it was trained elsewhere.

    Raises:
        ValueError: the schema is none for which shapes can be prepared.
    """
    from datamodules.geometry import conventions_for

    conventions = conventions_for(schema)
    defaults = {"n_boundary_faces": CAR_FACES} if conventions == "drivaerml" else {}
    return {"conventions": conventions, **defaults, **stored}


@dataclass(repr=False)
class ShapePrediction:
    """What a model predicts for a shape, or at probes around it.

    Attributes:
        case: its name.
        fields: {field name: values}, nondimensional: scalars (n,) and vectors (n, D), at ``points``.
        points: (n, D) [m]: of a car's surface; of a grid around an airfoil, the airfoil's own points first.
        forces: {coefficient: value}; {} at probes.
        mesh: the points as a pyvista mesh with the fields, under their own and the dataset's names plus ``Pred``.
        report: what was found in the shape, to print.
        probes: predictions at the probes that were asked for, by name.
        sample: what the model was given.
    """

    case: str
    fields: dict[str, np.ndarray]
    points: np.ndarray
    forces: dict[str, float]
    mesh: pv.DataSet
    report: Any
    sample: Sample
    probes: dict[str, ShapePrediction] = field(default_factory=dict)
    _place: str = "point"

    def __repr__(self) -> str:
        forces = ", ".join(f"{name} {value:.4f}" for name, value in self.forces.items())
        more = f"; probes {list(self.probes)}" if self.probes else ""
        return f"ShapePrediction({self.case!r}, {len(self.points)} points: {', '.join(self.fields)}; {forces}{more})"

    def _tensors(self) -> dict[str, Tensor]:
        return {name: torch.from_numpy(value) for name, value in self.fields.items()}

    def plot(self, path: str | Path | None = None, dots_per_inch: int = 110) -> Figure | None:
        """A picture of the fields, and of the pressure along the body; written as a file if a path is given.

        Returns:
            The matplotlib figure; None for probes that are no plane.
        """
        figure = draw_prediction(self.sample, self._tensors(), self.mesh, self.case, self._place, dots_per_inch)
        if figure is not None and path is not None:
            with written_whole(Path(path)) as beside:
                figure.savefig(beside, dpi=dots_per_inch)
        return figure

    def save(self, folder: str | Path) -> list[Path]:
        """Write the mesh (.vtp or .vtu), the forces (.csv) and the picture (.png), of the probes too.

        Returns:
            The files written.
        """
        import pyvista as pv

        folder, stem = Path(folder), safe_name(self.case)
        written = [folder / f"{stem}.{'vtp' if isinstance(self.mesh, pv.PolyData) else 'vtu'}"]
        with written_whole(written[0]) as beside:
            self.mesh.save(beside)
        if self.forces:
            written.append(folder / f"{stem}_forces.csv")
            write_table(written[-1], FORCE_COLUMNS, force_rows(self.sample, self._tensors()))
        picture = folder / f"{stem}.png"
        if self.plot(picture) is not None:
            written.append(picture)
        return written + [path for probe in self.probes.values() for path in probe.save(folder)]


def predict_geometry(
    model: GlobeLightningModule,
    geometry: Any,
    *,
    repair: str | Sequence[str] = (),
    accept: str | Sequence[str] = (),
    units: str | None = None,
    probes: str | Sequence[str] = (),
    n_boundary_faces: int | None = None,
    n_segments: int | None = None,
    progress: bool = False,
    **conditions: float,
) -> ShapePrediction:
    """What a model predicts for a new shape.

    ``result = predict_geometry(model, "car.stl", U_inf=38.89)``, then ``result.forces``, ``result.plot()``,
    ``result.save("folder")``. The shape is prepared as the cases were that the model was trained on, in units,
    orientation, floors, reference lengths and number of faces; what does not fit is reported, and mended if asked for.

    Args:
        model: trained on samples of AirFRANS (airfoils) or DrivAerML (cars).
        geometry: a file (airfoils .dat, .csv, .txt; cars .stl, .vtp, .obj, .ply), or coordinates (n, 2), or a pyvista
            surface.
        repair: what to mend, by the names in the report; "all" for everything.
        accept: faults to leave as they are, though they would forbid a prediction.
        units: the file's unit of length (cars): m, mm, cm, in or ft.
        probes: where else to predict: files of points, planes ("y=0"), grids ("x=-1:6:141,y=0,z=0:2:41").
        n_boundary_faces: faces that act as sources; None takes as many as in training.
        n_segments: resample an airfoil to that many segments.
        progress: show a bar over the points.
        **conditions: airfoils ``U_inf`` [m/s] or ``Re``, and ``alpha`` [degrees]; cars ``U_inf``, ``nu``, ``L_ref``,
            ``A_ref``.

    Raises:
        ShapeError: the shape cannot be used as it is; the message lists what was found and how to mend it.
        FileNotFoundError, ValueError: the file, a condition or another argument is wrong; the message says how.
    """
    from datamodules.geometry import GeometryDataModule

    arguments = prepared_as_trained(model.schema, model.geometry_arguments)
    if n_boundary_faces is not None:
        arguments["n_boundary_faces"] = n_boundary_faces
    data = GeometryDataModule(
        [geometry],
        conditions=dict(conditions),
        repair=[repair] if isinstance(repair, str) else repair,
        accept=[accept] if isinstance(accept, str) else accept,
        units=units,
        probes=[probes] if isinstance(probes, str) else probes,
        n_segments=n_segments,
        **arguments,
    )
    (shape,) = data.shapes()
    results = [_predicted(model, data, index, shape.report, progress) for index in range(len(data.cases()))]
    results[0].probes = {result.case.removeprefix(f"{results[0].case}_"): result for result in results[1:]}
    return results[0]


def _predicted(model: GlobeLightningModule, data: Any, index: int, report: Any, progress: bool) -> ShapePrediction:
    sample = data.sample(index)
    device, training = model.device, model.training
    model.eval()
    try:
        prediction = model.predict_fields(sample.to(device), device="cpu", progress=progress)
    finally:
        model.train(training)
    sample.to("cpu")
    mesh = data.case_mesh(sample.case)
    place = data.field_association
    with_fields(mesh, sample, prediction, {}, place)
    with_fields(mesh, sample, data.dimensional(sample, prediction), {}, place)
    totals = FORCE_COLUMNS.index("predicted")
    return ShapePrediction(
        case=sample.case,
        fields={name: value.float().numpy() for name, value in prediction.items()},
        points=sample.prediction_points.numpy(),
        forces={row[1]: row[totals] for row in force_rows(sample, prediction)},
        mesh=mesh,
        report=report,
        sample=sample,
        _place=place,
    )
