"""Plays GSM8K: grade-school word problems with several tries, checked as numbers and by math-verify."""

import importlib.util
import logging
import re
from collections.abc import Mapping
from fractions import Fraction

from paceline.config.env import GSM8KConfig
from paceline.data import BadRow, Row
from paceline.envs.answers import TOKENS, accepted_answers, extract_boxed, only_number, question_and_answers
from paceline.envs.base import POLICY, DatasetEnvironment, Outcome
from paceline.envs.questions import CHECK_FUNCTION, ask
from paceline.envs.workers import WorkerFailed, Workers, failure_metrics
from paceline.rollout import Seat

log = logging.getLogger(__name__)

ANSWER_MARK = "####"
"""The mark that the dataset writes before the final answer."""
_CALCULATOR_MARK = re.compile(r"<<[^<>]*>>")
_EXPRESSION = re.compile(
    r"[\^+*=!]|/\s*(?:\\\$)?[\d({$]|\\(?:[dtc]?frac|sqrt|times|cdot|div|pi)(?![a-z])|(?<=[\w)}])\s*-\s*[\d(\\$]"
)
"""What makes a final answer more than a number with a unit: `36/2`, `3 + 15 = 18`, but not `$18/day`."""


class GSM8K(DatasetEnvironment[GSM8KConfig]):
    """Grade-school maths over its original files (arXiv 2110.14168). Asks, says when the answer is wrong, and lets the
    policy try again. The last try is what counts.

    A plain number is compared here and now; an expression goes to math-verify in a worker process. Where that reads
    nothing, or is not installed, the number decides.
    """

    require = ("answer",)

    def __init__(self, config: GSM8KConfig, rows: Mapping | None = None) -> None:
        super().__init__(config, rows)
        self._workers = Workers(config.workers, config.memory_mb)
        self._has_math_verify = importlib.util.find_spec("math_verify") is not None
        if not self._has_math_verify:
            text = "environment `%s` compares plain numbers only, so that \\boxed{36/2} is wrong for 18: %s"
            log.warning(text, config.name, 'to check expressions too, pip install "paceline[tasks]"')

    async def play(self, example: Row, seats: Mapping[str, Seat]) -> Outcome | None:
        seat, messages, right = seats[POLICY], list(example.get("messages", ())), only_number(example["answer"])
        tries, failed = 0, None
        while True:
            reply = await (seat.chat(messages) if tries else ask(seat, example))
            tries += 1
            correct = readable = False
            try:
                correct, readable = await self.check(final_answer(reply.text) or "", right)
            except WorkerFailed as error:
                failed = error
            # The end of a truncated reply is missing, so there is nothing to go on from.
            if correct or reply.truncated or tries == self._config.max_turns:
                break
            messages += [reply.message, {"role": "user", "content": self._config.retry_prompt}]
        metrics = {"correct": float(correct), "first": float(correct and tries == 1), "format": float(readable)}
        reward = correct * self._config.discount ** (tries - 1)
        return Outcome.solo(reward, **metrics, tries=tries, **failure_metrics(failed))

    async def check(self, answer: str, right: Fraction | None) -> tuple[bool, bool]:
        """Whether a final answer has the right value, and whether it has one at all. Raises `WorkerFailed`."""
        value = only_number(answer)
        readable = value is not None
        if not self._has_math_verify or not _EXPRESSION.search(answer):
            return readable and value == right, readable
        arguments = [f"\\boxed{{{answer}}}", [str(right)]]
        found = await self._workers.call(CHECK_FUNCTION, arguments, self._config.check_timeout)
        correct = found["correct"] or (readable and value == right and not found["parsed"])
        return correct, readable or correct or found["parsed"]

    def _row(self, row: Row) -> Row:
        """With the final answer of the dataset's worked solution, and the solution as a demonstration."""
        solution, mark, answer = accepted_answers(row)[0].rpartition(ANSWER_MARK)
        if not mark or only_number(answer) is None:
            raise BadRow(f"`answer` must end in `{ANSWER_MARK} 18`, with the row's own number")
        if TOKENS in row and self._config.max_turns > 1:
            raise BadRow(f"a row of `{TOKENS}` has no messages to try again in: set max_turns = 1")
        answer = answer.strip()
        if not self._config.calculator_marks:
            solution = _CALCULATOR_MARK.sub("", solution)
        shown = f"{solution.strip()}\n\\boxed{{{answer}}}".lstrip()
        return {"completion": shown} | question_and_answers(row, self._config.system) | {"answer": answer}


def final_answer(text: str) -> str | None:
    r"""What a reply settles on: the text in its last `\boxed{}`, or the line after its last `####`.

    >>> final_answer("3 * 6 = 18\n#### $18.00"), final_answer(r"\boxed{\frac{36}{2}}")
    ('$18.00', '\\frac{36}{2}')
    """
    if (inside := extract_boxed(text)) is not None:
        return inside
    _, mark, rest = text.rpartition(ANSWER_MARK)
    return rest.strip().partition("\n")[0] if mark else None
