"""The text of a rollout's messages, case-folded for search."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from paceline.record.sanitize import clean

MOST_TEXT = 1 << 20
"""Bytes of one rollout that can be searched; its body keeps the rest."""

_PLAIN = bytes(range(128))
_RARE = 8


def fold(text: str) -> bytes:
    """As the text file has it: capitals play no part in a search, in any alphabet."""
    if text.isascii():
        return text.lower().encode()
    try:
        data = text.encode()
    except UnicodeEncodeError:
        return clean(text).casefold().encode()
    # Python folds letter by letter as soon as one is not plain, and mostly those are a few dashes without capitals.
    if _RARE * (len(data) - len(text)) <= len(text):
        others = data.translate(None, _PLAIN).decode()
        if others.casefold() == others:
            return data.lower()
    return text.casefold().encode()


def lines(texts: Sequence[str]) -> bytes:
    """Several texts, folded, each with its end of line; one that is empty has none."""
    whole = "\n".join(filter(None, texts)) + "\n"
    if whole.isascii():
        return whole.lower().encode()
    return b"\n".join([*map(fold, filter(None, texts)), b""])


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
