"""Route that compares the rewards of two runs over the same draws."""

from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Query, Response

from paceline.record.paired import Verdict, verdict
from paceline.ui.answers import FiniteJsonResponse, refuse
from paceline.ui.routes.here import AllRuns

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
