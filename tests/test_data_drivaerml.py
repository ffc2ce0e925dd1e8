"""DrivAerML cases: conventions found, forces, what a sample holds, how faces and points are drawn."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import pyvista as pv
import torch
from drivaerml_synthetic import CENTRE, GRADIENT, Q_INF, exact_forces, semi_axes, write_case, write_dataset

from datamodules import DrivAerMLDataModule
from datamodules.dataset import Draws
from datamodules.drivaerml import SAMPLES
from datamodules.drivaerml_source import DrivAerMLSource, floor
from globe_lightning import GLOBE
from globe_lightning.fields import flatten_ranks
from globe_lightning.forces import force_coefficients
from globe_lightning.validation import NumberChecks

SHIPPED = json.loads((SAMPLES / "split.json").read_text())


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ellipsoids")
    write_dataset(folder, n_train=3, n_test=1)
    return folder


@pytest.fixture(scope="module")
def derived(root):
    return DrivAerMLSource(root).derive("run_1")


def module_of(root, **options):
    options = {"split": str(root / "split.json"), "num_workers": 0, **options}
    return DrivAerMLDataModule(root=str(root), **options)


def sample_of(arrays, split="train", epoch=0, seed=0, **options):
    return DrivAerMLSource("", **options).sample("run_1", 0, arrays, Draws(seed, split, epoch, "run_1"))


def forces_of(folder, run=1, targets="cells", **options):
    write_case(folder, run, **options)
    source = DrivAerMLSource(folder, targets=targets)
    sample = source.sample(f"run_{run}", 0, source.derive(f"run_{run}"), Draws(0, "test", 0, ""))
    return {name: float(v) for name, v in force_coefficients(sample.force_surface, sample.targets).total.items()}


# Forces and conventions.


def check_car(source, case):
    arrays = source.derive(case)
    facts = source.facts(arrays)
    assert facts["winding"] == "inward" and facts["shear_sign"] == -1, "as in the released data"
    assert facts["inverted_edges"] == 0
    sample = source.sample(case, 0, arrays, Draws(0, "test", 0, case))
    forces = force_coefficients(sample.force_surface, sample.targets)
    solver = sample.force_surface.solver_coefficients
    for name in ("Cd", "Cd_own"):
        assert float(forces.total[name]) == pytest.approx(solver[name], rel=1e-3)
        assert float(forces.friction[name]) > 0.05 * solver[name]
    for name in ("Cl", "Cl_own", "Clf", "Clr_own", "Cs"):
        # The fields are means over a shorter time than the force files' lift.
        assert float(forces.total[name]) == pytest.approx(solver[name], abs=2e-3)


@pytest.mark.parametrize("run", SHIPPED["train"] + SHIPPED["test"])
def test_shipped_cars_integrate_to_the_solvers_forces(run):
    check_car(DrivAerMLSource(SAMPLES, targets="cells"), f"run_{run}")


def test_shipped_set_is_six_to_eight_cars_of_at_most_eight_megabytes():
    files = [path for path in SAMPLES.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 8e6
    assert {path.suffix for path in files} == {".vtp", ".csv", ".json"}
    assert 6 <= len(list(SAMPLES.glob("run_*"))) <= 8
    module = DrivAerMLDataModule(root="samples")
    splits = module.splits()
    assert sorted(splits["train"] + splits["val"] + splits["test"]) == sorted(p.name for p in SAMPLES.glob("run_*"))
    assert splits["val"]


@pytest.mark.parametrize("targets", ["cells", "vertices"])
@pytest.mark.parametrize("caps", ["fans", "polygons"])
def test_forces_converge_at_second_order(tmp_path, targets, caps):
    errors = []
    for n in (16, 32, 64):
        forces = forces_of(tmp_path / str(n), targets=targets, caps=caps, n_along=n, n_around=n)
        exact = exact_forces(1, 2.71, 2.17)
        errors.append([abs(forces[name] - exact[name]) for name in ("Cd", "Cl", "Clr")])
        assert abs(forces["Cs"]) < 1e-6
    ratios = np.array(errors[:-1]) / np.array(errors[1:])
    assert (ratios > 3.4).all() and (ratios < 4.6).all(), ratios
    assert (np.array(errors[-1]) < 2e-3).all()


def equal_samples(a, b):
    torch.testing.assert_close(a.prediction_points, b.prediction_points, rtol=0, atol=0)
    for name in sorted(a.targets.keys()):
        torch.testing.assert_close(a.targets[name], b.targets[name], rtol=0, atol=0, equal_nan=True)
    for kind, mesh in a.boundary_meshes.items():
        torch.testing.assert_close(mesh.corners, b.boundary_meshes[kind].corners, rtol=0, atol=0)
        torch.testing.assert_close(mesh.positions, b.boundary_meshes[kind].positions, rtol=0, atol=0)
        torch.testing.assert_close(mesh.areas, b.boundary_meshes[kind].areas, rtol=0, atol=0)


@pytest.mark.parametrize("caps", ["fans", "polygons"])
@pytest.mark.parametrize(("winding", "shear_sign"), [("outward", -1), ("inward", 1), ("outward", 1)])
def test_reversed_faces_and_shear_give_the_same_samples_and_forces(tmp_path, winding, shear_sign, caps):
    write_case(tmp_path / "released", 1, caps=caps)
    write_case(tmp_path / "other", 1, caps=caps, winding=winding, shear_sign=shear_sign)
    modules = [DrivAerMLDataModule(root=str(tmp_path / name)) for name in ("released", "other")]
    released, other = (module.make_source() for module in modules)
    a, b = released.derive("run_1"), other.derive("run_1")
    facts = other.facts(b)
    assert (facts["winding"], facts["shear_sign"]) == (winding, shear_sign)
    for name in a.keys() - {"facts"}:
        np.testing.assert_array_equal(a[name], b[name])
    for split in ("train", "test"):
        for targets in ("cells", "vertices"):
            options = {"targets": targets, "n_boundary_faces": 300, "n_train_points": 200}
            one, two = sample_of(a, split, **options), sample_of(b, split, **options)
            equal_samples(one, two)
            if split == "test":
                found = [force_coefficients(s.force_surface, s.targets).total for s in (one, two)]
                assert found[0] == found[1]
    # As the file has it, the winding does differ; and fields go back into the file's sign.
    file = [sample_of(arrays, orientation="file").boundary_meshes["vehicle"].normals for arrays in (a, b)]
    torch.testing.assert_close(file[0], -file[1] if winding == "outward" else file[1])
    sample = sample_of(b, "test", targets="cells")
    written = modules[1].dimensional(sample, dict(sample.targets.items()))
    mesh = modules[1].case_mesh("run_1")
    assert set(written) == {"CpMeanTrim", "pMeanTrim", "wallShearStressMeanTrim"}
    for name, values in written.items():
        np.testing.assert_allclose(values, mesh.cell_data[name], rtol=1e-5, atol=1e-5)


def test_shipped_car_reversed_gives_the_same_forces(tmp_path):
    case = f"run_{SHIPPED['test'][0]}"
    shutil.copytree(SAMPLES / case, tmp_path / case)
    source = DrivAerMLSource(tmp_path, targets="cells")
    path = source.file(case, "boundary.vtp")
    before = source.derive(case)
    mesh = pv.read(path)
    flipped = pv.PolyData(mesh.points, np.concatenate([[len(f), *f[::-1]] for f in mesh.irregular_faces]))
    for name in mesh.cell_data:
        flipped.cell_data[name] = mesh.cell_data[name]
    flipped.cell_data["wallShearStressMeanTrim"] *= -1
    flipped.save(path)
    after = source.derive(case)
    assert source.facts(after)["winding"] == "outward" and source.facts(after)["shear_sign"] == 1
    for name in before.keys() - {"facts"}:
        np.testing.assert_array_equal(before[name], after[name])


def test_csv_headers_may_differ_in_case_and_carry_blanks(tmp_path):
    write_case(tmp_path / "plain", 1)
    write_case(tmp_path / "blanks", 1, blanks=True)
    plain, blanks = (DrivAerMLSource(tmp_path / name) for name in ("plain", "blanks"))
    assert plain.facts(plain.derive("run_1")) == blanks.facts(blanks.derive("run_1"))


def test_without_the_constant_areas_file_its_coefficients_follow_from_the_own(tmp_path):
    write_case(tmp_path, 1, constant=False)
    source = DrivAerMLSource(tmp_path)
    assert len(source.files("run_1")) == 3
    solver = source.facts(source.derive("run_1"))["solver"]
    for name, value in exact_forces(1, 2.71, 2.17).items():
        assert solver[name] == pytest.approx(value)


# Samples.


def test_fields_at_cells_and_vertices(derived):
    cells, vertices = (sample_of(derived, "test", targets=targets) for targets in ("cells", "vertices"))
    assert vertices.prediction_points.shape == (24 * 23 + 2, 3) and cells.prediction_points.shape == (24 * 24, 3)
    for sample, tolerance in ((cells, 1e-6), (vertices, 2e-2)):
        offsets = sample.prediction_points.double().numpy() - CENTRE
        np.testing.assert_allclose(sample.targets["C_p"], 0.1 + offsets @ GRADIENT, atol=tolerance)
        assert (sample.targets["C_f"][:, 0] <= 0).all(), "opposite to the force on the body"
        assert sample.point_ids is None
    assert derived["cell"].shape == (24 * 24, 4)


def test_reference_lengths_scales_and_schema(root, derived):
    module = module_of(root)
    sample = sample_of(derived)
    assert float(sample.reference_lengths["L_ref"]) == pytest.approx(2.71)
    reynolds = 38.889 * 2.71 / 1.5e-5
    assert float(sample.reference_lengths["delta_turb"]) == pytest.approx(0.37 * 2.71 / reynolds**0.2)
    assert sample.scales["q_inf"] == pytest.approx(Q_INF)
    schema = module.schema
    assert list(sample.reference_lengths) == schema.reference_length_names
    assert set(sample.boundary_meshes) == set(schema.boundary_source_data_ranks)
    ranks = flatten_ranks(schema.output_field_ranks)
    assert {name: value.ndim - 1 for name, value in sample.targets.items()} == ranks
    checks = NumberChecks()
    for kind, mesh in sample.boundary_meshes.items():
        checks.finite(mesh.points, kind)
    checks.judge()


def test_floors_lie_under_the_car_with_normals_up(derived):
    sample = sample_of(derived, "val")
    ground = CENTRE[2] - semi_axes(1)[2]
    for kind, area in (("no_slip_floor", 12.339 * 22), ("slip_floor", 7.661 * 22)):
        mesh = sample.boundary_meshes[kind]
        assert mesh.n_faces == 19 * 19 * 2 and mesh.points.shape == (400, 3)
        torch.testing.assert_close(mesh.normals, torch.tensor([0.0, 0, 1]).expand(mesh.n_faces, 3))
        assert float(mesh.areas.sum()) == pytest.approx(area, rel=1e-5)
        # The ring of faces of 24 has points at the body's very bottom.
        np.testing.assert_allclose(mesh.points[:, 2], ground, atol=1e-6)
    x = torch.cat([sample.boundary_meshes[kind].points[:, 0] for kind in ("slip_floor", "no_slip_floor")])
    assert (float(x.min()), float(x.max())) == (-10, 10)
    assert floor((0, 1), (0, 1), 0.0, 3).n_faces == 18


@pytest.mark.parametrize("orientation", ["outward", "inward", "file"])
def test_normals_of_the_vehicle(derived, orientation):
    mesh = sample_of(derived, orientation=orientation, n_boundary_faces=300).boundary_meshes["vehicle"]
    outward = ((mesh.centroids - torch.tensor(CENTRE)) * mesh.normals).sum(dim=1) > 0
    assert outward.all() if orientation == "outward" else not outward.any(), "the file's are inward"


def test_drawn_faces_stand_for_the_whole_surface(derived):
    whole = sample_of(derived, n_boundary_faces=None).boundary_meshes["vehicle"]
    n = whole.n_faces
    assert n == 2 * 24 * 22 + 2 * 24 and whole.measure_weights is None
    corners = {tuple(row) for row in whole.corners.reshape(n, 9).tolist()}
    area = float(whole.areas.double().sum())
    assert area == pytest.approx(DrivAerMLSource.facts(derived)["area"], rel=1e-6)
    for epoch in range(3):
        mesh = sample_of(derived, epoch=epoch, n_boundary_faces=n // 8).boundary_meshes["vehicle"]
        assert mesh.n_faces == n // 8 and len(mesh.measure_weights.unique()) == 1
        drawn = {tuple(row) for row in mesh.corners.reshape(-1, 9).tolist()}
        assert len(drawn) == n // 8 and drawn <= corners, "without repetition"
        assert float(mesh.areas.double().sum()) == pytest.approx(area, rel=1e-6)


def test_positions_are_random_in_training_only(derived):
    options = {"n_boundary_faces": 400}
    train = [sample_of(derived, epoch=epoch, **options).boundary_meshes for epoch in (0, 0, 1)]
    for kind in train[0]:
        mesh = train[0][kind]
        torch.testing.assert_close(mesh.positions, train[1][kind].positions, rtol=0, atol=0)
        assert not torch.equal(mesh.positions, train[2][kind].positions)
        # Inside: the three triangles to the corners fill the face.
        corners = mesh.corners.double()
        parts = [
            torch.linalg.cross(corners[:, i] - mesh.positions, corners[:, i - 1] - mesh.positions).norm(dim=1) / 2
            for i in range(3)
        ]
        own = torch.linalg.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]).norm(dim=1) / 2
        torch.testing.assert_close(sum(parts), own, rtol=1e-3, atol=1e-6)
    assert sample_of(derived, "val", **options).boundary_meshes["vehicle"].face_positions is None
    fixed = sample_of(derived, random_face_positions=False, **options).boundary_meshes["vehicle"]
    assert fixed.face_positions is None


def test_subsampled_boundaries_leave_layer_outputs_unbiased(derived):
    """Summed over drawn faces, a layer's output estimates its sum over all faces, for n, n/2 and n/8 of them."""
    torch.manual_seed(0)
    model = GLOBE(
        n_spatial_dims=3,
        output_field_ranks={"C_p": 0, "C_f": 1},
        boundary_source_data_ranks={"vehicle": {}},
        reference_length_names=["L_ref"],
        reference_area=2.17,
        n_communication_hyperlayers=0,
        hidden_layer_sizes=(8,),
        n_spherical_harmonics=2,
        theta=0.0,
    ).double()
    points = torch.tensor(CENTRE) + torch.tensor([[-3.0, 0, 0], [0, 1.5, 0.2], [3.0, 0.3, 0.5], [0, 0, 1.2]]).double()
    length = {"L_ref": torch.tensor(2.71).double()}

    @torch.no_grad()
    def output(mesh):
        fields = model(points, {"vehicle": mesh.to(dtype=torch.float64)}, length)
        return torch.cat([fields["C_p"].unsqueeze(1), fields["C_f"]], dim=1).flatten()

    def vehicle(epoch, n):
        return sample_of(derived, epoch=epoch, n_boundary_faces=n, random_face_positions=False).boundary_meshes[
            "vehicle"
        ]

    whole = vehicle(0, None)
    exact = output(whole)
    for share, n_draws in ((2, 25), (8, 60)):
        found = torch.stack([output(vehicle(epoch, whole.n_faces // share)) for epoch in range(n_draws)])
        standard_error = found.std(dim=0) / n_draws**0.5
        # Sixteen means, each within four of its standard errors; the ratio of sums adds a bias of order 1/n.
        assert ((found.mean(dim=0) - exact).abs() < 4 * standard_error + 0.01 * exact.abs()).all()
        assert (found.mean(dim=0).norm() / exact.norm() - 1).abs() < 0.05, "nothing shrinks with n/N"


def test_what_each_split_holds(derived):
    options = {"n_train_points": 100, "n_validation_points": 150, "n_boundary_faces": 200}
    for targets, n in (("vertices", 24 * 23 + 2), ("cells", 24 * 24)):
        points = {}
        for split, expected in (("train", 100), ("val", 150), ("test", n), ("predict", n)):
            sample = sample_of(derived, split, targets=targets, **options)
            points[split] = sample.prediction_points
            assert len(sample.prediction_points) == expected == sample.targets.batch_size[0]
            assert sample.boundary_meshes["vehicle"].n_faces == 200
            assert (sample.force_surface is None) == (sample.point_ids is not None) == (split in ("train", "val"))
            if sample.point_ids is not None:
                assert len(sample.point_ids.unique()) == expected
        for split in ("train", "val"):
            rows = sample_of(derived, split, targets=targets, **options).point_ids
            torch.testing.assert_close(points[split], points["test"][rows])
        whole = sample_of(derived, "val", targets=targets, n_validation_points=None)
        assert whole.force_surface is not None
        torch.testing.assert_close(
            sample_of(derived, "val", epoch=5, targets=targets, **options).prediction_points, points["val"]
        )
        assert not torch.equal(
            sample_of(derived, "train", epoch=5, targets=targets, **options).prediction_points, points["train"]
        )


def test_unused_points_are_unknown_and_carry_no_force(tmp_path):
    expected = forces_of(tmp_path, targets="vertices")
    source = DrivAerMLSource(tmp_path, targets="vertices")
    path = source.file("run_1", "boundary.vtp")
    mesh = pv.read(path)
    mesh.points = np.concatenate([mesh.points, [[1.0, 0, 0.5]]]).astype(np.float32)
    mesh.save(path)
    sample = source.sample("run_1", 0, source.derive("run_1"), Draws(0, "test", 0, ""))
    assert torch.isnan(sample.targets["C_p"][-1]) and not torch.isnan(sample.targets["C_p"][:-1]).any()
    found = force_coefficients(sample.force_surface, sample.targets).total
    assert {name: float(value) for name, value in found.items()} == pytest.approx(expected)


# Splits.


def test_the_customary_split(tmp_path, monkeypatch):
    module = DrivAerMLDataModule(root=str(tmp_path))
    with pytest.raises(
        FileNotFoundError, match=r"drivaerml_436_48\.json: names 484 of 484 runs .*pass a split of your"
    ):
        module.case_lists()
    for run in range(1, 501):
        (tmp_path / f"run_{run}").mkdir()
    lists = module.case_lists()
    assert (len(lists["train"]), len(lists["test"])) == (436, 48)
    missing = {167, 211, 218, 221, 248, 282, 291, 295, 316, 325, 329, 364, 370, 376, 403, 473}
    assert {int(case[4:]) for case in lists["train"] + lists["test"]} == set(range(1, 501)) - missing
    splits = module.splits()
    assert splits["test"] == lists["test"] and len(splits["val"]) == 22 and len(splits["train"]) == 414
    assert not set(splits["train"]) & set(splits["val"])
    monkeypatch.setenv("DRIVAER_DATA_DIR", str(tmp_path))
    assert DrivAerMLDataModule(split="436_48").case_lists() == lists


def test_own_splits(root, tmp_path):
    csv = tmp_path / "mine.csv"
    csv.write_text("Run, Split\n1,train\nrun_2,train\n3,val\n4,test\n")
    module = module_of(root, split=str(csv))
    assert module.splits() == {"train": ["run_1", "run_2"], "val": ["run_3"], "test": ["run_4"]}
    json_file = tmp_path / "mine.json"
    json_file.write_text('{"train": [1, 2, 3], "test": ["run_4"]}')
    assert module_of(root, split=str(json_file), n_validation=1).splits()["test"] == ["run_4"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", '{"train": [1, 2], "test": [2]}', "run_2 stands twice, in the lists 'train' and 'test'"),
        ("a.json", '{"train": [1, 1], "test": [2]}', "run_1 stands twice, in list 'train'"),
        ("a.json", '{"train": [1]}', r"under 'train', 'test' .*found \['train'\]"),
        ("a.json", '{"train": [1], "test": []}', "expected runs under 'test'"),
        ("a.json", '{"train": [1], "test": ["car"]}', "expected run numbers under 'test', found 'car'"),
        ("a.json", "[1, 2]", "found list"),
        ("a.json", "{", r"a\.json: not readable as \.json"),
        ("a.csv", "number,split\n1,train\n", "column 'run' is missing"),
    ],
)
def test_faulty_splits_are_refused(root, tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        module_of(root, split=str(path)).case_lists()


def test_unknown_split_and_root(root, tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="expected one of '436_48' or a JSON or CSV file, found 'mine'"):
        module_of(root, split="mine").case_lists()
    monkeypatch.delenv("DRIVAER_DATA_DIR", raising=False)
    with pytest.raises(ValueError, match=r"DRIVAER_DATA_DIR.*samples"):
        DrivAerMLDataModule().case_lists()
    with pytest.raises(FileNotFoundError, match="named by root"):
        DrivAerMLDataModule(root=str(tmp_path / "gone")).prepare_data()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": "faces"}, "targets: expected one of 'vertices', 'cells', found 'faces'"),
        ({"orientation": "up"}, "orientation"),
        ({"n_train_points": 0}, "n_train_points"),
        ({"n_validation_points": 0}, "n_validation_points"),
        ({"n_boundary_faces": -1}, "n_boundary_faces"),
        ({"n_floor_cells": 0}, "n_floor_cells"),
    ],
)
def test_arguments_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        DrivAerMLDataModule(**options)


def test_loaders_and_cache_place(root, tmp_path):
    module = module_of(root, n_train_points=50, n_boundary_faces=60, n_validation=1, cache_dir=str(tmp_path))
    module.prepare(progress=False)
    module.setup()
    assert [len(list(module._dataloader_factory(split))) for split in ("train", "val", "test", "predict")] == [
        2,
        1,
        1,
        1,
    ]
    samples = DrivAerMLDataModule(root="samples")
    assert SAMPLES not in samples.make_cache(samples.make_source()).folder.parents
    assert samples.field_association == "point"
    assert DrivAerMLDataModule(targets="cells").field_association == "cell"
