"""Converts messages for the page, and orders the turns of all seats of a self-play episode.

The record has the turns of each seat in order, and no time for a single turn. The order between seats is therefore
inferred from what they heard: a seat cannot quote words that were not said yet. Where nothing is quoted, seats speak in
rounds, and the seat that spoke more often began.

Messages are untrusted values. An image is shown only if its bytes are in the message and are of a kind that a
browser draws without running anything; every other one is named and never loaded.
"""

import base64
import contextlib
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

from paceline.data.sample import Ticket
from paceline.observe.record import RolloutNotFound, Row, StoredRollout, StoredTurn
from paceline.observe.record.rollouts import Rollouts
from paceline.observe.web.markup import render
from paceline.observe.web.typeset import limit_typesetting

MOST_TEXT, MOST_IMAGE = 1_000_000, 8 << 20
"""Characters of one text, and bytes of one image, that a page is sent."""
IMAGE_SIGNATURES = {
    "image/png": b"\x89PNG\r\n\x1a\n",
    "image/jpeg": b"\xff\xd8\xff",
    "image/gif": (b"GIF87a", b"GIF89a"),
    "image/webp": b"RIFF",
}
"""Kinds of images that are drawn, and how their bytes begin."""
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_DATA_URL = re.compile(r"data:([\w.+/-]+);base64,", re.ASCII)
_KNOWN_KEYS = {"role", "name", "content", "tool_calls", "tool_call_id", *REASONING_KEYS}
_MOST_NAME = 120

Part = dict[str, Any]


def _render(view: dict[str, Any]) -> dict[str, Any]:
    """Adds a tree to each text that has something to draw."""
    for part in view["parts"]:
        if part["kind"] in ("text", "thought") and (trees := render(part["text"])):
            part["rendered"] = trees
    return view


def message_view(message: Any) -> dict[str, Any]:
    """One message: its role, its parts in order, the tools it calls, and which call it answers."""
    if not isinstance(message, dict):
        return {"role": "", "parts": [_other_part("a message that is no object", message)], "calls": []}
    texts = (message.get(key) for key in REASONING_KEYS)
    thoughts = [_text_part(text, "thought") for text in texts if isinstance(text, str) and text]
    more = {key: value for key, value in message.items() if key not in _KNOWN_KEYS and value is not None}
    others = [_other_part("also in this message", more)] if more else []
    calls = message.get("tool_calls")
    return {
        "role": _short_text(message.get("role")),
        "name": _short_text(message.get("name")),
        "parts": [*thoughts, *_parts(message.get("content")), *others],
        "calls": [_call(call) for call in calls] if isinstance(calls, list | tuple) else [],
        "answers": _short_text(message.get("tool_call_id")),
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
    return [_text_part(content) if isinstance(content, str) else _other_part("content that is no text", content)]


def _part(part: Any) -> Part:
    if isinstance(part, str):
        return _text_part(part)
    if not isinstance(part, dict):
        return _other_part("a part that is no object", part)
    if isinstance(part.get("text"), str):
        return _text_part(part["text"])
    kind = _short_text(part.get("type"))
    if "image" in kind:
        return _image_part(_image_source(part))
    rest = {key: value for key, value in part.items() if key != "type"}
    return _other_part(f"a part of type {kind or 'unknown'}", rest)


def _image_source(part: dict[str, Any]) -> str:
    """The URL of an image part, in any of the formats that APIs use."""
    for key in ("image_url", "image", "source", "url"):
        match part.get(key):
            case str(place):
                return place
            case {"url": str(place)}:
                return place
            case {"data": str(data), "media_type": str(kind)}:
                return f"data:{kind};base64,{data}"
    return ""


def _image_part(source: str) -> Part:
    found = _DATA_URL.match(source)
    if found is None:
        where = _shorten(source.partition(",")[0]) if source else "nowhere"
        return {"kind": "unshown", "text": f"an image at {where}, which is not loaded"}
    kind, data = found[1].lower(), source[found.end() :]
    if kind not in IMAGE_SIGNATURES:
        return {"kind": "unshown", "text": f"an image of type {kind}, which is not drawn here"}
    if len(data) > MOST_IMAGE * 4 // 3:
        return {"kind": "unshown", "text": f"an image of {len(data) * 3 >> 22} MiB, which is too large for this page"}
    try:
        raw = base64.b64decode(data, validate=True)
    except ValueError:
        raw = b""
    if not raw.startswith(IMAGE_SIGNATURES[kind]):
        return {"kind": "unshown", "text": f"something that calls itself {kind} and is not"}
    return {"kind": "image", "text": f"image, {kind}, {len(raw):,} bytes", "source": f"data:{kind};base64,{data}"}


def _call(call: Any) -> dict[str, str]:
    """A call, its arguments with a line for each if they are JSON, otherwise as they were written."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return {"name": "", "arguments": _json(call), "id": ""}
    value = function.get("arguments")
    text = value[:MOST_TEXT] if isinstance(value, str) else _json(value)
    with contextlib.suppress(TypeError, ValueError, RecursionError):
        parsed = json.loads(value)
        text = _json(parsed) if isinstance(parsed, dict | list) else text
    return {"name": _short_text(function.get("name")), "arguments": text, "id": _short_text(call.get("id"))}


def _text_part(text: str, kind: str = "text") -> Part:
    left = len(text) - MOST_TEXT
    return {"kind": kind, "text": text[:MOST_TEXT]} | ({"left_out": left} if left > 0 else {})


def _other_part(what: str, value: Any) -> Part:
    return {"kind": "other", "what": what, "text": _json(value)}


def _json(value: Any) -> str:
    try:
        return json.dumps(value, indent=1, ensure_ascii=False, default=str)[:MOST_TEXT]
    except (ValueError, TypeError, RecursionError):
        return type(value).__name__


def _short_text(value: Any) -> str:
    return "" if value is None else _shorten(str(value))


def _shorten(text: str) -> str:
    return text if len(text) <= _MOST_NAME else f"{text[:_MOST_NAME]}…"


MOST_CONVERSATIONS = 20
"""Conversations of one rollout that a page can hold, the latest ones."""


def rendered_conversations(rollout: StoredRollout) -> dict[str, Any]:
    """The same, each text that has something to draw with its tree."""
    found = conversations(rollout)
    with limit_typesetting():
        for message in (message for talk in found["shown"] for message in talk["messages"]):
            _render(message)
    return found


def conversations(rollout: StoredRollout) -> dict[str, Any]:
    """The conversations with their messages, and how many there are. The policy's replies carry facts of their turn."""
    if not rollout.turns:
        found = [{"messages": [message_view(message) for message in rollout.messages]}] if rollout.messages else []
        return {"total": len(found), "shown": found}
    last = _last_turns(rollout.turns)
    return {"total": len(last), "shown": [_conversation(at, rollout.turns) for at in last[-MOST_CONVERSATIONS:]]}


def _last_turns(turns: Sequence[StoredTurn]) -> list[int]:
    """The turns that no later turn continues: the last of each conversation."""
    whole = [_turn_messages(turn) for turn in turns]

    def goes_on(at: int) -> bool:
        mine = whole[at]
        return any(later.messages is not None and later.messages[: len(mine)] == mine for later in turns[at + 1 :])

    return [at for at, turn in enumerate(turns) if turn.messages is None or not goes_on(at)]


def _conversation(last: int, turns: Sequence[StoredTurn]) -> dict[str, Any]:
    ending = turns[last]
    if ending.messages is None:
        reply = message_view(ending.message) | {"turn": turn_facts(last, ending)}
        return {"prompt_tokens": len(ending.prompt_ids), "messages": [reply]}
    whole = _turn_messages(ending)
    messages = [message_view(message) for message in whole]
    for at, turn in enumerate(turns[: last + 1]):
        if turn.messages is not None and whole[: len(turn.messages) + 1] == _turn_messages(turn):
            messages[len(turn.messages)]["turn"] = turn_facts(at, turn)
    return {"messages": messages, "tools": [_tool(tool) for tool in ending.tools or ()]}


def turn_facts(at: int, turn: StoredTurn) -> dict[str, Any]:
    return {
        "number": at + 1,
        "tokens": len(turn.completion_ids),
        "prompt": len(turn.prompt_ids),
        "finish": turn.finish,
        "temperature": turn.temperature,
        "seconds": turn.seconds,
        "started": turn.started,
        "versions": sorted(set(turn.versions.tolist())),
    }


LEAST_QUEUED = 0.001
"""Seconds in the engine's queue that are worth a lane; the next step of an idle engine begins sooner."""


def episode_lanes(rollout: StoredRollout) -> dict[str, list[tuple[float, float]]]:
    """What a rollout's episode did, by lane: start and seconds of each span. The engine's are its calls; tools
    take from a reply to the next call that brings their results."""
    turns = rollout.turns
    lanes: dict[str, list[tuple[float, float]]] = {}
    if len(turns) == 1 or any(turn.started for turn in turns):  # records of earlier versions lack the starts
        lanes["engine"] = [(turn.started + turn.queued, turn.seconds - turn.queued) for turn in turns]
        if queued := [(turn.started, turn.queued) for turn in turns if turn.queued >= LEAST_QUEUED]:
            lanes["queue"] = queued
    for before, turn in itertools.pairwise(turns):
        new = (turn.messages or [])[len(_turn_messages(before)) :]
        began = before.started + before.seconds
        if turn.started > began and any(isinstance(one, dict) and one.get("role") == "tool" for one in new):
            lanes.setdefault("tools", []).append((began, turn.started - began))
    for kind, started, seconds in rollout.spans:
        lanes.setdefault(kind, []).append((started, seconds))
    return lanes


def _turn_messages(turn: StoredTurn) -> list[Any]:
    return [*(turn.messages or ()), turn.message]


def _tool(tool: Any) -> dict[str, str]:
    function = tool.get("function") if isinstance(tool, dict) else None
    function = function if isinstance(function, dict) else {}
    return {"name": str(function.get("name") or "?"), "description": str(function.get("description") or "")}


MOST_SEATS = 32
_SHORT_WORDS = 40


class EpisodeTurn(NamedTuple):
    """One turn of a seat, and the messages that are new in its prompt."""

    new_messages: list[Any]
    turn: StoredTurn


def episode_timeline(rollouts: Rollouts, index: int) -> dict[str, Any]:
    """The seats of an episode with their rewards, and all their turns in order."""
    rows = [rollouts.row(at) for at in rollouts.episode(index)]
    seats = [_read_seat(rollouts, row) for row in rows[:MOST_SEATS]]
    spoken = [list(_episode_turns(one.turns)) for one in seats]
    line = []
    with limit_typesetting():
        for seat, at in order_turns(spoken, _parent_seats(seats)):
            one = spoken[seat][at]
            reply = _render(message_view(one.turn.message)) | {"turn": turn_facts(at, one.turn)}
            heard = [_render(message_view(message)) for message in one.new_messages]
            line.append({"seat": seat, "heard": heard, "said": reply})
    return {
        "seats": [{"row": o.row, "parent": o.parent, "metrics": o.metrics, "error": o.error} for o in seats],
        "line": line,
        "total": len(rows),
        "absent": _absent_actors(rollouts, rows),
    }


def _read_seat(rollouts: Rollouts, row: Row) -> StoredRollout:
    """A seat; one whose contents are lost has its row and says so."""
    try:
        return rollouts.get(row.index)
    except RolloutNotFound as error:
        ticket = Ticket(row.ticket, row.env, 0, 0, row.row)
        return StoredRollout(row=row, ticket=ticket, reward=row.reward, error=str(error))


def order_turns(spoken: Sequence[Sequence[EpisodeTurn]], after: Sequence[int | None]) -> list[tuple[int, int]]:
    """Seat and turn, the earliest first. `after` has the seat whose first turn comes before, if any."""
    heard = [["\n".join(flat_text(message) for message in one.new_messages) for one in seat] for seat in spoken]
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
    """Whether `heard` quotes these words; short words must match as whole words."""
    words = words.strip()
    if len(words) > _SHORT_WORDS:
        return words in heard
    return bool(words) and re.search(rf"(?<!\w){re.escape(words)}(?!\w)", heard) is not None


def _episode_turns(turns: Sequence[StoredTurn]) -> Iterator[EpisodeTurn]:
    """Each turn with the messages of its prompt that the turn before did not have."""
    before: list[Any] = []
    for turn in turns:
        messages = turn.messages or []
        known = len(before) if messages[: len(before)] == before else 0
        yield EpisodeTurn(messages[known:], turn)
        before = [*messages, turn.message]


def _parent_seats(seats: Sequence[StoredRollout]) -> list[int | None]:
    """For each seat the index of the seat whose episode started it, or None. Of seats that share an actor the record
    has no names, so the first of them stands for all."""
    first = {one.row.actor: at for at, one in reversed([*enumerate(seats)])}
    parents = [first.get(one.parent.partition("#")[0]) for one in seats]
    return [None if parent == at else parent for at, parent in enumerate(parents)]


def _absent_actors(rollouts: Rollouts, rows: Sequence[Row]) -> list[str]:
    """Actors of other episodes of this group that this episode lacks."""
    mine, kinds = {(row.actor, row.kind) for row in rows}, {row.kind for row in rows}
    mates = [rollouts.row(at) for at in rollouts.group_members(rows[0].index)]
    return sorted({row.actor for row in mates if row.kind in kinds and (row.actor, row.kind) not in mine})
