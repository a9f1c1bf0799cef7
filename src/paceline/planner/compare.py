"""Compares the plan of a run with what the run measured, and renders both for a terminal."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Group
from rich.table import Column, Table
from rich.text import Text

from paceline.config import load
from paceline.config.hardware import HardwareSpec
from paceline.errors import PacelineError
from paceline.observe.record.folder import Columns, open_run
from paceline.planner.hardware import Hardware
from paceline.planner.plan import FILE, ResourcePlan, predict
from paceline.planner.shape import Work, assumed, shape_of
from paceline.planner.speed import Times

NO_ROOM = "no room for the keys and values of one request of full length"
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

    def ratios(self) -> dict[str, float]:
        """Measured by planned, in either way."""
        pairs = {"ratio": self.planned, "informed_ratio": self.informed}
        return {name: self.measured / value if value else float("nan") for name, value in pairs.items()}


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
            "lines": [asdict(line) | line.ratios() for line in self.lines],
        }


def compare(directory: Path) -> Comparison:
    """From `plan.json`, `config.toml` and `metrics.jsonl` of a run directory."""
    for name in (FILE, "config.toml", "metrics.jsonl"):
        if not (directory / name).is_file():
            raise PacelineError(f"{directory} has no {name}: name the directory of a run that has begun")
    try:
        table = json.loads((directory / FILE).read_bytes())
    except ValueError as error:
        raise PacelineError(f"{directory / FILE} cannot be read: {error}") from None
    run = open_run(directory)
    steps = [line for line in _figures(run.metrics()) if line.get("time/step")]
    if not steps:
        raise PacelineError(f"{directory} has not finished a step yet: come back after one")
    warm = steps[int(WARM * len(steps)) :]
    config = load(str(directory / "config.toml")).config
    work = measured_work(assumed(config, shape_of(config.model.name)), warm)
    fields = table["hardware"]
    hardware = Hardware(**fields | {"card": HardwareSpec(**fields["card"])})
    informed = predict(config, hardware, work)
    problems = run.problems(patient=False)
    return Comparison(directory, len(steps), _lines(table, informed, warm), hardware.busy, problems)


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
    return replace(
        work,
        rollouts=mean("batch/rollouts", work.rollouts),
        prompt=max(1.0, trajectory - reply),
        reply=reply,
        kept=1 / drawn,
        assumed=False,
    )


def _lines(table: dict[str, Any], informed: ResourcePlan, steps: Sequence[dict[str, Any]]) -> list[ComparedFigure]:
    planned, times = table.get("times"), informed.times
    if planned is None or times is None:
        raise PacelineError("the plan says nothing about time, because the hardware's speed is not known")

    work, step = table["work"], planned["step"]
    sampled = work["rollouts"] * work["played"] / work["kept"] * work["reply"]
    sampled_now = informed.work.sampled * informed.work.reply
    figures = [
        ("step", "s", step, times.step, "time/step"),
        ("train", "s", planned["train"], times.train, "time/train"),
        ("publish", "s", planned["publish"], times.publish, "time/publish"),
        ("waiting for samples", "s", planned["waits"], times.waits, "time/sample"),
        ("sampled tokens", "/s", sampled / step, sampled_now / times.step, "tokens/s"),
        ("trained tokens", "/s", planned["train_tokens_s"], times.train_tokens_s, "train_tokens/s"),
        ("reply", "tokens", work["reply"], informed.work.reply, "length"),
        ("evaluation", "s", planned.get("evaluate", 0.0), times.evaluate, "time/eval"),
        ("scoring by teachers", "s", planned["score"], times.score, "time/score"),
    ]
    found = []
    for what, unit, then, now, key in figures:
        values = [entry[key] for entry in steps if entry.get(key)]
        if values and then > 0 and now > 0:
            found.append(ComparedFigure(what, unit, then, now, fmean(values)))
    if peaks := [entry["memory/trainer"] for entry in steps if entry.get("memory/trainer")]:
        process = table["memory"].get("process", 0.0) / 1e9, informed.memory.process / 1e9, max(peaks) / 1e9
        found.append(ComparedFigure("memory of the trainer's process", "GB", *process))
    return found


def plan_report(plan: ResourcePlan) -> Group:
    """Memory, time, and what to do about either."""
    shown: list[Table | Text] = [Text(_head(plan)), _memory_table(plan)]
    if plan.memory.fits:
        holds = f"fits; the KV cache holds {plan.memory.requests} requests of full length"
        shown.append(Text(holds, style="green"))
    else:
        missing = f"{plan.memory.missing / 1e9:.1f} GB too much" if plan.memory.missing else NO_ROOM
        if plan.memory.lacking:
            missing = f"the run wants {plan.layout.devices} GPUs and there are {plan.hardware.count}"
        shown.append(Text(f"does not fit: {missing}", style="red"))
        shown += [Text(f"  {'or ' if i else ''}{advice.sentence}") for i, advice in enumerate(plan.advice)]
    if plan.times is not None:
        others = ", ".join(f"{way.name} {_s(way.seconds)} s" for way in plan.ways if not way.used)
        shown += [_time_table(plan, plan.times), Text(f"publishing otherwise would take: {others}")]
    shown.append(Text(plan.verdict))
    if plan.hardware.busy:
        shown.append(Text(plan.hardware.busy, style="yellow"))
    if plan.times is not None:
        shown.append(Text(f"speeds by {plan.source}", style="dim"))
    return Group(*shown)


def _head(plan: ResourcePlan) -> str:
    work = plan.work
    how = "assumed" if work.assumed else "given"
    return (
        f"{plan.hardware.label} ({plan.hardware.origin}); {_count(plan.parameters)} parameters; a batch of "
        f"{work.rollouts:.0f} with {work.prompt:.0f} tokens in and {work.reply:.0f} out ({how})"
    )


def _memory_table(plan: ResourcePlan) -> Table:
    headings = (p.name + (f" (each of {p.count})" if p.count > 1 else "") for p in plan.memory.places)
    table = Table("", *(Column(one, justify="right") for one in headings), title="memory, GB", title_justify="left")
    names = dict.fromkeys(name for place in plan.memory.places for name in place.parts)
    for name in names:
        table.add_row(name, *(_gb(place.parts.get(name)) for place in plan.memory.places))
    table.add_section()
    table.add_row("all", *(_gb(place.used) for place in plan.memory.places))
    table.add_row("there is", *("?" if p.capacity is None else _gb(p.capacity) for p in plan.memory.places))
    return table


def _time_table(plan: ResourcePlan, times: Times) -> Table:
    figures = Column("seconds", justify="right"), Column("at", justify="right")
    table = Table("phase", *figures, title="one batch", title_justify="left")
    table.add_row(
        "sample", _s(times.sample), f"{_count(times.decode_tokens_s)} tokens/s, {times.running:.0f} at once an engine"
    )
    if times.score:
        table.add_row("score", _s(times.score), "by teachers")
    table.add_row("train", _s(times.train), f"{_count(times.train_tokens_s)} tokens/s")
    used = next(way for way in plan.ways if way.used)
    table.add_row("publish", _s(times.publish), f"{used.name}, {used.bytes / 1e9:.2g} GB")
    table.add_section()
    table.add_row("step", _s(times.step), f"waits {_s(times.waits)} s for samples")
    if times.evaluate:
        table.add_row("evaluation", _s(times.evaluate), f"{plan.work.evaluated:.0f} episodes, beside the steps")
    return table


def comparison_report(comparison: Comparison) -> Group:
    headings = ("planned", "measured", "ratio", "planned, had the lengths been known", "ratio")
    figures = [Column(heading, justify="right") for heading in headings]
    table = Table("", *figures, title=f"{comparison.directory}, {comparison.steps} steps", title_justify="left")
    for line in comparison.lines:
        planned, informed = (f"{ratio:.2f}" for ratio in line.ratios().values())
        cells = _number(line.planned), _number(line.measured), planned, _number(line.informed), informed
        table.add_row(f"{line.what}, {line.unit}", *cells)
    note = "ratios are measured by planned, means of all steps but the first fifth"
    busy = [Text(f"when it began, {comparison.busy}", style="yellow")] if comparison.busy else []
    problems = [Text(problem, style="yellow") for problem in comparison.problems]
    return Group(table, Text(note, style="dim"), *busy, *problems)


def _gb(size: float | None) -> str:
    if size is None:
        return ""
    return f"{size / 1e9:.2f}" if size >= 5e6 or not size else "< 0.01"


def _s(seconds: float) -> str:
    return f"{seconds:.3g}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _count(value: float) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.0f}"
