"""Where the targets of a plan stand: points, and the mean points or proxy points of nodes and groups."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from globe_lightning.models.boundaries import Boundary
from globe_lightning.models.plans import Plans
from globe_lightning.tree.plan import InteractionPlan
from globe_lightning.tree.prefix_sums import range_means
from globe_lightning.tree.proxies import Proxies


@dataclass
class Targets:
    """Where the targets of a plan stand.

    Attributes:
        tables: for each source tree the target rows [points | nodes | groups] (D, rows) [m]: the mean point of a node
            depends on whether it belongs to the same boundary; proxy points do not.
        points: (n, D) [m].
        proxies: of [nodes | groups], in a far field of first order; they follow from the plan alone.
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
    table = torch.cat([points, proxies.points.to(points.dtype).flatten(0, 1)])
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
