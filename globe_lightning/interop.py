"""Models of NVIDIA PhysicsNeMo: its ``.mdlus`` checkpoints read and written, without PhysicsNeMo.

A ``.mdlus`` file is an archive (zip without compression; tar in older releases) of three members: ``model.pt``, the
weights as ``torch.save`` writes them, ``args.json``, the constructor's arguments, and ``metadata.json``, versions.
Nothing in a file is ever executed: weights are read with ``weights_only=True``, the class named in ``args.json`` is
compared and not imported, nothing is unpacked to the disk, and every size is checked before anything of it is built.

PhysicsNeMo takes the direction of a face's normal from the winding of the file's faces, which in AirFRANS and
DrivAerML points into the body. A model trained there expects that: use ``orientation: file`` in the data modules.
"""

from __future__ import annotations

import inspect
import io
import json
import pickle
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from globe_lightning.models.globe import GLOBE
from globe_lightning.models.kernel import Kernel
from globe_lightning.models.multiscale import module_key
from globe_lightning.models.networks import PadeNetwork
from globe_lightning.run_folder import written_whole

MEMBERS = ("model.pt", "args.json", "metadata.json")
"""The members of a ``.mdlus`` archive, in order."""

FILE_VERSION = "0.1.0"
"""The version of the container that is read and written."""

PEER_VERSION = "2.2.2"
"""The release of PhysicsNeMo whose files are written."""

PEER_CLASS = {"__name__": "GLOBE", "__module__": "physicsnemo.experimental.models.globe.model"}

OWN_ARGUMENTS = frozenset(
    {
        "initial_amplitude",
        "chunk_bytes",
        "plan_cache_bytes",
        "compile",
        "target_size_weight",
        "far_field_order",
        "max_far_targets",
    }
)
"""Arguments of our GLOBE that PhysicsNeMo's lacks. Only the last one changes predictions."""

LARGEST_JSON = 1_000_000  # bytes
LARGEST = {
    "n_communication_hyperlayers": 64,
    "n_latent_scalars": 4096,
    "n_latent_vectors": 256,
    "n_spherical_harmonics": 64,
}
"""Counts beyond which a file is taken for damaged rather than for a model."""
MOST_NAMES = 1024  # fields, boundary types, lengths, hidden layers
WIDEST_LAYER = 65_536


def from_mdlus(path: str | Path) -> GLOBE:
    """Build the model of a PhysicsNeMo checkpoint.

    Args:
        path: the ``.mdlus`` file.

    Returns:
        The model with the file's weights, bit by bit, in their precision, on the CPU.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is no such archive, holds anything but weights and arguments of a GLOBE, names an argument
            that this package lacks, or its weights do not fit its arguments; the message says what was found.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected a .mdlus checkpoint of PhysicsNeMo")
    members = _read_members(path)
    metadata = _read_json(path, "metadata.json", members["metadata.json"])
    version = metadata.get("mdlus_file_version")
    if version != FILE_VERSION:
        raise ValueError(
            f"{path}: metadata.json has the mdlus_file_version {version!r}, expected {FILE_VERSION!r}; save the model "
            f"again with PhysicsNeMo {PEER_VERSION}"
        )
    arguments = _arguments(path, _read_json(path, "args.json", members["args.json"]))
    state = _read_weights(path, members["model.pt"])
    _check_extent(path, arguments, state)
    try:
        with torch.device("meta"):  # shapes without memory
            expected = GLOBE(**arguments).state_dict()
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{path}: args.json does not describe a model: {error}") from error
    dtype = _check_weights(path, state, expected)
    model = GLOBE(**arguments).to(dtype)
    model.load_state_dict(state)
    return model


def to_mdlus(model: GLOBE, path: str | Path) -> None:
    """Write a model as a checkpoint that PhysicsNeMo loads (``GLOBE.from_checkpoint(path)`` there).

    Args:
        model: any; its weights are written bit by bit.
        path: the file; one that exists is replaced when the new one is complete.

    Raises:
        ValueError: a boundary type or reference length has a name that PhysicsNeMo cannot hold, or the model's opening
            rule is not PhysicsNeMo's.
    """
    for argument, names in (
        ("boundary_source_data_ranks", model.source_layouts),
        ("reference_length_names", model.reference_length_names),
    ):
        bad = [name for name in names if module_key(name) != name]
        if bad:
            raise ValueError(
                f"{argument}: PhysicsNeMo cannot hold the names {bad} (a dot, or the name of one of torch's own "
                "methods); train a model with other names"
            )
    if model.theta > 0 and model.target_size_weight != 1:
        raise ValueError(
            f"target_size_weight: PhysicsNeMo's opening rule has the weight 1, this model's "
            f"{model.target_size_weight}; it would predict something else there"
        )
    if model.theta > 0 and model.far_field_order:
        raise ValueError(
            f"far_field_order: PhysicsNeMo's far field is of order 0, this model's of order {model.far_field_order}; "
            "it would predict something else there"
        )
    if model.theta > 0 and model.max_far_targets and not model.expand_far_targets:
        raise ValueError(
            f"max_far_targets: PhysicsNeMo's far pairs have no limit, this model's {model.max_far_targets} targets; it "
            "would predict something else there"
        )
    state: dict[str, Tensor] = {}
    for key, value in model.state_dict().items():
        prefix, found, _ = key.partition(".network.combined_mlp.")
        if found and f"{prefix}.network._one" not in state:
            state[f"{prefix}.network._one"] = torch.ones((), dtype=value.dtype)
        state[key] = value.detach().cpu().clone()
    weights = io.BytesIO()
    torch.save(state, weights)
    arguments = {name: value for name, value in constructor_arguments(model).items() if name not in OWN_ARGUMENTS}
    contents = (
        weights.getvalue(),
        json.dumps({**PEER_CLASS, "__args__": arguments}).encode(),
        json.dumps({"physicsnemo_version": PEER_VERSION, "mdlus_file_version": FILE_VERSION}).encode(),
    )
    with written_whole(Path(path)) as beside, zipfile.ZipFile(beside, "w", zipfile.ZIP_STORED) as archive:
        for name, content in zip(MEMBERS, contents, strict=True):
            archive.writestr(name, content)


def constructor_arguments(model: GLOBE) -> dict[str, Any]:
    """The arguments that build a model of this architecture and plan; plain values. Those that change fresh weights,
    memory or speed are left out.
    """
    layers: Any = model.kernel_layers
    multiscale = next(iter(layers[0].values()))
    kernel: Kernel = next(iter(multiscale.kernels.values()))
    network = kernel.network
    latents = [*model.latent_layout.scalars, *model.latent_layout.vectors]
    device = model.tree_build_device
    return {
        "n_spatial_dims": model.n_spatial_dims,
        "output_field_ranks": _nested(model.output_layout),
        "boundary_source_data_ranks": {kind: _nested(layout) for kind, layout in model.source_layouts.items()},
        "reference_length_names": list(model.reference_length_names),
        "reference_area": _shortest(model.reference_area),
        "global_data_ranks": _nested(model.global_layout) or None,
        "n_communication_hyperlayers": model.n_communication_hyperlayers,
        "n_latent_scalars": sum(name.startswith("latent.scalars.") for name in latents),
        "n_latent_vectors": sum(name.startswith("latent.vectors.") for name in latents),
        "smoothing_radius": _shortest(model.smoothing_radius),
        "hidden_layer_sizes": [linear.out_features for linear in network.perceptron().linears()[:-1]],
        "n_spherical_harmonics": kernel.n_harmonics,
        "theta": model.theta,
        "target_size_weight": model.target_size_weight,
        "leaf_size": model.leaf_size,
        "network_type": "pade" if isinstance(network, PadeNetwork) else "mlp",
        "self_regularization_beta": network.beta or None,
        "latent_compression_scale": model.latent_compression_scale,
        "expand_far_targets": model.expand_far_targets,
        "far_field_order": model.far_field_order,
        "max_far_targets": model.max_far_targets,
        "use_gradient_checkpointing": model.use_gradient_checkpointing,
        "tree_build_device": None if device is None else str(device),
    }


def _nested(layout: Any) -> dict[str, Any]:
    """Ranks as they were declared."""
    out: dict[str, Any] = {}
    for name, rank in layout.ranks.items():
        *parents, last = layout.paths[name]
        place = out
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = rank
    return out


def _shortest(number: Tensor) -> float:
    """The shortest decimal number that a float32 buffer stands for: 2.17, not 2.1700000762939453."""
    return float(np.format_float_scientific(np.float32(number.item())))


# Reading the archive


def _read_members(path: Path) -> dict[str, bytes]:
    """The bytes of the three members; nothing but these may be in the archive."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(4)
    try:
        # Not is_zipfile: it also finds the zip archive that a tar archive's model.pt is.
        return _from_zip(path, size) if start == b"PK\x03\x04" else _from_tar(path, size)
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, NotImplementedError, OSError) as error:
        raise ValueError(
            f"{path}: not a .mdlus checkpoint, or a damaged one: expected a zip archive ({error})"
        ) from error


def _from_zip(path: Path, size: int) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        infos = archive.infolist()
        _check_names(path, [info.filename for info in infos])
        for info in infos:
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
                raise ValueError(f"{path}: member {info.filename!r} is compressed or encrypted, expected it plain")
        _check_sizes(path, [info.file_size for info in infos], size)
        return {info.filename: archive.read(info) for info in infos}


def _from_tar(path: Path, size: int) -> dict[str, bytes]:
    with tarfile.open(path, "r:") as archive:
        infos: list[tarfile.TarInfo] = []
        for info in archive:
            infos.append(info)
            if len(infos) > len(MEMBERS):
                break
        _check_names(path, [info.name for info in infos])
        _check_sizes(path, [info.size for info in infos], size)
        out = {}
        for info in infos:
            file = archive.extractfile(info) if info.type in (tarfile.REGTYPE, tarfile.AREGTYPE) else None
            if file is None or info.issparse():
                raise ValueError(f"{path}: member {info.name!r} is a link or a special file, expected a plain one")
            out[info.name] = file.read()
        return out


def _check_names(path: Path, names: list[str]) -> None:
    if sorted(names) != sorted(MEMBERS):
        shown = [name if len(name) < 80 else name[:80] + "..." for name in names[:8]]
        raise ValueError(f"{path}: expected an archive of exactly {list(MEMBERS)}, found {len(names)} members: {shown}")


def _check_sizes(path: Path, sizes: list[int], size: int) -> None:
    if sum(sizes) > size:
        raise ValueError(f"{path}: its members claim {sum(sizes)} bytes, the file has {size}")


def _read_json(path: Path, name: str, content: bytes) -> dict[str, Any]:
    if len(content) > LARGEST_JSON:
        raise ValueError(f"{path}: {name} has {len(content)} bytes, expected at most {LARGEST_JSON}")
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {name} is not valid JSON ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: {name} holds a {type(found).__name__}, expected an object")
    return found


# Arguments


def _arguments(path: Path, found: Mapping[str, Any]) -> dict[str, Any]:
    """The constructor's arguments, of known names and sane sizes."""
    if found.get("__name__") != PEER_CLASS["__name__"]:
        raise ValueError(f"{path}: holds a model of the class {found.get('__name__')!r}, expected 'GLOBE'")
    arguments = found.get("__args__")
    if not isinstance(arguments, dict):
        raise ValueError(f"{path}: args.json lacks the object '__args__' of constructor arguments")
    parameters = {
        name: parameter
        for name, parameter in inspect.signature(GLOBE.__init__).parameters.items()
        if name != "self" and name not in OWN_ARGUMENTS
    }
    unknown = sorted(set(arguments) - set(parameters))
    if unknown:
        raise ValueError(
            f"{path}: the model was built with {_shown({name: arguments[name] for name in unknown})}, which this "
            "package's GLOBE does not have; it would compute something else"
        )
    missing = sorted(name for name, p in parameters.items() if p.default is p.empty and name not in arguments)
    if missing:
        raise ValueError(f"{path}: args.json lacks the arguments {missing}")
    for name, limit in LARGEST.items():
        value = arguments.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= limit:
            raise ValueError(f"{path}: {name} is {_shown(value)}, expected a whole number from 0 to {limit}")
    for name, kinds in (
        ("output_field_ranks", dict),
        ("boundary_source_data_ranks", dict),
        ("global_data_ranks", (dict, type(None))),
        ("reference_length_names", list),
        ("hidden_layer_sizes", list),
    ):
        value = arguments.get(name, [] if kinds is list else {})
        if not isinstance(value, kinds):
            raise ValueError(
                f"{path}: {name} is {_shown(value)}, expected {'a list' if kinds is list else 'an object'}"
            )
        if _count(value) > MOST_NAMES:
            raise ValueError(f"{path}: {name} has {_count(value)} entries, expected at most {MOST_NAMES}")
    widths = arguments.get("hidden_layer_sizes", [])
    if not all(type(width) is int and 0 < width <= WIDEST_LAYER for width in widths):
        raise ValueError(
            f"{path}: hidden_layer_sizes is {_shown(widths)}, expected whole numbers from 1 to {WIDEST_LAYER}"
        )
    if not all(isinstance(name, str) for name in arguments["reference_length_names"]):
        raise ValueError(
            f"{path}: reference_length_names is {_shown(arguments['reference_length_names'])}, expected names"
        )
    return arguments


def _check_extent(path: Path, arguments: Mapping[str, Any], state: Mapping[str, Tensor]) -> None:
    """Refuse arguments of a model far larger than the weights, before time is spent on laying it out."""
    n_layers = arguments.get("n_communication_hyperlayers", 2) + 1
    n_kernels = n_layers * len(arguments["boundary_source_data_ranks"]) * len(arguments["reference_length_names"])
    n_vectors = 2 + (arguments.get("n_latent_vectors", 6) if n_layers > 1 else 0)
    n_columns = arguments.get("n_spherical_harmonics", 4) * n_vectors * (n_vectors - 1) // 2
    widest = max((value.shape[1] for value in state.values() if value.ndim == 2), default=0)
    if n_kernels > len(state) or n_columns > widest:
        raise ValueError(
            f"{path}: args.json describes a model of {n_kernels} kernels with at least {n_columns} input columns each, "
            f"the weights are {len(state)} tensors of at most {widest} columns"
        )


def _count(value: Any) -> int:
    """Entries of nested lists and objects; deep nesting was refused with the JSON."""
    if isinstance(value, dict):
        return len(value) + sum(_count(item) for item in value.values())
    return len(value) + sum(_count(item) for item in value) if isinstance(value, list) else 0


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 200 else text[:200] + "..."


# Weights


def _read_weights(path: Path, content: bytes) -> dict[str, Tensor]:
    """The state dict, with nothing executed and nothing inflated."""
    where = f"{path}: model.pt"
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            infos = archive.infolist()
    except (zipfile.BadZipFile, OSError, NotImplementedError) as error:
        raise ValueError(f"{where} is not what torch.save writes ({error})") from error
    compressed = any(info.compress_type != zipfile.ZIP_STORED for info in infos)
    if compressed or sum(info.file_size for info in infos) > len(content):
        raise ValueError(f"{where} is compressed or claims more bytes than it has, expected what torch.save writes")
    try:
        state = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{where} holds something else than tensors, code perhaps; it was not loaded ({_first_line(error)})"
        ) from error
    except Exception as error:  # of a damaged file, torch raises all sorts
        raise ValueError(f"{where} is damaged ({type(error).__name__}: {_first_line(error)})") from error
    if not isinstance(state, dict) or not all(
        isinstance(key, str) and isinstance(value, Tensor) for key, value in state.items()
    ):
        raise ValueError(f"{where} holds something else than named tensors; expected a state dict")
    return dict(state)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")[:300]


def _check_weights(path: Path, state: dict[str, Tensor], expected: Mapping[str, Tensor]) -> torch.dtype:
    """Compare names, shapes and kinds with those of the model; drops PhysicsNeMo's constants. Returns the precision."""
    for key in [key for key in state if key.endswith(".network._one")]:
        one = state.pop(key)
        if one.numel() != 1 or float(one.reshape(())) != 1:
            raise ValueError(f"{path}: {key} is expected to be the number 1")
    lines = [f"missing: {key}" for key in expected if key not in state]
    lines += [f"not of the model: {key}" for key in state if key not in expected]
    lines += [
        f"{key}: shape {tuple(value.shape)}, expected {tuple(expected[key].shape)}"
        for key, value in state.items()
        if key in expected and value.shape != expected[key].shape
    ]
    if lines:
        more = [f"and {len(lines) - 10} more"] if len(lines) > 10 else []
        raise ValueError(
            f"{path}: the weights do not fit the arguments of args.json:\n  " + "\n  ".join([*lines[:10], *more])
        )
    odd = [key for key, value in state.items() if value.layout != torch.strided or not value.is_floating_point()]
    if odd:
        raise ValueError(f"{path}: {odd[0]} is not a dense tensor of floating-point numbers")
    dtypes = {value.dtype for value in state.values()}
    if len(dtypes) > 1:
        raise ValueError(f"{path}: the weights have several precisions, {sorted(map(str, dtypes))}; expected one")
    return dtypes.pop()
