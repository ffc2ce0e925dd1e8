"""The networks of a batch of pairs, fused in C++ for a CPU: hidden layers of some pairs never leave the inner caches.

Counterpart of ``pair_network``, for float32 and hidden layers of multiples of 16. The source, ``fused_network.cpp``, is
compiled for the processor at hand at its first use.
"""

from __future__ import annotations

import ctypes
import logging
from functools import lru_cache
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from globe_lightning.models.pair_network import (
    TORCH_NETWORK,
    HiddenLayers,
    NetworkFunctions,
    NetworkGradients,
    Weights,
)
from globe_lightning.native_code import NoNativeCode, load_library

SOURCE = Path(__file__).with_name("fused_network.cpp")
MULTIPLE = 16
"""Of hidden layers' widths; outputs are padded to it."""
PAIRS_PER_THREAD = 512
"""A thread for fewer would cost more than it saves."""
TOLERANCE = 1e-4
"""Of the comparison with torch's operations."""

logger = logging.getLogger(__name__)


SIZES = ("branches", "pairs", "sources", "columns", "outputs", "layers", "threads")
ADDRESSES = ("widths", "x", "terms", "rows", "matrices", "biases", "last", "last_bias", "before")


class _Network(ctypes.Structure):
    """``Network`` of the source."""

    _fields_ = (*((name, ctypes.c_int64) for name in SIZES), *((name, ctypes.c_void_p) for name in ADDRESSES))


def serves(device: torch.device, weights: Weights) -> bool:
    """Whether networks of such weights can be evaluated here: on a CPU, in float32, of such widths, with a compiler."""
    widths = [weights.first.shape[2], *(matrix.shape[2] for matrix in weights.matrices)]
    fits = all(width % MULTIPLE == 0 for width in widths) and weights.first.dtype == torch.float32
    return device.type == "cpu" and fits and why_not() is None


@lru_cache
def why_not() -> str | None:
    """Why the fused networks cannot be used on this machine; None if they can. Tried once a process.

    They are compared with torch's operations first: a processor or a compiler that nobody has tried yet may say so.
    """
    try:
        library()
    except NoNativeCode as error:
        reason = str(error)
    else:
        difference = _difference()
        if difference <= TOLERANCE:
            return None
        reason = f"they differ from torch's operations by {difference:.1e} of their values"
    logger.warning(
        "Fused networks are not available, so kernels run on torch's operations, half as fast on a CPU: %s. Install a "
        "C++ compiler (g++), or set compile: false to do without.",
        reason,
    )
    return reason


@lru_cache
def library() -> ctypes.CDLL:
    """The compiled source.

    Raises:
        NoNativeCode: it cannot be compiled or loaded.
    """
    return load_library(SOURCE)


def network_outputs(
    columns: Float[Tensor, "branches columns pairs"],
    hidden: Float[Tensor, "branches sources hidden"],
    rows: Int[Tensor, " pairs"] | None,
    weights: Weights,
    keep: bool,
) -> tuple[Float[Tensor, "branches raw pairs"], HiddenLayers]:
    """As :func:`pair_network.network_outputs`; hidden layers are kept side by side, before their activation."""
    outputs = torch.ops.globe_lightning.network_outputs if torch.compiler.is_compiling() else _outputs
    raw, before = outputs(columns, hidden, rows, weights.flat(), keep)
    return raw, HiddenLayers([before] if keep else [], [])


def network_gradients(
    columns: Float[Tensor, "branches columns pairs"],
    weights: Weights,
    layers: HiddenLayers,
    of_raw: Float[Tensor, "branches raw pairs"],
    consume: bool,
) -> NetworkGradients:
    """As :func:`pair_network.network_gradients`; nothing is consumed before the end."""
    gradients = torch.ops.globe_lightning.network_gradients if torch.compiler.is_compiling() else _gradients
    of_columns, of_hidden, packed = gradients(columns, weights.flat(), layers.before[0], of_raw)
    if consume:
        layers.before.clear()
    b, bottom = weights.first.shape[0], weights.first.shape[2]
    raw, top = weights.last.shape[1:]
    parts = [columns.shape[1] * bottom]
    for matrix in weights.matrices:
        parts += [matrix.shape[1] * matrix.shape[2], matrix.shape[2]]
    first, *others, last, last_bias = packed.split([*parts, raw * top, _padded(raw)], dim=1)
    shapes = [matrix.shape for matrix in weights.matrices]
    of_weights = Weights(
        first.view(b, -1, bottom),
        [part.view(shape) for part, shape in zip(others[::2], shapes, strict=True)],
        [part.unsqueeze(1) for part in others[1::2]],
        last.view(b, raw, top),
        last_bias[:, :raw].unsqueeze(2),
    )
    return NetworkGradients(of_columns, of_hidden, of_weights)


FUSED_NETWORK = NetworkFunctions(network_outputs, network_gradients)


def _outputs(
    columns: Tensor, hidden: Tensor, rows: Tensor | None, weights: list[Tensor], keep: bool
) -> tuple[Tensor, Tensor]:
    """Raw outputs (branches, raw, pairs), and the hidden layers (branches, pairs, sum of widths), empty if not kept."""
    w = Weights.of([tensor.contiguous() for tensor in weights])
    columns, hidden = columns.contiguous(), hidden.contiguous()
    rows = None if rows is None else rows.long().contiguous()
    raw, before = _empty_outputs(columns, w, keep)
    network = _describe(columns, hidden, rows, w, before if keep else None)
    library().network_outputs(ctypes.byref(network), _pointer(raw))
    return raw, before


def _gradients(columns: Tensor, weights: list[Tensor], before: Tensor, of_raw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of columns, of a hidden row for every pair, and of all weights, one after another."""
    w = Weights.of([tensor.contiguous() for tensor in weights])
    columns, before, of_raw = columns.contiguous(), before.contiguous(), of_raw.contiguous()
    found = _empty_gradients(columns, w)
    network = _describe(columns, None, None, w, before)
    library().network_gradients(ctypes.byref(network), *map(_pointer, (of_raw, *found)))
    return found


def _empty_outputs(columns: Tensor, weights: Weights, keep: bool) -> tuple[Tensor, Tensor]:
    """Where :func:`_outputs` writes; its shapes are all that a compiler needs to know."""
    b, n_pairs = columns.shape[0], columns.shape[2]
    widths = weights.first.shape[2] + sum(matrix.shape[2] for matrix in weights.matrices)
    raw = columns.new_empty(b, weights.last.shape[1], n_pairs)
    return raw, columns.new_empty(b, n_pairs, widths) if keep else columns.new_empty(0)


def _empty_gradients(columns: Tensor, weights: Weights) -> tuple[Tensor, Tensor, Tensor]:
    """Where :func:`_gradients` writes the first two and adds up the third."""
    b, n_pairs = columns.shape[0], columns.shape[2]
    hidden = [weights.first, *weights.matrices, *weights.biases]
    size = sum(w.shape[1] * w.shape[2] for w in [*hidden, weights.last]) + _padded(weights.last.shape[1])
    of_hidden = columns.new_empty(b, n_pairs, weights.first.shape[2])
    return columns.new_empty(columns.shape), of_hidden, columns.new_zeros(b, size)


def _padded(n: int) -> int:
    return -(-n // MULTIPLE) * MULTIPLE


def _describe(
    columns: Tensor, hidden: Tensor | None, rows: Tensor | None, weights: Weights, before: Tensor | None
) -> _Network:
    """The arguments of the source's functions. The tensors must be contiguous and outlive it."""
    matrices = [weights.first, *weights.matrices]
    b, n_columns, n_pairs = columns.shape
    n_sources = 0 if hidden is None else hidden.shape[1]
    n_threads = max(1, min(torch.get_num_threads(), n_pairs // PAIRS_PER_THREAD))
    sizes = (b, n_pairs, n_sources, n_columns, weights.last.shape[1], len(matrices), n_threads)
    widths = (ctypes.c_int64 * len(matrices))(*(matrix.shape[2] for matrix in matrices))
    lists = [(ctypes.c_void_p * len(tensors))(*map(_address, tensors)) for tensors in (matrices, weights.biases)]
    network = _Network(
        *sizes,
        ctypes.addressof(widths),
        _address(columns),
        _address(hidden),
        _address(rows),
        *map(ctypes.addressof, lists),
        _address(weights.last),
        _address(weights.last_bias),
        _address(before),
    )
    network.keep_alive = (widths, lists)
    return network


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


# As operations that a compiler takes for what they are, and calls.
_outputs_operation = torch.library.custom_op(
    "globe_lightning::network_outputs",
    _outputs,
    mutates_args=(),
    schema="(Tensor columns, Tensor hidden, Tensor? rows, Tensor[] weights, bool keep) -> (Tensor, Tensor)",
)
_gradients_operation = torch.library.custom_op(
    "globe_lightning::network_gradients",
    _gradients,
    mutates_args=(),
    schema="(Tensor columns, Tensor[] weights, Tensor before, Tensor of_raw) -> (Tensor, Tensor, Tensor)",
)


@_outputs_operation.register_fake
def _(columns: Tensor, hidden: Tensor, rows: Tensor | None, weights: list[Tensor], keep: bool) -> tuple[Tensor, Tensor]:
    return _empty_outputs(columns, Weights.of(weights), keep)


@_gradients_operation.register_fake
def _(columns: Tensor, weights: list[Tensor], before: Tensor, of_raw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_gradients(columns, Weights.of(weights))


def _difference() -> float:
    """How far results and gradients on some pairs lie from those of torch's operations, relative to the largest."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    n_pairs, width = 101, 2 * MULTIPLE
    weights = Weights(
        draw(2, 7, width), [draw(2, width, width) / 6], [draw(2, 1, width)], draw(2, 11, width), draw(2, 11, 1)
    )
    columns, hidden, of_raw = draw(2, 7, n_pairs), draw(2, 13, width), draw(2, 11, n_pairs)
    rows = torch.randint(13, (n_pairs,), generator=generator)
    found = []
    with torch.no_grad():
        for network in (FUSED_NETWORK, TORCH_NETWORK):
            raw, layers = network.outputs(columns, hidden, rows, weights, True)
            gradients = network.gradients(columns, weights, layers, of_raw, True)
            found.append([raw, gradients.columns, gradients.hidden, *gradients.weights.flat()])
    errors = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(*found, strict=True)]
    return max(errors) if all(error == error for error in errors) else float("inf")
