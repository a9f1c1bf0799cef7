"""One algorithm per seat."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from paceline.algorithms.base import Algorithm, AlgorithmContext, AlgorithmError
from paceline.envs import Environment
from paceline.rollout import Group, Rollout


class PerActorAlgorithm(Algorithm):
    """Each named actor is credited by an algorithm of its own, all others together by the common one.

    In a game against oneself the sides need not learn alike: a proposer may be paid for what it asks by `reward` while
    its solvers are compared by `grpo`, or one side may keep still (`constant`, 0) while the other learns to beat it. An
    algorithm sees the rollouts of its own actors and nothing else, so no reward of another seat reaches its advantages.
    """

    def __init__(self, common: Algorithm, seats: Mapping[str, Algorithm]) -> None:
        self._common, self._seats = common, dict(seats)

    def stage(self, environment: Environment) -> Environment:
        return self._common.stage(environment)

    async def begin(self, context: AlgorithmContext) -> None:
        for algorithm in (self._common, *self._seats.values()):
            await algorithm.begin(context)
        self.frozen_sampler = self._common.frozen_sampler

    def observe(self, rollout: Rollout) -> None:
        self._seats.get(rollout.actor, self._common).observe(rollout)

    def assign(self, group: Group) -> None:
        for algorithm, (mine,) in self._shares([group]):
            algorithm.assign(mine)

    async def finish_batch(self, groups: Sequence[Group]) -> Mapping[str, int]:
        lost: Counter[str] = Counter()
        for algorithm, mine in self._shares(groups):
            lost.update(await algorithm.finish_batch(mine) or {})
        return lost

    def state(self) -> dict:
        seats = {actor: algorithm.state() for actor, algorithm in self._seats.items()}
        return {"common": self._common.state(), "seats": seats}

    def load(self, state: dict) -> None:
        saved = state.get("seats", {})
        if "common" not in state or saved.keys() != self._seats.keys():
            raise AlgorithmError(
                f"the checkpoint knows the seats {sorted(saved)}, the run file {sorted(self._seats)}: "
                "go on with the seats the run began with, or begin a new run"
            )
        self._common.load(state["common"])
        for actor, algorithm in self._seats.items():
            algorithm.load(saved[actor])

    def _shares(self, groups: Sequence[Group]) -> list[tuple[Algorithm, list[Group]]]:
        """Each algorithm with its own actors' part of the groups, where it has one."""
        shares: dict[str | None, list[Group]] = {}
        for group in groups:
            parts: dict[str | None, list[Rollout]] = {}
            for rollout in group.rollouts:
                parts.setdefault(rollout.actor if rollout.actor in self._seats else None, []).append(rollout)
            for actor, rollouts in parts.items():
                shares.setdefault(actor, []).append(replace(group, rollouts=rollouts))
        return [(self._common if actor is None else self._seats[actor], mine) for actor, mine in shares.items()]
