"""How far the sampler may ride ahead of the trainer."""

from dataclasses import dataclass


@dataclass(slots=True)
class Gate:
    """Counts rollouts so that none is trained more than `staleness` versions after it started.

        capacity = min(max_inflight - running, (S + version + 1) * B - (accepted + running))

    The batch that a rollout started at version v can join at the latest has index v + S, because at most
    (S + v + 1) * B rollouts are let in before version v + 1 exists. With S = 0 the gate closes when one batch is full
    and opens at the next publish: the synchronous loop. `total` batches are all a run needs; the gate lets in no more.

    >>> gate = Gate(batch=8, staleness=0, max_inflight=100)
    >>> gate.start(8); gate.capacity
    0
    >>> gate.reject(4); gate.capacity  # a dropped group gives its places back
    4
    """

    batch: int
    staleness: int
    max_inflight: int
    total: int | None = None
    version: int = 0
    running: int = 0
    accepted: int = 0

    @property
    def capacity(self) -> int:
        """Rollouts that may start now."""
        batches = self.staleness + self.version + 1
        if self.total is not None:
            batches = min(batches, self.total)
        ahead = batches * self.batch - (self.accepted + self.running)
        return max(0, min(self.max_inflight - self.running, ahead))

    def start(self, places: int) -> None:
        """A group enters, whole."""
        if places > self.capacity:
            raise RuntimeError(f"the gate has room for {self.capacity} rollouts, not for {places}")
        self.running += places

    def accept(self, places: int) -> None:
        """A running group reached the buffer."""
        self.running -= places
        self.accepted += places

    def reject(self, places: int) -> None:
        """A running group was dropped; its places are free again."""
        self.running -= places

    def give_back(self, places: int) -> None:
        """A buffered group was dropped before it shipped; its places are free again."""
        self.accepted -= places

    def publish(self, version: int) -> None:
        self.version = version
