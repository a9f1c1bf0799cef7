"""Shows the rollouts of a group side by side, and where each departs from the first."""

from itertools import takewhile
from typing import Any

from paceline.record import Gone, Row, Told
from paceline.record.rollouts import Rollouts
from paceline.ui.rollouts.parts import plain

MOST_TRIES = 64
"""Columns that a page can hold."""
MOST_SAID = 20_000
"""Characters of one message there; the rollout's own page has all of them."""

Said = list[tuple[str, str]]
"""Role and text of each message."""


def side_by_side(rollouts: Rollouts, index: int) -> dict[str, Any]:
    """The messages that all tries begin with, and those of each from there on."""
    rows = tries(rollouts, index)
    told = [_read(rollouts, row.index) for row in rows[:MOST_TRIES]]
    said = [_said(one) if one is not None else [] for one in told]
    spoken = [one for one in said if one]
    shared = _shared(spoken)
    first = spoken[0] if spoken else []
    return {
        "begin": [{"role": role, "text": text[:MOST_SAID]} for role, text in first[:shared]],
        "tries": [
            {
                "row": row,
                "metrics": one.metrics if one else {},
                "error": one.error if one else None,
                "first": words is first,
                "pieces": parted(first[shared:], words[shared:]),
            }
            for row, one, words in zip(rows, told, said, strict=False)
        ],
        "total": len(rows),
    }


def tries(rollouts: Rollouts, index: int) -> list[Row]:
    """The rollouts that one is compared with, itself included: of one actor in one kind of episode, not a
    buyer with a seller. Where an episode has several of them, such as solvers of one question, those."""
    mine = rollouts.row(index)
    rows = [rollouts.row(at) for at in rollouts.mates(index)]
    alike = [row for row in rows if (row.actor, row.kind) == (mine.actor, mine.kind)]
    here = [row for row in alike if row.member == mine.member]
    return here if len(here) > 1 else sorted(alike, key=lambda row: row.member)


def parted(first: Said, other: Said) -> list[dict[str, Any]]:
    """Messages in pieces: what is as in the first, and from where they part on what is not."""
    together = True
    pieces = []
    for at, (role, text) in enumerate(other):
        same = 0
        if together and at < len(first) and first[at][0] == role:
            same = common(first[at][1], text)
        together = together and at < len(first) and first[at] == (role, text)
        rest = text[same:]
        pieces.append(
            {
                "role": role,
                "same": _end(text[:same]),
                "rest": rest[:MOST_SAID],
                "left_out": max(0, len(rest) - MOST_SAID),
            }
        )
    return pieces


def common(one: str, other: str) -> int:
    """How many characters both begin with."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low


def _read(rollouts: Rollouts, index: int) -> Told | None:
    try:
        return rollouts.get(index)
    except Gone:
        return None


def _said(told: Told) -> Said:
    if told.turns and told.turns[-1].messages is None:
        return [("assistant", turn.text) for turn in told.turns]
    return [(str(m.get("role", "")) if isinstance(m, dict) else "", plain(m)) for m in told.messages]


def _shared(said: list[Said]) -> int:
    """How many messages all begin with; the last one is always the tries' own."""
    most = min((len(one) - 1 for one in said), default=0)
    alike = takewhile(lambda at: all(one[at] == said[0][at] for one in said), range(most))
    return sum(1 for _ in alike)


def _end(text: str) -> str:
    return text if len(text) <= MOST_SAID else f"…{text[-MOST_SAID:]}"
