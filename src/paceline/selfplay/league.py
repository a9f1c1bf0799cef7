"""Manages a league of past versions of the policy: admission, matchmaking and ratings.

    admit -> [ draw -> a game against the past -> report ] ... meet -> report -> enter -> payoff -> ratings

It knows names and results, no weights. Serving past versions is the orchestrator's business.
"""

import random
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from paceline.config.env import LeagueConfig as Config
from paceline.selfplay.payoff import Payoff
from paceline.selfplay.state import EpisodeResult


def draw_opponent(c: Config, dice: random.Random, learner: str, past: Sequence[str], payoff: Payoff) -> str:
    """An opponent for the learner: a pure function of its arguments, so that a resumed run draws what an unbroken one
    would.

    `latest` always plays the newest version of itself; `uniform` any past version alike; `hardest` prefers those it
    loses to, with weight (1 - score)^2, as leagues do to keep old weaknesses from coming back (arXiv 1912.06680 and
    the StarCraft league after it). `mirror` of the games are against itself as it is now, whatever the rule.
    """
    if not past or dice.random() < c.mirror:
        return learner
    if c.rule == "latest":
        return past[-1]
    if c.rule == "uniform":
        return dice.choice(past)
    scores = [payoff.score(learner, opponent) for opponent in past]
    weights = [(1 - (0.5 if score is None else score)) ** 2 + 1e-3 for score in scores]
    return dice.choices(past, weights)[0]


POLICY = "policy"


@dataclass(frozen=True, slots=True)
class Match:
    """The policy in one seat, a past version in all others."""

    learner: str
    """The actor who learns."""
    opponent: str
    """The version that plays the others."""
    number: int = 0
    """The draw of training it was made for, or its place among the games for the ratings."""


class League:
    """Keeps up to `size` past versions, spread over the whole run, and what is known of them.

    Results wait until the next version is published and are then entered by their matches' numbers: who is met must not
    depend on whose game was over first.
    """

    def __init__(self, config: Config, env: str) -> None:
        self._config, self._env = config, env
        self._places: dict[int, int] = {}
        """Version to place, oldest first."""
        self._playing: Counter[str] = Counter()
        self._arriving: int | None = None
        self._leaving: int | None = None
        self._version: int | None = None
        """The version published last."""
        self._form = Payoff()
        """How the policy fares in training since a version was last admitted."""
        self._news: list[tuple[int, str, float]] = []
        """Games of training since the last publish: number, opponent, points."""
        self._rated: list[tuple[int, str, float]] = []
        """Games for the ratings that are not entered yet."""
        self.payoff = Payoff()
        """Versions against one another, from the games played for the ratings."""

    # -- who is in it -----------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Past versions at most."""
        return self._config.size

    @property
    def past(self) -> list[str]:
        """Oldest first."""
        return [name_of(version) for version in self._places]

    @property
    def versions(self) -> list[int]:
        return list(self._places)

    def address(self, opponent: str) -> str | None:
        """The model name under which a past version answers; None once it has left."""
        place = {name_of(version): place for version, place in self._places.items()}.get(opponent)
        return None if place is None else f"{self._env}/past-{place}"

    def admit(self, version: int) -> str | None:
        """A version was published: the name under which it must answer from now on; None if it is not kept.

        One is due at every multiple of `every`. A full league loses the version that is closest to its neighbours; the
        first one always stays, so that there is something to measure progress against. One that must go finishes its
        games and is met no more; until they are over the newcomer's place waits for a later version.
        """
        self._enter_training_games(version)
        newest = next(reversed(self._places), None)
        if newest is not None and version // self._config.every <= newest // self._config.every:
            return None
        place = self._free_place(version)
        if place is None:
            return None
        self._places[version] = place
        self._form = Payoff()
        return self.address(name_of(version))

    @contextmanager
    def arriving(self, version: int) -> Generator[None]:
        """Until its weights are loaded, a newcomer is not drawn as an opponent."""
        self._arriving = version
        try:
            yield
        finally:
            self._arriving = None

    def shrink(self) -> list[str]:
        """Remove versions if the league has become smaller than at the checkpoint; returns their names."""
        left = []
        while len(self._places) > self.size:
            left.append(version_to_evict(self.versions))
            del self._places[left[-1]]
        if left:
            self._places = {version: place for place, version in enumerate(self._places)}
        return [name_of(version) for version in sorted(left)]

    def _free_place(self, newcomer: int) -> int | None:
        if len(self._places) < self.size:
            return min(set(range(self.size)) - set(self._places.values()))
        self._leaving = version_to_evict([*self._places, newcomer])
        if self._playing[name_of(self._leaving)]:
            return None
        place, self._leaving = self._places.pop(self._leaving), None
        return place

    # -- games ------------------------------------------------------------------------------------------------------

    def draw(self, actors: Sequence[str], number: int, dice: random.Random) -> Match | None:
        """The match for draw `number`; None for the policy against itself."""
        # A draw that is played again, after a restart, is reported again.
        self._news = [news for news in self._news if news[0] != number]
        there = [v for v in self._places if v not in (self._arriving, self._leaving)]
        learner = dice.choice(actors)
        opponent = draw_opponent(self._config, dice, POLICY, [name_of(version) for version in there], self._form)
        return None if opponent == POLICY else Match(learner, opponent, number)

    def meet(self, version: int) -> list[tuple[str, int]]:
        """Games for the ratings, as opponent and number: this version against every other one."""
        self._rated = []
        others = [name for name in self.past if name != name_of(version)]
        return [(other, game) for other in others for game in range(self._config.games)]

    @contextmanager
    def playing(self, opponent: str) -> Generator[None]:
        """While a game is on its players stay."""
        self._playing[opponent] += 1
        try:
            yield
        finally:
            self._playing[opponent] -= 1

    def report(self, match: Match, result: EpisodeResult, rated: bool = False) -> None:
        """A game is over: one of training, or one for the ratings."""
        books = self._rated if rated else self._news
        books.append((match.number, match.opponent, points(match, result)))

    def enter(self, version: int) -> int:
        """Enter the games this version played for the ratings; returns how many came to an end."""
        for _, opponent, taken in sorted(self._rated):
            self.payoff.add(name_of(version), opponent, taken)
        entered, self._rated = len(self._rated), []
        return entered

    def _enter_training_games(self, version: int) -> None:
        if version == self._version:
            return  # published once more, by a run that was resumed
        for _, opponent, taken in sorted(self._news):
            self._form.add(POLICY, opponent, taken)
        self._news, self._version = [], version

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {
            "places": [[version, place] for version, place in self._places.items()],
            "version": self._version,
            "form": self._form.state(),
            "news": [list(news) for news in sorted(self._news)],
            "payoff": self.payoff.state(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self._places = dict(state["places"])
        self._arriving = self._leaving = None
        self._version = state["version"]
        self._form.load(state["form"])
        self._news = [(number, opponent, taken) for number, opponent, taken in state["news"]]
        self._rated = []
        self.payoff.load(state["payoff"])


def version_to_evict(versions: Sequence[int]) -> int:
    """The version whose neighbours are closest to one another, of all but the first and the last."""
    gaps = {at: after - before for before, at, after in zip(versions, versions[1:], versions[2:], strict=False)}
    return min(gaps, key=lambda version: (gaps[version], version))


def name_of(version: int) -> str:
    """A version's name in tables and metrics."""
    return f"v{version}"


def points(match: Match, result: EpisodeResult) -> float:
    """1 if the learner earned more than the others did on average, half for as much, nothing for less."""
    own = result.rewards[match.learner]
    others = [reward for actor, reward in result.rewards.items() if actor != match.learner]
    theirs = sum(others) / len(others)
    return 1.0 if own > theirs else 0.5 if own == theirs else 0.0
