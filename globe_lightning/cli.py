"""The command line: ``globe SUBCOMMAND --config CONFIG [--key value ...]``.

Subcommands are fit, validate, test, predict, prepare and sensitivity; ``globe convert`` and ``globe export`` work on
finished models and need no configuration.
"""

# ruff: noqa: E402 - the allocator is configured before torch is imported

from __future__ import annotations

import os
import sys
from argparse import ArgumentError
from collections.abc import Iterator, MutableMapping, Sequence
from pathlib import Path
from typing import Any


def configure_allocator(environment: MutableMapping[str, str]) -> None:
    """Let the CUDA allocator's segments grow, unless the user has set something under either of its names.

    Cases of ever-changing size fragment fixed segments. Every torch reads the older of the two names.
    """
    if not any(environment.get(name) for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")):
        environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"


configure_allocator(os.environ)
# OpenMP threads that spin while they wait cost several times the work on shared cores; read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from globe_lightning.callbacks.checkpoints import BestCheckpoint
from globe_lightning.callbacks.failures import FailTogether, explain_lost_contact
from globe_lightning.callbacks.pictures import PictureWriter
from globe_lightning.callbacks.predictions import PredictionWriter
from globe_lightning.callbacks.progress import LossBar
from globe_lightning.callbacks.sensitivities import write_sensitivities
from globe_lightning.callbacks.tables import CaseTables
from globe_lightning.callbacks.throughput import Throughput
from globe_lightning.callbacks.time_limit import TimeLimit
from globe_lightning.commands import COMMANDS, COMMANDS_HELP
from globe_lightning.config_errors import (
    ConfigurationError,
    check_trainer,
    explain_building,
    explain_parse_error,
    explain_run_error,
    explain_trainer,
    read_sources,
)
from globe_lightning.geometry_arguments import add_geometry_help, expand_geometry
from globe_lightning.module import MONITOR, MONITOR_MODE, SCHEMA_ARGUMENTS, GlobeLightningModule
from globe_lightning.plain_values import plain
from globe_lightning.run_folder import RunFolder, RunLogger, written_whole
from globe_lightning.sharing import load_weights, read_checkpoint

WEIGHT_ARGUMENTS = (
    "n_communication_hyperlayers",
    "n_latent_scalars",
    "n_latent_vectors",
    "hidden_layer_sizes",
    "n_spherical_harmonics",
    "network_type",
)
"""The model arguments, beside those that describe the data, on which the shapes of the weights depend."""

CONFIG_FLAGS = ("--config", "-c")

UNTRAINED = "untrained"
"""The value of ``--ckpt_path`` that asks for the network as it is before training."""


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line; ``args`` default to those of the process.

    Raises:
        SystemExit: something the user can mend is wrong; its message says what. The error itself is its cause.
    """
    arguments = [str(argument) for argument in (sys.argv[1:] if args is None else args)]
    try:
        if arguments and arguments[0] in COMMANDS:
            COMMANDS[arguments[0]](arguments[1:])
        else:
            GlobeCLI(arguments)
    except Exception as error:
        message = explain_lost_contact(error) or explain_run_error(error)
        if message is None and isinstance(error, (OSError, ValueError, ModuleNotFoundError, MisconfigurationException)):
            message = str(error)
        if message is None or os.environ.get("GLOBE_TRACEBACK"):
            raise
        raise SystemExit(f"globe: error: {message}\n(set GLOBE_TRACEBACK=1 to see where it was raised)") from error


class GlobeTrainer(pl.Trainer):
    """Lightning's trainer, with ``prepare`` and ``sensitivity``; several processes fail together."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.callbacks: list[pl.Callback]
        self.callbacks.append(FailTogether())
        if isinstance(self.strategy, DDPStrategy):
            self.strategy._ddp_kwargs.setdefault("gradient_as_bucket_view", True)  # gradients are stored once

    def prepare(self, model: Any = None, datamodule: Any = None) -> None:
        """Preprocess the data ahead of time, without training."""
        progress = self.progress_bar_callback is not None
        datamodule.prepare(progress) if hasattr(datamodule, "prepare") else datamodule.prepare_data()

    def sensitivity(
        self,
        model: Any = None,
        datamodule: Any = None,
        of: str = "Cd",
        case: str | None = None,
        smoothing_length: float | None = None,
        ckpt_path: str | None = None,
    ) -> None:
        """Show where to push the surface: the derivative of a force coefficient with respect to the shape.

        Args:
            model: the module.
            datamodule: the cases are those of its predict split.
            of: the coefficient, e.g. Cd, Cl, Cd_own.
            case: one case instead of all.
            smoothing_length: variations of the derivative shorter than this [m] are smoothed in the picture and in one
                array of the file; twice the mean width of the model's faces if not given, 0 for none.
            ckpt_path: a checkpoint file, "best", "last" or "untrained"; the best of the run if not given.
        """
        if ckpt_path is not None:
            load_weights(model, ckpt_path)
        folder = RunFolder(str(Path(self.default_root_dir).parent), Path(self.default_root_dir).name).sensitivities
        datamodule.trainer = self
        progress = self.progress_bar_callback is not None
        write_sensitivities(model, datamodule, of, folder, self.strategy.root_device, case, smoothing_length, progress)


class GlobeCLI(LightningCLI):
    """LightningCLI with a run folder, always-on callbacks, and one rule for what a checkpoint and the flags decide.

    Args:
        args: command-line arguments; those of the process if None.
        run: whether to run the subcommand. With False there is no subcommand, and ``model``, ``datamodule`` and
            ``trainer`` are built and left to the caller; any configuration file will do, a run's saved one too.
    """

    def __init__(self, args: Sequence[str] | None = None, run: bool = True) -> None:
        import datamodules

        for name in datamodules.__all__:  # imported classes can be named without their module
            getattr(datamodules, name)
        self._runs = run
        arguments = [str(argument) for argument in (sys.argv[1:] if args is None else args)]
        if run and arguments and arguments[0].partition("=")[0] in CONFIG_FLAGS:
            raise ConfigurationError("config: stands before the subcommand; expected globe fit --config FILE")
        arguments = find_configs(arguments)
        self._sources = read_sources(arguments, dict(config_values(arguments)))
        super().__init__(
            GlobeLightningModule,
            pl.LightningDataModule,
            save_config_callback=RunConfig,
            trainer_class=GlobeTrainer,
            seed_everything_default=42,
            subclass_mode_data=True,
            args=expand_geometry(arguments),
            run=run,
            auto_configure_optimizers=False,
            parser_kwargs={"epilog": COMMANDS_HELP},
            load_from_checkpoint_support=False,
        )

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """A parser that raises its errors, for :func:`main` to explain, and takes no abbreviated flags."""
        return super().init_parser(exit_on_error=False, allow_abbrev=False, **kwargs)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """The subcommands and the trainer arguments that are not the user's."""
        own = {name: {"model", "datamodule"} for name in ("prepare", "sensitivity")}
        return {**LightningCLI.subcommands(), **own}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the run folder and the callbacks that every run has, with their defaults."""
        parser.add_class_arguments(RunFolder, "run", instantiate=False)
        if not self._runs:  # a run's saved configuration holds its subcommand's own arguments too
            for name in ("ckpt_path", "weights_only", "return_predictions", "verbose"):
                parser.add_argument(f"--{name}", type=Any, default=None, help="accepted and not used")
        parser.add_lightning_class_args(BestCheckpoint, "checkpoint")
        parser.add_lightning_class_args(PredictionWriter, "predictions")
        parser.add_lightning_class_args(PictureWriter, "pictures")
        parser.add_lightning_class_args(CaseTables, "tables")
        parser.add_lightning_class_args(LossBar, "progress_bar")
        parser.add_lightning_class_args(Throughput, "throughput")
        parser.add_lightning_class_args(TimeLimit, "time_limit")
        parser.set_defaults(
            {
                "checkpoint.monitor": MONITOR,
                "checkpoint.mode": MONITOR_MODE,
            }
        )

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        """A subcommand's parser; that of predict says what can be done with new shapes."""
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        if subcommand == "predict":
            add_geometry_help(parser)
        return parser

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse; what cannot be parsed is explained."""
        try:
            self.config = parser.parse_args(args)
        except ArgumentError as error:
            known = self._subcommand_parsers.get(args[0] if args else "", parser) if self._runs else parser
            keys = [action.dest for action in known._actions]
            raise ConfigurationError(explain_parse_error(str(error), keys, self._sources)) from error

    def _set_seed(self) -> None:
        """Seed all generators."""
        try:
            super()._set_seed()
        except ValueError as error:
            raise ConfigurationError(f"seed_everything: {error}") from error

    def _parse_ckpt_path(self) -> None:
        """Resolve ``ckpt_path`` in the run folder and settle what the checkpoint's hyperparameters decide."""
        name = self.config.get("subcommand")
        config = self.config[name] if name else self.config
        self.run_folder = RunFolder(**config.run.as_dict())
        if name is None or "ckpt_path" not in config:
            return
        path = self._resolve_checkpoint(name, config.ckpt_path)
        config.ckpt_path = None if path is None else str(path)
        if path is not None:
            if "weights_only" in config:
                config.weights_only = True
            try:
                stored = read_checkpoint(path)["hyper_parameters"]
            except ValueError as error:
                raise ConfigurationError(f"ckpt_path: {error}") from error
            defaults = self._subcommand_parsers[name].get_defaults()["model"]
            settle_hyperparameters(config.model, stored, defaults)

    def _resolve_checkpoint(self, subcommand: str, asked: str | None) -> Path | None:
        folder = self.run_folder
        if subcommand == "fit":
            path = self._named_checkpoint(asked)
            if path is not None:
                _say(f"resuming from {path}")
                return path
            _say(f"starting fresh in {folder.path}" + (f": no {asked} checkpoint there" if asked else ""))
            return None
        if asked == UNTRAINED:
            _say("using the untrained network")
            return None
        path = self._named_checkpoint(asked or "best") or (folder.last_checkpoint() if asked is None else None)
        if path is None:
            raise FileNotFoundError(
                f"{folder.checkpoints}: no {asked or 'best or last'} checkpoint; train first (globe fit), name the run "
                f"(--run.root, --run.name), or give --ckpt_path FILE (or {UNTRAINED})"
            )
        _say(f"using {path}")
        return path

    def _named_checkpoint(self, asked: str | None) -> Path | None:
        if asked is None:
            return None
        if asked in ("last", "best"):
            return self.run_folder.last_checkpoint() if asked == "last" else self.run_folder.best_checkpoint()
        if not Path(asked).is_file():
            raise FileNotFoundError(f"ckpt_path: no file {asked!r}; expected a checkpoint file, 'last' or 'best'")
        return Path(asked)

    def before_instantiate_classes(self) -> None:
        """Send everything that is written into the run folder."""
        config = self.config[self.subcommand] if self.subcommand else self.config
        folder = self.run_folder
        if self.subcommand not in (None, "prepare"):
            folder.require_writable()
        config.trainer.default_root_dir = str(folder.path)
        for key, place in (("checkpoint", folder.checkpoints), ("predictions", folder.predictions)):
            name = "dirpath" if key == "checkpoint" else "folder"
            if config[key][name] is None:
                config[key][name] = str(place)
        place_loggers(config.trainer.get("logger"), folder.path)
        if config.pictures.folder is None:
            config.pictures.folder = str(folder.pictures)
        if self.subcommand == "predict" and config.get("return_predictions") is None:
            config.return_predictions = False

    def instantiate_classes(self) -> None:
        """Build data module, model and trainer; what cannot be built is explained."""
        config = self.config[self.subcommand] if self.subcommand else self.config
        check_trainer(config.trainer)
        try:
            super().instantiate_classes()
        except ConfigurationError:
            raise
        except (ValueError, ModuleNotFoundError, MisconfigurationException) as error:
            raise ConfigurationError(explain_building(error, config, self._sources)) from error

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """The trainer, with the run folder's CSV logger before those that the configuration names."""
        given = self._get(self.config_init, "trainer").get("logger")
        if given is not False:
            part = "" if self.subcommand in (None, "fit") else f"_{self.subcommand}"
            others = [] if given in (None, True) else given if isinstance(given, list) else [given]
            kwargs["logger"] = [RunLogger(str(self.run_folder.path), f"metrics{part}.csv"), *others]
        try:
            return super().instantiate_trainer(**kwargs)
        except Exception as error:  # Lightning judges its arguments with errors of any kind
            raise ConfigurationError(explain_trainer(error, self._get(self.config, "trainer"))) from error

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[pl.Callback]) -> pl.Trainer:
        """Leave our bar out where no bar is wanted, or the configuration names another: Lightning takes one at most."""
        given = config.get("callbacks") or []
        named = any(isinstance(item, ProgressBar) for item in (given if isinstance(given, list) else [given]))
        if named or config.get("enable_progress_bar") is False:
            callbacks = [item for item in callbacks if not isinstance(item, LossBar)]
        return super()._instantiate_trainer(config, callbacks)


class RunConfig(SaveConfigCallback):
    """Saves the effective configuration in the run folder: ``config.yaml`` of fit, ``config_<subcommand>.yaml``."""

    def __init__(self, parser: LightningArgumentParser, config: Any) -> None:
        super().__init__(parser, config, save_to_log_dir=False)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Move an earlier training's results aside when a new one starts in its folder, then save."""
        fresh = stage == "fit" and self.config.get("ckpt_path") is None
        if fresh and trainer.is_global_zero and not self.already_saved:
            root = Path(trainer.default_root_dir)
            aside = RunFolder(str(root.parent), root.name).set_aside()
            if aside is not None:
                _say(f"moved an earlier run's results to {aside}")
        super().setup(trainer, pl_module, stage)

    def save_config(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Write the file whole."""
        subcommand = trainer.state.fn.value if trainer.state.fn else "fit"
        name = "config.yaml" if subcommand == "fit" else f"config_{subcommand}.yaml"
        text = self.parser.dump(self.config, skip_none=False)
        with written_whole(Path(trainer.default_root_dir) / name) as path:
            path.write_text(text, encoding="utf-8")


def settle_hyperparameters(config: Any, stored: dict[str, Any], defaults: Any) -> None:
    """Decide between a checkpoint's hyperparameters and the configuration's, and say what is in force.

    Where they differ, a value that the configuration or a flag sets (one that is not the default) is in force, else
    the checkpoint's.

    Args:
        config: the configuration's ``model`` part, changed in place.
        stored: the checkpoint's hyperparameters.
        defaults: the parser's defaults of the ``model`` part.

    Raises:
        ValueError: the configuration sets another data description or another shape of the weights than the
            checkpoint has.
    """
    refused = []
    for key, value in stored.items():
        if key not in config or plain(config[key]) == plain(value):
            continue
        here, there = plain(config[key]), plain(value)
        if key in SCHEMA_ARGUMENTS or (key in WEIGHT_ARGUMENTS and here != plain(defaults[key])):
            refused.append(f"model.{key}: the configuration says {here}, the checkpoint {there}")
        elif here == plain(defaults[key]):
            config[key] = there
            _say(f"model.{key}: {there} from the checkpoint is in force (the configuration leaves it at {here})")
        else:
            _say(f"model.{key}: {here} from the configuration is in force (the checkpoint has {there})")
    if refused:
        raise ValueError(
            "the checkpoint does not fit the configuration:\n  "
            + "\n  ".join(refused)
            + "\nuse the configuration it was trained with (config.yaml beside its checkpoints folder)"
        )


def place_loggers(loggers: Any, folder: Path) -> None:
    """Move relative folders and databases of loggers into a run's folder; changes their configuration in place."""
    for logger in loggers if isinstance(loggers, list) else [loggers]:
        arguments: Any = (logger.get("init_args") if hasattr(logger, "get") else None) or {}
        for name, scheme in (("save_dir", ""), ("tracking_uri", "sqlite:///")):
            place = arguments.get(name)
            if place is None or not str(place).startswith(scheme):
                continue
            path = Path(str(place).removeprefix(scheme))
            if not path.is_relative_to(folder):  # a saved configuration has it already
                arguments[name] = f"{scheme}{folder / path}"  # an absolute one stays


def shipped_configs() -> Path:
    """The folder of the configurations that come with the package."""
    here = Path(__file__).resolve().parent
    inside = here / "configs"
    return inside if inside.is_dir() else here.parent / "configs"


def config_values(arguments: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Position and value of every ``--config`` among the arguments."""
    for position, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if equals and flag in CONFIG_FLAGS:
            yield position, value
        elif position and arguments[position - 1] in CONFIG_FLAGS:
            yield position, argument


def find_configs(arguments: Sequence[str]) -> list[str]:
    """The arguments with every ``--config`` that is not a file here replaced by the shipped one of that name.

    Raises:
        FileNotFoundError: there is neither; the message lists the shipped ones.
    """
    found = list(arguments)
    for position, value in config_values(arguments):
        found[position] = arguments[position].removesuffix(value) + _find_config(value)
    return found


def _find_config(value: str) -> str:
    path = Path(value)
    if path.is_file() or not path.suffix:  # text without a suffix may be YAML itself
        return value
    shipped = shipped_configs()
    inside = Path(*path.parts[1:]) if path.parts[0] == "configs" else path
    if not path.is_absolute() and (shipped / inside).is_file():
        return str(shipped / inside)
    names = sorted(f"configs/{item.relative_to(shipped)}" for item in shipped.rglob("*.yaml"))
    raise FileNotFoundError(f"config: no file {value!r} here or in the package; the package has {names}")


@rank_zero_only
def _say(text: str) -> None:
    print(text, flush=True)
