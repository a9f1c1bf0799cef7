"""Finds, reads and writes run files, and applies overrides: `--trainer.optimizer.lr 1e-3`, `--env.0.group_size=4`."""

import importlib.resources
import os
import re
import tomllib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import tomli_w
from pydantic import ValidationError

from paceline.config.document import COMMAND_LINE, PYTHON, ConfigDocument, Origin, plain_value, resolve_paths
from paceline.config.errors import ConfigError, explain
from paceline.config.fields import ROOT, KeyPath, SchemaNode, join_words, node_at, toml_value, value_at
from paceline.config.run import ConfigWarning, RunConfig


@cache
def examples_folder() -> Path:
    """Where the examples are: inside an installed package, beside `src` in a checkout of the repository."""
    package = Path(str(importlib.resources.files("paceline")))
    return next((f for f in (package / "examples", package.parents[1] / "examples") if f.is_dir()), package)


@cache
def example_names() -> tuple[str, ...]:
    """`quickstart`, `algorithms/gae`, ...: every example's path without its ending."""
    folder = examples_folder()
    return tuple(sorted(file.relative_to(folder).with_suffix("").as_posix() for file in folder.rglob("*.toml")))


def find_run_file(target: str | Path) -> Path | None:
    """The run file that `target` names, None if it names none. A file that exists comes first, then a run directory,
    then an example: `quickstart`, `algorithms/gae`, or as in the repository `examples/quickstart.toml`."""
    path = Path(target)
    if path.is_file():
        return path
    if (path / "config.toml").is_file():
        return path / "config.toml"
    name = path.as_posix().removeprefix("examples/").removesuffix(".toml")
    return examples_folder() / f"{name}.toml" if name in example_names() else None


class Layer(NamedTuple):
    """One file of a run file's stack."""

    name: str
    """As messages name the file."""
    table: dict[str, Any]
    """Its contents without `include`."""
    folder: Path
    """The folder that its relative paths start from."""


def layers(path: Path, trail: tuple[Path, ...] = ()) -> list[Layer]:
    """The file and all it includes, lowest first: included files left to right, the file itself on top."""
    name, real_trail = os.path.normpath(path), [step.resolve() for step in trail]
    includer = f"{os.path.normpath(trail[-1])}: include: " if trail else ""
    if path.resolve() in real_trail:
        circle = [os.path.normpath(step) for step in (*trail[real_trail.index(path.resolve()) :], path)]
        raise ConfigError([f"{includer}the files include each other: {' -> '.join(circle)}"])
    if trail and not path.is_file():
        raise ConfigError([f"{includer}{_missing(path)}"])
    table = _parse(path)
    below: list[Layer] = []
    problems: list[str] = []
    included = table.pop("include", [])
    if not isinstance(included, list) or not all(isinstance(entry, str) for entry in included):
        raise ConfigError([f'{name}: include: expected a list of files, such as include = ["base.toml"]'])
    for entry in included:
        try:
            below += layers(path.parent / entry, (*trail, path))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    if own := run_directory(path):
        table.pop("resume", None)  # of the command that resumed the run; earlier versions stored it
    return [*below, Layer(name, table | own, path.absolute().parent)]


def run_directory(path: Path) -> dict[str, str]:
    """The keys that a resolved `config.toml` takes from the run directory it lies in, so that a run that was moved or
    copied goes on where it is now."""
    folder = path.parent
    if path.name != "config.toml" or not (folder / "run.lock").is_file():
        return {}
    if folder.name in ("", ".."):
        folder = folder.resolve()
    return {"name": folder.name, "runs": str(folder.parent)}


def _parse(path: Path) -> dict[str, Any]:
    name = os.path.normpath(path)
    if not path.exists():
        raise ConfigError([_missing(path)])
    try:
        # "-sig": editors on Windows put a byte order mark in front, which TOML does not know.
        text = path.read_bytes().decode("utf-8-sig")
    except IsADirectoryError:
        raise ConfigError([f"{name} is a folder: name a run file in it"]) from None
    except OSError as error:
        raise ConfigError([f"{name} cannot be read: {error.strerror}"]) from None
    except UnicodeDecodeError as error:
        raise ConfigError([f"{name} is not UTF-8 text (byte {error.start}): save it as UTF-8"]) from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([f"{name}, {_position(str(error), text)}"]) from None


def _position(message: str, text: str) -> str:
    """`line 3, column 7: what is wrong`, from tomllib's `What is wrong (at line 3, column 7)`."""
    what, _, where = message.rstrip(")").rpartition(" (at ")
    if not re.fullmatch(r"line \d+, column \d+", where):
        # Otherwise the parser ran into the end of the file.
        lines = text.split("\n")
        where = f"line {len(lines)}, column {len(lines[-1]) + 1}"
    return f"{where}: not valid TOML: {what[:1].lower()}{what[1:]}"


def _missing(path: Path) -> str:
    sentence = f"there is no file {os.path.normpath(path)}"
    if not path.parent.is_dir():
        return f"{sentence}: the folder {os.path.normpath(path.parent)} does not exist"
    # By stem, or every short name would look like every other for its `.toml`.
    files = {entry.stem: entry for entry in sorted(path.parent.iterdir()) if entry.suffix == ".toml"}
    similar = [os.path.normpath(files[stem]) for stem in get_close_matches(path.stem, files)]
    return f"{sentence}; did you mean {join_words(similar)}?" if similar else sentence


@dataclass(frozen=True)
class Override:
    """One flag as typed, its keys, and the text of its value; None for a bare flag."""

    flag: str
    keys: tuple[str, ...]
    text: str | None = None
    negated: bool = False


def _apply_flags(arguments: Sequence[str], document: ConfigDocument) -> list[str]:
    """Write the overrides into the document; what could not be placed comes back as sentences."""
    overrides: list[Override] = []
    problems: list[str] = []
    rest = list(arguments)
    while rest:
        try:
            overrides.append(_take(rest))
        except ConfigError as error:
            problems += error.problems
    # Whole tables before their keys, and `type` before its siblings, however the flags were ordered.
    for override in sorted(overrides, key=lambda one: (len(one.keys), one.keys[-1] != "type")):
        try:
            path = _address(override, document)
        except ConfigError as error:
            problems += error.problems
        else:
            node = node_at(path, document.table)
            # A table of the user's own keys, such as `kwargs`, is given whole; sections merge key by key.
            origin = Origin(COMMAND_LINE, override.flag)
            document.put(path, _value(override, node), origin, whole=node is not None and node.is_open)
    return problems


def _apply_settings(settings: Mapping[str, Any], document: ConfigDocument) -> list[str]:
    """Write keyword arguments into the document: `steps=20`, `sampling={...}`, or `**{"sampling.max_tokens": 16}`."""
    problems: list[str] = []
    origin = Origin(PYTHON)
    if settings:
        document.origins.setdefault((), origin)
    for key, value in sorted(settings.items(), key=lambda item: item[0].count(".")):
        try:
            path = _address(Override(key, tuple(key.split("."))), document)
        except ConfigError as error:
            problems += [problem.replace(COMMAND_LINE, PYTHON) for problem in error.problems]
        else:
            document.put(path, plain_value(value), origin)
    return problems


def _take(arguments: list[str]) -> Override:
    argument = arguments.pop(0)
    flag, equals, text = argument.partition("=")
    negated = flag.startswith("--no-")
    dotted = flag.removeprefix("--no-" if negated else "--")
    keys = tuple(dotted.split("."))
    if not flag.startswith("--") or not all(keys):
        has_value = equals and all(keys) and not flag.startswith("-")
        instead = f"write --{argument}" if has_value else "such as --trainer.optimizer.lr 1e-3"
        raise ConfigError([f"{COMMAND_LINE}: {argument}: expected a flag, {instead}"])
    if negated and equals:
        raise ConfigError([f"{COMMAND_LINE}: {flag} takes no value: write {flag}, or --{dotted}={text}"])
    if equals or negated:
        return Override(flag, keys, text, negated)
    follows = arguments and not arguments[0].startswith("--")
    return Override(flag, keys, arguments.pop(0) if follows else None)


def _value(override: Override, node: SchemaNode | None) -> Any:
    if override.negated:
        # `--no-steps` leaves `steps` out, so that a file's `steps` can make room for `--epochs`.
        return None if node and node.optional else False
    if override.text is None:
        return True
    value = toml_value(override.text)
    if node and node.annotation is str and not isinstance(value, str):
        return override.text  # `--name 42` is a name
    return value


def _address(override: Override, document: ConfigDocument) -> KeyPath:
    """The path an override means: kebab-case becomes snake_case, a list element's name its index."""
    path: KeyPath = ()
    node: SchemaNode | None = ROOT
    rest = override.keys
    while rest:
        if node and node.is_list:
            if value_at(path, document.table) is None:  # a list that no file wrote starts from its default
                document.put(path, plain_value(list(node.default or ())), Origin("default"))
            index, taken = _element(rest, value_at(path, document.table), override)
            path, rest = (*path, index), rest[taken:]
        else:
            key = rest[0] if node and node.is_open else rest[0].replace("-", "_")
            path, rest = (*path, key), rest[1:]
        node = node_at(path, document.table)
    return path


def _element(keys: tuple[str, ...], entries: Any, override: Override) -> tuple[int, int]:
    """The index of the element `keys` begin with, and how many keys name it: a name may hold dots."""
    if not isinstance(entries, list):
        raise ConfigError([f"{COMMAND_LINE}: {override.flag}: the file holds no list there"])
    if keys[0].isdecimal() and int(keys[0]) < len(entries):
        return int(keys[0]), 1
    names = _names(entries, "name", "type")
    for taken in range(len(keys), 0, -1):
        wanted = ".".join(keys[:taken]).replace("-", "_")
        for known in (names, _names(entries, "type")):  # the one element of this name, or else of this type
            matches = [i for i, one in enumerate(known) if one.replace("-", "_") == wanted]
            if len(matches) == 1:
                return matches[0], taken
    problem = "the list is empty: give it as a whole"
    if entries:
        there = join_words((f"{i} (`{name}`)" if name else str(i) for i, name in enumerate(names)), "and")
        problem = f"the list has no element `{keys[0]}`: use an index or a name; there is {there}"
    raise ConfigError([f"{COMMAND_LINE}: {override.flag}: {problem}"])


def _names(entries: list[Any], *keys: str) -> list[str]:
    """The name of each element: the first of `keys` it has, or ""."""
    tables = [entry if isinstance(entry, dict) else {} for entry in entries]
    return [next((str(table[key]) for key in keys if table.get(key)), "") for table in tables]


@dataclass(frozen=True)
class LoadedConfig:
    """A valid config, and what is legal in it but probably not meant."""

    config: RunConfig
    warnings: list[str]


def load(
    path: str | Path | RunConfig | None, overrides: Sequence[str] = (), settings: Mapping[str, Any] | None = None
) -> LoadedConfig:
    """Read a run file, all it includes, and overrides: as the command line passes them, or `settings` from Python,
    nested (`{"sampling": {"max_tokens": 16}}`) or dotted (`{"sampling.max_tokens": 16}`).

    `path` may also be a run directory, or the name of an example of the package, such as `quickstart`; `path=None`
    stands for an empty file, and a config for the file that says what its maker said. Every problem is reported at
    once, in one `ConfigError`.
    """
    document = ConfigDocument()
    if isinstance(path, RunConfig):
        document.merge(plain_value(path), Origin(PYTHON))
    elif path is not None:
        stack = layers(find_run_file(path) or Path(path))
        # Rules that span several keys are reported under the file the user named.
        document.origins[()] = Origin(stack[-1].name)
        for layer in stack:
            document.merge(layer.table, Origin(layer.name, folder=layer.folder))
    problems = _apply_flags(overrides, document) + _apply_settings(settings or {}, document)
    try:
        try:
            loaded = _validate(document.resolve())
        except ValidationError:
            _validate(document.table_with_types())  # where it fails too, the message names paths as they were written
            raise
    except ValidationError as error:
        problems += explain(error, document)
    if problems:
        raise ConfigError(problems)
    return loaded


def _validate(table: dict[str, Any]) -> LoadedConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConfigWarning)  # the caller gets them as a list
        config = RunConfig.model_validate(table)
    return LoadedConfig(config, list(config.doubtful_settings()))


def dump(config: RunConfig, *, unset: bool = False) -> str:
    """The resolved run file. Loading it gives an equal config. With `unset`, comments name the keys without a value."""
    if not unset:
        return tomli_w.dumps(config.model_dump(exclude_none=True))
    text = tomli_w.dumps(_mark_unset(config.model_dump()))
    text = re.sub(rf'(?m)^(.+) = "{UNSET}"$', r"# \1 = (unset)", text)
    assert UNSET not in text, "a table is written in one line"
    return text


UNSET = uuid4().hex
"""Stands for the missing values: a text that no run file holds."""


def _mark_unset(value: Any) -> Any:
    """A dump in which each table names its keys without a value last."""
    if isinstance(value, dict):
        given = {key: _mark_unset(entry) for key, entry in value.items() if entry is not None}
        return given | dict.fromkeys((key for key in value if key not in given), UNSET)
    return [_mark_unset(entry) for entry in value] if isinstance(value, list) else value


def dump_with_absolute_paths(config: RunConfig) -> str:
    """The resolved run file for a run directory: whatever exists in the working directory is named by its full path,
    so that the file means the same from everywhere. It describes the run and not the command that resumed it, so
    `resume` and what allows it are left out."""
    exclude = {"resume": True, "checkpoint": {"allow_changed_rows"}}
    here, table = Path.cwd(), config.model_dump(exclude_none=True, exclude=exclude)
    return tomli_w.dumps(resolve_paths(table, lambda _: here, only_existing=True))


def schema() -> dict[str, Any]:
    described = RunConfig.model_json_schema()
    include = {
        "description": "Files to build upon, relative to this one; later ones win, this file wins over all.",
        "type": "array",
        "items": {"type": "string"},
    }
    described["properties"] = {"include": include, **described["properties"]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **described}
