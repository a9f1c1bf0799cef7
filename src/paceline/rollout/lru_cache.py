"""An LRU cache of bounded size."""

from collections import OrderedDict
from typing import Generic, TypeVar

V = TypeVar("V")

ENTRY = 16
"""Weight of an entry by itself: a great many small ones fill the memory too."""


class Recent(Generic[V]):
    """Values by their text; those unused for longest make room for new ones.

    >>> recent = Recent(2 * ENTRY + 5)
    >>> for key, weight in [("a", 2), ("b", 3)]:
    ...     recent.put(key, weight, weight)
    >>> recent.get("a")
    2
    >>> recent.put("c", 1, 1)
    >>> recent.get("b"), recent.get("a"), recent.get("c")
    (None, 2, 1)
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._weight = 0
        self._kept: OrderedDict[str, tuple[V, int]] = OrderedDict()

    def get(self, key: str) -> V | None:
        kept = self._kept.get(key)
        if kept is None:
            return None
        self._kept.move_to_end(key)
        return kept[0]

    def put(self, key: str, value: V, weight: int) -> None:
        """A value under a key that has none; one too heavy for the whole room is not kept."""
        weight += ENTRY
        if weight > self._room:
            return
        self._kept[key] = value, weight
        self._weight += weight
        while self._weight > self._room:
            _, (_, lost) = self._kept.popitem(last=False)
            self._weight -= lost
