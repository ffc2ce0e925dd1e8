"""Surfaces of polygons as functions of their points: area vectors, and what of a sample moves when points move.

A sample holds copies of a body's points: vertices of its boundary meshes, prediction points, and area vectors that
forces integrate over. :class:`BodySurface` ties them to the points of one surface, by their equal coordinates, so that
a displacement of the body is one array.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from globe_lightning.mesh import BoundaryMesh
from globe_lightning.sample import ForceSurface, Sample

LARGEST_MISFIT = 1e-3
"""How far area vectors may be from those that a sample's forces integrate over, relative to their norm."""


@dataclass
class BodySurface:
    """A surface of polygons (3D) or a curve of segments (2D).

    Attributes:
        points: (n, D) [m].
        offsets: (f + 1,): the corners of face i are ``corners[offsets[i]:offsets[i+1]]``.
        corners: (c,) rows of ``points``.
    """

    points: Float[Tensor, "n dims"]
    offsets: Int[Tensor, " faces_and_one"]
    corners: Int[Tensor, " corners"]

    @staticmethod
    def of_faces(points: Float[Tensor, "n dims"], faces: Int[Tensor, "faces size"]) -> BodySurface:
        """Faces of equally many corners each."""
        n, size = faces.shape
        offsets = torch.arange(n + 1, device=faces.device) * size
        return BodySurface(points, offsets, faces.reshape(-1).long())

    @staticmethod
    def of_sample(sample: Sample) -> BodySurface:
        """The faces that a sample's forces integrate over, with the prediction points they have for corners.

        Raises:
            ValueError: the sample does not say which points its faces have for corners.
        """
        surface = sample.force_surface
        if surface is None or surface.point_indices.shape[1] < sample.prediction_points.shape[1]:
            raise ValueError(
                f"case {sample.case!r}: the sample does not hold the faces of its surface; pass the surface"
            )
        rows, corners = surface.point_indices.unique(return_inverse=True)
        return BodySurface.of_faces(sample.prediction_points[rows], corners)

    @property
    def n_faces(self) -> int:
        """Number of faces."""
        return self.offsets.shape[0] - 1

    @property
    def sizes(self) -> Int[Tensor, " faces"]:
        """Number of corners of each face."""
        return self.offsets.diff()

    @property
    def face_of_corner(self) -> Int[Tensor, " corners"]:
        """The face that each corner belongs to."""
        faces = torch.arange(self.n_faces, device=self.offsets.device)
        return faces.repeat_interleave(self.sizes, output_size=self.corners.shape[0])

    def centers(self, points: Float[Tensor, "n dims"]) -> Float[Tensor, "faces dims"]:
        """Means of the corners, for other places of the points [m]."""
        sums = points.new_zeros(self.n_faces, points.shape[1])
        sums = sums.index_add(0, self.face_of_corner, points.index_select(0, self.corners))
        return sums / self.sizes.unsqueeze(1)

    def area_vectors(self, points: Float[Tensor, "n dims"]) -> Float[Tensor, "faces dims"]:
        """Area times normal, for other places of the points [m or m^2].

        (-e_y, e_x) of a segment's edge e; of a polygon 1/2 sum_i (v_i - c) x (v_(i+1) - c), c the mean of its corners.
        """
        own = points.index_select(0, self.corners)
        if points.shape[1] == 2:
            edge = own[1::2] - own[::2]
            return torch.stack([-edge[:, 1], edge[:, 0]], dim=1)
        faces = self.face_of_corner
        spokes = own - self.centers(points).index_select(0, faces)
        following = torch.arange(1, len(faces) + 1, device=faces.device)
        following[self.offsets[1:] - 1] = self.offsets[:-1]
        parts = torch.linalg.cross(spokes, spokes.index_select(0, following)) / 2
        return parts.new_zeros(self.n_faces, 3).index_add(0, faces, parts)

    def shares(self, values: Float[Tensor, "faces columns"]) -> Float[Tensor, "n columns"]:
        """Values of the faces handed to their corners in equal parts and summed at the points."""
        parts = (values / self.sizes.unsqueeze(1)).index_select(0, self.face_of_corner)
        return parts.new_zeros(self.points.shape[0], values.shape[1]).index_add(0, self.corners, parts)

    def vertex_averaged(self, vectors: Float[Tensor, "faces dims"]) -> Float[Tensor, "faces dims"]:
        """Area vectors along the mean of unit normals at the corners, each of those the mean of the faces there."""
        units, lengths = _units(vectors)
        sums = units.new_zeros(self.points.shape[0], units.shape[1])
        faces = self.face_of_corner
        at_points, _ = _units(sums.index_add(0, self.corners, units.index_select(0, faces)))
        means = torch.zeros_like(units).index_add(0, faces, at_points.index_select(0, self.corners))
        return means / self.sizes.unsqueeze(1) * lengths

    @property
    def triangles(self) -> Int[Tensor, "triangles 3"]:
        """The polygons as triangles that start at each one's first corner."""
        counts = self.sizes - 2
        first = self.offsets[:-1].repeat_interleave(counts)
        number = torch.arange(len(first), device=first.device) - (counts.cumsum(0) - counts).repeat_interleave(counts)
        return self.corners[torch.stack([first, first + number + 1, first + number + 2], dim=1)]

    def smoothed(self, values: Float[Tensor, " n"], areas: Float[Tensor, " n"], length: float) -> Float[Tensor, " n"]:
        """A field on the surface without its variations shorter than a length: ``v - length^2 laplacian(v) = values``.

        The integral over the surface stays. Linear finite elements with lumped areas, conjugate gradients in float64.

        Args:
            values: at the points.
            areas: around the points [m or m^2].
            length: [m]; 0 changes nothing.
        """
        if length == 0:
            return values
        points = self.points.double()
        elements = self.corners.reshape(-1, 2) if points.shape[1] == 2 else self.triangles
        corners = points[elements]
        # Gradients of the shape functions: of a segment +-1/|e| along it, of a triangle height vectors over 2 A.
        if points.shape[1] == 2:
            edge, sizes = _units(corners[:, 1] - corners[:, 0])
            slopes = torch.stack([-edge, edge], dim=1) / torch.where(sizes > 0, sizes, torch.inf).unsqueeze(-1)
        else:
            normal, double = _units(torch.linalg.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]))
            opposite = corners.roll(-2, dims=1) - corners.roll(-1, dims=1)
            slopes = torch.linalg.cross(normal.unsqueeze(1).expand_as(opposite), opposite)
            slopes = slopes / torch.where(double > 0, double, torch.inf).unsqueeze(-1)
            sizes = double / 2
        mass = areas.double()
        stiffness = length**2 * sizes.unsqueeze(-1) * (slopes @ slopes.transpose(1, 2))
        used = mass > 0
        diagonal = torch.zeros_like(mass).index_add(
            0, elements.reshape(-1), stiffness.diagonal(dim1=1, dim2=2).reshape(-1)
        )
        diagonal = torch.where(used, diagonal + mass, 1.0)

        def system(x: Tensor) -> Tensor:
            parts = (stiffness @ x[elements].unsqueeze(-1)).reshape(-1)
            return torch.where(used, mass * x, x).index_add(0, elements.reshape(-1), parts)

        return _conjugate_gradients(system, mass * values.double(), diagonal)


@dataclass
class MovingParts:
    """What of a sample follows the points of a body's surface.

    Attributes:
        surface: the body, its faces oriented as the caller had them.
        signs: (faces,) +1 where a face's area vector points into the fluid, else -1.
        prediction_rows: row of the surface's points that each prediction point is, -1 where none.
        at_centers: whether the prediction points are the centers of the faces instead.
        boundary_rows: {boundary type: row of the surface's points that each of its vertices is, -1 where none}.
        force_surface: the sample's, None if it has none.
    """

    surface: BodySurface
    signs: Float[Tensor, " faces"]
    prediction_rows: Int[Tensor, " points"]
    at_centers: bool
    boundary_rows: dict[str, Int[Tensor, " vertices"]]
    force_surface: ForceSurface | None

    @staticmethod
    def of(sample: Sample, surface: BodySurface) -> MovingParts:
        """Find a sample's copies of a surface's points.

        Raises:
            ValueError: no boundary mesh shares a vertex with the surface; faces of one that does stand at random
                positions; or the area vectors are not those that the sample's forces integrate over.
        """
        like = sample.prediction_points
        body = BodySurface(surface.points.to(like), surface.offsets.to(like.device), surface.corners.to(like.device))
        parts = [mesh.points.to(like) for mesh in sample.boundary_meshes.values()]
        found = equal_rows(body.points, torch.cat([like, *parts])).split([len(like), *map(len, parts)])
        rows = dict(zip(sample.boundary_meshes, found[1:], strict=True))
        moved = [kind for kind, own in rows.items() if bool((own >= 0).any())]
        if not moved:
            raise ValueError(
                f"case {sample.case!r}: no boundary mesh has a vertex in common with the surface; expected equal "
                "coordinates [m]"
            )
        for kind in moved:
            if sample.boundary_meshes[kind].face_positions is not None:
                raise ValueError(
                    f"case {sample.case!r}: the faces of {kind!r} stand at random positions, as in training; take a "
                    "sample of the test or predict split"
                )
        centers = body.centers(body.points)
        at_centers = like.shape == centers.shape and torch.allclose(like, centers, rtol=0, atol=1e-5 * _extent(body))
        at_centers = at_centers and not bool((found[0] >= 0).all())
        out = MovingParts(
            body, torch.ones(body.n_faces, device=like.device), found[0], at_centers, rows, sample.force_surface
        )
        out._orient(sample.case)
        return out

    def _orient(self, case: str) -> None:
        """Choose the signs with which the area vectors are those of the force surface."""
        surface = self.force_surface
        if surface is None:
            return
        points = self.surface.points.double()
        expected = surface.area_vectors.double()
        if self.in_corners:
            raw = self.surface.area_vectors(points)
            self.signs = torch.where((raw * expected).sum(dim=1) < 0, -1.0, 1.0).to(self.surface.points)
        elif float((self.force_geometry(points)[0] * expected).sum()) < 0:
            self.signs = -self.signs
        found, areas = self.force_geometry(points)
        misfit = (found - expected).norm() / expected.norm()
        if surface.areas is not None and areas is not None:
            misfit = torch.maximum(misfit, (areas - surface.areas).norm() / surface.areas.double().norm())
        if not float(misfit) <= LARGEST_MISFIT:
            raise ValueError(
                f"case {case!r}: the surface's area vectors differ by {float(misfit):.1e} of their norm from those "
                f"that the sample's forces integrate over, expected at most {LARGEST_MISFIT}; is it another surface?"
            )

    @property
    def in_corners(self) -> bool:
        """Whether forces integrate over the surface's faces with values at their corners."""
        return self.force_surface is not None and self.force_surface.point_indices.shape[1] > 1

    def force_geometry(self, points: Float[Tensor, "n dims"]) -> tuple[Tensor, Tensor | None]:
        """The force surface's area vectors, and its areas where it states them, for other places of the points."""
        surface = self.force_surface
        assert surface is not None
        vectors = self.surface.area_vectors(points) * self.signs.to(points).unsqueeze(1)
        if self.in_corners:
            return (self.surface.vertex_averaged(vectors) if surface.vertex_normals else vectors), None
        areas = _norms(vectors)
        if not self.at_centers:
            both = self.surface.shares(torch.cat([vectors, areas], dim=1))
            both = both.index_select(0, self.prediction_rows[surface.point_indices[:, 0]])
            vectors, areas = both[:, :-1], both[:, -1:]
        return vectors, None if surface.areas is None else areas.squeeze(1)

    def gradient(
        self,
        prediction_points: Tensor,
        boundary_points: dict[str, Tensor],
        area_vectors: Tensor | None,
        areas: Tensor | None,
    ) -> Float[Tensor, "n dims"]:
        """The derivative with respect to the surface's points, from those with respect to all that follows them."""
        points = self.surface.points.double().requires_grad_()
        outputs: list[Tensor] = []
        gradients: list[Tensor] = []

        def add(output: Tensor, gradient: Tensor) -> None:
            outputs.append(output)
            gradients.append(gradient.to(output))

        if self.at_centers:
            add(self.surface.centers(points), prediction_points)
        copies = [(self.prediction_rows, prediction_points)] if not self.at_centers else []
        copies += [(rows, boundary_points[kind]) for kind, rows in self.boundary_rows.items()]
        for rows, gradient in copies:
            ours = rows >= 0
            add(points.index_select(0, rows[ours]), gradient[ours])
        if area_vectors is not None or areas is not None:
            vectors, sizes = self.force_geometry(points)
            if area_vectors is not None:
                add(vectors, area_vectors)
            if areas is not None and sizes is not None:
                add(sizes, areas)
        (total,) = torch.autograd.grad(outputs, points, gradients)
        return total

    def displace(self, sample: Sample, displacement: Float[Tensor, "n dims"]) -> Sample:
        """The sample of the body with its points moved; points off the body, weights and truth stay.

        Args:
            sample: the one that the parts were found in; it is not changed.
            displacement: of each of the surface's points [m].
        """
        like = sample.prediction_points
        points = self.surface.points.double() + displacement.to(like.device, torch.float64)

        def follow(own: Tensor, rows: Tensor) -> Tensor:
            moved = points.index_select(0, rows.clamp_min(0)).to(own)
            return torch.where((rows >= 0).unsqueeze(1), moved, own)

        meshes = {}
        for kind, mesh in sample.boundary_meshes.items():
            moved = follow(mesh.points, self.boundary_rows[kind])
            meshes[kind] = BoundaryMesh(moved, mesh.cells, mesh.cell_data, mesh.measure_weights, mesh.face_positions)
        asked = self.surface.centers(points).to(like) if self.at_centers else follow(like, self.prediction_rows)
        surface = self.force_surface
        if surface is not None:
            vectors, areas = self.force_geometry(points)
            areas = surface.areas if areas is None else areas.to(surface.area_vectors)
            surface = replace(surface, area_vectors=vectors.to(surface.area_vectors), areas=areas)
        return replace(sample, prediction_points=asked, boundary_meshes=meshes, force_surface=surface)

    def resolution(self, sample: Sample) -> float:
        """Mean width of the faces on the body [m]: the (D-1)-th root of their mean area, weights included."""
        meshes = [sample.boundary_meshes[kind] for kind, rows in self.boundary_rows.items() if bool((rows >= 0).any())]
        mean = sum(float(mesh.areas.sum()) for mesh in meshes) / sum(mesh.n_faces for mesh in meshes)
        return mean if self.surface.points.shape[1] == 2 else mean**0.5

    def normals_and_areas(self) -> tuple[Float[Tensor, "n dims"], Float[Tensor, " n"]]:
        """At each of the surface's points the unit normal into the fluid (0 if undefined) and the area around it."""
        vectors = self.surface.area_vectors(self.surface.points.double()) * self.signs.double().unsqueeze(1)
        shared = self.surface.shares(torch.cat([vectors, _norms(vectors)], dim=1))
        return _units(shared[:, :-1])[0], shared[:, -1]


def displaced(sample: Sample, displacement: Float[Tensor, "n dims"], surface: BodySurface | None = None) -> Sample:
    """The sample of a body whose points are moved, to check a sensitivity or to follow it.

    Args:
        sample: of the test or predict split; it is not changed.
        displacement: of each of the surface's points [m].
        surface: the body; None takes the faces that the sample's forces integrate over, as ``shape_sensitivity`` does.

    Raises:
        ValueError: of :meth:`BodySurface.of_sample` and :meth:`MovingParts.of`.
    """
    return MovingParts.of(sample, surface or BodySurface.of_sample(sample)).displace(sample, displacement)


def equal_rows(points: Float[Tensor, "n dims"], others: Float[Tensor, "m dims"]) -> Int[Tensor, " m"]:
    """For each row of ``others`` the first row of ``points`` with the same coordinates, -1 where there is none."""
    n = points.shape[0]
    distinct, number = torch.cat([points, others]).unique(dim=0, return_inverse=True)
    first = torch.full((distinct.shape[0],), n, device=points.device)
    first.scatter_reduce_(0, number[:n], torch.arange(n, device=points.device), "amin")
    found = first[number[n:]]
    return torch.where(found < n, found, -1)


def _conjugate_gradients(
    system: Callable[[Tensor], Tensor], right: Tensor, diagonal: Tensor, tolerance: float = 1e-8, steps: int = 2000
) -> Tensor:
    """The solution of a symmetric positive definite system, preconditioned with its diagonal."""
    x = torch.zeros_like(right)
    residual = right.clone()
    scaled = residual / diagonal
    direction, energy = scaled.clone(), residual @ scaled
    goal = tolerance**2 * energy
    for _ in range(steps):
        if not bool(energy > goal):
            break
        image = system(direction)
        step = energy / (direction @ image)
        x += step * direction
        residual -= step * image
        scaled = residual / diagonal
        before, energy = energy, residual @ scaled
        direction = scaled + (energy / before) * direction
    return x


def _extent(surface: BodySurface) -> float:
    return float((surface.points.amax(dim=0) - surface.points.amin(dim=0)).max())


def _norms(vectors: Tensor) -> Tensor:
    """Lengths (n, 1) with a gradient of zero at zero."""
    square = vectors.square().sum(dim=1, keepdim=True)
    zero = square == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, square).sqrt())


def _units(vectors: Tensor) -> tuple[Any, Any]:
    """Unit vectors, 0 where there is no direction, and lengths (n, 1)."""
    lengths = _norms(vectors)
    return vectors / torch.where(lengths > 0, lengths, 1.0), lengths
