"""A user's own environment, by import path: a class, or a function that plays one row."""

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from paceline.config.env import CustomEnv as Config
from paceline.data import Row, listed_rows
from paceline.envs.base import POLICY, EnvError, Environment, Outcome, Split, number
from paceline.envs.dataset import dataset_rows
from paceline.envs.handmade import take_over
from paceline.importing import import_object
from paceline.rollout import Rollout, Seat
from paceline.user_code import user_code

ASYNC_ONLY = "{}: an environment function must be `async def rollout(row, seat)`"
NEEDS_ROWS = "environment `{}`: a function needs rows, name them with `dataset`"


class FunctionEnvironment(Environment):
    """`async def rollout(row, seat)` over the rows of a dataset. It answers with a reward, an `Outcome`, a `Rollout` it
    made itself, or None to drop the episode."""

    def __init__(
        self, play: Callable[..., Awaitable[Any]], config: Config, rows: Mapping[Split, Sequence[Row]] | None = None
    ) -> None:
        if not inspect.iscoroutinefunction(play):
            raise EnvError(ASYNC_ONLY.format(config.import_path))
        if config.dataset is None:
            raise EnvError(NEEDS_ROWS.format(config.name))
        self._play = play
        self._config = config
        self._rows = rows or {}
        """Rows that are objects of this process, in place of those that the section names."""

    def examples(self, split: Split) -> Sequence[Row]:
        if split in self._rows:
            name = "dataset" if split == "train" else "eval_dataset"
            return listed_rows(self._rows[split], name, self._config.fields, prompted=False)
        return dataset_rows(self._config, split, prompted=False)

    async def play(self, example: Row, seats: Mapping[str, Seat]) -> Outcome | None:
        answer = await self._play(example, seats[POLICY], **self._config.kwargs)
        if answer is None or isinstance(answer, Outcome):
            return answer
        if isinstance(answer, Rollout):
            return take_over(answer, seats[POLICY], self._config.import_path)
        return Outcome.solo(number(answer, self._config.import_path))


def custom_environment(config: Config) -> Environment:
    """What the import path names, ready to play."""
    found = import_object(config.import_path)
    if inspect.isclass(found) and issubclass(found, Environment):
        with user_code(f"the environment `{config.import_path}` ([[env]] `{config.name}`)"):
            return found(**config.kwargs)
    if callable(found) and not inspect.isclass(found):
        return FunctionEnvironment(found, config)
    raise EnvError(f"{config.import_path}: neither a paceline.Environment class nor an async function")
