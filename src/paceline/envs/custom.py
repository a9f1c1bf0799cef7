"""A user's own environment, by import path: a class, or a function that plays one row."""

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from paceline.config.env import CustomEnv as Config
from paceline.data import Row, read_rows
from paceline.data.importing import import_object
from paceline.envs.base import POLICY, EnvError, Environment, Outcome, Split, number
from paceline.rollout import Seat


class FunctionEnvironment(Environment):
    """`async def rollout(row, seat) -> reward` over the rows of a dataset."""

    def __init__(self, play: Callable[..., Awaitable[Any]], config: Config) -> None:
        if not inspect.iscoroutinefunction(play):
            raise EnvError(f"{config.import_path}: an environment function must be `async def rollout(row, seat)`")
        if config.dataset is None:
            raise EnvError(f"environment `{config.name}`: a function needs rows, name them with `dataset`")
        self._play = play
        self._config = config

    def examples(self, split: Split) -> Sequence[Row]:
        source = self._config.dataset if split == "train" else self._config.eval_dataset
        return read_rows(source) if source else []

    async def play(self, example: Row, seats: Mapping[str, Seat]) -> Outcome | None:
        answer = await self._play(example, seats[POLICY], **self._config.kwargs)
        if answer is None or isinstance(answer, Outcome):
            return answer
        return Outcome.solo(number(answer, self._config.import_path))


def custom_environment(config: Config) -> Environment:
    """What the import path names, ready to play."""
    found = import_object(config.import_path)
    if inspect.isclass(found) and issubclass(found, Environment):
        return found(**config.kwargs)
    if callable(found) and not inspect.isclass(found):
        return FunctionEnvironment(found, config)
    raise EnvError(f"{config.import_path}: neither a paceline.Environment class nor an async function")
