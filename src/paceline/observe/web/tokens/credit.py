"""Explains a rollout's advantage, and the weight of a token's loss in its step: one over the normaliser.

The formulas are those of `paceline.algorithms`, on rewards that the record kept; tests hold the two together. Where
they differ on a run, its rewards were changed after the credit was given, or one of the two is wrong; the card says so.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from paceline.config import RunConfig
from paceline.config import algorithm as config
from paceline.data import Sample, Scales, count, fold, minibatches
from paceline.observe.analysis.text import four_digits as figure
from paceline.observe.record import Query, Row, RunFolder, Told
from paceline.observe.record.layout import RecordFiles
from paceline.observe.record.stored import identity

PASS = 0.5
"""As in grpo: a reward of at least this counts as a pass."""
CLOSE = 1e-5


@dataclass(frozen=True, slots=True)
class CardLine:
    """One line of a token's card: a name, how it is made, the numbers put in, and what comes out."""

    name: str
    formula: str = ""
    numbers: str = ""
    value: float | None = None
    note: str = ""
    wrong: bool = False
    """The record says something else."""
    replay: bool = False
    """The missing value can be computed by replaying the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A rollout as an algorithm compares it with others."""

    index: int
    reward: float
    tokens: int = 0
    turns: int = 1
    scope: tuple = ()
    """Only those of the same scope are compared."""


def advantage(algo: config.AlgorithmConfig, me: Peer, peers: Sequence[Peer], recorded: float | None) -> CardLine:
    """The credit of a rollout among its peers, itself included."""
    peers = [peer for peer in peers if peer.scope == me.scope]
    place = next(place for place, peer in enumerate(peers) if peer.index == me.index)
    match algo:
        case config.GRPOConfig() | config.EchoConfig():
            line = _group(algo, peers, place, "batch" if algo.baseline == "batch" else "group")
        case config.HierarchicalConfig():
            line = _group(config.GRPOConfig(std=algo.std, positive_only=algo.positive_only), peers, place, "siblings")
        case config.MaxRLConfig():
            line = _max_rl(np.array([peer.reward for peer in peers], np.float64), place)
        case config.RewardConfig():
            line = CardLine("advantage", "the reward itself", figure(me.reward), me.reward)
        case config.ConstantConfig():
            line = CardLine("advantage", "a constant (algo.value)", value=algo.value)
        case config.RAEConfig():
            if recorded is None:
                return CardLine("advantage", "reward − running mean of this role")
            formula = "reward − running mean of what this role earned before"
            numbers = f"{figure(me.reward)} − {figure(me.reward - recorded)}"
            note = "The running mean is not recorded; it is what the reward and the advantage leave."
            return CardLine("advantage", formula, numbers, recorded, note)
        case config.GAEConfig():
            note = "The critic's values at train time are not recorded."
            return CardLine("advantage", "made by the trainer's critic from the rewards", note=note, replay=True)
        case config.CustomConfig():
            return CardLine("advantage", f"given by {algo.import_path}", value=recorded)
        case _:
            return CardLine("advantage", f"{algo.type} gives none: no reward trains here", value=recorded)
    if recorded is None or line.value is None or abs(recorded - line.value) <= CLOSE * max(1.0, abs(line.value)):
        return line
    note = f"The record says {figure(recorded)}: rewards or credit were changed after one another. {line.note}"
    return replace(line, note=note.strip(), wrong=True)


def _earned(algo: config.GRPOConfig | config.EchoConfig, peers: Sequence[Peer]) -> NDArray:
    """The reward of each that credit is computed from; under `length_bonus`, more for short replies."""
    rewards = np.array([peer.reward for peer in peers], np.float64)
    if algo.length_bonus is None:
        return rewards
    costs = np.array([peer.tokens if algo.length_bonus == "tokens" else peer.turns for peer in peers], np.float64)
    passed = rewards >= PASS
    if passed.any() and (mean := costs[passed].mean()) > 0:
        rewards[passed] *= 1 + np.clip(1 - costs[passed] / mean, 0, 1)
    return rewards


def _group(algo: config.GRPOConfig | config.EchoConfig, peers: Sequence[Peer], place: int, whom: str) -> CardLine:
    rewards = _earned(algo, peers)
    mine, mean = float(rewards[place]), float(rewards.mean())
    of = f"mean of the {whom}" + (f" ({len(peers)} rollouts)" if len(peers) > 1 else " (itself alone)")
    value = mine - mean if np.ptp(rewards) else 0.0
    formula, numbers = f"reward − {of}", f"{figure(mine)} − {figure(mean)}"
    spread = float(rewards.std(ddof=int(algo.std == "sample"))) if len(rewards) > 1 else 0.0
    if algo.std != "none" and spread > 1e-8:
        value /= spread
        formula, numbers = f"({formula}) / their standard deviation", f"({numbers}) / {figure(spread)}"
    note = ""
    if algo.length_bonus is not None and mine != peers[place].reward:
        note = f"For its length the reward {figure(peers[place].reward)} counts as {figure(mine)} (algo.length_bonus)."
    if algo.positive_only and value < 0:
        value, note = 0.0, f"{note} Negative, so it is set to zero (algo.positive_only).".strip()
    return CardLine("advantage", formula, numbers, value, note)


def _max_rl(rewards: NDArray, place: int) -> CardLine:
    mine, mean = float(rewards[place]), float(rewards.mean())
    if mean <= 0:
        return CardLine("advantage", "0, since the group's mean reward is not above 0", value=0.0)
    value = (mine - mean) / mean if np.ptp(rewards) else 0.0
    numbers = f"({figure(mine)} − {figure(mean)}) / {figure(mean)}"
    return CardLine("advantage", "(reward − group mean) / group mean", numbers, value)


MOST_TOKENS = 4_000_000
"""Tokens of a batch that is counted for a card; the replay page takes its time for larger ones."""
STATES = ("trained", "replayed", "skipped")

_MOST_RECENT = 64
_recent: OrderedDict[tuple, dict[int, NDArray]] = OrderedDict()
_lock = threading.Lock()


def share_of(run: RunFolder, told: Told, number: int, config: RunConfig) -> tuple[Scales, NDArray] | None:
    """One sample's scales, and the counts they come from: tokens and rollouts of rl, ce and ref_kl. None where the
    rollout did not train, or its batch is too large to be counted here."""
    if told.row.state not in STATES or not run.rollouts.kept:
        return None
    totals = _totals(run, told.row.step, config).get(told.row.index)
    if totals is None:
        return None
    own = [_truncated(sample, config) for sample in told.samples]
    return fold(own, config.trainer.normalise, config.trainer.fixed_length, totals=totals)[number], totals


def place_of(run: RunFolder, told: Told, number: int) -> int | None:
    """Which sample of its step's batch it is, counted in the order they shipped in; None where it did not train."""
    rows = _rows(run, told.row.step) if told.row.state in STATES else []
    before = [row.samples for row in rows if row.index < told.row.index]
    return sum(before) + number if rows else None


def _rows(run: RunFolder, step: int) -> list[Row]:
    return run.rollouts.find(Query(step=(step, step), state=STATES, sort="step", limit=None)).rows


def _truncated(sample: Sample, config: RunConfig) -> Sample:
    """The part of the sample that the trainer sees."""
    limit = config.trainer.max_sample_tokens
    return sample if limit is None else sample.truncated_to(limit)


def _totals(run: RunFolder, step: int, config: RunConfig) -> dict[int, NDArray]:
    """The counts of each rollout's optimizer step, by the rollout's number in the record; none of a large batch."""
    rows, parts = _rows(run, step), config.trainer.minibatches
    key = (run.path, identity(RecordFiles(run.path).index)[:2], step, len(rows), parts)
    with _lock:
        if key not in _recent:
            small = sum(row.prompt + row.tokens for row in rows) <= MOST_TOKENS and all(row.whole for row in rows)
            batch = [(row.index, one) for row in rows for one in run.rollouts.get(row.index).samples] if small else []
            samples, found = [_truncated(sample, config) for _, sample in batch], {}
            for part in minibatches(samples, parts) if batch else ():
                found |= dict.fromkeys((batch[at][0] for at in part), count([samples[at] for at in part]))
            _recent[key] = found
            while len(_recent) > _MOST_RECENT:
                _recent.popitem(last=False)
        return _recent[key]
