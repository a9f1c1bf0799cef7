"""What was said in a rollout, as one text to search in."""

from collections.abc import Iterable, Iterator
from typing import Any

from paceline.record.odd import clean

MOST_TEXT = 1 << 20
"""Bytes of one rollout that can be searched; its body keeps the rest."""


def fold(text: str) -> bytes:
    """As the text file has it: capitals play no part in a search."""
    try:
        return text.casefold().encode()
    except UnicodeEncodeError:
        return clean(text).casefold().encode()


def pieces(messages: Iterable[Any]) -> Iterator[str]:
    """Every text of these messages: contents, and the tool calls with their arguments."""
    for message in messages:
        if not isinstance(message, dict):
            continue
        content = message.get("content")
        if type(content) is str:
            yield content
        elif isinstance(content, list | tuple):
            yield from _parts(content)
        if calls := message.get("tool_calls"):
            yield from _calls(calls)


def has_images(messages: Iterable[Any]) -> bool:
    """Whether a message holds a part that is not text."""
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if type(content) is str or not isinstance(content, list | tuple):
            continue
        if any(isinstance(part, dict) and part.get("type") != "text" for part in content):
            return True
    return False


def _parts(content: Iterable[Any]) -> Iterator[str]:
    for part in content:
        if isinstance(part, str):
            yield part
        elif isinstance(part, dict) and isinstance(text := part.get("text"), str):
            yield text


def _calls(calls: Any) -> Iterator[str]:
    for call in calls if isinstance(calls, list | tuple) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            yield f"{function.get('name')} {function.get('arguments')}"
