"""Manages a league of past versions of the policy: admission, matchmaking and ratings.

    admit -> [ draw -> game -> report ] ... schedule_rating_games -> report -> record_ratings -> payoff -> ratings

It holds names and results but no weights; the orchestrator serves past versions.
"""

import random
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from paceline.config.env import LeagueConfig as Config
from paceline.envs import POLICY
from paceline.observe.analysis.payoff import Payoff
from paceline.selfplay.episode import EpisodeResult


def draw_opponent(c: Config, dice: random.Random, learner: str, past: Sequence[str], payoff: Payoff) -> str:
    """An opponent for the learner: a pure function of its arguments, so that a resumed run draws the same.

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
    """Keeps up to `size` past versions, spread over the whole run, and their results.

    Results wait until the next version is published and are then entered by their matches' numbers: who is met must not
    depend on whose game was over first.
    """

    def __init__(self, config: Config, env: str) -> None:
        self._config, self._env = config, env
        self._slots: dict[int, int] = {}
        """Version to place, oldest first."""
        self._games_running: Counter[str] = Counter()
        self._loading: int | None = None
        self._evicting: int | None = None
        self._version: int | None = None
        """The version published last."""
        self._training_payoff = Payoff()
        """Results of the policy in training since a version was last admitted."""
        self._training_results: list[tuple[int, str, float]] = []
        """Games of training since the last publish: number, opponent, points."""
        self._rating_results: list[tuple[int, str, float]] = []
        """Games for the ratings that are not entered yet."""
        self.payoff = Payoff()
        """Versions against one another, from the games played for the ratings."""

    # -- members -----------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Past versions at most."""
        return self._config.size

    @property
    def version_names(self) -> list[str]:
        """Oldest first."""
        return [version_name(version) for version in self._slots]

    @property
    def versions(self) -> list[int]:
        return list(self._slots)

    def address(self, opponent: str) -> str | None:
        """The model name under which a past version answers; None once it has left."""
        places = {version_name(version): place for version, place in self._slots.items()}
        return f"{self._env}/past-{places[opponent]}" if opponent in places else None

    def admit(self, version: int) -> str | None:
        """A version was published: the name under which it must answer from now on; None if it is not kept.

        One is due at every multiple of `every`. A full league loses the version that is closest to its neighbours; the
        first one always stays, so that there is something to measure progress against. One that must go finishes its
        games and is met no more; until they are over the newcomer's place waits for a later version.
        """
        if version != self._version:  # else published once more, by a run that was resumed
            for _, opponent, taken in sorted(self._training_results):
                self._training_payoff.add(POLICY, opponent, taken)
            self._training_results, self._version = [], version
        newest = next(reversed(self._slots), None)
        if newest is not None and version // self._config.every <= newest // self._config.every:
            return None
        place = self._free_slot(version)
        if place is None:
            return None
        self._slots[version] = place
        self._training_payoff = Payoff()
        return self.address(version_name(version))

    @contextmanager
    def loading(self, version: int) -> Generator[None]:
        """Do not draw a new version as an opponent while its weights are loading."""
        self._loading = version
        try:
            yield
        finally:
            self._loading = None

    def shrink(self) -> list[str]:
        """Remove versions if the league has become smaller than at the checkpoint; returns their names."""
        left = []
        while len(self._slots) > self.size:
            left.append(version_to_evict(self.versions))
            del self._slots[left[-1]]
        if left:
            self._slots = {version: place for place, version in enumerate(self._slots)}
        return [version_name(version) for version in sorted(left)]

    def _free_slot(self, newcomer: int) -> int | None:
        if len(self._slots) < self.size:
            return min(set(range(self.size)) - set(self._slots.values()))
        self._evicting = version_to_evict([*self._slots, newcomer])
        if self._games_running[version_name(self._evicting)]:
            return None
        place, self._evicting = self._slots.pop(self._evicting), None
        return place

    # -- games ------------------------------------------------------------------------------------------------------

    def draw(self, actors: Sequence[str], number: int, dice: random.Random) -> Match | None:
        """The match for draw `number`; None for the policy against itself."""
        # A draw that is played again, after a restart, is reported again.
        self._training_results = [news for news in self._training_results if news[0] != number]
        past = [version_name(v) for v in self._slots if v not in (self._loading, self._evicting)]
        learner = dice.choice(actors)
        opponent = draw_opponent(self._config, dice, POLICY, past, self._training_payoff)
        return None if opponent == POLICY else Match(learner, opponent, number)

    def schedule_rating_games(self, version: int) -> list[tuple[str, int]]:
        """Games for the ratings, as opponent and number: this version against every other one."""
        self._rating_results = []
        others = [name for name in self.version_names if name != version_name(version)]
        return [(other, game) for other in others for game in range(self._config.games)]

    @contextmanager
    def pin(self, opponent: str) -> Generator[None]:
        """Keep a version in the league while a game against it runs."""
        self._games_running[opponent] += 1
        try:
            yield
        finally:
            self._games_running[opponent] -= 1

    def report(self, match: Match, result: EpisodeResult, rated: bool = False) -> None:
        """A game is over: one of training, or one for the ratings."""
        results = self._rating_results if rated else self._training_results
        results.append((match.number, match.opponent, match_points(match, result)))

    def record_ratings(self, version: int) -> int:
        """Enter the games this version played for the ratings; returns how many came to an end."""
        for _, opponent, taken in sorted(self._rating_results):
            self.payoff.add(version_name(version), opponent, taken)
        entered, self._rating_results = len(self._rating_results), []
        return entered

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {
            "places": [[version, place] for version, place in self._slots.items()],
            "version": self._version,
            "form": self._training_payoff.state(),
            "news": [list(news) for news in sorted(self._training_results)],
            "payoff": self.payoff.state(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self._slots = dict(state["places"])
        self._loading = self._evicting = None
        self._version = state["version"]
        self._training_payoff.load(state["form"])
        self._training_results = [(number, opponent, taken) for number, opponent, taken in state["news"]]
        self._rating_results = []
        self.payoff.load(state["payoff"])


def version_to_evict(versions: Sequence[int]) -> int:
    """The version whose neighbours are closest to one another, of all but the first and the last."""
    gaps = {at: after - before for before, at, after in zip(versions, versions[1:], versions[2:], strict=False)}
    return min(gaps, key=lambda version: (gaps[version], version))


def version_name(version: int) -> str:
    """A version's name in tables and metrics."""
    return f"v{version}"


def match_points(match: Match, result: EpisodeResult) -> float:
    """1 if the learner earned more than the others did on average, half for as much, nothing for less."""
    own = result.rewards[match.learner]
    others = [reward for actor, reward in result.rewards.items() if actor != match.learner]
    theirs = sum(others) / len(others)
    return 1.0 if own > theirs else 0.5 if own == theirs else 0.0
