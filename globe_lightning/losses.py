"""The training loss: a Huber penalty per field, on the norm of the error."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor


def complete_scales(scales: Mapping[str, float] | None, field_names: list[str]) -> dict[str, float]:
    """The loss scale of every field: the given ones, and 1 for the others.

    Args:
        scales: {field: positive scale}, the size of an error that counts as large.
        field_names: the flattened names of the declared fields.

    Raises:
        ValueError: a name is not a declared field, or a scale is not a positive finite number.
    """
    given = dict(scales or {})
    unknown = sorted(set(given) - set(field_names))
    if unknown:
        raise ValueError(f"loss_scales: {unknown} are not output fields; the declared fields are {field_names}")
    for name, scale in given.items():
        if not 0 < float(scale) < float("inf"):
            raise ValueError(f"loss_scales[{name!r}]: expected a positive finite number, found {scale!r}")
    return {name: float(given.get(name, 1.0)) for name in field_names}


def field_loss(
    prediction: Float[Tensor, "points ..."], truth: Float[Tensor, "points ..."], scale: float = 1.0
) -> Float[Tensor, ""]:
    """Mean over the points of ``2 * huber(|prediction - truth| / scale, delta=1)``.

    The norm is taken over a vector's components first. A point whose truth is NaN counts as 0 in the mean and gives
    no gradient, so a field without any known truth has loss 0 and keeps the graph alive.

    Args:
        prediction: nondimensional field, scalars (n,) or vectors (n, D).
        truth: the same shape; NaN where unknown.
        scale: the error, in the field's units, at which the penalty turns from quadratic to linear.

    Raises:
        ValueError: the shapes differ.
    """
    if prediction.shape != truth.shape:
        raise ValueError(f"prediction and truth differ in shape: {tuple(prediction.shape)} and {tuple(truth.shape)}")
    n = truth.shape[0]
    prediction, truth = prediction.reshape(n, -1).float(), truth.reshape(n, -1).float()
    known = ~torch.isnan(truth).any(dim=1, keepdim=True)
    # The unknown rows are replaced before the subtraction: NaN times zero would still be NaN in the gradient.
    error = torch.where(known, prediction, 0.0) - torch.where(known, truth, 0.0)
    norm = torch.linalg.vector_norm(error, dim=1) / scale
    penalty = torch.nn.functional.huber_loss(norm, torch.zeros_like(norm), delta=1.0, reduction="sum")
    return 2 * penalty / max(n, 1)


def field_losses(
    prediction: Mapping[str, Tensor], truth: Mapping[str, Tensor], scales: Mapping[str, float]
) -> dict[str, Tensor]:
    """The loss of every field named in ``scales``; the training loss is their sum.

    Args:
        prediction: {flattened name: field}.
        truth: {flattened name: field}.
        scales: {flattened name: scale}, see :func:`complete_scales`.

    Raises:
        ValueError: a field is missing or has another shape than its truth; the message names the field.
    """
    losses = {}
    for name, scale in scales.items():
        for what, fields in (("prediction", prediction), ("sample's targets", truth)):
            if name not in fields:
                raise ValueError(f"the {what} lack the field {name!r}; there are {sorted(fields)}")
        try:
            losses[name] = field_loss(prediction[name], truth[name], scale)
        except ValueError as error:
            raise ValueError(f"field {name!r}: {error}") from error
    return losses
