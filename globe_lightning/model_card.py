"""The model card of an exported model: data, splits, metrics, hardware and licence, as far as they were recorded."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

UNKNOWN = "not recorded"

PATHS = ("root", "cache_dir")
"""Arguments of data modules that name places on the machine of the training."""


def run_facts(checkpoint: Path) -> dict[str, Any]:
    """What the run folder around a checkpoint tells of it.

    Returns:
        ``data``: the arguments of the data module that are no paths; ``test``: {metric: value} of the last test of this
        very checkpoint. Empty where there is no run folder, or its files are of another checkpoint.
    """
    run = checkpoint.resolve().parent.parent
    facts: dict[str, Any] = {"data": {}, "test": {}}
    if checkpoint.resolve().parent.name != "checkpoints":
        return facts
    data = _yaml(run / "config.yaml").get("data") or {}
    arguments = data.get("init_args") if isinstance(data, dict) else None
    facts["data"] = {key: value for key, value in (arguments or {}).items() if key not in PATHS}
    tested = _yaml(run / "config_test.yaml").get("ckpt_path")
    table = run / "metrics_test.csv"
    newer = table.is_file() and table.stat().st_mtime >= checkpoint.stat().st_mtime
    if isinstance(tested, str) and newer and Path(tested).name == checkpoint.name:
        with open(table, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        facts["test"] = (
            {name: float(value) for name, value in rows[-1].items() if name.startswith("test/") and _is_number(value)}
            if rows
            else {}
        )
    return facts


def _yaml(path: Path) -> dict[str, Any]:
    found = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else None
    return found if isinstance(found, dict) else {}


def _is_number(text: Any) -> bool:
    try:
        return math.isfinite(float(text))
    except (TypeError, ValueError):
        return False


def model_card(config: Mapping[str, Any], n_parameters: int, licence: str | None) -> str:
    """The text of the card, Markdown.

    Args:
        config: what ``config.json`` holds, see ``globe_lightning.sharing``.
        n_parameters: of the network.
        licence: of the weights, as their author states it.
    """
    model, schema, training = config["model"], config["schema"], config["training"]
    source = training.get("provenance") or {}
    cases = source.get("cases") or {}
    lines = [
        "---",
        "library_name: globe_lightning",
        f"license: {licence or 'unknown'}",
        "tags: [computational-fluid-dynamics, surrogate-model, GLOBE]",
        "---",
        "",
        f"# GLOBE, {n_parameters:,} parameters",
        "",
        "A neural surrogate of boundary-driven flow ([arXiv:2511.15856](https://arxiv.org/abs/2511.15856)), "
        "exported by `globe export`. `config.json` holds every argument and the data schema, `model.safetensors` the "
        "weights.",
        "",
        "```python",
        "from globe_lightning import from_pretrained",
        'module = from_pretrained("path/to/this/folder")',
        "fields = module.predict_fields(sample)",
        "```",
        "",
        "## What it predicts, and from what",
        "",
        *_table(
            ("", ""),
            [
                ("dimensions", schema["n_spatial_dims"]),
                ("fields (0 scalar, 1 vector)", _names(schema["output_field_ranks"])),
                ("boundary types and their data", _names(schema["boundary_source_data_ranks"])),
                ("reference lengths [m]", ", ".join(f"`{name}`" for name in schema["reference_length_names"])),
                ("conditions", _names(schema.get("global_data_ranks")) or "none"),
                ("reference area [m², m in 2D]", model["reference_area"]),
                ("opening angle theta", model["theta"]),
            ],
        ),
        "",
        "## Data and splits",
        "",
        *_table(
            ("", ""),
            [
                ("data module", f"`{source['dataset']}`" if source.get("dataset") else UNKNOWN),
                ("licence of the data", source.get("data_licence") or UNKNOWN),
                *((f"cases in {split}", len(names)) for split, names in cases.items()),
                *([] if cases else [("cases", UNKNOWN)]),
                ("normals of boundary faces", training["data"].get("orientation", UNKNOWN)),
                *((name, f"`{value}`") for name, value in training["data"].items() if name != "orientation"),
            ],
        ),
        "",
        "The names of the cases are in `config.json`." if cases else "",
        "",
        "## Metrics",
        "",
    ]
    if training.get("best"):
        lines += [f"Best {training['best']['monitor']}: {training['best']['value']:.6g}.", ""]
    tested = [(f"`{name}`", f"{value:.6g}") for name, value in training["test"].items()]
    lines += _table(("test metric", "value"), tested) if tested else [f"On the test split: {UNKNOWN}."]
    lines += [
        "",
        "## Training",
        "",
        *_table(
            ("", ""),
            [
                ("epochs done", training.get("epoch", UNKNOWN)),
                ("optimizer steps", training.get("global_step", UNKNOWN)),
                ("hardware", source.get("device") or UNKNOWN),
                ("processes, nodes", f"{source['n_processes']}, {source['n_nodes']}" if source else UNKNOWN),
                ("precision", source.get("precision") or UNKNOWN),
                (
                    "software",
                    ", ".join(f"{name} {number}" for name, number in source.get("software", {}).items()) or UNKNOWN,
                ),
                ("optimizer, schedule, learning rate", f"{model['optimizer']}, {model['schedule']}, {model['lr']:g}"),
            ],
        ),
        "",
        "## Licence",
        "",
        f"Weights: {licence or 'not stated by whoever exported them'}. Data: {source.get('data_licence') or UNKNOWN}. "
        "The code of globe_lightning: Apache-2.0.",
        "",
        "## Limits",
        "",
        "Trained on the cases named above, it interpolates between them; outside their range of shapes and conditions "
        "its answers are not to be trusted. The model is not invariant to the direction of face normals: give it those "
        "it was trained with.",
        "",
    ]
    return "\n".join(lines)


def _table(header: tuple[str, str], rows: list[tuple[str, Any]]) -> list[str]:
    return [f"| {header[0]} | {header[1]} |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]


def _names(ranks: Any) -> str:
    """Declared names with their ranks, nested ones in brackets."""
    parts = []
    for name, rank in (ranks or {}).items():
        inner = _names(rank) or "none" if isinstance(rank, Mapping) else rank
        parts.append(f"`{name}`: ({inner})" if isinstance(rank, Mapping) else f"`{name}`: {inner}")
    return ", ".join(parts).replace("|", "\\|")
