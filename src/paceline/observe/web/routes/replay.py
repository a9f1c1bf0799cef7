"""Routes that replay a step: start it, follow it, cancel it, read its result."""

import re
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import APIRouter, Depends, HTTPException, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr

from paceline.observe.web.http import FiniteJsonResponse
from paceline.observe.web.replay.result import own_code, sample, settings, summary
from paceline.observe.web.replay.runner import ReplayRunner
from paceline.observe.web.runs import OneRun

CHECKPOINT = re.compile(r"step-(\d+)")

router = APIRouter()


def _runner(request: Request) -> ReplayRunner:
    return request.app.state.replays


def _own_page(request: Request) -> None:
    """Starting a process is for our own pages: a page elsewhere can send a form to a loopback address, but neither JSON
    nor our origin with it."""
    origin, site = request.headers.get("origin"), request.headers.get("sec-fetch-site", "same-origin")
    if site not in ("same-origin", "none") or (origin and urlsplit(origin).netloc != request.headers.get("host")):
        raise HTTPException(403, "only a page of this server may start or end a replay")
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise HTTPException(415, "send JSON: Content-Type: application/json")


Runner = Annotated[ReplayRunner, Depends(_runner)]
Key = Annotated[str, Query(max_length=100)]


class ReplayRequest(BaseModel):
    """A replay request. Settings are names of the run file with their values; `replay.result.settings` knows which."""

    model_config = ConfigDict(extra="forbid")

    step: Annotated[StrictInt, Field(ge=0)]
    settings: Annotated[dict[str, StrictBool | StrictInt | StrictFloat | StrictStr | None], Field(max_length=40)] = {}


@router.get("/replay")
def replay(run: OneRun, runner: Runner) -> Response:
    """Which steps can be replayed and from which weights, which settings can be tried, and what was replayed lately."""
    config = run.config()
    found = (CHECKPOINT.fullmatch(path.name) for path in (run.path / "checkpoints").glob("step-*"))
    return FiniteJsonResponse(
        {
            "path": str(run.path),
            "steps": run.batches(),
            "checkpoints": sorted(int(match[1]) for match in found if match),
            "settings": [setting.model_dump() for setting in settings(config)],
            "refusal": own_code(config),
            "job": runner.job(run),
            "results": [
                {"key": key, "step": result.step, "changes": result.changes}
                for key, result in runner.results.of(run.path).items()
            ],
        }
    )


@router.get("/replay/job")
def job(run: OneRun, runner: Runner) -> Response:
    """How the run's last replay stands."""
    return FiniteJsonResponse({"job": runner.job(run)})


@router.post("/replay/start", dependencies=[Depends(_own_page)])
def start(run: OneRun, runner: Runner, request: ReplayRequest) -> Response:
    """Replay a step in a process of its own."""
    return FiniteJsonResponse({"job": runner.start(run, request.step, request.settings)})


@router.post("/replay/cancel", dependencies=[Depends(_own_page)])
def cancel(run: OneRun, runner: Runner) -> Response:
    """End it."""
    runner.cancel(run)
    return FiniteJsonResponse({"job": runner.job(run)})


@router.get("/replay/result")
def result(run: OneRun, runner: Runner, of: Key = "", against: Key = "", component: Key = "") -> Response:
    """The loss, the samples and the weightiest tokens; `against` another result by what differs. Null: not known."""
    one, other = runner.results.get(run.path, of), runner.results.get(run.path, against) if against else None
    if one is None or (against and other is None):
        return FiniteJsonResponse({"result": None})
    return FiniteJsonResponse({"result": summary(one, other, component)})


@router.get("/replay/sample")
def one_sample(
    run: OneRun, runner: Runner, of: Key = "", against: Key = "", sample_: Annotated[int, Query(alias="sample")] = 0
) -> Response:
    """All tokens of one sample. Null: the result is not known any more."""
    one, other = runner.results.get(run.path, of), runner.results.get(run.path, against) if against else None
    return FiniteJsonResponse({"sample": None if one is None else sample(one, other, sample_)})
