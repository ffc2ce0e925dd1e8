"""Declared fields: flattening, order, packing."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from globe_lightning.fields import FieldLayout, flatten_data, flatten_ranks, nested_keys

NESTED = {"vel": {"dU": 1, "deep": {"a": 0}}, "C_p": 0, "B": 1}


def test_ranks_flatten_and_sort() -> None:
    expected = {"B": 1, "C_p": 0, "vel.dU": 1, "vel.deep.a": 0}
    assert flatten_ranks(NESTED) == expected
    assert list(flatten_ranks(NESTED)) == sorted(expected)
    assert flatten_ranks(TensorDict({"vel": {"dU": 1, "deep": {"a": 0}}, "C_p": 0, "B": 1})) == expected
    assert flatten_ranks(None) == {}
    assert nested_keys(NESTED)["vel.deep.a"] == ("vel", "deep", "a")
    assert list(nested_keys(NESTED)) == list(expected)


@pytest.mark.parametrize("rank", [2, -1, True, "0", 0.5, None])
def test_other_ranks_are_refused(rank: object) -> None:
    with pytest.raises(ValueError, match=r"outputs\['vel.x'\]: a rank is 0 \(scalar\) or 1 \(vector\)"):
        flatten_ranks({"vel": {"x": rank}}, "outputs")


def test_colliding_names_and_non_mappings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"two fields flatten to the name 'a\.b'"):
        flatten_ranks({"a": {"b": 0}, "a.b": 1})
    with pytest.raises(ValueError, match="expected a mapping of names to ranks, found list"):
        flatten_ranks(["C_p"], "outputs")  # type: ignore[arg-type]


@pytest.mark.parametrize("dims", [2, 3])
def test_pack_and_unpack_are_inverse(dims: int) -> None:
    layout = FieldLayout(NESTED, dims)
    assert layout.n_columns == 2 * dims + 2
    assert layout.scalars == ["C_p", "vel.deep.a"]
    assert layout.vectors == ["B", "vel.dU"]
    packed = torch.randn(5, layout.n_columns)
    fields = layout.unpack(packed)
    assert fields.batch_size == torch.Size([5])
    assert fields["vel", "dU"].shape == (5, dims)
    assert fields["vel", "deep", "a"].shape == (5,)
    torch.testing.assert_close(layout.pack(fields, 5, torch.float32), packed)
    torch.testing.assert_close(layout.pack(fields.to_dict(), 5, torch.float64), packed.double())
    columns = torch.cat([torch.arange(s.start, s.stop) for s in layout.columns.values()])
    assert torch.equal(columns, torch.arange(layout.n_columns))


def test_a_layout_of_nothing() -> None:
    layout = FieldLayout(None, 2)
    assert layout.n_columns == 0
    assert layout.pack({}, 4, torch.float32).shape == (4, 0)


def test_flatten_data_takes_dicts_and_tensordicts() -> None:
    x = torch.zeros(3)
    for data in ({"a": {"b": x}, "c": x}, TensorDict({"a": {"b": x}, "c": x}, batch_size=[3])):
        assert set(flatten_data(data)) == {"a.b", "c"}
    assert flatten_data(None) == {}
