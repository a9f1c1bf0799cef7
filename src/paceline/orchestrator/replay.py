"""Remembers recent groups, so that they can train once more.

    trained -> remembered -> chosen for the batch of a version -> a ticket of its own -> trained again

Waiting to train and waiting to train again draw on one allowance of staleness: what trained at the limit is too old at
the next version. So the groups replayed are those that came quickly, on average the shorter ones. A replay keeps the
credit of its first training; algorithm, curriculum and sampling metrics have seen it and do not see it again.

A checkpoint keeps the memory, so a resumed run replays what an unbroken one would.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.config import ReplayConfig as Config
from paceline.data import Ticket
from paceline.orchestrator.gate import fresh_enough
from paceline.rollout import Group


@dataclass(slots=True, kw_only=True)
class ReplayedGroup(Group):
    """A group that has trained before."""

    first: Ticket
    """The ticket of its first training."""


@dataclass(slots=True)
class ReplayEntry:
    """A group in the memory, and how often it may still be replayed."""

    group: Group
    left: int


class Replay:
    """The memory. Which groups it offers is a function of what it was given and of the version, nothing else."""

    def __init__(self, config: Config, staleness: int) -> None:
        self._size = config.groups if config.share else 0
        self._times = config.times
        self._staleness = staleness
        self._kept: dict[Ticket, ReplayEntry] = {}

    def remember(self, batch: Sequence[Group]) -> None:
        """A batch was trained. What it replayed is remembered by its first ticket, if at all."""
        new = {group.ticket: ReplayEntry(group, self._times) for group in batch if not isinstance(group, ReplayedGroup)}
        newest = sorted((self._kept | new).items(), reverse=True)
        self._kept = dict(newest[: self._size])

    def choose(self, version: int, room: int) -> list[Group]:
        """The newest groups that may train at this version, as many as fit."""
        self._kept = {t: kept for t, kept in self._kept.items() if kept.left and self._young(kept.group, version)}
        chosen = []
        for kept in self._kept.values():
            if kept.group.places <= room:
                chosen.append(kept.group)
                room -= kept.group.places
        return chosen

    def again(self, group: Group, number: int) -> ReplayedGroup:
        """The group under a new ticket: a copy, so that whatever becomes of one leaves the other alone."""
        self._kept[group.ticket].left -= 1
        ticket = group.ticket._replace(number=number)
        rollouts = [
            replace(r, ticket=ticket, samples=[replace(s, ticket=ticket) for s in r.samples]) for r in group.rollouts
        ]
        return ReplayedGroup(ticket=ticket, rollouts=rollouts, places=group.places, first=group.ticket)

    def state(self) -> list[tuple[Group, int]]:
        """The memory, newest first, with how often each group may still be replayed."""
        return [(kept.group, kept.left) for kept in self._kept.values()]

    def load(self, state: Sequence[tuple[Group, int]]) -> None:
        """Back to a checkpoint's memory, as far as the run file leaves room for it."""
        self._kept = {group.ticket: ReplayEntry(group, left) for group, left in state[: self._size]}

    def still(self, groups: Sequence[Group], version: int, room: int) -> list[Group]:
        """Of groups chosen before a restart, those that may train now."""
        chosen = []
        for group in groups:
            if group.ticket in self._kept and group.places <= room and self._young(group, version):
                chosen.append(group)
                room -= group.places
        return chosen

    def _young(self, group: Group, version: int) -> bool:
        """Whole or not at all: `on_stale` is for what came late, not a licence to choose what is too old."""
        return all(fresh_enough(s, version, self._staleness, "drop") is not None for s in group.samples())
