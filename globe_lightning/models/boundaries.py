"""The faces of a sample in tree order: what stays the same from layer to layer, and where targets stand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from globe_lightning.fields import FieldLayout, flatten_data
from globe_lightning.mesh import BoundaryMesh
from globe_lightning.models.plans import Plans
from globe_lightning.tree.plan import InteractionPlan
from globe_lightning.tree.prefix_sums import range_means
from globe_lightning.tree.proxies import Proxies


@dataclass
class Boundary:
    """The faces of one type in tree order.

    Attributes:
        kind: the boundary type.
        first_point, n_points: its faces among those of all types.
        first_node, n_nodes: its nodes among those of all types; no nodes if none are needed.
        positions: (n_points, D) [m].
        areas: over the reference area (n_points,).
        fields: normals and physical data by name.
        start, end: range of faces of each node.
        node_positions: area-weighted centroid of each node (n_nodes, D) [m].
    """

    kind: str
    first_point: int
    n_points: int
    first_node: int
    n_nodes: int
    positions: Tensor
    areas: Tensor
    fields: dict[str, Tensor]
    start: Tensor
    end: Tensor
    node_positions: Tensor


def sort_boundaries(
    boundary_meshes: Mapping[str, BoundaryMesh],
    source_layouts: Mapping[str, FieldLayout],
    plans: Plans,
    reference_area: Float[Tensor, ""],
    use_nodes: bool,
) -> list[Boundary]:
    """The faces of every type that has some, in the order of their trees and in the precision of the area.

    Args:
        boundary_meshes: {boundary type: faces}.
        source_layouts: {boundary type: its declared per-face data}.
        plans: of these faces.
        reference_area: by which areas are divided [m^2; m in 2D].
        use_nodes: whether nodes are needed though communication does not refer to them.
    """
    dtype = reference_area.dtype
    forest = plans.forest
    out: list[Boundary] = []
    use_nodes = use_nodes or plans.communication.uses_source_nodes
    for tree, kind in enumerate(plans.kinds):
        mesh = boundary_meshes[kind].to(dtype=dtype)
        first, last = forest.point_offsets[tree : tree + 2]
        first_node, last_node = forest.node_offsets[tree : tree + 2]
        order = forest.order[first:last] - first
        layout = source_layouts[kind]
        normals, areas = mesh.normals_and_areas()
        fields = {"normals": normals.index_select(0, order)}
        for name, value in flatten_data(mesh.cell_data).items():
            shaped = value.reshape(mesh.n_faces, *layout.shape(name)).to(dtype)
            fields[f"physical.{name}"] = shaped.index_select(0, order)
        positions = mesh.positions.index_select(0, order)
        areas = areas.index_select(0, order) / reference_area
        start, end = (t[first_node:last_node] - first for t in (forest.start, forest.end))
        out.append(
            Boundary(
                kind=kind,
                first_point=first,
                n_points=last - first,
                first_node=first_node,
                n_nodes=last_node - first_node if use_nodes else 0,
                positions=positions,
                areas=areas,
                fields=fields,
                start=start,
                end=end,
                node_positions=range_means(positions, areas, start, end) if use_nodes else positions[:0],
            )
        )
    return out


@dataclass
class Targets:
    """Where the targets of a plan stand.

    Attributes:
        tables: for each source tree the target rows [points | nodes | groups] (D, rows) [m]: the mean point of a node
            depends on whether it belongs to the same boundary; proxy points do not.
        points: (n, D) [m].
        proxies: of the target nodes, in a far field of first order; they follow from the plan alone.
    """

    tables: list[Float[Tensor, "dims rows"]]
    points: Float[Tensor, "n dims"]
    proxies: Proxies | None


def point_targets(plan: InteractionPlan, points: Float[Tensor, "n dims"], n_trees: int) -> Targets:
    """A chunk's sorted points as targets of a forest of so many source trees."""
    if plan.n_proxies > 1:
        return _proxy_targets(plan, points, n_trees)
    return Targets([_with_groups(plan, points, _means(plan, points))] * n_trees, points, None)


def face_targets(plans: Plans, boundaries: list[Boundary]) -> Targets:
    """The faces of all types as targets of all: nodes of the source's type stand at their weighted centroids."""
    plan = plans.communication
    points = torch.cat([boundary.positions for boundary in boundaries])
    if plan.n_proxies > 1:
        return _proxy_targets(plan, points, len(boundaries))
    nodes = _means(plan, points)
    tables = []
    for source in boundaries:
        own = nodes
        if nodes.shape[0]:
            first, last = source.first_node, source.first_node + source.n_nodes
            own = torch.cat([nodes[:first], source.node_positions, nodes[last:]])
        tables.append(_with_groups(plan, points, own))
    return Targets(tables, points, None)


def _proxy_targets(plan: InteractionPlan, points: Tensor, n_trees: int) -> Targets:
    assert plan.boxes is not None, "plans of proxy points hold boxes"
    proxies = Proxies.of(plan.boxes)
    at = proxies.points.to(points.dtype)
    table = torch.cat([points, at.flatten(0, 1), at.index_select(0, plan.group_nodes).flatten(0, 1)])
    return Targets([table.t().contiguous()] * n_trees, points, proxies)


def _with_groups(plan: InteractionPlan, points: Tensor, nodes: Tensor) -> Tensor:
    """A target table (D, [points | nodes | groups]); a group stands at its leaf's mean point."""
    parts = [points]
    if plan.uses_target_nodes:
        parts.append(nodes)
    if plan.n_groups:
        parts.append(nodes.index_select(0, plan.group_nodes))
    return torch.cat(parts).t().contiguous()


def _means(plan: InteractionPlan, points: Tensor) -> Tensor:
    """Unweighted mean point of every target node, if any pair needs one."""
    if not (plan.uses_target_nodes or plan.n_groups):
        return points[:0]
    return range_means(points, torch.ones_like(points[:, 0]), plan.node_start, plan.node_end)
