"""Bounds how far sampling runs ahead of training, and says how stale a sample is."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from paceline.data import Sample

OnStale = Literal["drop", "mask", "keep"]


def staleness(sample: Sample, version: int) -> int:
    """Versions between the oldest token that trains and now; 0 for a frozen sampler, whose tokens never go stale."""
    oldest = sample.oldest_version
    return 0 if oldest is None else version - oldest


def fresh_enough(sample: Sample, version: int, limit: int, on_stale: OnStale) -> Sample | None:
    """The sample as it may train now; None drops it."""
    if on_stale == "keep" or staleness(sample, version) <= limit:
        return sample
    if on_stale == "drop":
        return None
    keep = sample.versions >= version - limit
    if not (keep & sample.loss_mask).any():
        return None
    changed = {"rl_weights": np.where(keep, sample.rl, np.float32(0))}
    if sample.ref_kl_weights is not None:
        changed["ref_kl_weights"] = np.where(keep, sample.ref_kl_weights, np.float32(0))
    return sample.with_streams(**changed)


@dataclass(slots=True)
class Gate:
    """Counts rollouts so that none is trained more than `staleness` versions after it started.

        capacity = min(max_inflight - running, (S + version + 1) * B - S * reserve + extra - (accepted + running))

    The batch that a rollout started at version v can join at the latest has index v + S, because at most
    (S + v + 1) * B rollouts are let in before version v + 1 exists. With S = 0 the gate closes when one batch is full
    and opens at the next publish: the synchronous loop. `total` batches are all a run needs; the gate lets in no more.

    Where groups are replayed, `reserve` places of every batch to come are kept for them. What the batch being filled
    really replays is known, and counts as accepted; the rest of its places are for fresh rollouts. So replay shrinks
    fresh sampling by the places it fills, and never pushes a fresh rollout past the last batch it may join.

    `extra` rollouts are let in beyond that as long as a batch is still to be filled, so that it fills from those that
    finish first. The others may come too late for their last batch: counting alone no longer keeps the limit, and the
    dispatcher checks ages before it ships.

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
    reserve: int = 0
    extra: int = 0
    shipped: int = 0
    """Batches that are full: as many as versions, or one more while it is trained."""

    @property
    def capacity(self) -> int:
        """Rollouts that may start now."""
        return max(0, min(self.max_inflight - self.running, self._ahead))

    @property
    def replayable(self) -> int:
        """Places of the batch being filled that may go to groups which have trained before."""
        return max(0, min(self.reserve, self._ahead))

    @property
    def _ahead(self) -> int:
        """Places not yet taken, from the batch being filled to the last one that this version may serve."""
        batches = self.staleness + self.version + 1
        if self.total is not None:
            batches = min(batches, self.total)
        kept = max(0, batches - self.version - 1) * self.reserve
        extra = self.extra if self.shipped < batches else 0
        return batches * self.batch - kept + extra - (self.accepted + self.running)

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

    def replay(self, places: int) -> None:
        """Groups that have trained before take places of the batch being filled."""
        if places > self.replayable:
            raise RuntimeError(f"the gate has room to replay {self.replayable} rollouts, not {places}")
        self.accepted += places

    def give_back(self, places: int) -> None:
        """A buffered group was dropped before it shipped; its places are free again."""
        self.accepted -= places

    def ship(self, places: int) -> None:
        """A batch is full. One that groups could not fill exactly still counts as a whole one, or the gate would drift
        open."""
        self.accepted += self.batch - places
        self.shipped += 1

    def publish(self, version: int) -> None:
        """New weights are there: as many batches have been trained as their version says."""
        self.version = self.shipped = version
