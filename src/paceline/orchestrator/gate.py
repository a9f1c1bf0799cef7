"""Bounds how far sampling runs ahead of training, and says how stale a sample is."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from paceline.data import Sample

OnStale = Literal["drop", "mask", "keep"]


def staleness(sample: Sample, version: int) -> int:
    """Versions between the oldest token that trains and now; 0 where another model than the
    policy sampled all of them."""
    oldest = sample.oldest_version
    return 0 if oldest is None else version - oldest


def limit_staleness(sample: Sample, version: int, limit: int, on_stale: OnStale) -> Sample | None:
    """The sample if it is young enough, or what `on_stale` makes of it: as it is, without weight on its stale tokens,
    or dropped (None)."""
    if on_stale == "keep" or staleness(sample, version) <= limit:
        return sample
    if on_stale == "drop":
        return None
    keep = sample.versions >= version - limit
    if not (keep & sample.loss_mask).any():
        return None
    changed = {"rl_weights": np.where(keep, sample.rl_token_weights, np.float32(0))}
    if sample.teacher_kl_weights is not None:
        changed["teacher_kl_weights"] = np.where(keep, sample.teacher_kl_weights, np.float32(0))
    if sample.ce_weights is not None:  # also of tokens that nothing sampled, which have no age
        changed["ce_weights"] = np.where(keep | ~sample.loss_mask, sample.ce_weights, np.float32(0))
    return sample.with_streams(**changed)


@dataclass(slots=True)
class Gate:
    """Limits how many rollouts start, so that each has a slot in a batch within `staleness` versions of its start.

        capacity = min(max_inflight - running, (S + version + 1) * B - S * reserve + extra - (accepted + running))

    with S = `staleness` and B = `batch`, the rollouts of a batch (an episode of several actors counts as one). Batch k
    is trained at version k, so a rollout that started at version v may join batch v + S at the latest; at most
    (S + v + 1) * B are let in before version v + 1 exists, which is as many slots as those batches have. With S = 0 the
    gate closes when one batch is full and opens at the next publish: the synchronous loop. `total` batches are all a
    run needs; the gate lets in no more.

    A batch fills from the groups that finish first, so a slow rollout can still miss its last batch. That is checked
    where a group finishes and again before a batch ships (`limit_staleness`): this is what keeps the limit.

    Where groups are replayed, `reserve` slots of every batch to come are reserved for them. What the batch being
    filled really replays is known, and counts as accepted; the rest of its slots are for fresh rollouts. So replay
    shrinks fresh sampling by the slots it fills.

    `extra` (`oversample`) rollouts are let in beyond that as long as a batch is still to be filled.

    >>> gate = Gate(batch=8, staleness=0, max_inflight=100)
    >>> gate.start(8); gate.capacity
    0
    >>> gate.reject(4); gate.capacity  # a dropped group gives its slots back
    4
    """

    batch: int
    staleness: int
    max_inflight: int
    total: int | None = None
    version: int = 0
    running: int = 0
    accepted: int = 0
    """Rollouts of all batches so far and of the buffer; it does not fall when a batch ships."""
    reserve: int = 0
    extra: int = 0
    shipped: int = 0
    """Batches handed to the trainer: `version`, or one more while it trains."""

    @property
    def capacity(self) -> int:
        """Rollouts that may start now."""
        return max(0, min(self.max_inflight - self.running, self._free_slots))

    @property
    def replay_capacity(self) -> int:
        """Slots of the batch being filled that may go to groups which have trained before."""
        return max(0, min(self.reserve, self._free_slots))

    @property
    def _free_slots(self) -> int:
        """Slots for rollouts not yet taken, from the batch being filled to the last one that this version may serve."""
        batches = self.staleness + self.version + 1
        if self.total is not None:
            batches = min(batches, self.total)
        reserved = max(0, batches - self.version - 1) * self.reserve
        extra = self.extra if self.shipped < batches else 0
        return batches * self.batch - reserved + extra - (self.accepted + self.running)

    def start(self, count: int) -> None:
        """A group enters, whole."""
        if count > self.capacity:
            raise RuntimeError(f"the gate has room for {self.capacity} rollouts, not for {count}")
        self.running += count

    def accept(self, count: int) -> None:
        """A running group reached the buffer."""
        self.running -= count
        self.accepted += count

    def reject(self, count: int) -> None:
        """A running group was dropped; its slots are free again."""
        self.running -= count

    def replay(self, count: int) -> None:
        """Groups that have trained before take slots of the batch being filled."""
        if count > self.replay_capacity:
            raise RuntimeError(f"the gate has room to replay {self.replay_capacity} rollouts, not {count}")
        self.accepted += count

    def release(self, count: int) -> None:
        """A buffered group was dropped before it shipped; its slots are free again."""
        self.accepted -= count

    def ship(self, count: int) -> None:
        """A batch is handed to the trainer. One that groups could not fill exactly counts as a whole one, or capacity
        would grow with each of them."""
        self.accepted += self.batch - count
        self.shipped += 1

    def open_for(self, version: int) -> None:
        """New weights are there: as many batches have been trained as their version says."""
        self.version = self.shipped = version
