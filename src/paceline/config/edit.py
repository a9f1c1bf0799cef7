"""Overrides from the command line: `--trainer.optimizer.lr 1e-3`, `--env.0.group_size=4`, `--no-resume`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.config.document import COMMAND_LINE, PYTHON, ConfigDocument, Origin, plain_value
from paceline.config.errors import ConfigError
from paceline.config.fields import ROOT, KeyPath, Spot, either, spot_at, toml_value, value_at


@dataclass(frozen=True)
class Override:
    """One flag as typed, its keys, and the text of its value; None for a bare flag."""

    flag: str
    keys: tuple[str, ...]
    text: str | None = None
    negated: bool = False


def apply(arguments: Sequence[str], document: ConfigDocument) -> list[str]:
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
            spot = spot_at(path, document.table)
            # A table of the user's own keys, such as `kwargs`, is given whole; sections merge key by key.
            origin = Origin(COMMAND_LINE, override.flag)
            document.put(path, _value(override, spot), origin, whole=spot is not None and spot.is_open)
    return problems


def apply_settings(settings: Mapping[str, Any], document: ConfigDocument) -> list[str]:
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
    """Take the next flag, and its value if one follows, off the arguments."""
    argument = arguments.pop(0)
    flag, equals, text = argument.partition("=")
    negated = flag.startswith("--no-")
    dotted = flag.removeprefix("--no-" if negated else "--")
    keys = tuple(dotted.split("."))
    if not flag.startswith("--") or not all(keys):
        raise ConfigError([f"{COMMAND_LINE}: {argument}: expected a flag, such as --trainer.optimizer.lr 1e-3"])
    if negated and equals:
        raise ConfigError([f"{COMMAND_LINE}: {flag} takes no value: write {flag}, or --{dotted}={text}"])
    if equals or negated:
        return Override(flag, keys, text, negated)
    follows = arguments and not arguments[0].startswith("--")
    return Override(flag, keys, arguments.pop(0) if follows else None)


def _value(override: Override, spot: Spot | None) -> Any:
    if override.negated:
        # `--no-steps` leaves `steps` out, so that a file's `steps` can make room for `--epochs`.
        return None if spot and spot.optional else False
    if override.text is None:
        return True
    value = toml_value(override.text)
    if spot and spot.annotation is str and not isinstance(value, str):
        return override.text  # `--name 42` is a name
    return value


def _address(override: Override, document: ConfigDocument) -> KeyPath:
    """The path an override means: kebab-case becomes snake_case, a list element's name its index."""
    path: KeyPath = ()
    spot: Spot | None = ROOT
    rest = override.keys
    while rest:
        if spot and spot.is_list:
            if value_at(path, document.table) is None:  # a list that no file wrote starts from its default
                document.put(path, plain_value(list(spot.default or ())), Origin("default"))
            index, taken = _element(rest, value_at(path, document.table), override)
            path, rest = (*path, index), rest[taken:]
        else:
            key = rest[0] if spot and spot.is_open else rest[0].replace("-", "_")
            path, rest = (*path, key), rest[1:]
        spot = spot_at(path, document.table)
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
        there = either((f"{i} (`{name}`)" if name else str(i) for i, name in enumerate(names)), "and")
        problem = f"the list has no element `{keys[0]}`: use an index or a name; there is {there}"
    raise ConfigError([f"{COMMAND_LINE}: {override.flag}: {problem}"])


def _names(entries: list[Any], *keys: str) -> list[str]:
    """The name of each element: the first of `keys` it has, or ""."""
    tables = [entry if isinstance(entry, dict) else {} for entry in entries]
    return [next((str(table[key]) for key in keys if table.get(key)), "") for table in tables]
