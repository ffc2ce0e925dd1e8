"""Sensitivities: how a number that a model predicts changes with the shape and the conditions of a case.

Gradients are exact derivatives of what the network computes while the trees and interaction plans stay as they are:
a plan is a discrete choice of which faces act together. At ``theta = 0`` there is nothing to choose and they are the
derivatives of the prediction. At ``theta > 0`` (by the pointwise rule of prediction) a displacement large enough to
change the plan adds a jump of the size of the plan's own approximation, which no gradient holds. Weights of a
subsampled surface (``measure_weights``) and the directions of forces stay fixed too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from tensordict import TensorDict
from torch import Tensor, nn
from tqdm.auto import tqdm

from globe_lightning.fields import flatten_data
from globe_lightning.forces import can_integrate, force_coefficients
from globe_lightning.mesh import BoundaryMesh
from globe_lightning.models.globe import GLOBE
from globe_lightning.sample import ForceSurface, Sample
from globe_lightning.surfaces import BodySurface, MovingParts

INPUTS = ("boundary_points", "face_data", "global_data", "reference_lengths", "prediction_points", "force_surface")
"""What :func:`sensitivity` differentiates with respect to."""

Objective = str | Callable[[dict[str, Tensor]], Tensor]
"""A force coefficient's name ("Cd"), or a function from {field: values at the sample's points} to one number."""


@dataclass
class Sensitivity:
    """Partial derivatives of one number; each with all other inputs, the trees and the plans held fixed.

    Attributes:
        name: of the number.
        value: the number.
        boundary_points: {boundary type: (n_points, D)} with respect to the vertices of its faces [1/m].
        face_data: {boundary type: {flattened name: (n_faces,) or (n_faces, D)}}.
        global_data: {flattened name: () or (D,)}.
        reference_lengths: {name: ()} [1/m].
        prediction_points: (n, D) with respect to where the fields are asked [1/m].
        area_vectors: (faces, D) with respect to those of the force surface; None if nothing is integrated.
        areas: (faces,) the same, None if the force surface states none.
    """

    name: str
    value: float
    boundary_points: dict[str, Tensor] = field(default_factory=dict)
    face_data: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    global_data: dict[str, Tensor] = field(default_factory=dict)
    reference_lengths: dict[str, Tensor] = field(default_factory=dict)
    prediction_points: Tensor | None = None
    area_vectors: Tensor | None = None
    areas: Tensor | None = None


@dataclass
class ShapeSensitivity:
    """The total derivative of one number with respect to the points of a body, everything that follows them included.

    Attributes:
        name: of the number.
        value: the number.
        surface: the body.
        gradient: (n, D) change of the number per displacement of each point [1/m], float64.
        normals: (n, D) unit normals into the fluid at the points.
        areas: (n,) area (length in 2D) around each point [m^2 or m].
        resolution: mean width of the faces that act as the model's sources on the body [m].
    """

    name: str
    value: float
    surface: BodySurface
    gradient: Float[Tensor, "n dims"]
    normals: Float[Tensor, "n dims"]
    areas: Float[Tensor, " n"]
    resolution: float

    @property
    def normal_gradient(self) -> Float[Tensor, " n"]:
        """Change of the number per volume added by pushing the surface outward [1/m^3; 1/m^2 in 2D].

        The normal component of the gradient over the area around each point: unlike the gradient itself it does not
        depend on the density of the mesh. Positive where pushing outward raises the number.
        """
        along = (self.gradient * self.normals).sum(dim=1)
        return along / torch.where(self.areas > 0, self.areas, torch.inf)

    def smoothed(self, length: float | None = None) -> Float[Tensor, " n"]:
        """The normal gradient without variations shorter than a length: what a smooth bump of that width does.

        A model sees a body through its faces; where these are a few drawn from many, the derivative stands at the
        corners of the drawn ones alone, as needles of either sign. Displacements that are smooth over several faces
        meet the needles' mean. The integral over the surface is that of :attr:`normal_gradient`.

        Args:
            length: [m]; None takes twice the :attr:`resolution`, 0 leaves everything.
        """
        length = 2 * self.resolution if length is None else length
        return self.surface.smoothed(self.normal_gradient, self.areas, length)


def sensitivity(
    model: nn.Module, sample: Sample, of: Objective, wrt: Sequence[str] = INPUTS, progress: bool = False
) -> Sensitivity:
    """Partial derivatives of a number with respect to the inputs of a sample, trees and plans held fixed.

    The fields are evaluated twice, chunk by chunk by the rule of the forward pass: once for the number and its
    derivative with respect to each field, once for the derivative of the fields, recomputing kernels (gradient
    checkpointing), so that memory is bounded by one chunk of points. Everything is computed in full precision.

    Args:
        model: a ``GlobeLightningModule`` or ``GLOBE``; in float64 for derivatives to many digits.
        sample: on the model's device.
        of: a force coefficient of the sample's surface ("Cd", "Cl_own"), or a function of the fields at the sample's
            points, {flattened name: (n,) or (n, D)}, that returns one number.
        wrt: which of :data:`INPUTS`; others are left empty.
        progress: show a bar over the points.

    Raises:
        ValueError: an unknown coefficient or input, no surface to integrate over, or an objective that is no number.
    """
    unknown = sorted(set(wrt) - set(INPUTS))
    if unknown:
        raise ValueError(f"wrt: expected some of {INPUTS}, found {unknown}")
    network: GLOBE = getattr(model, "network", model)  # type: ignore[assignment, arg-type]
    chunk_size = model.hparams["prediction_chunk_size"] if hasattr(model, "hparams") else "auto"  # type: ignore[index]
    name = of if isinstance(of, str) else getattr(of, "__name__", "objective")
    evaluation = _Evaluation(network, sample, chunk_size, wrt)
    with torch.autocast(sample.prediction_points.device.type, enabled=False), _checkpointing(network):
        rows = evaluation.rows_of(of)
        with torch.no_grad():
            fields = evaluation.fields(rows)
        value, adjoints, geometry = _adjoints(of, sample, fields)
        out = Sensitivity(name, value)
        if "force_surface" in wrt:
            out.area_vectors, out.areas = geometry
        evaluation.differentiate(adjoints, out, progress)
    return out


def shape_sensitivity(
    model: nn.Module,
    sample: Sample,
    of: Objective = "Cd",
    surface: BodySurface | None = None,
    progress: bool = False,
) -> ShapeSensitivity:
    """The derivative of a number with respect to the shape of a body, trees and plans held fixed.

    Moving a point of the surface moves the vertices of boundary faces there, the prediction points there, and the
    area vectors over which forces integrate; prediction points off the surface stay.

    Args:
        model: a ``GlobeLightningModule`` or ``GLOBE``.
        sample: of the test or predict split, on the model's device.
        of: as of :func:`sensitivity`.
        surface: the body; None takes the faces that the sample's forces integrate over, where it holds their corners
            (airfoils do).
        progress: show a bar over the points.

    Raises:
        ValueError: see :func:`sensitivity`, :meth:`BodySurface.of_sample` and :meth:`MovingParts.of`.
    """
    parts = MovingParts.of(sample, BodySurface.of_sample(sample) if surface is None else surface)
    wrt = ("boundary_points", "prediction_points", "force_surface")
    partial = sensitivity(model, sample, of, wrt, progress)
    assert partial.prediction_points is not None
    gradient = parts.gradient(partial.prediction_points, partial.boundary_points, partial.area_vectors, partial.areas)
    normals, areas = parts.normals_and_areas()
    return ShapeSensitivity(
        partial.name, partial.value, parts.surface, gradient, normals, areas, parts.resolution(sample)
    )


class _Evaluation:
    """A sample's inputs as leaves of the graph, and its fields as functions of them."""

    def __init__(self, network: GLOBE, sample: Sample, chunk_size: Any, wrt: Sequence[str]) -> None:
        self.network, self.chunk_size, self.wrt = network, chunk_size, wrt
        dtype = network.geometry_dtype
        self.points = sample.prediction_points.detach().to(dtype)
        self.leaves: dict[tuple[str, ...], Tensor] = {}

        def leaf(part: str, *keys: str, value: Any) -> Tensor:
            tensor = torch.as_tensor(value, device=self.points.device).detach().to(dtype)
            if part in wrt:
                self.leaves[(part, *keys)] = tensor = tensor.clone().requires_grad_()
            return tensor

        self.meshes = {}
        for kind, mesh in sample.boundary_meshes.items():
            data = TensorDict({}, batch_size=[mesh.n_faces])
            for name, value in flatten_data(mesh.cell_data).items():
                data[network.source_layouts[kind].paths[name]] = leaf("face_data", kind, name, value=value)
            points = leaf("boundary_points", kind, value=mesh.points)
            self.meshes[kind] = BoundaryMesh(points, mesh.cells, data, mesh.measure_weights, mesh.face_positions)
        self.lengths = {
            name: leaf("reference_lengths", name, value=value) for name, value in sample.reference_lengths.items()
        }
        self.conditions = TensorDict({}, batch_size=[])
        for name, value in flatten_data(sample.global_data).items():
            self.conditions[network.global_layout.paths[name]] = leaf("global_data", name, value=value)
        self.n_faces = sum(mesh.n_faces for mesh in self.meshes.values())
        self.force_surface = sample.force_surface

    def rows_of(self, of: Objective) -> Tensor:
        """Rows of the prediction points that the number may depend on; a point's fields depend on that point alone."""
        if not isinstance(of, str) or self.force_surface is None:
            return torch.arange(self.points.shape[0], device=self.points.device)
        return self.force_surface.point_indices.unique()

    def fields(self, rows: Tensor) -> dict[str, Tensor]:
        """The fields at some rows of the points; 0 elsewhere."""
        n, layout = self.points.shape[0], self.network.output_layout
        fields = {name: self.points.new_zeros(n, *layout.shape(name)) for name in layout.ranks}
        first = 0
        for chunk in self.network.predict_chunks(
            self.points.index_select(0, rows),
            self.meshes,
            self.lengths,
            self.conditions,
            self.chunk_size,
        ):
            own = rows[first : first + chunk.batch_size[0]]
            first += len(own)
            for name, value in flatten_data(chunk).items():
                fields[name][own] = value
        return fields

    def differentiate(self, adjoints: dict[str, Tensor], out: Sensitivity, progress: bool) -> None:
        """Fill in the derivatives, from those of the number with respect to the fields."""
        device = self.points.device
        active = torch.stack([gradient.reshape(len(gradient), -1).any(dim=1) for gradient in adjoints.values()]).any(0)
        rows = active.nonzero().squeeze(1)
        totals = {key: torch.zeros_like(leaf) for key, leaf in self.leaves.items()}
        of_points = torch.zeros_like(self.points)
        planner = self.network._planner(device)
        kinds = [kind for kind in self.network.source_layouts if kind in self.meshes and self.meshes[kind].n_faces]
        plans, forest = planner.plan_faces({kind: self.meshes[kind] for kind in kinds})
        chunks = planner.chunks(len(rows), self.n_faces, self.chunk_size)
        bar = tqdm(total=len(rows), desc=out.name, unit="point", unit_scale=True, leave=False, disable=not progress)
        with bar:
            for first, last in chunks:
                own = rows[first:last]
                bar.update(len(own))  # before the work: the bar says what is under way
                points = self.points.index_select(0, own).requires_grad_()
                # The plan of predict_chunks: each point decides alone which faces act on it as one.
                plan = planner.plan_points(points.detach(), 0, len(own), forest, True)
                chunk_plans = replace(plans, prediction=plan)
                fields = flatten_data(
                    self.network(points, self.meshes, self.lengths, self.conditions, plans=chunk_plans)
                )
                inputs = [points, *self.leaves.values()]
                found = torch.autograd.grad(
                    [fields[name] for name in adjoints],
                    inputs,
                    [gradient[own].to(fields[name]) for name, gradient in adjoints.items()],
                    allow_unused=True,
                )
                if found[0] is not None:
                    of_points[own] = found[0]
                for total, part in zip(totals.values(), found[1:], strict=True):
                    if part is not None:
                        total += part
        out.prediction_points = of_points if "prediction_points" in self.wrt else None
        for (part_name, *parents, key), total in totals.items():
            place: Any = getattr(out, part_name)
            for parent in parents:
                place = place.setdefault(parent, {})
            place[key] = total


def _adjoints(
    of: Objective, sample: Sample, fields: dict[str, Tensor]
) -> tuple[float, dict[str, Tensor], tuple[Tensor | None, Tensor | None]]:
    """The number, its derivatives with respect to the fields, and with respect to area vectors and areas."""
    leaves = {name: value.detach().requires_grad_() for name, value in fields.items()}
    surface = sample.force_surface
    if isinstance(of, str):
        if not can_integrate(surface, list(fields)):
            raise ValueError(
                f"case {sample.case!r}: no surface to integrate {of!r} over, or the model predicts no pressure and "
                f"shear there (it predicts {sorted(fields)}); take a sample of the test or predict split"
            )
        assert surface is not None
        surface = _with_leaves(surface)
        coefficients = force_coefficients(surface, leaves).total
        if of not in coefficients:
            raise ValueError(f"of: case {sample.case!r} has the coefficients {sorted(coefficients)}, found {of!r}")
        value = coefficients[of]
        geometry: tuple[Tensor | None, Tensor | None] = (surface.area_vectors, surface.areas)
    else:
        value, geometry = of(leaves), (None, None)
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
            raise ValueError(
                "of: expected a function of the fields that returns one number as a tensor, found "
                f"{tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__}"
            )
    asked = [*leaves.values(), *(item for item in geometry if item is not None)]
    found = list(torch.autograd.grad(value.sum(), asked, allow_unused=True))
    adjoints = {name: part for name, part in zip(leaves, found, strict=False) if part is not None}
    rest = found[len(leaves) :]
    of_geometry = tuple(None if item is None else rest.pop(0) for item in geometry)
    return float(value.detach()), adjoints, of_geometry  # type: ignore[return-value]


def _with_leaves(surface: ForceSurface) -> ForceSurface:
    """A copy whose area vectors and areas can be differentiated with respect to."""
    areas = None if surface.areas is None else surface.areas.detach().double().requires_grad_()
    return replace(surface, area_vectors=surface.area_vectors.detach().double().requires_grad_(), areas=areas)


@contextmanager
def _checkpointing(network: GLOBE) -> Iterator[None]:
    before = network.use_gradient_checkpointing
    network.use_gradient_checkpointing = True
    try:
        yield
    finally:
        network.use_gradient_checkpointing = before
