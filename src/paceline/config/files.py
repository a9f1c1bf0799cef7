"""Run files on disk: TOML, and the files they include."""

import os
import re
import tomllib
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from paceline.config.errors import ConfigError
from paceline.config.wording import either


class Layer(NamedTuple):
    """One file of a run file's stack."""

    name: str
    """As messages name the file."""
    table: dict[str, Any]
    """Its contents without `include`."""
    folder: Path
    """What its relative paths start from."""


def layers(path: Path, trail: tuple[Path, ...] = ()) -> list[Layer]:
    """The file and all it includes, lowest first: included files left to right, the file itself on top."""
    name = _name(path)
    table = _parse(path)
    trail = (*trail, path)
    below: list[Layer] = []
    problems: list[str] = []
    for included in _included(table.pop("include", []), name):
        try:
            below += _include(path.parent / included, trail)
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


def _include(path: Path, trail: tuple[Path, ...]) -> list[Layer]:
    includer = _name(trail[-1])
    real_trail = [step.resolve() for step in trail]
    if path.resolve() in real_trail:
        circle = [*trail[real_trail.index(path.resolve()) :], path]
        raise ConfigError([f"{includer}: include: the files include each other: {' -> '.join(map(_name, circle))}"])
    if not path.is_file():
        raise ConfigError([f"{includer}: include: {_missing(path)}"])
    return layers(path, trail)


def _included(value: Any, name: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise ConfigError([f'{name}: include: expected a list of files, such as include = ["base.toml"]'])
    return value


def _parse(path: Path) -> dict[str, Any]:
    name = _name(path)
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
    sentence = f"there is no file {_name(path)}"
    if not path.parent.is_dir():
        return f"{sentence}: the folder {_name(path.parent)} does not exist"
    # By stem, or every short name would look like every other for its `.toml`.
    files = {entry.stem: entry for entry in sorted(path.parent.iterdir()) if entry.suffix == ".toml"}
    similar = [_name(files[stem]) for stem in get_close_matches(path.stem, files)]
    return f"{sentence}; did you mean {either(similar)}?" if similar else sentence


def _name(path: Path) -> str:
    return os.path.normpath(path)
