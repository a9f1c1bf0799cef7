"""Converts messages for the page, and orders the turns of all seats of a self-play episode.

The record has the turns of each seat in order, and no time for a single turn. The order between seats is therefore
inferred from what they heard: a seat cannot quote words that were not said yet. Where nothing is quoted, seats speak in
rounds, and the seat that spoke more often began.

Messages are untrusted values. An image is shown only if its bytes are in the message and are of a kind that a
browser draws without running anything; every other one is named and never loaded.
"""

import base64
import binascii
import contextlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from paceline.data.sample import Ticket
from paceline.observe.record import Gone, Row, Told, ToldTurn
from paceline.observe.record.rollouts import Rollouts

MOST_TEXT = 1_000_000
"""Characters of one text that a page is sent."""
MOST_IMAGE = 8 << 20
"""Bytes of one image that a page is sent."""
RASTERS = {
    "image/png": (b"\x89PNG\r\n\x1a\n",),
    "image/jpeg": (b"\xff\xd8\xff",),
    "image/gif": (b"GIF87a", b"GIF89a"),
    "image/webp": (b"RIFF",),
}
"""Kinds of images that are drawn, and how their bytes begin."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_DATA = re.compile(r"data:([\w.+/-]+);base64,", re.ASCII)
_SHOWN = {"role", "name", "content", "tool_calls", "tool_call_id", *THOUGHTS}
_NAMED = 120

Part = dict[str, Any]


def message_view(message: Any) -> dict[str, Any]:
    """One message: its role, its parts in order, the tools it calls, and which call it answers."""
    if not isinstance(message, dict):
        return {"role": "", "parts": [_other("a message that is no object", message)], "calls": []}
    thoughts = [_text(text, "thought") for key in THOUGHTS if isinstance(text := message.get(key), str) and text]
    more = {key: value for key, value in message.items() if key not in _SHOWN and value is not None}
    others = [_other("also in this message", more)] if more else []
    calls = message.get("tool_calls")
    return {
        "role": _word(message.get("role")),
        "name": _word(message.get("name")),
        "parts": [*thoughts, *_parts(message.get("content")), *others],
        "calls": [_call(call) for call in calls] if isinstance(calls, list | tuple) else [],
        "answers": _word(message.get("tool_call_id")),
    }


def flat_text(message: Any) -> str:
    """A message as one text, to compare and to quote from."""
    view = message_view(message)
    calls = [f"{call['name']}({call['arguments']})" for call in view["calls"]]
    return "\n".join([*(part["text"] for part in view["parts"]), *calls])


def _parts(content: Any) -> list[Part]:
    if content is None or content == "":
        return []
    if isinstance(content, list | tuple):
        return [_part(part) for part in content]
    return [_text(content) if isinstance(content, str) else _other("content that is no text", content)]


def _part(part: Any) -> Part:
    if isinstance(part, str):
        return _text(part)
    if not isinstance(part, dict):
        return _other("a part that is no object", part)
    if isinstance(part.get("text"), str):
        return _text(part["text"])
    kind = _word(part.get("type"))
    if "image" in kind:
        return _image(_source(part))
    return _other(f"a part of type {kind or 'unknown'}", {key: value for key, value in part.items() if key != "type"})


def _source(part: dict[str, Any]) -> str:
    """Where an image comes from, in the ways in which APIs write it."""
    for key in ("image_url", "image", "source", "url"):
        match part.get(key):
            case str(place):
                return place
            case {"url": str(place)}:
                return place
            case {"data": str(data), "media_type": str(kind)}:
                return f"data:{kind};base64,{data}"
    return ""


def _image(source: str) -> Part:
    found = _DATA.match(source)
    if found is None:
        where = _short(source.partition(",")[0]) if source else "nowhere"
        return {"kind": "unshown", "text": f"an image at {where}, which is not loaded"}
    kind, data = found[1].lower(), source[found.end() :]
    if kind not in RASTERS:
        return {"kind": "unshown", "text": f"an image of type {kind}, which is not drawn here"}
    if len(data) > MOST_IMAGE * 4 // 3:
        return {"kind": "unshown", "text": f"an image of {len(data) * 3 >> 22} MiB, which is too large for this page"}
    try:
        raw = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raw = b""
    if not raw.startswith(RASTERS[kind]):
        return {"kind": "unshown", "text": f"something that calls itself {kind} and is not"}
    return {"kind": "image", "text": f"image, {kind}, {len(raw):,} bytes", "source": f"data:{kind};base64,{data}"}


def _call(call: Any) -> dict[str, str]:
    """A call, its arguments with a line for each if they are JSON, otherwise as they were written."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return {"name": "", "arguments": _json(call), "id": ""}
    value = given = function.get("arguments")
    if isinstance(given, str):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(given)
    text = given[:MOST_TEXT] if isinstance(given, str) and not isinstance(value, dict | list) else _json(value)
    return {"name": _word(function.get("name")), "arguments": text, "id": _word(call.get("id"))}


def _text(text: str, kind: str = "text") -> Part:
    left = len(text) - MOST_TEXT
    return {"kind": kind, "text": text[:MOST_TEXT]} | ({"left_out": left} if left > 0 else {})


def _other(what: str, value: Any) -> Part:
    return {"kind": "other", "what": what, "text": _json(value)}


def _json(value: Any) -> str:
    try:
        return json.dumps(value, indent=1, ensure_ascii=False, default=str)[:MOST_TEXT]
    except (ValueError, TypeError, RecursionError):
        return str(type(value).__name__)


def _word(value: Any) -> str:
    return "" if value is None else _short(str(value))


def _short(text: str) -> str:
    return text if len(text) <= _NAMED else f"{text[:_NAMED]}…"


MOST_CONVERSATIONS = 20
"""Conversations of one rollout that a page can hold, the latest ones."""


def conversations(rollout: Told) -> dict[str, Any]:
    """The conversations with their messages, and how many there are. The policy's replies carry facts of their turn."""
    if not rollout.turns:
        found = [{"messages": [message_view(message) for message in rollout.messages]}] if rollout.messages else []
        return {"total": len(found), "shown": found}
    last = ends(rollout.turns)
    return {"total": len(last), "shown": [_conversation(at, rollout.turns) for at in last[-MOST_CONVERSATIONS:]]}


def ends(turns: Sequence[ToldTurn]) -> list[int]:
    """Turns that no later one goes on from."""
    whole = [_whole(turn) for turn in turns]

    def goes_on(at: int) -> bool:
        mine = whole[at]
        return any(later.messages is not None and later.messages[: len(mine)] == mine for later in turns[at + 1 :])

    return [at for at, turn in enumerate(turns) if turn.messages is None or not goes_on(at)]


def _conversation(last: int, turns: Sequence[ToldTurn]) -> dict[str, Any]:
    ending = turns[last]
    if ending.messages is None:
        reply = message_view(ending.message) | {"turn": turn_facts(last, ending)}
        return {"prompt_tokens": len(ending.prompt_ids), "messages": [reply]}
    whole = _whole(ending)
    spoken = {}
    for at, turn in enumerate(turns[: last + 1]):
        if turn.messages is not None and whole[: len(turn.messages) + 1] == _whole(turn):
            spoken[len(turn.messages)] = turn_facts(at, turn)
    messages = [
        message_view(message) | ({"turn": spoken[at]} if at in spoken else {}) for at, message in enumerate(whole)
    ]
    return {"messages": messages, "tools": [_tool(tool) for tool in ending.tools or ()]}


def turn_facts(at: int, turn: ToldTurn) -> dict[str, Any]:
    """The facts of one reply: its policy versions, its length, and why it ended."""
    return {
        "number": at + 1,
        "tokens": len(turn.completion_ids),
        "prompt": len(turn.prompt_ids),
        "finish": turn.finish,
        "temperature": turn.temperature,
        "versions": sorted(set(turn.versions.tolist())),
    }


def _whole(turn: ToldTurn) -> list[Any]:
    return [*(turn.messages or ()), turn.message]


def _tool(tool: Any) -> dict[str, str]:
    function = tool.get("function") if isinstance(tool, dict) else None
    function = function if isinstance(function, dict) else {}
    return {"name": str(function.get("name") or "?"), "description": str(function.get("description") or "")}


MOST_SEATS = 32
_SHORT = 40


@dataclass(frozen=True)
class EpisodeTurn:
    """One turn: what this seat heard since its last one, and what it said."""

    heard: list[Any]
    turn: ToldTurn


def episode_story(rollouts: Rollouts, index: int) -> dict[str, Any]:
    """The seats with what they earned, and all their turns in one line."""
    rows = [rollouts.row(at) for at in rollouts.episode(index)]
    seats = [_read(rollouts, row) for row in rows[:MOST_SEATS]]
    spoken = [_spoken(one.turns) for one in seats]
    line = []
    for seat, at in order_turns(spoken, _after(seats)):
        one = spoken[seat][at]
        reply = message_view(one.turn.message) | {"turn": turn_facts(at, one.turn)}
        line.append({"seat": seat, "heard": [message_view(message) for message in one.heard], "said": reply})
    return {
        "seats": [{"row": o.row, "parent": o.parent, "metrics": o.metrics, "error": o.error} for o in seats],
        "line": line,
        "total": len(rows),
        "absent": _absent(rollouts, rows),
    }


def _read(rollouts: Rollouts, row: Row) -> Told:
    """A seat; one whose contents are lost has its row and says so."""
    try:
        return rollouts.get(row.index)
    except Gone as error:
        return Told(row=row, ticket=Ticket(row.ticket, row.env, 0, 0, row.row), reward=row.reward, error=str(error))


def order_turns(spoken: Sequence[Sequence[EpisodeTurn]], after: Sequence[int | None]) -> list[tuple[int, int]]:
    """Seat and turn, the earliest first. `after` is the seat whose first turn one must wait for, if any."""
    heard = [["\n".join(flat_text(message) for message in one.heard) for one in seat] for seat in spoken]
    taken = [0] * len(spoken)
    order: list[tuple[int, int]] = []

    @cache
    def quoted(seat: int, at: int, other: int, words: int) -> bool:
        return is_quoted(heard[seat][at], spoken[other][words].turn.text)

    def waits(seat: int) -> bool:
        parent = after[seat]
        if parent is not None and not taken[parent] and spoken[parent]:
            return True
        return any(quoted(seat, taken[seat], other, taken[other]) for other in open_seats if other != seat)

    while open_seats := [seat for seat in range(len(spoken)) if taken[seat] < len(spoken[seat])]:
        free = [seat for seat in open_seats if not waits(seat)] or open_seats
        seat = min(free, key=lambda seat: (taken[seat], -len(spoken[seat]), seat))
        order.append((seat, taken[seat]))
        taken[seat] += 1
    return order


def is_quoted(heard: str, words: str) -> bool:
    """Whether these words were heard as such; short ones must not be a part of others."""
    words = words.strip()
    if len(words) > _SHORT:
        return words in heard
    return bool(words) and re.search(rf"(?<!\w){re.escape(words)}(?!\w)", heard) is not None


def _spoken(turns: Sequence[ToldTurn]) -> list[EpisodeTurn]:
    """What is new in each turn's prompt: all messages behind those of the turn before it and its reply."""
    found: list[EpisodeTurn] = []
    before: list[Any] = []
    for turn in turns:
        messages = turn.messages or []
        goes_on = messages[: len(before)] == before
        found.append(EpisodeTurn(messages[len(before) :] if goes_on else messages, turn))
        before = [*messages, turn.message]
    return found


def _after(seats: Sequence[Told]) -> list[int | None]:
    """For each seat that another one's episode started, the place of that one. Of seats that share an actor the record
    has no names, so the first of them stands for all."""
    actors = [one.row.actor for one in seats]
    parents = [one.parent.partition("#")[0] for one in seats]
    return [
        actors.index(parent) if parent in actors and actors.index(parent) != at else None
        for at, parent in enumerate(parents)
    ]


def _absent(rollouts: Rollouts, rows: Sequence[Row]) -> list[str]:
    """Actors who sit in other episodes of this group and not in this one."""
    mine = {(row.actor, row.kind) for row in rows}
    kinds = {row.kind for row in rows}
    mates = [rollouts.row(at) for at in rollouts.mates(rows[0].index)]
    return sorted({row.actor for row in mates if row.kind in kinds and (row.actor, row.kind) not in mine})
