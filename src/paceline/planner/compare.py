"""Compares the plan of a run with what the run measured."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from paceline.config import load
from paceline.errors import PacelineError
from paceline.planner.plan import FILE, ResourcePlan, kept_hardware, predict
from paceline.planner.shape import shape_of
from paceline.planner.work import Work, assumed
from paceline.record.folder import Columns, open_run

WARM = 0.2
"""The part of a run that is left out: it fills its pipeline and compiles."""


@dataclass(frozen=True, slots=True)
class ComparedFigure:
    """One figure: as planned, as planned had the lengths been known, as measured."""

    what: str
    unit: str
    planned: float
    informed: float
    measured: float

    @property
    def ratio(self) -> float:
        """Measured by planned."""
        return self.measured / self.planned if self.planned else float("nan")

    @property
    def informed_ratio(self) -> float:
        return self.measured / self.informed if self.informed else float("nan")


@dataclass(frozen=True, slots=True)
class Comparison:
    """A run's plan and its outcome. Lines whose ratio would mean nothing are left out."""

    directory: Path
    steps: int
    lines: list[ComparedFigure]
    busy: str = ""
    """Other load on the machine when the run began, if any."""
    problems: list[str] = field(default_factory=list)
    """What could not be read, each as a sentence."""

    def table(self) -> dict[str, Any]:
        return {
            "run": str(self.directory),
            "steps": self.steps,
            "busy": self.busy,
            "problems": self.problems,
            "lines": [
                {name: getattr(line, name) for name in ("what", "unit", "planned", "informed", "measured")}
                | {"ratio": line.ratio, "informed_ratio": line.informed_ratio}
                for line in self.lines
            ],
        }


def compare(directory: Path) -> Comparison:
    """From `plan.json`, `config.toml` and `metrics.jsonl` of a run directory."""
    for name in (FILE, "config.toml", "metrics.jsonl"):
        if not (directory / name).is_file():
            raise PacelineError(f"{directory} has no {name}: name the directory of a run that has begun")
    table = _planned(directory / FILE)
    run = open_run(directory)
    steps = [line for line in _figures(run.metrics()) if line.get("time/step")]
    if not steps:
        raise PacelineError(f"{directory} has not finished a step yet: come back after one")
    warm = steps[int(WARM * len(steps)) :]
    config = load(str(directory / "config.toml")).config
    work = measured_work(assumed(config, shape_of(config.model.name)), warm)
    hardware = kept_hardware(table)
    informed = predict(config, hardware, work)
    problems = run.problems(patient=False)
    return Comparison(directory, len(steps), _lines(table, informed, warm), hardware.busy, problems)


def _planned(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_bytes())
    except ValueError as error:
        raise PacelineError(f"{file} cannot be read: {error}") from None


def _figures(columns: Columns) -> Iterator[dict[str, float]]:
    """The figures that each line has."""
    for values in zip(*columns.values(), strict=True):
        yield {name: value for name, value in zip(columns, values, strict=True) if value is not None}


def measured_work(work: Work, steps: Sequence[dict[str, Any]]) -> Work:
    """The lengths of a run, and the share of groups it could use."""

    def mean(key: str, default: float) -> float:
        return fmean(line[key] for line in steps if key in line) if any(key in line for line in steps) else default

    reply = mean("length", work.reply)
    drawn = fmean(1 / max(0.01, 1 - line.get("drop_ratio", 0.0)) for line in steps)  # groups, for one that trains
    trajectory = mean("trajectory_length", work.prompt + work.reply)
    return Work(
        rollouts=mean("batch/rollouts", work.rollouts),
        group=work.group,
        prompt=max(1.0, trajectory - reply),
        reply=reply,
        longest=work.longest,
        kept=1 / drawn,
        played=work.played,
        evaluated=work.evaluated,
        assumed=False,
    )


def _peak(planned: float, informed: float, steps: Sequence[dict[str, Any]]) -> ComparedFigure | None:
    """Memory of the trainer's process: a peak is no mean."""
    found = [entry["memory/trainer"] for entry in steps if entry.get("memory/trainer")]
    return (
        ComparedFigure("memory of the trainer's process", "GB", planned / 1e9, informed / 1e9, max(found) / 1e9)
        if found
        else None
    )


def _lines(table: dict[str, Any], informed: ResourcePlan, steps: Sequence[dict[str, Any]]) -> list[ComparedFigure]:
    planned, times = table.get("times"), informed.times
    if planned is None or times is None:
        raise PacelineError("the plan says nothing about time, because the hardware's speed is not known")

    def line(what: str, unit: str, then: float, now: float, key: str) -> ComparedFigure | None:
        values = [entry[key] for entry in steps if entry.get(key)]
        return ComparedFigure(what, unit, then, now, fmean(values)) if values and then > 0 and now > 0 else None

    work, step = table["work"], planned["step"]
    sampled = work["rollouts"] * work["played"] / work["kept"] * work["reply"]
    found = [
        line("step", "s", step, times.step, "time/step"),
        line("train", "s", planned["train"], times.train, "time/train"),
        line("publish", "s", planned["publish"], times.publish, "time/publish"),
        line("waiting for samples", "s", planned["waits"], times.waits, "time/sample"),
        line(
            "sampled tokens", "/s", sampled / step, informed.work.sampled * informed.work.reply / times.step, "tokens/s"
        ),
        line("trained tokens", "/s", planned["train_tokens_s"], times.train_tokens_s, "train_tokens/s"),
        line("reply", "tokens", work["reply"], informed.work.reply, "length"),
        line("evaluation", "s", planned.get("evaluate", 0.0), times.evaluate, "time/eval"),
        line("scoring by teachers", "s", planned["score"], times.score, "time/score"),
        _peak(table["memory"].get("process", 0.0), informed.memory.process, steps),
    ]
    return [one for one in found if one is not None]
