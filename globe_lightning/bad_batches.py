"""Bad batches: what is wrong with a case whose loss or gradient is not finite."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


class BadBatchError(ValueError):
    """Too many steps had a loss or gradient that was not finite."""


def all_finite(tensors: Iterable[Tensor | None]) -> Tensor:
    """Whether all entries of all tensors are finite, as a 0-d tensor on their device; None is left out."""
    found = [tensor.detach() for tensor in tensors if tensor is not None]
    # The largest magnitude: unlike a sum of squares it does not overflow, and it is NaN if one entry is.
    return torch.isfinite(torch.nn.utils.get_total_norm(found, norm_type=float("inf")))


def describe(
    case: str,
    losses: Mapping[str, Tensor],
    prediction: Mapping[str, Tensor],
    truth: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
) -> str | None:
    """What is not finite of a case, in one line; None if nothing is.

    Args:
        case: its name.
        losses: {field: loss}.
        prediction: {field: values}, scalars (n,) or vectors (n, D).
        truth: the same; NaN is unknown, infinity is wrong.
        gradients: {parameter: the gradient of this case's own loss}.
    """
    faults = []
    for name, loss in losses.items():
        if bool(torch.isfinite(loss)):
            continue
        for what, wrong in (("true", torch.isinf(truth[name])), ("predicted", ~torch.isfinite(prediction[name]))):
            n = int(wrong.reshape(len(wrong), -1).any(dim=1).sum())
            if n:
                faults.append(f"field {name!r} has {n} of {len(wrong)} {what} points not finite")
        if not faults:
            faults.append(f"the loss of field {name!r} is {float(loss)} over {len(truth[name])} points")
    if not faults:
        names = [name for name, gradient in gradients.items() if not bool(all_finite([gradient]))]
        if names:
            n = len(next(iter(truth.values())))
            fields = ", ".join(map(repr, losses))
            faults.append(
                f"the loss of its {n} points (fields {fields}) is finite, its gradient is not, in {len(names)} of "
                f"{len(gradients)} parameters, the first of them {names[0]}"
            )
    return f"case {case!r}: " + "; ".join(faults) if faults else None
