"""Route of a run's timeline lanes."""

from typing import Annotated

from fastapi import APIRouter, Query, Response

from paceline.ui.answers import FiniteJsonResponse
from paceline.ui.lanes import lanes_of
from paceline.ui.routes.here import OneRun

router = APIRouter()


@router.get("/lanes")
def lanes(
    run: OneRun,
    start: float | None = None,
    end: float | None = None,
    bins: Annotated[int, Query(ge=1, le=4000)] = 600,
) -> Response:
    """The lanes between two times (seconds since 1970), in at most so many bins."""
    return FiniteJsonResponse(lanes_of(run, start, end, bins))
