"""The opening rule: which nodes act, and are acted on, as one, and where their far pairs are evaluated."""

from __future__ import annotations

from dataclasses import dataclass

from globe_lightning.tree.cluster_tree import ClusterForest
from globe_lightning.tree.far_targets import FarTargets, Limit


@dataclass(frozen=True)
class OpeningRule:
    """A target node T and a source node S are a far pair when (a D_T + D_S) < theta gap, of their boxes' diagonals.

    Attributes:
        theta: opening angle; 0 makes everything exact.
        expand_far_targets: evaluate far pairs at every target of the node instead of once at its mean point.
        target_size_weight: a.
        far_field_order: 0 to evaluate far pairs at the mean point of the target node, 1 at its proxy points.
        max_far_targets: points of the largest target node (but a leaf) that is evaluated as one, see ``far_targets``;
            None for no limit.

    Raises:
        ValueError: a value out of its range, or an order with expanded targets.
    """

    theta: float
    expand_far_targets: bool = False
    target_size_weight: float = 1.0
    far_field_order: int = 0
    max_far_targets: Limit = None

    def __post_init__(self) -> None:
        most, order = self.max_far_targets, self.far_field_order
        alone = "0 with expand_far_targets: true, since there every far pair is evaluated at every target"
        fits = most in ("auto", None) or (isinstance(most, int) and most >= 1)
        for holds, argument, expected in (
            (self.theta >= 0, "theta", ">= 0"),
            (self.target_size_weight > 0, "target_size_weight", "a positive number"),
            (order in (0, 1), "far_field_order", "0 or 1"),
            (order == 0 or not self.expand_far_targets, "far_field_order", alone),
            (fits, "max_far_targets", '"auto", None or a positive integer'),
        ):
            if not holds:
                raise ValueError(f"{argument}: expected {expected}, found {getattr(self, argument)!r}")

    def proxies_of(self, n_dims: int) -> int:
        """Rows of a target node: places where its far pairs are evaluated."""
        return n_dims + 1 if self.far_field_order else 1

    def far_targets(self, targets: ClusterForest) -> FarTargets:
        """The rows at which the far pairs of a forest's nodes are evaluated."""
        if self.expand_far_targets:
            return FarTargets.at_points(targets)
        return FarTargets.of(targets, self.proxies_of(targets.points.shape[1]), self.max_far_targets)
