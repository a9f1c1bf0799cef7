"""The columns of a rollout's row in the index, before names become numbers.

Lists the keys of a run's config that differ from the defaults.

A key counts where the config would be another without it. So nothing that Paceline fills in by itself is listed, and
readers need not know its rules.
"""

import copy
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np
from pydantic import ValidationError

from paceline.config import RunConfig
from paceline.data.rollout import Rollout, Turn
from paceline.data.sample import Sample
from paceline.observe.record.layout import EVALUATION, MATCH, TRAINING, Facts

TRAINED, REPLAYED, SKIPPED = "trained", "replayed", "skipped"
"""States of a batch's rollouts: it trained; it trained once more; its step was left out, since it was bad."""
EVALUATED, MATCHED = "evaluated", "matched"
"""Played to see how good the policy is: on held-out rows, or against the league."""
FAILED, GIVEN_UP, NO_SAMPLE = "failed", "dropped:environment", "dropped:no_sample"
"""Fates of one rollout whatever became of its group: it broke; the environment let it go; nothing of it was left to
train on. Groups that are dropped for a reason have the state `dropped:<reason>`."""

_KIND = re.compile(r"\(failures\.(\w+) = ")
_MOST_TURNS = 0xFFFF
_SHORT = 64


def facts(rollout: Rollout, state: str) -> Facts:
    turns, ticket, samples = rollout.turns, rollout.ticket, rollout.samples
    oldest, newest = _versions(turns)
    return Facts(
        ticket.env,
        rollout.actor,
        rollout.kind,
        fate(rollout, state),
        turns[-1].finish if turns else "",
        "" if rollout.error is None else error_kind(rollout.error, rollout.dropped),
        EVALUATION if state == EVALUATED else MATCH if state == MATCHED else TRAINING,
        ticket.number,
        ticket.row,
        rollout.member,
        len(turns[0].completion_ids) if len(turns) == 1 else sum([len(turn.completion_ids) for turn in turns]),
        len(turns[0].prompt_ids) if turns else 0,
        min(len(turns), _MOST_TURNS),
        min(len(samples), _MOST_TURNS),
        oldest,
        newest,
        math.nan if rollout.reward is None else rollout.reward,
        _advantage(samples),
    )


def _versions(turns: Sequence[Turn]) -> tuple[int, int]:
    """The oldest and the newest; -1 where nothing was sampled. Mostly all are one, which is soon seen."""
    versions = turns[0].versions if len(turns) == 1 else [version for turn in turns for version in turn.versions]
    if not versions:
        return -1, -1
    if versions.count(versions[0]) == len(versions):
        return versions[0], versions[0]
    return min(versions), max(versions)


def fate(rollout: Rollout, state: str) -> str:
    """The fate of one rollout of a batch or group."""
    if state in (EVALUATED, MATCHED):
        return state
    if rollout.error is not None:
        return GIVEN_UP if rollout.dropped else FAILED
    if not rollout.samples and state in (TRAINED, REPLAYED, SKIPPED):
        return NO_SAMPLE
    return state


def error_kind(error: str, dropped: bool) -> str:
    """Of which kind a failure was, as the run file's section `failures` calls it."""
    found = _KIND.search(error)
    return found[1] if found else "dropped" if dropped else "episode"


def _advantage(samples: Sequence[Sample]) -> float:
    """Mean over all tokens that train by rl."""
    total, count = 0.0, 0
    for sample in samples:
        if (advantages := sample.advantages) is None:
            continue
        if sample.rl_weights is None and len(advantages) <= _SHORT:  # numpy would take three times as long
            said = list(compress(advantages.tolist(), sample.loss_mask.tolist()))
            total += sum(said)
            count += len(said)
            continue
        trained = sample.loss_mask if sample.rl_weights is None else sample.loss_mask & (sample.rl_weights != 0)
        values = advantages[trained]
        total += float(np.add.reduce(values))
        count += len(values)
    return total / count if count else math.nan


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
