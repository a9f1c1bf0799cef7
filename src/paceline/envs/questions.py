"""Questions from a dataset with right answers: compared as text, as numbers, by math-verify or by a scorer."""

import importlib.util
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path

from paceline.config.env import EqualityConfig, GSM8KConfig, MathConfig, TaggedAnswerConfig, TokenInConfig
from paceline.data import BadRow, Row
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
from paceline.envs.base import POLICY, DatasetEnvironment, EnvError, Outcome, SingleTurn, parse_outcome
from paceline.envs.offloop import run_user_code
from paceline.envs.workers import WorkerFailed, Workers, failure_metrics
from paceline.rollout import Reply, Seat
from paceline.util.importing import import_object


async def ask(seat: Seat, example: Row) -> Reply:
    """The policy's reply to a row: to its exact tokens where it has any, else to its messages."""
    ids = example.get(TOKENS)
    return await (seat.chat(example["messages"]) if ids is None else seat.complete(ids))


class Equality(DatasetEnvironment[EqualityConfig], SingleTurn):
    """The reply's answer equals one of the row's but for case, punctuation and white space: 1, else 0."""

    require = ("answer",)

    async def play(self, example: Row, seats: Mapping[str, Seat]) -> Outcome | None:
        return self.score(example, await ask(seats[POLICY], example))

    def score(self, example: Row, reply: Reply) -> Outcome:
        given = extract_tag(reply.text.lower())  # whatever case the tags are in
        said = normalise_answer(reply.text if given is None else given)
        correct = float(said in map(normalise_answer, example["answer"]))
        return Outcome.solo(correct, correct=correct, format=float(given is not None))

    def _row(self, row: Row) -> Row:
        return question_and_answers(row, self._config.system)


class TaggedAnswer(DatasetEnvironment[TaggedAnswerConfig], SingleTurn):
    """The last `<answer>...</answer>` of a reply must equal one of the row's answers."""

    require = ("answer",)

    async def play(self, example: Row, seats: Mapping[str, Seat]) -> Outcome | None:
        return self.score(example, await ask(seats[POLICY], example))

    def score(self, example: Row, reply: Reply) -> Outcome:
        given = extract_tag(reply.text)
        if given is None:
            return Outcome.solo(0.0, correct=0.0, format=0.0)
        correct = self._normalise(given) in map(self._normalise, example["answer"])
        return Outcome.solo(1.0 if correct else self._config.format_reward, correct=float(correct), format=1.0)

    def _row(self, row: Row) -> Row:
        return question_and_answers(row, self._config.system)

    def _normalise(self, text: str) -> str:
        return normalise_spaces(text, self._config.ignore_case)


ANSWER_MARK = "####"
"""The mark that the dataset writes before the final answer."""


class GSM8K(DatasetEnvironment[GSM8KConfig]):
    """Grade-school maths over its original files (arXiv 2110.14168). Asks, says when the answer is wrong, and lets the
    policy try again. The last try is what counts."""

    require = ("answer",)

    async def play(self, example: Row, seats: Mapping[str, Seat]) -> Outcome | None:
        seat, messages, right = seats[POLICY], list(example.get("messages", ())), only_number(example["answer"])
        tries = 0
        while True:
            reply = await (seat.chat(messages) if tries else ask(seat, example))
            tries += 1
            answer = final_number(reply.text)
            correct = answer is not None and answer == right
            # The end of a truncated reply is missing, so there is nothing to go on from.
            if correct or reply.truncated or tries == self._config.max_turns:
                break
            messages += [reply.message, {"role": "user", "content": self._config.retry_prompt}]
        metrics = {"correct": float(correct), "first": float(correct and tries == 1)}
        reward = correct * self._config.discount ** (tries - 1)
        return Outcome.solo(reward, **metrics, format=float(answer is not None), tries=tries)

    def _row(self, row: Row) -> Row:
        """With the final answer of the dataset's worked solution."""
        _, mark, answer = accepted_answers(row)[0].rpartition(ANSWER_MARK)
        if not mark or only_number(answer) is None:
            raise BadRow(f"`answer` must end in `{ANSWER_MARK} 18`, with the row's own number")
        if TOKENS in row and self._config.max_turns > 1:
            raise BadRow(f"a row of `{TOKENS}` has no messages to try again in: set max_turns = 1")
        return question_and_answers(row, self._config.system) | {"answer": answer.strip()}


def final_number(text: str) -> Fraction | None:
    r"""The number a reply settles on, in `\boxed{}` or after `####`.

    >>> final_number("3 * 6 = 18\n#### $18.00") == final_number(r"\boxed{18}") == 18
    True
    """
    if (inside := extract_boxed(text)) is not None:
        return only_number(inside)
    _, mark, rest = text.rpartition(ANSWER_MARK)
    return only_number(rest.strip().partition("\n")[0]) if mark else None


CHECK_FUNCTION = f"{Path(__file__).with_name('math_check.py')}:check"


class Math(DatasetEnvironment[MathConfig]):
    """The last `\\boxed{}` of a reply, or the whole reply, is compared by math-verify in a worker process.

    Where math-verify reads nothing, numbers are compared: the one in the box, or the last in the reply. Metrics:
    `correct`, `parsed` (there was something to compare), `check_failed` and under it the share of each kind of failure.
    """

    require = ("answer",)

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

    def _row(self, row: Row) -> Row:
        return question_and_answers(row, self._config.system)


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
