"""A run's metrics, column by column."""

from fastapi import APIRouter, Response

from paceline.ui.answers import FiniteJsonResponse
from paceline.ui.following import read_metrics
from paceline.ui.routes.here import OneRun

router = APIRouter()


@router.get("/metrics")
def metrics(run: OneRun, mark: str = "") -> Response:
    """Every metric as a list, beside `step` and `time`; with the mark of an earlier answer only what came since."""
    told, mark = read_metrics(run, mark)
    return FiniteJsonResponse(told | {"mark": mark})
