"""Remembers recent groups, so that they can train once more.

    trained -> remembered -> chosen for the batch of a version -> a ticket of its own -> trained again

Waiting to train and waiting to train again draw on one allowance of staleness: what trained at the limit is too old at
the next version. So the groups replayed are those that came quickly, on average the shorter ones. A replay keeps the
credit of its first training; algorithm, curriculum and sampling metrics have seen it and do not see it again.

A checkpoint keeps the memory, so a resumed run replays what an unbroken one would.
"""

from collections.abc import Sequence
from dataclasses import replace

from paceline.config import ReplayConfig
from paceline.data import Ticket
from paceline.data.rollout import groups_that_fit
from paceline.orchestrator.gate import limit_staleness
from paceline.rollout import Group


class ReplayedGroup(Group):
    """A group that has trained before."""

    __slots__ = ()


class Replay:
    """The memory. Which groups it offers is a function of what it was given and of the version, nothing else."""

    def __init__(self, config: ReplayConfig, staleness: int) -> None:
        self._size = config.groups if config.share else 0
        self._times = config.times
        self._staleness = staleness
        self._memory: dict[Ticket, tuple[Group, int]] = {}
        """Groups, newest first, with how often each may still be replayed."""

    def remember(self, batch: Sequence[Group]) -> None:
        """A batch was trained. What it replayed is remembered by its first ticket, if at all."""
        new = {group.ticket: (group, self._times) for group in batch if not isinstance(group, ReplayedGroup)}
        kept = self._memory | new
        self._memory = {ticket: kept[ticket] for ticket in sorted(kept, reverse=True)[: self._size]}

    def choose(self, version: int, room: int) -> list[Group]:
        """The newest groups that may train at this version, as many as fit."""
        self._memory = {g.ticket: (g, left) for g, left in self._memory.values() if left and self._is_fresh(g, version)}
        return groups_that_fit((group for group, _ in self._memory.values()), room)

    def reissue(self, group: Group, number: int) -> ReplayedGroup:
        """The group under a new ticket: a copy, so that whatever becomes of one leaves the other alone."""
        self._memory[group.ticket] = group, self._memory[group.ticket][1] - 1
        ticket = group.ticket._replace(number=number)
        rollouts = [
            replace(r, ticket=ticket, samples=[replace(s, ticket=ticket) for s in r.samples]) for r in group.rollouts
        ]
        return ReplayedGroup(ticket=ticket, rollouts=rollouts, size=group.size)

    def state(self) -> list[tuple[Group, int]]:
        return list(self._memory.values())

    def load(self, state: Sequence[tuple[Group, int]]) -> None:
        """Back to a checkpoint's memory, as far as the run file leaves room for it."""
        self._memory = {group.ticket: (group, left) for group, left in state[: self._size]}

    def still_fresh(self, groups: Sequence[Group], version: int, room: int) -> list[Group]:
        """Of groups chosen before a restart, those that may train now."""
        return groups_that_fit(
            (group for group in groups if group.ticket in self._memory and self._is_fresh(group, version)), room
        )

    def _is_fresh(self, group: Group, version: int) -> bool:
        """Whole or not at all: `on_stale` is for what came late, not a licence to choose what is too old."""
        return all(limit_staleness(s, version, self._staleness, "drop") is not None for s in group.samples())
