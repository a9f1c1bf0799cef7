"""Judges a finished group: whether enough of it is left, what credit it gets, and whether it may train."""

from collections.abc import Callable, Mapping

from paceline.config import RunConfig
from paceline.data import Sample
from paceline.orchestrator.breaker import Breaker
from paceline.orchestrator.buffer import Finished
from paceline.orchestrator.course import Course
from paceline.orchestrator.filters import USERS, Filters
from paceline.orchestrator.no_signal import NoSignal
from paceline.orchestrator.staleness import fresh_enough
from paceline.orchestrator.tally import Tally
from paceline.rollout import Group

NO_SIGNAL = "zero_advantage"
TOO_SMALL = "group_too_small"
PATIENCE = 4
"""Batches' worth of groups that may be dropped in a row before the user is told; then twice as many, and so on."""


class Judge:
    """Each group is judged once, and credited then. What it did is in the tally."""

    def __init__(self, config: RunConfig, courses: Mapping[str, Course], warn: Callable[[str], None]) -> None:
        self._config = config
        self._courses = courses
        self._warn = warn
        self._breaker = Breaker(config.breaker)
        self._filters = Filters(config)
        self._drops_in_a_row = 0
        smallest = min(course.group_size for course in courses.values())
        self._next_warning = PATIENCE * config.batch_size // smallest
        self._no_signal = NoSignal(config, smallest)
        self.solved = ""
        """Why nothing is left to learn, once that is so."""
        self.tally = Tally()

    def verdict(self, group: Group, version: int) -> Finished | str:
        """The group as it may train at this version, or why it must not."""
        self._count_failures(group)
        self.tally.resolved.append(group)
        verdict = self._credited(group) or self._fresh(group, version)
        if isinstance(verdict, str):
            self._count_drop(group, verdict)
            # What failed is the breaker's to count; what the environment dropped is not, and may go on for ever.
            if verdict == NO_SIGNAL or (verdict == TOO_SMALL and all(rollout.dropped for rollout in group.failed)):
                self.solved = self.solved or self._no_signal.none(group, version, verdict == TOO_SMALL)
        else:
            self._drops_in_a_row = 0
            self._no_signal.signal(group)
        return verdict

    def age(self, group: Group, version: int) -> bool:
        """Drop or mask what is too old by now; False if nothing is left."""
        limit, how = self._config.staleness, self._config.on_stale
        for rollout in group.rollouts:
            kept = []
            for sample in rollout.samples:
                if (young := fresh_enough(sample, version, limit, how)) is not None:
                    kept.append(young)
                else:
                    self.tally.stale_samples += 1
                    self.tally.stale_tokens += int(sample.loss_mask.sum())
            rollout.samples = kept
        return any(rollout.samples for rollout in group.rollouts)

    def _credited(self, group: Group) -> str | None:
        """Credit the group; the reason if it must not train whatever its age."""
        course = self._courses[group.ticket.env]
        assert course.config.min_group_size is not None
        if group.members < course.config.min_group_size:
            return TOO_SMALL
        self._filters.before_credit(group)
        course.algorithm.assign(group)
        self._filters.after_credit(group)
        if self._config.filters.zero_advantage and course.group_size > 1 and without_signal(group):
            return NO_SIGNAL
        return None if self._filters.keeps(group) else USERS

    def _fresh(self, group: Group, version: int) -> Finished | str:
        finished = Finished.of(group, self._config.staleness)
        if version <= finished.young_until:
            return finished
        return Finished.of(group, self._config.staleness) if self.age(group, version) else "stale"

    def _count_failures(self, group: Group) -> None:
        self.tally.failed_rollouts += len(group.failed)
        if not group.failed:
            for _ in group.rollouts:
                self._breaker.success()
            return
        for rollout in sorted([*group.failed, *group.rollouts], key=lambda rollout: rollout.member):
            if rollout.error is None:
                self._breaker.success()
            elif not rollout.dropped:
                where = f" (row {rollout.ticket.row}, ticket {rollout.ticket.number})"
                self._breaker.failure(rollout.error + where, rollout.cause)

    def _count_drop(self, group: Group, reason: str) -> None:
        """That no group carries a signal is a state a run may pass through, but nobody should have to guess it."""
        self._drops_in_a_row += 1
        if self._drops_in_a_row == self._next_warning:
            self._next_warning *= 2
            mend = "make the task easier, raise group_size, or let the reward tell rollouts apart"
            mend = "look at what filters.group asks for" if reason == USERS else mend
            if reason == TOO_SMALL and group.failed:
                dropped = f"the last one has {group.members} of {group.places} episodes left: "
                mend = f"{dropped}{group.failed[0].error}. An environment drops an episode by returning None"
            self._warn(f"the last {self._drops_in_a_row} groups were all dropped ({reason}), so nothing trains: {mend}")


def without_signal(group: Group) -> bool:
    """No sample of the group would move a weight: where rl trains every advantage is zero, and nothing else trains."""
    return not any(map(_moves, group.samples()))


def _moves(sample: Sample) -> bool:
    if any(weights is not None and weights.any() for weights in (sample.ce_weights, sample.ref_kl_weights)):
        return True
    # Credit that is not there yet comes from a critic, or when the batch ships.
    pending = sample.advantages is None or sample.rewards is not None
    return bool((sample.rl if pending else sample.rl * sample.advantages).any())
