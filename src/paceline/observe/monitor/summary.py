"""Folds a run's metrics into curves, and makes of them the lines and the picture of rewards that a run ends with."""

import io
import itertools
import math
import shlex
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from paceline.observe.monitor.base import RunOutcome
from paceline.observe.monitor.directory import RunDirectory, replace_file
from paceline.observe.monitor.text import format_amount, format_score, format_seconds, one_line, restore_paths

if TYPE_CHECKING:  # matplotlib takes half a second to import, and most runs only need it at their end
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Curve = list[tuple[int, float]]
"""Points (step, value), in the order they came."""


TREND_STEPS = 5
"""Steps at either end of a run whose mean stands for the training reward. Fixed, so that the baseline does not move
while the run goes on; an evaluation is a mean already and stands for itself."""


@dataclass(frozen=True, slots=True)
class MetricTrend:
    """The values of a metric, and the means of its first and of its last few steps."""

    values: list[float]
    first: float
    last: float
    first_steps: str
    """The steps that `first` is of: `step 0`, or `mean of steps 1 to 5`."""
    last_steps: str

    @classmethod
    def of(cls, points: Sequence[tuple[float, float]], window: int) -> "MetricTrend":
        """The trend of (step, value) pairs; `window` steps at each end, all of them where there are fewer."""
        (first, first_steps), (last, last_steps) = _mean_of(points[:window]), _mean_of(points[-window:])
        return cls([value for _, value in points], first, last, first_steps, last_steps)

    @property
    def has_moved(self) -> bool:
        """Whether the two ends are of different steps, so that their difference means something."""
        return self.first_steps != self.last_steps


def _mean_of(points: Sequence[tuple[float, float]]) -> tuple[float, str]:
    (start, _), (end, _) = points[0], points[-1]
    named = f"step {start:.0f}" if len(points) == 1 else f"mean of steps {start:.0f} to {end:.0f}"
    return statistics.fmean(value for _, value in points), named


class MetricHistory:
    """Curves and last values of the metrics so far. Values that are missing or not finite leave no point."""

    def __init__(self, envs: Iterable[str] = ()) -> None:
        self.step = 0
        self.latest: dict[str, float] = {}
        self.rewards: dict[str, Curve] = {env: [] for env in envs}
        """Training reward by environment."""
        self.exact: dict[str, Curve] = {}
        """Share of held-out rows that are exactly right, by environment."""
        self.held_out: dict[str, Curve] = {}
        """Held-out reward by environment."""
        self.dropped: Counter[str] = Counter()
        """Rollouts dropped since the start, by reason."""
        self.seconds = 0.0
        """Time spent in steps."""

    @classmethod
    def of(cls, lines: Iterable[Mapping[str, Any]], envs: Iterable[str] = ()) -> Self:
        """The history of `metrics.jsonl`."""
        history = cls(envs)
        for line in lines:
            history.add(line["step"], line)
        return history

    @property
    def envs(self) -> list[str]:
        return list(dict.fromkeys([*self.rewards, *self.exact, *self.held_out]))

    @property
    def has_trained(self) -> bool:
        return any(self.rewards.values())

    def add(self, step: int, metrics: Mapping[str, float | None]) -> None:
        self.step = max(self.step, step)
        values = {key: value for key, value in metrics.items() if value is not None and math.isfinite(value)}
        self.latest.update(values)
        self.seconds += values.get("time/step", 0.0)
        curves = {("reward", "mean"): self.rewards, ("eval", "exact"): self.exact, ("eval", "reward"): self.held_out}
        for key, value in values.items():
            family, _, rest = key.partition("/")
            env, _, field = rest.rpartition("/")  # the name of an environment may hold slashes of its own
            if (family, field) in curves:
                curves[family, field].setdefault(env, []).append((step, value))
            elif family == "dropped":
                self.dropped[rest] += round(value)


def summary(metrics: Sequence[Mapping[str, Any]], outcome: RunOutcome, directory: Path) -> list[str]:
    """What was reached, where things are, and what to do next: one line each."""
    files = RunDirectory(directory)
    history = MetricHistory.of(metrics)
    finished = outcome.step if outcome.status == "finished" else None
    places = [f"run {files.root}", f"curve {files.plot}" if files.plot.exists() else ""]
    if outcome.export is not None:
        places.append(f"model {outcome.export}")
    elif outcome.checkpoint is not None:
        places.append(f"checkpoint {outcome.checkpoint}")
    lines = [
        _result_line(history, metrics, outcome),
        ", ".join(filter(None, places)),
        ": ".join(next_action(files, outcome.checkpoint, history.has_trained, finished)),
    ]
    return [one_line(restore_paths(line)) for line in lines]


def _result_line(history: MetricHistory, metrics: Sequence[Mapping[str, Any]], outcome: RunOutcome) -> str:
    results = "; ".join(f"{env}: {_env_result(history, env)}" for env in history.envs)
    if history.has_trained:
        # Runs that did not time their steps: from the first line to the last.
        elapsed = history.seconds or metrics[-1].get("time", 0.0) - metrics[0].get("time", 0.0)
        results += f" over {format_amount(history.step, 'step')} in {format_seconds(elapsed)}"
    else:
        results = f"{results}; no batch was trained" if results else "no batch was trained"
    if outcome.status == "finished":
        return f"{results}; {outcome.message}" if outcome.message else results
    # Why a run failed is printed once, by the command that started it.
    cause = f": {outcome.message}" if outcome.message and outcome.status != "failed" else ""
    return f"{results}; {outcome.status} at step {outcome.step}{cause}"


def _env_result(history: MetricHistory, env: str) -> str:
    """Exact matches, or the held-out reward where there are none, then the reward in training, all from the start to
    the end (`MetricTrend`)."""
    exact, held_out, rewards = (
        _ends(MetricTrend.of(curve, window)) if (curve := curves.get(env)) else ""
        for curves, window in ((history.exact, 1), (history.held_out, 1), (history.rewards, TREND_STEPS))
    )
    parts = []
    if exact or held_out:
        parts.append(f"exact {exact} on held-out rows" if exact else f"reward {held_out} on held-out rows")
    if rewards:
        parts.append(f"{'in training' if parts and not exact else 'reward'} {rewards}")
    return ", ".join(parts)


def _ends(trend: MetricTrend) -> str:
    ends = (trend.first, trend.last) if trend.has_moved else (trend.last,)
    return " -> ".join(format_score(value, 2) for value in ends)


def next_action(
    files: RunDirectory, checkpoint: Path | None, trained: bool, finished: int | None = None
) -> tuple[str, str]:
    """What can be done with a run that stopped, or `finished` with this step, and the command for it. What was trained
    is never overwritten."""
    command = f"paceline train {shlex.quote(str(files.config_file))}"
    if finished is not None:
        return "to train on", f"{command} --resume latest --steps {2 * max(1, finished)}"
    if checkpoint is not None:
        saved = [path.name for path in files.checkpoints.glob("step-*")]
        newest = checkpoint.name >= max(saved, default="")
        return f"to go on from {checkpoint.name}", f"{command} --resume {'latest' if newest else checkpoint.name}"
    if any(files.checkpoints.glob("step-*")):
        return f"to begin anew beside it (no checkpoint in {files.checkpoints} is whole)", f"{command} --name NAME"
    if trained:
        return "to begin anew beside it (no checkpoint was saved)", f"{command} --name NAME"
    return "to start again (no checkpoint was saved)", f"{command} --overwrite"


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
