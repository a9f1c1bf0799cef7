"""Computes the coordinates of the charts and the timeline that `report.html` draws as SVG."""

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.observe.analysis.text import format_number, safe_line
from paceline.observe.analysis.timeline import lanes
from paceline.observe.monitor.text import format_count
from paceline.observe.record import RunFolder

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 460, 190
LEFT, RIGHT, TOP, BOTTOM = 50, 8, 8, 22
CURVE_BINS = 220
"""Points of a curve that are drawn, twice: a lowest and a highest each."""
COLOURS = 8
DOTS_BELOW = 16
"""Curves with fewer points get a dot at each."""
MOST_CURVES = 2 * COLOURS
"""Beyond the colours curves are dashed."""
LARGE = 1e5
"""From here on values beside an axis are shortened (1.2M), or they would not fit."""
DRAWN_LIMIT = 1e30
"""Larger absolute values and NaN are not drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartSpec:
    """Which metrics one chart shows; as on the page of a run (`js/curves.js`), in the same words and order."""

    title: str
    hint: str = ""
    pattern: str
    """The first chart whose pattern takes a metric has it; `env` is an environment, `what` the rest of the label."""
    unit: str = ""
    least: float | None = None
    """Where the axis begins at the latest."""
    most: float | None = None
    """Where it ends at the earliest."""
    percent: bool = False
    stacked: bool = False
    nonzero: bool = False
    """Curves that are always 0 are left out: a reason that never struck."""
    whole: str = ""
    """Label of a metric that names no part."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Labels of metrics whose own would not do."""
    colours: Mapping[str, int] = field(default_factory=dict)
    """Parts with a colour of their own, in the order in which they are shown."""

    def caption(self) -> str:
        return " · ".join(filter(None, (self.unit, self.hint)))


_SHARE: dict[str, Any] = {"percent": True, "least": 0.0, "most": 0.05}
CHARTS = (
    ChartSpec(
        title="Reward",
        hint="mean of what was sampled, before filters",
        pattern=r"reward/(?P<env>.+)/mean",
        unit="reward",
    ),
    ChartSpec(
        title="Held-out evaluation",
        hint="on rows that never train; exact and pass are shares",
        pattern=r"eval/(?P<env>.+)/(?P<what>reward|exact|pass@\d+)",
        unit="reward or share",
    ),
    ChartSpec(
        title="Loss by component", hint="each with its own normaliser", pattern=r"loss(?:/(?P<what>.+))?", whole="sum"
    ),
    ChartSpec(title="Gradient norm", hint="before clipping", pattern=r"(?P<what>grad_norm.*)", least=0.0),
    ChartSpec(
        title="Entropy",
        hint="a fall towards 0 is a collapse",
        pattern=r"(?P<what>entropy.*)",
        unit="nats a token",
        least=0.0,
    ),
    ChartSpec(
        title="KL and mismatch",
        hint="how far trainer and sampler are apart",
        pattern=r"(?P<what>ppo_kl|sampler_kl|teacher_kl|ref_kl|mismatch_kl|mismatch/(?!mask$|template$).+|kl.*)",
        unit="nats a token",
    ),
    ChartSpec(
        title="Clipped tokens",
        hint="held back by a bound of the loss",
        pattern=r"(?P<what>(?:teacher_kl/)?clip_fraction.*)",
        unit="share of trained tokens",
        **_SHARE,
    ),
    ChartSpec(
        title="Importance ratio",
        hint="1 where nothing has changed since sampling",
        pattern=r"(?P<what>ratio.*)",
        unit="ratio of probabilities",
    ),
    ChartSpec(
        title="Mismatch known before training",
        hint="tokens the mask cut, turns the template changed",
        pattern=r"mismatch/(?P<what>mask|template)",
        unit="share",
        **_SHARE,
    ),
    ChartSpec(title="Learning rate", hint="of the optimizer", pattern=r"(?P<what>lr.*)", least=0.0),
    ChartSpec(
        title="Environment metrics",
        hint="mean of what each environment measures, in its own units",
        pattern=r"metric/(?P<env>[^/]+)/(?P<what>.+)",
    ),
    ChartSpec(
        title="Length",
        hint="sampled, and with the prompt",
        pattern=r"(?P<what>length|trajectory_length|stale_length)",
        unit="tokens",
        least=0.0,
    ),
    ChartSpec(
        title="Spread of rewards",
        hint="standard deviation in a batch",
        pattern=r"reward/(?P<env>[^/]+)/std",
        unit="reward",
        least=0.0,
    ),
    ChartSpec(
        title="Held-out length",
        hint="sampled in evaluation",
        pattern=r"eval/(?P<env>.+)/length",
        unit="tokens",
        least=0.0,
    ),
    ChartSpec(
        title="Truncated",
        hint="ran into max_tokens",
        pattern=r"(?:(?P<what>truncated_ratio)|eval/(?P<env>.+)/truncated_ratio)",
        unit="share of rollouts",
        whole="held-out",
        names={"truncated_ratio": "training"},
        **_SHARE,
    ),
    ChartSpec(title="Turns", pattern=r"(?P<what>turns)", unit="engine calls a rollout", least=0.0),
    ChartSpec(
        title="Dropped, by reason",
        pattern=r"dropped/(?P<what>.+)",
        unit="groups and samples a step",
        least=0.0,
        stacked=True,
        nonzero=True,
    ),
    ChartSpec(title="Dropped groups", pattern=r"(?P<what>drop_ratio)", unit="share of all groups", **_SHARE),
    ChartSpec(
        title="Staleness",
        hint="between sampling and training",
        pattern=r"staleness/(?P<what>.+)",
        unit="versions",
        least=0.0,
    ),
    ChartSpec(
        title="Throughput",
        hint="sampled and trained",
        pattern=r"(?P<what>tokens/s|train_tokens/s)",
        unit="tokens/s",
        least=0.0,
    ),
    ChartSpec(
        title="Busy and waiting",
        pattern=r"(?:busy/(?P<what>.+)|wait_time_ratio|overlap_ratio)",
        unit="share of the step",
        percent=True,
        least=0.0,
        most=1.0,
        names={"wait_time_ratio": "trainer waits", "device": "GPU", "overlap_ratio": "both at once"},
    ),
    ChartSpec(
        title="Engine",
        hint="requests decoded at once; what waits, and what gave up its place",
        pattern=r"engine/(?P<what>batch|waiting|preempted)",
        unit="requests",
        least=0.0,
    ),
    ChartSpec(
        title="Engine's KV cache",
        hint="in use at the end of a step; prompt tokens shared, not computed",
        pattern=r"engine/(?P<what>cache_used|shared_prompts)",
        unit="share",
        percent=True,
        least=0.0,
        most=1.0,
    ),
    ChartSpec(
        title="Memory",
        hint="the trainer's peak; of a device, what all processes hold",
        pattern=r"memory/(?P<what>.+)",
        unit="bytes",
        least=0.0,
    ),
    ChartSpec(
        title="Time of a step, by part",
        pattern=r"time/(?P<what>(?!step$).+)",
        unit="seconds",
        least=0.0,
        stacked=True,
        nonzero=True,
        colours={"sample": 3, "score": 6, "train": 1, "publish": 2, "eval": 4},
    ),
)


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps a range of numbers to a range of pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self, most: int) -> list[float]:
        """Round numbers inside the range."""
        rough = (self.high - self.low) / most
        size = 10.0 ** math.floor(math.log10(rough))
        each = next(size * unit for unit in (1, 2, 5, 10) if size * unit >= rough * 0.999)
        first = math.ceil(self.low / each - 1e-9)
        return [number * each for number in range(first, math.floor(self.high / each + 1e-9) + 1)]


def axis_bounds(values: Sequence[float], least: float | None = None, most: float | None = None) -> tuple[float, float]:
    """Bounds of an axis that hold all values and are never empty."""
    low, high = min(values), max(values)
    low, high = low if least is None else min(least, low), high if most is None else max(most, high)
    room = max(high - low, abs(high) * 1e-3, 1e-9)
    return (low if least is not None and low == least else low - 0.04 * room), high + 0.04 * room


def downsample(points: Points, bins: int) -> Points:
    """At most a lowest and a highest point for each bin, so that no spike is lost."""
    if len(points) <= 2 * bins:
        return points
    edges = [place * len(points) // bins for place in range(bins + 1)]
    parts = [sorted(points[a:b], key=lambda point: point[1]) for a, b in itertools.pairwise(edges)]
    return [point for part in parts for point in sorted({part[0], part[-1]})]


def run_charts(run: RunFolder) -> list[dict[str, Any]]:
    """The charts of a run's metrics that have any point."""
    columns = run.metrics()
    found: dict[str, dict[str, re.Match[str]]] = {spec.title: {} for spec in CHARTS}
    for name in columns:
        for spec in CHARTS:
            if matched := re.fullmatch(spec.pattern, name, re.DOTALL):
                found[spec.title][name] = matched
                break
    charts = []
    for spec in CHARTS:
        series = {}
        for label, name in _labels(spec, found[spec.title]).items():
            pairs = zip(columns["step"], columns[name], strict=True)
            points = [(step, value) for step, value in pairs if step is not None and value is not None]
            if not spec.nonzero or any(value for _, value in points):
                series[label] = points
        charts.append(build_chart(spec, series))
    return list(filter(None, charts))


def _labels(spec: ChartSpec, found: Mapping[str, re.Match[str]]) -> dict[str, str]:
    """The metrics by their labels: one environment needs no name on each curve; what is measured always has one."""
    parts = {}
    for name, matched in found.items():
        groups = matched.groupdict()
        what = spec.names.get(name) or (groups.get("what") or spec.whole).replace("_", " ")
        parts[name] = groups.get("env") or "", what
    several_envs = len({env for env, _ in parts.values()}) > 1
    labels: dict[str, str] = {}
    for name, (env, what) in parts.items():
        shown = [env if several_envs or not what else "", what]
        label = " · ".join(filter(None, shown)) or name
        labels[name if label in labels else label] = name
    return labels


def build_chart(spec: ChartSpec, series: Mapping[str, Points]) -> dict[str, Any] | None:
    """A chart of these curves, with the step on the x axis; nothing where there is no point."""
    # NaN is not less than anything.
    clean = {
        name: [(x, y) for x, y in p if abs(x) < DRAWN_LIMIT and abs(y) < DRAWN_LIMIT] for name, p in series.items()
    }
    order = [*spec.colours, *clean]
    measured = sorted(((name, p) for name, p in clean.items() if p), key=lambda one: order.index(one[0]))
    drawn = list(_stack(measured)) if spec.stacked else [(name, points, []) for name, points in measured]
    shown = drawn[:MOST_CURVES]
    if not shown:
        return None
    title = spec.title
    x = Scale(*axis_bounds([step for _, points, _ in shown for step, _ in points]), LEFT, WIDTH - RIGHT)
    values = [value for _, points, _ in shown for _, value in points]
    y = Scale(*axis_bounds(values, spec.least, spec.most), HEIGHT - BOTTOM, TOP)
    lasts = {name: _format(spec, points[-1][1]) for name, points in measured}
    ends = "; ".join(
        f"{name or title} from {_format(spec, first)} at step {start:.0f} to {lasts[name]} at step {end:.0f}"
        for name, points in measured[:MOST_CURVES]
        for (start, first), (end, _) in [(points[0], points[-1])]
    )
    ticks = y.ticks(4)
    large = max(map(abs, ticks)) >= LARGE
    # A label beyond the last point would not fit on the paper.
    end = max(step for _, points, _ in shown for step, _ in points)
    steps = sorted({round(tick) for tick in x.ticks(6) if 0 <= tick <= end})
    return {
        "title": title,
        "hint": spec.caption(),
        "label": f"{title}: {ends}",
        "rows": [(y(tick), _tick(spec, tick, large)) for tick in ticks],
        "steps": [(x(step), f"{step:,}") for step in steps if x.low <= step <= x.high],
        "curves": [
            {
                "name": name,
                "colour": f"s{spec.colours.get(name, place % COLOURS + 1)}" + (" dashed" if place >= COLOURS else ""),
                "area": spec.stacked and len(points) > 1,
                "line": " ".join(
                    f"{x(step)},{y(value)}"
                    for step, value in [*downsample(points, CURVE_BINS), *reversed(downsample(floor, CURVE_BINS))]
                ),
                "dots": [(x(step), y(value)) for step, value in points] if len(points) < DOTS_BELOW else [],
                "last": lasts[name],
            }
            for place, (name, points, floor) in enumerate(shown)
        ],
        "more": len(drawn) - len(shown),
    }


def _stack(series: Sequence[tuple[str, Points]]) -> Iterator[tuple[str, Points, Points]]:
    """Each part on top of those before it, and the floor it stands on; a part that is missing counts as 0."""
    steps = sorted({step for _, points in series for step, _ in points})
    floor = dict.fromkeys(steps, 0.0)
    for name, points in series:
        part = dict(points)
        top = {step: floor[step] + part.get(step, 0.0) for step in steps}
        yield name, list(top.items()), list(floor.items())
        floor = top


def _format(spec: ChartSpec, value: float) -> str:
    return (
        f"{100 * value:.3g}%" if spec.percent else format_count(value) if abs(value) >= LARGE else format_number(value)
    )


def _tick(spec: ChartSpec, tick: float, large: bool) -> str:
    return f"{100 * tick:.3g}%" if spec.percent else format_count(tick) if large else f"{tick:,.6g}"


LANE_WIDTH, ROW, GAP, LANE_LEFT = 720, 24, 8, 130
LANE_BINS = 200
MOST_LANES = 12
LANE_COLOURS = {"wait": "idle", "train": "s1", "score": "s6", "publish": "s2", "eval": "s4"}
LANE_COLOURS |= {"playing": "s8", "calls": "s5"}
"""Colours of what lanes do; the rest is an engine's work."""


def timeline(run: RunFolder) -> dict[str, Any] | None:
    """The lanes of the whole run; nothing where nothing was timed."""
    found = lanes(run, None, None, LANE_BINS)
    start, end = found["extent"] or (0, 0)
    if end <= start:
        return None
    x, shown = Scale(start, end, LANE_LEFT, LANE_WIDTH), found["lanes"][:MOST_LANES]
    more = len(found["lanes"]) - MOST_LANES
    left_out = f"; {more} more lanes are in `paceline ui`" if more > 0 else ""
    floors = [place * (ROW + GAP) + ROW for place in range(len(shown))]
    return {
        "hint": f"height is a share of the time; grey is waiting{left_out}",
        "label": f"Lanes of {', '.join(lane['lane'] for lane in shown)} over {end - start:.0f} seconds",
        "height": len(shown) * (ROW + GAP) + 18,
        "seconds": f"{end - start:,.0f} s",
        "rows": [
            (safe_line(lane["lane"].replace("environment ", "env "), 19), floor, _boxes(lane["spans"], floor, x))
            for lane, floor in zip(shown, floors, strict=True)
        ],
    }


def _boxes(spans: Sequence[Sequence], floor: int, x: Scale) -> list[dict[str, Any]]:
    boxes = []
    stacked: dict[float, float] = defaultdict(float)  # bins of several kinds are stacked
    for begun, ended, kind, share, *_ in spans:
        left, height = max(float(LANE_LEFT), x(begun)), round(share * ROW, 1)
        width = round(min(x(ended), LANE_WIDTH) - left, 1)
        if width > 0 or height > 0:
            stacked[begun] += height
            at = {"x": left, "y": round(floor - stacked[begun], 1), "width": max(width, 0.5), "height": height}
            boxes.append(at | {"colour": LANE_COLOURS.get(kind, "s3")})
    return boxes
