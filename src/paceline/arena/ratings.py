"""How strong each player is, and how sure we are of it, from who beat whom.

The model is Bradley and Terry's: player i scores against j with probability 1 / (1 + 10^((R_j - R_i) / 400)), on Elo's
scale. A draw counts half a win each. All games count at once, so the order in which they were played does not matter,
and a rating comes with the interval that its games allow.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SCALE = 400 / np.log(10)
"""Elo points to one unit of log odds."""
PRIOR = 350.0
"""Standard deviation, in points, of players nobody has seen play. It keeps a player without a loss finite."""
SURE = 1.96
"""Standard deviations either side that hold 95%."""


@dataclass(frozen=True, slots=True)
class Rating:
    """Elo points around the average of all players, with their 95% interval."""

    player: str
    points: float
    low: float
    high: float
    games: float

    def beats(self, other: "Rating") -> float:
        """The score to expect of a game.

        >>> a, b = Rating("a", 200, 0, 0, 1), Rating("b", 0, 0, 0, 1)
        >>> round(a.beats(b), 2)
        0.76
        """
        return float(1 / (1 + 10 ** ((other.points - self.points) / 400)))


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
    strength, precision = np.zeros(count), np.eye(count) / (PRIOR / SCALE) ** 2
    for _ in range(100):
        expected = 1 / (1 + np.exp(strength[None, :] - strength[:, None]))
        gradient = (np.where(games > 0, scores - games * expected, 0.0)).sum(1) - precision @ strength
        curvature = _curvature(games, expected) + precision
        step = np.linalg.solve(curvature, gradient)
        strength = strength + np.clip(step, -2, 2)
        if np.abs(step).max(initial=0.0) < 1e-10:
            break
    expected = 1 / (1 + np.exp(strength[None, :] - strength[:, None]))
    # Games tell how players differ; how strong all of them are together nobody can know, and nobody asks.
    centre = np.eye(count) - 1 / count
    spread = centre @ np.linalg.inv(_curvature(games, expected) + precision) @ centre
    deviation = SURE * SCALE * np.sqrt(np.diag(spread))
    points = SCALE * centre @ strength
    return [
        Rating(
            player, float(points[i]), float(points[i] - deviation[i]), float(points[i] + deviation[i]), games[i].sum()
        )
        for i, player in enumerate(players)
    ]


def _curvature(games: NDArray, expected: NDArray) -> NDArray:
    information = games * expected * (1 - expected)
    return np.diag(information.sum(1)) - information
