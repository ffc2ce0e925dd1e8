"""Proxy points: where a far pair is evaluated for a target node, and the affine field through what is found there.

A node's box has the center c and the half-widths h. Its D + 1 proxies ``c + h / sqrt(3) s_i``, with s_i the corners of
a regular simplex sqrt(D) from the origin, have the mean and the covariance of points spread evenly over the box. The
affine field through values F_i at them is ``mean_i F_i (1 + s_i . y)`` at ``y = sqrt(3) (x - c) / h``. It reproduces
affine fields exactly, whatever the points of the node. The proxies lie well within the box: no step width is needed,
and no close values are subtracted from each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

REACH = 3**-0.5


@dataclass
class Proxies:
    """The proxy points of nodes.

    Attributes:
        centers, half_widths: of the nodes' boxes (nodes, D) [m], float64.
    """

    centers: Float[Tensor, "nodes dims"]
    half_widths: Float[Tensor, "nodes dims"]

    @staticmethod
    def of(boxes: Float[Tensor, "two_dims nodes"]) -> Proxies:
        """From lower and upper corners, one row a coordinate [m]."""
        low, high = boxes.to(torch.float64).t().chunk(2, dim=1)
        return Proxies((low + high) / 2, (high - low) / 2)

    @property
    def points(self) -> Float[Tensor, "nodes proxies dims"]:
        """The proxy points [m]."""
        steps = self.half_widths.unsqueeze(1) * (REACH * self._corners)
        return self.centers.unsqueeze(1) + steps

    def affine(
        self, values: Float[Tensor, "columns nodes proxies"]
    ) -> tuple[Float[Tensor, "columns nodes"], Float[Tensor, "dims columns nodes"]]:
        """The affine fields through values at the proxies: constant at the origin, and gradient [1/m]; float64.

        A box without extent in a direction has no slope there.
        """
        values = values.to(torch.float64)
        inverse = torch.where(self.half_widths > 0, 1 / (REACH * self.half_widths), 0.0)
        slopes = torch.einsum("cnk,kd->dcn", values, self._corners / self._corners.shape[0])
        slopes = slopes * inverse.t().unsqueeze(1)
        constants = values.mean(dim=2) - (slopes * self.centers.t().unsqueeze(1)).sum(dim=0)
        return constants, slopes

    @property
    def _corners(self) -> Tensor:
        return simplex(self.centers.shape[1]).to(self.centers.device, non_blocking=True)


@lru_cache
def simplex(n_dims: int) -> Float[Tensor, "proxies dims"]:
    """The corners of a regular simplex about the origin, sqrt(n_dims) away from it; float64."""
    if n_dims == 3:
        corners = [[1.0, 1.0, 1.0], [1.0, -1.0, -1.0], [-1.0, 1.0, -1.0], [-1.0, -1.0, 1.0]]
    else:
        corners = [[2**0.5, 0.0], [-(0.5**0.5), 1.5**0.5], [-(0.5**0.5), -(1.5**0.5)]]
    return torch.tensor(corners, dtype=torch.float64)
