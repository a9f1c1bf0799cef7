"""Which engine a request goes to."""

from collections import OrderedDict
from collections.abc import Sequence

from paceline.inference.base import Engine, EngineError

BLOCK = 32
"""Prompts are remembered by beginnings of this many tokens, twice as many, and so on."""
MOST_BEGINNINGS = 1 << 16
SLACK = 0.25
"""How much busier than the least loaded engine, in parts of its capacity, the one that knows a prompt may be."""


class Member:
    """An engine as the pool sees it."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.engine = engine
        self.name = name
        self.unanswered = 0
        self.capacity = 1
        self.context: int | None = None
        """Most tokens it takes; None until it was asked."""
        self.trouble: EngineError | None = None
        """Why it is set aside; None while it serves."""

    @property
    def load(self) -> float:
        """How full it would be with one request more."""
        return (self.unanswered + 1) / self.capacity


def choose(candidates: Sequence[Member], home: Member | None = None) -> Member:
    """The engine that knows the prompt's beginning, unless it is more than `SLACK` busier than the least loaded one."""
    least = min(candidates, key=lambda member: member.load)
    if home in candidates and home is not None and home.load <= least.load + SLACK:
        return home
    return least


class Homes:
    """Remembers which engine last computed the beginning of a prompt.

    Only a beginning that is at least half of the prompt counts: a chat template's first words are everybody's.
    """

    def __init__(self) -> None:
        self._homes: OrderedDict[int, Member] = OrderedDict()

    def find(self, prompt: Sequence[int]) -> Member | None:
        keys = _beginnings(prompt)
        for known in range(len(keys), 0, -1):
            if known * BLOCK * 2 < len(prompt):
                return None
            if home := self._homes.get(keys[known - 1]):
                return home
        return None

    def settle(self, prompt: Sequence[int], member: Member) -> None:
        for key in _beginnings(prompt):
            self._homes[key] = member
            self._homes.move_to_end(key)
        while len(self._homes) > MOST_BEGINNINGS:
            self._homes.popitem(last=False)

    def forget(self) -> None:
        """New weights: keys and values of the old ones are never shared with new requests."""
        self._homes.clear()


def _beginnings(prompt: Sequence[int]) -> list[int]:
    """A key for each whole number of blocks the prompt begins with, shortest first."""
    keys, key = [], 0
    for end in range(BLOCK, len(prompt) + 1, BLOCK):
        key = hash((key, tuple(prompt[end - BLOCK : end])))
        keys.append(key)
    return keys
