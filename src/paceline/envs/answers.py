"""Answers: what a row wants, what a reply gives, and when the two are the same."""

import re
from fractions import Fraction
from typing import Any

from paceline.data import Row, read_rows
from paceline.envs.base import EnvError
from paceline.rollout import Message

# Longer ones are no answer to any question here, and Python takes quadratic time over them.
MAX_DIGITS = 60
# A minus is a sign only where nothing stands before it that could be subtracted from.
_NUMBER = re.compile(
    r"(?:(?<![\w)\].])-\$?|\$-?)?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
)
_LATEX_SPACES = re.compile(r"\\[,;:! ]|~")


# --- what a reply gives


def tagged(text: str, tag: str = "answer") -> str | None:
    """What stands in the last complete pair of tags.

    >>> tagged("<answer>1</answer> no: <answer>2</answer>")
    '2'
    """
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, max(end, 0))
    return None if start < 0 else text[start + len(tag) + 2 : end]


def boxed(text: str) -> str | None:
    r"""What stands in the last `\boxed{}`, braces inside included.

    >>> boxed(r"so \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    _, mark, rest = text.rpartition("\\boxed{")
    if not mark:
        return None
    depth = 1
    for at, letter in enumerate(rest):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return rest[:at]
    return None


def numbers(text: str) -> list[Fraction]:
    """Every number in a text, whatever it is written like.

    >>> numbers("$1,080.50 for 3 of them, less 5%")
    [Fraction(2161, 2), Fraction(3, 1), Fraction(5, 1)]
    """
    text = _LATEX_SPACES.sub("", text.replace("{,}", ",").replace("\\$", "$"))
    found = (match.replace(",", "").replace("$", "") for match in _NUMBER.findall(text))
    return [Fraction(number) for number in found if len(number) <= MAX_DIGITS]


def last_number(text: str) -> Fraction | None:
    """The number a text ends with, or last speaks of."""
    found = numbers(text)
    return found[-1] if found else None


def only_number(text: str) -> Fraction | None:
    """The number in a text that has just one; a reply that lists several has not answered.

    >>> only_number("18 dollars"), only_number("17 or 18")
    (Fraction(18, 1), None)
    """
    found = numbers(text)
    return found[0] if len(found) == 1 else None


def normalised(text: str, ignore_case: bool = False) -> str:
    """The text with each run of white space as one blank, and none at the ends."""
    text = " ".join(text.split())
    return text.casefold() if ignore_case else text


# --- what a row wants


def dataset_rows(source: str | None) -> list[tuple[str, Row]]:
    """The rows of a dataset, each with words that name it in an error; none when there is no dataset."""
    if source is None:
        return []
    return [(f"dataset {source}, row {number}", row) for number, row in enumerate(read_rows(source), start=1)]


def conversation(row: Row, where: str, system: str = "") -> list[Message]:
    """The messages a row opens with: its `messages`, or its `prompt` or `question` as a user's. `system` goes before
    them unless the row has a system message of its own."""
    key = next((key for key in ("messages", "prompt", "question") if key in row), None)
    if key is None:
        names = ", ".join(f"`{name}`" for name in row) or "nothing"
        raise EnvError(f"{where}: has neither `messages` nor `prompt` nor `question`, but {names}")
    messages = [{"role": "user", "content": row[key]}] if isinstance(row[key], str) else row[key]
    if not _are_messages(messages):
        raise EnvError(f"{where}: `{key}` must be text, or a list of objects with `role` and `content`")
    own = any(message["role"] in ("system", "developer") for message in messages)
    return messages if own or not system else [{"role": "system", "content": system}, *messages]


def wanted(row: Row, where: str) -> list[str]:
    """The answers a row accepts."""
    answer = row.get("answer")
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = str(answer)
    answers = [answer] if isinstance(answer, str) else answer
    if not isinstance(answers, list) or not answers or not all(isinstance(text, str) for text in answers):
        raise EnvError(f"{where}: `answer` must be a string or a list of strings, not {answer!r}")
    return answers


def _are_messages(messages: Any) -> bool:
    return bool(messages) and isinstance(messages, list) and all(isinstance(m, dict) and "role" in m for m in messages)
