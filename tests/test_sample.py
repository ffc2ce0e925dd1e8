"""The contract between data and module: samples that move, schemas that compare."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
from helpers import make_case
from tensordict import TensorDict

from globe_lightning import ForceSurface, Sample, SampleSchema


def make_sample() -> Sample:
    case = make_case(2)
    n = case.prediction_points.shape[0]
    surface = ForceSurface(
        point_indices=torch.tensor([[0, 1], [1, 2]]),
        area_vectors=torch.rand(2, 2),
        directions={"Cd": torch.tensor([1.0, 0.0]), "Cl": torch.tensor([0.0, 1.0])},
    )
    targets = TensorDict({"C_p": torch.rand(n), "dU": torch.rand(n, 2)}, batch_size=[n])
    conditions = TensorDict(case.global_data, batch_size=[])
    return Sample(
        "case_a",
        3,
        case.prediction_points,
        targets,
        case.boundary_meshes,
        case.reference_lengths,
        conditions,
        surface,
        torch.arange(n),
        {"U_inf": 50.0},
    )


def test_a_sample_moves_in_place() -> None:
    sample = make_sample()
    meta = sample.to("meta")
    assert meta is sample
    tensors = [
        sample.prediction_points,
        sample.targets["dU"],
        sample.boundary_meshes["wall"].points,
        sample.boundary_meshes["wall"].cells,
        sample.reference_lengths["chord"],
        sample.global_data["Re"],
        sample.force_surface.area_vectors,
        sample.force_surface.directions["Cd"],
        sample.point_ids,
    ]
    assert all(tensor.device.type == "meta" for tensor in tensors)
    assert sample.scales == {"U_inf": 50.0}
    assert sample.case == "case_a"
    sample.case = "another"


def test_a_sample_travels_between_processes() -> None:
    sample = make_sample()
    copy = pickle.loads(pickle.dumps(sample))
    assert torch.equal(copy.boundary_meshes["wall"].areas, sample.boundary_meshes["wall"].areas)
    assert torch.equal(copy.targets["dU"], sample.targets["dU"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="page-locked memory belongs to an accelerator")
def test_pinned_memory() -> None:
    sample = make_sample()
    assert sample.pin_memory() is sample
    assert sample.prediction_points.is_pinned()
    assert sample.boundary_meshes["wall"].points.is_pinned()


def schema(**changes: object) -> SampleSchema:
    arguments = {
        "n_spatial_dims": 2,
        "output_field_ranks": {"C_p": 0, "vel": {"dU": 1}},
        "boundary_source_data_ranks": {"wall": {"heat": 0}, "far": {}},
        "reference_length_names": ["chord", "delta"],
        "global_data_ranks": {"U": 1},
    }
    return SampleSchema(**(arguments | changes))  # type: ignore[arg-type]


def test_schema_arguments_are_plain() -> None:
    arguments = schema(reference_length_names=("chord", "delta")).arguments()
    assert json.loads(json.dumps(arguments)) == arguments
    assert SampleSchema(**arguments).differences(schema()) == []
    assert arguments["reference_length_names"] == ["chord", "delta"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_spatial_dims": 3}, ["n_spatial_dims: the model has 2, the data 3"]),
        ({"output_field_ranks": {"C_p": 0}}, ["output_field_ranks", "'vel.dU'", "the data lack it"]),
        ({"output_field_ranks": {"C_p": 1, "vel": {"dU": 1}}}, ["output_field_ranks['C_p']", "rank 0", "the data 1"]),
        ({"global_data_ranks": {"U": 1, "Re": 0}}, ["global_data_ranks", "'Re'", "the model lacks it"]),
        ({"reference_length_names": ["delta", "chord"]}, ["reference_length_names", "the order counts"]),
        ({"boundary_source_data_ranks": {"wall": {}}}, ["boundary_source_data_ranks['wall']", "'heat'", "data lack"]),
        ({"boundary_source_data_ranks": {"roof": {}}}, ["the data have type 'roof'", "['far', 'wall']"]),
    ],
)
def test_differences_are_named(changes: dict[str, object], words: list[str]) -> None:
    lines = schema().differences(schema(**changes))
    assert len(lines) == 1
    assert all(word in lines[0] for word in words), lines


def test_the_model_may_declare_more_types_than_the_data_have() -> None:
    assert schema().differences(schema(boundary_source_data_ranks={"wall": {"heat": 0}})) == []
    assert schema().differences(schema(output_field_ranks={"vel": {"dU": 1}, "C_p": 0})) == []
