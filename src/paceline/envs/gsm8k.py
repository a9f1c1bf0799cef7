"""Grade-school maths with a second try: GSM8K (arXiv 2110.14168) over its original files."""

from collections.abc import Mapping, Sequence
from fractions import Fraction

from paceline.config.env.tasks import GSM8KConfig as Config
from paceline.data import BadRow, Row
from paceline.envs.answers import boxed, conversation, only_number, wanted
from paceline.envs.base import POLICY, Environment, Outcome, Split, dataset_rows
from paceline.rollout import Seat

MARK = "####"
"""The mark that the dataset writes before the final answer."""


class GSM8K(Environment):
    """Asks, says when the answer is wrong, and lets the policy try again. The last try is what counts."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def examples(self, split: Split) -> Sequence[Row]:
        return dataset_rows(self._config, split, self._row, require=("messages", "answer"))

    async def play(self, example: Row, seats: Mapping[str, Seat]) -> Outcome | None:
        messages, right = list(example["messages"]), only_number(example["answer"])
        first = correct = False
        answer, tries = None, 0
        while tries < self._config.max_turns and not correct:
            if tries:
                messages.append({"role": "user", "content": self._config.retry_prompt})
            reply = await seats[POLICY].chat(messages)
            messages.append(reply.message)
            tries += 1
            answer = final_number(reply.text)
            correct = answer is not None and answer == right
            first = first or (correct and tries == 1)
            if reply.truncated:  # the end of what it said is missing, so there is nothing to go on from
                break
        reward = correct * self._config.discount ** (tries - 1)
        return Outcome.solo(
            reward, correct=float(correct), first=float(first), format=float(answer is not None), tries=tries
        )

    def _row(self, row: Row) -> Row:
        return row | {"messages": conversation(row, self._config.system), "answer": _solution(row)}


def final_number(text: str) -> Fraction | None:
    r"""The number a reply settles on, in `\boxed{}` or after `####`.

    >>> final_number("3 * 6 = 18\n#### $18.00") == final_number(r"\boxed{18}") == 18
    True
    """
    if (inside := boxed(text)) is not None:
        return only_number(inside)
    _, mark, rest = text.rpartition(MARK)
    return only_number(rest.strip().partition("\n")[0]) if mark else None


def _solution(row: Row) -> str:
    """The final answer of the dataset's worked solution."""
    _, mark, answer = wanted(row)[0].rpartition(MARK)
    if not mark or only_number(answer) is None:
        raise BadRow(f"`answer` must end in `{MARK} 18`, with the row's own number")
    return answer.strip()
