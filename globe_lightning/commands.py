"""Commands on finished models, which need no configuration: ``globe convert`` and ``globe export``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from globe_lightning.interop import from_mdlus, to_mdlus
from globe_lightning.module import GlobeLightningModule
from globe_lightning.sharing import export, from_pretrained, module_of, read_checkpoint, write_checkpoint

ORIENTATION_REMARK = (
    "PhysicsNeMo takes the direction of normals from the winding of the files' faces; in AirFRANS and DrivAerML they "
    "point into the body."
)


def convert(arguments: Sequence[str]) -> None:
    """``globe convert SOURCE TARGET``: a PhysicsNeMo model (.mdlus) to a Lightning checkpoint (.ckpt), or back."""
    parser = argparse.ArgumentParser("globe convert", description=convert.__doc__)
    parser.add_argument("source", type=Path, help="a .mdlus file, a .ckpt file, or a folder of globe export")
    parser.add_argument("target", type=Path, help="the .ckpt or .mdlus file to write")
    options = parser.parse_args(arguments)
    source, target = options.source, options.target
    kind = "folder" if source.is_dir() else source.suffix
    if kind not in ("folder", ".mdlus", ".ckpt") or target.suffix not in (".mdlus", ".ckpt") or kind == target.suffix:
        raise ValueError(
            "convert: expected a .mdlus or .ckpt file or a folder of globe export, and a file to write of the other "
            f"suffix, .ckpt or .mdlus; found {source} and {target}"
        )
    remarks = []
    if kind == ".mdlus":
        network = from_mdlus(source)
        module = module_of(network)
        module.geometry_arguments = {"orientation": "inward"}  # of new shapes too
        remarks.append(
            f"{ORIENTATION_REMARK} This model expects what it was trained on: set --data.init_args.orientation=file "
            "(the default is outward)."
        )
        if network.parameter_dtype != torch.float32:
            remarks.append(f"Its weights were {network.parameter_dtype}; they are float32 now.")
    elif kind == ".ckpt":
        read_checkpoint(source)
        module = GlobeLightningModule.load_from_checkpoint(source, map_location="cpu", weights_only=True)
    else:
        module = from_pretrained(source)
    if target.suffix == ".ckpt":
        write_checkpoint(module, target)
        remarks.insert(0, f"ready for globe test, predict and fit (--ckpt_path {target}); fit starts afresh.")
    else:
        to_mdlus(module.network, target)
        remarks.insert(0, "GLOBE.from_checkpoint loads it in PhysicsNeMo.")
        remarks.append(
            f"{ORIENTATION_REMARK} This model expects normals as in its training, outward unless "
            "--data.init_args.orientation said otherwise: wind the faces so."
        )
    print(f"wrote {target}: " + "\n".join(remarks))


def export_model(arguments: Sequence[str]) -> None:
    """``globe export --ckpt_path FILE FOLDER``: a folder to share, with weights, configuration and a model card."""
    parser = argparse.ArgumentParser("globe export", description=export_model.__doc__)
    parser.add_argument("--ckpt_path", type=Path, required=True, help="a checkpoint file; best where its run left it")
    parser.add_argument("--licence", "--license", help="licence of the weights, for the card, e.g. CC-BY-4.0")
    parser.add_argument("folder", type=Path, help="the folder to write")
    options = parser.parse_args(arguments)
    export(options.ckpt_path, options.folder, options.licence)
    print(
        f"wrote {options.folder}: globe_lightning.from_pretrained reads it. Look through its README.md before sharing."
    )


COMMANDS = {"convert": convert, "export": export_model}
"""{name on the command line: function of the arguments that follow it}"""

COMMANDS_HELP = "Commands on finished models, which need no configuration (--help after each): " + " ".join(
    command.__doc__.replace("``", "") for command in COMMANDS.values() if command.__doc__
)
"""What ``globe --help`` says of them."""
