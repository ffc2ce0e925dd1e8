"""AirFRANS: two-dimensional RANS flow over airfoils (Bonnet et al., arXiv:2212.07564).

Layout: ``<root>/manifest.json`` with the lists ``full_train``, ``full_test``, ``scarce_train``, ``reynolds_train``,
``reynolds_test``, ``aoa_train``, ``aoa_test``, and per case ``<root>/<case>/<case>_internal.vtu``,
``_aerofoil.vtp`` and ``_freestream.vtp``. Pressure is kinematic, p/rho [m^2/s^2].
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from datamodules.airfrans_source import (
    FREESTREAM,
    PRESSURE,
    SHEAR,
    TOTAL_PRESSURE,
    VELOCITY,
    VISCOSITY,
    AirFRANSSource,
)
from datamodules.base import ORIENTATIONS, SAMPLES_LICENCE, MeshDataModule, dataset_root, require_choice, require_counts
from globe_lightning.sample import Sample, SampleSchema

if TYPE_CHECKING:
    import pyvista as pv

TASKS = ("full", "scarce", "reynolds", "aoa")
ENVIRONMENT_VARIABLE = "AIRFRANS_DATA_DIR"
SAMPLES = Path(__file__).parent / "samples" / "airfoils"


class AirFRANSDataModule(MeshDataModule):
    """AirFRANS cases as samples, one case a step.

    Targets: ``ΔU/|U_inf|`` (vector), ``C_p``, ``C_pt``, ``ln(1+nut/nu)`` and, on the airfoil only, ``C_F,shear``
    (vector). Training draws points anew at every epoch. Validation, test and prediction hold all wall points and a
    force surface, so that lift and drag integrate; test and prediction hold all points.

    Args:
        root: the dataset's folder; None takes the environment variable ``AIRFRANS_DATA_DIR``; "samples" the few cases
            that ship with this package.
        task: "full", "scarce", "reynolds" or "aoa"; "scarce" tests on the full task's test list.
        n_train_points: prediction points a training step, drawn without repetition; None takes all.
        n_train_wall_points: that many of them are drawn from the wall; 0 draws all points alike.
        n_validation_points: points of a validation sample, the wall's and a fixed draw of others; None takes all.
        n_boundary_faces: airfoil segments that act as sources, a random subset whose lengths are scaled by one factor
            to the whole airfoil's length; None takes all. Holds in every split, so that a model meets the density it
            was trained at: training draws anew at every epoch, the others once for good. Forces integrate over all.
        random_face_positions: training places each segment at a random point of it instead of its middle.
        orientation: where source normals point: "outward" into the fluid, "inward" into the body, or "file" as the
            file's winding has it.
        force_normals: how forces integrate. "vertex" averages the normals at a segment's ends, as the ``airfrans``
            package does, so that coefficients compare with published ones; at a sharp trailing edge that misses part
            of the pressure drag, up to 9 % of it on the shipped meshes. "face" takes each segment's own normal.
        cache_dir: see :class:`~datamodules.base.MeshDataModule`; the shipped cases are cached in the user's cache.
        validation_fraction: share of the train list set aside for validation, at least one case.
        n_validation: number of cases set aside; goes before the fraction.
        split_seed: chooses which cases are set aside.
        predict_split: what ``predict`` runs over: "test", "val" or "train".
        num_workers: loader processes; None takes what the CPUs allow, at most 4.
        pin_memory: page-locked samples; None where a GPU is present.
        persistent_workers: keep loader processes between epochs.
        seed: seed of all draws.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        root: str | None = None,
        task: str = "full",
        n_train_points: int | None = 2048,
        n_train_wall_points: int = 0,
        n_validation_points: int | None = None,
        n_boundary_faces: int | None = None,
        random_face_positions: bool = True,
        orientation: str = "outward",
        force_normals: str = "vertex",
        cache_dir: str | None = None,
        validation_fraction: float = 0.1,
        n_validation: int | None = None,
        split_seed: int = 0,
        predict_split: str = "test",
        num_workers: int | None = None,
        pin_memory: bool | None = None,
        persistent_workers: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(
            cache_dir=cache_dir,
            validation_fraction=validation_fraction,
            n_validation=n_validation,
            split_seed=split_seed,
            predict_split=predict_split,
            num_workers=num_workers,
            pin_memory=pin_memory,
            persistent_workers=persistent_workers,
            seed=seed,
        )
        require_choice("task", task, TASKS)
        require_choice("orientation", orientation, ORIENTATIONS)
        require_choice("force_normals", force_normals, ("vertex", "face"))
        require_counts(
            n_train_points=n_train_points, n_validation_points=n_validation_points, n_boundary_faces=n_boundary_faces
        )
        if n_train_wall_points < 0 or (n_train_points is not None and n_train_wall_points > n_train_points):
            raise ValueError(
                f"n_train_wall_points: expected 0 to n_train_points ({n_train_points}), found {n_train_wall_points}"
            )
        self.root = root
        self.task = task
        self._options: dict[str, Any] = {
            "n_train_points": n_train_points,
            "n_train_wall_points": n_train_wall_points,
            "n_validation_points": n_validation_points,
            "n_boundary_faces": n_boundary_faces,
            "random_face_positions": random_face_positions,
            "orientation": orientation,
            "force_normals": force_normals,
        }

    @property
    def schema(self) -> SampleSchema:
        """Fields, boundary types, reference lengths and global data of every sample."""
        return SampleSchema(
            n_spatial_dims=2,
            output_field_ranks={VELOCITY: 1, PRESSURE: 0, TOTAL_PRESSURE: 0, VISCOSITY: 0, SHEAR: 1},
            boundary_source_data_ranks={"no_slip": {}},
            reference_length_names=["chord", "delta_FS"],
            global_data_ranks={FREESTREAM: 1},
        )

    def geometry_arguments(self) -> dict[str, Any]:
        """How samples were prepared, as arguments of :class:`~datamodules.geometry.GeometryDataModule`."""
        return {name: self._options[name] for name in ("n_boundary_faces", "orientation", "force_normals")}

    @property
    def licence(self) -> str:
        """The licence of the data."""
        return SAMPLES_LICENCE if self.root == "samples" else "ODbL-1.0"

    def root_path(self) -> Path:
        """The dataset's folder.

        Raises:
            ValueError: neither ``root`` nor the environment variable is set.
            FileNotFoundError: there is no such folder.
        """
        return dataset_root(self.root, ENVIRONMENT_VARIABLE, SAMPLES, "AirFRANS", "manifest.json")

    def root_is_read_only(self, root: Path) -> bool:
        """The package's own folder is never written to."""
        return root == SAMPLES.resolve()

    def make_source(self) -> AirFRANSSource:
        """The reader with this module's options."""
        return AirFRANSSource(self.root_path(), **self._options)

    def case_lists(self) -> dict[str, list[str]]:
        """The task's train and test lists.

        Raises:
            FileNotFoundError: no manifest, or it names cases that have no folder.
            ValueError: the manifest is not what it should be, or the lists overlap.
        """
        root = self.root_path()
        path = root / "manifest.json"
        if not path.is_file():
            raise FileNotFoundError(f"root: {path}: no such file; expected the manifest of AirFRANS there")
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path}: not valid JSON ({error})") from error
        names = {"train": f"{self.task}_train", "test": "full_test" if self.task == "scarce" else f"{self.task}_test"}
        lists = {}
        for split, name in names.items():
            cases = manifest.get(name) if isinstance(manifest, dict) else None
            if not isinstance(cases, list) or not cases or not all(isinstance(case, str) for case in cases):
                found = sorted(manifest) if isinstance(manifest, dict) else type(manifest).__name__
                raise ValueError(f"{path}: expected a list of case names under {name!r}, found {found}")
            if len(set(cases)) != len(cases):
                raise ValueError(f"{path}: list {name!r} names a case twice")
            absent = [case for case in cases if not (root / case).is_dir()]
            if absent:
                raise FileNotFoundError(
                    f"{path}: list {name!r} names {len(absent)} of {len(cases)} cases that have no folder in {root}, "
                    f"the first {absent[0]!r}; complete the download or use another task"
                )
            lists[split] = list(cases)
        both = set(lists["train"]) & set(lists["test"])
        if both:
            raise ValueError(f"{path}: {len(both)} cases are in both the train and the test list, one is {min(both)!r}")
        return lists

    def case_mesh(self, case: str) -> pv.UnstructuredGrid:
        """The internal mesh of a case with the file's own arrays, to hang fields on and write as VTU.

        Its points stand in the order that ``Sample.point_ids`` refers to.
        """
        from datamodules.vtk_io import read_mesh

        return cast("pv.UnstructuredGrid", read_mesh(self.make_source().file(case, "internal.vtu")))

    def dimensional(self, sample: Sample, fields: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Nondimensional fields at a sample's points in the dataset's units.

        Args:
            sample: the sample that the fields belong to.
            fields: any of the schema's fields, scalars (n,) and vectors (n, 2); unknown names are left out.

        Returns:
            ``U`` (n, 2) [m/s], ``p`` (n,) kinematic [m^2/s^2], ``p_total`` (n,) [m^2/s^2], ``nut`` (n,) [m^2/s],
            ``wallShearStress`` (n, 2) kinematic, the force on the wall [m^2/s^2].
        """
        speed, dynamic_pressure = sample.scales["U_inf"], sample.scales["q_inf"]
        assert sample.global_data is not None
        direction = sample.global_data[FREESTREAM].detach().cpu().double().numpy()
        convert = {
            VELOCITY: ("U", lambda value: (value + direction) * speed),
            PRESSURE: ("p", lambda value: value * dynamic_pressure),
            TOTAL_PRESSURE: ("p_total", lambda value: value * dynamic_pressure),
            VISCOSITY: ("nut", lambda value: np.expm1(value) * sample.scales["nu"]),
            SHEAR: ("wallShearStress", lambda value: value * dynamic_pressure),
        }
        out = {}
        for name, value in fields.items():
            if name in convert:
                unit_name, function = convert[name]
                array = value.detach().cpu() if isinstance(value, Tensor) else torch.as_tensor(value)
                out[unit_name] = function(array.double().numpy())
        return out
