"""Force coefficients from surface fields: the one place that integrates forces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from globe_lightning.sample import ForceSurface


class ForceCoefficients(NamedTuple):
    """Dimensionless forces on a body by coefficient name ("Cl", "Cd", "Cd_own"); each a scalar float64 tensor.

    Attributes:
        total: pressure plus friction.
        pressure: the part of the pressure.
        friction: the part of the wall shear.
    """

    total: dict[str, Tensor]
    pressure: dict[str, Tensor]
    friction: dict[str, Tensor]


def force_coefficients(surface: ForceSurface, fields: Mapping[str, Tensor]) -> ForceCoefficients:
    """Integrate pressure and shear over a surface.

    ``C = sum_f (-C_p,f A_f + shear_sign C_f,f a_f) . direction_f / reference_area``, A_f the area vector into the
    fluid, a_f the area, a face's values the means over its corners. A corner whose value is NaN is left out of its
    face's mean; a face without any known corner makes the coefficient NaN. Sums are taken in float64.

    Args:
        surface: faces, directions, areas and the names of the two fields.
        fields: {flattened name: values at the sample's prediction points}: the pressure coefficient (n,) and the
            wall shear coefficient (n, D).

    Raises:
        ValueError: one of the two fields is missing.
    """
    for argument, name in (("pressure_field", surface.pressure_field), ("shear_field", surface.shear_field)):
        if name not in fields:
            raise ValueError(f"forces need the {argument} {name!r}, the fields are {sorted(fields)}")
    vectors = surface.area_vectors.double()
    areas = _areas(surface)
    pressure = _face_means(fields[surface.pressure_field].unsqueeze(-1), surface)
    shear = _face_means(fields[surface.shear_field], surface)
    pressure_forces = -pressure * vectors
    friction_forces = surface.shear_sign * shear * areas.unsqueeze(1)
    pressure_force, friction_force = pressure_forces.sum(dim=0), friction_forces.sum(dim=0)
    result = ForceCoefficients({}, {}, {})
    for coefficient, direction in sorted(surface.directions.items()):
        direction = direction.double()
        if direction.ndim == 1:
            along = pressure_force @ direction, friction_force @ direction
        else:
            along = (pressure_forces * direction).sum(), (friction_forces * direction).sum()
        for suffix, area in surface.reference_areas.items():
            name = f"{coefficient}{suffix}"
            result.pressure[name], result.friction[name] = along[0] / area, along[1] / area
            result.total[name] = result.pressure[name] + result.friction[name]
    return result


def can_integrate(surface: ForceSurface | None, field_names: Mapping[str, object] | list[str]) -> bool:
    """Whether a sample has a surface whose two fields are among the named ones."""
    return surface is not None and surface.pressure_field in field_names and surface.shear_field in field_names


def point_areas(surface: ForceSurface, n_points: int) -> Float[Tensor, " points"]:
    """The area that each prediction point stands for [m^2, or m in 2D], float64: equal shares of its faces' areas.

    0 at points off the surface.
    """
    n_corners = surface.point_indices.shape[1]
    shares = _areas(surface) / n_corners
    out = shares.new_zeros(n_points)
    for column in surface.point_indices.unbind(1):
        out.index_add_(0, column, shares)
    return out


def _areas(surface: ForceSurface) -> Float[Tensor, " faces"]:
    return surface.area_vectors.double().norm(dim=1) if surface.areas is None else surface.areas.double()


def _face_means(values: Float[Tensor, "points columns"], surface: ForceSurface) -> Float[Tensor, "faces columns"]:
    return torch.nanmean(values[surface.point_indices].double(), dim=1)
