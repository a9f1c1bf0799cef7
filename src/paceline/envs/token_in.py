"""Prompts as exact tokens: for base models, prompts another program made, or templates of one's own."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from paceline.config.env.tasks import TokenInConfig as Config
from paceline.data import Row
from paceline.envs.answers import normalised, wanted
from paceline.envs.base import POLICY, EnvError, Environment, Outcome, Split, dataset_rows, number
from paceline.envs.offloop import run_user_code
from paceline.rollout import Seat
from paceline.util.importing import import_object

REQUIRED = ("input_token_ids",)
"""Fields that every row must have, with a scorer or without."""


class TokenIn(Environment):
    """The policy continues a row's `input_token_ids`; no chat template touches them."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._scorer: Callable[..., Any] | None = None
        if config.scorer is not None:
            self._scorer = import_object(config.scorer.import_path)
            if not callable(self._scorer):
                raise EnvError(f"{config.scorer.import_path}: a scorer must be a function of a row and a text")

    def examples(self, split: Split) -> Sequence[Row]:
        if self._scorer is not None:
            return dataset_rows(self._config, split, require=REQUIRED)
        return dataset_rows(self._config, split, _with_answers, require=(*REQUIRED, "answer"))

    async def play(self, example: Row, seats: Mapping[str, Seat]) -> Outcome | None:
        reply = await seats[POLICY].complete(example["input_token_ids"])
        if self._scorer is None:
            correct = normalised(reply.text) in map(normalised, example["answer"])
            return Outcome.solo(float(correct), correct=float(correct))
        return await self._judged(example, reply.text)

    async def _judged(self, example: Row, text: str) -> Outcome | None:
        """The outcome by the user's scorer. A sync one runs off the event loop: it may take its time."""
        hook = self._config.scorer
        assert hook is not None
        assert self._scorer is not None
        judged = await run_user_code(partial(self._scorer, **hook.kwargs), example, text)
        if judged is None or isinstance(judged, Outcome):
            return judged
        return Outcome.solo(number(judged, hook.import_path))


def _with_answers(row: Row) -> Row:
    return row | {"answer": wanted(row)}
