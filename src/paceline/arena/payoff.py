"""The payoff matrix of a league: how each player fared against each other one."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from paceline.arena.ratings import Rating, rate


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
        """One game, told once: the opponent's side is kept too."""
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

    def matrix(self, players: Iterable[str] | None = None) -> NDArray:
        """Points taken by row from column."""
        names = list(players) if players is not None else self.players
        return np.array([[self.points.get((a, b), 0.0) if a != b else 0.0 for b in names] for a in names])

    def ratings(self) -> list[Rating]:
        """Strongest first."""
        if not self.counts:
            return []
        return sorted(rate(self.players, self.matrix()), key=lambda rating: -rating.points)

    def table(self, title: str = "league") -> Table:
        """What a terminal shows: ratings with their intervals, then everybody's score against everybody."""
        ratings = self.ratings()
        names = [rating.player for rating in ratings]
        shown = Table(title=title, caption="row's mean points against column")
        for heading in ("player", "rating", "95%", "games", *names):
            shown.add_column(heading, justify="left" if heading == "player" else "right")
        for r in ratings:
            scores = ["." if (s := self.score(r.player, other)) is None else f"{s:.2f}" for other in names]
            shown.add_row(r.player, f"{r.points:+.0f}", f"{r.low:+.0f} to {r.high:+.0f}", f"{r.games:.0f}", *scores)
        return shown

    def state(self) -> str:
        return json.dumps([[a, b, self.counts[a, b], self.points[a, b]] for a, b in self.counts])

    def load(self, state: str) -> None:
        self.points, self.counts = {}, {}
        for a, b, count, points in json.loads(state):
            self.counts[a, b], self.points[a, b] = count, points
