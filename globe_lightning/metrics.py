"""Metrics over cases, right under any number of processes.

Every metric keeps one row per case, in float64, headed by the case's index. Rows are gathered across processes and
repeated indices dropped before anything is averaged, because a distributed sampler shows some cases twice to make
all processes' shares equal. A value that is undefined (no known truth, no spread) is left out, never reported as NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torchmetrics import Metric


class CaseRows(Metric):
    """Base of the metrics: rows of float64 numbers, the first the case's index.

    Args:
        n_columns: numbers in a row, the index included.
    """

    full_state_update = False
    rows: list[Tensor]

    def __init__(self, n_columns: int) -> None:
        super().__init__()
        self.n_columns = n_columns
        self.add_state("rows", default=[], dist_reduce_fx="cat")

    def add_row(self, index: int, values: list[Tensor]) -> None:
        """Add the row of one case; ``values`` are its other numbers, flattened and joined."""
        numbers = torch.cat([value.detach().double().reshape(-1) for value in values])
        self.rows.append(torch.cat([numbers.new_tensor([index]), numbers]).unsqueeze(0))

    def distinct_rows(self) -> Float[Tensor, "cases columns"]:
        """The rows of all cases, sorted by index, each index once (the first row seen of it)."""
        rows = self.rows if isinstance(self.rows, Tensor) else torch.cat([self._no_rows(), *self.rows])
        rows = rows[torch.argsort(rows[:, 0], stable=True)]
        first = torch.ones(rows.shape[0], dtype=torch.bool, device=rows.device)
        first[1:] = rows[1:, 0] != rows[:-1, 0]
        return rows[first]

    def _no_rows(self) -> Tensor:
        return torch.zeros(0, self.n_columns, dtype=torch.float64, device=self.device)

    def _sync_dist(self, *args: Any, **kwargs: Any) -> None:
        # A process without cases must still bring a (0, n_columns) tensor to the gathering.
        self.rows = [torch.cat([self._no_rows(), *self.rows])]
        super()._sync_dist(*args, **kwargs)


class CaseMeans(CaseRows):
    """Means over cases of named numbers, such as losses.

    Args:
        names: what the numbers are called.
    """

    def __init__(self, names: list[str]) -> None:
        super().__init__(1 + len(names))
        self.names = list(names)

    def update(self, index: int, values: Mapping[str, Tensor]) -> None:
        """Add one case: its index and {name: scalar}."""
        self.add_row(index, [values[name] for name in self.names])

    def compute(self) -> dict[str, Tensor]:
        """{name: mean over cases}; {} without cases. Not finite where a case's number was not."""
        rows = self.distinct_rows()
        return dict(zip(self.names, rows[:, 1:].mean(dim=0), strict=True)) if len(rows) else {}


class FieldErrors(CaseRows):
    """Errors of predicted fields: mean squared error, relative L2 and R2.

    For a case c with errors e and truths t at its n points (points with unknown truth left out; squares of vectors
    are squared norms), MSE_c = mean |e|^2 and var_c = mean |t - mean t|^2. Means over cases of

    - ``<field>/mse``: MSE_c, in the field's own (nondimensional) unit;
    - ``<field>/relative_l2``: (sum |e|^2 / sum |t|^2)^(1/2);
    - ``<field>/mse_case_std`` and ``<field>/r2_case_std``: MSE_c / var_c and 1 - MSE_c / var_c, each case measured by
      its own standard deviation (as the GLOBE paper does);
    - ``<field>/mse_train_std`` and ``<field>/r2_train_std``: the same with one variance for all cases, that of the
      train set (as the AirFRANS baselines do). Where it is unknown the variance over all points of the evaluated
      cases stands in, and the names end in ``_set_std``.

    Args:
        ranks: {flattened field name: rank}.
        n_spatial_dims: dimension D of vectors.
    """

    def __init__(self, ranks: Mapping[str, int], n_spatial_dims: int) -> None:
        self._widths = {name: n_spatial_dims if rank else 1 for name, rank in ranks.items()}
        super().__init__(1 + sum(3 + width for width in self._widths.values()))
        self.train_variances: dict[str, float] = {}

    def update(self, index: int, prediction: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> None:
        """Add one case: its index and its fields, scalars (n,) and vectors (n, D); NaN truth is left out."""
        values = []
        for name in self._widths:
            target = truth[name].reshape(truth[name].shape[0], -1).double()
            known = ~torch.isnan(target).any(dim=1, keepdim=True)
            target = torch.where(known, target, 0.0)
            error = torch.where(known, prediction[name].reshape(target.shape).double(), 0.0) - target
            values += [known.sum(), error.square().sum(), target.square().sum(), target.sum(dim=0)]
        self.add_row(index, values)

    def compute(self) -> dict[str, Tensor]:
        """{"<field>/<metric>": value}; what is undefined is left out."""
        rows = self.distinct_rows()
        results: dict[str, Tensor] = {}
        column = 1
        for name, width in self._widths.items():
            block = rows[:, column : column + 3 + width]
            column += 3 + width
            block = block[block[:, 0] > 0]
            n, squared_error, squared_truth, sums = block[:, 0], block[:, 1], block[:, 2], block[:, 3:]
            mse = squared_error / n
            by_case = mse / (squared_truth / n - (sums / n.unsqueeze(1)).square().sum(dim=1))
            if name in self.train_variances:
                over, variance = "train", torch.as_tensor(self.train_variances[name], dtype=torch.float64)
            else:
                over = "set"
                variance = squared_truth.sum() / n.sum() - (sums.sum(dim=0) / n.sum()).square().sum()
            by_set = mse.mean() / variance.to(mse)
            found = {
                "mse": mse.mean(),
                "relative_l2": (squared_error / squared_truth).sqrt().mean(),
                "mse_case_std": by_case.mean(),
                "r2_case_std": 1 - by_case.mean(),
                f"mse_{over}_std": by_set,
                f"r2_{over}_std": 1 - by_set,
            }
            results.update({f"{name}/{key}": value for key, value in found.items()})
        return {key: value for key, value in results.items() if bool(torch.isfinite(value))}


class ForceErrors(CaseRows):
    """Errors of predicted force coefficients over cases.

    ``forces/<coefficient>/`` ``mae`` (mean |error|), ``relative_error`` (mean |error| / |truth|, cases of zero truth
    left out) and ``spearman`` (rank correlation, from 2 cases with spread on).
    """

    def __init__(self) -> None:
        super().__init__(4)
        self.names: list[str] = []

    def update(self, index: int, prediction: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> None:
        """Add one case: its index and its coefficients, {name: scalar}; the same names in every case."""
        if sorted(truth) != self.names and self.names:
            raise ValueError(f"force coefficients: this case has {sorted(truth)}, earlier ones {self.names}")
        self.names = sorted(truth)
        for number, name in enumerate(self.names):
            # One row per coefficient: a row's key is unique per case and coefficient.
            key = index * len(self.names) + number
            self.add_row(key, [truth[name].new_tensor(number), prediction[name], truth[name]])

    def compute(self) -> dict[str, Tensor]:
        """{"forces/<coefficient>/<metric>": value}; what is undefined is left out."""
        rows = self.distinct_rows()
        results: dict[str, Tensor] = {}
        for number, name in enumerate(self.names):
            mine = rows[rows[:, 1] == number]
            predicted, true = mine[:, 2], mine[:, 3]
            known = ~torch.isnan(true)
            predicted, true = predicted[known], true[known]
            error = (predicted - true).abs()
            if len(true):
                results[f"forces/{name}/mae"] = error.mean()
                results[f"forces/{name}/relative_error"] = (error / true.abs())[true != 0].mean()
            if len(true) > 1 and predicted.unique().numel() > 1 and true.unique().numel() > 1:
                results[f"forces/{name}/spearman"] = torch.corrcoef(torch.stack([_ranks(predicted), _ranks(true)]))[
                    0, 1
                ]
        return {key: value for key, value in results.items() if bool(torch.isfinite(value))}


def _ranks(values: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """The rank of every value, equal values sharing the mean of theirs."""
    below, equal = (values > values.unsqueeze(1)), (values == values.unsqueeze(1))
    return below.sum(dim=0).double() + equal.sum(dim=0).double() / 2


class RunningMean(Metric):
    """The mean of scalars, in float64; not finite once one of them is not."""

    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, value: Tensor) -> None:
        """Add one scalar."""
        self.total = self.total + value.detach().double()
        self.count = self.count + 1

    def compute(self) -> Tensor:
        """The mean so far."""
        return self.total / self.count


class TargetVariances(Metric):
    """Variance of every target field over the train set, gathered from the points drawn in training.

    Its sums are saved with the model, so that a trained model knows by which spread to measure its errors.

    Args:
        ranks: {flattened field name: rank}.
        n_spatial_dims: dimension D of vectors.
    """

    full_state_update = False
    sums: Tensor

    def __init__(self, ranks: Mapping[str, int], n_spatial_dims: int) -> None:
        super().__init__()
        self._names = list(ranks)
        # Columns: number of points, sum of squares, sum of each component.
        self.add_state(
            "sums",
            torch.zeros(len(ranks), 2 + n_spatial_dims, dtype=torch.float64),
            dist_reduce_fx="sum",
            persistent=True,
        )

    @property
    def known(self) -> bool:
        """Whether any point has been seen, in this process or in the training that a checkpoint comes from."""
        return bool(self.sums.any())

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._computed = None
        self._update_count = max(self._update_count, 1)

    def update(self, truth: Mapping[str, Tensor]) -> None:
        """Add the targets of one case; NaN is left out."""
        rows = []
        for name in self._names:
            target = truth[name].reshape(truth[name].shape[0], -1).double()
            known = ~torch.isnan(target).any(dim=1, keepdim=True)
            target = torch.where(known, target, 0.0)
            row = torch.cat([known.sum().double().reshape(1), target.square().sum().reshape(1), target.sum(dim=0)])
            rows.append(torch.nn.functional.pad(row, (0, self.sums.shape[1] - row.shape[0])))
        self.sums = self.sums + torch.stack(rows)

    def compute(self) -> dict[str, float]:
        """{field: variance}, the squared norm of vectors; fields never seen or without spread are left out."""
        n = self.sums[:, 0]
        variances = self.sums[:, 1] / n - (self.sums[:, 2:] / n.unsqueeze(1)).square().sum(dim=1)
        return {name: value for name, value in zip(self._names, variances.tolist(), strict=True) if value > 0}
