"""Loads a user's environment by import path: a class, or a function that plays one row."""

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from paceline.config.env import CustomEnvConfig as Config
from paceline.data import Row
from paceline.engine import Finish
from paceline.envs.base import POLICY, DatasetEnvironment, EnvError, Environment, Outcome, Split, parse_reward
from paceline.rollout import Rollout, Seat, Turn
from paceline.util.importing import import_object
from paceline.util.user_code import user_code

MAX_VERSION = 2**31 - 1
MAX_FLOAT = 3e38
"""The largest values that fit the streams' types."""
TOKEN_STREAMS = ("logprobs", "versions", "log_z")
"""Streams with an entry for each sampled token."""


def accept_rollout(rollout: Rollout, seat: Seat, where: str) -> Outcome | None:
    """The outcome of a rollout that user code built. Its turns replace those that the seat recorded; its actor and
    ticket are ignored, since the run sets them."""
    if rollout.dropped:
        return None
    if rollout.error is not None:
        raise EnvError(f"{where} returned a Rollout with an error: {rollout.error}")
    if rollout.reward is None:
        raise EnvError(f"{where} returned a Rollout without a `reward`: set it, or return None to drop the episode")
    if not rollout.turns:
        raise EnvError(f"{where} returned a Rollout without turns: return None to drop the episode")
    most = seat.vocabulary - 1
    seat.turns[:] = [_check_turn(turn, f"{where}: turn {at}", most) for at, turn in enumerate(rollout.turns, start=1)]
    return Outcome({POLICY: parse_reward(rollout.reward, where)}, rollout.metrics)


def _check_turn(turn: Any, where: str, last_token: int) -> Turn:
    """The turn with plain lists of one length."""
    if not isinstance(turn, Turn):
        raise EnvError(f"{where} of the Rollout is of type {type(turn).__name__}: make it a paceline.rollout.Turn")
    for name in ("prompt_ids", "completion_ids", "logprobs", "versions"):
        if getattr(turn, name) is None:
            raise EnvError(f"{where}: `{name}` is missing: every turn needs it")
    streams = {name: f"{where}: `{name}`" for name in ("prompt_ids", "completion_ids")}
    ids = {name: _check_integers(getattr(turn, name), place, last_token) for name, place in streams.items()}
    for name, tokens in ids.items():
        if not tokens:
            raise EnvError(f"{where}: `{name}` is empty: a turn needs a prompt, and something the policy said")
    sampled = len(ids["completion_ids"])
    for name in TOKEN_STREAMS:
        stream = getattr(turn, name)
        if stream is not None and len(stream) != sampled:
            raise EnvError(
                f"{where}: `{name}` has {len(stream)} entries, but `completion_ids` has {sampled}: "
                "every sampled token needs its own"
            )
    if turn.finish not in get_args(Finish):
        raise EnvError(f"{where}: `finish` is {turn.finish!r}: write " + " or ".join(map(repr, get_args(Finish))))
    if not isinstance(turn.temperature, int | float) or not 0 <= turn.temperature < math.inf:
        raise EnvError(f"{where}: `temperature` is {turn.temperature!r}: it must be a number from 0")
    return replace(
        turn,
        **ids,
        versions=_check_integers(turn.versions, f"{where}: `versions`", MAX_VERSION),
        logprobs=_check_floats(turn.logprobs, f"{where}: `logprobs`"),
        log_z=None if turn.log_z is None else _check_floats(turn.log_z, f"{where}: `log_z`"),
    )


def _check_integers(values: Sequence[Any], where: str, most: int) -> list[int]:
    for value in values:
        if isinstance(value, bool) or not hasattr(value, "__index__") or not 0 <= int(value) <= most:
            raise EnvError(f"{where} holds {value!r}: it must hold whole numbers from 0 to {most}")
    return [int(value) for value in values]


def _check_floats(values: Sequence[Any], where: str) -> list[float]:
    for value in values:
        if not hasattr(value, "__float__") or not abs(value) < MAX_FLOAT:
            raise EnvError(f"{where} holds {value!r}: it must hold finite numbers")
    return [float(value) for value in values]


ASYNC_ONLY = "{}: an environment function must be `async def rollout(row, seat)`"
NEEDS_ROWS = "environment `{}`: a function needs rows, name them with `dataset`"


class FunctionEnvironment(DatasetEnvironment[Config]):
    """`async def rollout(row, seat)` over a dataset; it returns a reward, an `Outcome`, a `Rollout` or None (drop)."""

    require = ()
    prompted = False

    def __init__(
        self, play: Callable[..., Awaitable[Any]], config: Config, rows: Mapping[Split, Sequence[Row]] | None = None
    ) -> None:
        if not inspect.iscoroutinefunction(play):
            raise EnvError(ASYNC_ONLY.format(config.import_path))
        if config.dataset is None:
            raise EnvError(NEEDS_ROWS.format(config.name))
        super().__init__(config, rows)
        self._play = play

    async def play(self, example: Row, seats: Mapping[str, Seat]) -> Outcome | None:
        answer = await self._play(example, seats[POLICY], **self._config.kwargs)
        if answer is None or isinstance(answer, Outcome):
            return answer
        if isinstance(answer, Rollout):
            return accept_rollout(answer, seats[POLICY], self._config.import_path)
        return Outcome.solo(parse_reward(answer, self._config.import_path))


def custom_environment(config: Config) -> Environment:
    """The environment that the import path names, ready to play."""
    found = import_object(config.import_path)
    if inspect.isclass(found) and issubclass(found, Environment):
        with user_code(f"the environment `{config.import_path}` ([[env]] `{config.name}`)"):
            return found(**config.kwargs)
    if callable(found) and not inspect.isclass(found):
        return FunctionEnvironment(found, config)
    raise EnvError(f"{config.import_path}: neither a paceline.Environment class nor an async function")
