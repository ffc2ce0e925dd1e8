"""The sums that training gathers in each process: packed for a checkpoint, and dealt out again on a resumption."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from globe_lightning.metrics import RunningMean, TargetVariances


def pack_sums(means: Sequence[RunningMean], variances: TargetVariances) -> Float[Tensor, " sums"]:
    """One process's sums: total and count of every mean, then those of the variances."""
    return torch.cat([*(torch.stack([mean.total, mean.count]) for mean in means), variances.sums.reshape(-1)])


def restore_sums(
    stored: Float[Tensor, "processes sums"],
    rank: int,
    world: int,
    means: Sequence[RunningMean],
    variances: TargetVariances,
) -> None:
    """Go on from the sums of all processes.

    Args:
        stored: a row of :func:`pack_sums` for each process of then.
        rank: the number of this process.
        world: how many there are now; if not as many as then, the first takes the sums of all.
        means, variances: changed in place.
    """
    if len(stored) != world:
        others = torch.zeros(world - 1, stored.shape[1], dtype=stored.dtype)
        stored = torch.cat([stored.sum(dim=0, keepdim=True), others])
    mine = stored[rank].to(variances.sums.device)
    for mean, (total, count) in zip(means, mine[: 2 * len(means)].reshape(-1, 2), strict=True):
        mean.restore(total, count)
    variances.sums = mine[2 * len(means) :].reshape(variances.sums.shape)
