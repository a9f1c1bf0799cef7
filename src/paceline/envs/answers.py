"""Reads the answers that rows accept and replies give, in a form that can be compared."""

import re
import string
from fractions import Fraction

from paceline.data import BadRow, Row
from paceline.data.rows import ANSWER, GIVEN_ANSWER, TOKENS
from paceline.rollout import Message

# Longer ones are no answer to any question here, and Python takes quadratic time over them.
MAX_DIGITS = 60
# A minus is a sign only where nothing stands before it that could be subtracted from.
_NUMBER = re.compile(
    r"(?:(?<![\w)\].])-\$?|\$-?)?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_LATEX_SPACES = re.compile(r"\\[,;:! ]|~")


# --- answers in a reply


def extract_tag(text: str, tag: str = "answer") -> str | None:
    """The text in the last complete pair of tags.

    >>> extract_tag("<answer>1</answer> no: <answer>2</answer>")
    '2'
    """
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, max(end, 0))
    return None if start < 0 else text[start + len(tag) + 2 : end]


def extract_boxed(text: str) -> str | None:
    r"""The text in the last `\boxed{}`, braces inside included.

    >>> extract_boxed(r"so \boxed{\frac{1}{2}}.")
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
    """Every number in a text, in any notation.

    >>> numbers("$1,080.50 for 3 of them, less 5%")
    [Fraction(2161, 2), Fraction(3, 1), Fraction(5, 1)]
    """
    text = _LATEX_SPACES.sub("", text.replace("{,}", ",").replace("\\$", "$"))
    found = (match.replace(",", "").replace("$", "") for match in _NUMBER.findall(text))
    return [Fraction(number) for number in found if len(number) <= MAX_DIGITS]


def last_number(text: str) -> Fraction | None:
    found = numbers(text)
    return found[-1] if found else None


def only_number(text: str) -> Fraction | None:
    """The number in a text that has just one; a reply that lists several has not answered.

    >>> only_number("18 dollars"), only_number("17 or 18")
    (Fraction(18, 1), None)
    """
    found = numbers(text)
    return found[0] if len(found) == 1 else None


def normalise_spaces(text: str, ignore_case: bool = False) -> str:
    """The text with each run of white space as one blank, and none at the ends."""
    text = " ".join(text.split())
    return text.casefold() if ignore_case else text


def normalise_answer(text: str, *, articles: bool = True) -> str:
    """The text in lower case, without punctuation and spare white space; without `articles` as SQuAD compares answers.
    Where nothing would be left the text stays, for `+` and `A` are answers too.

    >>> normalise_answer(" The  Sea of Brand. "), normalise_answer("The Sea", articles=False), normalise_answer("+")
    ('the sea of brand', 'sea', '+')
    """
    plain = text.lower().translate(_NO_PUNCTUATION)
    return normalise_spaces(plain if articles else _ARTICLES.sub(" ", plain)) or text.strip().lower()


# --- answers that a row accepts


def conversation(row: Row, system: str = "") -> list[Message]:
    """The messages a row opens with. `system` goes before them unless the row has a system message of its own."""
    own = any(message["role"] in ("system", "developer") for message in row["messages"])
    return row["messages"] if own or not system else [{"role": "system", "content": system}, *row["messages"]]


def accepted_answers(row: Row) -> list[str]:
    """The answers a row accepts."""
    answer = row.get(ANSWER)
    name = GIVEN_ANSWER if ANSWER in row and row.get(GIVEN_ANSWER) is answer else ANSWER
    if isinstance(answer, int | float) and not isinstance(answer, bool) and answer - answer == 0:  # not NaN, not inf
        answer = str(answer)
    answers = [answer] if isinstance(answer, str) else answer
    if not isinstance(answers, list) or not answers or not all(isinstance(text, str) for text in answers):
        raise BadRow(f"`{name}` must be a string or a list of strings, not {answer!r}")
    if not all(map(str.strip, answers)):
        raise BadRow(f"`{name}` must not be empty: it is {answer!r}")
    return answers


def question_and_answers(row: Row, system: str) -> Row:
    """A row whose answer is text to compare with. A prompt of exact tokens stays as it is."""
    asked = {} if TOKENS in row else {"messages": conversation(row, system)}
    return row | asked | {"answer": accepted_answers(row)}
