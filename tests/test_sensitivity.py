"""Sensitivities against central differences in float64, trees and plans held fixed in both."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from helpers import Case, make_case, make_mesh, make_model, map_mesh
from tensordict import TensorDict
from torch import Tensor

from globe_lightning import GLOBE, BoundaryMesh, ForceSurface, GlobeLightningModule, Sample
from globe_lightning.fields import flatten_data
from globe_lightning.forces import force_coefficients
from globe_lightning.models.plans import Plans
from globe_lightning.sensitivity import INPUTS, sensitivity, shape_sensitivity
from globe_lightning.surfaces import BodySurface, MovingParts, displaced, equal_rows

STEP = 1e-5


def sample_of(case: Case, surface: ForceSurface | None = None) -> Sample:
    assert case.global_data is not None
    return Sample(
        case="made up",
        index=0,
        prediction_points=case.prediction_points,
        targets=TensorDict({}, batch_size=[len(case.prediction_points)]),
        boundary_meshes=case.boundary_meshes,
        reference_lengths=case.reference_lengths,
        global_data=TensorDict(case.global_data, batch_size=[]),
        force_surface=surface,
    )


def made_up(dims: int, n_points: int = 31) -> Sample:
    """Random faces, points, data and force surface."""
    case = make_case(dims, n_points=n_points)
    generator = torch.Generator().manual_seed(5)
    vectors = torch.randn(9, dims, generator=generator, dtype=torch.float64)
    surface = ForceSurface(
        point_indices=torch.randint(n_points, (9, 2), generator=generator),
        area_vectors=vectors,
        areas=vectors.norm(dim=1) * 1.1,
        directions={"Cd": torch.eye(dims)[0], "Cl": torch.eye(dims)[1]},
        reference_areas={"": 0.8, "_own": 1.3},
        shear_sign=-1.0,
    )
    return sample_of(case, surface)


def plans_of(model: GLOBE, sample: Sample) -> Plans:
    """The plans of a prediction, in which every point stands for itself."""
    planner = model._planner(torch.device("cpu"))
    plans, forest = planner.plan_faces({kind: sample.boundary_meshes[kind] for kind in model.source_layouts})
    points = sample.prediction_points
    return replace(plans, prediction=planner.plan_points(points, 0, len(points), forest, True))


def values(model: GLOBE, sample: Sample, plans: Any, of: Any) -> float:
    """The number, with plans of another sample."""
    with torch.no_grad():
        fields = flatten_data(
            model(
                sample.prediction_points,
                sample.boundary_meshes,
                sample.reference_lengths,
                sample.global_data,
                plans=plans,
            )
        )
        if isinstance(of, str):
            assert sample.force_surface is not None
            return float(force_coefficients(sample.force_surface, fields).total[of])
        return float(of(fields))


def moved(sample: Sample, part: str, keys: tuple[str, ...], change: Tensor) -> Sample:
    """A copy of a sample with one input changed."""
    meshes, lengths = dict(sample.boundary_meshes), dict(sample.reference_lengths)
    assert sample.global_data is not None and sample.force_surface is not None
    conditions, surface, points = sample.global_data.clone(), sample.force_surface, sample.prediction_points
    if part == "boundary_points":
        meshes[keys[0]] = map_mesh(meshes[keys[0]], points=meshes[keys[0]].points + change)
    elif part == "face_data":
        data = meshes[keys[0]].cell_data.clone()
        data[keys[1]] = data[keys[1]] + change
        meshes[keys[0]] = map_mesh(meshes[keys[0]], cell_data=data)
    elif part == "reference_lengths":
        lengths[keys[0]] = lengths[keys[0]] + change
    elif part == "global_data":
        conditions[keys[0]] = conditions[keys[0]] + change
    elif part == "prediction_points":
        points = points + change
    else:
        surface = replace(surface, **{keys[0]: getattr(surface, keys[0]) + change})
    return replace(
        sample,
        boundary_meshes=meshes,
        reference_lengths=lengths,
        global_data=conditions,
        force_surface=surface,
        prediction_points=points,
    )


def leaves(found: Any) -> dict[tuple[str, tuple[str, ...]], Tensor]:
    out = {("boundary_points", (kind,)): value for kind, value in found.boundary_points.items()}
    out |= {("face_data", (k, name)): value for k, data in found.face_data.items() for name, value in data.items()}
    out |= {("global_data", (name,)): value for name, value in found.global_data.items()}
    out |= {("reference_lengths", (name,)): value for name, value in found.reference_lengths.items()}
    out["prediction_points", ()] = found.prediction_points
    if found.area_vectors is not None:
        out |= {("force_surface", (name,)): getattr(found, name) for name in ("area_vectors", "areas")}
    return out


def weighted(fields: dict[str, Tensor]) -> Tensor:
    """A number that depends on all fields, not linearly."""
    return sum(
        (field.square() * torch.arange(1.0, field.numel() + 1).reshape(field.shape)).mean() for field in fields.values()
    )


def mean_pressure(fields: dict[str, Tensor]) -> Tensor:
    return fields["C_p"][3]


@pytest.mark.parametrize("of", ["Cd", "Cl_own", weighted, mean_pressure], ids=["Cd", "Cl_own", "fields", "one output"])
@pytest.mark.parametrize(
    "changes",
    [
        {"theta": 0.0},
        {"theta": 1.0, "leaf_size": 2},
        {"theta": 1.0, "expand_far_targets": True},
        {"theta": 1.0, "leaf_size": 2, "far_field_order": 1},
    ],
    ids=["exact", "tree", "expanded", "first order"],
)
@pytest.mark.parametrize("dims", [2, 3])
def test_every_input(dims: int, changes: dict[str, Any], of: Any) -> None:
    model, sample = make_model(dims, **changes), made_up(dims)
    plans = plans_of(model, sample)
    if model.theta:
        assert plans.communication.uses_source_nodes
    found = sensitivity(model, sample, of)
    assert found.value == pytest.approx(values(model, sample, plans, of), rel=1e-12)
    generator = torch.Generator().manual_seed(0)
    checked = set()
    for (part, keys), gradient in leaves(found).items():
        checked.add(part)
        # Any direction: a wrong entry shows in it.
        direction = torch.randn(gradient.shape, generator=generator, dtype=torch.float64)
        step = STEP / direction.abs().max()
        up, down = (values(model, moved(sample, part, keys, sign * step * direction), plans, of) for sign in (1, -1))
        difference = (up - down) / (2 * float(step))
        scale = float(gradient.norm() * direction.norm())
        assert float((gradient * direction).sum()) == pytest.approx(difference, abs=1e-7 * scale, rel=1e-5), (
            part,
            keys,
        )
        assert scale > 0, (part, keys)
    assert checked == set(INPUTS) - (set() if isinstance(of, str) else {"force_surface"})


def test_single_entries_are_right_too() -> None:
    model, sample = make_model(3, theta=1.0), made_up(3)
    plans = plans_of(model, sample)
    gradient = sensitivity(model, sample, "Cd").boundary_points["wall"]
    for row, axis in ((0, 0), (11, 1), (40, 2)):
        change = torch.zeros_like(gradient)
        change[row, axis] = STEP
        up, down = (
            values(model, moved(sample, "boundary_points", ("wall",), sign * change), plans, "Cd") for sign in (1, -1)
        )
        assert float(gradient[row, axis]) == pytest.approx((up - down) / (2 * STEP), rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("theta", [0.0, 1.0])
def test_chunks_are_those_of_prediction(theta: float, tiny_arguments: dict[str, Any]) -> None:
    """Points in several chunks: the number is what prediction gives, gradients those of the whole graph."""
    model, sample = make_model(2, theta=theta), made_up(2, n_points=50)

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network, self.hparams = model, {"prediction_chunk_size": 13}

    for of in ("Cd", weighted):
        found = sensitivity(Module(), sample, of)
        plans = plans_of(model, sample)
        points = sample.prediction_points.clone().requires_grad_()
        wall = map_mesh(sample.boundary_meshes["wall"], points=sample.boundary_meshes["wall"].points.clone())
        wall.points.requires_grad_()
        fields = flatten_data(
            model(
                points,
                {**sample.boundary_meshes, "wall": wall},
                sample.reference_lengths,
                sample.global_data,
                plans=plans,
            )
        )
        value = force_coefficients(sample.force_surface, fields).total[of] if isinstance(of, str) else of(fields)
        expected = torch.autograd.grad(value, [points, wall.points])
        assert found.value == pytest.approx(float(value.detach()), rel=1e-12)
        torch.testing.assert_close(found.prediction_points, expected[0], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(found.boundary_points["wall"], expected[1], rtol=1e-9, atol=1e-12)


def test_the_model_and_the_sample_stay_as_they_were() -> None:
    model, sample = make_model(2, use_gradient_checkpointing=False), made_up(2)
    before = sample.boundary_meshes["wall"].points.clone()
    sensitivity(model, sample, "Cd")
    assert not model.use_gradient_checkpointing
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    points = sample.boundary_meshes["wall"].points
    assert torch.equal(points, before) and not points.requires_grad


def test_only_what_is_asked_for() -> None:
    found = sensitivity(make_model(2), made_up(2), "Cd", wrt=["global_data"])
    assert set(found.global_data) == {"Re", "U_inf"}
    assert not found.boundary_points and not found.face_data and not found.reference_lengths
    assert found.prediction_points is None and found.area_vectors is None


def test_errors_say_what_is_wrong() -> None:
    model, sample = make_model(2), made_up(2)
    with pytest.raises(ValueError, match=r"has the coefficients \['Cd', 'Cd_own', 'Cl', 'Cl_own'\], found 'Cx'"):
        sensitivity(model, sample, "Cx")
    with pytest.raises(ValueError, match=r"wrt: expected some of .*found \['shape'\]"):
        sensitivity(model, sample, "Cd", wrt=["shape"])
    with pytest.raises(ValueError, match="no surface to integrate 'Cd' over"):
        sensitivity(model, replace(sample, force_surface=None), "Cd")
    with pytest.raises(ValueError, match="one number"):
        sensitivity(model, sample, lambda fields: fields["C_p"])
    with pytest.raises(ValueError, match="one number"):
        sensitivity(model, sample, lambda fields: 3.0)
    with pytest.raises(ValueError, match="does not hold the faces of its surface"):
        shape_sensitivity(model, replace(sample, force_surface=None), mean_pressure)


# Shapes


@dataclass
class Body:
    """A body, how it is sampled, and the sample as a function of where its points are."""

    points: Tensor
    faces: Tensor
    form: str  # where fields are asked: "corners", "vertex normals", "points", "centers"
    drawn: Tensor  # faces that act as sources

    def area_vectors(self, points: Tensor) -> Tensor:
        corners = points[self.faces]
        if points.shape[1] == 2:
            edge = corners[:, 1] - corners[:, 0]
            return torch.stack([edge[:, 1], -edge[:, 0]], dim=1)  # outward: the faces are wound inward
        first = torch.linalg.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
        return -first / 2

    def force_surface(self, points: Tensor) -> ForceSurface:
        vectors, dims, size = self.area_vectors(points), points.shape[1], self.faces.shape[1]
        rows, areas = self.faces, None
        if self.form == "vertex normals":
            units = vectors / vectors.norm(dim=1, keepdim=True)
            sums = torch.stack([units[(self.faces == i).any(dim=1)].sum(dim=0) for i in range(len(points))])
            at_points = sums / sums.norm(dim=1, keepdim=True)
            vectors = at_points[self.faces].mean(dim=1) * vectors.norm(dim=1, keepdim=True)
        elif self.form == "points":
            touching = torch.stack([(self.faces == i).any(dim=1) for i in range(len(points))]).to(vectors) / size
            areas, vectors = touching @ vectors.norm(dim=1), touching @ vectors
            rows = torch.arange(len(points)).unsqueeze(1)
        elif self.form == "centers":
            areas = vectors.norm(dim=1)
            rows = torch.arange(len(vectors)).unsqueeze(1)
        directions = {"Cd": torch.eye(dims)[0], "Cl": torch.eye(dims)[1]}
        vertex_normals = self.form == "vertex normals"
        return ForceSurface(rows, vectors, directions, {"": 0.7}, areas=areas, vertex_normals=vertex_normals)

    def sample(self, points: Tensor) -> Sample:
        dims = points.shape[1]
        generator = torch.Generator().manual_seed(3)
        asked = points[self.faces].mean(dim=1) if self.form == "centers" else points
        if self.form != "centers" and self.form != "points":  # points off the body too
            asked = torch.cat([asked, 2 + torch.rand(6, dims, generator=generator, dtype=torch.float64)])
        copies = points[self.faces[self.drawn]].reshape(-1, dims)  # each face with vertices of its own
        weights = torch.full((len(self.drawn),), len(self.faces) / len(self.drawn), dtype=torch.float64)
        wall = BoundaryMesh(
            copies,
            torch.arange(len(copies)).reshape(-1, dims),
            {
                "heat": torch.linspace(0, 1, len(self.drawn), dtype=torch.float64),
                "slip": copies[::dims].detach() * 0 + 1,
            },
            weights,
        )
        case = make_case(dims)
        meshes = {"wall": wall, "far": make_mesh(dims, 5, generator)}
        return sample_of(replace(case, prediction_points=asked, boundary_meshes=meshes), self.force_surface(points))


def make_body(dims: int, form: str) -> Body:
    if dims == 2:
        angle = torch.arange(14, dtype=torch.float64) * (2 * torch.pi / 14)
        points = torch.stack([angle.cos(), 0.4 * angle.sin() + 0.1 * angle.cos()], dim=1)
        faces = torch.stack([torch.arange(14), (torch.arange(14) + 1) % 14], dim=1)  # (-e_y, e_x) points inward
        return Body(points, faces, form, torch.arange(14))
    pv = pytest.importorskip("pyvista")
    ball = pv.Sphere(theta_resolution=5, phi_resolution=5)
    points = torch.tensor(ball.points, dtype=torch.float64) * torch.tensor([1.6, 0.9, 0.7]) + 0.02
    faces = torch.tensor(ball.regular_faces, dtype=torch.int64)[:, [0, 2, 1]]  # wound inward
    n = len(faces)
    return Body(points, faces, form, torch.arange(n) if form == "corners" else torch.arange(0, n, 2))


SHAPES = [(2, "corners"), (2, "vertex normals"), (3, "corners"), (3, "points"), (3, "centers")]


@pytest.mark.parametrize("theta", [0.0, 1.0])
@pytest.mark.parametrize(("dims", "form"), SHAPES)
def test_the_shape(dims: int, form: str, theta: float) -> None:
    """A displacement of the body moves everything that belongs to it."""
    body = make_body(dims, form)
    model, sample = make_model(dims, theta=theta), body.sample(body.points)
    surface = BodySurface.of_faces(body.points, body.faces) if form in ("points", "centers") else None
    found = shape_sensitivity(model, sample, "Cd", surface)
    plans = plans_of(model, sample)
    assert found.value == pytest.approx(values(model, sample, plans, "Cd"), rel=1e-12)
    generator = torch.Generator().manual_seed(1)
    rows = equal_rows(found.surface.points, body.points)
    for _ in range(3):
        direction = torch.randn(body.points.shape, generator=generator, dtype=torch.float64)
        up, down = (values(model, body.sample(body.points + sign * STEP * direction), plans, "Cd") for sign in (1, -1))
        expected = (up - down) / (2 * STEP)
        scale = float(found.gradient.norm() * direction.norm())
        assert float((found.gradient[rows] * direction).sum()) == pytest.approx(expected, abs=1e-7 * scale, rel=1e-5)


@pytest.mark.parametrize(("dims", "form"), SHAPES)
def test_a_displaced_sample_is_that_of_the_displaced_body(dims: int, form: str) -> None:
    body = make_body(dims, form)
    sample = body.sample(body.points)
    surface = BodySurface.of_faces(body.points, body.faces)
    displacement = 0.05 * torch.randn(
        body.points.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )
    found, expected = displaced(sample, displacement, surface), body.sample(body.points + displacement)
    torch.testing.assert_close(found.prediction_points, expected.prediction_points)
    for kind, mesh in expected.boundary_meshes.items():
        torch.testing.assert_close(found.boundary_meshes[kind].points, mesh.points)
    assert found.force_surface is not None and expected.force_surface is not None
    torch.testing.assert_close(found.force_surface.area_vectors, expected.force_surface.area_vectors)
    if expected.force_surface.areas is not None:
        torch.testing.assert_close(found.force_surface.areas, expected.force_surface.areas)
    assert torch.equal(sample.prediction_points, body.sample(body.points).prediction_points)


@pytest.mark.parametrize(("dims", "form"), SHAPES)
def test_normals_point_outward_and_areas_add_up(dims: int, form: str) -> None:
    body = make_body(dims, form)
    surface = BodySurface.of_faces(body.points, body.faces)
    parts = MovingParts.of(body.sample(body.points), surface)
    normals, areas = parts.normals_and_areas()
    assert bool(((normals * (body.points - body.points.mean(dim=0))).sum(dim=1) > 0).all())
    torch.testing.assert_close(areas.sum(), body.area_vectors(body.points).norm(dim=1).sum())
    torch.testing.assert_close(normals.norm(dim=1), torch.ones(len(normals), dtype=torch.float64))


def test_moving_all_of_it_changes_nothing() -> None:
    """Far field, body and points shifted together: the gradients of a translation cancel."""
    model, sample = make_model(3), made_up(3)
    found = sensitivity(model, sample, "Cd")
    parts = [found.prediction_points, *found.boundary_points.values()]
    total = torch.stack([part.sum(dim=0) for part in parts]).sum(dim=0)
    assert total.norm() < 1e-10 * parts[0].norm()


def test_polygons_of_any_size() -> None:
    """A cube of quads, one of them cut in two: area vectors, shares, and the other winding."""
    pv = pytest.importorskip("pyvista")
    cube = pv.Cube().clean()
    corners = torch.tensor(cube.faces.reshape(-1, 5)[:, 1:])
    first, rest = corners[0], corners[1:]
    connectivity = torch.cat([first[[0, 1, 2]], first[[0, 2, 3]], rest.reshape(-1)])
    offsets = torch.tensor([0, 3, 6, *(6 + 4 * (i + 1) for i in range(5))])
    points = torch.tensor(cube.points, dtype=torch.float64)
    surface = BodySurface(points, offsets, connectivity)
    vectors = surface.area_vectors(points)
    assert vectors.norm(dim=1).tolist() == pytest.approx([0.5, 0.5, 1, 1, 1, 1, 1])
    torch.testing.assert_close(vectors.sum(dim=0), torch.zeros(3, dtype=torch.float64))
    assert bool(((vectors * surface.centers(points)).sum(dim=1) > 0).all())
    shared = surface.shares(vectors.norm(dim=1, keepdim=True))
    assert float(shared.sum()) == pytest.approx(6) and shared.shape == (8, 1)


def test_a_surface_that_is_not_the_samples_is_refused() -> None:
    body = make_body(3, "points")
    sample = body.sample(body.points)
    with pytest.raises(ValueError, match="no boundary mesh has a vertex in common"):
        MovingParts.of(sample, BodySurface.of_faces(body.points + 1, body.faces))
    with pytest.raises(ValueError, match="area vectors differ by"):
        MovingParts.of(sample, BodySurface.of_faces(body.points, body.faces[::2]))
    wall = sample.boundary_meshes["wall"]
    drawn = {**sample.boundary_meshes, "wall": map_mesh(wall, face_positions=wall.centroids)}
    with pytest.raises(ValueError, match="'wall' stand at random positions"):
        MovingParts.of(replace(sample, boundary_meshes=drawn), BodySurface.of_faces(body.points, body.faces))


def test_equal_rows() -> None:
    points = torch.tensor([[0.0, 1.0], [2.0, 3.0], [0.0, 1.0]])
    others = torch.tensor([[2.0, 3.0], [-0.0, 1.0], [5.0, 5.0]])
    assert equal_rows(points, others).tolist() == [1, 0, -1]


@pytest.mark.parametrize("force_normals", ["vertex", "face"])
def test_airfoils_of_the_package(force_normals: str, tiny_arguments: dict[str, Any], tmp_path: Any) -> None:
    """Coefficients are those that prediction reports; a bump's finite difference agrees in float32's digits."""
    from datamodules import AirFRANSDataModule

    data = AirFRANSDataModule(
        root="samples", cache_dir=str(tmp_path), force_normals=force_normals, num_workers=0, n_validation=1
    )
    data.setup("predict")
    sample = data.datasets["predict"][0]
    torch.manual_seed(0)
    module = GlobeLightningModule(**tiny_arguments)
    fields = module.predict_fields(sample)
    for name in ("Cd", "Cl"):
        found = shape_sensitivity(module, sample, name)
        expected = float(force_coefficients(sample.force_surface, fields).total[name])
        assert found.value == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert bool(torch.isfinite(found.gradient).all()) and float(found.gradient.norm()) > 0
        assert len(found.surface.points) == len(sample.boundary_meshes["no_slip"].points)


# Smoothing


@pytest.mark.parametrize("dims", [2, 3])
def test_smoothing_keeps_the_integral_and_smooth_fields(dims: int) -> None:
    pv = pytest.importorskip("pyvista")
    if dims == 2:
        angle = torch.arange(200, dtype=torch.float64) * (2 * torch.pi / 200)
        points = torch.stack([angle.cos(), angle.sin()], dim=1)
        surface = BodySurface.of_faces(points, torch.stack([torch.arange(200), (torch.arange(200) + 1) % 200], dim=1))
    else:
        ball = pv.Icosphere(radius=1, nsub=4)
        points = torch.tensor(ball.points, dtype=torch.float64)
        surface = BodySurface.of_faces(points, torch.tensor(ball.regular_faces))
    areas = surface.shares(surface.area_vectors(points).norm(dim=1, keepdim=True)).squeeze(1)
    noise = torch.randn(len(points), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    smooth = surface.smoothed(noise, areas, 0.3)
    assert float(smooth @ areas) == pytest.approx(float(noise @ areas), abs=1e-6)
    assert smooth.std() < 0.4 * noise.std()
    # z is an eigenfunction of the Laplacian on the unit circle (eigenvalue 1) and sphere (2).
    z = points[:, -1]
    torch.testing.assert_close(surface.smoothed(z, areas, 0.5), z / (1 + 0.25 * (dims - 1)), rtol=0, atol=5e-3)
    assert surface.smoothed(noise, areas, 0) is noise


def test_triangles_of_polygons() -> None:
    surface = BodySurface(
        torch.zeros(7, 3), torch.tensor([0, 3, 7, 12]), torch.tensor([0, 1, 2, 3, 2, 1, 4, 0, 4, 5, 6, 3])
    )
    assert surface.triangles.tolist() == [[0, 1, 2], [3, 2, 1], [3, 1, 4], [0, 4, 5], [0, 5, 6], [0, 6, 3]]
