"""Admits finished groups: checks that enough is left, assigns credit, and decides whether they train.

    length and KL penalties -> credit -> truncated rollouts masked -> (no signal: dropped) -> the user's own filter

Counts finished, dropped and failed groups between two batches, for metrics and curriculum.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

import numpy as np

from paceline.algorithms.base import reward_before_kl
from paceline.config import BreakerConfig, RunConfig
from paceline.config.filters import LengthConfig
from paceline.data import Sample
from paceline.errors import PacelineError, RunStopped
from paceline.orchestrator.episodes import TrainEnv
from paceline.orchestrator.failures import failure_kind, stop_error
from paceline.orchestrator.gate import limit_staleness
from paceline.orchestrator.kl_reference import subtract_kl_penalty
from paceline.orchestrator.replay import ReplayedGroup
from paceline.rollout import Group, Rollout
from paceline.util.importing import import_object
from paceline.util.user_code import user_code

COUNTS = ("dropped", "lost_samples", "failed_rollouts", "stale_samples", "stale_tokens")


@dataclass(slots=True)
class Tally:
    """Finished groups and counts since the last batch shipped."""

    resolved: list[Group] = field(default_factory=list)
    """Groups that finished, before any filter."""
    batch_groups: list[Group] | None = None
    """Of those, the groups that led to the batch that shipped, once `resolved_by` was called."""
    dropped: Counter[str] = field(default_factory=Counter)
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
            last = max(group.ticket for group in batch if not isinstance(group, ReplayedGroup))
            past = [group for group in self.resolved if group.ticket <= last]
            self.batch_groups = sorted(past, key=lambda group: group.ticket)
        return self.batch_groups

    def split_next(self, batch: Sequence[Group]) -> "Tally":
        """Keep what led to this batch; answers with the next tally, which begins with groups drawn after its last
        ticket."""
        past, taken = self.resolved_by(batch), {group.ticket for group in self.resolved_by(batch)}
        rest = Tally([group for group in self.resolved if group.ticket not in taken])
        self.resolved = past
        return rest

    def counts(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in COUNTS}

    @classmethod
    def of(cls, resolved: list[Group], counts: Mapping[str, Any]) -> "Tally":
        kept = {name: counts[name] for name in COUNTS if name in counts}
        found: dict[str, Any] = {name: Counter(n) if isinstance(n, dict) else n for name, n in kept.items()}
        return cls(resolved, **found)


class FailedRollout(NamedTuple):
    error: str
    where: str
    raised: BaseException | None


class Breaker:
    """Opens after n failures in a row, or when half of the latest rollouts failed. Names the first cause of those that
    count, and the last where that is another. A rollout that a retry saved is no failure."""

    def __init__(self, config: BreakerConfig) -> None:
        self._config = config
        self._recent: deque[FailedRollout | None] = deque(maxlen=config.window)
        """The latest rollouts, None for those that did not fail."""
        self._consecutive = 0
        self._first: FailedRollout | None = None

    def record_success(self) -> None:
        self._consecutive, self._first = 0, None
        self._recent.append(None)

    def record_failure(self, error: str, where: str = "", raised: BaseException | None = None) -> None:
        """Count a failed rollout; raises `RunStopped` when it is one too many."""
        last = FailedRollout(error, where, raised)
        self._consecutive, self._first = self._consecutive + 1, self._first or last
        self._recent.append(last)
        failed, window = [failure for failure in self._recent if failure is not None], self._config.window
        if self._consecutive >= self._config.consecutive:
            text, first = f"{self._consecutive} rollouts failed in a row", self._first
        elif len(self._recent) == window and 2 * len(failed) >= window:
            text, first = f"{len(failed)} of the last {window} rollouts failed", failed[0]
        else:
            return
        other = f"; the last: {last.error}{last.where}" if last.error != first.error else ""
        text += f"; the first cause: {first.error}{first.where}{other}. Mend that, or let [breaker] allow more"
        raise stop_error(text, first.raised)


SOLVED_SHARE = 0.9
"""Share of groups that must earn the highest reward for the task to count as solved."""
MIN_GROUPS = 100
FULL_REWARD = 1.0
"""Counts as the highest reward in a run that has seen no other."""
OFF_HINT = "or set breaker.no_signal = 0 to draw on all the same"


class NoSignalBreaker:
    """Counts groups in a row that were dropped because nothing in them can train.

    After `breaker.no_signal` batches' worth of them, and at least `MIN_GROUPS` (a hard task may well go without a
    signal for some groups), the run ends: as finished where it has trained and nearly all of these groups earn the
    highest reward it has seen, else as failed.
    """

    def __init__(self, config: RunConfig, smallest_group: int) -> None:
        batches = config.breaker.no_signal
        self._limit = max(MIN_GROUPS, batches * (config.batch_size // smallest_group)) if batches else 0
        self._streak: deque[tuple[int, set[float], bool]] = deque(maxlen=self._limit)
        """Of each group in a row: its rollouts, their rewards, and whether it was too small."""
        self._low, self._high = inf, -inf
        """Rewards seen since this process began, whether they trained or not."""

    def record_signal(self, group: Group) -> None:
        self._track_rewards(group)
        self._streak.clear()

    def record_no_signal(self, group: Group, version: int, too_small: bool = False) -> str:
        """A group that cannot train, or is too small because the environment dropped episodes. Answers with why the
        task counts as solved, once that is so; raises `RunStopped` once nothing is to be hoped for."""
        self._streak.append((len(group.rollouts), self._track_rewards(group), too_small))
        if not self._limit or len(self._streak) < self._limit:
            return ""
        best = self._uniform_rewards()[self._high] / self._limit
        if version and best >= SOLVED_SHARE and (self._low < self._high or self._high >= FULL_REWARD):
            return (
                f"solved: in {best:.0%} of the last {self._limit} groups every reward is {self._high:g}, the highest "
                "there is, and none tells its tries apart: nothing is left to learn here"
            )
        raise RunStopped(self._stop_message())

    def _track_rewards(self, group: Group) -> set[float]:
        rewards = {rollout.reward for rollout in group.rollouts if rollout.reward is not None}
        if rewards:
            self._low, self._high = min(self._low, *rewards), max(self._high, *rewards)
        return rewards

    def _uniform_rewards(self) -> Counter[float]:
        """Groups by the one reward that all their rollouts got."""
        return Counter(next(iter(r)) for _, r, too_small in self._streak if len(r) == 1 and not too_small)

    def _stop_message(self) -> str:
        groups, rollouts = len(self._streak), sum(count for count, _, _ in self._streak)
        uniform, empty = self._uniform_rewards(), sum(not count for count, _, _ in self._streak)
        if empty == groups:
            return (
                f"the environment dropped every episode of the last {groups} groups (it answered None), so "
                f"nothing trains: return a reward for some of them, {OFF_HINT}"
            )
        if all(too_small for _, _, too_small in self._streak):
            return (
                f"the environment dropped so many episodes of each of the last {groups} groups (it answered "
                "None) that too few are left to compare, so nothing trains: return a reward for more of them, lower "
                f"env.min_group_size, {OFF_HINT}"
            )
        if len(uniform) == 1 and uniform.total() + empty == groups:
            (reward,) = uniform
            found = f"every reward of the last {groups} groups ({rollouts} rollouts) was {reward:g}"
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
            f"in none of the last {groups} groups ({rollouts} rollouts) did the tries of one row differ in "
            f"what trains, so nothing does: let the reward tell them apart, raise group_size or sampling.temperature, "
            f"{OFF_HINT}"
        )


LENGTH_PENALTY = "length/penalty"
GROUP_FILTER = "group_filter"


class FilterError(PacelineError):
    """A user's filter that cannot be used, as a sentence for the user."""


class Filters:
    """The length rules, KL in the reward and the user's own filter. They do not depend on the algorithm."""

    def __init__(self, config: RunConfig) -> None:
        kl = config.trainer.kl
        self._kl = kl if kl is not None and kl.how == "reward" else None
        self._hook = config.filters.group
        self._length, self._max_tokens = config.length, config.sampling.max_tokens
        self._user_filter: Callable[..., Any] | None = import_object(self._hook.import_path) if self._hook else None
        if self._hook and not callable(self._user_filter):
            raise FilterError(f"filters.group: {self._hook.import_path} is no function: name one `fn(group, **kwargs)`")

    def before_credit(self, group: Group) -> None:
        if self._length.buffer:
            for rollout in group.rollouts:
                apply_length_penalty(rollout, self._length, self._max_tokens)
        if self._kl is not None:
            for rollout in group.rollouts:
                subtract_kl_penalty(rollout, self._kl)

    def after_credit(self, group: Group) -> None:
        for rollout in group.rollouts if self._length.mask_truncated else ():
            # A reply that was cut off may have been right so far: its reward blames tokens that did nothing wrong. So
            # nothing it said trains; its context may.
            if any(sample.ended == "truncated" for sample in rollout.samples):
                rollout.samples = [_mask_sample(sample) for sample in rollout.samples]

    def keeps(self, group: Group) -> bool:
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
    return reward_before_kl(rollout) + rollout.metrics.get(LENGTH_PENALTY, 0.0)


def _mask_sample(sample: Sample) -> Sample:
    context = None if sample.ce_weights is None else np.where(sample.loss_mask, np.float32(0), sample.ce_weights)
    if context is not None and not context.any():
        context = None
    return sample.with_streams(
        rl_weights=np.zeros(len(sample), np.float32), teacher_kl_weights=None, ce_weights=context
    )


@dataclass(slots=True)
class ReadyGroup:
    group: Group
    last_version: float
    """The last version at which all of it may train, so that few are looked at again."""
    in_training: bool = False
    """The next batch has begun to train on it."""

    @classmethod
    def of(cls, group: Group, staleness: int) -> "ReadyGroup":
        """Tokens of a frozen sampler never go stale; a group without a sample is old from the beginning."""
        oldest = [sample.oldest_version for sample in group.samples()]
        return cls(group, min((inf if version is None else version + staleness for version in oldest), default=-1))


NO_SIGNAL = "zero_advantage"
TOO_SMALL = "group_too_small"
WARN_AFTER_BATCHES = 4
"""Batches' worth of groups that may be dropped in a row before the user is told; then twice as many, and so on."""


class GroupAdmission:
    """Decides of each finished group, in ticket order, whether it may train, and has it credited. What it did is in the
    tally. Only its age is looked at again later."""

    def __init__(self, config: RunConfig, envs: Mapping[str, TrainEnv], warn: Callable[[str], None]) -> None:
        self._config, self._envs, self._warn = config, envs, warn
        self._breaker, self._filters = Breaker(config.breaker), Filters(config)
        smallest, self._drops_in_a_row = min(env.group_size for env in envs.values()), 0
        self._next_warning = WARN_AFTER_BATCHES * config.batch_size // smallest
        self._no_signal = NoSignalBreaker(config, smallest)
        self.solved_reason = ""
        """Why nothing is left to learn, once that is so."""
        self.tally = Tally()

    def admit(self, group: Group, version: int) -> ReadyGroup | str:
        """The group as it may train at this version, or why it must not."""
        self._count_failures(group)
        self.tally.resolved.append(group)
        verdict = self._assign_credit(group) or ReadyGroup.of(group, self._config.staleness)
        if isinstance(verdict, ReadyGroup) and version > verdict.last_version:
            is_left = self.limit_group_staleness(group, version)
            verdict = ReadyGroup.of(group, self._config.staleness) if is_left else "stale"
        if isinstance(verdict, str):
            self._count_drop(group, verdict)
            # What failed is the breaker's to count; what the environment dropped is not, and may go on for ever.
            too_small = verdict == TOO_SMALL and all(rollout.dropped for rollout in group.failed)
            if (verdict == NO_SIGNAL or too_small) and not self.solved_reason:
                self.solved_reason = self._no_signal.record_no_signal(group, version, too_small)
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
        if group.episodes_left < env.config.min_group_size:
            return TOO_SMALL
        self._filters.before_credit(group)
        env.algorithm.assign(group)
        self._filters.after_credit(group)
        if self._config.filters.zero_advantage and env.group_size > 1 and has_no_signal(group):
            return NO_SIGNAL
        return None if self._filters.keeps(group) else GROUP_FILTER

    def _count_failures(self, group: Group) -> None:
        self.tally.failed_rollouts += len(group.failed)
        refusals: set[str] = set()
        for rollout in sorted([*group.failed, *group.rollouts], key=lambda rollout: rollout.member):
            if rollout.error is None:
                self._breaker.record_success()
            elif not rollout.dropped and rollout.error not in refusals:
                # A prompt that the engine refuses is the same for the whole group: one row is one failure.
                if rollout.cause is not None and failure_kind(rollout.cause) == "request":
                    refusals.add(rollout.error)
                where = f" (row {rollout.ticket.row}, ticket {rollout.ticket.number})"
                self._breaker.record_failure(rollout.error, where, rollout.cause)

    def _count_drop(self, group: Group, reason: str) -> None:
        """Warn where many groups in a row are dropped: a run may pass through that, but the user should know."""
        self._drops_in_a_row += 1
        if self._drops_in_a_row == self._next_warning:
            self._next_warning *= 2
            mend = "make the task easier, raise group_size, or let the reward tell rollouts apart"
            if reason == GROUP_FILTER:
                mend = "look at what filters.group asks for"
            elif reason == TOO_SMALL and group.failed:
                dropped = f"the last one has {group.episodes_left} of {group.size} episodes left: "
                mend = f"{dropped}{group.failed[0].error}. An environment drops an episode by returning None"
            self._warn(f"the last {self._drops_in_a_row} groups were all dropped ({reason}), so nothing trains: {mend}")


def has_no_signal(group: Group) -> bool:
    """No sample of the group would move a weight: where rl trains every advantage is zero, and nothing else trains."""
    for sample in group.samples():
        if any(weights is not None and weights.any() for weights in (sample.ce_weights, sample.teacher_kl_weights)):
            return False
        # Credit that is not there yet comes from a critic, or when the batch ships.
        pending = sample.advantages is None or sample.rewards is not None
        if (sample.rl_token_weights if pending else sample.rl_token_weights * sample.advantages).any():
            return False
    return True
