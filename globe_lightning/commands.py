"""Commands on finished models, which need no configuration: ``globe convert``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from globe_lightning.interop import from_mdlus, to_mdlus
from globe_lightning.module import GlobeLightningModule
from globe_lightning.sharing import module_of, read_checkpoint, write_checkpoint

ORIENTATION_REMARK = (
    "PhysicsNeMo takes the direction of normals from the winding of the files' faces; in AirFRANS and DrivAerML they "
    "point into the body."
)


def convert(arguments: Sequence[str]) -> None:
    """``globe convert SOURCE TARGET``: a PhysicsNeMo checkpoint (.mdlus) to one of Lightning (.ckpt), or back."""
    parser = argparse.ArgumentParser("globe convert", description=convert.__doc__)
    parser.add_argument("source", type=Path, help="a .mdlus or .ckpt file")
    parser.add_argument("target", type=Path, help="the .ckpt or .mdlus file to write")
    options = parser.parse_args(arguments)
    source, target = options.source, options.target
    kinds = source.suffix, target.suffix
    if kinds == (".mdlus", ".ckpt"):
        network = from_mdlus(source)
        dtype = network.parameter_dtype
        module = module_of(network)
        module.geometry_arguments = {"orientation": "inward"}  # of new shapes too
        write_checkpoint(module, target)
        print(
            f"wrote {target}: ready for globe test, predict and fit (--ckpt_path {target}); fit starts with a fresh "
            f"optimizer.\n{ORIENTATION_REMARK} This model expects what it was trained on: set "
            "--data.init_args.orientation=file (the default is outward)."
        )
        if dtype != torch.float32:
            print(f"Its weights were {dtype}; they are float32 now.")
    elif kinds == (".ckpt", ".mdlus"):
        read_checkpoint(source)
        module = GlobeLightningModule.load_from_checkpoint(source, map_location="cpu", weights_only=True)
        to_mdlus(module.network, target)
        print(
            f"wrote {target}: GLOBE.from_checkpoint loads it in PhysicsNeMo.\n{ORIENTATION_REMARK} This model expects "
            "normals as in its training, outward unless --data.init_args.orientation said otherwise: wind the faces so."
        )
    else:
        raise ValueError(
            f"convert: expected a .mdlus file to make a .ckpt file of, or the other way round, found {source} and "
            f"{target}"
        )


COMMANDS = {"convert": convert}
"""{name on the command line: function of the arguments that follow it}"""
