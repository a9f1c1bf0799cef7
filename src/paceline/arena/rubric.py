"""Scores a finished episode by a weighted sum of functions."""

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from paceline.arena.together import together
from paceline.arena.types import ArenaError
from paceline.envs.base import number
from paceline.envs.offloop import run_user_code

if TYPE_CHECKING:
    from paceline.arena.arena import Arena
    from paceline.arena.state import EpisodeState

Scores = Mapping[str, float]
RubricFunction = Callable[["EpisodeState", "Arena"], Scores | Awaitable[Scores]]


class Rubric:
    """Each function scores some actors, `fn(state, arena) -> {actor: number}`; an actor's reward is the weighted sum.

    Async functions may ask a judge (`arena.call_model`). Sync ones run off the event loop, so that a slow check holds
    up no other episode. An actor no function mentions earns 0.
    """

    def __init__(self, funcs: Sequence[RubricFunction] = (), weights: Sequence[float] | None = None) -> None:
        self._funcs = list(funcs)
        self._weights = [1.0] * len(self._funcs) if weights is None else [float(weight) for weight in weights]
        if len(self._weights) != len(self._funcs):
            raise ArenaError(
                f"a rubric has {len(self._funcs)} functions but {len(self._weights)} weights: "
                "give one weight for each function, or leave weights out"
            )
        if not all(map(math.isfinite, self._weights)):
            raise ArenaError(f"a rubric has weights {self._weights}: every weight must be a finite number")

    async def score(self, state: "EpisodeState", arena: "Arena") -> tuple[dict[str, float], dict[str, float]]:
        """Each actor's reward, and each function's own scores as metrics."""
        rewards = dict.fromkeys(state.actors, 0.0)
        metrics: dict[str, float] = {}
        answers = await together([run_user_code(func, state, arena) for func in self._funcs])
        for func, weight, scores in zip(self._funcs, self._weights, answers, strict=True):
            for actor, value in _checked(func, scores, state).items():
                rewards[actor] += weight * value
                metrics[_name(func) if len(state.actors) == 1 else f"{_name(func)}/{actor}"] = value
        return rewards, metrics


def _checked(func: RubricFunction, scores: object, state: "EpisodeState") -> dict[str, float]:
    where = f"rubric function `{_name(func)}` of episode `{state.request.episode_type}`"
    if not isinstance(scores, Mapping):
        raise ArenaError(f"{where} returned {scores!r}: return a dict of actor and number")
    for actor in scores:
        if actor not in state.actors:
            raise ArenaError(f"{where} scores `{actor}`, but the actors of this episode are {_listed(state.actors)}")
    return {str(actor): number(value, where) for actor, value in scores.items()}


def _name(func: RubricFunction) -> str:
    return getattr(func, "__name__", type(func).__name__)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
