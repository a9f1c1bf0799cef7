"""Remembers recent groups, so that they can train once more.

    trained -> remembered -> chosen for the batch of a version -> a ticket of its own -> trained again

Waiting to train and waiting to train again draw on one allowance of staleness: what trained at the limit is too old at
the next version. So the groups replayed are those that came quickly, on average the shorter ones. A replay keeps the
credit of its first training; algorithm, curriculum and sampling metrics have seen it and do not see it again.

Groups are chosen newest first, or by chance with a priority (`PriorityConfig`). The noise of a choice is counter-based,
one number for each group and version, and a checkpoint keeps the memory: so a resumed run replays what an unbroken one
would.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from statistics import fmean
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from paceline.config import ReplayConfig
from paceline.config.filters import PriorityConfig
from paceline.data import Sample, Ticket
from paceline.data.rollout import groups_that_fit
from paceline.orchestrator.gate import limit_staleness, staleness
from paceline.rollout import Group, Rollout


class ReplayedGroup(Group):
    """A group that has trained before."""

    __slots__ = ()


@dataclass(slots=True)
class RememberedGroup:
    group: Group
    left: int
    """How often it may still be replayed."""
    priority: float = 0.0


class Replay:
    """The memory. Which groups it offers is a function of what it was given, the seed and the version, nothing else."""

    def __init__(
        self, config: ReplayConfig, staleness: int, seed: int = 0, warn: Callable[[str], None] = lambda text: None
    ) -> None:
        self._size = config.groups if config.share else 0
        self._times, self._staleness = config.times, staleness
        self._chances, self._seed, self._warn = config.chances, seed, warn
        self._memory: dict[Ticket, RememberedGroup] = {}
        """Groups, newest first."""
        self._warned: set[str] = set()

    def remember(self, batch: Sequence[Group]) -> None:
        """A batch was trained. What it replayed is remembered by its first ticket, if at all."""
        fresh = [group for group in batch if not isinstance(group, ReplayedGroup)]
        kept = self._memory | {group.ticket: self._remembered(group, self._times) for group in fresh}
        self._memory = {ticket: kept[ticket] for ticket in sorted(kept, reverse=True)[: self._size]}

    def choose(self, version: int, room: int) -> list[Group]:
        """Groups that may train at this version, as many as fit: the newest, or drawn by their priority."""
        fits = {ticket: r for ticket, r in self._memory.items() if r.left and self._is_fresh(r.group, version)}
        self._memory = fits
        tickets = list(fits)
        if self._chances is not None and tickets:
            # Drawing without replacement by weight is taking the largest of log p + Gumbel noise (arXiv 1903.06059).
            noise = np.array([self._gumbel(ticket, version) for ticket in tickets])
            order = np.argsort(-(np.log(self.probabilities()) + noise), kind="stable")
            tickets = [tickets[place] for place in order]
        return groups_that_fit((fits[ticket].group for ticket in tickets), room)

    def reissue(self, group: Group, number: int) -> ReplayedGroup:
        """The group under a new ticket: a copy, so that whatever becomes of one leaves the other alone."""
        weight = self._importance_weight(group.ticket)
        self._memory[group.ticket].left -= 1
        ticket = group.ticket._replace(number=number)
        rollouts = [
            replace(r, ticket=ticket, samples=[_weighted(replace(s, ticket=ticket), weight) for s in r.samples])
            for r in group.rollouts
        ]
        return ReplayedGroup(ticket=ticket, rollouts=rollouts, size=group.size)

    def probabilities(self) -> NDArray[np.float64]:
        """Chance of each remembered group to be drawn first, newest first."""
        if (c := self._chances) is None:
            raise ValueError('replay.priority = "newest" draws nothing by chance')
        priorities = np.array([r.priority for r in self._memory.values()])
        weights = np.exp(c.sharpness * (priorities - priorities.max(initial=0.0)))
        return (1.0 - c.floor) * weights / weights.sum() + c.floor / len(weights)

    def metrics(self, chosen: Sequence[Group], version: int) -> dict[str, float]:
        """Of the batch that ships with the chosen groups at a version: how these compare with all remembered ones."""
        remembered, own = list(self._memory.values()), [self._memory[group.ticket] for group in chosen]
        metrics = {
            "replay/groups": float(len(own)),
            "replay/age": _mean_age(own, version),
            "replay/remembered": float(len(remembered)),
            "replay/remembered_age": _mean_age(remembered, version),
        }
        if self._chances is not None and remembered:
            metrics["replay/remembered_priority"] = fmean(r.priority for r in remembered)
            if own:
                metrics["replay/priority"] = fmean(r.priority for r in own)
        return metrics

    def state(self) -> list[tuple[Group, int]]:
        return [(r.group, r.left) for r in self._memory.values()]

    def load(self, state: Sequence[tuple[Group, int]]) -> None:
        """Back to a checkpoint's memory, as far as the run file leaves room for it."""
        self._memory = {group.ticket: self._remembered(group, left) for group, left in state[: self._size]}

    def still_fresh(self, groups: Sequence[Group], version: int, room: int) -> list[Group]:
        """Of groups chosen before a restart, those that may train now."""
        return groups_that_fit(
            (group for group in groups if group.ticket in self._memory and self._is_fresh(group, version)), room
        )

    def _is_fresh(self, group: Group, version: int) -> bool:
        """Whole or not at all: `on_stale` is for what came late, not a licence to choose what is too old."""
        return all(limit_staleness(s, version, self._staleness, "drop") is not None for s in group.samples())

    def _remembered(self, group: Group, left: int) -> RememberedGroup:
        if (c := self._chances) is None:
            return RememberedGroup(group, left)
        known = {name for rollout in group.rollouts for name in rollout.metrics}
        if c.metrics and not known & c.metrics.keys() and group.ticket.env not in self._warned:
            self._warned.add(group.ticket.env)
            names, others = " and ".join(f"`{name}`" for name in c.metrics), ", ".join(f"`{name}`" for name in known)
            self._warn(
                f"replay.priority.metrics: no rollout of `{group.ticket.env}` has {names}, so its reward stands in; "
                f"it has {others or 'no metrics'}"
            )
        return RememberedGroup(group, left, group_priority(group, c))

    def _gumbel(self, ticket: Ticket, version: int) -> float:
        key = (self._seed, crc32(b"replay"), version, ticket.number)
        return float(np.random.default_rng(key).gumbel())

    def _importance_weight(self, ticket: Ticket) -> float:
        """(N p)^-importance over the largest such weight, which is that of the least likely group."""
        if self._chances is None or not self._chances.importance:
            return 1.0
        p = self.probabilities()
        return float((p.min() / p[list(self._memory).index(ticket)]) ** self._chances.importance)


def group_priority(group: Group, c: PriorityConfig) -> float:
    """How much there is left to learn from a group; 0 where nothing is known about it."""
    if c.by == "advantage":
        given = [s.advantages[s.rl_token_weights != 0] for s in group.samples() if s.advantages is not None]
        size = float(np.abs(tokens).mean(dtype=np.float64)) if len(tokens := np.concatenate([[], *given])) else 0.0
        return size if isfinite(size) else 0.0
    scores = [score for rollout in group.rollouts if isfinite(score := _score(rollout, c.metrics))]
    return min(1.0, max(0.0, 1.0 - fmean(scores) / c.best)) if scores else 0.0


def _score(rollout: Rollout, weights: Mapping[str, float]) -> float:
    """The weighted mean of the named metrics that a rollout has; its reward where it has none of them."""
    found = {name: rollout.metrics[name] for name in weights if isfinite(rollout.metrics.get(name, float("nan")))}
    if not found:
        return float("nan") if rollout.reward is None else rollout.reward
    return sum(weights[name] * value for name, value in found.items()) / sum(weights[name] for name in found)


def _weighted(sample: Sample, weight: float) -> Sample:
    """The sample with all weights of its tokens multiplied."""
    if weight == 1.0:
        return sample
    factor = np.float32(weight)
    others = {name: getattr(sample, name) for name in ("ce_weights", "teacher_kl_weights")}
    scaled = {name: stream * factor for name, stream in others.items() if stream is not None}
    return sample.with_streams(rl_weights=sample.rl_token_weights * factor, **scaled)


def _mean_age(remembered: Sequence[RememberedGroup], version: int) -> float:
    return fmean([staleness(s, version) for r in remembered for s in r.group.samples()] or [0.0])
