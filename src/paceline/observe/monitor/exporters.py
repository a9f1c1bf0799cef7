"""Exports metrics to Weights & Biases, TensorBoard or Trackio. Each needs its extra, and none is on by default."""

import importlib
import math
import os
import time
import uuid
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Literal

from paceline.errors import PacelineError
from paceline.observe.monitor.base import Monitor, RunOutcome, RunPlan

Kind = Literal["wandb", "tensorboard", "trackio"]


class Wandb(Monitor):
    """Weights & Biases: `WANDB_MODE` if it is set, else online with a `WANDB_API_KEY` and offline without.

    Steps travel as a metric of their own, since wandb drops what is logged at a step it has already passed,
    and a resumed run goes back to its checkpoint.
    """

    def __init__(self, project: str) -> None:
        self._wandb = _require("wandb", "wandb")
        self._project = project
        self._run: Any = None

    def begin(self, plan: RunPlan) -> None:
        saved_id = plan.directory / "wandb-id"  # one for a run and its resumptions; `--overwrite` removes it
        if not saved_id.exists():
            saved_id.write_text(uuid.uuid4().hex[:12])
        mode = os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
        self._run = self._wandb.init(
            project=self._project,
            name=plan.name,
            id=saved_id.read_text().strip(),
            resume="allow",
            dir=plan.directory,
            config=plan.config,
            mode=mode,
            # The terminal is the screen's; offline there is no address worth printing either.
            settings=self._wandb.Settings(console="off", silent=mode == "offline"),
        )
        self._run.define_metric("*", step_metric="step")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **_finite(metrics)})

    def end(self, outcome: RunOutcome) -> None:
        self.close(0 if outcome.status == "finished" else 1)

    def close(self, exit_code: int = 1) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish(exit_code=exit_code)


class TensorBoard(Monitor):
    """Event files in `tensorboard/` of the run directory, written by tensorboard itself, without torch."""

    def __init__(self) -> None:
        self._writing = _require("tensorboard.summary.writer.event_file_writer", "tensorboard")
        self._events = _require("tensorboard.compat.proto.event_pb2", "tensorboard")
        self._summaries = _require("tensorboard.compat.proto.summary_pb2", "tensorboard")
        self._writer: Any = None

    def begin(self, plan: RunPlan) -> None:
        self._writer = self._writing.EventFileWriter(str(plan.directory / "tensorboard"))
        self.roll_back(plan.start_step)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        value = self._summaries.Summary.Value
        values = [value(tag=tag, simple_value=number) for tag, number in _finite(metrics).items()]
        self._write(step, summary=self._summaries.Summary(value=values))

    def roll_back(self, step: int) -> None:
        """A session start makes readers forget what an undone part of the run wrote at later steps."""
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        self._write(step + 1, session_log=start)

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _write(self, step: int, **content: Any) -> None:
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, **content))
        self._writer.flush()


class Trackio(Monitor):
    """Trackio: local, in its own cache folder, unless its environment variables say otherwise."""

    def __init__(self, project: str) -> None:
        self._trackio = _require("trackio", "trackio")
        self._project = project
        self._run: Any = None

    def begin(self, plan: RunPlan) -> None:
        self._run = self._trackio.init(
            project=self._project,
            name=plan.name,
            config=plan.config,
            resume="allow" if plan.start_step else "never",
            embed=False,
        )

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(_finite(metrics), step=step)

    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish()


def exporter(kind: Kind, project: str) -> Monitor:
    """The exporter of that name; a `PacelineError` if its package is not installed."""
    if kind == "tensorboard":
        return TensorBoard()
    return Wandb(project) if kind == "wandb" else Trackio(project)


def _require(module: str, extra: str) -> ModuleType:
    missing = module
    try:
        found = importlib.import_module(module)
        # wandb leaves a folder `wandb` where it ran, which imports as an empty namespace package.
        if getattr(found, "__file__", None) is not None:
            return found
    except ModuleNotFoundError as error:
        missing = error.name or module
    raise PacelineError(f"the {extra} exporter needs the package `{missing}`: pip install 'paceline[{extra}]'")


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    return {key: float(value) for key, value in metrics.items() if math.isfinite(value)}
