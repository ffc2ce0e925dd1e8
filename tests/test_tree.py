"""Trees: sorted by Morton code, halved by count, boxed."""

from __future__ import annotations

import math

import pytest
import torch

from globe_lightning.tree.cluster_tree import build_forest, tree_shape
from globe_lightning.tree.morton import morton_codes
from globe_lightning.tree.traversal import expand_rows, gap_squared


def interleave(cells: list[int], bits: int) -> int:
    """Bit b of dimension d at position b*D + d, bit by bit."""
    dims = len(cells)
    return sum(((cells[d] >> b) & 1) << (b * dims + d) for b in range(bits) for d in range(dims))


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_morton_codes_bit_by_bit(dims: int, dtype: torch.dtype) -> None:
    points = (5 * torch.randn(200, dims, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).to(dtype)
    bits = 63 // dims
    largest = 2**bits - 1
    low, high = points.amin(0), points.amax(0)
    # The product with 2^bits - 1 is rounded in the points' own precision, as the definition says.
    scaled = ((points - low) / (high - low)) * torch.tensor(largest, dtype=dtype)
    cells = [[min(largest, max(0, math.floor(x))) for x in row] for row in scaled.tolist()]
    assert morton_codes(points).tolist() == [interleave(row, bits) for row in cells]


@pytest.mark.parametrize("dims", [2, 3])
def test_morton_codes_of_corners_and_flat_sets(dims: int) -> None:
    corners = torch.cartesian_prod(*[torch.tensor([-1.0, 2.0])] * dims)
    codes = morton_codes(corners)
    assert codes.min() == 0
    assert codes.max() == 2 ** (63 // dims * dims) - 1
    assert codes.unique().numel() == 2**dims
    assert (morton_codes(torch.full((4, dims), 3.0)) == 0).all()
    flat = torch.zeros(5, dims)
    flat[:, 0] = torch.arange(5.0)
    assert morton_codes(flat).tolist() == sorted(morton_codes(flat).tolist())
    assert morton_codes(torch.zeros(0, dims)).shape == (0,)


@pytest.mark.parametrize("leaf_size", [1, 3, 4])
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 16, 33, 100])
def test_shape_is_the_recursive_halving(n: int, leaf_size: int) -> None:
    expected: set[tuple[int, int]] = set()
    leaves: set[tuple[int, int]] = set()

    def split(start: int, end: int) -> None:
        expected.add((start, end))
        if end - start <= leaf_size:
            leaves.add((start, end))
            return
        middle = start + (end - start) // 2
        split(start, middle)
        split(middle, end)

    split(0, n)
    shape = tree_shape(n, leaf_size)
    ranges = list(zip(shape.start.tolist(), shape.end.tolist(), strict=True))
    assert len(ranges) == len(set(ranges))
    assert set(ranges) == expected
    assert {ranges[i] for i in range(len(ranges)) if shape.first_child[i] < 0} == leaves
    for i, child in enumerate(shape.first_child.tolist()):
        if child >= 0:
            (start, middle), (again, end) = ranges[child], ranges[child + 1]
            assert (start, end) == ranges[i]
            assert middle == again


def test_shape_of_no_points_and_bad_leaf_size() -> None:
    assert tree_shape(0, 1).start.size == 0
    with pytest.raises(ValueError, match="leaf_size: expected at least 1, found 0"):
        tree_shape(5, 0)


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("leaf_size", [1, 3, 4])
def test_boxes_and_order_of_a_forest(dims: int, leaf_size: int) -> None:
    generator = torch.Generator().manual_seed(dims)
    sets = [torch.randn(n, dims, generator=generator, dtype=torch.float64) for n in (37, 1, 0, 16)]
    forest = build_forest(sets, leaf_size)
    everything = torch.cat(sets)
    assert forest.n_trees == 4
    assert forest.n_points == 54
    assert len(forest.roots) == 3
    assert torch.equal(forest.order.sort().values, torch.arange(54))
    assert torch.equal(forest.points, everything[forest.order])
    for tree in range(4):
        first, last = forest.point_offsets[tree : tree + 2]
        own = forest.order[first:last]
        assert ((own >= first) & (own < last)).all(), "a tree holds its own points"
        codes = morton_codes(sets[tree])[own - first]
        assert torch.equal(codes, codes.sort().values)
    for start, end, box in zip(forest.start.tolist(), forest.end.tolist(), forest.boxes.t(), strict=True):
        inside = forest.points[start:end]
        assert torch.equal(box[:dims], inside.amin(0))
        assert torch.equal(box[dims : 2 * dims], inside.amax(0))
        assert box[-2] == (inside.amax(0) - inside.amin(0)).square().sum()
        assert box[-1] == box[-2].sqrt()
    assert torch.equal(forest.to("cpu").boxes, forest.boxes)


def test_equal_codes_keep_their_order() -> None:
    points = torch.rand(10, 2, generator=torch.Generator().manual_seed(0)).repeat_interleave(3, dim=0)
    order = build_forest([points], 1).order
    for first in range(0, 30, 3):
        assert order[first : first + 3].tolist() == sorted(order[first : first + 3].tolist())


def test_gap_between_boxes() -> None:
    low, high = torch.tensor([[0.0], [0.0]]), torch.tensor([[1.0], [1.0]])

    def gap(a: list[float], b: list[float]) -> float:
        return float(gap_squared(low, high, torch.tensor([a]).t(), torch.tensor([b]).t()))

    assert gap([4.0, 5.0], [6.0, 6.0]) == 9 + 16
    assert gap([-3.0, 0.5], [-2.0, 0.6]) == 4
    assert gap([1.0, 0.0], [2.0, 1.0]) == 0
    assert gap([0.2, 0.2], [0.3, 0.3]) == 0


def test_expand_rows() -> None:
    rows, rank = expand_rows(torch.tensor([2, 0, 3]), 5)
    assert rows.tolist() == [0, 0, 2, 2, 2]
    assert rank.tolist() == [0, 1, 0, 1, 2]
