"""Finds the recorded turn that a conversation goes on from."""

import json
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from paceline.data.rollout import Message, Turn, is_text

Tools = Sequence[dict[str, Any]]

_IGNORED_KEYS = {
    "id",
    "tool_call_id",
    "tool_calls",
    "content",
    "role",
    "refusal",
    "annotations",
    "audio",
    "function_call",
}
"""Keys that are compared separately, or that clients add to messages."""

MAX_PROMPT_TEXTS = 4
"""Prompt texts that are kept per seat."""
MAX_CACHED_CALL_CHARS = 1024
"""Longest tool call whose canonical form is cached."""


@dataclass(slots=True)
class RecordedTurn:
    """A turn, and the text of its prompt while that is kept."""

    turn: Turn
    prompt_text: str | None


class TurnIndex:
    """Finds turns by what was said up to their end: the longest beginning of a conversation that was recorded.

    Messages are equal when they say the same: missing and empty content, JSON text and parsed tool arguments, and the
    numbers clients give to tool calls make no difference. Whether the recorded tokens can be continued is not decided
    here but by the template (`Renderer.render_continuation`).
    """

    def __init__(self) -> None:
        self._turns: dict[bytes, RecordedTurn] = {}
        self._with_text: deque[RecordedTurn] = deque()

    def add(self, turn: Turn, prompt_text: str, prefixes: "PrefixHashes") -> None:
        """Remember a turn, and for a while the text of its prompt: most conversations go on from where they are.

        `prefixes` is the conversation up to the turn as `find` read it, which need not be read twice.
        """
        self._turns[prefixes.append(turn.message)] = past = RecordedTurn(turn, prompt_text)
        self._with_text.append(past)
        if len(self._with_text) > MAX_PROMPT_TEXTS:
            self._with_text.popleft().prompt_text = None

    def find(self, messages: Sequence[Message], tools: Tools | None) -> tuple[RecordedTurn | None, "PrefixHashes"]:
        """The turn to go on from, if there is one, and the conversation as it was read."""
        prefixes = PrefixHashes(messages, tools)
        known = (self._turns[digest] for digest in reversed(prefixes.digests) if digest in self._turns)
        return next(known, None), prefixes


class PrefixHashes:
    """A digest of each prefix of a conversation, shortest first."""

    def __init__(self, messages: Sequence[Message], tools: Tools | None) -> None:
        spelled = json.dumps(list(tools), sort_keys=True, default=str) if tools else "[]"
        self._hash = blake2b(spelled.encode(), digest_size=16)
        self.digests = [self.append(message) for message in messages]

    def append(self, message: Message) -> bytes:
        """Add a message and return the digest of the longer prefix."""
        self._hash.update(canonical_text(message).encode(errors="surrogatepass"))
        return self._hash.digest()


def same_conversation(ours: Sequence[Message], theirs: Sequence[Message]) -> bool:
    """Whether two conversations are equal in their canonical texts."""
    return len(ours) == len(theirs) and all(
        a == b or canonical_text(a) == canonical_text(b) for a, b in zip(ours, theirs, strict=True)
    )


def canonical_text(message: Message) -> str:
    """A text that is equal for equivalent messages. The lengths delimit its parts.

    >>> call = {"id": "a", "function": {"name": "add", "arguments": '{"x":1}'}}
    >>> canonical_text({"role": "assistant", "content": None, "tool_calls": [call]})
    'assistant 0 25 [[["add", {"x": 1}]], {}] '
    >>> canonical_text({"role": "user", "content": "hello", "name": None})
    'user 5 0  hello'
    """
    role, text, more = message.get("role"), message_text(message), ""
    if not is_text(message):
        calls = ", ".join([_canonical_call(call) for call in message.get("tool_calls") or ()])
        rest = {key: value for key, value in message.items() if key not in _IGNORED_KEYS and value is not None}
        more = f"[[{calls}], {_json(rest) if rest else '{}'}]" if calls or rest else ""
    return f"{'system' if role == 'developer' else role} {len(text)} {len(more)} {more} {text}"


def message_text(message: Message) -> str:
    """The text of a message's content, also when it comes in parts."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _canonical_call(call: dict[str, Any]) -> str:
    function = call.get("function", call)
    name, arguments = function.get("name"), function.get("arguments", {})
    if not isinstance(arguments, str):
        return _json([name, arguments])
    known = type(name) is type(arguments) is str and len(name) + len(arguments) <= MAX_CACHED_CALL_CHARS
    return _cached_call(name, arguments) if known else _parsed_call(name, arguments)


def _parsed_call(name: Any, arguments: str) -> str:
    parsed: Any = arguments
    with suppress(ValueError, RecursionError):
        parsed = json.loads(arguments)
    return _json([name, parsed])


_cached_call = lru_cache(maxsize=4096)(_parsed_call)
"""A call stays in its conversation, and is read again at each turn of it."""


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
