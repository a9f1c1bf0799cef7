"""Routes of rollouts: a filtered page, one of them in full, its group, its episode, and the league."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Annotated

from fastapi import APIRouter, Query, Response

from paceline.record import Gone
from paceline.ui.answers import FiniteJsonResponse, refuse
from paceline.ui.rollouts.episode import story, talks
from paceline.ui.rollouts.group import side_by_side, tries
from paceline.ui.rollouts.league import has_league, leagues
from paceline.ui.rollouts.query import OneQuery, counts, line
from paceline.ui.routes.here import OneRun

router = APIRouter(prefix="/rollouts")

Index = Annotated[int, Query(alias="id", ge=0, lt=2**62)]


@contextmanager
def _found() -> Generator[None]:
    try:
        yield
    except Gone as error:
        raise refuse(404, str(error)) from error


@router.get("")
def rollouts(run: OneRun, query: OneQuery) -> Response:
    """A page of what is asked for, how many there are, and what can be asked for. With a limit of 0 only counted."""
    with _found():
        found = run.rollouts.find(query)
    if not query.limit:
        return FiniteJsonResponse({"total": found.total, "all": run.rollouts.count})
    return FiniteJsonResponse(
        {
            "total": found.total,
            "all": run.rollouts.count,
            "rows": [line(run, row, query.text) for row in found.rows],
            "counts": counts(run),
            "kept": run.rollouts.kept,
            "problems": run.rollouts.problems(),
            "league": has_league(run),
        }
    )


@router.get("/one")
def one(run: OneRun, index: Index, query: OneQuery) -> Response:
    """One rollout: its conversations, what it earned, and its neighbours among those that are asked for."""
    with _found():
        told = run.rollouts.get(index)
        beside = run.rollouts.beside(index, replace(query, offset=0, limit=None))
        mates, seats = tries(run.rollouts, index), run.rollouts.episode(index)
    return FiniteJsonResponse(
        {
            "row": told.row,
            "parent": told.parent,
            "epoch": told.ticket.epoch,
            "reward": told.reward,
            "metrics": told.metrics,
            "error": told.error,
            "talks": talks(told),
            "beside": beside and asdict(beside),
            "tries": len(mates),
            "seats": len(seats),
            "kept": run.rollouts.kept,
        }
    )


@router.get("/group")
def group(run: OneRun, index: Index) -> Response:
    """All tries of its ticket, side by side."""
    with _found():
        return FiniteJsonResponse(side_by_side(run.rollouts, index))


@router.get("/episode")
def episode(run: OneRun, index: Index) -> Response:
    """All seats of its episode in one line of time."""
    with _found():
        return FiniteJsonResponse(story(run.rollouts, index))


@router.get("/league")
def league(run: OneRun) -> Response:
    """The leagues of the run."""
    return FiniteJsonResponse(leagues(run))
