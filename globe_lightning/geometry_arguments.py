"""``globe predict --geometry``: a checkpoint and a shape are enough; the rest of the configuration follows."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from globe_lightning.geometry import prepared_as_trained
from globe_lightning.module import GEOMETRY_KEY, SCHEMA_KEY, GlobeLightningModule
from globe_lightning.run_folder import RunFolder
from globe_lightning.sample import SampleSchema
from globe_lightning.sharing import read_checkpoint

HELP = (
    "Predict shapes that nobody has simulated: airfoils from coordinates, cars from surfaces. The checkpoint says how "
    "its cases were prepared; no dataset and no configuration is needed. Results go to runs/<name of the shape>, or to "
    "<run>/geometry/<name of the shape> if a run is named instead of a checkpoint (--config, --run.name)."
)
OPTIONS: dict[str, dict[str, Any]] = {
    "--geometry": {
        "nargs": "+",
        "metavar": "FILE",
        "help": "airfoil coordinates (.dat, .csv, .txt, in Selig's or Lednicer's order) or surfaces of cars (.stl, "
        ".vtp, .obj, .ply)",
    },
    "--condition": {
        "metavar": "NAME=VALUE,...",
        "help": "conditions of the flow: U_inf [m/s], for airfoils also Re and alpha [degrees], for cars nu [m^2/s], "
        "L_ref [m], A_ref [m^2]; several values make a case each (alpha=0,2,4)",
    },
    "--repair": {"metavar": "NAME,...", "help": "mend these faults of the shapes, or all; the report names them"},
    "--accept": {"metavar": "NAME,...", "help": "use shapes with these faults as they are"},
    "--units": {"metavar": "UNIT", "help": "the files' unit of length: m, mm, cm, in or ft"},
    "--points": {"metavar": "FILE", "help": "predict at these points too (.csv, .vtp, .vtu)"},
    "--plane": {"metavar": "AXIS=VALUE,...", "help": 'predict in a plane too, such as "y=0" or "y=0,x=-2:6,z=0:2"'},
    "--grid": {"metavar": "AXIS=LOW:HIGH:N,...", "help": "predict on a grid of probes too"},
    "--n_boundary_faces": {"metavar": "N", "help": "faces that act as sources; as many as in training by default"},
    "--n_segments": {"metavar": "N", "help": "resample airfoils to that many segments"},
}
"""The options that belong to a new shape: all but the first need it."""


def add_geometry_help(parser: Any) -> None:
    """Let ``globe predict --help`` show the options; :func:`expand_geometry` has consumed them before any parsing."""
    group = parser.add_argument_group("new shapes", HELP)
    for name, option in OPTIONS.items():
        group.add_argument(name, default=argparse.SUPPRESS, metavar=option["metavar"], help=option["help"])


def expand_geometry(arguments: Sequence[str]) -> list[str]:
    """The arguments of ``globe predict --geometry ...`` as those of a prediction with ``GeometryDataModule``.

    Others are returned as they are.

    Raises:
        FileNotFoundError: no checkpoint.
        ValueError: an option is wrong, or the checkpoint's model is none for which shapes can be prepared.
    """
    arguments = list(arguments)
    if "predict" not in arguments[:1] or not any(_is_option(argument) for argument in arguments):
        return arguments
    parser = argparse.ArgumentParser(prog="globe predict", add_help=False, allow_abbrev=False)
    for name, option in OPTIONS.items():
        parser.add_argument(name, action="extend" if "nargs" in option else "append", default=[], **option)
    parser.add_argument("--ckpt_path")
    parser.add_argument("--config", "-c", action="append", default=[])
    parser.add_argument("--run.root", dest="root")
    parser.add_argument("--run.name", dest="name")
    found, rest = parser.parse_known_args(arguments[1:])
    if not found.geometry:
        raise ValueError("the options of a new shape need --geometry FILE")
    texts, settings = _without_data(found.config)
    settings |= {key: vars(found)[key] for key in ("root", "name") if vars(found)[key] is not None}
    by_run = found.ckpt_path in (None, "best", "last")
    stem = Path(found.geometry[0]).stem
    if by_run:
        folder = RunFolder(**settings)
        path = _checkpoint(found.ckpt_path, folder)
        output = {"root": str(folder.path / "geometry"), "name": stem}
    else:
        path = Path(found.ckpt_path)
        output = {"root": found.root or "runs", "name": found.name or stem}
    checkpoint = read_checkpoint(path)
    known = inspect.signature(GlobeLightningModule).parameters
    model = {name: value for name, value in checkpoint["hyper_parameters"].items() if name in known}
    schema = SampleSchema(**checkpoint[SCHEMA_KEY])
    data = {
        **prepared_as_trained(schema, checkpoint.get(GEOMETRY_KEY, {})),
        "geometry": found.geometry,
        "conditions": parse_conditions(found.condition),
        "repair": _names(found.repair),
        "accept": _names(found.accept),
        "units": found.units[-1] if found.units else None,
        "probes": [*found.points, *found.plane, *found.grid],
    }
    data |= {
        name: _count(name, getattr(found, name)[-1])
        for name in ("n_boundary_faces", "n_segments")
        if getattr(found, name)
    }
    ours = {
        "model": model,
        "data": {"class_path": "datamodules.GeometryDataModule", "init_args": data},
        "run": output,
        "checkpoint": {"dirpath": str(path.parent)},  # where Lightning expects it
    }
    texts.append(yaml.safe_dump(ours, allow_unicode=True))
    return ["predict", *(f"--config={text}" for text in texts), f"--ckpt_path={path}", *rest]


def _is_option(argument: str) -> bool:
    return argument.partition("=")[0] in OPTIONS


def _without_data(files: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The text of configuration files without their data, and the run that they name."""
    run: dict[str, str] = {}
    texts = []
    for file in files:
        content = yaml.safe_load(Path(file).read_text(encoding="utf-8")) or {}
        content.pop("data", None)
        run |= content.get("run") or {}
        texts.append(yaml.safe_dump(content, allow_unicode=True))
    return texts, run


def _checkpoint(asked: str | None, folder: RunFolder) -> Path:
    path = folder.last_checkpoint() if asked == "last" else folder.best_checkpoint() or folder.last_checkpoint()
    if path is None:
        raise FileNotFoundError(
            f"{folder.checkpoints}: no checkpoint; give --ckpt_path FILE, or name the run (--config, --run.name)"
        )
    return path


def parse_conditions(texts: Sequence[str]) -> dict[str, list[float]]:
    """Conditions from ``name=value`` pairs: "U_inf=60,alpha=0,2,4" is {"U_inf": [60], "alpha": [0, 2, 4]}.

    Raises:
        ValueError: a name or a number is missing, or a name is given twice.
    """
    conditions: dict[str, list[float]] = {}
    for text in texts:
        name = ""
        for part in text.split(","):
            first, equals, value = part.partition("=")
            if equals:
                name = first.strip()
                if name in conditions or not name:
                    raise ValueError(f"condition {text!r}: expected each name once, found {name!r} again")
                conditions[name] = []
            try:
                conditions[name].append(float(value if equals else first))
            except (KeyError, ValueError):
                raise ValueError(f"condition {text!r}: expected name=number, such as U_inf=38.89") from None
    return conditions


def _names(texts: Sequence[str]) -> list[str]:
    return [name.strip() for text in texts for name in text.split(",") if name.strip()]


def _count(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}: expected a number, found {text!r}") from None
