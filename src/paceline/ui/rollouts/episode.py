"""The conversations of a rollout, and the turns of all seats of a self-play episode in one order.

The record has the turns of each seat in order, and no time for a single turn. The order between seats is therefore
inferred from what they heard: a seat cannot quote words that were not said yet. Where nothing is quoted, seats speak in
rounds, and the seat that spoke more often began.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from paceline.data.sample import Ticket
from paceline.record import Gone, Row, Told, ToldTurn
from paceline.record.rollouts import Rollouts
from paceline.ui.rollouts.parts import plain, shown

MOST_TALKS = 20
"""Conversations of one rollout that a page can hold, the latest ones."""


def talks(told: Told) -> dict[str, Any]:
    """The conversations with their messages, and how many there are. What the policy said carries the facts of its
    turn."""
    if not told.turns:
        found = [{"messages": [shown(message) for message in told.messages]}] if told.messages else []
        return {"total": len(found), "shown": found}
    last = ends(told.turns)
    return {"total": len(last), "shown": [_talk(at, told.turns) for at in last[-MOST_TALKS:]]}


def ends(turns: Sequence[ToldTurn]) -> list[int]:
    """Turns that no later one goes on from."""
    whole = [_whole(turn) for turn in turns]

    def goes_on(at: int) -> bool:
        mine = whole[at]
        return any(later.messages is not None and later.messages[: len(mine)] == mine for later in turns[at + 1 :])

    return [at for at, turn in enumerate(turns) if turn.messages is None or not goes_on(at)]


def _talk(last: int, turns: Sequence[ToldTurn]) -> dict[str, Any]:
    ending = turns[last]
    if ending.messages is None:
        said = shown(ending.message) | {"turn": turn_facts(last, ending)}
        return {"prompt_tokens": len(ending.prompt_ids), "messages": [said]}
    whole = _whole(ending)
    spoken = {}
    for at, turn in enumerate(turns[: last + 1]):
        if turn.messages is not None and whole[: len(turn.messages) + 1] == _whole(turn):
            spoken[len(turn.messages)] = turn_facts(at, turn)
    messages = [shown(message) | ({"turn": spoken[at]} if at in spoken else {}) for at, message in enumerate(whole)]
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


def story(rollouts: Rollouts, index: int) -> dict[str, Any]:
    """The seats with what they earned, and all their turns in one line."""
    rows = [rollouts.row(at) for at in rollouts.episode(index)]
    told = [_read(rollouts, row) for row in rows[:MOST_SEATS]]
    spoken = [_spoken(one.turns) for one in told]
    line = []
    for seat, at in in_order(spoken, _after(told)):
        one = spoken[seat][at]
        said = shown(one.turn.message) | {"turn": turn_facts(at, one.turn)}
        line.append({"seat": seat, "heard": [shown(message) for message in one.heard], "said": said})
    return {
        "seats": [{"row": o.row, "parent": o.parent, "metrics": o.metrics, "error": o.error} for o in told],
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


def in_order(spoken: Sequence[Sequence[EpisodeTurn]], after: Sequence[int | None]) -> list[tuple[int, int]]:
    """Seat and turn, the earliest first. `after` is the seat whose first turn one must wait for, if any."""
    heard = [["\n".join(plain(message) for message in one.heard) for one in seat] for seat in spoken]
    taken = [0] * len(spoken)
    order: list[tuple[int, int]] = []

    @cache
    def quoted(seat: int, at: int, other: int, words: int) -> bool:
        return quotes(heard[seat][at], spoken[other][words].turn.text)

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


def quotes(heard: str, words: str) -> bool:
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


def _after(told: Sequence[Told]) -> list[int | None]:
    """For each seat that another one's episode started, the place of that one. Of seats that share an actor the record
    has no names, so the first of them stands for all."""
    actors = [one.row.actor for one in told]
    parents = [one.parent.partition("#")[0] for one in told]
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
