"""A plan evaluated: pairs in chunks bounded in bytes, added into one packed buffer, handed down to the points."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from globe_lightning.memory import keep_freed_memory, pairs_per_chunk
from globe_lightning.models import fused_network
from globe_lightning.models.multiscale import SourceTable
from globe_lightning.models.pair_functions import PairFunctions, pair_functions
from globe_lightning.models.pair_network import Weights
from globe_lightning.models.pairs import KernelShape, Values
from globe_lightning.models.targets import Targets
from globe_lightning.tree.plan import DenseBlock, IndexedBlock, InteractionPlan
from globe_lightning.tree.prefix_sums import push_down
from globe_lightning.tree.proxies import Proxies

# More chunks in flight than this would gain little and cost a set of buffers each.
MAX_WORKERS = 8

Block = IndexedBlock | DenseBlock
Share = TypeVar("Share")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Job:
    """A block of pairs and the table its sources stand in."""

    table: int
    block: Block


def evaluate_plan(
    plan: InteractionPlan,
    targets: Targets,
    tables: Sequence[SourceTable],
    n_columns: int,
    smoothing_radius: Float[Tensor, ""],
    use_checkpointing: bool,
    chunk_bytes: int | None = None,
    compile: bool | Literal["network"] = False,
) -> Float[Tensor, "points columns"]:
    """Sum a layer's kernels over a plan.

    On a CPU the chunks are shared among threads, each with a buffer of its own: the sum depends on the number of
    threads (``torch.set_num_threads``) in its rounding only, and on nothing else.

    Args:
        plan: of targets and the trees of all boundary types.
        targets: where they stand.
        tables: for each source tree its sources.
        n_columns: packed output columns.
        smoothing_radius: eps of all magnitudes, in the precision of the geometry.
        use_checkpointing: recompute each chunk in the backward pass instead of keeping its temporaries.
        chunk_bytes: what the temporaries of all chunks in flight may take; the device's default if None.
        compile: what is computed for a chunk, by torch (True), or on a CPU its networks alone, in C++ ("network").

    Returns:
        The summed contributions at the target points (points, columns), in the precision of the geometry.
    """
    like = targets.points
    inputs = [
        [positions, table.positions, table.features, table.hidden, table.inverse_length, *table.weights.flat()]
        for positions, table in zip(targets.tables, tables, strict=True)
    ]
    flat = [tensor for tensors in inputs for tensor in tensors]
    compiled = compile is True
    fused = [bool(compile) and fused_network.serves(like.device, table.weights) for table in tables]
    graph = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in flat)
    n_workers = 1
    if like.device.type == "cpu":
        keep_freed_memory()
        n_workers = min(torch.get_num_threads(), MAX_WORKERS)

    def cut(with_gradient: bool) -> list[list[Job]]:
        """All pairs in chunks, as many of each table for every thread."""
        shares: list[list[Job]] = [[] for _ in range(n_workers)]
        for index, (pairs, table) in enumerate(zip(plan.pairs, tables, strict=True)):
            needed = bytes_per_pair(table, like.dtype.itemsize, with_gradient, fused[index]) * n_workers
            blocks: list[Block] = list(pairs.blocks(pairs_per_chunk(like.device, needed, chunk_bytes), n_workers))
            for i, share in enumerate(shares):
                own = slice(len(blocks) * i // n_workers, len(blocks) * (i + 1) // n_workers)
                share += [Job(index, block) for block in blocks[own]]
        return [share for share in shares if share]

    keep = graph and not use_checkpointing
    forward = cut(with_gradient=keep)
    work = PlanWork(
        forward,
        cut(with_gradient=True) if graph and not keep else forward,
        [table.shape for table in tables],
        [pair_functions(table.shape, compiled, by_cpp) for table, by_cpp in zip(tables, fused, strict=True)],
        [len(tensors) for tensors in inputs],
        n_columns,
        plan.n_rows,
        smoothing_radius.square(),
        compiled,
        keep,
    )
    return _hand_down(plan, targets, _PlanSum.apply(work, *flat).t())


@dataclass(frozen=True)
class PlanWork:
    """Everything that the evaluation of a plan needs beside tensors that may have a gradient.

    Attributes:
        forward, backward: the blocks of all tables for each pass, shared among threads. A forward pass that keeps
            nothing has larger ones.
        shapes, functions: of each table's kernels.
        n_tensors: how many tensors belong to each table.
        n_columns, n_rows: of the buffer.
        smoothing: eps^2.
        compiled: whether the functions are.
        keep: whether the forward pass keeps its temporaries for the backward pass.
    """

    forward: list[list[Job]]
    backward: list[list[Job]]
    shapes: list[KernelShape]
    functions: list[PairFunctions]
    n_tensors: list[int]
    n_columns: int
    n_rows: int
    smoothing: Tensor
    compiled: bool
    keep: bool

    def tables(self, tensors: Sequence[Any]) -> list[Sequence[Any]]:
        """One part of a flat list for each table."""
        out, first = [], 0
        for n in self.n_tensors:
            out.append(tensors[first : first + n])
            first += n
        return out

    def plain(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The tensors without their history, on which a compiled function would depend."""
        return [tensor.detach() for tensor in tensors] if self.compiled else tensors


class _PlanSum(torch.autograd.Function):
    """The buffer (columns, rows) that a plan's pairs add up to, with a gradient computed chunk by chunk.

    Differentiable twice: a backward pass that is itself recorded starts from the inputs.
    """

    @staticmethod
    def forward(ctx: Any, work: PlanWork, *tensors: Tensor) -> Tensor:
        ctx.work = work
        ctx.save_for_backward(*tensors)
        tables = work.tables(work.plain(tensors))
        like = tensors[0]

        def run(jobs: Sequence[Job]) -> tuple[Tensor, list[Any]]:
            buffer = torch.zeros(work.n_columns, work.n_rows, dtype=like.dtype, device=like.device)
            kept = []
            for job in jobs:
                kept.append(_add_block(work, job, tables[job.table], buffer))
            return buffer, kept

        results = in_threads(run, work.forward)
        ctx.kept = [kept for _, kept in results] if work.keep else None
        if not results:
            return torch.zeros(work.n_columns, work.n_rows, dtype=like.dtype, device=like.device)
        return _sum([buffer for buffer, _ in results])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        work: PlanWork = ctx.work
        recorded = torch.is_grad_enabled()
        tensors = ctx.saved_tensors if recorded else work.plain(ctx.saved_tensors)
        tables = work.tables(tensors)

        def run(jobs: Sequence[tuple[Job, Values | None]]) -> list[Tensor | None]:
            sums = [
                torch.zeros_like(tensor, dtype=gradient.dtype) if need else None
                for tensor, need in zip(tensors, ctx.needs_input_grad[1:], strict=True)
            ]
            of_tables = work.tables(sums)
            for job, values in jobs:
                kept = None if recorded else values
                _add_gradients(work, job, tables[job.table], kept, gradient, of_tables[job.table])
            return sums

        all_kept = ctx.kept or [[None] * len(jobs) for jobs in work.backward]
        shares = [list(zip(jobs, kept, strict=True)) for jobs, kept in zip(work.backward, all_kept, strict=True)]
        if recorded:  # threads do not record a graph, nor does a compiled function
            work = replace(work, functions=[pair_functions(shape, False, False) for shape in work.shapes])
            shares = [[job for share in shares for job in share]]
        results = in_threads(run, shares) or [run([])]
        sums = [None if parts[0] is None else _sum(list(parts)) for parts in zip(*results, strict=True)]
        return None, *(
            None if total is None else total.to(tensor.dtype) for total, tensor in zip(sums, tensors, strict=True)
        )


def _inputs(work: PlanWork, block: Block, table: Sequence[Tensor]) -> list[Any]:
    """The inputs of a block's functions."""
    targets, positions, features, hidden, inverse_length, *weights = table
    return [
        block.gather_targets(targets) - block.gather_sources(positions),
        block.gather_sources(features),
        *block.source_rows(hidden, listed=work.compiled),  # so that one graph serves lists and grids
        inverse_length,
        work.smoothing,
        Weights.of(weights),
    ]


def _add_block(work: PlanWork, job: Job, table: Sequence[Tensor], buffer: Tensor) -> Values | None:
    """Add a block's contributions to the buffer; returns what the backward pass needs, if that is to be kept."""
    block, functions = job.block.ready(), work.functions[job.table]
    inputs, values = _inputs(work, block, table), None
    if work.keep:
        out, values = functions.sums_and_values(*inputs)
    else:
        out = functions.sums(*inputs)
    block.add_to_targets(buffer, out)
    return values


def _add_gradients(
    work: PlanWork,
    job: Job,
    table: Sequence[Tensor],
    values: Values | None,
    gradient: Tensor,
    sums: Sequence[Tensor | None],
) -> None:
    """Add a block's gradients to those of its table."""
    block, functions = job.block.ready(), work.functions[job.table]
    of_targets, of_positions, of_features, of_hidden, of_length, *of_weights = sums
    wanted = (
        block.gather_targets(gradient),
        of_targets is not None or of_positions is not None,
        of_features is not None,
    )
    inputs = _inputs(work, block, table)
    if values is None:
        found = functions.recomputed_gradients(*inputs, *wanted)
    else:
        displacement, features, _, _, length, _, weights = inputs
        found = functions.gradients(displacement, features, length, weights, values, *wanted)
    if found.displacement is not None:
        if of_targets is not None:
            block.add_to_targets(of_targets, found.displacement)
        if of_positions is not None:
            block.add_to_sources(of_positions, -found.displacement)
    if of_features is not None and found.features is not None:
        block.add_to_sources(of_features, found.features)
    if of_hidden is not None:
        block.add_to_rows(of_hidden, found.hidden)
    for total, part in zip([of_length, *of_weights], [found.inverse_length, *found.weights.flat()], strict=True):
        if total is not None:
            total += part


def in_threads(work: Callable[[Share], Result], shares: Sequence[Share]) -> list[Result]:
    """The results of some shares of work, in order, each worked on by a thread with its part of torch's threads.

    Operations on a chunk are too small to be split further with profit; two chunks side by side are twice as fast.
    """
    if len(shares) <= 1:
        return [work(share) for share in shares]
    n_threads = torch.get_num_threads()
    inference = torch.is_inference_mode_enabled()

    def quietly(share: Share) -> Result:
        torch.set_num_threads(max(1, n_threads // len(shares)))
        with torch.inference_mode(inference), torch.set_grad_enabled(False):
            return work(share)

    try:
        with ThreadPoolExecutor(len(shares) - 1) as pool:
            others = [pool.submit(quietly, share) for share in shares[1:]]
            first = quietly(shares[0])
            return [first, *(other.result() for other in others)]
    finally:
        torch.set_num_threads(n_threads)


def _sum(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def bytes_per_pair(table: SourceTable, itemsize: int, with_gradient: bool, fused: bool) -> int:
    """About what the temporaries of one pair take, all branches together."""
    shape, weights = table.shape, table.weights
    widths = [weights.first.shape[2], *(matrix.shape[2] for matrix in weights.matrices)]
    columns, raw, outputs = weights.first.shape[1], weights.last.shape[1], shape.n_outputs
    if with_gradient:
        hidden = sum(widths) + widths[0] if fused else 2 * sum(widths)
        size = 3 * columns + hidden + 4 * (raw + outputs)
    else:  # hidden layers overwrite each other and are gone before outputs are summed
        size = max(columns if fused else 2 * max(widths) + columns, raw + 3 * outputs)
    one = columns + outputs
    return (size * shape.n_branches + 3 * shape.n_features + 3 * one) * itemsize


def _hand_down(plan: InteractionPlan, targets: Targets, buffer: Tensor) -> Tensor:
    """Add what nodes and groups received to their points."""
    out = buffer[: plan.n_points]
    if targets.proxies is not None:
        return out + _affine_fields(plan, targets, targets.proxies, buffer).to(out.dtype)
    if plan.uses_target_nodes:
        nodes = buffer[plan.n_points : plan.first_group]
        out = (out + push_down(nodes, plan.node_start, plan.node_end, plan.n_points)).to(buffer.dtype)
    if plan.n_groups:
        groups, points = plan.members
        out = out.index_add(0, points, buffer[plan.first_group :].index_select(0, groups))
    return out


def _affine_fields(plan: InteractionPlan, targets: Targets, proxies: Proxies, buffer: Tensor) -> Tensor:
    """At every point the affine fields of all nodes and groups that it belongs to, as float64 (points, columns)."""
    x = targets.points.to(torch.float64)

    def at(x: Tensor, fields: Tensor) -> Tensor:
        constants, *slopes = fields.chunk(1 + x.shape[1], dim=1)
        for slope, coordinate in zip(slopes, x.unbind(1), strict=True):
            constants = torch.addcmul(constants, slope, coordinate.unsqueeze(1))
        return constants

    # Constants and slopes side by side: ([nodes | groups], (1 + D) columns).
    constants, slopes = proxies.affine(buffer[plan.n_points :].t().unflatten(1, (-1, plan.n_proxies)))
    fields = torch.cat([constants.unsqueeze(0), slopes]).flatten(0, 1).t()
    out = at(x, push_down(fields[: plan.n_nodes], plan.node_start, plan.node_end, plan.n_points))
    if plan.n_groups:
        groups, points = plan.members
        of_members = fields[plan.n_nodes :].index_select(0, groups)
        out = out.index_add(0, points, at(x.index_select(0, points), of_members))
    return out
