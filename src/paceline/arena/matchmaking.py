"""Who plays whom: the opponent of the next game, drawn from the past."""

import random
from collections.abc import Sequence
from typing import Literal

from paceline.arena.payoff import Payoff

Rule = Literal["latest", "uniform", "hardest"]


class Matchmaker:
    """Draws opponents for the learner.

    `latest` always plays the newest version of itself; `uniform` any past version alike; `hardest` prefers those it
    loses to, with weight (1 - score)^2, as leagues do to keep old weaknesses from coming back (arXiv 1912.06680 and
    the StarCraft league after it). `mirror` of the games are against itself as it is now, whatever the rule.
    """

    def __init__(self, rule: Rule = "hardest", mirror: float = 0.5) -> None:
        if not 0 <= mirror <= 1:
            raise ValueError(f"mirror = {mirror}: the share of games against itself lies between 0 and 1")
        self._rule, self._mirror = rule, mirror

    def draw(self, dice: random.Random, learner: str, past: Sequence[str], payoff: Payoff) -> str:
        """An opponent: a pure function of the dice and of what is known, so a resumed run draws what an unbroken one
        would."""
        if not past or dice.random() < self._mirror:
            return learner
        if self._rule == "latest":
            return past[-1]
        if self._rule == "uniform":
            return dice.choice(past)
        scores = [payoff.score(learner, opponent) for opponent in past]
        weights = [(1 - (0.5 if score is None else score)) ** 2 + 1e-3 for score in scores]
        return dice.choices(past, weights)[0]
