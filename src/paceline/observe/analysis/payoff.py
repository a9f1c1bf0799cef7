"""The payoff matrix of a league and the Elo ratings computed from it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.table import Column, Table

ELO_SCALE = 400 / np.log(10)
"""Elo points to one unit of log odds."""
PRIOR_STD = 350.0
"""Standard deviation, in points, of players without a game. It keeps a player without a loss finite."""
Z_95 = 1.96
"""Standard deviations either side that hold 95%."""


@dataclass(frozen=True, slots=True)
class Rating:
    """Elo points around the average of all players, with their 95% interval."""

    player: str
    points: float
    low: float
    high: float
    games: float


def rate(players: Sequence[str], scores: NDArray) -> list[Rating]:
    """Ratings from `scores[i, j]`: the points i took from j, a draw being half a point for each.

    The most probable ratings under the prior, by Newton's method on a function with one peak; the interval is the
    curvature there, seen from the average.
    """
    count = len(players)
    scores = np.asarray(scores, dtype=np.float64)
    if scores.shape != (count, count):
        raise ValueError(f"{count} players need scores of shape {(count, count)}, not {scores.shape}")
    games = scores + scores.T
    np.fill_diagonal(games, 0.0)
    strength, precision = np.zeros(count), np.eye(count) / (PRIOR_STD / ELO_SCALE) ** 2
    for _ in range(100):
        expected = 1 / (1 + np.exp(strength[None, :] - strength[:, None]))
        gradient = (np.where(games > 0, scores - games * expected, 0.0)).sum(1) - precision @ strength
        curvature = _curvature(games, expected) + precision
        step = np.linalg.solve(curvature, gradient)
        strength = strength + np.clip(step, -2, 2)
        if np.abs(step).max(initial=0.0) < 1e-10:
            break
    expected = 1 / (1 + np.exp(strength[None, :] - strength[:, None]))
    # Games tell how players differ; how strong all of them are together is unknown, and not needed.
    centre = np.eye(count) - 1 / count
    spread = centre @ np.linalg.inv(_curvature(games, expected) + precision) @ centre
    deviation = Z_95 * ELO_SCALE * np.sqrt(np.diag(spread))
    points = ELO_SCALE * centre @ strength
    figures = np.stack([points, points - deviation, points + deviation, games.sum(1)], axis=1).tolist()
    return [Rating(player, *row) for player, row in zip(players, figures, strict=True)]


def _curvature(games: NDArray, expected: NDArray) -> NDArray:
    information = games * expected * (1 - expected)
    return np.diag(information.sum(1)) - information


@dataclass(slots=True)
class Payoff:
    """Games by ordered pair of players: how many, and the points the first one took (a draw is half a point).

    >>> payoff = Payoff()
    >>> payoff.add("new", "old", 1.0); payoff.add("new", "old", 0.5)
    >>> payoff.score("new", "old"), payoff.score("old", "new"), payoff.games("old", "new")
    (0.75, 0.25, 2)
    """

    points: dict[tuple[str, str], float] = field(default_factory=dict)
    counts: dict[tuple[str, str], int] = field(default_factory=dict)

    def add(self, player: str, opponent: str, points: float) -> None:
        """Record one game, for both players."""
        if not 0 <= points <= 1:
            raise ValueError(f"a game between `{player}` and `{opponent}` gives 0 to 1 point, not {points}")
        for pair, taken in (((player, opponent), points), ((opponent, player), 1 - points)):
            self.points[pair] = self.points.get(pair, 0.0) + taken
            self.counts[pair] = self.counts.get(pair, 0) + 1

    @property
    def players(self) -> list[str]:
        """In the order they came."""
        return list(dict.fromkeys(player for player, _ in self.counts))

    def games(self, player: str, opponent: str) -> int:
        return self.counts.get((player, opponent), 0)

    def score(self, player: str, opponent: str) -> float | None:
        """Mean points a game; None without a game."""
        games = self.games(player, opponent)
        return self.points[player, opponent] / games if games else None

    def matrix(self) -> NDArray:
        """Points taken by row from column."""
        names = self.players
        return np.array([[self.points.get((a, b), 0.0) if a != b else 0.0 for b in names] for a in names])

    def ratings(self) -> list[Rating]:
        """Strongest first."""
        found = rate(self.players, self.matrix()) if self.counts else []
        return sorted(found, key=lambda rating: -rating.points)

    def table(self, title: str = "league") -> Table:
        """A table for the terminal: ratings with their intervals, then each player's score against each other one."""
        ratings = self.ratings()
        names = [rating.player for rating in ratings]
        columns = [Column(heading, justify="right") for heading in ("rating", "95%", "games", *names)]
        table = Table("player", *columns, title=title, caption="row's mean points against column")
        for r in ratings:
            scores = ["." if (s := self.score(r.player, other)) is None else f"{s:.2f}" for other in names]
            table.add_row(r.player, f"{r.points:+.0f}", f"{r.low:+.0f} to {r.high:+.0f}", f"{r.games:.0f}", *scores)
        return table

    def state(self) -> str:
        return json.dumps([[a, b, self.counts[a, b], self.points[a, b]] for a, b in self.counts])

    def load(self, state: str) -> None:
        self.points, self.counts = {}, {}
        for a, b, count, points in json.loads(state):
            self.counts[a, b], self.points[a, b] = count, points


def draw_league(payoff: Payoff, path: Path, title: str) -> None:
    """Ratings with their intervals on the left, the payoff matrix on the right, strongest first."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ratings, ink = payoff.ratings(), "#333333"
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
    scores = np.array([[payoff.score(a, b) if a != b else None for b in names] for a in names], np.float64)
    right.imshow(scores, cmap="RdBu", vmin=0, vmax=1)
    for row, column in np.argwhere(~np.isnan(scores)):
        colour = "white" if abs(scores[row, column] - 0.5) > 0.35 else ink
        right.text(column, row, f"{scores[row, column]:.2f}", ha="center", va="center", color=colour)
    right.set_xticks(rows, names)
    right.set_yticks(rows, names)
    right.set_title("row's mean points against column", fontsize=9, color=ink)
    figure.suptitle(title, color=ink)
    draft = path.with_name(f".{path.name}.tmp")
    figure.savefig(draft, format="png")
    draft.replace(path)
