"""Plans of a sample: trees over its faces and prediction points, and the interactions between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from globe_lightning.mesh import BoundaryMesh
from globe_lightning.sample import Sample
from globe_lightning.tree.cluster_tree import ClusterForest, build_forest, loose_points
from globe_lightning.tree.morton import morton_codes
from globe_lightning.tree.opening_rule import OpeningRule
from globe_lightning.tree.plan import InteractionPlan, build_plan, build_plans
from globe_lightning.tree.pointwise import build_pointwise_plan

# At theta = 0 the result does not depend on the chunks, so "auto" need not follow the number of faces.
EXACT_CHUNK = 16384


@dataclass
class PredictionPlan:
    """Prediction points [first, last): their sorted order and their interactions with the boundary."""

    first: int
    last: int
    order: Tensor
    plan: InteractionPlan


@dataclass
class Plans:
    """Trees and interaction plans of a sample: pure geometry, indices only.

    Attributes:
        kinds: boundary types that have faces, in the order of the forest's trees.
        forest: trees over the faces of those types.
        communication: interactions of all faces with all faces.
        prediction: interactions of all prediction points with all faces; None if not asked for.
    """

    kinds: list[str]
    forest: ClusterForest
    communication: InteractionPlan
    prediction: PredictionPlan | None

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Plans:
        """The same plans on a device."""
        own = self.prediction
        if own is not None:
            own = PredictionPlan(own.first, own.last, own.order.to(device), own.plan.to(device))
        return Plans(self.kinds, self.forest.to(device), self.communication.to(device), own)

    @property
    def n_evaluations(self) -> dict[str, int]:
        """Kernel evaluations per branch and layer, {"communication": …, "prediction": …}."""
        return {
            "communication": self.communication.n_evaluations,
            "prediction": self.prediction.plan.n_evaluations if self.prediction else 0,
        }


@dataclass(frozen=True)
class Planner:
    """Builds trees and plans by one rule, always in full precision.

    Attributes:
        rule: of the traversal.
        leaf_size: largest number of points of a leaf.
        build_device: where trees and plans are built.
        device: where they are used.
        dtype: precision of the geometry.
    """

    rule: OpeningRule
    leaf_size: int
    build_device: torch.device
    device: torch.device
    dtype: torch.dtype

    @torch.no_grad()
    def plan_sample(
        self,
        boundary_meshes: Mapping[str, BoundaryMesh],
        points: Float[Tensor, "n dims"],
        requested: int | Literal["auto"] | None,
    ) -> Plans:
        """All plans of a sample, by one traversal: faces with faces, and points with faces, a tree each chunk."""
        with torch.autocast(self.device.type, enabled=False):
            faces = self._positions(boundary_meshes)
            n_faces = sum(len(own) for own in faces)
            points = points.to(device=self.build_device, dtype=self.dtype)
            chunks = [points[low:high] for low, high in self.chunks(len(points), n_faces, requested)]
            both = self._forest([*faces, *chunks])
            forest = both.leading(len(faces))
            communication, prediction = build_plans(both, [len(faces), len(chunks)], forest, self.rule)
            order = both.order[n_faces:] - n_faces
        own = PredictionPlan(0, len(points), order.to(self.device), prediction.to(self.device))
        return Plans(list(boundary_meshes), forest.to(self.device), communication.to(self.device), own)

    @torch.no_grad()
    def plan_faces(self, boundary_meshes: Mapping[str, BoundaryMesh]) -> tuple[Plans, ClusterForest]:
        """Plans without those of prediction points, and the forest of all faces where plans are built."""
        with torch.autocast(self.device.type, enabled=False):
            forest = self._forest(self._positions(boundary_meshes))
            plan = build_plan(forest, forest, self.rule)
        return Plans(list(boundary_meshes), forest.to(self.device), plan.to(self.device), None), forest

    @torch.no_grad()
    def plan_points(
        self, points: Float[Tensor, "n dims"], first: int, last: int, forest: ClusterForest, pointwise: bool
    ) -> PredictionPlan:
        """The plan of the prediction points [first, last) with all faces.

        Args:
            points: all prediction points.
            first, last: those of this chunk.
            forest: of all faces, on the device of building.
            pointwise: let every point decide alone; else a tree over the chunk's points is traversed.
        """
        with torch.autocast(self.device.type, enabled=False):
            own = points[first:last].to(device=self.build_device, dtype=self.dtype)
            if pointwise and self.rule.theta:
                order = torch.sort(morton_codes(own), stable=True).indices
                plan = build_pointwise_plan(own.index_select(0, order), forest, self.rule.theta)
            else:
                tree = self._forest([own])
                order = tree.order
                plan = build_plan(tree, forest, self.rule)
        return PredictionPlan(first, last, order.to(self.device), plan.to(self.device))

    def _forest(self, point_sets: Sequence[Tensor]) -> ClusterForest:
        return build_forest(point_sets, self.leaf_size) if self.rule.theta else loose_points(point_sets)

    def _positions(self, boundary_meshes: Mapping[str, BoundaryMesh]) -> list[Tensor]:
        return [mesh.to(dtype=self.dtype).positions.to(self.build_device) for mesh in boundary_meshes.values()]

    def chunks(self, n_points: int, n_faces: int, requested: int | Literal["auto"] | None) -> Iterator[tuple[int, int]]:
        """First and last row (the latter not included) of every chunk of prediction points; all points are in one.

        Raises:
            ValueError: the requested size is not "auto", None or a positive integer.
        """
        if requested == "auto":
            size = max(n_faces, EXACT_CHUNK) if self.rule.theta == 0 else n_faces
        elif requested is None or (isinstance(requested, int) and requested >= 1):
            size = requested or max(1, n_points)
        else:
            raise ValueError(f'prediction_chunk_size: expected "auto", None or a positive integer, found {requested!r}')
        for first in range(0, n_points, size):
            yield first, min(n_points, first + size)


@dataclass(frozen=True)
class PlanAhead:
    """Plans a sample where it is made, as in a data loader's worker; plain values that travel to other processes.

    Attributes:
        planner: on the CPU.
        kinds: boundary types in the order that the model declares them in.
        requested: prediction points that share one plan.
    """

    planner: Planner
    kinds: list[str]
    requested: int | Literal["auto"] | None

    def __call__(self, sample: Sample) -> Plans | None:
        """The plans of a sample; None for one of unusable numbers, which the model refuses in words."""
        meshes = {kind: sample.boundary_meshes[kind] for kind in self.kinds if kind in sample.boundary_meshes}
        meshes = {kind: mesh for kind, mesh in meshes.items() if mesh.n_faces}
        finite = [sample.prediction_points, *(mesh.points for mesh in meshes.values())]
        if not meshes or not all(bool(points.isfinite().all()) for points in finite):
            return None
        return self.planner.plan_sample(meshes, sample.prediction_points, self.requested)


def require_fitting(plans: Plans, points: Tensor, boundary_meshes: Mapping[str, BoundaryMesh]) -> None:
    """Refuse plans of another number of points or faces; by shapes alone, without a device sync."""
    planned = plans.prediction.last if plans.prediction else 0
    if planned != points.shape[0]:
        raise ValueError(f"plans: built for {planned} prediction points, found {points.shape[0]}; build new ones")
    sizes = plans.forest.point_offsets
    faces = {kind: high - low for kind, low, high in zip(plans.kinds, sizes, sizes[1:], strict=False)}
    found = {str(kind): mesh.n_faces for kind, mesh in boundary_meshes.items() if mesh.n_faces}
    if faces != found:
        raise ValueError(f"plans: built for the faces {faces}, found {found}; build new ones")
