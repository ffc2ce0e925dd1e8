"""Mistakes in a configuration, each told in one message: which key, what was found, what was expected, how to mend it.

The parser's own messages name types and classes of Python; :func:`explain_parse_error` says the same in the user's
terms. :func:`check_trainer` judges what Lightning would only notice later, or not at all.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml


class ConfigurationError(ValueError):
    """Something in a configuration or on the command line that the user can mend."""


KINDS = {
    "float": "a number",
    "int": "an integer",
    "bool": "true or false",
    "str": "text",
    "NoneType": "null",
    "dict": "a mapping",
    "list": "a list",
    "collections.abc.Sequence": "a list",
    "collections.abc.Iterable": "a list",
}
"""What Python's types are called in a YAML file."""

Sources = Sequence[tuple[str, Mapping[str, Any]]]
"""What sets the values of a run, in order: (a file, or "on the command line"; its nested content)."""

FLOAT16 = ("16", "transformer-engine")
"""How the names of precisions begin in which small magnitudes underflow."""


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """ "; did you mean ...?" for the closest of the names, or nothing."""
    group, _, last = name.rpartition(".")
    candidates = {other.rpartition(".")[2]: other for other in names if other.rpartition(".")[0] == group}
    close = difflib.get_close_matches(last, candidates, n=1, cutoff=0.6)
    return f"; did you mean {candidates[close[0]]}?" if close else ""


def read_config(path: Path) -> Mapping[str, Any]:
    """A configuration file's content.

    Raises:
        ConfigurationError: it is not YAML, or not a mapping; the message names the file and the line.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "cannot be read"
        raise ConfigurationError(
            f"config: {path}{place}: not valid YAML ({problem}); keys are indented with spaces, and brackets closed"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"config: {path}: expected a YAML file in UTF-8, found other bytes") from error
    if not isinstance(content, Mapping):
        found = "an empty file" if content is None else f"{type(content).__name__}"
        raise ConfigurationError(f"config: {path}: expected keys with values (model:, data:, trainer:), found {found}")
    return content


def read_sources(arguments: Sequence[str], configs: Mapping[int, str]) -> list[tuple[str, Mapping[str, Any]]]:
    """What the arguments set, file by file and flag by flag.

    Args:
        arguments: those of the command line.
        configs: {position: configuration file} among them.

    Raises:
        ConfigurationError: a file is not what it should be.
    """
    sources: list[tuple[str, Mapping[str, Any]]] = []
    for position, argument in enumerate(arguments):
        if position in configs:
            path = Path(configs[position])
            if path.is_file():
                sources.append((f"in {path}", read_config(path)))
        elif argument.startswith("--"):
            content: Any = None
            for part in reversed(argument[2:].partition("=")[0].split(".")):
                content = {part: content}
            sources.append(("on the command line", content))
    return sources


def explain_parse_error(message: str, keys: Sequence[str], sources: Sources) -> str:
    """A parser's message in the user's terms.

    Args:
        message: the parser's own.
        keys: the keys that the subcommand has, dotted.
        sources: to say where a key stands.
    """
    unknown = re.search(r"does not accept option '([^']+)'", message)
    if unknown:
        return _unknown_key(unknown[1], keys, sources)
    unrecognized = re.match(r"unrecognized arguments: (\S+)", message)
    if unrecognized:
        word = unrecognized[1]
        if not word.startswith("-"):
            return f"unexpected argument {word!r}: options begin with --, as in --trainer.max_epochs 10"
        name = word.lstrip("-").partition("=")[0]
        if name in keys:
            return f"{word}: one dash too few; expected --{name}"
        return _unknown_key(name, keys, sources)
    required = re.search(r"arguments are required: (.*)", message)
    if required:
        missing = ", ".join(name.partition(".")[2] for name in required[1].split(", "))
        return f"missing: {missing}; give a configuration that has them (--config configs/quickstart.yaml is one)"
    subcommand = re.search(r'"subcommand" to be one of \{([^}]*)\}', message)
    if subcommand:
        return f"no subcommand: expected one of {subcommand[1].replace(',', ', ')}, as in globe fit --config FILE"
    choice = re.search(r"argument subcommand: invalid choice: '([^']*)' \(choose from (.*)\)", message)
    if choice:
        names = re.findall(r"\w+", choice[2])
        return f"no subcommand {choice[1]!r}: expected one of {', '.join(names)}{did_you_mean(choice[1], names)}"
    value = re.search(r"argument (?:\S+/)?--(\S+): expected (.*)", message)
    if value:
        return f"{value[1]}: no value given; expected {value[2].replace('argument', 'value')}"
    key = re.match(r'Parser key "([^"]+)":?', message)
    if not key:
        return message.strip()
    return explain_value(key[1], message[key.end() :], sources)


def explain_value(key: str, message: str, sources: Sources) -> str:
    """The parser's or the builder's complaint about the value of a key, without what its type could also have been."""
    nested, class_path, details = "", "", []
    kinds: dict[bool, list[str]] = {True: [], False: []}  # whether the message says what was found beside it
    for line in (line.strip().removeprefix("- ").strip() for line in message.splitlines()):
        if inner := re.match(r'Parser key "([^"]+)"', line):
            nested = f".{inner[1]}"
        elif inner := re.match(r"Problem with given class_path '([^']+)'", line):
            class_path = inner[1]
        elif inner := re.match(r"Option '([^']+)' is not accepted", line):
            names = [f"init_args.{name}" for name in constructor_arguments(class_path)]
            found = f"init_args.{inner[1]}"
            where = f"{key}.{found}"
            return (
                f"{where}: {class_path.rpartition('.')[2]} has no such argument{origin(where, sources)}"
                f"{did_you_mean(found, names) or '; it has ' + ', '.join(constructor_arguments(class_path))}"
            )
        elif inner := re.match(r"Expected a dot import path string: (.*)", line):
            details.append(f"no class {inner[1]!r} is known{did_you_mean(inner[1], known_classes(key))}")
        elif inner := re.match(r"Import path (\S+) does not correspond to a subclass of (\w+)", line):
            details.append(f"{inner[1]} is not a {inner[2]}{did_you_mean(inner[1], known_classes(key))}")
        elif inner := re.match(r"Expected an? (.*?)(?:\. Got value: .*)?$", line):
            kinds["Got value" in line].append(kind_name(inner[1]))
        elif line and not line.startswith(_BOILERPLATE):
            details.append(line)
        elif line.startswith("Given value type"):
            break
    where = key + (f".init_args{nested}" if nested and class_path else nested)
    if details:
        return f"{where}: {'; '.join(dict.fromkeys(details))}{origin(where, sources)}"
    value = re.search(r"(?:Got|Given) value: (.*)", message)
    found = ""
    if value:
        inner = re.match(r"NestedArg\(key='.*?', val='?(.*?)'?\)$", value[1])
        found = f", found {inner[1] if inner else value[1]}"
    expected = " or ".join(dict.fromkeys(kinds[True] or kinds[False])) or "another value"
    return f"{where}: expected {expected}{found}{origin(where, sources)}"


_BOILERPLATE = (
    "Does not validate against",
    "Subtypes:",
    "Errors:",
    "Given value",
    "Expected a path but",
    "Not a valid subclass of",
    "Subclass types expect",
    "a class path (str)",
    "a dict ",
    "File does not exist: 'None'",
)


def _unknown_key(key: str, keys: Sequence[str], sources: Sources) -> str:
    where = origin(key, sources)
    group, _, _ = key.rpartition(".")
    hint = did_you_mean(key, keys)
    if not hint and group and not any(other.startswith(f"{group}.") for other in keys):
        hint = did_you_mean(group.partition(".")[0], {other.partition(".")[0] for other in keys})
    if not hint:
        first = group.partition(".")[0]
        siblings = [other for other in keys if other.rpartition(".")[0] == first]
        hint = f"; {first or 'the configuration'} has {', '.join(name.rpartition('.')[2] for name in siblings)}"
    return f"{key}: no such key{where}{hint}"


def origin(key: str, sources: Sources) -> str:
    """ " (in FILE)" or " (on the command line)" for the last source that sets a key, or nothing."""
    parts = key.split(".")
    for name, content in reversed(sources):
        value: Any = content
        for part in parts:
            if not isinstance(value, Mapping) or part not in value:
                break
            value = value[part]
        else:
            return f" ({name})"
    return ""


def kind_name(kind: str) -> str:
    """A Python type's name as the user knows it: "<class 'float'>" is a number."""
    literal = re.match(r"typing\.Literal\[(.*)\]", kind)
    if literal:
        return f"one of {literal[1]}"
    name = re.sub(r"<class '(.*)'>", r"\1", kind)
    return KINDS.get(name, name)


def constructor_arguments(class_path: str) -> list[str]:
    """Names of the arguments of a class and of the classes it derives from; none if it cannot be imported."""
    module, _, name = class_path.rpartition(".")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        return []
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names: dict[str, None] = {}
    for base in found.__mro__:
        if "__init__" in vars(base) and base is not object:
            parameters = list(inspect.signature(base.__init__).parameters.values())[1:]
            names.update({parameter.name: None for parameter in parameters if parameter.kind in kinds})
    return list(names)


def known_classes(key: str) -> list[str]:
    """Names of the classes that a key may name."""
    module = {
        "data": "datamodules",
        "trainer.logger": "lightning.pytorch.loggers",
        "trainer.callbacks": "lightning.pytorch.callbacks",
        "trainer.profiler": "lightning.pytorch.profilers",
        "trainer.strategy": "lightning.pytorch.strategies",
    }.get(key)
    if module is None:
        return []
    names = [name for name in import_module(module).__all__ if name[0].isupper()]
    return names if module == "datamodules" else [f"{module}.{name}" for name in names] + names


def explain_building(error: Exception, config: Any, sources: Sources) -> str:
    """What went wrong while the classes that a configuration names were built."""
    text = str(error).strip() or type(error).__name__
    if not text.startswith("Does not validate"):
        names = re.findall(r"^`?(\w+)", text) + re.findall(r"\b(\w+)=", text)
        groups = ("model", "checkpoint", "predictions", "pictures", "throughput", "time_limit")
        keys = [f"{group}.{name}" for name in names for group in groups if name in (config.get(group) or ())]
        if not keys:
            return text
        key = next((key for key in keys if origin(key, sources)), keys[0])
        name = key.partition(".")[2]
        rest = text.removeprefix(name) if text.startswith(name) else f": {text}"
        return f"{key}{rest}{origin(key, sources)}"
    for key in ("data", "trainer.logger", "trainer.callbacks", "trainer.plugins", "trainer.profiler"):
        value = config.get(key)
        for item in value if isinstance(value, list) else [value]:
            path = item.get("class_path") if hasattr(item, "get") else None
            if path and f"'{path}'" in text:
                explained = explain_value(key, text, [])
                argument = re.match(rf"{re.escape(key)}: (\w+): ", explained)
                if argument and argument[1] in constructor_arguments(path):
                    where = f"{key}.init_args.{argument[1]}"
                    return f"{where}: {explained[argument.end() :]}{origin(where, sources)}"
                return explained
    return text


def explain_trainer(error: Exception, trainer: Mapping[str, Any]) -> str:
    """What Lightning's trainer does not accept, under the key that its message speaks of."""
    text = str(error).strip() or type(error).__name__
    if "backend found" in text:
        return f"trainer.accelerator: no such device here, found {trainer['accelerator']!r}; expected auto or cpu"
    words = {"Timer": "max_time"}
    key = next((words.get(word, word) for word in re.findall(r"\w+", text) if word in trainer or word in words), None)
    key = "strategy" if key is None and "Strategy" in text else key
    return f"trainer.{key}: {text}" if key else f"trainer: {text}"


def check_trainer(trainer: Mapping[str, Any]) -> None:
    """Judge the trainer's numbers.

    Raises:
        ConfigurationError: one is impossible; the message names the key.
    """
    _positive(trainer, "num_nodes", "the number of machines")
    _positive(trainer, "accumulate_grad_batches", "the number of steps whose gradients are summed")
    _check_devices(trainer.get("devices"), str(trainer.get("accelerator")))
    clip = trainer.get("gradient_clip_val")
    if clip is not None and clip < 0:
        raise ConfigurationError(f"trainer.gradient_clip_val: expected a positive number or null, found {clip}")
    if str(trainer.get("precision")).startswith(FLOAT16):
        raise ConfigurationError(
            f"trainer.precision: {trainer['precision']} is not supported, small magnitudes underflow in it; expected "
            "bf16-mixed or 32-true"
        )


def _positive(trainer: Mapping[str, Any], name: str, what: str) -> None:
    value = trainer.get(name)
    if isinstance(value, int) and value < 1:
        raise ConfigurationError(f"trainer.{name}: expected {what}, 1 or more, found {value}")


def _check_devices(devices: Any, accelerator: str) -> None:
    if devices is None or devices == "auto":
        return
    cpu = accelerator == "cpu"
    text = str(devices)
    number = isinstance(devices, (int, str)) and re.fullmatch(r"-?\d+", text)
    if number and (int(text) >= 1 or (text == "-1" and not cpu)):
        return
    indices = devices if isinstance(devices, list) else text.split(",")
    if not cpu and not number and indices and all(re.fullmatch(r"\d+", str(index).strip()) for index in indices):
        return
    expected = "a number of processes, 1 or more" if cpu else "auto, a number of GPUs, or a list of their indices"
    raise ConfigurationError(f"trainer.devices: expected {expected}, found {devices!r} (accelerator {accelerator})")


def explain_run_error(error: BaseException) -> str | None:
    """What the user can mend, of an error that Lightning or torch raises while a run is under way; None for others."""
    text = str(error)
    monitor = re.search(r"ModelCheckpoint\(monitor='([^']*)'\).*?: \[(.*?)\]", text)
    if monitor:
        names = [name.strip("'\"") for name in monitor[2].split(", ")]
        return _no_metric("checkpoint.monitor", monitor[1], names)
    stopping = re.search(r"Early stopping conditioned on metric `([^`]*)` which is not available.*?: (.*)", text)
    if stopping:
        return _no_metric(
            "trainer.callbacks: EarlyStopping.monitor", stopping[1], re.findall(r"`([^`]+)`", stopping[2])
        )
    if "Error(s) in loading state_dict" in text:
        lines = [line.strip() for line in text.splitlines()[1:]]
        shown = "\n  ".join(line if len(line) < 200 else f"{line[:200]} ..." for line in lines[:4])
        return (
            f"ckpt_path: the checkpoint's weights do not fit the model; use the configuration it was trained with "
            f"(config.yaml beside its checkpoints folder):\n  {shown}"
        )
    return None


def _no_metric(key: str, found: str, names: list[str]) -> str:
    short = [name for name in names if name.startswith(("val/", "train/")) and name.count("/") == 1]
    return f"{key}: no metric {found!r} is logged{did_you_mean(found, names)}; there are {', '.join(short)} and others"
