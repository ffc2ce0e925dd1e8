"""DrivAerML: hybrid RANS-LES flow around road cars, pressure and shear on their surface (Ashton et al., 2024).

Layout: per case ``<root>/run_<i>/`` with ``boundary_<i>.vtp`` (polygons; cell arrays ``CpMeanTrim``,
``wallShearStressMeanTrim`` [m^2/s^2]), ``geo_ref_<i>.csv`` (``lRef`` [m], ``aRef`` [m^2]), ``force_mom_<i>.csv`` and
``force_mom_constref_<i>.csv`` (``Cd``, ``Cl``, ``Clf``, ``Clr``, ``Cs``; for ``aRef`` and for 2.17 m^2).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from datamodules.base import ORIENTATIONS, SAMPLES_LICENCE, MeshDataModule, dataset_root, require_choice, require_counts
from datamodules.drivaerml_source import (
    KINEMATIC_PRESSURE_ARRAY,
    PRESSURE,
    PRESSURE_ARRAY,
    SHEAR,
    SHEAR_ARRAY,
    DrivAerMLSource,
)
from globe_lightning.sample import Sample, SampleSchema

if TYPE_CHECKING:
    import pyvista as pv

ENVIRONMENT_VARIABLE = "DRIVAER_DATA_DIR"
SAMPLES = Path(__file__).parent / "samples" / "cars"
SPLITS = Path(__file__).parent / "splits"
DEFAULT_SPLIT = "436_48"


class DrivAerMLDataModule(MeshDataModule):
    """DrivAerML cases as samples, one case a step.

    Targets: ``C_p`` and ``C_f`` (vector; in the sign of the released data, opposite to the force on the body).
    Boundary types: ``vehicle``, and the floors ``no_slip_floor`` and ``slip_floor``, rectangles with normals up at the
    lowest z of the car. Training draws faces and points anew at every epoch; validation draws once for good; test and
    prediction hold the whole surface and how forces integrate over it.

    The polygons of the surface are fanned into triangles. Source faces are triangles drawn from all of them alike,
    without repetition, and one factor scales their areas to the whole surface's: sums over the faces drawn estimate
    sums over the surface without bias. Which way the file's faces and shear point is found out per case, from the
    sign of the enclosed volume and from the case's own drag coefficient.

    Args:
        root: the dataset's folder; None takes the environment variable ``DRIVAER_DATA_DIR``; "samples" the few cases
            that ship with this package.
        split: a shipped split's name ("436_48", the customary one, whose 48 cases are our test split), or a file of
            your own: JSON ``{"train": [1, 2], "test": [3]}``, or CSV with the columns ``run`` and ``split``; "val"
            may be listed too, else it is carved from train. None takes "436_48", or the shipped cases' own split.
        targets: where predictions are asked and known: "vertices", the points of the mesh (a point's values are the
            means over the faces around it), or "cells", the middles of the faces.
        n_train_points: prediction points a training step, drawn without repetition; None takes all.
        n_validation_points: prediction points of a validation sample; None takes all, and forces integrate.
        n_boundary_faces: source faces of the vehicle in every split; None takes all.
        n_floor_cells: each floor has n x n x 2 triangles.
        random_face_positions: training places each face at a random point of it instead of its middle.
        orientation: where the vehicle's source normals point: "outward" into the fluid, "inward" into the body, or
            "file" as the file's winding has it.
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
        split: str | None = None,
        targets: str = "vertices",
        n_train_points: int | None = 80_000,
        n_validation_points: int | None = 80_000,
        n_boundary_faces: int | None = 80_000,
        n_floor_cells: int = 19,
        random_face_positions: bool = True,
        orientation: str = "outward",
        cache_dir: str | None = None,
        validation_fraction: float = 0.05,
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
        require_choice("targets", targets, ("vertices", "cells"))
        require_choice("orientation", orientation, ORIENTATIONS)
        require_counts(
            n_train_points=n_train_points, n_validation_points=n_validation_points, n_boundary_faces=n_boundary_faces
        )
        if n_floor_cells < 1:
            raise ValueError(f"n_floor_cells: expected a positive number, found {n_floor_cells}")
        self.root = root
        self.split = split
        self.field_association = "point" if targets == "vertices" else "cell"
        self._options: dict[str, Any] = {
            "targets": targets,
            "n_train_points": n_train_points,
            "n_validation_points": n_validation_points,
            "n_boundary_faces": n_boundary_faces,
            "n_floor_cells": n_floor_cells,
            "random_face_positions": random_face_positions,
            "orientation": orientation,
        }

    @property
    def schema(self) -> SampleSchema:
        """Fields, boundary types and reference lengths of every sample."""
        return SampleSchema(
            n_spatial_dims=3,
            output_field_ranks={PRESSURE: 0, SHEAR: 1},
            boundary_source_data_ranks={"vehicle": {}, "no_slip_floor": {}, "slip_floor": {}},
            reference_length_names=["L_ref", "delta_turb"],
        )

    def geometry_arguments(self) -> dict[str, Any]:
        """How samples were prepared, as arguments of :class:`~datamodules.geometry.GeometryDataModule`."""
        return {name: self._options[name] for name in ("targets", "n_boundary_faces", "n_floor_cells", "orientation")}

    @property
    def licence(self) -> str:
        """The licence of the data."""
        return SAMPLES_LICENCE if self.root == "samples" else "CC-BY-SA-4.0"

    def root_path(self) -> Path:
        """The dataset's folder.

        Raises:
            ValueError: neither ``root`` nor the environment variable is set.
            FileNotFoundError: there is no such folder.
        """
        return dataset_root(self.root, ENVIRONMENT_VARIABLE, SAMPLES, "DrivAerML", "run_1, run_2, ...")

    def root_is_read_only(self, root: Path) -> bool:
        """The package's own folder is never written to."""
        return root == SAMPLES.resolve()

    def make_source(self) -> DrivAerMLSource:
        """The reader with this module's options."""
        return DrivAerMLSource(self.root_path(), **self._options)

    def split_path(self) -> Path:
        """The file that lists the cases.

        Raises:
            FileNotFoundError: ``split`` is neither a shipped name nor a file.
        """
        if self.split is None and self.root == "samples":
            return SAMPLES / "split.json"
        name = self.split or DEFAULT_SPLIT
        shipped = {path.stem.removeprefix("drivaerml_"): path for path in sorted(SPLITS.glob("drivaerml_*.json"))}
        path = shipped.get(name, Path(name).expanduser())
        if not path.is_file():
            raise FileNotFoundError(
                f"split: expected one of {', '.join(map(repr, shipped))} or a JSON or CSV file, found {name!r}"
            )
        return path

    def case_lists(self) -> dict[str, list[str]]:
        """The split's lists of cases: "train", "test", and "val" if it has one.

        Raises:
            FileNotFoundError: no such split, or it names runs that have no folder.
            ValueError: the file is not what it should be, a list is empty or names a run twice, or lists overlap.
        """
        root, path = self.root_path(), self.split_path()
        lists = _read_split(path)
        owner: dict[str, str] = {}
        for name, cases in lists.items():
            for case in cases:
                if case in owner:
                    lists_named = f"list {name!r}" if owner[case] == name else f"the lists {owner[case]!r} and {name!r}"
                    raise ValueError(f"{path}: {case} stands twice, in {lists_named}; each run belongs to one split")
                owner[case] = name
        absent = [case for case in owner if not (root / case).is_dir()]
        if absent:
            raise FileNotFoundError(
                f"{path}: names {len(absent)} of {len(owner)} runs that have no folder in {root}, the first "
                f"{absent[0]!r}; complete the download, or pass a split of your own (JSON or CSV) as split"
            )
        return lists

    def case_mesh(self, case: str) -> pv.PolyData:
        """The surface of a case with the file's own cell arrays, to hang fields on and write as VTP.

        Its points (or cells, see ``field_association``) stand in the order that ``Sample.point_ids`` refers to.
        """
        from datamodules.vtk_io import read_mesh

        return cast("pv.PolyData", read_mesh(self.make_source().file(case, "boundary.vtp")))

    def dimensional(self, sample: Sample, fields: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Nondimensional fields at a sample's points in the dataset's names and units, and the file's sign of shear.

        Args:
            sample: the sample that the fields belong to.
            fields: ``C_p`` (n,) and ``C_f`` (n, 3); unknown names are left out.

        Returns:
            ``CpMeanTrim`` (n,), ``pMeanTrim`` (n,) kinematic [m^2/s^2], ``wallShearStressMeanTrim`` (n, 3) kinematic
            [m^2/s^2].
        """
        out = {}
        for name, value in fields.items():
            array = (value.detach().cpu() if isinstance(value, Tensor) else torch.as_tensor(value)).float().numpy()
            if name == PRESSURE:
                out[PRESSURE_ARRAY] = array
                out[KINEMATIC_PRESSURE_ARRAY] = array * np.float32(sample.scales["q_inf"])
            elif name == SHEAR:
                out[SHEAR_ARRAY] = array * np.float32(-sample.scales["shear_sign"] * sample.scales["q_inf"])
        return out


def _read_split(path: Path) -> dict[str, list[str]]:
    """Case names per split from a JSON or CSV file."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix.lower() == ".csv":
            found: Any = {}
            for row in csv.DictReader(text.splitlines(), skipinitialspace=True):
                entry = {str(key).strip().lower(): str(value).strip() for key, value in row.items()}
                found.setdefault(entry["split"], []).append(entry["run"])
        else:
            found = json.loads(text)
    except KeyError as error:
        raise ValueError(f"{path}: column {error} is missing; expected the columns 'run' and 'split'") from error
    except ValueError as error:
        raise ValueError(f"{path}: not readable as {path.suffix or 'JSON'} ({error})") from error
    if not isinstance(found, dict) or not {"train", "test"} <= set(found) <= {"train", "val", "test"}:
        names = sorted(found) if isinstance(found, dict) else type(found).__name__
        raise ValueError(f"{path}: expected lists of runs under 'train', 'test' and perhaps 'val', found {names}")
    lists = {}
    for name, runs in found.items():
        if not isinstance(runs, list) or not runs:
            raise ValueError(f"{path}: expected runs under {name!r}, found {runs!r}")
        numbers = [str(run).strip().removeprefix("run_") for run in runs]
        wrong = [number for number in numbers if not number.isdecimal()]
        if wrong:
            raise ValueError(f"{path}: expected run numbers under {name!r}, found {wrong[0]!r}")
        lists[name] = [f"run_{int(number)}" for number in numbers]
    return lists
