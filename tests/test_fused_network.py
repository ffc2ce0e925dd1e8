"""Networks fused in C++: the numbers of torch's operations, pair by pair, on every kind of processor."""

from __future__ import annotations

import ctypes
import logging
import platform
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import fields_of, gradients_of, make_case, make_model, relative_error
from torch import Tensor

from globe_lightning import native_code
from globe_lightning.models import fused_network
from globe_lightning.models.fused_network import FUSED_NETWORK
from globe_lightning.models.pair_network import TORCH_NETWORK, NetworkFunctions, Weights

LAYERS = {"hidden_layer_sizes": [32, 16, 48]}


@pytest.fixture
def forgotten() -> Iterator[None]:
    """Whether there are fused networks is asked anew, before and after."""
    for remembered in (fused_network.why_not, fused_network.library):
        remembered.cache_clear()
    yield
    for remembered in (fused_network.why_not, fused_network.library):
        remembered.cache_clear()


def draw_network(
    n_branches: int, n_columns: int, widths: list[int], n_outputs: int, n_sources: int, n_pairs: int, listed: bool
) -> tuple[Weights, Tensor, Tensor, Tensor | None, Tensor]:
    """Weights, columns, source terms, rows and a gradient of the outputs."""
    torch.manual_seed(len(widths) + n_pairs)
    weights = Weights(
        torch.randn(n_branches, n_columns, widths[0]) / n_columns**0.5,
        [torch.randn(n_branches, a, b) / a**0.5 for a, b in pairwise(widths)],
        [torch.randn(n_branches, 1, b) for b in widths[1:]],
        torch.randn(n_branches, n_outputs, widths[-1]) / widths[-1] ** 0.5,
        torch.randn(n_branches, n_outputs, 1),
    )
    rows = torch.randint(n_sources, (n_pairs,)) if listed else None
    columns, hidden = torch.randn(n_branches, n_columns, n_pairs), torch.randn(n_branches, n_sources, widths[0])
    return weights, columns, hidden, rows, torch.randn(n_branches, n_outputs, n_pairs)


def evaluate(
    network: NetworkFunctions,
    weights: Weights,
    columns: Tensor,
    hidden: Tensor,
    rows: Tensor | None,
    gradient: Tensor,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Outputs, and all gradients."""
    weights = Weights.of([tensor.to(dtype) for tensor in weights.flat()])
    columns, hidden, gradient = columns.to(dtype), hidden.to(dtype), gradient.to(dtype)
    with torch.no_grad():
        raw, layers = network.outputs(columns, hidden, rows, weights, True)
        quietly, _ = network.outputs(columns, hidden, rows, weights, False)
        assert network is TORCH_NETWORK or torch.equal(raw.nan_to_num(1e9), quietly.nan_to_num(1e9))
        found = network.gradients(columns, weights, layers, gradient, False)
    return [raw, found.columns, found.hidden, *found.weights.flat()]


SHAPES = [
    # branches, columns, widths, outputs, sources, pairs, listed
    (1, 5, [16], 1, 3, 1, True),
    (2, 21, [64, 64, 64], 44, 30, 1000, True),
    (2, 3, [32, 16, 48], 17, 7, 7 * 31, False),
    (1, 7, [128, 128], 20, 1, 49, False),
    (3, 16, [80], 16, 5, 47, True),
]


@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_numbers_are_those_of_torch_s_operations(
    shape: Any, n_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_network, "PAIRS_PER_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: n_threads)
    given = draw_network(*shape)
    exact = evaluate(TORCH_NETWORK, *given, dtype=torch.float64)
    for found, expected in zip(evaluate(FUSED_NETWORK, *given), exact, strict=True):
        assert found.shape == expected.shape
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=2e-6 * float(expected.abs().max()))


def test_a_pair_s_value_is_its_own() -> None:
    """Whatever stands beside it: equal to the bit."""
    weights, columns, hidden, rows, _ = draw_network(2, 9, [64, 32], 21, 40, 300, True)
    assert rows is not None
    with torch.no_grad():
        together, _ = FUSED_NETWORK.outputs(columns, hidden, rows, weights, False)
        for some in (torch.tensor([131]), torch.randperm(300)[:101]):
            alone, _ = FUSED_NETWORK.outputs(columns[:, :, some], hidden, rows[some], weights, False)
            assert torch.equal(alone, together[:, :, some])
            short, _ = FUSED_NETWORK.outputs(columns[:, :, some], hidden, rows[some].int(), weights, False)
            assert torch.equal(short, alone)


def test_large_values_saturate_and_what_is_no_number_stays_none() -> None:
    weights, columns, hidden, rows, gradient = draw_network(1, 4, [32], 8, 5, 60, True)
    columns *= 10.0 ** torch.linspace(-30, 4, 60)
    exact = evaluate(TORCH_NETWORK, weights, columns, hidden, rows, gradient, dtype=torch.float64)
    found = evaluate(FUSED_NETWORK, weights, columns, hidden, rows, gradient)
    for ours, theirs in zip(found[:3], exact[:3], strict=True):
        error = (ours.double() - theirs).abs() / (1 + theirs.abs())
        assert error.max() < 1e-5
    columns[0, 2, 17] = float("nan")
    raw = evaluate(FUSED_NETWORK, weights, columns, hidden, rows, gradient)[0]
    nan = torch.zeros(60, dtype=torch.bool)
    nan[17] = True
    assert torch.equal(raw.isnan().all(dim=1)[0], nan) and torch.equal(raw.isnan().any(dim=1)[0], nan)


@pytest.mark.parametrize(
    ("flag", "needed"), [("-march=x86-64", "sse2"), ("-march=x86-64-v3", "avx2"), ("-march=x86-64-v4", "avx512f")]
)
def test_other_processors(flag: str, needed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors of 4, 8 and 16: the same numbers."""
    if platform.machine() != "x86_64" or needed not in Path("/proc/cpuinfo").read_text():
        pytest.skip(f"a processor without {needed}")
    library = tmp_path / "library.so"
    flags = [*native_code.FLAGS, *native_code.LIBRARY_FLAGS, flag]
    subprocess.run([*native_code.find_compiler(), *flags, str(fused_network.SOURCE), "-o", str(library)], check=True)
    compiled = ctypes.CDLL(str(library))
    monkeypatch.setattr(fused_network, "library", lambda: compiled)
    assert fused_network._difference() < 5e-6


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize(("dims", "theta", "order"), [(2, 0.0, 0), (3, 1.5, 0), (3, 1.5, 1)])
def test_a_model_gives_the_same_fields_and_gradients(
    dims: int, theta: float, order: int, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {
        **LAYERS, "theta": theta, "far_field_order": order, "use_gradient_checkpointing": checkpointing,
        "chunk_bytes": 1 << 20,
    }  # fmt: skip
    plain = make_model(dims, torch.float32, **options, compile=False)
    fused = make_model(dims, torch.float32, **options)
    case = make_case(dims, 60, 40, 90, dtype=torch.float32)
    calls = count_calls(monkeypatch)
    fields, gradients = fields_of(fused, case), gradients_of(fused, case)
    assert len(calls) > 3
    seen = len(calls)
    expected, expected_gradients = fields_of(plain, case), gradients_of(plain, case)
    assert len(calls) == seen
    assert relative_error(fields, expected) < 1e-5
    for name, gradient in gradients.items():
        scale = float(expected_gradients[name].abs().max()) + 1e-6
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-3, atol=1e-4 * scale, msg=name)


@pytest.mark.parametrize("checkpointing", [True, False])
def test_gradients_can_be_asked_for_twice_and_be_differentiated(checkpointing: bool) -> None:
    model = make_model(2, torch.float32, **LAYERS, use_gradient_checkpointing=checkpointing)
    case = make_case(2, 9, 8, 12, dtype=torch.float32)
    points = case.prediction_points = case.prediction_points.clone().requires_grad_()
    pressure = fields_of(model, case)["C_p"].sum()
    (once,) = torch.autograd.grad(pressure, points, retain_graph=True)
    (twice,) = torch.autograd.grad(pressure, points, retain_graph=True)
    assert torch.equal(once, twice)
    (recorded,) = torch.autograd.grad(pressure, points, create_graph=True)
    torch.testing.assert_close(recorded, once, rtol=1e-3, atol=1e-4 * float(once.abs().max()))
    (second,) = torch.autograd.grad(recorded.square().sum(), points)
    assert second.abs().max() > 0


def test_what_it_does_not_serve_runs_on_torch_s_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_calls(monkeypatch)
    for dtype, options in (
        (torch.float64, LAYERS),
        (torch.float32, {"hidden_layer_sizes": [8, 16]}),
        (torch.float32, {**LAYERS, "compile": False}),
    ):
        gradients_of(make_model(2, dtype, **options), make_case(2, 9, 8, 12, dtype=dtype))
    with torch.autocast("cpu", torch.bfloat16):
        gradients_of(make_model(2, torch.float32, **LAYERS), make_case(2, 9, 8, 12, dtype=torch.float32))
    assert not calls


def test_without_a_compiler_a_warning_says_so_and_results_are_torch_s(
    forgotten: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    case = make_case(2, 9, 8, 12, dtype=torch.float32)
    with caplog.at_level(logging.WARNING):
        found = [fields_of(make_model(2, torch.float32, **LAYERS), case) for _ in range(2)]
    (message,) = [record.getMessage() for record in caplog.records if "Fused networks" in record.getMessage()]
    assert "no-such-compiler ($CXX) is not there" in message and "g++" in message and "compile: false" in message
    plain = fields_of(make_model(2, torch.float32, **LAYERS, compile=False), case)
    assert all(torch.equal(fields[name], plain[name]) for fields in found for name in plain)


def test_a_library_that_computes_something_else_is_not_used(
    forgotten: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = fused_network.SOURCE.read_text()
    wrong = tmp_path / "fused_network.cpp"
    wrong.write_text(source.replace("5.550328642129898e-2f", "0.1f"))
    assert wrong.read_text() != source
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(fused_network, "SOURCE", wrong)
    with caplog.at_level(logging.WARNING):
        assert "differ from torch's operations" in str(fused_network.why_not())
    assert "differ from torch's operations" in caplog.text


@pytest.mark.slow
def test_one_compiled_graph_around_the_fused_network() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    options = {**LAYERS, "n_communication_hyperlayers": 0, "boundary_source_data_ranks": {"far": {}}}
    plain, compiled = (make_model(2, torch.float32, **options, compile=way) for way in (False, True))
    case = make_case(2, 3, 23, 31, dtype=torch.float32)
    del case.boundary_meshes["wall"]
    expected, gradients = fields_of(plain, case), gradients_of(plain, case)
    assert relative_error(fields_of(compiled, case), expected) < 1e-5
    for name, gradient in gradients_of(compiled, case).items():
        scale = float(gradients[name].abs().max()) + 1e-6
        torch.testing.assert_close(gradient, gradients[name], rtol=1e-3, atol=1e-4 * scale, msg=name)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert not torch._dynamo.utils.counters["graph_break"]


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pairs of every call of the fused networks."""
    calls: list[int] = []
    for name in ("_outputs", "_gradients"):
        real = getattr(fused_network, name)

        def counted(columns: Tensor, *arguments: Any, real: Any = real) -> Any:
            calls.append(columns.shape[2])
            return real(columns, *arguments)

        monkeypatch.setattr(fused_network, name, counted)
    return calls
