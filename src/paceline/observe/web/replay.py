"""Routes that replay a step: start `paceline replay`, follow it, cancel it, and read its result.

In a child process, one at a time for each run, since the server itself imports no torch:

    started -> its last line on stderr is what it does now -> done with a file of JSON, or failed with a sentence

A thread of its own starts the process and stays until it ends: Linux kills it with that thread's process, however that
dies.
"""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Annotated, Any, Literal

from fastapi import APIRouter, Depends, HTTPException, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr

from paceline.observe.record import RunFolder
from paceline.observe.web.replay_result import (
    ReplayResult,
    Value,
    change_flags,
    form_fields,
    replay_refusal,
    result_summary,
    sample_view,
)
from paceline.observe.web.runs import FiniteJsonResponse, OneRun
from paceline.util.child_process import WITH_PARENT

LIMIT_SECONDS = 900.0
MOST_BYTES = 256 << 20
"""Largest JSON result that is accepted."""
POLL_SECONDS = 0.1

ReplayState = Literal["working", "done", "failed", "cancelled"]


class ReplayProcess:
    """One replay. `on_finished` is called with its output, on the child's thread, when it is done."""

    def __init__(
        self,
        run: Path,
        step: int,
        flags: Sequence[str],
        on_finished: Callable[[bytes], None],
        limit: float = LIMIT_SECONDS,
        key: str = "",
    ) -> None:
        self._step, self._key = step, key
        self.state: ReplayState = "working"
        self.failure = ""
        self._began, self._ended = time.monotonic(), 0.0
        command = [sys.executable, "-P", "-m", "paceline", "replay", str(run), str(step), "--json"]
        self._command = [*command, *flags]
        self._on_finished, self._limit = on_finished, limit
        self._stop = threading.Event()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the child
        self._thread = threading.Thread(target=self._supervise, name="paceline-replay", daemon=True)
        self._thread.start()

    def as_json(self) -> dict[str, Any]:
        return {
            "key": self._key,
            "step": self._step,
            "state": self.state,
            "doing": _last_line(self._log) if self.state == "working" else "",
            "failure": self.failure,
            "seconds": (self._ended or time.monotonic()) - self._began,
            "limit": LIMIT_SECONDS,
        }

    def cancel(self) -> None:
        """Stop the process and wait until it is gone."""
        self._stop.set()
        self._thread.join(10)

    # -- on its own thread ------------------------------------------------------------------------------------------

    def _supervise(self) -> None:
        with tempfile.TemporaryFile() as out:
            state, failure = self._run(out.fileno())
            if state == "done":
                out.seek(0)
                try:
                    self._on_finished(out.read())
                except ValueError as error:
                    state, failure = "failed", f"what it printed cannot be read: {error}"
        self._ended = time.monotonic()
        self.failure, self.state = failure, state
        self._log.close()

    def _run(self, out: int) -> tuple[ReplayState, str]:
        environment = os.environ | {WITH_PARENT: str(os.getpid()), "HF_HUB_OFFLINE": "1"}
        try:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=self._log,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            return "failed", f"the process cannot be started: {error}"
        try:
            while (code := process.poll()) is None:
                if self._stop.wait(POLL_SECONDS):
                    return "cancelled", ""
                if time.monotonic() - self._began > self._limit:
                    return "failed", f"it took longer than {self._limit:g} seconds: replay it in a terminal instead"
                if os.fstat(out).st_size > MOST_BYTES:
                    return "failed", "the step is too large for a page: replay it in a terminal instead"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(10)
        if code == 0:
            return "done", ""
        if code == -signal.SIGKILL:
            return "failed", "the process was killed, most likely for want of memory"
        return "failed", _last_line(self._log) or f"the process ended with code {code}"


def _last_line(log: IO[bytes]) -> str:
    """The last line of a log, without the prefix `paceline: `."""
    try:
        size = os.fstat(log.fileno()).st_size
        text = os.pread(log.fileno(), 4096, max(0, size - 4096)).decode("utf-8", "replace")
    except (OSError, ValueError):  # the child has just ended, and its log is closed
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("paceline: ") if lines else ""


MOST_RESULTS = 6
"""Results that are remembered, of all runs together."""


class RecentResults:
    """The last few results, by run and name; of one run the newest is last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._results: dict[tuple[Path, str], ReplayResult] = {}

    def put(self, path: Path, key: str, result: ReplayResult) -> None:
        with self._lock:
            self._results.pop((path, key), None)
            self._results[path, key] = result
            while len(self._results) > MOST_RESULTS:
                del self._results[next(iter(self._results))]

    def get(self, path: Path, key: str) -> ReplayResult | None:
        with self._lock:
            if (found := self._results.pop((path, key), None)) is not None:
                self._results[path, key] = found  # the newest is last
            return found

    def of_run(self, path: Path) -> dict[str, ReplayResult]:
        with self._lock:
            return {key: result for (where, key), result in self._results.items() if where == path}


class ReplayRunner:
    """Starts and cancels replays; its processes end with the app."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._children: dict[Path, ReplayProcess] = {}
        self.results = RecentResults()
        self.close = weakref.finalize(self, _cancel_all, self._children)

    def start(self, run: RunFolder, step: int, changes: dict[str, Value]) -> dict[str, Any]:
        """Replay a step, with some settings changed; refused while another replay of the run goes on."""
        config = run.config()
        if not config:
            raise HTTPException(409, "the run has no run file that can be read, so its model and loss are unknown")
        if reason := replay_refusal(config):
            raise HTTPException(409, f"{reason}: paceline replay {run.path} {step}")
        if step not in run.batches():
            raise HTTPException(404, f"the samples of step {step} are not kept")
        written = change_flags(run.path / "config.toml", config, changes)
        key, path, results = result_key(step, changes), run.path, self.results  # a child must not hold on to the runner

        def on_finished(data: bytes) -> None:
            results.put(path, key, ReplayResult(data, step, changes))

        with self._lock:
            before = self._children.get(path)
            if before is not None and before.state == "working":
                raise HTTPException(409, "a step of this run is being replayed already: wait for it, or cancel it")
            child = self._children[path] = ReplayProcess(path, step, written, on_finished, key=key)
        return child.as_json()

    def cancel(self, run: RunFolder) -> None:
        if (child := self._children.get(run.path)) is not None:
            child.cancel()

    def job(self, run: RunFolder) -> dict[str, Any] | None:
        """The run's last replay: its state and the key of its result."""
        child = self._children.get(run.path)
        return None if child is None else child.as_json()


def result_key(step: int, changes: dict[str, Value]) -> str:
    """A stable key of a step and its changed settings, fit for a URL."""
    if not changes:
        return str(step)
    written = json.dumps(changes, sort_keys=True)
    return f"{step}-{hashlib.sha256(written.encode()).hexdigest()[:10]}"


def _cancel_all(children: dict[Path, ReplayProcess]) -> None:
    for child in list(children.values()):
        child.cancel()


CHECKPOINT = re.compile(r"step-(\d+)")

router = APIRouter()


def _runner(request: Request) -> ReplayRunner:
    return request.app.state.replays


def _require_own_page(request: Request) -> None:
    """Starting a process is for our own pages: a page elsewhere can send a form to a loopback address, but neither JSON
    nor our origin with it, at which the guard of the app has looked already."""
    if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        raise HTTPException(403, "only a page of this server may start or end a replay")
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise HTTPException(415, "send JSON: Content-Type: application/json")


Runner = Annotated[ReplayRunner, Depends(_runner)]
Key = Annotated[str, Query(max_length=100)]


class ReplayRequest(BaseModel):
    """A replay request. Settings are names of the run file with their values."""

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
            "settings": form_fields(config),
            "refusal": replay_refusal(config),
            "job": runner.job(run),
            "results": [
                {"key": key, "step": result.step, "changes": result.changes}
                for key, result in runner.results.of_run(run.path).items()
            ],
        }
    )


@router.get("/replay/job")
def job(run: OneRun, runner: Runner) -> Response:
    return FiniteJsonResponse({"job": runner.job(run)})


@router.post("/replay/start", dependencies=[Depends(_require_own_page)])
def start(run: OneRun, runner: Runner, request: ReplayRequest) -> Response:
    """Replay a step in a process of its own."""
    return FiniteJsonResponse({"job": runner.start(run, request.step, request.settings)})


@router.post("/replay/cancel", dependencies=[Depends(_require_own_page)])
def cancel(run: OneRun, runner: Runner) -> Response:
    runner.cancel(run)
    return FiniteJsonResponse({"job": runner.job(run)})


@router.get("/replay/result")
def result(run: OneRun, runner: Runner, of: Key = "", against: Key = "", component: Key = "") -> Response:
    """The loss, the samples and the weightiest tokens; `against` another result by what differs. Null: not known."""
    one, other = (runner.results.get(run.path, key) for key in (of, against))
    missing = one is None or (against and other is None)
    return FiniteJsonResponse({"result": None if missing else result_summary(one, other, component)})


@router.get("/replay/sample")
def one_sample(
    run: OneRun, runner: Runner, of: Key = "", against: Key = "", sample_: Annotated[int, Query(alias="sample")] = 0
) -> Response:
    """All tokens of one sample. Null: the result is not known any more."""
    one, other = (runner.results.get(run.path, key) for key in (of, against))
    return FiniteJsonResponse({"sample": None if one is None else sample_view(one, other, sample_)})
