"""The league: past versions of the policy as opponents, who meets whom, and who is the stronger.

    due(version) -> admit -> [ draw -> a game against the past -> report ] ... meet -> payoff -> ratings

It knows names and results, no weights. What keeps a past version able to speak is the orchestrator's business.
"""

from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from paceline.arena.matchmaking import Matchmaker
from paceline.arena.payoff import Payoff
from paceline.arena.types import EpisodeResult
from paceline.config.env import League as Config

POLICY = "policy"


@dataclass(frozen=True, slots=True)
class Match:
    """The policy in one seat, a past version in all others."""

    learner: str
    """The actor who learns."""
    opponent: str
    """The version that plays the others."""


class League:
    """Keeps up to `size` past versions, spread over the whole run, and what is known of them."""

    def __init__(self, config: Config, env: str) -> None:
        self._config, self._env = config, env
        self._matchmaker = Matchmaker(config.rule, config.mirror)
        self._places: dict[int, int] = {}
        """Version to place, oldest first."""
        self._playing: Counter[str] = Counter()
        self._drawn = 0
        self._form = Payoff()
        """How the policy fares in training since it was last admitted."""
        self.payoff = Payoff()
        """Versions against one another, from the games played for the ratings."""

    # -- who is in it -----------------------------------------------------------------------------------------------

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
        """The name under which this version must answer from now on; None if it is not its time.

        A full league loses the version that is closest to its neighbours; the first one always stays, so that there is
        something to measure progress against. Whoever is in a game is not sent away: the newcomer is then passed over.
        """
        if version % self._config.every or version in self._places:
            return None
        if len(self._places) == self._config.size:
            leaving = self._least_missed(version)
            if leaving is None:
                return None
            place = self._places.pop(leaving)
        else:
            place = min(set(range(self._config.size)) - set(self._places.values()))
        self._places[version] = place
        self._form = Payoff()
        return self.address(name_of(version))

    def _least_missed(self, newcomer: int) -> int | None:
        versions = [*self._places, newcomer]
        gaps = {at: after - before for before, at, after in zip(versions, versions[1:], versions[2:], strict=False)}
        free = {version: gap for version, gap in gaps.items() if not self._playing[name_of(version)]}
        return min(free, key=lambda version: (free[version], version), default=None)

    # -- games ------------------------------------------------------------------------------------------------------

    def draw(self, actors: Sequence[str]) -> Match | None:
        """Who plays the next group of games; None for the policy against itself. Seats are swapped game by game."""
        number, self._drawn = self._drawn, self._drawn + 1
        opponent = self._matchmaker.draw(number, POLICY, self.past, self._form)
        return None if opponent == POLICY else Match(actors[number % len(actors)], opponent)

    def meet(self, version: int) -> list[tuple[str, int]]:
        """Games for the ratings, as opponent and number: this version against every other one."""
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

    def report(self, match: Match, result: EpisodeResult, version: int | None = None) -> None:
        """A game is over: one of training, or one that this version played for the ratings."""
        if version is None:
            self._form.add(POLICY, match.opponent, points(match, result))
        else:
            self.payoff.add(name_of(version), match.opponent, points(match, result))

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {
            "places": [[version, place] for version, place in self._places.items()],
            "drawn": self._drawn,
            "form": self._form.state(),
            "payoff": self.payoff.state(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self._places = dict(state["places"])
        self._drawn = state["drawn"]
        self._form.load(state["form"])
        self.payoff.load(state["payoff"])


def name_of(version: int) -> str:
    """What a version is called in tables and metrics."""
    return f"v{version}"


def points(match: Match, result: EpisodeResult) -> float:
    """1 if the learner earned more than the others did on average, half for as much, nothing for less."""
    own = result.rewards[match.learner]
    others = [reward for actor, reward in result.rewards.items() if actor != match.learner]
    theirs = sum(others) / len(others)
    return 1.0 if own > theirs else 0.5 if own == theirs else 0.0
