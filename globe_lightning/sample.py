"""The sample: the one contract between a data module and the Lightning module.

A data module yields one :class:`Sample` per step (``batch_size=None``: a case is a batch) and states the
:class:`SampleSchema` that all its samples fit. Neither side knows anything else of the other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from jaxtyping import Float, Int
from tensordict import TensorDict
from torch import Tensor

from globe_lightning.fields import flatten_ranks
from globe_lightning.mesh import BoundaryMesh
from globe_lightning.plain_values import plain


@dataclass
class ForceSurface:
    """How surface fields at prediction points integrate to force coefficients.

    A face's values are the means over its corner points. With A_f the area vector of face f, outward into the fluid,
    and a_f its area: ``C = sum_f (-C_p,f A_f + shear_sign * C_f,f a_f) . direction_f / reference_area``.

    Attributes:
        point_indices: rows of ``Sample.prediction_points`` at the corners of each face, (n_faces, n_corners); one
            column if the fields live at face centres.
        area_vectors: area times unit normal into the fluid, (n_faces, D) [m or m^2].
        directions: vector of each coefficient, {"Cd": (D,), "Cl": (D,)}; one per face, (n_faces, D), makes a moment.
        reference_areas: {name suffix: area [m^2, or m in 2D]}; the suffix "" names the main choice, e.g.
            {"": 1.0} or {"": 2.17, "_own": 2.2}.
        pressure_field: name of the pressure coefficient among the fields.
        shear_field: name of the wall shear coefficient among the fields.
        shear_sign: +1 if the shear field is the force on the body, -1 if its opposite.
        solver_coefficients: the solver's own values where known, {"Cd": 0.31}.
        areas: a_f, (n_faces,) [m or m^2]; None takes |A_f|. A "face" that gathers parts of curved surface around a
            point has more area than its area vector is long.
        vertex_normals: whether each area vector is the face's area times the mean of unit normals at its corners (each
            the mean of the unit normals of the faces there), and not the face's own.
    """

    point_indices: Int[Tensor, "faces corners"]
    area_vectors: Float[Tensor, "faces dims"]
    directions: dict[str, Tensor]
    reference_areas: dict[str, float] = field(default_factory=lambda: {"": 1.0})
    pressure_field: str = "C_p"
    shear_field: str = "C_f"
    shear_sign: float = 1.0
    solver_coefficients: dict[str, float] = field(default_factory=dict)
    areas: Float[Tensor, " faces"] | None = None
    vertex_normals: bool = False

    def to(self, device: torch.device | str | None = None, non_blocking: bool = False) -> ForceSurface:
        """Move in place to a device; returns itself."""
        return _convert(self, lambda t: t.to(device=device, non_blocking=non_blocking))

    def pin_memory(self) -> ForceSurface:
        """Move in place to page-locked memory; returns itself."""
        return _convert(self, lambda t: t.pin_memory())


@dataclass
class Sample:
    """One boundary-value problem with its truth at the prediction points.

    Attributes:
        case: the case's name in its dataset.
        index: the case's number in its split; metrics use it to count no case twice.
        prediction_points: (n, D) [m].
        targets: true nondimensional fields at the prediction points: scalars (n,), vectors (n, D); NaN where
            unknown or unphysical.
        boundary_meshes: {boundary type: faces}.
        reference_lengths: {name: positive scalar tensor [m]}.
        global_data: nondimensional scalars () and vectors (D,) of the whole sample, or None.
        force_surface: how forces are integrated, or None where the points do not cover a surface.
        point_ids: (n,) row of each prediction point in the case's full mesh, or None if the points are all of it in
            its own order.
        scales: factors that turn nondimensional fields into the dataset's units, {"U_inf": 50.0}; plain numbers.
        plans: trees and interaction plans of exactly these faces and points, built ahead (``models.plans.Plans``), or
            None: the model builds them.
        geometry_key: the same for samples of the same faces and points, see :func:`geometry_key`, so that their plans
            may be kept; or None.
    """

    case: str
    index: int
    prediction_points: Float[Tensor, "points dims"]
    targets: TensorDict
    boundary_meshes: dict[str, BoundaryMesh]
    reference_lengths: dict[str, Tensor]
    global_data: TensorDict | None = None
    force_surface: ForceSurface | None = None
    point_ids: Int[Tensor, " points"] | None = None
    scales: dict[str, float] = field(default_factory=dict)
    plans: Any = None
    geometry_key: str | None = None

    def to(self, device: torch.device | str | None = None, non_blocking: bool = False) -> Sample:
        """Move in place to a device; returns itself."""
        if self.plans is not None and device is not None:
            self.plans = self.plans.to(device)
        return _convert(self, lambda t: t.to(device=device, non_blocking=non_blocking))

    def pin_memory(self) -> Sample:
        """Move in place to page-locked memory; returns itself."""
        return _convert(self, lambda t: t.pin_memory())


def geometry_key(sample: Sample) -> str:
    """A digest of where a sample's faces and prediction points stand, which is all that trees and plans follow from.

    Of a sample on the CPU; some milliseconds for a hundred thousand points.
    """
    digest = hashlib.blake2b(digest_size=16)
    parts = {kind: mesh.positions for kind, mesh in sample.boundary_meshes.items()}
    for name, points in {**parts, "": sample.prediction_points}.items():
        array = points.detach().contiguous().numpy()
        digest.update(f"{name} {array.shape} {array.dtype};".encode())
        digest.update(array.data)
    return digest.hexdigest()


def _convert(holder: Any, convert: Any) -> Any:
    """Apply ``convert`` to every tensor, mesh or TensorDict that a dataclass holds, in place."""

    def one(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: one(item) for key, item in value.items()}
        return convert(value) if isinstance(value, (Tensor, TensorDict, BoundaryMesh, ForceSurface)) else value

    for item in fields(holder):
        setattr(holder, item.name, one(getattr(holder, item.name)))
    return holder


@dataclass
class SampleSchema:
    """What every sample of a dataset holds: names and ranks, as plain values.

    Attributes:
        n_spatial_dims: 2 or 3.
        output_field_ranks: target fields (0 scalar, 1 vector); may nest.
        boundary_source_data_ranks: per boundary type its per-face data.
        reference_length_names: in declared order.
        global_data_ranks: per-sample data.
    """

    n_spatial_dims: int
    output_field_ranks: dict[str, Any]
    boundary_source_data_ranks: dict[str, dict[str, Any]]
    reference_length_names: list[str]
    global_data_ranks: dict[str, Any] = field(default_factory=dict)

    def arguments(self) -> dict[str, Any]:
        """The schema as keyword arguments of ``GLOBE`` and ``GlobeLightningModule``; plain values."""
        return {item.name: plain(getattr(self, item.name)) for item in fields(self)}

    def differences(self, other: SampleSchema) -> list[str]:
        """What differs, one readable line each, ``self`` called the model and ``other`` the data; [] if they fit.

        The model may declare boundary types that the data lack; those contribute nothing.
        """
        lines = []
        if self.n_spatial_dims != other.n_spatial_dims:
            lines.append(f"n_spatial_dims: the model has {self.n_spatial_dims}, the data {other.n_spatial_dims}")
        for name in ("output_field_ranks", "global_data_ranks"):
            mine, theirs = flatten_ranks(getattr(self, name), name), flatten_ranks(getattr(other, name), name)
            lines += _rank_differences(name, mine, theirs)
        if list(self.reference_length_names) != list(other.reference_length_names):
            lines.append(
                f"reference_length_names: the model has {list(self.reference_length_names)}, "
                f"the data {list(other.reference_length_names)} (the order counts)"
            )
        model, data = self.boundary_source_data_ranks, other.boundary_source_data_ranks
        for kind in sorted(set(data) - set(model)):
            lines.append(f"boundary_source_data_ranks: the data have type {kind!r}, the model declares {sorted(model)}")
        for kind in sorted(set(data) & set(model)):
            name = f"boundary_source_data_ranks[{kind!r}]"
            lines += _rank_differences(name, flatten_ranks(model[kind], name), flatten_ranks(data[kind], name))
        return lines


def _rank_differences(name: str, mine: Mapping[str, int], theirs: Mapping[str, int]) -> list[str]:
    lines = [f"{name}: the model declares {key!r}, the data lack it" for key in mine if key not in theirs]
    lines += [f"{name}: the data have {key!r}, the model lacks it" for key in theirs if key not in mine]
    lines += [
        f"{name}[{key!r}]: the model has rank {mine[key]}, the data {theirs[key]}"
        for key in mine
        if key in theirs and mine[key] != theirs[key]
    ]
    return lines
