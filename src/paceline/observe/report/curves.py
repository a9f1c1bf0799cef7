"""Curves and timelines of a report, as SVG.

HTML from elements and text. There is no way from a string to markup: whatever is no element is escaped.
"""

import html
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.observe.record import RunFolder
from paceline.observe.record.folder import Columns
from paceline.observe.terminal.look import figure, harmless, line
from paceline.observe.web.vitals import lanes_of

VOID = frozenset({"meta", "line", "rect", "circle", "polyline"})


class Element(str):
    """Markup that `tag` made; nothing else is one."""

    __slots__ = ()


Child = Element | str | int | float | None


def tag(name: str, /, *children: Child, **attributes: str | float | None) -> Element:
    """`tag("p", "text", class_="faint")`. None is left out, as child and as attribute."""
    told = "".join(f' {_name(key)}="{escaped(str(value))}"' for key, value in attributes.items() if value is not None)
    if name in VOID and not children:
        return Element(f"<{name}{told}/>")
    return Element(f"<{name}{told}>{joined(*children)}</{name}>")


def joined(*children: Child) -> Element:
    """Elements and text, one behind the other."""
    return Element("".join(_child(child) for child in children if child is not None))


def escaped(text: str) -> str:
    """Text for a page: no markup, no control character, nothing that turns what follows around."""
    return html.escape(harmless(text, keep="\n\t"))


def _child(child: Child) -> str:
    return child if isinstance(child, Element) else escaped(str(child))


def _name(key: str) -> str:
    return key.rstrip("_").replace("_", "-")


Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Scale:
    """A stretch of numbers on a stretch of pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self, most: int) -> list[float]:
        """Round numbers within."""
        rough = (self.high - self.low) / most
        size = 10.0 ** math.floor(math.log10(rough))
        each = next(size * unit for unit in (1, 2, 5, 10) if size * unit >= rough * 0.999)
        first = math.ceil(self.low / each - 1e-9)
        return [number * each for number in range(first, math.floor(self.high / each + 1e-9) + 1)]


def around(values: Sequence[float], least: float | None = None) -> tuple[float, float]:
    """Bounds that hold all values and have a length, whatever the values are."""
    low, high = min(values), max(values)
    low = low if least is None else min(least, low)
    room = max(high - low, abs(high) * 1e-3, 1e-9)
    return (low if least is not None and low == least else low - 0.04 * room), high + 0.04 * room


def thinned(points: Points, bins: int) -> Points:
    """At most a lowest and a highest point for each bin, so that no spike is lost."""
    if len(points) <= 2 * bins:
        return points
    edges = [place * len(points) // bins for place in range(bins + 1)]
    found = []
    for first, last in itertools.pairwise(edges):
        part = sorted(points[first:last], key=lambda point: point[1])
        found += sorted({part[0], part[-1]})
    return found


LANE_WIDTH, ROW, GAP, LANE_LEFT = 720, 24, 8, 130
LANE_BINS = 200
MOST = 12
KINDS = {"wait": "idle", "train": "s1", "score": "s6", "publish": "s2", "eval": "s4", "playing": "s5"}
"""Colours of what lanes do; the rest is an engine's work."""


def lanes(run: RunFolder) -> Element | None:
    """The lanes of the whole run; nothing where nothing was timed."""
    told = lanes_of(run, None, None, LANE_BINS)
    if told["extent"] is None or told["extent"][1] <= told["extent"][0]:
        return None
    start, end = told["extent"]
    x = Scale(start, end, LANE_LEFT, LANE_WIDTH)
    shown = told["lanes"][:MOST]
    height = len(shown) * (ROW + GAP) + 18
    rows = [part for place, lane in enumerate(shown) for part in _row(lane["lane"], lane["spans"], place, x)]
    axis = [
        tag("text", "0 s", x=LANE_LEFT, y=height - 4),
        tag("text", f"{end - start:,.0f} s", x=LANE_WIDTH, y=height - 4, text_anchor="end"),
    ]
    label = f"Lanes of {', '.join(lane['lane'] for lane in shown)} over {end - start:.0f} seconds"
    picture = tag("svg", *rows, *axis, viewBox=f"0 0 {LANE_WIDTH} {height}", role="img", aria_label=label)
    more = f"; {len(told['lanes']) - MOST} more lanes are in `paceline ui`" if len(told["lanes"]) > MOST else ""
    hint = f"height is a share of the time; grey is waiting{more}"
    return tag(
        "figure", tag("figcaption", tag("b", "Lanes"), " ", tag("span", hint, class_="faint")), picture, class_="wide"
    )


def _row(lane: str, spans: Sequence[Sequence], place: int, x: Scale) -> list[Element]:
    floor = place * (ROW + GAP) + ROW
    name = line(lane.replace("environment ", "env "), 19)
    parts = [
        tag("text", name, x=LANE_LEFT - 8, y=floor - ROW / 2 + 4, text_anchor="end"),
        tag("line", x1=LANE_LEFT, x2=LANE_WIDTH, y1=floor, y2=floor, class_="grid"),
    ]
    raised: dict[float, float] = {}
    for begun, ended, kind, share, *_ in spans:
        left, tall = max(float(LANE_LEFT), x(begun)), round(share * ROW, 1)
        width = round(min(x(ended), LANE_WIDTH) - left, 1)
        if width <= 0 and tall <= 0:
            continue
        under = raised.get(begun, 0.0)  # bins of several kinds stand on one another
        raised[begun] = under + tall
        place_in = {"x": left, "y": round(floor - under - tall, 1), "width": max(width, 0.5), "height": tall}
        parts.append(tag("rect", **place_in, class_=f"fill {KINDS.get(kind, 's3')}"))
    return parts


WIDTH, HEIGHT = 460, 190
LEFT, RIGHT, TOP, BOTTOM = 50, 8, 8, 22
BINS = 220
"""Points of a curve that are drawn, twice: a lowest and a highest each."""
COLOURS = 8
FEW = 16
"""Points of a curve, below which each is marked."""
MOST_CURVES = 10
LARGEST = 1e30
"""What is beyond this, or no number at all, is not drawn."""


def chart(title: str, hint: str, series: Mapping[str, Points], least: float | None = None) -> Element | None:
    """A chart of these curves, with a step on the x axis; nothing where there is no point."""
    clean = {name: _finite(points) for name, points in series.items()}
    shown = {name: points for name, points in clean.items() if points}
    if not shown:
        return None
    left_out = len(shown) - MOST_CURVES
    shown = dict(list(shown.items())[:MOST_CURVES])
    every = [point for points in shown.values() for point in points]
    x = Scale(*around([step for step, _ in every]), LEFT, WIDTH - RIGHT)
    y = Scale(*around([value for _, value in every], least), HEIGHT - BOTTOM, TOP)
    curves = [_curve(points, x, y, place) for place, points in enumerate(shown.values())]
    told = "; ".join(
        f"{name or title} from {figure(p[0][1])} at step {p[0][0]:.0f} to {figure(p[-1][1])} at step {p[-1][0]:.0f}"
        for name, p in shown.items()
    )
    picture = tag(
        "svg", *_axes(x, y), *curves, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=f"{title}: {told}"
    )
    more = tag("li", f"and {left_out} more", class_="faint") if left_out > 0 else None
    legend = tag("ul", *(_entry(name, p, at) for at, (name, p) in enumerate(shown.items())), more, class_="legend")
    return tag("figure", tag("figcaption", tag("b", title), " ", tag("span", hint, class_="faint")), picture, legend)


def _finite(points: Points) -> list[tuple[float, float]]:
    return [(x, y) for x, y in points if abs(x) < LARGEST and abs(y) < LARGEST]  # NaN is not less than anything


def _curve(points: Points, x: Scale, y: Scale, place: int) -> Element:
    colour = f"s{place % COLOURS + 1}"
    if len(points) == 1:
        return tag("circle", cx=x(points[0][0]), cy=y(points[0][1]), r=3, class_=f"dot {colour}")
    drawn = " ".join(f"{x(step)},{y(value)}" for step, value in thinned(points, BINS))
    few = points if len(points) < FEW else []
    dots = [tag("circle", cx=x(step), cy=y(value), r=2.2, class_=f"dot {colour}") for step, value in few]
    return joined(tag("polyline", points=drawn, class_=f"curve {colour}"), *dots)


def _axes(x: Scale, y: Scale) -> Sequence[Element]:
    found = []
    for tick in y.ticks(4):
        at = y(tick)
        found.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=at, y2=at, class_="grid"))
        found.append(tag("text", f"{tick:,.6g}", x=LEFT - 6, y=at + 3.5, text_anchor="end"))
    whole = sorted({round(tick) for tick in x.ticks(6) if tick >= 0})
    for tick in whole:
        if x.low <= tick <= x.high:
            found.append(tag("text", f"{tick:,}", x=x(tick), y=HEIGHT - 6, text_anchor="middle"))
    return found


def _entry(name: str, points: Points, place: int) -> Element:
    swatch = tag("rect", width=10, height=4, y=3, class_=f"fill s{place % COLOURS + 1}")
    key = tag("svg", swatch, class_="key", viewBox="0 0 10 10", aria_hidden="true")
    return tag("li", key, f"{name} " if name else "", tag("b", figure(points[-1][1])))


CHARTS = (
    ("Reward", "mean of what was sampled, before filters", r"reward/(.+)/mean", None),
    ("Held-out evaluation", "on rows that never train", r"eval/(.+/(?:reward|exact|pass@\d+))", None),
    ("Loss by component", "each with its own normaliser", r"loss/?(.*)", None),
    ("Gradient norm", "before clipping", r"(grad_norm.*)", 0.0),
    ("Entropy", "nats a token; a fall towards 0 is a collapse", r"(entropy.*)", 0.0),
    ("KL and mismatch", "how far trainer and sampler are apart", r"(ppo_kl|ref_kl|mismatch_kl)", 0.0),
    ("Staleness", "versions between sampling and training", r"staleness/(.+)", 0.0),
    ("Throughput", "tokens a second, sampled and trained", r"(tokens/s|train_tokens/s)", 0.0),
    ("Length", "tokens sampled", r"(length)", 0.0),
    ("Dropped, by reason", "groups and samples a step", r"dropped/(.+)", 0.0),
)
"""Title, hint, which metrics, and where the axis begins at the latest; as on the page of a run (`js/curves.js`)."""


def curves(run: RunFolder) -> Element:
    """All charts, and the lanes below them."""
    columns = run.metrics()
    drawn = []
    for title, hint, pattern, least in CHARTS:
        named = {name: found[1] for name in columns if (found := re.fullmatch(pattern, name, re.DOTALL))}
        series = {label.replace("_", " ") or "sum": _points(columns, name) for name, label in named.items()}
        if title.startswith("Dropped"):  # a reason that never struck needs no curve
            series = {label: points for label, points in series.items() if any(value for _, value in points)}
        drawn.append(chart(title, hint, series, least))
    drawn.append(lanes(run))
    if not any(drawn):
        return tag("p", "No step was finished, so there are no curves.", class_="faint")
    return tag("div", *drawn, class_="charts")


def _points(columns: Columns, name: str) -> Points:
    pairs = zip(columns["step"], columns[name], strict=True)
    return [(step, value) for step, value in pairs if step is not None and value is not None]
