"""Boundary meshes: simplex faces with their centroids, areas and normals.

A face is a segment in 2D and a triangle in 3D. Everything derived is differentiable in the points and computed on
the points' device and in their precision.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from tensordict import TensorDict, TensorDictBase
from torch import Tensor


class BoundaryMesh:
    """The faces of one boundary type.

    Args:
        points: vertex coordinates, (n_points, D), D = 2 or 3, in metres.
        cells: vertex indices of each face, (n_faces, D): segments in 2D, triangles in 3D.
        cell_data: nondimensional physical data per face: scalars (n_faces,) and vectors (n_faces, D); may nest.
        measure_weights: factor of each face's area, (n_faces,), for a surface that was subsampled.
        face_positions: where each face stands as source and target, (n_faces, D); its centroid if None. Training
            draws them at random inside the faces (see :meth:`with_random_positions`).

    Raises:
        ValueError: a shape or dtype does not fit; the message names the argument, what was found and expected.
    """

    def __init__(
        self,
        points: Float[Tensor, "points dims"],
        cells: Int[Tensor, "faces corners"],
        cell_data: Mapping[str, Any] | TensorDictBase | None = None,
        measure_weights: Float[Tensor, " faces"] | None = None,
        face_positions: Float[Tensor, "faces dims"] | None = None,
    ) -> None:
        if points.ndim != 2 or points.shape[1] not in (2, 3) or not points.is_floating_point():
            raise ValueError(
                f"points: expected floating-point (n_points, 2 or 3), found {points.dtype} {tuple(points.shape)}"
            )
        dims = points.shape[1]
        if cells.ndim != 2 or cells.shape[1] != dims or cells.is_floating_point() or cells.dtype == torch.bool:
            raise ValueError(
                f"cells: expected integer (n_faces, {dims}) ({'segments' if dims == 2 else 'triangles'} in {dims}D), "
                f"found {cells.dtype} {tuple(cells.shape)}"
            )
        n = cells.shape[0]
        if measure_weights is not None and tuple(measure_weights.shape) != (n,):
            raise ValueError(f"measure_weights: expected ({n},), found {tuple(measure_weights.shape)}")
        if face_positions is not None and tuple(face_positions.shape) != (n, dims):
            raise ValueError(f"face_positions: expected ({n}, {dims}), found {tuple(face_positions.shape)}")
        if cell_data is None:
            cell_data = {}
        for key, value in cell_data.items():
            if isinstance(value, Tensor) and (value.ndim == 0 or value.shape[0] != n):
                raise ValueError(f"cell_data[{key!r}]: expected {n} rows, one a face, found {tuple(value.shape)}")
        self.points = points
        self.cells = cells
        self.cell_data = TensorDict(dict(cell_data.items()), batch_size=[n])
        self.measure_weights = measure_weights
        self.face_positions = face_positions

    def __repr__(self) -> str:
        names = ", ".join(map(str, self.cell_data.keys(True, True)))
        return f"BoundaryMesh({self.n_faces} faces, {self.points.shape[0]} points, {self.n_dims}D, data: [{names}])"

    @property
    def n_dims(self) -> int:
        """Dimension D of the space."""
        return self.points.shape[1]

    @property
    def n_faces(self) -> int:
        """Number of faces."""
        return self.cells.shape[0]

    @property
    def device(self) -> torch.device:
        """Device of the points."""
        return self.points.device

    @property
    def corners(self) -> Float[Tensor, "faces corners dims"]:
        """Coordinates of each face's vertices [m]."""
        # index_select takes half as long as indexing.
        return self.points.index_select(0, self.cells.reshape(-1).long()).reshape(*self.cells.shape, self.n_dims)

    @property
    def centroids(self) -> Float[Tensor, "faces dims"]:
        """Mean of each face's vertices [m]."""
        return self.corners.mean(dim=1)

    @property
    def positions(self) -> Float[Tensor, "faces dims"]:
        """Where each face stands as a source and as a target [m]: ``face_positions``, or the centroids."""
        return self.centroids if self.face_positions is None else self.face_positions

    def normals_and_areas(self) -> tuple[Float[Tensor, "faces dims"], Float[Tensor, " faces"]]:
        """``normals`` and ``areas`` of one computation."""
        corners = self.corners
        edge = corners[:, 1] - corners[:, 0]
        if self.n_dims == 2:
            directed = torch.stack([-edge[:, 1], edge[:, 0]], dim=-1)
            measure = directed.norm(dim=-1)
            area = measure
        else:
            directed = torch.linalg.cross(edge, corners[:, 2] - corners[:, 0])
            measure = directed.norm(dim=-1)
            area = measure / 2
        # where() on the divisor keeps the gradient of a degenerate face finite: its normal is zero.
        normals = directed / torch.where(measure > 0, measure, torch.ones_like(measure)).unsqueeze(-1)
        return normals, area if self.measure_weights is None else area * self.measure_weights

    @property
    def normals(self) -> Float[Tensor, "faces dims"]:
        """Unit normals: (-e_y, e_x)/|e| of the edge e = p1 - p0 in 2D, (p1-p0) x (p2-p0) in 3D; 0 if degenerate."""
        return self.normals_and_areas()[0]

    @property
    def areas(self) -> Float[Tensor, " faces"]:
        """Length [m] or area [m^2] of each face, times its measure weight."""
        return self.normals_and_areas()[1]

    def flipped(self) -> BoundaryMesh:
        """The same faces with their normals reversed (two vertices of each face exchanged)."""
        cells = torch.cat([self.cells[:, [1, 0]], self.cells[:, 2:]], dim=1)
        return BoundaryMesh(self.points, cells, self.cell_data, self.measure_weights, self.face_positions)

    def with_random_positions(self, generator: torch.Generator | None = None) -> BoundaryMesh:
        """The same faces, each standing at a point drawn uniformly inside it instead of at its centroid."""
        draw = torch.rand(self.n_faces, self.n_dims, generator=generator, dtype=torch.float64)
        # Exponential spacings: normalised, they are uniform on the simplex.
        weights = -torch.log1p(-draw)
        # Term by term: torch's sum over so short a dimension takes several times as long.
        total = functools.reduce(torch.add, weights.unbind(dim=1)).clamp_min(torch.finfo(torch.float64).tiny)
        weights = (weights / total.unsqueeze(1)).to(self.points).unsqueeze(-1)
        corners = self.corners
        terms = [corners[:, corner] * weights[:, corner] for corner in range(self.n_dims)]
        positions = functools.reduce(torch.add, terms)
        return BoundaryMesh(self.points, self.cells, self.cell_data, self.measure_weights, positions)

    def _map(self, convert: Any, convert_indices: Any) -> BoundaryMesh:
        def optional(value: Tensor | None) -> Tensor | None:
            return None if value is None else convert(value)

        return BoundaryMesh(
            convert(self.points),
            convert_indices(self.cells),
            self.cell_data.apply(convert),
            optional(self.measure_weights),
            optional(self.face_positions),
        )

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None, non_blocking: bool = False
    ) -> BoundaryMesh:
        """A copy on a device and (coordinates and data, not indices) in a precision."""
        return self._map(
            lambda t: t.to(device=device, dtype=dtype, non_blocking=non_blocking),
            lambda t: t.to(device=device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> BoundaryMesh:
        """A copy in page-locked memory."""
        return self._map(Tensor.pin_memory, Tensor.pin_memory)
