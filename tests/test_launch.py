"""Launching on many GPUs: the scripts, their YAML and the command line agree."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from globe_lightning.callbacks.time_limit import LIMIT_EXIT
from globe_lightning.cli import GlobeCLI, shipped_configs

LAUNCH = shipped_configs() / "launch"
OVERLAY = yaml.safe_load((LAUNCH / "multi_node.yaml").read_text(encoding="utf-8"))
SCRIPTS = sorted(LAUNCH.glob("*.sh"))
BASH = shutil.which("bash")

pytestmark = pytest.mark.skipif(BASH is None, reason="needs bash")


def directives() -> dict[str, str]:
    """What slurm.sh asks of Slurm."""
    text = (LAUNCH / "slurm.sh").read_text(encoding="utf-8")
    return dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", text, flags=re.MULTILINE))


@pytest.fixture
def fakes(tmp_path, monkeypatch):
    """Programs that only note how they are called, before all others in the path; srun ends with code $FAKE_CODE."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("srun", "torchrun", "scontrol"):
        note = tmp_path / f"{name}.json"
        lines = [
            "#!/usr/bin/env python3",
            "import json, os, sys",
            f"json.dump(sys.argv[1:], open({str(note)!r}, 'w'))",
            "sys.exit(int(os.environ.get('FAKE_CODE', 0)) if sys.argv[0].endswith('srun') else 0)",
        ]
        (folder / name).write_text("\n".join(lines) + "\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def called(name):
        note = tmp_path / f"{name}.json"
        return json.loads(note.read_text()) if note.exists() else None

    return called


def run(script: str, *arguments: str, **environment: str) -> int:
    done = subprocess.run([str(BASH), str(LAUNCH / script), *arguments], env={**os.environ, **environment}, timeout=120)
    return done.returncode


def slurm(asked: dict[str, str]) -> dict[str, str]:
    """The variables that Slurm sets in a job."""
    return {
        "SLURM_NNODES": asked["nodes"],
        "SLURM_NTASKS_PER_NODE": asked["ntasks-per-node"],
        "SLURM_JOB_ID": "77",
    }


def flags(arguments: list[str]) -> dict[str, str]:
    """{flag: value} of arguments in pairs; the last of each counts."""
    return {
        name.removeprefix("--"): value
        for name, value in pairwise(arguments)
        if name.startswith("--") and not value.startswith("--")
    }


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_shell_syntax(path):
    assert subprocess.run([str(BASH), "-n", str(path)], capture_output=True, timeout=60).stderr == b""
    assert path.read_text(encoding="utf-8").startswith("#!/bin/bash\n")


def test_script_and_yaml_agree():
    asked, trainer = directives(), OVERLAY["trainer"]
    assert int(asked["nodes"]) == trainer["num_nodes"]
    assert int(asked["ntasks-per-node"]) == int(asked["gpus-per-node"]) == trainer["devices"]
    # Slurm's signal comes as long before the end as the callback wants to be done.
    hours, minutes, seconds = map(int, OVERLAY["time_limit"]["margin"].split(":"))
    name, before = asked["signal"].split("@")
    assert name == "USR1" and int(before) == (hours * 60 + minutes) * 60 + seconds
    torchrun = (LAUNCH / "torchrun.sh").read_text(encoding="utf-8")
    assert f"NODES:-{trainer['num_nodes']}}}" in torchrun and f"DEVICES:-{trainer['devices']}}}" in torchrun


def effective(arguments: list[str], tmp_path: Path) -> GlobeCLI:
    """The command line as it would be built, on this machine's CPU in place of the GPUs."""

    class Parsed(GlobeCLI):
        def instantiate_classes(self) -> None:
            pass

    words = [word for word in arguments if not word.startswith("--ckpt_path") and word != "last"]
    return Parsed([*words, f"--run.root={tmp_path}"], run=False)


@pytest.mark.parametrize(("nodes", "tasks"), [(None, None), ("16", "4")])
def test_slurm(fakes, tmp_path, nodes, tasks):
    asked = directives()
    asked |= {"nodes": nodes, "ntasks-per-node": tasks} if nodes else {}
    assert run("slurm.sh", "configs/quickstart.yaml", "--model.lr", "1e-3", **slurm(asked)) == 0
    called = fakes("srun")
    start = called.index("globe")
    assert called[start + 1] == "fit" and "--ckpt_path" in called
    assert {"--kill-on-bad-exit=0", "--wait=60"} == set(called[:start])
    config = effective(called[start + 2 :], tmp_path).config
    assert config.trainer.num_nodes == int(asked["nodes"])
    assert int(config.trainer.devices) == int(asked["ntasks-per-node"])
    assert config.trainer.strategy == "ddp" and config.trainer.accelerator == "gpu" and config.model.lr == 1e-3
    assert config.time_limit.margin == OVERLAY["time_limit"]["margin"]
    assert fakes("scontrol") is None


@pytest.mark.parametrize(("code", "again"), [(LIMIT_EXIT, ["requeue", "77"]), (1, None), (143, None), (0, None)])
def test_only_the_time_limit_puts_the_job_in_the_queue_again(fakes, code, again):
    assert run("slurm.sh", "configs/quickstart.yaml", FAKE_CODE=str(code), **slurm(directives())) == code
    assert fakes("scontrol") == again


@pytest.mark.parametrize(("nodes", "devices"), [(None, None), ("3", "2")])
def test_torchrun(fakes, tmp_path, nodes, devices):
    environment = {"NODE_RANK": "1", "MASTER_ADDR": "first"} | ({"NODES": nodes, "DEVICES": devices} if nodes else {})
    assert run("torchrun.sh", "configs/quickstart.yaml", "--model.lr", "1e-3", **environment) == 0
    called = fakes("torchrun")
    own = called[: called.index("-m")]
    assert called[called.index("-m") + 1 :][:2] == ["globe_lightning", "fit"]
    assert called[-4:] == ["--ckpt_path", "last", "--model.lr", "1e-3"]
    trainer = effective(called[called.index("fit") + 1 :], tmp_path).config.trainer
    assert flags(own)["nnodes"] == str(trainer.num_nodes) == (nodes or str(OVERLAY["trainer"]["num_nodes"]))
    assert flags(own)["nproc-per-node"] == str(trainer.devices) == (devices or str(OVERLAY["trainer"]["devices"]))
    assert (flags(own)["node-rank"], flags(own)["master-addr"]) == ("1", "first")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_without_a_configuration_the_scripts_say_how(path):
    done = subprocess.run([str(BASH), str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and "give a configuration" in done.stderr


def test_the_page_names_every_script_and_code():
    page = (LAUNCH / "README.md").read_text(encoding="utf-8")
    assert all(path.name in page for path in SCRIPTS) and f"code {LIMIT_EXIT}" in page and "multi_node.yaml" in page
