"""Route that compares the rewards of two runs over the same draws.

Route that finds the first difference between two runs.
"""

from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Depends, Query, Request, Response

from paceline.observe.record.paired import Verdict, verdict
from paceline.observe.web.answers import FiniteJsonResponse, refuse
from paceline.observe.web.diffing import Comparisons
from paceline.observe.web.runs import AllRuns

FARTHEST = 20
"""Draws that are named: those the two runs differ most on."""

router = APIRouter()
Name = Annotated[str, Query(max_length=1000)]


@router.get("/ab")
def ab(runs: AllRuns, a: Name, b: Name) -> Response:
    """The estimate of the difference in reward, step by step."""
    one, other = runs.open(a), runs.open(b)
    if one.path == other.path:
        raise refuse(400, "a run does not differ from itself: choose two")
    known = verdict(one, other)
    if known is None:
        return FiniteJsonResponse({"draws": 0, "strangers": 0, "steps": [], "farthest": []})
    return FiniteJsonResponse(_told(known))


def _told(known: Verdict) -> dict[str, Any]:
    pairs, course = known.pairs, known.course
    last = np.flatnonzero(np.append(np.diff(pairs.step) != 0, True))  # of each step, what was known at its end
    far = np.argsort(-np.abs(pairs.differences), kind="stable")[:FARTHEST]
    return {
        "draws": len(pairs.ticket),
        "strangers": pairs.strangers,
        "mean": known.mean,
        "radius": known.radius,
        "real": known.real,
        "real_step": None if known.real is None else int(pairs.step[known.real - 1]),
        "sentence": known.sentence,
        "steps": pairs.step[last],
        "means": course.mean[last],
        "radii": course.radius[last],
        "farthest": [
            {
                "env": pairs.names[pairs.env[at]],
                "ticket": int(pairs.ticket[at]),
                "step": int(pairs.step[at]),
                "a": float(pairs.a[at]),
                "b": float(pairs.b[at]),
                "rollouts": [int(places[at]) for places in pairs.places],
            }
            for at in far
            if pairs.differences[at]
        ],
    }


WAIT_SECONDS = 0.4
"""Small runs are compared within it, so that most pages need to ask once."""


def _comparisons(request: Request) -> Comparisons:
    return request.app.state.comparisons


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
