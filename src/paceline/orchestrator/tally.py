"""Counts finished, dropped and failed groups between two batches, for metrics and curriculum."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.orchestrator.replay import ReplayedGroup
from paceline.rollout import Group


@dataclass(slots=True)
class Tally:
    """Finished groups and counts since the last batch shipped."""

    resolved: list[Group] = field(default_factory=list)
    """Groups that finished, before any filter."""
    past: list[Group] | None = None
    """Of those, the groups that led to the batch that shipped, once `resolved_by` was called."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Groups, by reason."""
    failed_rollouts: int = 0
    stale_samples: int = 0
    stale_tokens: int = 0
    """Sampled tokens of those: dropping by the oldest token hits the long ones."""
    lost_samples: Counter[str] = field(default_factory=Counter)
    """Samples an algorithm could not finish when their batch shipped, by reason."""

    def resolved_by(self, batch: Sequence[Group]) -> list[Group]:
        """Groups that led to this batch, in ticket order: those that trained and those that were dropped. Another call
        returns the same list; a group that has finished since belongs to the next batch."""
        if self.past is None:
            last = max(group.ticket.number for group in batch if not isinstance(group, ReplayedGroup))
            past = [group for group in self.resolved if group.ticket.number <= last]
            self.past = sorted(past, key=lambda group: group.ticket.number)
        return self.past

    def cut(self, batch: Sequence[Group]) -> "Tally":
        """Keep what led to this batch; answers with the beginning of the next one's: groups drawn after its last
        ticket."""
        past = self.resolved_by(batch)
        taken = {group.ticket.number for group in past}
        rest = Tally(resolved=[group for group in self.resolved if group.ticket.number not in taken])
        self.resolved = past
        return rest

    def counts(self) -> dict[str, Any]:
        """The numbers alone, as a checkpoint keeps them."""
        return {
            "dropped": dict(self.dropped),
            "lost_samples": dict(self.lost_samples),
            "failed_rollouts": self.failed_rollouts,
            "stale_samples": self.stale_samples,
            "stale_tokens": self.stale_tokens,
        }

    @classmethod
    def of(cls, resolved: list[Group], counts: Mapping[str, Any]) -> "Tally":
        """Back to a checkpoint's."""
        return cls(
            resolved=resolved,
            dropped=Counter(counts.get("dropped")),
            lost_samples=Counter(counts.get("lost_samples")),
            failed_rollouts=counts.get("failed_rollouts", 0),
            stale_samples=counts.get("stale_samples", 0),
            stale_tokens=counts.get("stale_tokens", 0),
        )
