"""Who plays whom: the opponent of the next game, drawn from the past."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from paceline.arena.payoff import Payoff

Rule = Literal["latest", "uniform", "hardest"]


class Matchmaker:
    """Draws opponents for the learner.

    `latest` always plays the newest version of itself; `uniform` any past version alike; `hardest` prefers those it
    loses to, with weight (1 - score)^2, as leagues do to keep old weaknesses from coming back (arXiv 1912.06680 and
    the StarCraft league after it). `mirror` of the games are against itself as it is now, whatever the rule.
    """

    def __init__(self, rule: Rule = "hardest", mirror: float = 0.5, seed: int = 0) -> None:
        if not 0 <= mirror <= 1:
            raise ValueError(f"mirror = {mirror}: the share of games against itself lies between 0 and 1")
        self._rule, self._mirror, self._seed = rule, mirror, seed

    def draw(self, number: int, learner: str, past: Sequence[str], payoff: Payoff) -> str:
        """The opponent of game `number`: a pure function of the number and of what is known, so a resumed run draws
        what an unbroken one would."""
        rng = np.random.default_rng((self._seed, number))
        if not past or rng.random() < self._mirror:
            return learner
        if self._rule == "latest":
            return past[-1]
        weights = np.ones(len(past))
        if self._rule == "hardest":
            scores = [payoff.score(learner, opponent) for opponent in past]
            weights = np.array([(1 - (0.5 if score is None else score)) ** 2 for score in scores]) + 1e-3
        return past[int(rng.choice(len(past), p=weights / weights.sum()))]
