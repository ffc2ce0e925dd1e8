"""Long runs and rough endings: kills at random moments, a node that is lost, a process that fails, a soak."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import lightning.pytorch as pl
import psutil
import pytest
import torch
from data_synthetic import write_dataset
from helpers import free_port
from test_cli import rows_of
from test_resume import assert_same_run, data_arguments, fit

from datamodules import AirFRANSDataModule

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A dataset of which 6 cases train and 2 validate."""
    folder = tmp_path_factory.mktemp("airfoils")
    write_dataset(folder, n_train=8, n_test=1)
    AirFRANSDataModule(**data_arguments(folder)).prepare(progress=False)
    return folder


# One process


class Steps(pl.Callback):
    """Tells another process how far training is."""

    def __init__(self, counter):
        self.counter = counter

    def on_train_batch_start(self, trainer, *args):
        self.counter.value = trainer.global_step


def _run_of_sixty_steps(root, folder, counter):
    torch.set_num_threads(1)
    fit(root, folder, Steps(counter), max_epochs=10, checkpoint={"last_every_n_steps": 1, "save_top_k": 2})


def test_thirty_kills_at_random_moments(root, tmp_path):
    context, moments = mp.get_context("fork"), random.Random(0)
    counter = context.Value("i", -1)

    def start(folder):
        counter.value = -1
        process = context.Process(target=_run_of_sixty_steps, args=(root, folder, counter))
        process.start()
        return process

    process = start(tmp_path / "straight")
    while counter.value < 1:
        time.sleep(0.001)
    before = time.monotonic()
    process.join()
    assert process.exitcode == 0
    step_seconds = (time.monotonic() - before) / 59
    lost = []
    for step in sorted(moments.sample(range(58), 30)):
        process = start(tmp_path / "killed")
        while process.is_alive() and counter.value < step:
            time.sleep(0.001)
        process.join(moments.uniform(0, step_seconds))
        assert process.exitcode is None, "killed before its end"
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        last = tmp_path / "killed" / "run" / "checkpoints" / "last.ckpt"
        lost.append(counter.value - (torch.load(last, weights_only=True)["global_step"] if last.is_file() else 0))
    process = start(tmp_path / "killed")
    process.join()
    print(f"30 kills; steps lost {lost}")
    assert process.exitcode == 0
    assert_same_run(tmp_path / "killed", tmp_path / "straight")


class Meter(pl.Callback):
    """Notes memory, open files and loss as training goes on."""

    def __init__(self):
        self.memory, self.files, self.losses = [], [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, *args):
        process = psutil.Process()
        self.memory.append(process.memory_info().rss)
        self.files.append(process.num_fds())
        self.losses.append(float(outputs["loss"]))


def _soak(root, folder, steps):
    torch.set_num_threads(1)
    meter = Meter()
    fit(root, folder, meter, max_epochs=-1, max_steps=steps, check_val_every_n_epoch=20, log_every_n_steps=10)
    torch.save({"memory": meter.memory, "files": meter.files, "losses": meter.losses}, folder / "meter.pt")


def test_a_soak_of_two_thousand_steps(root, tmp_path):
    found = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        process = mp.get_context("fork").Process(target=_soak, args=(root, tmp_path / name, 2000))
        process.start()
        process.join()
        assert process.exitcode == 0
        found.append(torch.load(tmp_path / name / "meter.pt", weights_only=True))
    for meter in found:
        growth = max(meter["memory"][200:]) / meter["memory"][199] - 1
        print(f"memory {meter['memory'][199] / 1e6:.1f} MB, growth {growth:.4f}; files {set(meter['files'][200:])}")
        assert len(meter["memory"]) == 2000 and growth < 0.02
        assert max(meter["files"][200:]) <= max(meter["files"][:200])
    assert found[0]["losses"] == found[1]["losses"]
    assert (tmp_path / "first/run/metrics.csv").read_text() == (tmp_path / "second/run/metrics.csv").read_text()


# Many processes

SMALL = [
    "--config=configs/quickstart.yaml",
    "--model.hidden_layer_sizes=[8]",
    "--model.n_latent_scalars=2",
    "--model.n_latent_vectors=1",
    "--model.n_communication_hyperlayers=1",
    "--data.init_args.n_train_points=40",
    "--data.init_args.n_train_wall_points=20",
    "--data.init_args.n_validation=2",
    "--trainer.check_val_every_n_epoch=10",
    "--trainer.max_epochs=40",
    "--progress_bar.refresh_rate=0",
    "--pictures.every_n_epochs=0",
    "--checkpoint.last_every_n_steps=2",
    "--trainer.strategy=ddp",
]
LOST = "globe: error: another process of this run has ended or cannot be reached"


ROUGH = '''
import os
import time
from lightning.pytorch import Callback

class Saboteur(Callback):
    """Fails in one process at one step."""

    def __init__(self, rank: int, step: int):
        self.rank, self.step = rank, step

    def on_train_batch_start(self, trainer, *args):
        if trainer.global_rank == self.rank and trainer.global_step == self.step:
            print(f"failing at {time.monotonic()}", flush=True)
            raise RuntimeError("the saboteur was here")

class Brake(Callback):
    """Holds training at a step until a file is there: who interrupts it comes in time, however slow."""

    def __init__(self, step: int, until: str):
        self.step, self.until = step, until

    def on_train_batch_start(self, trainer, *args):
        while trainer.global_step >= self.step and not os.path.exists(self.until):
            time.sleep(0.01)
'''
DOWN_SECONDS = 180
"""Until processes must be gone whose run has lost one; one that hangs stays for the process group's half hour."""


class Programs:
    """Starts globe in a folder, with the callbacks above; kills what is still alive at the end of a test."""

    def __init__(self, folder):
        self.folder, self.started = folder, []
        (folder / "rough.py").write_text(ROUGH)

    def start(self, command, output, **environment):
        """A program whose output goes to a file."""
        paths = [str(self.folder), os.environ.get("PYTHONPATH", "")]
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
        with open(self.folder / output, "w") as file:
            program = psutil.Popen(command, stdout=file, stderr=file, env={**os.environ, **environment})
        self.started.append(program)
        return program

    def kill(self, program):
        """Kill a program and all that it has started; its workers lead sessions of their own."""
        try:
            family = [*program.children(recursive=True), program]
        except psutil.NoSuchProcess:
            return
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def family(self, program):
        """A program's processes, to be watched after its end."""
        return [program, *program.children(recursive=True)]

    def code(self, program, output, seconds=3600, family=()):
        """The exit code of a program that ends by itself, and its family with it."""
        for _ in range(10 * seconds):  # naps are counted, so that the time in which all are stopped is not
            if program.poll() is not None and not any(map(alive, family)):
                return program.returncode
            time.sleep(0.1)
        pytest.fail(f"still there after {seconds} s:\n{self.text(output)}")

    def text(self, output):
        """What a program has written."""
        return (self.folder / output).read_text()


def alive(process):
    """Whether a process runs; one that has ended and is only not yet waited for does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def programs(tmp_path):
    found = Programs(tmp_path)
    yield found
    for program in found.started:
        found.kill(program)


@pytest.fixture(scope="module")
def nodes():
    """Two network namespaces joined by a cable, if this machine lets us; (command prefix, environment) of each."""
    # Named after this process: another run of these tests beside it has its own.
    names, address = [f"globe-{os.getpid()}-{number}" for number in range(2)], "10.87.3"
    prefixes = [["ip", "netns", "exec", name] for name in names]
    commands = [
        *(["ip", "netns", "add", name] for name in names),
        ["ip", "link", "add", "globe0", "netns", names[0], "type", "veth", "peer", "name", "globe1", "netns", names[1]],
    ]
    for number, prefix in enumerate(prefixes):
        commands += [
            [*prefix, "ip", "addr", "add", f"{address}.{number + 1}/24", "dev", f"globe{number}"],
            [*prefix, "ip", "link", "set", f"globe{number}", "up"],
            [*prefix, "ip", "link", "set", "lo", "up"],
        ]
    try:
        joined = all(subprocess.run(command, capture_output=True).returncode == 0 for command in commands)
    except OSError:
        joined = False
    if joined:
        yield f"{address}.1", [(prefix, {"GLOO_SOCKET_IFNAME": f"globe{i}"}) for i, prefix in enumerate(prefixes)]
    else:
        yield "127.0.0.1", [([], {}), ([], {})]
    for name in names if joined else []:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def callbacks(**arguments):
    """The flag that adds callbacks from above, {class: its arguments}."""
    items = [
        f"{{class_path: rough.{name}, init_args: {{{', '.join(f'{key}: {value}' for key, value in own.items())}}}}}"
        for name, own in arguments.items()
    ]
    return f"--trainer.callbacks=[{', '.join(items)}]"


def launch(programs, name, root, nodes, *more):
    """A torchrun of one process on each node; their outputs go to <name>-<node>.txt."""
    address, places = nodes
    port, found = free_port(), []
    for rank, (prefix, environment) in enumerate(places):
        command = [
            *prefix,
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={rank}"),
            *("--nproc-per-node=1", f"--master-addr={address}", f"--master-port={port}", "-m", "globe_lightning"),
            *("fit", *SMALL, "--trainer.num_nodes=2", f"--data.init_args.root={root}"),
            *(f"--run.root={programs.folder}", f"--run.name={name}", *more),
        ]
        found.append(programs.start(command, f"{name}-{rank}.txt", **environment))
    return found


def wait_for_steps(folder, n, running):
    """Until a run's log has so many rows."""
    log = Path(folder) / "metrics.csv"
    while not (log.is_file() and len(log.read_text().splitlines()) > n):
        assert all(program.poll() is None for program in running), "ended before its time"
        time.sleep(0.1)


def test_a_lost_node_ends_the_other_and_both_resume(root, tmp_path, nodes, programs):
    def finish(name, pair):
        for rank, program in enumerate(pair):
            assert programs.code(program, f"{name}-{rank}.txt") == 0, programs.text(f"{name}-{rank}.txt")

    finish("straight", launch(programs, "straight", root, nodes))
    lost = tmp_path / "lost"
    first, second = pair = launch(programs, "broken", root, nodes, callbacks(Brake={"step": 90, "until": lost}))
    wait_for_steps(tmp_path / "broken", 40, pair)
    family = programs.family(first)
    programs.kill(second)
    killed = time.monotonic()
    lost.touch()
    assert programs.code(first, "broken-0.txt", DOWN_SECONDS, family) != 0
    seconds = time.monotonic() - killed
    text = programs.text("broken-0.txt")
    assert LOST in text, text
    finish("broken", launch(programs, "broken", root, nodes, "--ckpt_path=last"))
    assert "resuming from" in programs.text("broken-0.txt")
    one, other = (
        torch.load(tmp_path / name / "checkpoints" / "last.ckpt", weights_only=True) for name in ("broken", "straight")
    )
    assert one["global_step"] == other["global_step"] == 120
    assert all(torch.equal(value, other["state_dict"][name]) for name, value in one["state_dict"].items())
    logs = [
        [{key: value for key, value in row.items() if "throughput" not in key} for row in rows_of(path)]
        for path in (tmp_path / "broken" / "metrics.csv", tmp_path / "straight" / "metrics.csv")
    ]
    assert logs[0] == logs[1] and len(logs[0]) >= 120
    print(f"the other node ended {seconds:.1f} s after the kill; namespaces: {bool(nodes[1][0][0])}")


def test_sigterm_to_the_first_of_two_processes_stops_both(root, tmp_path, programs):
    command = [sys.executable, "-m", "globe_lightning", "fit", *SMALL, "--trainer.devices=2"]
    command += [f"--data.init_args.root={root}", f"--run.root={tmp_path}"]
    sent = tmp_path / "sent"
    first = programs.start([*command, callbacks(Brake={"step": 90, "until": sent})], "output.txt")
    wait_for_steps(tmp_path / "quickstart", 20, [first])
    family = programs.family(first)
    first.send_signal(signal.SIGTERM)
    sent.touch()
    assert len(family) >= 2
    assert programs.code(first, "output.txt", DOWN_SECONDS, family) == 143, programs.text("output.txt")
    (steps,) = re.findall(r"stopped by SIGTERM after (\d+) steps", programs.text("output.txt"))
    state = torch.load(tmp_path / "quickstart" / "checkpoints" / "last.ckpt", weights_only=True)
    assert state["global_step"] == int(steps) >= 10


@pytest.mark.parametrize("launcher", ["lightning", "torchrun"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_failing_process_brings_the_others_down(root, tmp_path, programs, launcher, rank):
    program = ["-m", "globe_lightning"]
    if launcher == "torchrun":
        program = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}", *program]
    command = [sys.executable, *program, "fit", *SMALL, "--trainer.devices=2", f"--data.init_args.root={root}"]
    held = tmp_path / "watched"
    command.append(callbacks(Brake={"step": 4, "until": held}, Saboteur={"rank": rank, "step": 5}))
    first = programs.start([*command, f"--run.root={tmp_path}"], "output.txt")
    wait_for_steps(tmp_path / "quickstart", 2, [first])
    family = programs.family(first)
    held.touch()
    assert len(family) >= (2 if launcher == "lightning" else 3)
    assert programs.code(first, "output.txt", DOWN_SECONDS, family) != 0
    ended = time.monotonic()
    text = programs.text("output.txt")
    assert "RuntimeError: the saboteur was here" in text and "Traceback" in text
    failed = float(text.split("failing at ")[1].split()[0])
    print(f"{launcher}, process {rank}: all ended {ended - failed:.1f} s after the failure")
