"""What becomes of a hyperlayer's packed sums: latents and strengths compressed, output fields calibrated and named."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from jaxtyping import Float
from tensordict import TensorDict
from torch import Tensor, nn

from globe_lightning.fields import FieldLayout
from globe_lightning.models.features import magnitude_and_direction


class FieldCalibration(nn.Module):
    """An output field's own scale and, for scalars, offset; 1 and 0 at first."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 1))
        if rank == 0:
            self.bias = nn.Parameter(torch.zeros(1))
        else:
            self.register_parameter("bias", None)

    def forward(self, field: Float[Tensor, "n columns"]) -> Float[Tensor, "n columns"]:
        """Scale and shift a field's packed columns."""
        field = field * self.weight.to(field.dtype)
        return field if self.bias is None else field + self.bias.to(field.dtype)


def calibrate(packed: Float[Tensor, "n columns"], layout: FieldLayout, calibrations: Iterable[nn.Module]) -> TensorDict:
    """The output fields of packed columns [scalars | vectors], each scaled and shifted, nested as declared."""
    out = TensorDict({}, batch_size=[packed.shape[0]], device=packed.device)
    scalar, vector = 0, len(layout.scalars)
    for (name, rank), calibration in zip(layout.ranks.items(), calibrations, strict=True):
        if rank == 0:
            out[layout.paths[name]] = calibration(packed[:, scalar : scalar + 1]).squeeze(1)
            scalar += 1
        else:
            out[layout.paths[name]] = calibration(packed[:, vector : vector + layout.n_dims])
            vector += layout.n_dims
    return out


def compress(
    packed: Float[Tensor, "n columns"], layout: FieldLayout, scale: float | None, smoothing_radius: Float[Tensor, ""]
) -> Float[Tensor, "n columns"]:
    """C asinh(t/C) for scalars, t C asinh(m/C)/m for vectors; unchanged if the scale C is None."""
    if scale is None:
        return packed
    n_scalars = len(layout.scalars)
    scalars, vectors = packed[:, :n_scalars], packed[:, n_scalars:]
    scalars = scale * torch.asinh(scalars / scale)
    vectors = vectors.reshape(vectors.shape[0], -1, layout.n_dims)
    magnitude, direction = magnitude_and_direction(vectors, smoothing_radius.to(packed.dtype))
    vectors = direction * (scale * torch.asinh(magnitude / scale)).unsqueeze(-1)
    return torch.cat([scalars, vectors.flatten(1)], dim=1)
