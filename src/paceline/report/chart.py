"""Curves as SVG, drawn without a script: axes, a legend with the last values, and a sentence for who cannot see it."""

from collections.abc import Mapping, Sequence

from paceline.report.markup import Element, joined, tag
from paceline.report.scale import Points, Scale, around, thinned
from paceline.top.words import figure

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
