"""Route that finds the first difference between two runs."""

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response

from paceline.ui.answers import FiniteJsonResponse, refuse
from paceline.ui.diffing import Comparisons
from paceline.ui.routes.here import AllRuns

WAIT_SECONDS = 0.4
"""Small runs are compared within it, so that most pages need to ask once."""

router = APIRouter()


def _comparisons(request: Request) -> Comparisons:
    return request.app.state.comparisons


Name = Annotated[str, Query(max_length=1000)]


@router.get("/diff")
def diff(
    runs: AllRuns,
    comparisons: Annotated[Comparisons, Depends(_comparisons)],
    a: Name = "",
    b: Name = "",
    tolerance: Annotated[float, Query(ge=0, le=1e6, allow_inf_nan=False)] = 0.0,
    job: int | None = None,
) -> Response:
    """Compare two runs, or with the number of an earlier answer see how far that is. Without runs: nothing."""
    if job is None:
        if not a or not b:
            return FiniteJsonResponse({"state": "idle"})
        one, other = runs.open(a), runs.open(b)
        if one.path == other.path:
            raise refuse(400, "a run does not differ from itself: choose two")
        job = comparisons.begin(one, other, tolerance)
    return FiniteJsonResponse(comparisons.standing(job, WAIT_SECONDS))
