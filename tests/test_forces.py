from __future__ import annotations

import math

import pytest
import torch

from globe_lightning.forces import can_integrate, force_coefficients, point_areas
from globe_lightning.sample import ForceSurface


def circle(n=400, sign=1.0, areas=None):
    """A circle of radius 1/2 with a point at each end of each of its segments."""
    angle = torch.arange(n, dtype=torch.float64) * 2 * math.pi / n
    points = 0.5 * torch.stack([angle.cos(), angle.sin()], dim=1)
    following = (torch.arange(n) + 1) % n
    edge = points[following] - points
    surface = ForceSurface(
        point_indices=torch.stack([torch.arange(n), following], dim=1),
        area_vectors=torch.stack([edge[:, 1], -edge[:, 0]], dim=1),
        directions={"Cd": torch.tensor([1.0, 0.0]), "Cl": torch.tensor([0.0, 1.0])},
        reference_areas=areas or {"": 1.0},
        shear_sign=sign,
    )
    return surface, points


def test_buoyancy_of_a_linear_pressure_is_the_enclosed_area():
    surface, points = circle()
    forces = force_coefficients(surface, {"C_p": points @ torch.tensor([2.0, -3.0]).double(), "C_f": 0 * points})
    area = math.pi / 4
    assert float(forces.total["Cd"]) == pytest.approx(-2 * area, rel=1e-3)
    assert float(forces.total["Cl"]) == pytest.approx(3 * area, rel=1e-3)
    assert float(forces.friction["Cd"]) == 0


def test_a_constant_pressure_gives_no_force():
    surface, points = circle()
    forces = force_coefficients(surface, {"C_p": torch.full((len(points),), 7.0), "C_f": 0 * points})
    assert abs(float(forces.total["Cd"])) < 1e-12 and abs(float(forces.total["Cl"])) < 1e-12


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_friction_is_shear_times_length_with_the_shears_sign(sign):
    surface, points = circle(sign=sign)
    shear = torch.tensor([0.01, 0.0]).expand(len(points), 2)
    forces = force_coefficients(surface, {"C_p": torch.zeros(len(points)), "C_f": shear})
    assert float(forces.friction["Cd"]) == pytest.approx(sign * 0.01 * math.pi, rel=1e-3)
    assert float(forces.total["Cd"]) == pytest.approx(float(forces.pressure["Cd"] + forces.friction["Cd"]))


def test_rotating_the_flow_with_the_body_changes_nothing():
    surface, _ = circle(50)
    torch.manual_seed(0)
    pressure, shear = torch.randn(50), torch.randn(50, 2)
    before = force_coefficients(surface, {"C_p": pressure, "C_f": shear}).total
    angle = 0.7
    rotation = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    surface.area_vectors = surface.area_vectors @ rotation.double().T
    surface.directions = {name: rotation @ value for name, value in surface.directions.items()}
    after = force_coefficients(surface, {"C_p": pressure, "C_f": shear @ rotation.T}).total
    for name in before:
        assert float(after[name]) == pytest.approx(float(before[name]), abs=1e-6)


def test_every_reference_area_has_its_own_coefficient():
    surface, points = circle(areas={"": 1.0, "_own": 2.0})
    forces = force_coefficients(surface, {"C_p": points[:, 0], "C_f": 0 * points})
    assert sorted(forces.total) == ["Cd", "Cd_own", "Cl", "Cl_own"]
    assert float(forces.total["Cd"]) == pytest.approx(2 * float(forces.total["Cd_own"]))


def test_one_unknown_corner_is_left_out_and_an_unknown_face_shows():
    surface, points = circle()
    pressure = points[:, 0].clone()
    whole = float(force_coefficients(surface, {"C_p": pressure, "C_f": 0 * points}).total["Cd"])
    pressure[10] = torch.nan
    assert float(force_coefficients(surface, {"C_p": pressure, "C_f": 0 * points}).total["Cd"]) == pytest.approx(
        whole, rel=1e-3
    )
    pressure[11] = torch.nan
    assert math.isnan(float(force_coefficients(surface, {"C_p": pressure, "C_f": 0 * points}).total["Cd"]))


def test_missing_fields_are_named():
    surface, points = circle()
    with pytest.raises(ValueError, match="shear_field 'C_f'"):
        force_coefficients(surface, {"C_p": points[:, 0]})
    assert can_integrate(surface, ["C_p", "C_f"]) and not can_integrate(surface, ["C_p"])
    assert not can_integrate(None, ["C_p", "C_f"])


def test_a_direction_per_face_integrates_a_moment():
    surface, points = circle()
    middles = points[surface.point_indices].mean(dim=1)
    # The moment about the origin of a force f at x is x_0 f_1 - x_1 f_0.
    surface.directions["M"] = torch.stack([-middles[:, 1], middles[:, 0]], dim=1)
    tangent = 0.01 * torch.stack([-points[:, 1], points[:, 0]], dim=1) / 0.5
    forces = force_coefficients(surface, {"C_p": points[:, 0] * 3, "C_f": tangent})
    assert float(forces.friction["M"]) == pytest.approx(0.01 * 0.5 * math.pi, rel=1e-3), "shear times arm times length"
    assert abs(float(forces.pressure["M"])) < 1e-12, "pressure acts through the middle"


def test_areas_of_their_own_serve_the_friction_alone():
    surface, points = circle()
    fields = {"C_p": points[:, 0], "C_f": torch.ones(len(points), 2).double()}
    before = force_coefficients(surface, fields)
    surface.areas = 3 * surface.area_vectors.norm(dim=1)
    after = force_coefficients(surface, fields)
    assert float(after.friction["Cd"]) == pytest.approx(3 * float(before.friction["Cd"]))
    assert after.pressure == before.pressure


def test_areas_of_points_add_up_to_the_surfaces():
    surface, points = circle(30)
    areas = point_areas(surface, len(points) + 5)
    assert float(areas.sum()) == pytest.approx(float(surface.area_vectors.norm(dim=1).sum()), rel=1e-12)
    assert not areas[len(points) :].any() and float(areas[: len(points)].std()) < 1e-12
    surface.areas = torch.arange(30)
    assert float(point_areas(surface, 30)[4]) == pytest.approx((3 + 4) / 2)
