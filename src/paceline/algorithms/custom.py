"""A user's own credit, by import path: a function over one group, or a whole `Algorithm` class."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.algorithms.base import Algorithm, AlgorithmError, spread
from paceline.config.algorithm import Custom as Config
from paceline.data.importing import import_object
from paceline.rollout import Group, Rollout


@dataclass(frozen=True, slots=True)
class CreditInputs:
    """What a credit function gets."""

    rollouts: Sequence[Rollout]

    @property
    def rewards(self) -> list[float]:
        return [float(rollout.reward or 0.0) for rollout in self.rollouts]

    @property
    def completion_lengths(self) -> list[int]:
        """Sampled tokens of each rollout."""
        return [sum(int(s.loss_mask.sum()) for s in rollout.samples) for rollout in self.rollouts]

    def broadcast(self, advantages: Sequence[float]) -> list[list[float]]:
        """One advantage per rollout, repeated over its tokens."""
        return [[a] * n for a, n in zip(advantages, self.completion_lengths, strict=True)]


class CustomCredit(Algorithm):
    """`fn(inputs, **kwargs)` gives one list of per-token advantages per rollout."""

    def __init__(self, function: Callable[..., Sequence[Sequence[float]]], config: Config) -> None:
        self._function = function
        self._config = config

    def assign(self, group: Group) -> None:
        streams = self._function(CreditInputs(group.rollouts), **self._config.kwargs)
        if len(streams) != len(group.rollouts):
            raise AlgorithmError(
                f"{self._config.import_path}: gave {len(streams)} lists for {len(group.rollouts)} rollouts"
            )
        for rollout, stream in zip(group.rollouts, streams, strict=True):
            spread(rollout, stream)


def custom_algorithm(config: Config) -> Algorithm:
    """What the import path names."""
    found = import_object(config.import_path)
    if inspect.isclass(found):
        if not issubclass(found, Algorithm):
            raise AlgorithmError(f"{config.import_path}: a class must derive from paceline.Algorithm")
        return found(**config.kwargs)
    if not callable(found):
        raise AlgorithmError(f"{config.import_path}: neither a credit function nor an Algorithm class")
    return CustomCredit(found, config)
