"""The metrics of a stage, validation or test: losses, field errors and force errors over its cases."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from globe_lightning.fields import flatten_data
from globe_lightning.forces import can_integrate, force_coefficients, point_areas
from globe_lightning.metrics import CaseMeans, FieldErrors, ForceErrors
from globe_lightning.sample import Sample


class StageMetrics(nn.Module):
    """Gathers cases and says their metrics, the same in all processes.

    Args:
        ranks: {flattened field name: rank}.
        n_spatial_dims: dimension D of vectors.
    """

    def __init__(self, ranks: Mapping[str, int], n_spatial_dims: int) -> None:
        super().__init__()
        self.losses = CaseMeans(["loss", *(f"loss/{name}" for name in ranks)])
        self.fields = FieldErrors(ranks, n_spatial_dims)
        self.forces = ForceErrors()

    def add_case(self, sample: Sample, prediction: Mapping[str, Tensor], losses: Mapping[str, Tensor]) -> None:
        """Add a case.

        Args:
            sample: with its truth.
            prediction: {field: values at the sample's points}, scalars (n,) and vectors (n, D).
            losses: {field: loss}.
        """
        truth = flatten_data(sample.targets)
        values = {"loss": torch.stack(list(losses.values())).sum()}
        self.losses.update(sample.index, values | {f"loss/{name}": loss for name, loss in losses.items()})
        surface = sample.force_surface
        areas = None if surface is None else point_areas(surface, sample.prediction_points.shape[0])
        self.fields.update(sample.index, prediction, truth, areas)
        if can_integrate(surface, list(prediction)):
            assert surface is not None
            predicted, true = (force_coefficients(surface, fields).total for fields in (prediction, truth))
            self.forces.update(sample.index, predicted, true, surface.solver_coefficients)

    def latest_case(self) -> dict[str, float]:
        """Losses and field errors of the case that this process added last, {"<field>/<metric>": value}."""
        return {**self.losses.latest_case(), **self.fields.latest_case()}

    def take(self, train_variances: Mapping[str, float]) -> dict[str, Tensor]:
        """The metrics over the cases of all processes, {name: scalar}; begins anew.

        Args:
            train_variances: {field: variance over the train set} where known.
        """
        self.fields.train_variances = dict(train_variances)
        metrics = (self.losses, self.fields, self.forces)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*was called before the ``update`` method")  # no forces here
            values = {name: value for metric in metrics for name, value in metric.compute().items()}
        for metric in metrics:
            metric.reset()
        return values
