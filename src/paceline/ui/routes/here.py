"""Dependencies of the routes: all runs, and the one run that a request names."""

from typing import Annotated

from fastapi import Depends, Query, Request

from paceline.record import RunFolder
from paceline.ui.runs import Runs


def _runs(request: Request) -> Runs:
    return request.app.state.runs


AllRuns = Annotated[Runs, Depends(_runs)]


def _run(runs: AllRuns, run: Annotated[str, Query(max_length=1000)]) -> RunFolder:
    return runs.open(run)


OneRun = Annotated[RunFolder, Depends(_run)]
"""The run of `?run=NAME`; a sentence and status 404 where there is none. These functions are not `async`, so that
reading a large file holds up a thread and not the server."""
