"""Questions from a dataset with right answers: compared as text, by math-verify or by a scorer."""

import importlib.util
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from paceline.config.env import EqualityConfig, MathConfig, TaggedAnswerConfig, TokenInConfig
from paceline.data import Row
from paceline.envs.answers import (
    TOKENS,
    accepted_answers,
    extract_boxed,
    extract_tag,
    last_number,
    normalise_answer,
    normalise_spaces,
    only_number,
    question_and_answers,
)
from paceline.envs.base import POLICY, DatasetEnvironment, EnvError, Outcome, parse_outcome
from paceline.envs.offloop import run_user_code
from paceline.envs.workers import WorkerFailed, Workers, failure_metrics
from paceline.rollout import Reply, Seat
from paceline.util.importing import import_object


async def ask(seat: Seat, example: Row) -> Reply:
    """The policy's reply to a row: to its exact tokens where it has any, else to its messages."""
    ids = example.get(TOKENS)
    return await (seat.chat(example["messages"]) if ids is None else seat.complete(ids))


C = TypeVar("C", EqualityConfig, TaggedAnswerConfig, MathConfig)


class QuestionEnvironment(DatasetEnvironment[C]):
    """Questions, in messages or exact tokens, whose rows accept one answer or several."""

    require = ("answer",)

    def _row(self, row: Row) -> Row:
        return question_and_answers(row, self._config.system)


class Equality(QuestionEnvironment[EqualityConfig]):
    """The reply's answer equals one of the row's but for case, punctuation and white space: 1, else 0."""

    async def play(self, example: Row, seats: Mapping[str, Seat]) -> Outcome | None:
        return self.score(example, await ask(seats[POLICY], example))

    def score(self, example: Row, reply: Reply) -> Outcome:
        given = extract_tag(reply.text.lower())  # whatever case the tags are in
        said = normalise_answer(reply.text if given is None else given)
        correct = float(said in map(normalise_answer, example["answer"]))
        return Outcome.solo(correct, correct=correct, format=float(given is not None))


class TaggedAnswer(QuestionEnvironment[TaggedAnswerConfig]):
    """The last `<answer>...</answer>` of a reply must equal one of the row's answers."""

    async def play(self, example: Row, seats: Mapping[str, Seat]) -> Outcome | None:
        return self.score(example, await ask(seats[POLICY], example))

    def score(self, example: Row, reply: Reply) -> Outcome:
        given = extract_tag(reply.text)
        if given is None:
            return Outcome.solo(0.0, correct=0.0, format=0.0)
        correct = self._normalise(given) in map(self._normalise, example["answer"])
        return Outcome.solo(1.0 if correct else self._config.format_reward, correct=float(correct), format=1.0)

    def _normalise(self, text: str) -> str:
        return normalise_spaces(text, self._config.ignore_case)


CHECK_FUNCTION = f"{Path(__file__).with_name('math_check.py')}:check"


class Math(QuestionEnvironment[MathConfig]):
    """The last `\\boxed{}` of a reply, or the whole reply, is compared by math-verify in a worker process.

    Where math-verify reads nothing, numbers are compared: the one in the box, or the last in the reply. Metrics:
    `correct`, `parsed` (there was something to compare), `check_failed` and under it the share of each kind of failure.
    """

    def __init__(self, config: MathConfig, check: str = CHECK_FUNCTION) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise EnvError(f'environment `{config.name}` needs math-verify: pip install "paceline[tasks]"')
        super().__init__(config)
        self._check = check
        self._workers = Workers(config.workers, config.memory_mb)

    async def play(self, example: Row, seats: Mapping[str, Seat]) -> Outcome | None:
        reply = await ask(seats[POLICY], example)
        return await self.grade(reply.text, example["answer"])

    async def grade(self, text: str, answers: Sequence[str]) -> Outcome:
        """The outcome of a reply. Only one box counts: a reply that boxes every candidate has not answered."""
        box = extract_boxed(text)
        said = text if box is None else f"\\boxed{{{box}}}"
        try:
            found = await self._workers.call(self._check, [said, list(answers)], self._config.check_timeout)
        except WorkerFailed as failed:
            return Outcome.solo(0.0, correct=0.0, parsed=0.0, **failure_metrics(failed))
        correct, parsed = found["correct"], found["correct"] or found["parsed"]
        if not correct and not (parsed and found["gold"]):
            value = last_number(text) if box is None else only_number(box)
            correct = value is not None and any(value == only_number(answer) for answer in answers)
            parsed = parsed or value is not None
        return Outcome.solo(float(correct), correct=float(correct), parsed=float(parsed), **failure_metrics(None))


class TokenIn(DatasetEnvironment[TokenInConfig]):
    """Prompts as exact tokens: for base models, prompts another program made, or templates of one's own. The policy
    continues a row's `input_token_ids`; no chat template touches them."""

    require = (TOKENS,)

    def __init__(self, config: TokenInConfig) -> None:
        super().__init__(config)
        self._scorer = None
        if config.scorer is None:
            self.require = (*self.require, "answer")
            return
        self._where = config.scorer.import_path
        scorer = import_object(self._where)
        if not callable(scorer):
            raise EnvError(f"{self._where}: a scorer must be a function of a row and a text")
        self._scorer = partial(scorer, **config.scorer.kwargs)

    async def play(self, example: Row, seats: Mapping[str, Seat]) -> Outcome | None:
        reply = await seats[POLICY].complete(example[TOKENS])
        if self._scorer is None:
            correct = normalise_spaces(reply.text) in map(normalise_spaces, example["answer"])
            return Outcome.solo(float(correct), correct=float(correct))
        # A sync scorer runs off the event loop: it may take its time.
        return parse_outcome(await run_user_code(self._scorer, example, reply.text), self._where)

    def _row(self, row: Row) -> Row:
        return row if self._scorer is not None else row | {"answer": accepted_answers(row)}
