"""Computes the coordinates of the charts and the timeline that `report.html` draws as SVG."""

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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

CHARTS = (
    ("Reward", "mean of what was sampled, before filters", r"reward/(.+)/mean", None),
    ("Held-out evaluation", "on rows that never train", r"eval/(.+/(?:reward|exact|pass@\d+))", None),
    ("Loss by component", "each with its own normaliser", r"loss/?(.*)", None),
    ("Gradient norm", "before clipping", r"(grad_norm.*)", 0.0),
    ("Entropy", "nats a token; a fall towards 0 is a collapse", r"(entropy.*)", 0.0),
    (
        "KL and mismatch",
        "how far trainer and sampler are apart",
        r"((?:ppo|sampler|teacher|ref|mismatch)_kl)",
        0.0,
    ),
    ("Staleness", "versions between sampling and training", r"staleness/(.+)", 0.0),
    ("Throughput", "tokens a second, sampled and trained", r"(tokens/s|train_tokens/s)", 0.0),
    ("Length", "tokens sampled", r"(length)", 0.0),
    ("Dropped, by reason", "groups and samples a step", r"dropped/(.+)", 0.0),
)
"""Title, hint, which metrics, and where the axis begins at the latest; as on the page of a run (`js/curves.js`)."""


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


def axis_bounds(values: Sequence[float], least: float | None = None) -> tuple[float, float]:
    """Bounds of an axis that hold all values and are never empty."""
    low, high = min(values), max(values)
    low = low if least is None else min(least, low)
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
    columns, found = run.metrics(), []
    for title, hint, pattern, least in CHARTS:
        series = {}
        for name, column in columns.items():
            if matched := re.fullmatch(pattern, name, re.DOTALL):
                pairs = zip(columns["step"], column, strict=True)
                points = [(step, value) for step, value in pairs if step is not None and value is not None]
                # A reason that never struck needs no curve.
                if not title.startswith("Dropped") or any(value for _, value in points):
                    series[matched[1].replace("_", " ") or "sum"] = points
        found.append(build_chart(title, hint, series, least))
    return list(filter(None, found))


def build_chart(
    title: str, hint: str, series: Mapping[str, Points], least: float | None = None
) -> dict[str, Any] | None:
    """A chart of these curves, with the step on the x axis; nothing where there is no point."""
    # NaN is not less than anything.
    clean = {
        name: [(x, y) for x, y in p if abs(x) < DRAWN_LIMIT and abs(y) < DRAWN_LIMIT] for name, p in series.items()
    }
    drawn = [(name, points) for name, points in clean.items() if points]
    shown = drawn[:MOST_CURVES]
    if not shown:
        return None
    x = Scale(*axis_bounds([step for _, points in shown for step, _ in points]), LEFT, WIDTH - RIGHT)
    y = Scale(*axis_bounds([value for _, points in shown for _, value in points], least), HEIGHT - BOTTOM, TOP)
    ends = "; ".join(
        f"{name or title} from {format_number(first)} at step {start:.0f} to {format_number(last)} at step {end:.0f}"
        for name, points in shown
        for (start, first), (end, last) in [(points[0], points[-1])]
    )
    ticks = y.ticks(4)
    large = max(map(abs, ticks)) >= LARGE
    # A label beyond the last point would not fit on the paper.
    end = max(step for _, points in shown for step, _ in points)
    steps = sorted({round(tick) for tick in x.ticks(6) if 0 <= tick <= end})
    return {
        "title": title,
        "hint": hint,
        "label": f"{title}: {ends}",
        "rows": [(y(tick), format_count(tick) if large else f"{tick:,.6g}") for tick in ticks],
        "steps": [(x(step), f"{step:,}") for step in steps if x.low <= step <= x.high],
        "curves": [
            {
                "name": name,
                "colour": f"s{place % COLOURS + 1}" + (" dashed" if place >= COLOURS else ""),
                "line": " ".join(f"{x(step)},{y(value)}" for step, value in downsample(points, CURVE_BINS)),
                "dots": [(x(step), y(value)) for step, value in points] if len(points) < DOTS_BELOW else [],
                "last": format_number(points[-1][1]),
            }
            for place, (name, points) in enumerate(shown)
        ],
        "more": len(drawn) - len(shown),
    }


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
