"""Makes the two run files of an A/B run: flags behind `--a.` and `--b.` apply to one arm only."""

from collections.abc import Sequence
from pathlib import Path

from paceline.config.load import LoadedConfig
from paceline.config.target import load_target

ARMS = ("a", "b")


def arms_of(path: str | Path, overrides: Sequence[str]) -> dict[str, LoadedConfig]:
    """The run file for each arm, under names of their own."""
    shared, own = split(overrides)
    arms = {arm: load_target(str(path), [*shared, *own[arm]]) for arm in ARMS}
    for arm, loaded in arms.items():
        loaded.config.name = f"{loaded.config.name}-{arm}"
    return arms


def split(overrides: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """The overrides of both arms, and those of each arm alone, as `load` takes them."""
    shared: list[str] = []
    own: dict[str, list[str]] = {arm: [] for arm in ARMS}
    to = shared
    for word in overrides:
        if word.startswith("--"):
            arm, dot, key = word[2:].partition(".")
            to = own[arm] if dot and arm in own else shared
            word = f"--{key}" if to is not shared else word
        to.append(word)
    return shared, own
