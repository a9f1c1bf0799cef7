"""A user's own credit, by import path: a function over one group, or a whole `Algorithm` class."""

import inspect
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass
from functools import wraps
from typing import Any

from paceline.algorithms.base import Algorithm, AlgorithmError, spread
from paceline.config.algorithm import CustomConfig as Config
from paceline.rollout import Group, Rollout
from paceline.util.importing import import_object
from paceline.util.user_code import user_code, user_frames

CALLED, AWAITED = ("stage", "observe", "assign", "state", "load"), ("begin", "finish_batch")
"""Hooks of an `Algorithm`."""
RENAMED = {"score": "finish_batch", "voice": "frozen_sampler"}
"""What earlier versions called them."""


@dataclass(frozen=True, slots=True)
class CreditInputs:
    """The input of a credit function."""

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
        with user_code(f"the credit function `{self._config.import_path}` (algo)", describe_call(group)):
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


def guard_hooks(algorithm: Algorithm, path: str) -> Algorithm:
    """The same object, whose hooks name themselves when they raise."""

    def guard(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with user_code(f"`{name}` of the algorithm `{path}` (algo)", describe_call(*args)):
                return hook(*args)

        async def call_async(*args: Any) -> Any:
            with user_code(f"`{name}` of the algorithm `{path}` (algo)", describe_call(*args)):
                return await hook(*args)

        return wraps(hook)(call_async if name in AWAITED else call)

    for name in CALLED + AWAITED:
        setattr(algorithm, name, guard(name, getattr(algorithm, name)))
    return algorithm


def describe_call(*args: Any) -> str:
    """The environment, row and ticket that a hook was called for, where it was called for one."""
    groups = args[0] if args and isinstance(args[0], Sequence) else args[:1]
    tickets = [one.ticket for one in groups if isinstance(one, Group | Rollout)]
    if len(tickets) > 1:
        return f"environment `{tickets[0].env}`, {len(tickets)} groups from ticket {tickets[0].number}"
    return "".join(f"environment `{t.env}`, row {t.row}, ticket {t.number}" for t in tickets)


def custom_algorithm(config: Config) -> Algorithm:
    """The algorithm that the import path names."""
    found = import_object(config.import_path)
    if inspect.isclass(found):
        if not issubclass(found, Algorithm):
            raise AlgorithmError(f"{config.import_path}: a class must derive from paceline.Algorithm")
        with user_code(f"the algorithm `{config.import_path}` (algo)"):
            try:
                algorithm = found(**config.kwargs)
            except TypeError as error:
                if user_frames(error):
                    raise
                # A hook that is missing, or arguments that do not fit: nothing of the user's has run yet.
                raise AlgorithmError(f"{config.import_path}: {error}") from error
        for old, new in RENAMED.items():
            if hasattr(algorithm, old):
                raise AlgorithmError(f"{config.import_path}: `{old}` of an algorithm is called `{new}` now")
        for name in CALLED + AWAITED:
            if inspect.iscoroutinefunction(getattr(algorithm, name)) != (name in AWAITED):
                if name in AWAITED:
                    raise AlgorithmError(f"{config.import_path}: `{name}` is awaited: write `async def {name}`")
                raise AlgorithmError(f"{config.import_path}: `{name}` is called, not awaited: write it without `async`")
        return guard_hooks(algorithm, config.import_path)
    if not callable(found):
        raise AlgorithmError(f"{config.import_path}: neither a credit function nor an Algorithm class")
    return CustomCredit(found, config)
