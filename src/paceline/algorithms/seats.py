"""One algorithm per seat."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from paceline.algorithms.base import Algorithm, AlgorithmError
from paceline.data import Sample
from paceline.rollout import Group, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoken(Sample):
    """A sample that knows whose it is: when a batch ships, its rollout is far away."""

    actor: str = ""


class Seats(Algorithm):
    """Each named actor is credited by an algorithm of its own, all others together by the common one.

    In a game against oneself the sides need not learn alike: a proposer may be paid for what it asks by `reward` while
    its solvers are compared by `grpo`, or one side may keep still (`constant`, 0) while the other learns to beat it. An
    algorithm sees the rollouts of its own actors and nothing else, so no reward of another seat reaches its advantages.
    """

    def __init__(self, common: Algorithm, seats: Mapping[str, Algorithm]) -> None:
        self._common, self._seats = common, dict(seats)

    def observe(self, rollout: Rollout) -> None:
        self._seats.get(rollout.actor, self._common).observe(rollout)

    def assign(self, group: Group) -> None:
        for algorithm, places in self._shares(rollout.actor for rollout in group.rollouts):
            algorithm.assign(replace(group, rollouts=[group.rollouts[place] for place in places]))
        for rollout in group.rollouts:
            rollout.samples = [_spoken(sample, rollout.actor) for sample in rollout.samples]

    async def score(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        scored = list(samples)
        for algorithm, places in self._shares(getattr(sample, "actor", "") for sample in samples):
            answers = await algorithm.score([samples[place] for place in places])
            if len(answers) != len(places):
                raise AlgorithmError(
                    f"{type(algorithm).__name__}: scored {len(answers)} of {len(places)} samples; they must align"
                )
            for place, answer in zip(places, answers, strict=True):
                scored[place] = answer
        return scored

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

    def _shares(self, actors: Iterable[str]) -> list[tuple[Algorithm, list[int]]]:
        """Each algorithm with the places of its own, in order."""
        shares: dict[str | None, list[int]] = {}
        for place, actor in enumerate(actors):
            shares.setdefault(actor if actor in self._seats else None, []).append(place)
        return [(self._common if actor is None else self._seats[actor], places) for actor, places in shares.items()]


def _spoken(sample: Sample, actor: str) -> Spoken:
    return Spoken(**{field.name: getattr(sample, field.name) for field in fields(Sample)}, actor=actor)
