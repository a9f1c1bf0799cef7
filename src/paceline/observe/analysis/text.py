"""Formats figures, times and events, and makes text of models and files safe to print."""

import math
import time
import unicodedata
from collections.abc import Mapping
from typing import Any

from paceline.observe.monitor.text import format_seconds, one_line

BIDI_AND_BREAKS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u2028\u2029")
"""Characters that reverse what stands behind them, or break a line invisibly."""


def escape_control_chars(text: str, keep: str = "") -> str:
    """The text with control characters spelled out, as in `\\x1b[31m`; those in `keep` stay."""
    if text.isprintable():
        return text

    def acts(char: str) -> bool:
        return char not in keep and (char in BIDI_AND_BREAKS or unicodedata.category(char) in ("Cc", "Cs"))

    return "".join(char.encode("unicode_escape").decode("ascii") if acts(char) else char for char in text)


def safe_line(value: Any, most: int = 400) -> str:
    """Anything as one harmless line."""
    text = escape_control_chars(one_line(str(value)))
    return text if len(text) <= most else text[: most - 1] + "…"


def format_value(value: object) -> str:
    """A figure of a rollout; what another program wrote in its place is shown as text."""
    return format_number(value) if value is None or isinstance(value, int | float) else safe_line(value, 60)


def format_number(value: float | None) -> str:
    """0.612, 0.0004, 12,300: as many digits as a reader can use."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 1000 or float(value).is_integer():
        return f"{value:,.0f}"
    if abs(value) >= 100:
        return f"{value:.1f}"
    return f"{value:.3f}" if abs(value) >= 0.1 else f"{value:.2g}"


def format_four_digits(value: float) -> str:
    """Four digits, or all of a large number, with a real minus, as formulas show it."""
    return (f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}").replace("-", "−")


def format_whole_seconds(value: float) -> str:
    """4 s, 3 min 05 s: a time in whole seconds."""
    if not math.isfinite(value):
        return "an unknown time"
    return format_seconds(value) if value >= 9.5 else f"{max(0, round(value))} s"


def format_timestamp(stamp: Any) -> str:
    """2026-11-16 08:46:25, in local time; the stamp itself where it is out of range, nothing where it is no number."""
    if not isinstance(stamp, int | float):
        return ""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(stamp))
    except (OverflowError, ValueError, OSError):
        return str(stamp)


def event_text(event: Mapping[str, Any]) -> str:
    """An event of `events.jsonl` in words."""
    match event.get("event"):
        case "begin":
            start = event.get("start_step")
            where = f"goes on from step {start}" if start else "starts"
            return safe_line(f"{where}, {event.get('total_steps', '?')} steps on {event.get('device', '?')}")
        case "end":
            message = event.get("message")
            return safe_line(f"{event.get('status')} at step {event.get('step')}" + (f": {message}" if message else ""))
        case "roll_back":
            return safe_line(f"back to step {event.get('step')}")
    rest = {key: value for key, value in event.items() if key not in ("time", "event")}
    return safe_line(event.get("text", rest))
