"""Ends a run whose rewards never differ within a group: nothing can be learned from them."""

from collections import Counter
from math import inf

from paceline.config import RunConfig
from paceline.orchestrator.breaker import RunStopped
from paceline.rollout import Group

SOLVED_SHARE = 0.9
"""Share of groups that must earn the highest reward for the task to count as solved."""
LEAST_GROUPS = 100
"""However small a batch is: a hard task may well go without a signal for some groups."""
FULL_REWARD = 1.0
"""What counts as the highest reward of a run that has seen no other."""
OFF = "or set breaker.no_signal = 0 to draw on all the same"


class NoSignal:
    """Counts groups in a row that were dropped because nothing in them can train.

    After `breaker.no_signal` batches' worth of them, and at least `LEAST_GROUPS`, the run ends: as finished where it
    has trained and nearly all of these groups earn the highest reward it has seen, else as failed.
    """

    def __init__(self, config: RunConfig, smallest_group: int) -> None:
        batches = config.breaker.no_signal
        self._limit = max(LEAST_GROUPS, batches * (config.batch_size // smallest_group)) if batches else 0
        self._groups = self._rollouts = self._unrewarded = self._too_small = 0
        self._flat: Counter[float] = Counter()
        """Groups by the one reward that all their rollouts got."""
        self._low, self._high = inf, -inf
        """Rewards seen since this process began, whether they trained or not."""

    def signal(self, group: Group) -> None:
        """A group that may train."""
        self._look(group)
        self._groups = self._rollouts = self._unrewarded = self._too_small = 0
        self._flat.clear()

    def none(self, group: Group, version: int, too_small: bool = False) -> str:
        """A group that cannot, or is too small because the environment dropped episodes. Answers with why the task
        counts as solved, once that is so; raises `RunStopped` once nothing is to be hoped for."""
        self._groups += 1
        self._rollouts += len(group.rollouts)
        self._unrewarded += not group.rollouts
        self._too_small += too_small
        rewards = self._look(group)
        if len(rewards) == 1 and not too_small:
            self._flat[rewards.pop()] += 1
        if not self._limit or self._groups < self._limit:
            return ""
        best = self._flat[self._high] / self._groups
        if version and best >= SOLVED_SHARE and (self._low < self._high or self._high >= FULL_REWARD):
            return (
                f"solved: in {best:.0%} of the last {self._groups} groups every reward is {self._high:g}, the highest "
                "there is, and none tells its tries apart: nothing is left to learn here"
            )
        raise RunStopped(self._evidence())

    def _look(self, group: Group) -> set[float]:
        rewards = {rollout.reward for rollout in group.rollouts if rollout.reward is not None}
        if rewards:
            self._low, self._high = min(self._low, *rewards), max(self._high, *rewards)
        return rewards

    def _evidence(self) -> str:
        if self._unrewarded == self._groups:
            return (
                f"the environment dropped every episode of the last {self._groups} groups (it answered None), so "
                f"nothing trains: return a reward for some of them, {OFF}"
            )
        if self._too_small == self._groups:
            return (
                f"the environment dropped so many episodes of each of the last {self._groups} groups (it answered "
                "None) that too few are left to compare, so nothing trains: return a reward for more of them, lower "
                f"env.min_group_size, {OFF}"
            )
        if len(self._flat) == 1 and sum(self._flat.values()) + self._unrewarded == self._groups:
            (reward,) = self._flat
            found = f"every reward of the last {self._groups} groups ({self._rollouts} rollouts) was {reward:g}"
            if reward >= FULL_REWARD:
                return (
                    f"{found}: the policy solves the task already, or the reward pays whatever is said. Nothing is "
                    f"left to learn: give it harder rows, look at what it is paid for (`paceline rollout`), {OFF}"
                )
            return (
                f"{found}, so nothing trains: look with `paceline rollout` whether the reward reads the reply as the "
                "model writes it; make the task easier or reward part of the way, warm the model up "
                f"with sft, raise sampling.max_tokens if replies are cut off, {OFF}"
            )
        return (
            f"in none of the last {self._groups} groups ({self._rollouts} rollouts) did the tries of one row differ in "
            f"what trains, so nothing does: let the reward tell them apart, raise group_size or sampling.temperature, "
            f"{OFF}"
        )
