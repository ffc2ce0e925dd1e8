"""Checkpoints of PhysicsNeMo: read, written, compared with what PhysicsNeMo computes; hostile files are refused."""

from __future__ import annotations

import io
import json
import os
import pickle
import subprocess
import tarfile
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import GOLDEN, fields_of, make_case, make_model
from test_golden import assert_fields_agree

from globe_lightning import GLOBE, BoundaryMesh, GlobeLightningModule
from globe_lightning.cli import main
from globe_lightning.fields import flatten_data
from globe_lightning.interop import constructor_arguments, from_mdlus, to_mdlus

PEERS = ("peer_2d", "peer_3d")


def members_of(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def write_zip(path: Path, members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def saved(value: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def state_of(content: bytes) -> dict[str, torch.Tensor]:
    return torch.load(io.BytesIO(content), weights_only=True)


@pytest.fixture
def members() -> dict[str, bytes]:
    """The members of a good file."""
    return members_of(GOLDEN / "peer_2d.mdlus")


def with_arguments(members: dict[str, bytes], **changes: Any) -> dict[str, bytes]:
    found = json.loads(members["args.json"])
    found["__args__"] |= changes
    return {**members, "args.json": json.dumps(found).encode()}


# Reading and writing


@pytest.mark.parametrize("name", PEERS)
def test_predictions_are_those_of_physicsnemo(name: str) -> None:
    stored = torch.load(GOLDEN / f"{name}_io.pt", weights_only=True)
    inputs = stored["inputs"]
    meshes = {
        kind: BoundaryMesh(mesh["points"], mesh["cells"], mesh["cell_data"])
        for kind, mesh in inputs["boundary_meshes"].items()
    }
    model = from_mdlus(GOLDEN / f"{name}.mdlus")
    with torch.no_grad():
        found = model(inputs["prediction_points"], meshes, inputs["reference_lengths"], inputs["global_data"], None)
    assert_fields_agree(flatten_data(found), stored["outputs"], torch.float32)


@pytest.mark.parametrize("name", PEERS)
def test_a_file_survives_the_round_trip(name: str, tmp_path: Path) -> None:
    to_mdlus(from_mdlus(GOLDEN / f"{name}.mdlus"), tmp_path / "again.mdlus")
    before, after = members_of(GOLDEN / f"{name}.mdlus"), members_of(tmp_path / "again.mdlus")
    assert list(before) == list(after)
    assert json.loads(before["args.json"]) == json.loads(after["args.json"])
    assert json.loads(before["metadata.json"]) == json.loads(after["metadata.json"])
    first, second = state_of(before["model.pt"]), state_of(after["model.pt"])
    assert list(first) == list(second)
    for key, value in first.items():
        assert value.dtype == second[key].dtype and torch.equal(value, second[key]), key


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"network_type": "mlp", "self_regularization_beta": None},
        {"n_communication_hyperlayers": 0, "theta": 0.7, "leaf_size": 3, "expand_far_targets": True},
        {"n_latent_scalars": 0, "n_latent_vectors": 0, "latent_compression_scale": None, "tree_build_device": "cpu"},
        {"global_data_ranks": None, "use_gradient_checkpointing": False, "smoothing_radius": 1e-6},
    ],
    ids=["pade", "mlp", "no communication", "no latents", "no global data"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_any_model_survives_the_round_trip(changes: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    model = make_model(2, dtype=dtype, **changes)
    to_mdlus(model, tmp_path / "model.mdlus")
    again = from_mdlus(tmp_path / "model.mdlus")
    assert constructor_arguments(again) == constructor_arguments(model)
    expected, found = model.state_dict(), again.state_dict()
    assert list(expected) == list(found)
    for key, value in expected.items():
        assert value.dtype == found[key].dtype and torch.equal(value, found[key]), key


def test_the_arguments_rebuild_what_was_declared() -> None:
    from helpers import model_config

    config = model_config(3, theta=0.5, smoothing_radius=1e-7)
    found = constructor_arguments(GLOBE(**config))
    assert {name: found[name] for name in config} == config


def test_what_physicsnemo_cannot_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"boundary_source_data_ranks: .*\['keys'\]"):
        to_mdlus(make_model(2, boundary_source_data_ranks={"keys": {}, "wall": {}}), tmp_path / "model.mdlus")
    with pytest.raises(ValueError, match=r"reference_length_names: .*\['a.b'\]"):
        to_mdlus(make_model(2, reference_length_names=["a.b"]), tmp_path / "model.mdlus")
    with pytest.raises(ValueError, match=r"opening rule has the weight 1, this model's 2\.0"):
        to_mdlus(make_model(2, theta=1.0, target_size_weight=2.0), tmp_path / "model.mdlus")
    with pytest.raises(
        ValueError, match="far_field_order: PhysicsNeMo's far field is of order 0, this model's of order 1"
    ):
        to_mdlus(make_model(2, theta=1.0, far_field_order=1), tmp_path / "model.mdlus")
    with pytest.raises(
        ValueError, match="max_far_targets: PhysicsNeMo's far pairs have no limit, this model's 9 targets"
    ):
        to_mdlus(make_model(2, theta=1.0, max_far_targets=9), tmp_path / "model.mdlus")
    assert not list(tmp_path.iterdir())


def test_the_older_form_is_read(members: dict[str, bytes], tmp_path: Path) -> None:
    path = tmp_path / "old.mdlus"
    with tarfile.open(path, "w") as archive:
        for name in ("args.json", "metadata.json", "model.pt"):  # a zip archive at the end of a tar archive
            info = tarfile.TarInfo(name)
            info.size = len(members[name])
            archive.addfile(info, io.BytesIO(members[name]))
    found = from_mdlus(path).state_dict()
    for key, value in from_mdlus(GOLDEN / "peer_2d.mdlus").state_dict().items():
        assert torch.equal(found[key], value), key


# Hostile and damaged files


class Bomb:
    """Runs code when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def test_code_in_a_pickle_is_not_run(members: dict[str, bytes], tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    for value in (Bomb(mark), {"reference_area": Bomb(mark)}, OrderedDict(a=torch.ones(1), b=Bomb(mark))):
        path = write_zip(tmp_path / "code.mdlus", {**members, "model.pt": saved(value)})
        with pytest.raises(ValueError, match=r"code\.mdlus: model\.pt holds something else than tensors"):
            from_mdlus(path)
    bare = {**members, "model.pt": pickle.dumps(Bomb(mark))}
    with pytest.raises(ValueError, match=r"not what torch\.save writes"):
        from_mdlus(write_zip(tmp_path / "code.mdlus", bare))
    assert not mark.exists()


@pytest.mark.parametrize("extra", ["../outside.txt", "/outside.txt", "model.pt/../x", "notes.txt", "sub/"])
def test_no_other_member_is_accepted(members: dict[str, bytes], tmp_path: Path, extra: str) -> None:
    path = write_zip(tmp_path / "extra.mdlus", {**members, extra: b"x"})
    with pytest.raises(ValueError, match=r"expected an archive of exactly .*found 4 members"):
        from_mdlus(path)
    del members["metadata.json"]
    with pytest.raises(ValueError, match=r"expected an archive of exactly"):
        from_mdlus(write_zip(path, {**members, extra: b"x"}))
    assert [item.name for item in tmp_path.iterdir()] == ["extra.mdlus"]


def test_a_member_twice_is_refused(members: dict[str, bytes], tmp_path: Path) -> None:
    path = write_zip(tmp_path / "twice.mdlus", members)
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("args.json", b"{}")
    with pytest.raises(ValueError, match="found 4 members"):
        from_mdlus(path)


def test_compression_bombs_are_not_inflated(members: dict[str, bytes], tmp_path: Path) -> None:
    big = {**members, "model.pt": bytes(30_000_000)}
    path = write_zip(tmp_path / "bomb.mdlus", big, zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 100_000
    with pytest.raises(ValueError, match="compressed or encrypted"):
        from_mdlus(path)
    plain = write_zip(path, members).read_bytes()
    size = len(members["model.pt"]).to_bytes(4, "little")
    claimed = plain.replace(size * 2, (2**31).to_bytes(4, "little") * 2)
    assert claimed != plain
    path.write_bytes(claimed)
    with pytest.raises(ValueError, match="its members claim 2147484"):
        from_mdlus(path)
    inner = tmp_path / "inner.zip"
    with zipfile.ZipFile(io.BytesIO(members["model.pt"])) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    write_zip(inner, contents, zipfile.ZIP_DEFLATED)
    with pytest.raises(ValueError, match=r"model\.pt is compressed"):
        from_mdlus(write_zip(path, {**members, "model.pt": inner.read_bytes()}))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE])
def test_links_in_a_tar_archive_are_refused(members: dict[str, bytes], tmp_path: Path, kind: bytes) -> None:
    path = tmp_path / "link.mdlus"
    with tarfile.open(path, "w") as archive:
        for name in ("args.json", "metadata.json"):
            info = tarfile.TarInfo(name)
            info.size = len(members[name])
            archive.addfile(info, io.BytesIO(members[name]))
        info = tarfile.TarInfo("model.pt")
        info.type, info.linkname = kind, "/etc/hostname"
        archive.addfile(info)
    with pytest.raises(ValueError, match=r"'model\.pt' is a link or a special file"):
        from_mdlus(path)


def test_what_is_no_archive_is_refused(members: dict[str, bytes], tmp_path: Path) -> None:
    path = tmp_path / "x.mdlus"
    whole = write_zip(path, members).read_bytes()
    for content in (b"", b"hello", whole[:1000], whole[: len(whole) // 2], b"PK\x03\x04" + bytes(100), bytes(2048)):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"x\.mdlus: (not a \.mdlus|expected an archive)"):
            from_mdlus(path)
    with pytest.raises(FileNotFoundError, match=r"nothing\.mdlus: no such file"):
        from_mdlus(tmp_path / "nothing.mdlus")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_layer_sizes": [10**12]}, "hidden_layer_sizes"),
        ({"hidden_layer_sizes": [65_536] * 1000}, "do not fit"),
        ({"hidden_layer_sizes": [16] * 100_000}, "hidden_layer_sizes has 100000 entries"),
        ({"n_communication_hyperlayers": 10**9}, "n_communication_hyperlayers is 1000000000"),
        ({"n_communication_hyperlayers": 60}, "a model of 244 kernels"),
        ({"n_latent_vectors": 256, "n_spherical_harmonics": 64}, "a model of .* at least 2121"),
        ({"n_latent_vectors": -1}, "n_latent_vectors is -1"),
        ({"n_latent_scalars": True}, "n_latent_scalars is True"),
        ({"n_latent_scalars": 4}, r"do not fit the arguments.*\n.*shape"),
        ({"reference_length_names": "chord"}, "reference_length_names is 'chord', expected a list"),
        ({"reference_length_names": [1, 2]}, "expected names"),
        ({"output_field_ranks": {"C_p": 7}}, "args.json does not describe a model: output_field_ranks"),
        ({"boundary_source_data_ranks": {}}, "does not describe a model"),
        ({"theta": "wide"}, "does not describe a model"),
        ({"tree_build_device": "nowhere"}, "does not describe a model"),
        ({"n_moons": 3}, "built with {'n_moons': 3}, which this package's GLOBE does not have"),
        ({"initial_amplitude": 1.0}, "initial_amplitude"),
    ],
)
def test_arguments_are_checked_before_anything_is_built(
    members: dict[str, bytes], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        from_mdlus(write_zip(tmp_path / "x.mdlus", with_arguments(members, **changes)))


def test_json_is_checked(members: dict[str, bytes], tmp_path: Path) -> None:
    path = tmp_path / "x.mdlus"
    good = json.loads(members["args.json"])
    for content, message in (
        (b"[" * 200_000, "args.json is not valid JSON"),
        (b"[]", "args.json holds a list"),
        (b" " * 1_000_001, "args.json has 1000001 bytes"),
        (json.dumps({**good, "__name__": "FullyConnected"}).encode(), "class 'FullyConnected'"),
        (json.dumps({**good, "__args__": 3}).encode(), "lacks the object '__args__'"),
        (json.dumps({**good, "__args__": {"theta": 0}}).encode(), r"lacks the arguments \['boundary_source"),
    ):
        with pytest.raises(ValueError, match=message):
            from_mdlus(write_zip(path, {**members, "args.json": content}))
    with pytest.raises(ValueError, match=r"mdlus_file_version '9\.0', expected '0\.1\.0'"):
        from_mdlus(write_zip(path, {**members, "metadata.json": b'{"mdlus_file_version": "9.0"}'}))


def test_weights_are_checked(members: dict[str, bytes], tmp_path: Path) -> None:
    state = state_of(members["model.pt"])
    key = "final_field_transforms.0.bias"
    endless = torch.zeros(1).expand(10**12)  # one number stored, a terabyte claimed
    for changed, message in (
        ({**state, key: torch.ones(2)}, rf"{key}: shape \(2,\), expected \(1,\)"),
        ({**state, key: endless}, r"shape \(1000000000000,\)"),
        ({name: value for name, value in state.items() if name != key}, f"missing: {key}"),
        ({**state, "more": torch.ones(1)}, "not of the model: more"),
        ({**state, key: state[key].double()}, "several precisions"),
        ({**state, key: torch.ones(1, dtype=torch.int64)}, "not a dense tensor of floating-point"),
        ({**state, key: torch.ones(1).to_sparse()}, "not a dense tensor of floating-point"),
        ({**state, "kernel_layers.0.no_slip.kernels.chord.network._one": torch.zeros(())}, "_one is expected"),
        ({**state, key: [1.0]}, "something else than named tensors"),
        (torch.ones(3), "something else than named tensors"),
    ):
        with pytest.raises(ValueError, match=message):
            from_mdlus(write_zip(tmp_path / "x.mdlus", {**members, "model.pt": saved(changed)}))
    old = saved(state, _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match=r"not what torch\.save writes"):
        from_mdlus(write_zip(tmp_path / "x.mdlus", {**members, "model.pt": old}))
    broken = members["model.pt"].replace(b"torch._utils", b"torch.nothin")
    with pytest.raises(ValueError, match=r"model\.pt"):
        from_mdlus(write_zip(tmp_path / "x.mdlus", {**members, "model.pt": broken}))


# The command


@pytest.fixture
def airfoil_model(tiny_arguments: dict[str, Any], tmp_path: Path) -> Path:
    """A file as PhysicsNeMo would write one for airfoils."""
    torch.manual_seed(3)
    module = GlobeLightningModule(**tiny_arguments)
    to_mdlus(module.network, tmp_path / "peer.mdlus")
    return tmp_path / "peer.mdlus"


def test_a_converted_model_is_tested_predicted_and_trained(
    airfoil_model: Path, small_root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    main(["convert", "peer.mdlus", "peer.ckpt"])
    assert "--data.init_args.orientation=file" in capsys.readouterr().out
    module = GlobeLightningModule.load_from_checkpoint("peer.ckpt", weights_only=True)
    network = from_mdlus(airfoil_model)
    for key, value in network.state_dict().items():
        assert torch.equal(module.network.state_dict()[key], value), key

    short = [
        "--config=configs/quickstart.yaml",
        f"--data.init_args.root={small_root}",
        "--data.init_args.orientation=file",
        "--data.init_args.n_train_points=80",
        "--data.init_args.n_validation=1",
        "--trainer.max_epochs=1",
        "--pictures.dots_per_inch=40",
        *(
            f"--model.{name}={constructor_arguments(network)[name]}"
            for name in ("hidden_layer_sizes", "n_latent_scalars", "n_latent_vectors", "n_communication_hyperlayers")
        ),
    ]
    main(["test", *short, "--ckpt_path=peer.ckpt"])
    assert "test/forces/Cl/mae" in capsys.readouterr().out
    main(["predict", *short, "--ckpt_path=peer.ckpt"])
    assert list(Path("runs/quickstart/predictions").glob("*.vtu"))
    main(["fit", *short, "--ckpt_path=peer.ckpt"])
    assert "resuming from peer.ckpt" in capsys.readouterr().out
    trained = torch.load("runs/quickstart/checkpoints/last.ckpt", weights_only=True)
    assert trained["global_step"] == 4
    moved = trained["state_dict"]["network.final_field_transforms.0.weight"]
    assert not torch.equal(moved, network.state_dict()["final_field_transforms.0.weight"])

    main(["convert", "runs/quickstart/checkpoints/last.ckpt", "back.mdlus"])
    assert "GLOBE.from_checkpoint" in capsys.readouterr().out
    for key, value in from_mdlus("back.mdlus").state_dict().items():
        assert torch.equal(trained["state_dict"][f"network.{key}"], value), key


def test_convert_says_what_it_cannot_do(airfoil_model: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"convert: expected a \.mdlus or \.ckpt file"):
        main(["convert", str(airfoil_model), str(tmp_path / "x.mdlus")])
    with pytest.raises(SystemExit, match="no such file"):
        main(["convert", str(tmp_path / "no.ckpt"), str(tmp_path / "x.mdlus")])
    with pytest.raises(SystemExit, match=r"not a checkpoint of this package \(it holds"):
        (tmp_path / "other.ckpt").write_bytes(saved({"state_dict": {}}))
        main(["convert", str(tmp_path / "other.ckpt"), str(tmp_path / "x.mdlus")])
    with pytest.raises(SystemExit, match="not a checkpoint of this package"):
        (tmp_path / "other.ckpt").write_bytes(saved({"state_dict": Bomb(tmp_path / "ran")}))
        main(["convert", str(tmp_path / "other.ckpt"), str(tmp_path / "x.mdlus")])
    assert not (tmp_path / "ran").exists() and not (tmp_path / "x.mdlus").exists()


# PhysicsNeMo itself

PEER = os.environ.get("GLOBE_REFERENCE_PYTHON")

PEER_SCRIPT = """
import sys, torch, warnings
warnings.filterwarnings("ignore")
from tensordict import TensorDict
from physicsnemo.experimental.models.globe.model import GLOBE
from physicsnemo.mesh import Mesh
model = GLOBE.from_checkpoint(sys.argv[1])
inputs = torch.load(sys.argv[2], weights_only=True)
n = len(inputs["prediction_points"])
meshes = TensorDict({
    kind: Mesh(mesh["points"], mesh["cells"], cell_data=TensorDict(mesh["cell_data"], batch_size=[len(mesh["cells"])]))
    for kind, mesh in inputs["boundary_meshes"].items()
})
with torch.no_grad():
    out = model(
        prediction_points=inputs["prediction_points"], boundary_meshes=dict(meshes.items()),
        reference_lengths=inputs["reference_lengths"],
        global_data=TensorDict(inputs["global_data"], batch_size=[]), prediction_chunk_size=None,
    )
out = getattr(out, "point_data", out)
torch.save({(k if isinstance(k, str) else ".".join(k)): out[k] for k in out.keys(True, True)}, sys.argv[3])
"""


@pytest.mark.skipif(PEER is None, reason="GLOBE_REFERENCE_PYTHON names no Python that holds nvidia-physicsnemo")
@pytest.mark.parametrize("changes", [{}, {"network_type": "mlp"}, {"theta": 0.8, "expand_far_targets": True}])
@pytest.mark.parametrize("dims", [2, 3])
def test_physicsnemo_computes_the_same_from_our_file(dims: int, changes: dict[str, Any], tmp_path: Path) -> None:
    assert PEER is not None
    model, case = make_model(dims, dtype=torch.float32, **changes), make_case(dims, dtype=torch.float32)
    case.boundary_meshes["wall"].measure_weights = None
    to_mdlus(model, tmp_path / "ours.mdlus")
    inputs = {
        "prediction_points": case.prediction_points,
        "boundary_meshes": {
            kind: {"points": mesh.points, "cells": mesh.cells, "cell_data": mesh.cell_data.to_dict()}
            for kind, mesh in case.boundary_meshes.items()
        },
        "reference_lengths": case.reference_lengths,
        "global_data": case.global_data,
    }
    torch.save(inputs, tmp_path / "inputs.pt")
    (tmp_path / "peer.py").write_text(PEER_SCRIPT)
    names = ["peer.py", "ours.mdlus", "inputs.pt", "outputs.pt"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([PEER, *names], cwd=tmp_path, check=True, env=environment)
    expected = torch.load(tmp_path / "outputs.pt", weights_only=True)
    with torch.no_grad():
        found = fields_of(model, case, prediction_chunk_size=None)
    assert_fields_agree(found, expected, torch.float32)
