"""Broken configurations: each ends with one readable error that names the key, what was found and the fix."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from globe_lightning import GlobeLightningModule
from globe_lightning.cli import main
from globe_lightning.config_errors import did_you_mean, explain_parse_error, explain_run_error

SHORT = [
    "--config=configs/quickstart.yaml",
    "--model.hidden_layer_sizes=[8]",
    "--model.n_latent_scalars=2",
    "--model.n_latent_vectors=1",
    "--model.n_communication_hyperlayers=1",
    "--data.init_args.n_train_points=16",
    "--data.init_args.n_train_wall_points=8",
    "--data.init_args.n_validation_points=50",
    "--data.init_args.n_validation=1",
    "--trainer.max_epochs=1",
    "--trainer.limit_train_batches=1",
    "--trainer.limit_val_batches=1",
    "--trainer.check_val_every_n_epoch=1",
    "--pictures.every_n_epochs=0",
]
CALLBACKS = "lightning.pytorch.callbacks"


class Opaque:
    """What a checkpoint of elsewhere may hold."""


@pytest.fixture(scope="module")
def place(tmp_path_factory, small_root) -> Path:
    """A folder with a small dataset, faulty configurations and faulty checkpoints."""
    folder = tmp_path_factory.mktemp("broken")
    (folder / "dataset").symlink_to(small_root)
    texts = {
        "model_key": "model:\n  hiden_layer_sizes: [8]\n",
        "group": "modell:\n  lr: 1\n",
        "data_key": "data:\n  init_args:\n    n_train_pionts: 3\n",
        "value": "model:\n  lr: fast\n",
        "bracket": "model:\n  lr: [1\n",
        "tab": "model:\n\tlr: 1\n",
        "list": "- model\n- data\n",
        "empty": "",
    }
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text)
    (folder / "latin.yaml").write_bytes("run:\n  name: \xfcber\n".encode("latin-1"))
    (folder / "file").write_text("in the way of a folder")
    (folder / "junk.ckpt").write_bytes(b"no checkpoint at all")
    (folder / "empty.ckpt").write_bytes(b"")
    torch.save({"state_dict": {}, "extra": Opaque()}, folder / "objects.ckpt")
    torch.save({"weights": torch.zeros(2)}, folder / "weights.ckpt")
    torch.save([1, 2], folder / "list.ckpt")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        main(["fit", *SHORT, "--data.init_args.root=dataset", "--run.name=good"])
    good = folder / "runs" / "good" / "checkpoints" / "last.ckpt"
    (folder / "cut.ckpt").write_bytes(good.read_bytes()[: good.stat().st_size // 2])
    content = torch.load(good, weights_only=True)
    names = [name for name in content["state_dict"] if name.startswith("network.")]
    content["state_dict"]["network.another"] = content["state_dict"].pop(names[0])
    torch.save(content, folder / "renamed.ckpt")
    return folder


@pytest.fixture
def here(place, monkeypatch) -> Path:
    monkeypatch.chdir(place)
    for name in ("AIRFRANS_DATA_DIR", "DRIVAER_DATA_DIR", "GLOBE_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)
    return place


FIT = {
    # misspelt keys
    "key on the command line": ("--model.learning_rate=1", r"model\.learning_rate: no such key .* model has .*\blr\b"),
    "key in a file": ("--config=model_key.yaml", r"in model_key\.yaml\); did you mean model\.hidden_layer_sizes\?"),
    "group in a file": ("--config=group.yaml", r"modell\.lr: no such key \(in group\.yaml\); did you mean model\?"),
    "trainer key": ("--trainer.max_epoch=3", r"trainer\.max_epoch: no such key .* did you mean trainer\.max_epochs\?"),
    "one dash": ("-model.lr=1", r"-model\.lr=1: one dash too few; expected --model\.lr"),
    "data key": ("--data.init_args.n_train_pionts=3", r"did you mean init_args\.n_train_points\?"),
    "no flag": ("extra", r"'extra': options begin with --"),
    "no value": ("--model.lr", r"model\.lr: no value given"),
    # wrong types
    "text for a number": ("--model.lr=fast", r"model\.lr: expected a number, found fast \(on the command line\)"),
    "text for an integer": (
        "--trainer.max_epochs=many",
        r"trainer\.max_epochs: expected an integer or null, found many",
    ),
    "text for a list": ("--model.hidden_layer_sizes=wide", r"model\.hidden_layer_sizes: expected a list, found wide"),
    "text for a mapping": ("--model.output_field_ranks=C_p", r"output_field_ranks: expected a mapping, found C_p"),
    "text for a scale": ("--model.loss_scales={C_p: big}", r"model\.loss_scales: expected a number, found big"),
    # impossible values
    "learning rate": ("--model.lr=-1", r"model\.lr: expected a positive number, found -1"),
    "dimensions": ("--model.n_spatial_dims=4", r"model\.n_spatial_dims: expected 2 or 3, found 4"),
    "warm-up": ("--model.warmup_steps=-3", r"model\.warmup_steps: expected 0 or a number of steps, found -3"),
    "patience": ("--model.plateau_patience_steps=-2", r"model\.plateau_patience_steps: expected 1 or more"),
    "schedule": ("--model.schedule=linear", r"model\.schedule: expected one of 'plateau', 'cosine', 'constant'"),
    "endless cosine": ("--trainer.max_epochs=-1", r"schedule: cosine needs an end.*trainer\.max_epochs"),
    "task": ("--data.init_args.task=half", r"data\.init_args\.task: expected one of .*'scarce'.*, found 'half'"),
    "everything set aside": ("--data.init_args.n_validation=99", r"lower n_validation"),
    "pictures": ("--pictures.every_n_epochs=-1", r"pictures\.every_n_epochs: expected 0 \(never\)"),
    "checkpoint mode": ("--checkpoint.mode=lowest", r"checkpoint\.mode: .*min, max"),
    "monitor": ("--checkpoint.monitor=val/lss", r"checkpoint\.monitor: no metric 'val/lss'.* did you mean val/loss\?"),
    # the trainer
    "no devices": ("--trainer.devices=0", r"trainer\.devices: expected a number of processes, 1 or more, found '0'"),
    "devices in words": ("--trainer.devices=lots", r"trainer\.devices: expected .* found 'lots' \(accelerator cpu\)"),
    "accelerator": ("--trainer.accelerator=warp", r"trainer\.accelerator: .*Available names are"),
    "strategy": ("--trainer.strategy=ddpp", r"trainer\.strategy: .*ddp, ddp_spawn"),
    "precision": ("--trainer.precision=bf17", r"trainer\.precision: expected .*'bf16-mixed'.*, found bf17"),
    "float16": ("--trainer.precision=16-mixed", r"trainer\.precision: 16-mixed is not supported.*expected bf16-mixed"),
    "accumulation": ("--trainer.accumulate_grad_batches=0", r"trainer\.accumulate_grad_batches: expected .* found 0"),
    "validation interval": ("--trainer.val_check_interval=1.5", r"trainer\.val_check_interval: .*\[0\.0, 1\.0\]"),
    # classes
    "data class": ("--data=AirfransDataModule", r"no class 'AirfransDataModule' .*did you mean AirFRANSDataModule\?"),
    "class of another kind": ("--data.class_path=torch.nn.Linear", r"data: torch\.nn\.Linear is not a LightningData"),
    "logger": ("--trainer.logger=CSVLoger", r"trainer\.logger: no class 'CSVLoger' .*did you mean CSVLogger\?"),
    "callback": ("--trainer.callbacks=[{class_path: Nope}]", r"trainer\.callbacks: no class 'Nope'"),
    "callback's argument": (
        f"--trainer.callbacks=[{{class_path: {CALLBACKS}.Timer, init_args: {{x: 1}}}}]",
        r"trainer\.callbacks\.init_args\.x: Timer has no such argument; it has duration",
    ),
    "early stopping": (
        f"--trainer.callbacks=[{{class_path: {CALLBACKS}.EarlyStopping, init_args: {{monitor: val/lss}}}}]",
        r"EarlyStopping\.monitor: no metric 'val/lss' .*did you mean val/loss\?",
    ),
    # fields and schemas
    "unknown field": ("--model.loss_scales={C_q: 1}", r"model\.loss_scales: \['C_q'\] are not output fields"),
    "rank": ("--model.output_field_ranks={C_p: 2}", r"model\.output_field_ranks\['C_p'\]: a rank is 0 .* or 1"),
    "reference lengths": (
        "--model.reference_length_names=[chord]",
        r"reference_length_names: the model has \['chord'\]",
    ),
    "boundary type": ("--model.boundary_source_data_ranks={wall: {}}", r"boundary_source_data_ranks: .*'no_slip'"),
    "data of cars": ("--config=configs/drivaer_quickstart.yaml", r"C_f|init_args|fit the model"),
    # files and folders
    "no configuration": ("--config=nowhere.yaml", r"config: no file 'nowhere\.yaml'.*configs/quickstart\.yaml"),
    "folder as configuration": ("--config=runs", r"config: .*runs"),
    "bracket": ("--config=bracket.yaml", r"config: bracket\.yaml, line \d, column \d: not valid YAML"),
    "list as configuration": ("--config=list.yaml", r"config: list\.yaml: expected keys with values .* found list"),
    "empty configuration": ("--config=empty.yaml", r"config: empty\.yaml: expected keys .* found an empty file"),
    "no dataset": ("--data.init_args.root=/nowhere/at/all", r"/nowhere/at/all: no such folder, named by root"),
    "dataset not given": ("--data.init_args.root=null", r"root: not given.*AIRFRANS_DATA_DIR"),
    "dataset without a manifest": ("--data.init_args.root=.", r"root: manifest\.json: no such file"),
    "output folder": ("--run.root=file", r"run\.root: cannot write to file/quickstart .*set run\.root"),
    "read-only output folder": ("--run.root=/sys", r"run\.root: cannot write to /sys/quickstart .*set run\.root"),
    "cache": ("--data.init_args.cache_dir=file", r"cannot write the cache entry.*Set cache_dir"),
    # checkpoints
    "no checkpoint": ("--ckpt_path=nowhere.ckpt", r"ckpt_path: no file 'nowhere\.ckpt'"),
    "junk": ("--ckpt_path=junk.ckpt", r"ckpt_path: junk\.ckpt: not a checkpoint .*damaged"),
    "half a checkpoint": ("--ckpt_path=cut.ckpt", r"ckpt_path: cut\.ckpt: not a checkpoint .*damaged"),
    "Python objects": ("--ckpt_path=objects.ckpt", r"ckpt_path: objects\.ckpt: .*Python objects"),
    "bare weights": ("--ckpt_path=weights.ckpt", r"ckpt_path: weights\.ckpt: not a checkpoint .*'weights'"),
    "other weights": ("--ckpt_path=renamed.ckpt", r"ckpt_path: the checkpoint's weights do not fit"),
}

COMMANDS = {
    "nothing": ([], r"no subcommand: expected one of fit, validate, test, predict, prepare"),
    "subcommand": (["fitt", *SHORT], r"no subcommand 'fitt': .*did you mean fit\?"),
    "configuration before the subcommand": (["--config=a.yaml", "fit"], r"config: stands before the subcommand"),
    "no arguments": (["fit"], r"missing: model\.n_spatial_dims, .*--config"),
    "test before fit": (["test", *SHORT, "--run.name=none"], r"runs/none/checkpoints: .*train first"),
    "wider than the checkpoint": (
        ["test", *SHORT, "--ckpt_path=runs/good/checkpoints/last.ckpt", "--model.hidden_layer_sizes=[4]"],
        r"model\.hidden_layer_sizes: the configuration says \[4\], the checkpoint \[8\]",
    ),
    "fields other than the checkpoint's": (
        ["test", *SHORT, "--ckpt_path=runs/good/checkpoints/last.ckpt", "--model.output_field_ranks={C_p: 0}"],
        r"model\.output_field_ranks: the configuration says .* the checkpoint",
    ),
}

CASES = {name: (["fit", *SHORT, "--data.init_args.root=dataset", flag], text) for name, (flag, text) in FIT.items()}
CASES |= COMMANDS


def require_readable(message: str, pattern: str) -> None:
    assert message.startswith("globe: error: ")
    text = message.removeprefix("globe: error: ").partition("\n(set GLOBE_TRACEBACK")[0]
    assert re.search(pattern, text, flags=re.DOTALL), text
    for noise in ("Traceback", "Parser key", "Subtypes", "<class", "usage:", "Namespace(", "site-packages", "Errno"):
        if not (noise == "Errno" and "cache entry" in text):
            assert noise not in text, text
    assert len(text.splitlines()) <= 12, text


@pytest.mark.parametrize("name", CASES)
def test_one_readable_error(name, here, capsys):
    arguments, pattern = CASES[name]
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert isinstance(raised.value.code, str)  # printed to stderr by Python, with exit code 1
    require_readable(raised.value.code, pattern)
    assert "Traceback" not in "".join(capsys.readouterr())


@pytest.mark.parametrize("name", ["key in a file", "precision", "other weights"])
def test_a_process_of_its_own(name, here):
    arguments, pattern = CASES[name]
    command = [sys.executable, "-m", "globe_lightning", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr
    require_readable(done.stderr[done.stderr.index("globe: error:") :], pattern)


def test_the_configuration_itself_is_good(here):
    """So that every case above fails for its own reason."""
    main(["fit", *SHORT, "--data.init_args.root=dataset", "--run.name=again"])
    assert list(here.rglob("again/checkpoints/last.ckpt"))


def test_a_bug_is_not_taken_for_a_mistake(here, monkeypatch):
    def broken(self, *args):
        raise KeyError("a bug of ours")

    monkeypatch.setattr(GlobeLightningModule, "training_step", broken)
    with pytest.raises(KeyError, match="a bug of ours"):
        main(["fit", *SHORT, "--data.init_args.root=dataset", "--run.name=bug"])
    assert explain_run_error(KeyError("a bug of ours")) is None


def test_messages_of_unknown_form_are_passed_on():
    assert explain_parse_error("something new", [], []) == "something new"


def test_hints_stay_in_their_group():
    names = ["model.lr", "model.theta", "trainer.thetas"]
    assert did_you_mean("model.thet", names) == "; did you mean model.theta?"
    assert did_you_mean("data.theta", names) == ""
