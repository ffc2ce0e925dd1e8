"""Sums over ranges of a sorted order, up the tree and down it."""

from __future__ import annotations

import math

import pytest
import torch

from globe_lightning.tree.cluster_tree import build_forest
from globe_lightning.tree.prefix_sums import push_down, range_means, range_sums


def random_ranges(n: int, n_ranges: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    ends = torch.randint(0, n + 1, (2, n_ranges), generator=generator).sort(dim=0).values
    return ends[0], ends[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_means_and_push_down_by_brute_force(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(50, 3, generator=generator, dtype=torch.float64).to(dtype)
    weights = torch.rand(50, generator=generator, dtype=torch.float64).to(dtype)
    start, end = random_ranges(50, 40, generator)
    wide = dtype == torch.float64
    sums, means = range_sums(values, start, end), range_means(values, weights, start, end)
    assert sums.dtype == torch.float64
    assert means.dtype == dtype
    handed = torch.zeros(50, 3, dtype=torch.float64)
    for i, (low, high) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        inside, w = values[low:high].double(), weights[low:high].double().unsqueeze(1)
        torch.testing.assert_close(sums[i], inside.sum(0), rtol=0, atol=1e-12)
        expected = (inside * w).sum(0) / w.sum() if high > low else torch.zeros(3, dtype=torch.float64)
        torch.testing.assert_close(means[i].double(), expected, rtol=0, atol=1e-12 if wide else 1e-6)
        handed[low:high] += means[i].double()
    torch.testing.assert_close(push_down(means, start, end, 50), handed, rtol=0, atol=1e-12)


def test_push_down_is_the_transpose_of_range_sums() -> None:
    generator = torch.Generator().manual_seed(1)
    start, end = random_ranges(20, 15, generator)
    x = torch.randn(20, 2, generator=generator, dtype=torch.float64)
    y = torch.randn(15, 2, generator=generator, dtype=torch.float64)
    left, right = (range_sums(x, start, end) * y).sum(), (x * push_down(y, start, end, 20)).sum()
    torch.testing.assert_close(left, right, rtol=1e-12, atol=0)


def test_weights_that_sum_to_zero_give_zero() -> None:
    values = torch.ones(3, 2)
    means = range_means(values, torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0, 0, 2]), torch.tensor([2, 3, 2]))
    assert means.tolist() == [[0, 0], [1, 1], [0, 0]]


def test_gradients() -> None:
    generator = torch.Generator().manual_seed(2)
    start, end = random_ranges(8, 6, generator)
    values = torch.randn(8, 2, generator=generator, dtype=torch.float64, requires_grad=True)
    weights = (torch.rand(8, generator=generator, dtype=torch.float64) + 0.1).requires_grad_()
    assert torch.autograd.gradcheck(lambda v, w: range_means(v, w, start, end), (values, weights))
    assert torch.autograd.gradcheck(lambda v: push_down(v[:6], start, end, 8), (values,))


@pytest.mark.parametrize("leaf_size", [1, 4])
def test_node_centroids_of_a_million_points_far_from_the_origin(leaf_size: int) -> None:
    """5 m from the origin a leaf's centroid is right to 1e-6 m; float32 sums would be wrong by per cents."""
    n = 1_000_000
    generator = torch.Generator().manual_seed(3)
    points = torch.rand(n, 3, generator=generator) + 5
    areas = torch.rand(n, generator=generator) * 1e-5
    forest = build_forest([points], leaf_size)
    weights = areas[forest.order]
    means = range_means(forest.points, weights, forest.start, forest.end)
    assert means.dtype == torch.float32
    leaves = (forest.first_child < 0).nonzero().squeeze(1)
    picked = torch.cat(
        [
            torch.arange(40),
            torch.randint(forest.n_nodes, (300,), generator=generator),
            leaves[torch.randint(leaves.numel(), (1000,), generator=generator)],
        ]
    )
    for node in picked.tolist():
        low, high = int(forest.start[node]), int(forest.end[node])
        w, x = weights[low:high].double(), forest.points[low:high].double()
        if high - low <= 64:
            total = math.fsum(w.tolist())
            exact = [math.fsum((w * x[:, d]).tolist()) / total for d in range(3)]
        else:
            exact = ((w.unsqueeze(1) * x).sum(0) / w.sum()).tolist()
        assert max(abs(a - b) for a, b in zip(means[node].tolist(), exact, strict=True)) < 1e-6
