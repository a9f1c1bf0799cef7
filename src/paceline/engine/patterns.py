"""Regular expressions as Python reads them (`re.fullmatch` with `re.ASCII`), rewritten for a grammar compiler."""

import re
from re import _constants as codes  # ty: ignore[import-not-found]
from re import _parser as parser  # ty: ignore[import-not-found]
from typing import Any

from paceline.errors import RequestError

_PIECE = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)|\(\?P<\w+>|\(\?.?|.", re.DOTALL)
_LETTERS = set("dDwWsSnrtfvxu")
_SPACES = r" \t\n\r\f\v"
_REPEATS = (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT)
QUICK_STATES = 256
MOST_STATES = 4096
"""Of a compiled grammar. Compiling takes time and memory by this number, and repeats within repeats multiply it."""


def rewritten(pattern: str) -> str:
    r"""The pattern for a compiler that always matches whole texts. What it would misread is refused by name.

    >>> rewritten(r"^(?P<word>a.\s[.])$")
    '(a[^\\n][ \\t\\n\\r\\f\\v][.])'
    """
    check_states(states(pattern), "the regular expression")
    pieces: list[str] = []
    in_class = False
    for found in _PIECE.finditer(pattern):
        piece, opened = found[0], in_class
        if piece[0] == "\\":
            pieces.append(_escape(piece, in_class))
            continue
        if in_class:
            in_class = piece != "]"
        elif piece == "[":
            in_class = True
            if pattern[found.end() :].removeprefix("^").startswith("]"):
                raise RequestError(r"the regular expression has a set that begins with `]`: write `\]`")
        pieces.append(piece if opened else _plain(piece, found.start() == 0, found.end() == len(pattern)))
    return "".join(pieces)


def _escape(piece: str, in_class: bool) -> str:
    letter = piece[1]
    if letter.isalnum() and letter not in _LETTERS:
        raise RequestError(f"the regular expression uses `{piece}`, which constrained output does not know")
    if letter == "s":
        return _SPACES if in_class else f"[{_SPACES}]"
    return piece


def _plain(piece: str, first: bool, last: bool) -> str:
    if piece == ".":
        return r"[^\n]"
    if piece in ("^", "$"):
        if not (first if piece == "^" else last):
            raise RequestError(
                f"the regular expression has `{piece}` inside: constrained output matches the whole text"
            )
        return ""
    if piece.startswith("(?P<"):
        return "("
    if piece.startswith("(?") and piece != "(?:":
        raise RequestError(f"the regular expression uses `{piece}`, which constrained output does not know")
    return piece


def states(pattern: str) -> int:
    """How many states a pattern has once its repeats are written out.

    >>> states("a(b|cd){2,10}"), states("a*"), states("((.{0,99}){0,99}){0,99}b")
    (31, 2, 970300)
    """
    try:
        return _states(parser.parse(pattern, re.ASCII))
    except RecursionError as error:
        raise RequestError("the regular expression nests its groups too deeply: use fewer levels") from error
    except (re.error, OverflowError) as error:
        raise RequestError(f"the regular expression is wrong: {error}") from error


def is_quick(pattern: str) -> bool:
    """Whether it is sure to be compiled in seconds: no repeat inside a repeat, and few states.

    >>> is_quick("a{3}|b*"), is_quick("(a*b)*"), is_quick(".{0,2000}")
    (True, False, False)
    """
    return states(pattern) <= QUICK_STATES and _depth(parser.parse(pattern, re.ASCII)) < 2


def check_states(count: int, what: str) -> None:
    if count > MOST_STATES:
        raise RequestError(
            f"{what} is too large: its repeats and alternatives come to {count} states, and at most {MOST_STATES} are "
            "compiled; lower the upper bounds of what repeats"
        )


def _depth(parsed: Any) -> int:
    """Repeats inside one another."""
    depth = 0
    for code, given in parsed:
        if code in _REPEATS:
            depth = max(depth, 1 + _depth(given[2]))
        elif code is codes.SUBPATTERN:
            depth = max(depth, _depth(given[-1]))
        elif code is codes.BRANCH:
            depth = max(depth, *map(_depth, given[1]))
    return depth


def _states(parsed: Any) -> int:
    return sum(_item(code, given) for code, given in parsed)


def _item(code: Any, given: Any) -> int:
    if code in _REPEATS:
        least, most, repeated = given
        return _states(repeated) * (most if most != codes.MAXREPEAT else least + 1) + (most == codes.MAXREPEAT)
    if code is codes.SUBPATTERN:
        return _states(given[-1])
    if code is codes.BRANCH:
        return sum(map(_states, given[1]))
    return 1
