"""Regular expressions as Python reads them (`re.fullmatch` with `re.ASCII`), rewritten for a grammar compiler."""

import re

from paceline.inference.base import RequestError

_PIECE = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)|\(\?P<\w+>|\(\?.?|.", re.DOTALL)
_LETTERS = set("dDwWsSnrtfvxu")
_SPACES = r" \t\n\r\f\v"


def rewritten(pattern: str) -> str:
    r"""The pattern for a compiler that always matches whole texts. What it would misread is refused by name.

    >>> rewritten(r"^(?P<word>a.\s[.])$")
    '(a[^\\n][ \\t\\n\\r\\f\\v][.])'
    """
    try:
        re.compile(pattern, re.ASCII)
    except (re.error, OverflowError, RecursionError) as error:
        raise RequestError(f"the regular expression is wrong: {error}") from error
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
