"""Compiled pair functions: the same numbers, one graph each, for any number of pairs, under the same names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import Case, fields_of, gradients_of, make_case, make_model, relative_error
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

from globe_lightning import GLOBE
from globe_lightning.models.pair_functions import pair_functions

# One boundary type without data and no communication: one kernel shape, so that little is compiled.
SMALL: dict[str, Any] = {
    "boundary_source_data_ranks": {"far": {}},
    "n_communication_hyperlayers": 0,
    "hidden_layer_sizes": (8,),
}


@pytest.fixture
def counted() -> Iterator[Any]:
    """Counters of a compiler that has forgotten everything."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    pair_functions.cache_clear()
    yield torch._dynamo.utils.counters
    torch._dynamo.reset()
    pair_functions.cache_clear()


def models(dims: int, **options: Any) -> tuple[GLOBE, GLOBE]:
    """The same weights, plain and compiled."""
    return make_model(dims, **options), make_model(dims, **options, compile=True)


def small_case(dims: int, n_faces: int, n_points: int) -> Case:
    case = make_case(dims, 3, n_faces, n_points)
    del case.boundary_meshes["wall"]
    return case


def assert_same(plain: GLOBE, compiled: GLOBE, case: Case) -> None:
    assert relative_error(fields_of(compiled, case), fields_of(plain, case)) < 1e-12
    expected = gradients_of(plain, case)
    for name, gradient in gradients_of(compiled, case).items():
        # Gradients that cancel to nothing have rounding of their own.
        scale = float(expected[name].abs().max()) + 1e-6
        torch.testing.assert_close(gradient, expected[name], rtol=1e-8, atol=1e-9 * scale, msg=name)
    with torch.no_grad():
        assert relative_error(fields_of(compiled, case), fields_of(plain, case)) < 1e-12


def test_the_same_results_from_whole_graphs(counted: Any) -> None:
    plain, compiled = models(2, **SMALL)
    assert set(compiled.state_dict()) == set(plain.state_dict())
    assert_same(plain, compiled, small_case(2, 23, 31))
    assert not counted["graph_break"]
    graphs = counted["stats"]["unique_graphs"]
    assert graphs == 2  # contributions, and their gradients
    for n_faces, n_points in ((17, 5), (1, 2), (2, 61)):
        assert_same(plain, compiled, small_case(2, n_faces, n_points))
    # Pairs of a list are pairs like those of a grid, and proxy points are targets: the same graphs serve them.
    for order, n_faces, n_points in ((1, 60, 40), (0, 33, 50)):
        assert_same(*models(2, **SMALL, theta=1.5, far_field_order=order), small_case(2, n_faces, n_points))
    assert counted["stats"]["unique_graphs"] == graphs
    assert not counted["graph_break"]


@pytest.mark.slow
@pytest.mark.parametrize(("n_faces", "n_points", "theta"), [(1, 12, 0.0), (200, 3, 0.0), (1, 5, 1.5)])
def test_sizes_that_a_compiler_might_take_for_constants(
    counted: Any, n_faces: int, n_points: int, theta: float
) -> None:
    """One source, or as many sources as pairs, when it is compiled: the same graphs serve other sizes."""
    plain, compiled = models(2, **SMALL, theta=theta, chunk_bytes=1)  # 256 pairs: one target with 200 sources
    assert_same(plain, compiled, small_case(2, n_faces, n_points))
    assert_same(plain, compiled, small_case(2, 9, 14))
    assert counted["stats"]["unique_graphs"] == 2
    assert not counted["graph_break"]


def test_a_gradient_of_a_gradient_is_not_compiled(counted: Any) -> None:
    found = []
    for model in models(2, **SMALL):
        case = small_case(2, 7, 9)
        case.prediction_points = case.prediction_points.clone().requires_grad_()
        pressure = fields_of(model, case)["C_p"]
        (slope,) = torch.autograd.grad(pressure.sum(), case.prediction_points, create_graph=True)
        (second,) = torch.autograd.grad(slope.square().sum(), case.prediction_points)
        found.append(second)
    torch.testing.assert_close(found[0], found[1], rtol=1e-8, atol=1e-10)


def test_no_two_graphs_share_a_list_that_threads_search(counted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call reorders the compiler's list of graphs of a code: a thread may miss the one that another moves."""
    given, real = [], torch.compile

    def compile_quickly(function: Any, **options: Any) -> Any:
        given.append(function)
        return real(function, **options, backend="eager")

    monkeypatch.setattr(torch, "compile", compile_quickly)
    _, compiled = models(2, hidden_layer_sizes=(8,), n_communication_hyperlayers=0)
    case = make_case(2, 12, 9, 20)
    gradients_of(compiled, case)
    with torch.inference_mode():
        fields_of(compiled, case)
    entries = [len(_debug_get_cache_entry_list(function.__code__)) for function in given]
    assert entries == [1] * 6  # sums, their gradients, and sums without a record of views, of two boundary types


@pytest.mark.slow
@pytest.mark.parametrize(("dims", "theta", "checkpointing"), [(2, 0.0, False)])
def test_the_whole_network(dims: int, theta: float, checkpointing: bool, counted: Any) -> None:
    plain, compiled = models(dims, theta=theta, use_gradient_checkpointing=checkpointing)
    assert_same(plain, compiled, make_case(dims))
    assert not counted["graph_break"]


def test_a_missing_compiler_is_named(counted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", (None, "no-such-compiler"))
    monkeypatch.setattr(torch._inductor.config, "force_disable_caches", True)
    _, compiled = models(2, **SMALL)
    with pytest.raises(RuntimeError, match=r"compile: torch.compile failed.*python3-dev.*set compile: false"):
        fields_of(compiled, small_case(2, 23, 31))
