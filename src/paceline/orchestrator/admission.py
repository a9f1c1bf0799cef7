"""Admits finished groups: checks that enough is left, assigns credit, and decides whether they train.

    length penalty -> credit -> truncated rollouts masked -> (no signal: dropped) -> the user's own filter

Counts finished, dropped and failed groups between two batches, for metrics and curriculum.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np

from paceline.config import RunConfig
from paceline.config.filters import LengthConfig
from paceline.data import Sample
from paceline.errors import PacelineError
from paceline.orchestrator.buffered import ReadyGroup
from paceline.orchestrator.failures import Breaker, RunStopped
from paceline.orchestrator.gate import limit_staleness
from paceline.orchestrator.replay import ReplayedGroup
from paceline.orchestrator.train_env import TrainEnv
from paceline.rollout import Group, Rollout
from paceline.util.importing import import_object
from paceline.util.user_code import user_code

COUNTS = ("dropped", "lost_samples", "failed_rollouts", "stale_samples", "stale_tokens")
"""The numbers of a tally."""


@dataclass(slots=True)
class Tally:
    """Finished groups and counts since the last batch shipped."""

    resolved: list[Group] = field(default_factory=list)
    """Groups that finished, before any filter."""
    batch_groups: list[Group] | None = None
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
        if self.batch_groups is None:
            last = max(group.ticket.number for group in batch if not isinstance(group, ReplayedGroup))
            past = [group for group in self.resolved if group.ticket.number <= last]
            self.batch_groups = sorted(past, key=lambda group: group.ticket.number)
        return self.batch_groups

    def split_next(self, batch: Sequence[Group]) -> "Tally":
        """Keep what led to this batch; answers with the beginning of the next one's: groups drawn after its last
        ticket."""
        past = self.resolved_by(batch)
        taken = {group.ticket.number for group in past}
        rest = Tally(resolved=[group for group in self.resolved if group.ticket.number not in taken])
        self.resolved = past
        return rest

    def counts(self) -> dict[str, Any]:
        """The numbers alone, as a checkpoint keeps them."""
        return {name: getattr(self, name) for name in COUNTS}

    @classmethod
    def of(cls, resolved: list[Group], counts: Mapping[str, Any]) -> "Tally":
        """Back to a checkpoint's."""
        found: dict[str, Any] = {name: counts[name] for name in COUNTS if name in counts}
        found |= {name: Counter(numbers) for name, numbers in found.items() if isinstance(numbers, dict)}
        return cls(resolved, **found)


SOLVED_SHARE = 0.9
"""Share of groups that must earn the highest reward for the task to count as solved."""
MIN_GROUPS = 100
"""However small a batch is: a hard task may well go without a signal for some groups."""
FULL_REWARD = 1.0
"""Counts as the highest reward in a run that has seen no other."""
OFF_HINT = "or set breaker.no_signal = 0 to draw on all the same"


class NoSignalBreaker:
    """Counts groups in a row that were dropped because nothing in them can train.

    After `breaker.no_signal` batches' worth of them, and at least `MIN_GROUPS`, the run ends: as finished where it
    has trained and nearly all of these groups earn the highest reward it has seen, else as failed.
    """

    def __init__(self, config: RunConfig, smallest_group: int) -> None:
        batches = config.breaker.no_signal
        self._limit = max(MIN_GROUPS, batches * (config.batch_size // smallest_group)) if batches else 0
        self._groups = self._rollouts = self._unrewarded = self._too_small = 0
        self._uniform_rewards: Counter[float] = Counter()
        """Groups by the one reward that all their rollouts got."""
        self._low, self._high = inf, -inf
        """Rewards seen since this process began, whether they trained or not."""

    def record_signal(self, group: Group) -> None:
        """A group that may train."""
        self._track_rewards(group)
        self._groups = self._rollouts = self._unrewarded = self._too_small = 0
        self._uniform_rewards.clear()

    def record_no_signal(self, group: Group, version: int, too_small: bool = False) -> str:
        """A group that cannot, or is too small because the environment dropped episodes. Answers with why the task
        counts as solved, once that is so; raises `RunStopped` once nothing is to be hoped for."""
        self._groups += 1
        self._rollouts += len(group.rollouts)
        self._unrewarded += not group.rollouts
        self._too_small += too_small
        rewards = self._track_rewards(group)
        if len(rewards) == 1 and not too_small:
            self._uniform_rewards[rewards.pop()] += 1
        if not self._limit or self._groups < self._limit:
            return ""
        best = self._uniform_rewards[self._high] / self._groups
        if version and best >= SOLVED_SHARE and (self._low < self._high or self._high >= FULL_REWARD):
            return (
                f"solved: in {best:.0%} of the last {self._groups} groups every reward is {self._high:g}, the highest "
                "there is, and none tells its tries apart: nothing is left to learn here"
            )
        raise RunStopped(self._stop_message())

    def _track_rewards(self, group: Group) -> set[float]:
        rewards = {rollout.reward for rollout in group.rollouts if rollout.reward is not None}
        if rewards:
            self._low, self._high = min(self._low, *rewards), max(self._high, *rewards)
        return rewards

    def _stop_message(self) -> str:
        if self._unrewarded == self._groups:
            return (
                f"the environment dropped every episode of the last {self._groups} groups (it answered None), so "
                f"nothing trains: return a reward for some of them, {OFF_HINT}"
            )
        if self._too_small == self._groups:
            return (
                f"the environment dropped so many episodes of each of the last {self._groups} groups (it answered "
                "None) that too few are left to compare, so nothing trains: return a reward for more of them, lower "
                f"env.min_group_size, {OFF_HINT}"
            )
        if len(self._uniform_rewards) == 1 and sum(self._uniform_rewards.values()) + self._unrewarded == self._groups:
            (reward,) = self._uniform_rewards
            found = f"every reward of the last {self._groups} groups ({self._rollouts} rollouts) was {reward:g}"
            if reward >= FULL_REWARD:
                return (
                    f"{found}: the policy solves the task already, or the reward pays whatever is said. Nothing is "
                    f"left to learn: give it harder rows, look at what it is paid for (`paceline rollout`), {OFF_HINT}"
                )
            return (
                f"{found}, so nothing trains: look with `paceline rollout` whether the reward reads the reply as the "
                "model writes it; make the task easier or reward part of the way, warm the model up "
                f"with sft, raise sampling.max_tokens if replies are cut off, {OFF_HINT}"
            )
        return (
            f"in none of the last {self._groups} groups ({self._rollouts} rollouts) did the tries of one row differ in "
            f"what trains, so nothing does: let the reward tell them apart, raise group_size or sampling.temperature, "
            f"{OFF_HINT}"
        )


LENGTH_PENALTY = "length/penalty"
"""The metric of a rollout that says what its length cost it: `reward` is what is left."""
GROUP_FILTER = "group_filter"
"""Why a group was dropped that the user's filter does not keep."""


class FilterError(PacelineError):
    """A user's filter that cannot be used, as a sentence for the user."""


class Filters:
    """The length rules and the user's own filter. They do not depend on the algorithm."""

    def __init__(self, config: RunConfig) -> None:
        self._hook = config.filters.group
        self._length, self._max_tokens = config.length, config.sampling.max_tokens
        self._user_filter: Callable[..., Any] | None = import_object(self._hook.import_path) if self._hook else None
        if self._hook and not callable(self._user_filter):
            raise FilterError(f"filters.group: {self._hook.import_path} is no function: name one `fn(group, **kwargs)`")

    def before_credit(self, group: Group) -> None:
        """Take what length costs off the rewards."""
        if self._length.buffer:
            for rollout in group.rollouts:
                apply_length_penalty(rollout, self._length, self._max_tokens)

    def after_credit(self, group: Group) -> None:
        """Silence what must not train."""
        for rollout in group.rollouts if self._length.mask_truncated else ():
            # A reply that was cut off may have been right so far: its reward blames tokens that did nothing wrong. So
            # nothing it said trains; its context may.
            if any(sample.ended == "truncated" for sample in rollout.samples):
                rollout.samples = [_mask_sample(sample) for sample in rollout.samples]

    def keeps(self, group: Group) -> bool:
        """The user's own judgement."""
        if self._user_filter is None or self._hook is None:
            return True
        where = f"filters.group: {self._hook.import_path}, env `{group.ticket.env}`, ticket {group.ticket.number}"
        with user_code(where):
            kept = self._user_filter(group, **self._hook.kwargs)
        if not isinstance(kept, bool | np.bool_):
            raise FilterError(f"{where}: gave {kept!r}: answer True to keep the group, False to drop it")
        return bool(kept)


def apply_length_penalty(rollout: Rollout, rule: LengthConfig, max_tokens: int) -> None:
    """The soft over-long penalty of DAPO (arXiv 2503.14476): with n the rollout's longest reply,

        0 for n <= max_tokens - buffer, then penalty * (n - (max_tokens - buffer)) / buffer, up to the whole penalty.

    A limit alone fines the token that crosses it and says nothing of those before; the slope says it early.
    """
    longest = max((len(turn.completion_ids) for turn in rollout.turns), default=0)
    share = min(1.0, max(0.0, (longest - (max_tokens - rule.buffer)) / rule.buffer))
    rollout.metrics = rollout.metrics | {LENGTH_PENALTY: rule.penalty * share}
    rollout.reward = (rollout.reward or 0.0) - rule.penalty * share


def reward_before_penalty(rollout: Rollout) -> float:
    """The environment's reward, before the length penalty."""
    return (rollout.reward or 0.0) + rollout.metrics.get(LENGTH_PENALTY, 0.0)


def _mask_sample(sample: Sample) -> Sample:
    context = None if sample.ce_weights is None else np.where(sample.loss_mask, np.float32(0), sample.ce_weights)
    nothing = np.zeros(len(sample), np.float32)
    return sample.with_streams(
        rl_weights=nothing, ref_kl_weights=None, ce_weights=context if context is not None and context.any() else None
    )


NO_SIGNAL = "zero_advantage"
TOO_SMALL = "group_too_small"
WARN_AFTER_BATCHES = 4
"""Batches' worth of groups that may be dropped in a row before the user is told; then twice as many, and so on."""


class GroupAdmission:
    """Each group is judged once, and credited then. What it did is in the tally."""

    def __init__(self, config: RunConfig, envs: Mapping[str, TrainEnv], warn: Callable[[str], None]) -> None:
        self._config = config
        self._envs = envs
        self._warn = warn
        self._breaker = Breaker(config.breaker)
        self._filters = Filters(config)
        self._drops_in_a_row = 0
        smallest = min(env.group_size for env in envs.values())
        self._next_warning = WARN_AFTER_BATCHES * config.batch_size // smallest
        self._no_signal = NoSignalBreaker(config, smallest)
        self.solved_reason = ""
        """Why nothing is left to learn, once that is so."""
        self.tally = Tally()

    def admit(self, group: Group, version: int) -> ReadyGroup | str:
        """The group as it may train at this version, or why it must not."""
        self._count_failures(group)
        self.tally.resolved.append(group)
        verdict = self._assign_credit(group) or self._ready_group(group, version)
        if isinstance(verdict, str):
            self._count_drop(group, verdict)
            # What failed is the breaker's to count; what the environment dropped is not, and may go on for ever.
            if verdict == NO_SIGNAL or (verdict == TOO_SMALL and all(rollout.dropped for rollout in group.failed)):
                self.solved_reason = self.solved_reason or self._no_signal.record_no_signal(
                    group, version, verdict == TOO_SMALL
                )
        else:
            self._drops_in_a_row = 0
            self._no_signal.record_signal(group)
        return verdict

    def limit_group_staleness(self, group: Group, version: int) -> bool:
        """Drop or mask what is too old by now; False if nothing is left."""
        limit, how = self._config.staleness, self._config.on_stale
        for rollout in group.rollouts:
            kept = []
            for sample in rollout.samples:
                if (young := limit_staleness(sample, version, limit, how)) is not None:
                    kept.append(young)
                else:
                    self.tally.stale_samples += 1
                    self.tally.stale_tokens += int(sample.loss_mask.sum())
            rollout.samples = kept
        return any(rollout.samples for rollout in group.rollouts)

    def _assign_credit(self, group: Group) -> str | None:
        """Credit the group; the reason if it must not train whatever its age."""
        env = self._envs[group.ticket.env]
        assert env.config.min_group_size is not None
        if group.members < env.config.min_group_size:
            return TOO_SMALL
        self._filters.before_credit(group)
        env.algorithm.assign(group)
        self._filters.after_credit(group)
        if self._config.filters.zero_advantage and env.group_size > 1 and has_no_signal(group):
            return NO_SIGNAL
        return None if self._filters.keeps(group) else GROUP_FILTER

    def _ready_group(self, group: Group, version: int) -> ReadyGroup | str:
        finished = ReadyGroup.of(group, self._config.staleness)
        if version <= finished.fresh_until:
            return finished
        return ReadyGroup.of(group, self._config.staleness) if self.limit_group_staleness(group, version) else "stale"

    def _count_failures(self, group: Group) -> None:
        self.tally.failed_rollouts += len(group.failed)
        for rollout in sorted([*group.failed, *group.rollouts], key=lambda rollout: rollout.member):
            if rollout.error is None:
                self._breaker.record_success()
            elif not rollout.dropped:
                where = f" (row {rollout.ticket.row}, ticket {rollout.ticket.number})"
                self._breaker.record_failure(rollout.error, where, rollout.cause)

    def _count_drop(self, group: Group, reason: str) -> None:
        """Warn where many groups in a row are dropped: a run may pass through that, but the user should know."""
        self._drops_in_a_row += 1
        if self._drops_in_a_row == self._next_warning:
            self._next_warning *= 2
            mend = "make the task easier, raise group_size, or let the reward tell rollouts apart"
            mend = "look at what filters.group asks for" if reason == GROUP_FILTER else mend
            if reason == TOO_SMALL and group.failed:
                dropped = f"the last one has {group.members} of {group.size} episodes left: "
                mend = f"{dropped}{group.failed[0].error}. An environment drops an episode by returning None"
            self._warn(f"the last {self._drops_in_a_row} groups were all dropped ({reason}), so nothing trains: {mend}")


def has_no_signal(group: Group) -> bool:
    """No sample of the group would move a weight: where rl trains every advantage is zero, and nothing else trains."""
    return not any(map(_has_gradient, group.samples()))


def _has_gradient(sample: Sample) -> bool:
    if any(weights is not None and weights.any() for weights in (sample.ce_weights, sample.ref_kl_weights)):
        return True
    # Credit that is not there yet comes from a critic, or when the batch ships.
    pending = sample.advantages is None or sample.rewards is not None
    return bool((sample.rl if pending else sample.rl * sample.advantages).any())
