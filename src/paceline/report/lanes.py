"""Who did what over time, as bands: the taller, the busier."""

from collections.abc import Sequence

from paceline.record import RunFolder
from paceline.report.markup import Element, tag
from paceline.report.scale import Scale
from paceline.top.words import line
from paceline.ui.lanes import lanes_of

WIDTH, ROW, GAP, LEFT = 720, 24, 8, 130
BINS = 200
MOST = 12
KINDS = {"wait": "idle", "train": "s1", "score": "s6", "publish": "s2", "eval": "s4", "playing": "s5"}
"""Colours of what lanes do; the rest is an engine's work."""


def lanes(run: RunFolder) -> Element | None:
    """The lanes of the whole run; nothing where nothing was timed."""
    told = lanes_of(run, None, None, BINS)
    if told["extent"] is None or told["extent"][1] <= told["extent"][0]:
        return None
    start, end = told["extent"]
    x = Scale(start, end, LEFT, WIDTH)
    shown = told["lanes"][:MOST]
    height = len(shown) * (ROW + GAP) + 18
    rows = [part for place, lane in enumerate(shown) for part in _row(lane["lane"], lane["spans"], place, x)]
    axis = [
        tag("text", "0 s", x=LEFT, y=height - 4),
        tag("text", f"{end - start:,.0f} s", x=WIDTH, y=height - 4, text_anchor="end"),
    ]
    label = f"Lanes of {', '.join(lane['lane'] for lane in shown)} over {end - start:.0f} seconds"
    picture = tag("svg", *rows, *axis, viewBox=f"0 0 {WIDTH} {height}", role="img", aria_label=label)
    more = f"; {len(told['lanes']) - MOST} more lanes are in `paceline ui`" if len(told["lanes"]) > MOST else ""
    hint = f"height is a share of the time; grey is waiting{more}"
    return tag(
        "figure", tag("figcaption", tag("b", "Lanes"), " ", tag("span", hint, class_="faint")), picture, class_="wide"
    )


def _row(lane: str, spans: Sequence[Sequence], place: int, x: Scale) -> list[Element]:
    floor = place * (ROW + GAP) + ROW
    name = line(lane.replace("environment ", "env "), 19)
    parts = [
        tag("text", name, x=LEFT - 8, y=floor - ROW / 2 + 4, text_anchor="end"),
        tag("line", x1=LEFT, x2=WIDTH, y1=floor, y2=floor, class_="grid"),
    ]
    raised: dict[float, float] = {}
    for begun, ended, kind, share, *_ in spans:
        left, tall = max(float(LEFT), x(begun)), round(share * ROW, 1)
        width = round(min(x(ended), WIDTH) - left, 1)
        if width <= 0 and tall <= 0:
            continue
        under = raised.get(begun, 0.0)  # bins of several kinds stand on one another
        raised[begun] = under + tall
        place_in = {"x": left, "y": round(floor - under - tall, 1), "width": max(width, 0.5), "height": tall}
        parts.append(tag("rect", **place_in, class_=f"fill {KINDS.get(kind, 's3')}"))
    return parts
