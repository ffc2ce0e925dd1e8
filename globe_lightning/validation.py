"""Everything that can be wrong with a sample, said before any computation: which array, what was found and expected.

Shapes, dtypes and names are checked on the host; all numbers together with one device sync.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from globe_lightning.fields import FieldLayout, flatten_data
from globe_lightning.mesh import BoundaryMesh


class NumberChecks:
    """Counts of bad numbers, gathered without a sync and judged with one.

    Args:
        dtype: precision in which the numbers will be used; what overflows in it is infinite. None for their own.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype
        self._counts: list[Tensor] = []
        self._messages: list[str] = []

    def add(self, bad: Tensor, message: str) -> None:
        """Note a mask of bad entries; ``message`` is formatted with ``count`` and ``total``."""
        self._counts.append(bad.sum())
        self._messages.append(message.replace("{total}", str(bad.numel())))

    def finite(self, value: Tensor, name: str) -> None:
        """Demand finite entries."""
        if value.is_floating_point() and value.numel():
            bad = ~torch.isfinite(value.to(dtype=self.dtype))
            self.add(bad, f"{name}: {{count}} of {{total}} entries are NaN or infinite; remove them")

    def judge(self) -> None:
        """Raise a ValueError that lists everything found; one device sync."""
        if not self._counts:
            return
        device = self._counts[0].device
        counts = torch.stack([count.to(device, non_blocking=True) for count in self._counts]).tolist()
        found = [
            message.replace("{count}", str(count))
            for count, message in zip(counts, self._messages, strict=True)
            if count
        ]
        if found:
            raise ValueError("bad numbers in the sample:\n  " + "\n  ".join(found))


def check_geometry(
    checks: NumberChecks,
    prediction_points: Tensor,
    boundary_meshes: Mapping[str, BoundaryMesh],
    source_layouts: Mapping[str, FieldLayout],
    n_dims: int,
) -> None:
    """Check points and meshes against what the model declares.

    Raises:
        TypeError: something is not a tensor or a BoundaryMesh.
        ValueError: a shape, dtype, boundary type or data field does not fit.
    """
    if not isinstance(prediction_points, Tensor):
        raise TypeError(f"prediction_points: expected a tensor, found {type(prediction_points).__name__}")
    if prediction_points.ndim != 2 or prediction_points.shape[1] != n_dims or not prediction_points.is_floating_point():
        raise ValueError(
            f"prediction_points: expected floating-point (n, {n_dims}), found {prediction_points.dtype} "
            f"{tuple(prediction_points.shape)}"
        )
    checks.finite(prediction_points, "prediction_points")
    unknown = sorted(set(map(str, boundary_meshes.keys())) - set(source_layouts))
    if unknown:
        raise ValueError(
            f"boundary_meshes: the model does not declare {unknown}; it declares {sorted(source_layouts)} "
            "(boundary_source_data_ranks)"
        )
    n_faces = 0
    for kind, mesh in boundary_meshes.items():
        name = f"boundary_meshes[{kind!r}]"
        if not isinstance(mesh, BoundaryMesh):
            raise TypeError(f"{name}: expected a BoundaryMesh, found {type(mesh).__name__}")
        if mesh.n_dims != n_dims:
            raise ValueError(f"{name}: the model is {n_dims}D, the mesh {mesh.n_dims}D")
        _check_fields(checks, mesh.cell_data, source_layouts[kind], (mesh.n_faces,), f"{name}.cell_data")
        checks.finite(mesh.points, f"{name}.points")
        if mesh.n_faces:
            n_faces += mesh.n_faces
            outside = (mesh.cells < 0) | (mesh.cells >= mesh.points.shape[0])
            checks.add(
                outside,
                f"{name}.cells: {{count}} of {{total}} indices lie outside 0 … {mesh.points.shape[0] - 1} (the points)",
            )
        if mesh.measure_weights is not None:
            checks.finite(mesh.measure_weights, f"{name}.measure_weights")
            checks.add(mesh.measure_weights < 0, f"{name}.measure_weights: {{count}} of {{total}} are negative")
        if mesh.face_positions is not None:
            checks.finite(mesh.face_positions, f"{name}.face_positions")
    if n_faces == 0:
        raise ValueError(
            "boundary_meshes: no faces at all; GLOBE sums over boundary faces, so at least one type must have some "
            f"(types given: {sorted(map(str, boundary_meshes.keys()))})"
        )


def check_conditions(
    checks: NumberChecks,
    reference_lengths: Mapping[str, Any],
    reference_length_names: list[str],
    global_data: Mapping[str, Any] | TensorDictBase | None,
    global_layout: FieldLayout,
) -> None:
    """Check reference lengths and global data against what the model declares.

    Raises:
        ValueError: a name is missing or unknown, or a shape does not fit.
    """
    given = set(map(str, reference_lengths.keys()))
    if given != set(reference_length_names):
        raise ValueError(
            f"reference_lengths: expected {reference_length_names}, found {sorted(given)} (reference_length_names)"
        )
    for name in reference_length_names:
        length = torch.as_tensor(reference_lengths[name], dtype=checks.dtype)
        if length.numel() != 1:
            raise ValueError(f"reference_lengths[{name!r}]: expected one number, found shape {tuple(length.shape)}")
        checks.add(
            ~((length > 0) & torch.isfinite(length)).reshape(1),
            f"reference_lengths[{name!r}]: expected a positive finite length in metres, found another number "
            "({count} of {total})",
        )
    _check_fields(checks, global_data, global_layout, (), "global_data")


def _check_fields(
    checks: NumberChecks,
    data: Mapping[str, Any] | TensorDictBase | None,
    layout: FieldLayout,
    leading: tuple[int, ...],
    name: str,
) -> None:
    flat = flatten_data(data)
    missing, unknown = sorted(set(layout.ranks) - set(flat)), sorted(set(flat) - set(layout.ranks))
    if missing or unknown:
        raise ValueError(
            f"{name}: expected the fields {sorted(layout.ranks)}, found {sorted(flat)}"
            + (f"; missing {missing}" if missing else "")
            + (f"; not declared {unknown}" if unknown else "")
        )
    for key, value in flat.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{name}[{key!r}]: expected a tensor, found {type(value).__name__}")
        expected = (*leading, *layout.shape(key))
        # A scalar may come as (n,) or (n, 1), a global one as () or (1,).
        allowed = {expected} if layout.ranks[key] else {expected, (*expected, 1)}
        if tuple(value.shape) not in allowed:
            raise ValueError(f"{name}[{key!r}]: expected shape {expected}, found {tuple(value.shape)}")
        checks.finite(value, f"{name}[{key!r}]")
