"""Formats counts, scores, durations and paths as short text."""

import re
from collections.abc import Mapping
from pathlib import Path

CONTROL_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | dict.fromkeys(
    range(0x7F, 0xA0), 0xFFFD
)
"""For `str.translate`: text of models and data may hold escape sequences, which must not reach a terminal."""


def format_count(value: float) -> str:
    """842, 4.1k, 135M."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        # 999_950 would round up to "1000k".
        if abs(value) >= 0.9995 * size:
            scaled = value / size
            return f"{scaled:.0f}{letter}" if abs(scaled) >= 99.95 else f"{scaled:.1f}{letter}"
    return f"{value:.0f}"


def format_score(value: float, digits: int = 3) -> str:
    """A reward: 0.612, -3.250, 12345."""
    return f"{value:.{digits}f}" if abs(value) < 1000 else f"{value:.0f}"


def format_change(first: float, last: float, digits: int = 3) -> str:
    """+0.372. A difference that rounds to nothing has no sign."""
    text = format_score(last - first, digits)
    return text.lstrip("-") if float(text) == 0 else f"{float(text):+.{digits}f}"


def format_seconds(value: float) -> str:
    """0.31 s, 21 s, 4 min 10 s, 3 h 05 min."""
    if value < 9.995:
        return f"{value:.2f} s"
    whole = round(value)
    if whole < 120:
        return f"{whole} s"
    if whole < 2 * 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def format_clock(value: float) -> str:
    """0:07, 12:40, 3:05:00."""
    minutes, second = divmod(max(0, round(value)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def format_amount(value: float, unit: str) -> str:
    """1 step, 2 steps."""
    return f"{format_count(value)} {unit}" + ("" if value == 1 else "s")


def format_reasons(dropped: Mapping[str, int], separator: str = ", ") -> str:
    """12 zero advantage, 3 stale."""
    shown = sorted(((number, reason) for reason, number in dropped.items() if number), reverse=True)
    return separator.join(f"{number} {reason.replace('_', ' ')}" for number, reason in shown)


_paths_as_written: dict[str, str] = {}
"""Absolute paths of folders, and how the user wrote them."""


def register_path(folder: str) -> str:
    """The folder's absolute path, valid also after user code changes the working directory. `restore_paths` turns it
    back into what the user wrote."""
    absolute = str(Path(folder).absolute())
    _paths_as_written[absolute] = folder
    return absolute


def restore_paths(text: object) -> str:
    """The text with such folders as the user wrote them: `runs/quickstart`."""
    out = str(text)
    for absolute, folder in _paths_as_written.items():
        out = re.sub(rf"(?<![\w/.~-]){re.escape(absolute)}(?![\w.~-])", lambda _, f=folder: f, out)
    return out


def one_line(value: str) -> str:
    return " ".join(value.split())
