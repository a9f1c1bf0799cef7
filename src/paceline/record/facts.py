"""The columns of a rollout's row in the index, before names become numbers."""

import math
import re
from collections.abc import Sequence
from itertools import compress
from typing import NamedTuple

import numpy as np

from paceline.data.sample import Sample
from paceline.record.body import RolloutLike, TurnLike
from paceline.record.layout import EVALUATION, MATCH, TRAINING

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


class Facts(NamedTuple):
    """Names, then numbers in the order of the row."""

    env: str
    actor: str
    kind: str
    state: str
    finish: str
    error: str
    domain: int
    ticket: int
    row: int
    member: int
    tokens: int
    prompt: int
    turns: int
    samples: int
    version_min: int
    version_max: int
    reward: float
    advantage: float


def facts(rollout: RolloutLike, state: str) -> Facts:
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


def _versions(turns: Sequence[TurnLike]) -> tuple[int, int]:
    """The oldest and the newest; -1 where nothing was sampled. Mostly all are one, which is soon seen."""
    versions = turns[0].versions if len(turns) == 1 else [version for turn in turns for version in turn.versions]
    if not versions:
        return -1, -1
    if versions.count(versions[0]) == len(versions):
        return versions[0], versions[0]
    return min(versions), max(versions)


def fate(rollout: RolloutLike, state: str) -> str:
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
