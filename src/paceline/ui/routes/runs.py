"""Routes of the table of runs, and of one run's status."""

from fastapi import APIRouter, Response

from paceline.ui.answers import FiniteJsonResponse
from paceline.ui.following import standing
from paceline.ui.routes.here import AllRuns, OneRun

router = APIRouter()


@router.get("/runs")
def runs(runs: AllRuns) -> Response:
    """Every run of the folder, in a line."""
    return FiniteJsonResponse({"folder": str(runs.folder), "runs": list(runs.vitals(patient=False).values())})


@router.get("/run")
def run(run: OneRun) -> Response:
    """The state of one run: its status, its events and what could not be read, but for what `live` tells in a while."""
    return FiniteJsonResponse(standing(run, patient=False))
