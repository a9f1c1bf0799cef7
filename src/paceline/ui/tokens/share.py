"""Computes the weight of a token's loss in its step: one over the normaliser, as the trainer folds it."""

import threading
from collections import OrderedDict
from dataclasses import dataclass

from numpy.typing import NDArray

from paceline.config import RunConfig
from paceline.data import Sample, Scales, count, fold, minibatches
from paceline.record import Query, Row, RunFolder, Told
from paceline.record.layout import RecordFiles
from paceline.record.stored import identity

MOST_TOKENS = 4_000_000
"""Tokens of a batch that is counted for a card; the replay page takes its time for larger ones."""
_MOST_KEPT = 64
STATES = ("trained", "replayed", "skipped")


@dataclass(frozen=True, slots=True)
class Counted:
    """The normalisers of a batch."""

    totals: list[NDArray]
    """For each optimizer step, tokens and rollouts of each component."""
    step_of: dict[int, int]
    """Which optimizer step each rollout, by its number in the record, is part of."""


@dataclass(frozen=True, slots=True)
class Share:
    """One sample's scales, and the counts they come from: tokens and rollouts of rl, ce and ref_kl."""

    scales: Scales
    totals: NDArray


_kept: OrderedDict[tuple, Counted | None] = OrderedDict()
_lock = threading.Lock()


def share_of(run: RunFolder, told: Told, number: int, config: RunConfig) -> Share | None:
    """None where the rollout did not train, or its batch is too large to be counted here."""
    if told.row.state not in STATES or not run.rollouts.kept:
        return None
    counted = _counted(run, told.row.step, config)
    part = None if counted is None else counted.step_of.get(told.row.index)
    if counted is None or part is None:
        return None
    trainer, totals = config.trainer, counted.totals[part]
    own = [cut(sample, config) for sample in told.samples]
    scales = fold(own, trainer.normalise, trainer.fixed_length, totals=totals)
    return Share(scales[number], totals)


def place_of(run: RunFolder, told: Told, number: int) -> int | None:
    """Which sample of its step's batch it is, counted in the order they shipped in; None where it did not train."""
    rows = _rows(run, told.row.step) if told.row.state in STATES else []
    before = [row.samples for row in rows if row.index < told.row.index]
    return sum(before) + number if rows else None


def _rows(run: RunFolder, step: int) -> list[Row]:
    return run.rollouts.find(Query(step=(step, step), state=STATES, sort="step", limit=None)).rows


def cut(sample: Sample, config: RunConfig) -> Sample:
    """The part of the sample that the trainer sees."""
    limit = config.trainer.max_sample_tokens
    return sample if limit is None else sample.truncated_to(limit)


def _counted(run: RunFolder, step: int, config: RunConfig) -> Counted | None:
    rows, trainer = _rows(run, step), config.trainer
    key = (run.path, identity(RecordFiles(run.path).index)[:2], step, len(rows), trainer.minibatches)
    with _lock:
        if key not in _kept:
            small = sum(row.prompt + row.tokens for row in rows) <= MOST_TOKENS and all(row.whole for row in rows)
            _kept[key] = _count(run, [row.index for row in rows], config) if small else None
            while len(_kept) > _MOST_KEPT:
                _kept.popitem(last=False)
        return _kept[key]


def _count(run: RunFolder, indices: list[int], config: RunConfig) -> Counted:
    samples: list[Sample] = []
    owner: list[int] = []
    for index in indices:
        mine = run.rollouts.get(index).samples
        samples += [cut(sample, config) for sample in mine]
        owner += [index] * len(mine)
    parts = minibatches(samples, config.trainer.minibatches)
    step_of = {owner[place]: number for number, part in enumerate(parts) for place in part}
    return Counted([count([samples[place] for place in part]) for part in parts], step_of)
