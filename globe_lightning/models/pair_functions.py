"""The functions of ``pairs`` as the evaluation of a plan calls them: as they are, or compiled, one graph each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from threading import Lock
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed

from globe_lightning.models.fused_network import FUSED_NETWORK
from globe_lightning.models.pair_network import TORCH_NETWORK, HiddenLayers, Weights
from globe_lightning.models.pairs import KernelShape, PairGradients, Values, contributions, gradients

LONG = 4096

NO_COMPILER = (
    "compile: torch.compile failed ({}). On a CPU it needs a C++ compiler and the headers of Python, which Debian and "
    "Ubuntu have in the packages g++ and python3-dev: install them, or set compile: false"
)


class PairFunctions(NamedTuple):
    """What is computed for a block of pairs of one kind of kernel.

    Attributes:
        sums: contributions alone.
        sums_and_values: contributions and what their gradient needs.
        gradients: from those values.
        recomputed_gradients: from the inputs.
    """

    sums: Callable[..., Tensor]
    sums_and_values: Callable[..., tuple[Tensor, Values]]
    gradients: Callable[..., PairGradients]
    recomputed_gradients: Callable[..., PairGradients]


@lru_cache(maxsize=256)
def pair_functions(shape: KernelShape, compiled: bool, fused: bool) -> PairFunctions:
    """The functions for kernels of a shape.

    Args:
        shape: of the kernels.
        compiled: by ``torch.compile``, as whole graphs for any number of pairs. Compiling takes some seconds at the
            first use of each function, and a C++ compiler on a CPU.
        fused: networks by ``fused_network``, else by torch's operations.
    """

    network = FUSED_NETWORK if fused else TORCH_NETWORK
    overwriting = partial(contributions, shape, keep=False, network=network)
    all_contributions = partial(contributions, shape, network=network)
    all_gradients = partial(gradients, shape, network=network)

    def sums(*inputs: Any) -> Tensor:
        return overwriting(*inputs)[0]

    def sums_and_values(*inputs: Any) -> tuple[Tensor, Values]:
        return all_contributions(*inputs)

    def of_values(*inputs: Any) -> PairGradients:
        return all_gradients(*inputs)

    def recomputed(*inputs: Any) -> PairGradients:
        *of_pairs, gradient, of_displacement, of_features = inputs
        displacement, features, _, _, inverse_length, _, weights = of_pairs
        _, values = all_contributions(*of_pairs)
        arguments = (displacement, features, inverse_length, weights, values, gradient)
        return all_gradients(*arguments, of_displacement, of_features, consume=True)

    if not compiled:
        return PairFunctions(sums, sums_and_values, of_values, recomputed)
    return PairFunctions(_Compiled(sums), _Compiled(sums_and_values), _Compiled(of_values), _Compiled(recomputed))


class _Compiled:
    """A function compiled as a whole graph for any number of pairs, by one thread at a time."""

    lock = Lock()

    def __init__(self, function: Callable[..., Any]) -> None:
        self.plain = function
        self.graphs: dict[Any, Callable[..., Any]] = {}

    def __call__(self, *inputs: Any) -> Any:
        n_pairs = inputs[0].shape[1]
        if n_pairs < 2:  # a size of one would be compiled for itself
            return self.plain(*inputs)
        inputs = tuple(_of_another_size(item, n_pairs) if _is_table_of_rows(item) else item for item in inputs)
        # The compiler treats long sums in another way than short ones.
        kinds = _kinds([torch.get_num_threads(), n_pairs > LONG, inputs])
        if kinds in self.graphs:
            return self.graphs[kinds](*inputs)
        with self.lock:
            if kinds not in self.graphs:
                _mark_sizes(inputs, n_pairs)
                graph = torch.compile(_copy(self.plain), fullgraph=True, options=_options(inputs[0].device))
                try:
                    out = graph(*inputs)
                except BackendCompilerFailed as error:
                    raise RuntimeError(NO_COMPILER.format(str(error).strip().split("\n")[0])) from error
                self.graphs[kinds] = graph
                return out
        return self.graphs[kinds](*inputs)


def _options(device: torch.device) -> dict[str, Any]:
    """Of the compiler. On a CPU threads share the work, and only a graph called from C++ lets go of Python's lock."""
    return {"cpp_wrapper": True} if device.type == "cpu" else {}


def _copy(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a code object of its own.

    The compiler lists its graphs by code object, and reorders the list at every call. A thread that looks for its graph
    while another reorders may miss it, and compiles it once more: each list must hold no more than one.
    """
    assert isinstance(function, FunctionType)
    code = function.__code__.replace()
    return FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)


def _is_table_of_rows(item: Any) -> bool:
    """Whether an input is the table of source terms (branches, sources, hidden)."""
    return isinstance(item, Tensor) and item.ndim == 3


def _of_another_size(table: Tensor, n_pairs: int) -> Tensor:
    """The table of source terms, longer by a row that no pair has while it has one row, or as many as there are pairs.

    The compiler would take a size of one for a constant, and two equal sizes for one.
    """
    while table.shape[1] in (1, n_pairs):
        table = torch.cat([table, table[:, :1]], dim=1)
    return table


def _mark_sizes(inputs: Sequence[Any], n_pairs: int) -> None:
    """Tell the compiler which dimensions number pairs or sources: those vary, all others are fixed."""
    rows: list[Tensor] = []
    columns: list[Tensor] = []
    for item in inputs:
        if isinstance(item, Values):
            rows += [*item.layers.before, *item.layers.after]
            others = [part for part in item if not isinstance(part, HiddenLayers)]
            columns += [tensor for part in others for tensor in (part if isinstance(part, list) else [part])]
        elif _is_table_of_rows(item):
            torch._dynamo.mark_dynamic(item, 1)
        elif isinstance(item, Tensor) and item.ndim:
            columns.append(item)
    for tensors, dim in ((rows, 1), (columns, -1)):
        for tensor in tensors:
            if tensor.shape[dim] == n_pairs:
                torch._dynamo.mark_dynamic(tensor, dim % tensor.ndim)


def _kinds(value: Any) -> Any:
    """What of some inputs a graph depends on."""
    if isinstance(value, Tensor):
        return value.dtype, value.device, value.is_inference()
    if isinstance(value, Weights):
        return tuple((_kinds(tensor), tensor.shape) for tensor in value.flat())
    return tuple(_kinds(item) for item in value) if isinstance(value, (list, tuple)) else value
