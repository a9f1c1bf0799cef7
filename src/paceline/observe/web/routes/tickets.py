"""Routes of tickets (a page of them by their last state, and the life of one) and of the tokens of a rollout."""

from typing import Annotated

from fastapi import APIRouter, HTTPException, Query, Response

from paceline.data import State
from paceline.observe.web.http import FiniteJsonResponse
from paceline.observe.web.runs import OneRun
from paceline.observe.web.tickets import life_of, listed
from paceline.observe.web.tokens.card import card_of
from paceline.observe.web.tokens.strip import newest, page_of, strip_of

router = APIRouter()
Name = Annotated[str | None, Query(max_length=1000)]
STATES = [str(state) for state in State if state is not State.WAITING]
"""The states in a journal, which does not hold that a ticket waits."""


@router.get("/tickets")
def tickets(
    run: OneRun,
    env: Name = None,
    state: Name = None,
    reason: Name = None,
    offset: Annotated[int, Query(ge=0)] = 0,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
) -> Response:
    """Tickets as they stand, the newest first, and how many there are of each state and reason."""
    found = run.tickets.find(env, state, reason, offset, limit)
    envs = [one.get("name") for one in run.config().get("env", []) if isinstance(one, dict)]
    standing = run.tickets.states()
    dropped = {name: sum(count for _, count in steps) for name, steps in run.tickets.dropped().items()}
    return FiniteJsonResponse(
        {
            "total": found.total,
            "rows": listed(run, found.rows),
            "states": {name: standing.get(name, 0) for name in STATES},
            "reasons": dict(sorted(dropped.items(), key=lambda item: -item[1])),
            "envs": [name for name in envs if isinstance(name, str)],
            "problems": run.tickets.problems(),
        }
    )


@router.get("/ticket")
def ticket(run: OneRun, ticket: Annotated[int | None, Query(ge=0, lt=1 << 62)] = None) -> Response:
    """The life of one ticket, from the draw to the gradient; without a number, of the newest."""
    if ticket is None:
        rows = run.tickets.find(limit=1).rows
        if not rows:
            return FiniteJsonResponse({"nothing": "No ticket was drawn yet."})
        ticket = rows[0]["number"]
    life = life_of(run, ticket)
    if life is None:
        raise HTTPException(404, f"there is no ticket {ticket} in this run: go back to the list of tickets")
    return FiniteJsonResponse(life)


Place = Annotated[int | None, Query(ge=0, lt=1 << 31)]
NOTHING = {"nothing": "No rollout is recorded yet.", "rollout": None}


@router.get("/tokens")
def tokens(run: OneRun, id: Place = None, sample: Place = None, turn: Place = None) -> Response:
    """One sample of a rollout, or one turn of it, with every stream; without an id, of the last one that trained."""
    index = newest(run) if id is None else id
    if index is None:
        return FiniteJsonResponse(NOTHING)
    told = run.rollouts.get(index)
    return FiniteJsonResponse(page_of(run, told, strip_of(told, sample, turn)))


@router.get("/tokens/card")
def card(
    run: OneRun,
    id: Place = None,
    at: Annotated[int, Query(ge=0)] = 0,
    sample: Place = None,
    turn: Place = None,
) -> Response:
    """The card of the token at a place of that sequence."""
    index = newest(run) if id is None else id
    if index is None:
        return FiniteJsonResponse(NOTHING)
    told = run.rollouts.get(index)
    strip = strip_of(told, sample, turn)
    if strip is None or at >= len(strip.ids):
        raise HTTPException(404, f"there is no token {at}: the sequence has {0 if strip is None else len(strip.ids)}")
    return FiniteJsonResponse(card_of(run, told, strip, at))
