"""A rollout becomes samples: turns that extend one another exactly share one, any other starts its own."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.data import Sample
from paceline.rollout.types import Rollout, Turn


def assemble(rollout: Rollout) -> list[Sample]:
    """Samples that hold every sampled token exactly once as trained; in later branches it is only context."""
    return [_sample(thread, rollout) for thread in _threads(rollout.turns)]


@dataclass(slots=True)
class _Thread:
    """Tokens under construction."""

    tokens: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    temperatures: list[float] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    truncated: bool = False

    def add(self, turn: Turn) -> None:
        given = turn.prompt_ids[len(self.tokens) :]
        said = turn.completion_ids
        start = len(turn.prompt_ids)
        self.tokens += [*given, *said]
        self.mask += [False] * len(given) + [True] * len(said)
        self.logprobs += [0.0] * len(given) + turn.logprobs
        self.versions += [-1] * len(given) + turn.versions
        self.temperatures += [1.0] * len(given) + [turn.temperature or 1.0] * len(said)
        self.spans.append((start, start + len(said)))
        self.truncated = turn.finish == "length"


def _threads(turns: Sequence[Turn]) -> list[_Thread]:
    """Each turn joins the longest thread whose tokens its prompt repeats from the first to the last. Of two turns that
    go on from the same place the later one starts anew: there the common past is context and trains no second time."""
    threads: list[_Thread] = []
    for turn in turns:
        fitting = [thread for thread in threads if turn.prompt_ids[: len(thread.tokens)] == thread.tokens]
        thread = max(fitting, key=lambda thread: len(thread.tokens), default=None)
        if thread is None:
            threads.append(thread := _Thread())
        thread.add(turn)
    return threads


def _sample(thread: _Thread, rollout: Rollout) -> Sample:
    return Sample(
        token_ids=np.array(thread.tokens),
        loss_mask=np.array(thread.mask),
        logprobs=np.array(thread.logprobs),
        versions=np.array(thread.versions),
        temperatures=np.array(thread.temperatures),
        ended="truncated" if thread.truncated else "terminated",
        env=rollout.env,
        ticket=rollout.ticket,
        rollout=rollout.member,
        spans=tuple(thread.spans),
    )
