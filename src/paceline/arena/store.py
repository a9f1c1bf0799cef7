"""Stores artifacts that an arena keeps from one episode to the next."""

import random
from collections import deque
from collections.abc import Iterator
from typing import Any

from paceline.arena.types import ArenaError, Artifact


class ArtifactStore:
    """Artifacts in the order they came; when it is full the oldest makes room.

    >>> store = ArtifactStore(max_size=2)
    >>> for question in ("1+1", "1+2", "1+3"):
    ...     store.add(Artifact(question))
    >>> [artifact.data for artifact in store]
    ['1+2', '1+3']
    """

    def __init__(self, max_size: int) -> None:
        if max_size < 1:
            raise ArenaError(f"a store of {max_size} artifacts can hold nothing: give max_size of at least 1")
        self._kept: deque[Artifact] = deque(maxlen=max_size)

    def add(self, artifact: Artifact) -> None:
        self._kept.append(artifact)

    def sample(self, k: int, rng: random.Random) -> list[Artifact]:
        """Up to `k` different entries; fewer if the store holds fewer. `rng` is the arena's, so that runs repeat."""
        return rng.sample(list(self._kept), min(k, len(self._kept)))

    def count(self) -> int:
        return len(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Artifact]:
        return iter(tuple(self._kept))

    def copy(self) -> "ArtifactStore":
        """A store of its own with the same entries."""
        assert self._kept.maxlen is not None
        clone = ArtifactStore(self._kept.maxlen)
        clone._kept.extend(self._kept)
        return clone

    def state(self) -> list[dict[str, Any]]:
        """State for the checkpoint, as JSON; the artifacts' data must be JSON too."""
        return [{"id": artifact.id, "data": artifact.data} for artifact in self._kept]

    def load(self, state: list[dict[str, Any]]) -> None:
        """Back to a checkpoint's entries."""
        self._kept.clear()
        self._kept.extend(Artifact(entry["data"], entry["id"]) for entry in state)
