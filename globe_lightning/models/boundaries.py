"""The faces of a sample in tree order: what stays the same from layer to layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from globe_lightning.fields import FieldLayout, flatten_data
from globe_lightning.mesh import BoundaryMesh
from globe_lightning.models.plans import Plans
from globe_lightning.tree.prefix_sums import range_means


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
