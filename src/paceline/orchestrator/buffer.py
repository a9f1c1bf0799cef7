"""Finished groups on their way into a batch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from paceline.data import Ticket
from paceline.rollout import Group


@dataclass(slots=True)
class ReadyGroup:
    """A group that may train."""

    group: Group
    young_until: float
    """The last version at which all of it may train, so that few are looked at again."""
    promised: bool = False
    """The next batch has begun to train on it."""

    @classmethod
    def of(cls, group: Group, staleness: int) -> "ReadyGroup":
        """Tokens of a frozen sampler never go stale; a group without a sample is old from the beginning."""
        oldest = [sample.oldest_version for sample in group.samples()]
        return cls(group, min((inf if version is None else version + staleness for version in oldest), default=-1))


class Buffer:
    """Groups by ticket, each in one record."""

    def __init__(self) -> None:
        self._held: dict[Ticket, ReadyGroup] = {}

    def put(self, finished: ReadyGroup) -> None:
        self._held[finished.group.ticket] = finished

    def take(self, groups: Iterable[Group]) -> None:
        """These leave, into a batch or dropped."""
        for group in groups:
            del self._held[group.ticket]

    def oldest(self, room: int) -> list[Group]:
        """As many groups as fit, in ticket order, those promised before."""
        batch = []
        for _, _, finished in sorted((not held.promised, ticket, held) for ticket, held in self._held.items()):
            if finished.group.places <= room:
                batch.append(finished.group)
                room -= finished.group.places
        return batch

    def promise(self, batch: Sequence[Group]) -> list[Group]:
        """Mark groups that the next batch begins to train on; returns those that were not promised already."""
        new = [held for group in batch if not (held := self._held[group.ticket]).promised]
        for held in new:
            held.promised = True
        return [held.group for held in new]

    def ageing(self, version: int) -> list[Group]:
        """Groups of which something may be too old at this version."""
        return [held.group for held in self._held.values() if version > held.young_until]

    def groups(self) -> list[Group]:
        """All, in ticket order."""
        return [self._held[ticket].group for ticket in sorted(self._held)]

    @property
    def places(self) -> int:
        return places(held.group for held in self._held.values())

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, ticket: Ticket) -> bool:
        return ticket in self._held


def places(groups: Iterable[Group]) -> int:
    """Places that the groups take in a batch."""
    return sum(group.places for group in groups)
