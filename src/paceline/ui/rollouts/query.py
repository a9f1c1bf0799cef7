"""Turns the filters of the rollouts page into a query, and builds its table lines and counts."""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated, Any

import numpy as np
from fastapi import Depends
from fastapi import Query as Asked

from paceline.record import Gone, Query, Row, RunFolder
from paceline.record.layout import DOMAINS
from paceline.record.rollouts import SORTS
from paceline.ui.answers import refuse
from paceline.ui.rollouts.parts import plain

EXCERPT = 160
"""Characters of what was said that a line of the table has room for."""
Small = Annotated[int | None, Asked(ge=-(2**31), lt=2**31)]
Large = Annotated[int | None, Asked(ge=-(2**62), lt=2**62)]
Word = Annotated[str | None, Asked(max_length=1000)]


def _query(
    env: Annotated[list[str] | None, Asked()] = None,
    actor: Word = None,
    state: Word = None,
    finish: Word = None,
    error: Word = None,
    domain: Word = None,
    step_from: Small = None,
    step_to: Small = None,
    reward_from: float | None = None,
    reward_to: float | None = None,
    length_from: Small = None,
    length_to: Small = None,
    ticket: Large = None,
    row: Large = None,
    text: Annotated[str, Asked(max_length=1000)] = "",
    sort: str = "-step",
    offset: Annotated[int, Asked(ge=0, lt=2**62)] = 0,
    limit: Annotated[int, Asked(ge=0, le=200)] = 50,
) -> Query:
    """`error` is `any`, `none` or a kind of failure; ranges include both ends."""
    if sort.removeprefix("-") not in SORTS:
        raise refuse(400, f"rollouts cannot be sorted by `{sort}`: choose one of {', '.join(SORTS)}")
    return Query(
        env=env,
        actor=actor,
        state=state,
        finish=finish,
        error={"any": True, "none": False}.get(error, error) if error is not None else None,
        domain=domain,
        step=(step_from, step_to),
        reward=(reward_from, reward_to),
        length=(length_from, length_to),
        ticket=ticket,
        row=row,
        text=text,
        sort=sort,
        offset=offset,
        limit=limit,
    )


OneQuery = Annotated[Query, Depends(_query)]
"""The filters of a request; those that are left out do not matter."""


def counts(run: RunFolder) -> dict[str, dict[str, int]]:
    """How many rollouts of the run have each value of the columns that can be chosen from."""
    view = run.rollouts.view()
    found = {}
    for column in ("env", "actor", "state", "finish", "error"):
        found[column] = _counted(view.rows[column], view.names)
    found["domain"] = _counted(view.rows["domain"], DOMAINS)
    found["error"].pop("", None)
    return found


def _counted(numbers: np.ndarray, names: Iterable[str]) -> dict[str, int]:
    many = np.bincount(numbers)
    return {name: int(count) for name, count in zip(names, many, strict=False) if count}


def line(run: RunFolder, row: Row, text: str) -> dict[str, Any]:
    """A row of the table, with a few words of it: around what was searched for, else of the last reply."""
    told = asdict(row)
    if not row.whole:
        return told
    try:
        rollout = run.rollouts.get(row.index)
    except Gone:  # the run went back since the row was found
        return told
    said = [plain(message) for message in rollout.messages] or [turn.text for turn in rollout.turns]
    return told | {"excerpt": _excerpt([*said, rollout.error or ""], text)}


def _excerpt(said: list[str], text: str) -> str:
    wanted = text.casefold()
    for words in said if wanted else ():
        if (at := words.casefold().find(wanted)) >= 0:
            start = max(0, at - EXCERPT // 3)
            return ("…" if start else "") + _flat(words[start : start + EXCERPT + len(text)])
    last = next((words for words in reversed(said) if words.strip()), "")
    return _flat(last[: 4 * EXCERPT])[:EXCERPT]


def _flat(words: str) -> str:
    return " ".join(words.split())
