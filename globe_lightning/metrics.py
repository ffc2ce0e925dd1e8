"""Metrics over cases, right under any number of processes.

Every metric keeps one row per case, in float64, headed by the case's index. Rows are gathered across processes and
repeated indices dropped before anything is averaged, because a distributed sampler shows some cases twice to make
all processes' shares equal. A value that is undefined (no known truth, no spread) is left out, never reported as NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torchmetrics import Metric

MAX_OFF_SURFACE = 0.01
"""The fraction of a field's known points without area, of faces without any, at which a surface still covers them."""

ZERO_FORCE = 1e-6
"""The force coefficient up to which it counts as zero: the side force of a symmetric body is rounding alone."""


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
        # Sums of fields that were moved off the device come back to it: processes exchange rows there.
        numbers = torch.cat([value.detach().double().reshape(-1).to(self.device) for value in values])
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

    def latest_case(self) -> dict[str, float]:
        """{name: number} of the case added last in this process."""
        return dict(zip(self.names, self.rows[-1][0, 1:].tolist(), strict=True))

    def compute(self) -> dict[str, Tensor]:
        """{name: mean over cases}; {} without cases. Not finite where a case's number was not."""
        rows = self.distinct_rows()
        return dict(zip(self.names, rows[:, 1:].mean(dim=0), strict=True)) if len(rows) else {}


class FieldErrors(CaseRows):
    """Errors of predicted fields: mean absolute and squared error, relative L2 and R2.

    For a case c with errors e and truths t at its n points (points with unknown truth left out; squares of vectors
    are squared norms), MSE_c = mean |e|^2 and var_c = mean |t - mean t|^2. Means over cases of

    - ``<field>/mse``: MSE_c, in the field's own (nondimensional) unit;
    - ``<field>/mae``: mean |e|, of vectors the mean length of the error, in the field's own unit;
    - ``<field>/relative_l2``: (sum |e|^2 / sum |t|^2)^(1/2), every point counted alike;
    - ``<field>/relative_l2_x`` (``_y``, ``_z``) of vectors: the same of one component, over that component's truth;
    - ``<field>/relative_l2_area``: (sum a |e|^2 / sum a |t|^2)^(1/2), a the surface area that a point stands for. Only
      where a surface covers all points at which the field is known;
    - ``<field>/mse_case_std`` and ``<field>/r2_case_std``: MSE_c / var_c and 1 - MSE_c / var_c, each case measured by
      its own standard deviation (as the GLOBE paper does);
    - ``<field>/mse_train_std`` and ``<field>/r2_train_std``: the same with one variance for all cases, that of the
      train set (as the AirFRANS baselines do). Where it is unknown the variance over all points of the evaluated
      cases stands in, and the names end in ``_set_std``.

    Args:
        ranks: {flattened field name: rank}.
        n_spatial_dims: dimension D of vectors.
    """

    # A field's columns: these, then the sums of each component of t, |t|^2 and |e|^2.
    _SUMS = ("n", "squared_error", "squared_truth", "absolute_error", "area_error", "area_truth")

    def __init__(self, ranks: Mapping[str, int], n_spatial_dims: int) -> None:
        self._widths = {name: n_spatial_dims if rank else 1 for name, rank in ranks.items()}
        super().__init__(1 + sum(len(self._SUMS) + 3 * width for width in self._widths.values()))
        self.train_variances: dict[str, float] = {}

    def update(
        self,
        index: int,
        prediction: Mapping[str, Tensor],
        truth: Mapping[str, Tensor],
        areas: Float[Tensor, " n"] | None = None,
    ) -> None:
        """Add one case.

        Args:
            index: the case's.
            prediction: fields by name, scalars (n,) and vectors (n, D).
            truth: the same; NaN is left out.
            areas: the area that each point stands for, 0 off the surface; None without a surface.
        """
        values = []
        for name in self._widths:
            target = truth[name].reshape(truth[name].shape[0], -1).double()
            known = ~torch.isnan(target).any(dim=1, keepdim=True)
            target = torch.where(known, target, 0.0)
            error = torch.where(known, prediction[name].reshape(target.shape).double(), 0.0) - target
            error_squares, target_squares = error.square(), target.square()
            error_square = error_squares.sum(dim=1)
            values += [known.sum(), error_square.sum(), target_squares.sum(), error_square.sqrt().sum()]
            if areas is None:
                values.append(target.new_full((2,), torch.nan))
            else:
                weights = torch.where(known.squeeze(1), areas.to(target), 0.0)
                off_surface = known.sum() - (weights > 0).sum()
                sums = torch.stack([weights @ error_square, weights @ target_squares.sum(dim=1)])
                values.append(torch.where(off_surface <= MAX_OFF_SURFACE * known.sum(), sums, torch.nan))
            values += [target.sum(dim=0), target_squares.sum(dim=0), error_squares.sum(dim=0)]
        self.add_row(index, values)

    def latest_case(self) -> dict[str, float]:
        """{"<field>/<metric>": value} of the case added last in this process, as far as defined for one case."""
        values = self._by_case(self.rows[-1]).items()
        return {name: float(value) for name, value in values if bool(torch.isfinite(value).all()) and len(value)}

    def _blocks(self, rows: Float[Tensor, "cases columns"]) -> Iterator[tuple[str, int, dict[str, Tensor]]]:
        """Every field's name, width and sums over the cases in which it is known."""
        column = 1
        for name, width in self._widths.items():
            size = len(self._SUMS) + 3 * width
            block = rows[:, column : column + size]
            column += size
            block = block[block[:, 0] > 0]
            sums = dict(zip(self._SUMS, block.unbind(1), strict=False))
            parts = block[:, len(self._SUMS) :].split(width, dim=1)
            yield name, width, sums | dict(zip(("sums", "truth_parts", "error_parts"), parts, strict=True))

    def _by_case(self, rows: Float[Tensor, "cases columns"]) -> dict[str, Tensor]:
        """Every metric that is defined for a single case: its values, (cases,); not finite where undefined."""
        out = {}
        for name, width, block in self._blocks(rows):
            n = block["n"]
            mse = block["squared_error"] / n
            variance = block["squared_truth"] / n - (block["sums"] / n.unsqueeze(1)).square().sum(dim=1)
            found = {
                "mse": mse,
                "mae": block["absolute_error"] / n,
                "relative_l2": (block["squared_error"] / block["squared_truth"]).sqrt(),
                "relative_l2_area": (block["area_error"] / block["area_truth"]).sqrt(),
                "mse_case_std": mse / variance,
                "r2_case_std": 1 - mse / variance,
            }
            if width > 1:
                for part, axis in enumerate("xyz"[:width]):
                    ratio = block["error_parts"][:, part] / block["truth_parts"][:, part]
                    found[f"relative_l2_{axis}"] = ratio.sqrt()
            out.update({f"{name}/{key}": value for key, value in found.items()})
        return out

    def compute(self) -> dict[str, Tensor]:
        """{"<field>/<metric>": value}; what is undefined is left out."""
        rows = self.distinct_rows()
        # An area counts only where all cases have theirs: the mean of some would pass for that of all.
        results = {name: values.mean() for name, values in self._by_case(rows).items()}
        for name, _, block in self._blocks(rows):
            n = block["n"]
            if name in self.train_variances:
                over, variance = "train", torch.as_tensor(self.train_variances[name], dtype=torch.float64)
            else:
                mean = block["sums"].sum(dim=0) / n.sum()
                over, variance = "set", block["squared_truth"].sum() / n.sum() - mean.square().sum()
            by_set = (block["squared_error"] / n).mean() / variance.to(n)
            results[f"{name}/mse_{over}_std"] = by_set
            results[f"{name}/r2_{over}_std"] = 1 - by_set
        return {key: value for key, value in results.items() if bool(torch.isfinite(value))}


class ForceErrors(CaseRows):
    """Errors of predicted force coefficients over cases, in the coefficients' own unit if not said otherwise.

    The truth is the coefficient integrated from the true fields over the same surface, with the same reference area;
    a name that ends in ``_own`` belongs to the case's own area, one without to the area common to all cases.
    ``forces/<coefficient>/``

    - ``mae``: mean |error|; ``rmse``: (mean error^2)^(1/2);
    - ``relative_error``: mean |error| / |truth|, cases of a truth of zero (:data:`ZERO_FORCE`) left out;
    - ``r2``: 1 - sum error^2 / sum (truth - mean truth)^2, from 2 cases with spread on;
    - ``spearman``: rank correlation, from 2 cases with spread on;
    - ``rmse_solver``: as ``rmse``, but against the solver's own coefficients, over the cases that state them.
    """

    def __init__(self) -> None:
        super().__init__(5)
        self.names: list[str] = []

    def update(
        self,
        index: int,
        prediction: Mapping[str, Tensor],
        truth: Mapping[str, Tensor],
        solver: Mapping[str, float] | None = None,
    ) -> None:
        """Add one case: its index and its coefficients, {name: scalar}; the same names in every case."""
        if sorted(truth) != self.names and self.names:
            raise ValueError(f"force coefficients: this case has {sorted(truth)}, earlier ones {self.names}")
        self.names = sorted(truth)
        for number, name in enumerate(self.names):
            # One row per coefficient: a row's key is unique per case and coefficient.
            key = index * len(self.names) + number
            stated = (solver or {}).get(name, torch.nan)
            numbers = [truth[name].new_tensor(value) for value in (number, stated)]
            self.add_row(key, [numbers[0], prediction[name], truth[name], numbers[1]])

    def compute(self) -> dict[str, Tensor]:
        """{"forces/<coefficient>/<metric>": value}; what is undefined is left out."""
        rows = self.distinct_rows()
        results: dict[str, Tensor] = {}
        for number, name in enumerate(self.names):
            mine = rows[rows[:, 1] == number][:, 2:]
            predicted, true, solver = mine[~torch.isnan(mine[:, 1])].unbind(1)
            error = predicted - true
            spread = (true - true.mean()).square().sum() if len(true) > 1 else torch.zeros_like(error.sum())
            stated = ~torch.isnan(solver)
            found = {
                "mae": error.abs().mean(),
                "rmse": error.square().mean().sqrt(),
                "relative_error": (error / true).abs()[true.abs() > ZERO_FORCE].mean(),
                "r2": 1 - error.square().sum() / spread,
                "rmse_solver": (predicted - solver)[stated].square().mean().sqrt(),
            }
            if len(true) > 1 and predicted.unique().numel() > 1 and true.unique().numel() > 1:
                found["spearman"] = torch.corrcoef(torch.stack([_ranks(predicted), _ranks(true)]))[0, 1]
            results.update({f"forces/{name}/{key}": value for key, value in found.items()})
        return {key: value for key, value in results.items() if bool(torch.isfinite(value))}


def _ranks(values: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """The rank of every value, equal values sharing the mean of theirs."""
    below, equal = (values > values.unsqueeze(1)), (values == values.unsqueeze(1))
    return below.sum(dim=0).double() + equal.sum(dim=0).double() / 2


class RunningMean(Metric):
    """The mean of scalars, in float64; those that are not finite are left out, and the mean of none is not finite."""

    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, value: Tensor) -> None:
        """Add one scalar."""
        value = value.detach().double()
        finite = torch.isfinite(value)
        self.total = self.total + torch.where(finite, value, 0.0)
        self.count = self.count + finite

    def restore(self, total: Tensor, count: Tensor) -> None:
        """Go on from sums of before."""
        self.total, self.count = total, count
        self._update_count, self._computed = 1, None

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
        """Add the targets of one case; what is not finite is left out."""
        rows = []
        for name in self._names:
            target = truth[name].reshape(truth[name].shape[0], -1).double()
            known = torch.isfinite(target).all(dim=1, keepdim=True)
            target = torch.where(known, target, 0.0)
            row = torch.cat([known.sum().double().reshape(1), target.square().sum().reshape(1), target.sum(dim=0)])
            rows.append(torch.nn.functional.pad(row, (0, self.sums.shape[1] - row.shape[0])))
        self.sums = self.sums + torch.stack(rows)

    def compute(self) -> dict[str, float]:
        """{field: variance}, the squared norm of vectors; fields never seen or without spread are left out."""
        n = self.sums[:, 0]
        variances = self.sums[:, 1] / n - (self.sums[:, 2:] / n.unsqueeze(1)).square().sum(dim=1)
        return {name: value for name, value in zip(self._names, variances.tolist(), strict=True) if value > 0}
