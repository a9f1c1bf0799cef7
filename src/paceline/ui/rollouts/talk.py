"""The conversations of a rollout, from its turns.

Mostly there is one, which each turn carries on. Where an agent dropped part of it, branched or asked a helper, there
are several: every one that no later turn goes on from.
"""

from collections.abc import Sequence
from typing import Any

from paceline.record import Told, ToldTurn
from paceline.ui.rollouts.parts import shown

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
    """What a reader may ask of one reply: by which versions, how long, and why it ended."""
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
