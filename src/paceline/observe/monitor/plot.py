"""The reward curve as a picture."""

import io
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from paceline.observe.monitor.directory import replace_file
from paceline.observe.monitor.summary import Curve, MetricHistory

if TYPE_CHECKING:  # matplotlib takes half a second to import, and most runs only need it at their end
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Paul Tol's "bright" scheme: told apart by colour-blind readers and in print.
_COLOURS: Final = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377", "#BBBBBB")
_INK: Final = "#333333"
_FAINT: Final = "#DDDDDD"
_EXACT: Final = dict[str, Any](linestyle=":", linewidth=1.2, marker="o", markersize=6.5, markeredgecolor="white")
_HELD_OUT: Final = dict[str, Any](linestyle="", marker="D", markersize=5, markerfacecolor="white", markeredgewidth=1.4)


def plot_rewards(metrics: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Draw each environment's reward, by step and smoothed, and its held-out results as points."""
    # Through memory, so that a picture which is being looked at is never half written.
    replace_file(path, [reward_picture(metrics, title)])


def reward_picture(metrics: Sequence[Mapping[str, Any]], title: str, dpi: int = 150) -> bytes:
    """The same as the bytes of a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    history = MetricHistory.of(metrics)
    figure = Figure(figsize=(8, 4.5), dpi=dpi, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.06))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for env, colour in zip(history.envs, itertools.cycle(_COLOURS), strict=False):
        _draw(axes, history, env, colour)
    _frame(axes, history, title)
    _legend(figure, history)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()


def smooth(curve: Curve) -> Curve:
    """A centred moving average over about a tenth of the curve; a trailing one would lag behind."""
    reach = max(1, len(curve) // 20)
    means = []
    for index, (step, _) in enumerate(curve):
        # The same reach on both sides, so that the ends are not pulled towards the middle.
        side = min(reach, index, len(curve) - 1 - index)
        window = curve[index - side : index + side + 1]
        means.append((step, sum(value for _, value in window) / len(window)))
    return means


def _draw(axes: "Axes", history: MetricHistory, env: str, colour: str) -> None:
    if rewards := history.rewards.get(env):
        axes.plot(*zip(*rewards, strict=True), color=colour, alpha=0.3, linewidth=1.0)
        # One point has no line; a dot at least shows it.
        marker = "." if len(rewards) == 1 else ""
        axes.plot(
            *zip(*smooth(rewards), strict=True), color=colour, linewidth=2.2, marker=marker, solid_capstyle="round"
        )
    if exact := history.exact.get(env):
        axes.plot(*zip(*exact, strict=True), color=colour, zorder=4, **_EXACT)
    if held_out := history.held_out.get(env):
        axes.plot(*zip(*held_out, strict=True), color=colour, zorder=5, **_HELD_OUT)


def _frame(axes: "Axes", history: MetricHistory, title: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title, loc="left", fontsize=13, fontweight="bold", color=_INK, pad=12)
    axes.set_xlabel("step (batches trained)", color=_INK)
    axes.set_ylabel("reward and exact share" if history.exact else "reward", color=_INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    last = max(1, history.step)
    axes.set_xlim(-0.02 * last, 1.02 * last)
    curves = [*history.rewards.values(), *history.exact.values(), *history.held_out.values()]
    if all(0 <= value <= 1 for curve in curves for _, value in curve):
        # Most rewards are shares: on their whole scale two runs can be compared by eye.
        axes.set_ylim(-0.02, 1.04)
    axes.grid(axis="y", color=_FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_FAINT)
    axes.tick_params(colors=_INK, length=0)
    if not any(curves):
        axes.text(0.5, 0.5, "no step is finished yet", transform=axes.transAxes, ha="center", color=_INK)


def _legend(figure: "Figure", history: MetricHistory) -> None:
    """A colour for each environment, then a shape for each kind of point: shorter than every pair of them."""
    from matplotlib.lines import Line2D

    several = len(history.envs) > 1
    handles = [
        Line2D([], [], color=colour, linewidth=2.2, label=env if several else "training reward")
        for env, colour in zip(history.envs, itertools.cycle(_COLOURS), strict=False)
    ]
    if history.exact:
        handles.append(Line2D([], [], color=_INK, label="held-out exact", **_EXACT))
    if history.held_out:
        handles.append(Line2D([], [], color=_INK, label="held-out reward", **_HELD_OUT))
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, labelcolor=_INK)
