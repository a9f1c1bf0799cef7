"""Renders a plan, and its comparison with the run, for a terminal."""

from rich.console import Group
from rich.table import Table
from rich.text import Text

from paceline.planner.compare import Comparison
from paceline.planner.layout import DevicePlace
from paceline.planner.plan import ResourcePlan


def plan_report(plan: ResourcePlan) -> Group:
    """Memory, time, and what to do about either."""
    shown: list[Table | Text] = [Text(_head(plan)), _memory_table(plan)]
    if plan.memory.fits:
        holds = f"fits; the KV cache holds {plan.memory.requests} requests of full length"
        shown.append(Text(holds, style="green"))
    else:
        shown.append(Text(f"does not fit: {_trouble(plan)}", style="red"))
        shown += [Text(f"  {'or ' if i else ''}{advice.sentence}") for i, advice in enumerate(plan.advice)]
    if plan.times is not None:
        shown += [_time_table(plan), _ways_line(plan)]
    shown.append(Text(plan.verdict))
    if plan.hardware.busy:
        shown.append(Text(plan.hardware.busy, style="yellow"))
    if plan.times is not None:
        shown.append(Text(f"speeds by {plan.source}", style="dim"))
    return Group(*shown)


def _trouble(plan: ResourcePlan) -> str:
    if plan.memory.lacking:
        return f"the run wants {plan.layout.devices} GPUs and there are {plan.hardware.count}"
    if plan.memory.missing:
        return f"{plan.memory.missing / 1e9:.1f} GB too much"
    return "no room for the keys and values of one request of full length"


def _head(plan: ResourcePlan) -> str:
    work = plan.work
    how = "assumed" if work.assumed else "given"
    return (
        f"{plan.hardware.label} ({plan.hardware.origin}); {_count(plan.parameters)} parameters; a batch of "
        f"{work.rollouts:.0f} with {work.prompt:.0f} tokens in and {work.reply:.0f} out ({how})"
    )


def _memory_table(plan: ResourcePlan) -> Table:
    table = Table(title="memory, GB", title_justify="left")
    table.add_column("")
    for place in plan.memory.places:
        table.add_column(place.name + (f" (each of {place.count})" if place.count > 1 else ""), justify="right")
    names = dict.fromkeys(name for place in plan.memory.places for name in place.parts)
    for name in names:
        table.add_row(name, *(_gb(place.parts.get(name)) for place in plan.memory.places))
    table.add_section()
    table.add_row("all", *(_gb(place.used) for place in plan.memory.places))
    table.add_row("there is", *(_room(place) for place in plan.memory.places))
    return table


def _time_table(plan: ResourcePlan) -> Table:
    times = plan.times
    assert times is not None
    table = Table(title="one batch", title_justify="left")
    for name in ("phase", "seconds", "at"):
        table.add_column(name, justify="left" if name == "phase" else "right")
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


def _ways_line(plan: ResourcePlan) -> Text:
    others = ", ".join(f"{way.name} {_s(way.seconds)} s" for way in plan.ways if not way.used)
    return Text(f"publishing otherwise would take: {others}")


def comparison_report(comparison: Comparison) -> Group:
    table = Table(title=f"{comparison.directory}, {comparison.steps} steps", title_justify="left")
    for name in ("", "planned", "measured", "ratio", "planned, had the lengths been known", "ratio"):
        table.add_column(name, justify="right" if name else "left")
    for line in comparison.lines:
        table.add_row(
            f"{line.what}, {line.unit}",
            _number(line.planned),
            _number(line.measured),
            f"{line.ratio:.2f}",
            _number(line.informed),
            f"{line.informed_ratio:.2f}",
        )
    note = "ratios are measured by planned, means of all steps but the first fifth"
    busy = [Text(f"when it began, {comparison.busy}", style="yellow")] if comparison.busy else []
    problems = [Text(problem, style="yellow") for problem in comparison.problems]
    return Group(table, Text(note, style="dim"), *busy, *problems)


def _gb(size: float | None) -> str:
    if size is None:
        return ""
    return f"{size / 1e9:.2f}" if size >= 5e6 or not size else "< 0.01"


def _room(place: DevicePlace) -> str:
    return "?" if place.capacity is None else _gb(place.capacity)


def _s(seconds: float) -> str:
    return f"{seconds:.3g}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _count(value: float) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.0f}"
