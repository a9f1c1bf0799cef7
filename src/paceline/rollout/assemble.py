"""Tells which turns go on from which: by their words while an episode is played, by their tokens for the samples.

A turn whose conversation begins with recorded ones keeps their tokens (`TurnIndex`). Turns that extend one another
token for token share a sample (`assemble`).
"""

import json
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import numpy as np

from paceline.data import Sample
from paceline.data.rollout import (
    Message,
    PackedTurn,
    Rollout,
    Tools,
    Turn,
    all_equal,
    is_text,
    message_text,
    pack_floats,
    pack_ids,
    pack_versions,
)
from paceline.data.sample import unchecked_sample


def assemble(rollout: Rollout) -> list[Sample]:
    """Samples that hold every sampled token exactly once as trained; in later branches it is only context."""
    return [_sample(thread, rollout) for thread in threads(rollout.turns)]


@dataclass(slots=True)
class Thread:
    tokens: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)

    def add(self, turn: Turn) -> None:
        self.tokens += turn.prompt_ids[len(self.tokens) :]
        start = len(self.tokens)
        self.tokens += turn.completion_ids
        self.turns.append(turn)
        self.spans.append((start, len(self.tokens)))


def threads(turns: Sequence[Turn]) -> list[Thread]:
    """Each turn joins the longest thread whose tokens its prompt repeats from the first to the last. Of two turns that
    go on from the same place the later one starts anew: there the common past is context and trains no second time."""
    threads: list[Thread] = []
    for turn in turns:
        fitting = [thread for thread in threads if _starts_with(turn.prompt_ids, thread.tokens)]
        thread = max(fitting, key=lambda thread: len(thread.tokens)) if fitting else None
        if thread is None:
            threads.append(thread := Thread())
        thread.add(turn)
    return threads


def count_rewritten_turns(turns: Sequence[Turn]) -> int:
    """Turns that go on from something said before while their prompt does not repeat its tokens: the chat template, or
    the code that wrote the prompt, changed the past, and a new sample had to be started.

    A turn that goes on exactly from any turn before it is a branch, and one that goes on from none is a new
    conversation; both start samples too, and neither rewrites anything.
    """
    return sum(_rewrites_history(turn, turns[:place]) for place, turn in enumerate(turns) if place)


def _rewrites_history(turn: Turn, earlier: Sequence[Turn]) -> bool:
    """Whether a turn claims to go on from one of the earlier ones, and exactly from none."""
    prompt, claims = turn.prompt_ids, False
    for past in reversed(earlier):
        length = len(past.prompt_ids)
        if len(prompt) > length and prompt[:length] == past.prompt_ids:
            completion = past.completion_ids
            if prompt[length : length + len(completion)] == completion:
                return False
            claims = True
    return claims or (turn.messages is not None and _count_replies(turn) > _count_replies(earlier[0]))


def _count_replies(turn: Turn) -> int:
    """Messages of the assistant in a prompt; the first prompt's are all the environment's."""
    return sum(message.get("role") == "assistant" for message in turn.messages or ())


def _starts_with(prompt: list[int], tokens: list[int]) -> bool:
    """Whether the prompt begins with these tokens. Most that do not differ at the end already."""
    length = len(tokens)
    return prompt[length - 1 : length] == tokens[-1:] and prompt[:length] == tokens


def _sample(thread: Thread, rollout: Rollout) -> Sample:
    """Most tokens are context, which is the same for all: only what was sampled is written one by one."""
    length, turn_spans, is_plain = len(thread.tokens), list(zip(thread.turns, thread.spans, strict=True)), True
    mask, logprobs = np.zeros(length, np.bool_), np.zeros(length, np.float32)
    versions, temperatures = np.full(length, -1, np.int32), np.ones(length, np.float32)
    for turn, (start, end) in turn_spans:
        mask[start:end] = True
        if turn.temperature:
            temperatures[start:end] = turn.temperature
    try:
        packed = pack_ids(thread.tokens)
        tokens = np.frombuffer(packed, np.int32).astype(np.int64)
        for turn, (start, end) in turn_spans:
            logprob_bytes, version = pack_floats(turn.logprobs), pack_versions(turn.versions)
            logprobs[start:end] = np.frombuffer(logprob_bytes, np.float32)
            versions[start:end] = np.frombuffer(version, np.int32) if isinstance(version, bytes) else version
            turn.pack(PackedTurn(packed, start, end, logprob_bytes, version, (tokens, logprobs, temperatures)))
            is_plain &= start > 0 and not isinstance(version, bytes) and version >= 0 and turn.temperature >= 0
    except (OverflowError, TypeError):  # numbers of an engine of the user's own, which numpy may still take
        tokens, is_plain = np.array(thread.tokens, np.int64), False
        for turn, (start, end) in turn_spans:
            logprobs[start:end] = turn.logprobs
            versions[start:end] = turn.versions
    for stream in (tokens, logprobs, temperatures):
        stream.flags.writeable = False
    kv_kept = None
    for turn, (start, end) in () if is_plain else turn_spans:
        # The weights changed under it, and its cache stayed as it was.
        if not turn.recomputed and start < end and not all_equal(turn.versions):
            kv_kept = np.zeros(length, np.bool_) if kv_kept is None else kv_kept
            kv_kept[start:end] = versions[start:end] != versions[start]
    build = (
        unchecked_sample if is_plain else Sample
    )  # nearly all are plain, and checking one costs as much as making it
    return build(
        token_ids=tokens,
        loss_mask=mask,
        logprobs=logprobs,
        versions=versions,
        temperatures=temperatures,
        kv_kept=kv_kept,
        ended="truncated" if thread.turns[-1].finish == "length" else "terminated",
        env=rollout.env,
        ticket=rollout.ticket,
        rollout=rollout.member,
        spans=tuple(thread.spans),
    )


_IGNORED_KEYS = frozenset(
    ["id", "tool_call_id", "tool_calls", "content", "role", "refusal", "annotations", "audio", "function_call"]
)
"""Keys that are compared separately, or that clients add to messages."""

MAX_PROMPT_TEXTS = 4
MAX_CACHED_CALL_CHARS = 1024


@dataclass(slots=True)
class RecordedTurn:
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
        self._hash.update(canonical_text(message).encode(errors="surrogatepass"))
        return self._hash.digest()


def same_conversation(ours: Sequence[Message], theirs: Sequence[Message]) -> bool:
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
