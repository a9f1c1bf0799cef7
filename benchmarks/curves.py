"""Small pictures of several seeds: thin lines, and their mean."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from trials import Line

COLOURS = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377")
INK, FAINT = "#333333", "#DDDDDD"
Curve = Mapping[float, float]


def curve(lines: Sequence[Line], key: str) -> Curve:
    """One metric of a run, by step."""
    return {line["step"]: line[key] for line in lines if line.get(key) is not None}


def mean(curves: Sequence[Curve]) -> Curve:
    """At the places that all of them have."""
    shared = [x for x in curves[0] if all(x in other for other in curves)]
    return {x: sum(each[x] for each in curves) / len(curves) for x in shared}


def draw(
    path: Path,
    title: str,
    series: Mapping[str, Sequence[Curve]],
    *,
    across: str = "step (batches trained)",
    up: str = "held-out reward",
    places: Sequence[float] | None = None,
    low: float = 0.0,
    high: float = 1.0,
    bands: Mapping[str, Mapping[float, tuple[float, float]]] | None = None,
) -> None:
    """One colour for each series, and a band around it. `places` are put at equal distances, as wanted where each is
    twice the last."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.2), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    at = {x: index for index, x in enumerate(places)} if places else {}
    for colour, (label, curves) in zip(COLOURS, series.items(), strict=False):
        for each in curves if len(curves) > 1 else ():
            axes.plot([at.get(x, x) for x in each], list(each.values()), color=colour, alpha=0.35, linewidth=0.8)
        middle = mean(curves)
        marker = "o" if places else ""
        axes.plot(
            [at.get(x, x) for x in middle],
            list(middle.values()),
            color=colour,
            linewidth=2.2,
            marker=marker,
            markersize=5,
            label=label,
        )
        if band := (bands or {}).get(label):
            axes.fill_between([at.get(x, x) for x in band], *zip(*band.values(), strict=True), color=colour, alpha=0.15)
    if places:
        axes.set_xticks(range(len(places)), [f"{x:g}" for x in places])
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK)
    axes.set_xlabel(across, color=INK)
    axes.set_ylabel(up, color=INK)
    axes.set_ylim(low - 0.02 * (high - low), high + 0.04 * (high - low))
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.tick_params(colors=INK, length=0)
    if len(series) > 1:
        axes.legend(frameon=False, labelcolor=INK, loc="lower right")
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(picture.getvalue())
