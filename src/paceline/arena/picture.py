"""A league as a picture: how strong each player is, and how everybody fared against everybody."""

from pathlib import Path

from paceline.arena.payoff import Payoff

_INK = "#333333"


def draw_league(payoff: Payoff, path: Path, title: str) -> None:
    """Ratings with their intervals on the left, the payoff matrix on the right, strongest first."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ratings = payoff.ratings()
    names = [rating.player for rating in ratings]
    rows = range(len(names))
    figure = Figure(figsize=(9, 1.6 + 0.5 * len(names)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.2))
    spans = [[r.points - r.low for r in ratings], [r.high - r.points for r in ratings]]
    left.errorbar([r.points for r in ratings], rows, xerr=spans, fmt="o", color="#4477AA", capsize=4)
    left.axvline(0, color="#DDDDDD", zorder=0)
    left.set_yticks(rows, names)
    left.set_ylim(len(names) - 0.5, -0.5)
    left.set_xlabel("Elo points, 95% interval")
    left.spines[["top", "right"]].set_visible(False)
    scores = [[payoff.score(a, b) if a != b else None for b in names] for a in names]
    shades = [[float("nan") if score is None else score for score in line] for line in scores]
    right.imshow(shades, cmap="RdBu", vmin=0, vmax=1)
    for row, line in enumerate(scores):
        for column, score in enumerate(line):
            if score is not None:
                strong = abs(score - 0.5) > 0.35
                right.text(column, row, f"{score:.2f}", ha="center", va="center", color="white" if strong else _INK)
    right.set_xticks(rows, names)
    right.set_yticks(rows, names)
    right.set_title("row's mean points against column", fontsize=9, color=_INK)
    figure.suptitle(title, color=_INK)
    draft = path.with_name(f".{path.name}.tmp")
    figure.savefig(draft, format="png")
    draft.replace(path)
