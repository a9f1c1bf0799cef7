"""Which recorded turn a conversation goes on from."""

import json
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from paceline.rollout.types import Message, Turn

Tools = Sequence[dict[str, Any]]

_UNSAID = {"id", "tool_call_id", "tool_calls", "content", "role", "refusal", "annotations", "audio", "function_call"}
"""Keys that are compared otherwise, or that clients add to what was said."""

TEXTS = 4
"""Prompts kept as text, per seat."""


@dataclass(slots=True)
class Past:
    """A turn, and the text of its prompt while that is kept."""

    turn: Turn
    opening: str | None


class History:
    """Finds turns by what was said up to their end: the longest beginning of a conversation that was recorded.

    Messages are equal when they say the same: missing and empty content, JSON text and parsed tool arguments, and the
    numbers clients give to tool calls make no difference. Whether the recorded tokens can be continued is not decided
    here but by the template (`Renderer.extend`).
    """

    def __init__(self) -> None:
        self._turns: dict[bytes, Past] = {}
        self._with_text: deque[Past] = deque()

    def add(self, turn: Turn, opening: str | None = None) -> None:
        """Remember a turn, and for a while the text of its prompt: most conversations go on from where they are."""
        if turn.messages is not None:
            *_, last = _prefixes([*turn.messages, turn.message], turn.tools)
            self._turns[last] = past = Past(turn, opening)
            self._with_text.append(past)
            if len(self._with_text) > TEXTS:
                self._with_text.popleft().opening = None

    def find(self, messages: Sequence[Message], tools: Tools | None) -> Past | None:
        if not self._turns:
            return None
        found = None
        for prefix in _prefixes(messages, tools):
            found = self._turns.get(prefix, found)
        return found


def _prefixes(messages: Sequence[Message], tools: Tools | None) -> Iterator[bytes]:
    """A digest of each beginning of the conversation, shortest first."""
    chain = blake2b(json.dumps(list(tools or []), sort_keys=True, default=str).encode(), digest_size=16)
    for message in messages:
        chain.update(meaning(message).encode(errors="surrogatepass"))
        yield chain.digest()


def same(ours: Sequence[Message], theirs: Sequence[Message]) -> bool:
    """Whether two conversations say the same."""
    return len(ours) == len(theirs) and all(
        a == b or meaning(a) == meaning(b) for a, b in zip(ours, theirs, strict=True)
    )


def meaning(message: Message) -> str:
    """A message as text that is equal when the messages say the same. The lengths keep neighbours apart.

    >>> call = {"id": "a", "function": {"name": "add", "arguments": '{"x":1}'}}
    >>> meaning({"role": "assistant", "content": None, "tool_calls": [call]})
    'assistant 0 25 [[["add", {"x": 1}]], {}] '
    >>> meaning({"role": "user", "content": "hello", "name": None})
    'user 5 0  hello'
    """
    calls = [_called(call) for call in message.get("tool_calls") or ()]
    rest = {key: value for key, value in message.items() if key not in _UNSAID and value is not None}
    more = json.dumps([calls, rest], sort_keys=True, default=str) if calls or rest else ""
    role, text = message.get("role"), message_text(message)
    return f"{'system' if role == 'developer' else role} {len(text)} {len(more)} {more} {text}"


def message_text(message: Message) -> str:
    """The text of a message's content, also when it comes in parts."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _called(call: dict[str, Any]) -> tuple[Any, Any]:
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return function.get("name"), arguments
