"""A user's own credit, by import path: a function over one group, or a whole `Algorithm` class."""

import inspect
from collections.abc import Callable, Iterable, Sequence, Sized
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
        if not isinstance(streams, Sized) or len(streams) != len(group.rollouts):
            given = f"{len(streams)} lists" if isinstance(streams, Sized) else repr(streams)
            raise AlgorithmError(f"{self._config.import_path}: gave {given} for {len(group.rollouts)} rollouts")
        for rollout, stream in zip(group.rollouts, streams, strict=True):
            if not isinstance(stream, Iterable):
                raise AlgorithmError(
                    f"{self._config.import_path}: gave {stream!r} for a rollout: it takes a number for each sampled "
                    "token, which `inputs.broadcast` makes of one"
                )
            spread(rollout, stream)


def custom_algorithm(config: Config) -> Algorithm:
    """What the import path names."""
    found = import_object(config.import_path)
    if inspect.isclass(found):
        if not issubclass(found, Algorithm):
            raise AlgorithmError(f"{config.import_path}: a class must derive from paceline.Algorithm")
        try:
            algorithm = found(**config.kwargs)
        except TypeError as error:  # a hook that is missing, or arguments that do not fit
            raise AlgorithmError(f"{config.import_path}: {error}") from error
        for name in ("stage", "observe", "assign", "state", "load"):
            if inspect.iscoroutinefunction(getattr(algorithm, name)):
                raise AlgorithmError(f"{config.import_path}: `{name}` is called, not awaited: write it without `async`")
        for name in ("begin", "score"):
            if not inspect.iscoroutinefunction(getattr(algorithm, name)):
                raise AlgorithmError(f"{config.import_path}: `{name}` is awaited: write `async def {name}`")
        return algorithm
    if not callable(found):
        raise AlgorithmError(f"{config.import_path}: neither a credit function nor an Algorithm class")
    return CustomCredit(found, config)
