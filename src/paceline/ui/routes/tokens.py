"""Tokens of one rollout, and one token explained."""

from typing import Annotated

from fastapi import APIRouter, Query, Response

from paceline.record import Gone, RunFolder, Told
from paceline.ui.answers import FiniteJsonResponse, refuse
from paceline.ui.routes.here import OneRun
from paceline.ui.tokens.card import card_of
from paceline.ui.tokens.strip import newest, page_of, strip_of

router = APIRouter()
Place = Annotated[int | None, Query(ge=0, lt=1 << 31)]
NOTHING = {"nothing": "No rollout is recorded yet.", "rollout": None}


@router.get("/tokens")
def tokens(run: OneRun, id: Place = None, sample: Place = None, turn: Place = None) -> Response:
    """One sample of a rollout, or one turn of it, with every stream; without an id, of the last one that trained."""
    index = newest(run) if id is None else id
    if index is None:
        return FiniteJsonResponse(NOTHING)
    told = _told(run, index)
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
    told = _told(run, index)
    strip = strip_of(told, sample, turn)
    if strip is None or at >= len(strip.ids):
        raise refuse(404, f"there is no token {at}: the sequence has {0 if strip is None else len(strip.ids)}")
    return FiniteJsonResponse(card_of(run, told, strip, at))


def _told(run: RunFolder, index: int) -> Told:
    try:
        return run.rollouts.get(index)
    except Gone as error:
        raise refuse(404, str(error)) from None
