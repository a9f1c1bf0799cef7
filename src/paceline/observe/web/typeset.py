"""Typesets formulas written in TeX as outlines of their letters, with matplotlib's mathtext, which knows no macros,
files or programs. What it does not know stays as it was written."""

import re
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, lru_cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from matplotlib.font_manager import FontProperties
    from numpy.typing import NDArray

SIZE = 100
"""Units of an outline to the em."""
MOST_TEX, MOST_DEPTH = 400, 12
"""Characters of a formula and braces within braces: mathtext reads what is nested by recursion."""
MOST_SECONDS = 2.0
"""Time of the processor that the formulas of one answer may take; those that come later stay as they were written."""
_LETTERS = {1: "M", 2: "L", 3: "Q", 4: "C", 79: "Z"}
_SYNONYMS = (
    (r"\\(?:displaystyle|textstyle|limits|[bB]igg?[lr]?)(?![a-zA-Z])", ""),
    (r"\\le(?![a-zA-Z])", r"\\leq"),
    (r"\\ge(?![a-zA-Z])", r"\\geq"),
    (r"\\lt(?![a-zA-Z])", "<"),
    (r"\\gt(?![a-zA-Z])", ">"),
    (r"\\(?:implies|Longrightarrow)(?![a-zA-Z])", r"\\Rightarrow"),
    (r"\\iff(?![a-zA-Z])", r"\\Leftrightarrow"),
    (r"\\[td]?frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
    (r"\\tfrac(?![a-zA-Z])", r"\\frac"),
    (r"\\textbf(?![a-zA-Z])", r"\\mathbf"),
    (r"\\textit(?![a-zA-Z])", r"\\mathit"),
    (r"\\bmod(?![a-zA-Z])", r"\\ \\mathrm{mod}\\ "),
    (r"\\pmod\s*\{([^{}]*)\}", r"\\ (\\mathrm{mod}\\ \1)"),
    (r"\\\\", " "),
    (r"\s+", " "),
)
"""Names that mathtext lacks, by what it has in their place."""


class Outline(NamedTuple):
    """A formula as a path of SVG, `SIZE` units to the em, with its size in em."""

    path: str
    width: float
    ascent: float
    depth: float


_spent: ContextVar[list[float] | None] = ContextVar("seconds spent on formulas", default=None)
_lock = threading.Lock()


@contextmanager
def limit_typesetting() -> Generator[None]:
    """Within this context formulas take `MOST_SECONDS` together."""
    token = _spent.set([0.0])
    try:
        yield
    finally:
        _spent.reset(token)


def typeset(tex: str) -> Outline | None:
    """The outline of a formula without its dollars, or None where it is not known how to draw it."""
    if not tex.strip() or "$" in tex.replace(r"\$", "") or len(tex) > MOST_TEX or _depth(tex) > MOST_DEPTH:
        return None
    spent = _spent.get()
    if spent is not None and spent[0] > MOST_SECONDS:
        return None
    with _lock:  # its parser is one for all
        _draw("x")  # the first formula of a process reads grammar and fonts
        began = time.thread_time()
        found = _draw(tex)
    if spent is not None:
        spent[0] += time.thread_time() - began
    return found


def _depth(tex: str) -> int:
    depth = most = 0
    for letter in tex:
        depth += (letter == "{") - (letter == "}")
        most = max(most, depth)
    return most


@cache
def _font() -> "FontProperties":
    from matplotlib.font_manager import FontProperties  # half a second, and most runs have no formula

    return FontProperties(math_fontfamily="dejavuserif", size=SIZE)


@lru_cache(4096)
def _draw(tex: str) -> Outline | None:
    from matplotlib.path import Path
    from matplotlib.textpath import TextPath, text_to_path

    for pattern, instead in _SYNONYMS:
        tex = re.sub(pattern, instead, tex)
    text = f"${tex.strip()}$"
    try:
        path = TextPath((0, 0), text, size=SIZE, prop=_font())
        width, height, depth = text_to_path.get_text_width_height_descent(text, _font(), ismath=True)
    except (ValueError, RecursionError, AttributeError):  # the last of a formula without a letter
        return None
    parts = [
        _LETTERS[int(code)] + ("" if code == Path.CLOSEPOLY else " ".join(_coordinates(points)))
        for points, code in path.iter_segments(simplify=False, curves=True)
    ]
    return Outline("".join(parts), *(round(float(value) / SIZE, 3) for value in (width, height - depth, depth)))


def _coordinates(points: "NDArray") -> Iterator[str]:
    """In SVG y grows downwards."""
    return (str(round(-value if at % 2 else value)) for at, value in enumerate(points.tolist()))
