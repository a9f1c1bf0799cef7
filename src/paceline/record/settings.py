"""Lists the keys of a run's config that differ from the defaults.

A key counts where the config would be another without it. So nothing that Paceline fills in by itself is listed, and
readers need not know its rules.
"""

import copy
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from paceline.config import RunConfig

Path = tuple[str | int, ...]
FILLED_IN: dict[Path, Any] = {("model", "dtype"): "float32"}
"""Values that a run writes in place of `auto`, where any machine may choose them."""


@dataclass(frozen=True, slots=True)
class Changed:
    """A key of the run file, its value, and what it would have been."""

    key: str
    value: Any
    default: Any
    """None where there is no default, or where the run cannot do without the key."""


def changed(config: dict[str, Any]) -> list[Changed]:
    """The keys that matter, in the file's order; raises `ValueError` where this Paceline cannot read the config."""
    resolved = understood(config)
    return [found for key in resolved for found in _below(resolved, resolved, (key,))]


def understood(config: dict[str, Any]) -> dict[str, Any]:
    """The config with every key; raises `ValueError` where this Paceline cannot read it."""
    resolved = _resolved(config)
    if resolved is None:
        raise ValueError("this version of Paceline does not take the config, so its defaults are unknown")
    return resolved


def _below(whole: dict[str, Any], table: Any, path: Path) -> Iterator[Changed]:
    value = table[path[-1]]
    if FILLED_IN.get(path) == value:
        return
    without = _resolved(_without(whole, path))
    if without == whole:
        return
    if isinstance(value, dict) and value:
        for key in value:
            yield from _below(whole, value, (*path, key))
    elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        for place, item in enumerate(value):
            for key in item:
                yield from _below(whole, item, (*path, place, key))
    else:
        yield Changed(_dotted(path), value, None if without is None else _at(without, path))


def _resolved(config: dict[str, Any]) -> dict[str, Any] | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return RunConfig.model_validate(config).model_dump(mode="json", exclude_none=True)
        except (ValidationError, ValueError):
            return None


def _without(whole: dict[str, Any], path: Path) -> dict[str, Any]:
    cut = copy.deepcopy(whole)
    table: Any = cut
    for key in path[:-1]:
        table = table[key]
    del table[path[-1]]
    return cut


def _at(config: Any, path: Path) -> Any:
    try:
        for key in path:
            config = config[key]
        return config
    except (LookupError, TypeError):
        return None


def _dotted(path: Path) -> str:
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else str(key)
    return text
