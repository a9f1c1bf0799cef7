"""Adapts an arena to the environment interface of a run file."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from paceline.config.env.base import ArenaEnvConfig as Config
from paceline.data import Row
from paceline.envs import Environment, Outcome, Split
from paceline.envs.judges import Judge
from paceline.rollout import Seat, SessionMap
from paceline.selfplay.arena import Arena
from paceline.selfplay.episode import ArenaError, EpisodeRequest, EpisodeResult
from paceline.selfplay.league import League, Match
from paceline.util.importing import import_object
from paceline.util.user_code import user_code


class ArenaEnvironment(Environment):
    """Plays an arena's requests, one per group. Every actor who spoke, in it or in what it spawned, gives a rollout."""

    def __init__(self, arena: Arena, train_examples: int = 1024, league: League | None = None) -> None:
        self.arena, self.league = arena, league
        self.actors = tuple(arena.actors)
        self._train_examples = train_examples
        if not self.actors or not arena.episodes:
            raise ArenaError(f"{type(arena).__name__} has no actors or no episodes: add_actor and add_episode first")

    def examples(self, split: Split) -> Sequence[Row]:
        """A row per request known beforehand; else rows whose request is drawn when a group begins."""
        known = self.arena.requests(split)
        for request in known:
            self.arena.check(request)
        if known or split == "eval":
            return [{"split": split, "request": request} for request in known]
        if type(self.arena).get_batch is Arena.get_batch:
            raise ArenaError(f"{type(self.arena).__name__} has nothing to play: fill in requests() or get_batch()")
        return [{"split": split} for _ in range(self._train_examples)]

    def set_judges(self, judges: Mapping[str, Judge]) -> None:
        self.judges = self.arena.judges = judges

    def rating_games(self, version: int) -> Sequence[Row]:
        """Games of this version against those before it, for the ratings; none if nothing can be played now."""
        games = [] if self.league is None else self.league.schedule_rating_games(version)
        try:
            matches = self.arena.matches() if games else []
        except Exception as error:
            what = f"{type(self.arena).__name__}.matches(), where a league's ratings are played for"
            raise ArenaError(f"{what}, raised {type(error).__name__}: {error}") from error
        # Every seat of a request has its turn before the next request has: no opening is always the same player's.
        sides = [(request, actor) for request in matches for actor in self._learners(request)]
        rows: list[Row] = []
        for number, (opponent, game) in enumerate(games if sides else ()):
            request, learner = sides[game % len(sides)]
            rows.append({"split": "match", "request": request, "match": Match(learner, opponent, number)})
        return rows

    async def assign(self, example: Row, draw: int, dice: random.Random) -> Row:
        request: EpisodeRequest = example.get("request") or self.arena.draw(draw)
        row, cast = example | {"request": request}, self._learners(request)
        # A single actor, or an episode that does not train, meets no past version.
        if self.league is None or not cast or not request.is_trainable:
            return row
        return row | {"match": self.league.draw(cast, draw, dice)}

    def forget(self, before: int) -> None:
        self.arena.forget(before)

    async def play(self, example: Row, seats: Mapping[str, Seat]) -> Outcome | None:
        assert isinstance(seats, SessionMap)
        request: EpisodeRequest = example["request"]
        match: Match | None = example.get("match")
        if match is not None:
            return await self._play_match(request, match, seats, rated=example["split"] == "match")
        if example["split"] == "eval":
            # Evaluation must not teach: what it would store is forgotten with its copy of the arena.
            return outcome(await self.arena.isolated_copy().run_episode(replace(request, is_trainable=True), seats))
        result = await self.arena.run_episode(request, seats)
        return outcome(result) if request.is_trainable else None

    async def _play_match(
        self, request: EpisodeRequest, match: Match, table: SessionMap, rated: bool
    ) -> Outcome | None:
        """A game of the policy against a past version. Its opponent may have left since it was drawn."""
        assert self.league is not None
        address = self.league.address(match.opponent)
        if address is None:
            return None
        past = {actor: address for actor in self._learners(request) if actor != match.learner}
        request = replace(request, models={**request.models, **past})
        with self.league.pin(match.opponent):
            # Games for the ratings must not teach either.
            arena = self.arena.isolated_copy() if rated else self.arena
            result = await arena.run_episode(request, table)
        self.league.report(match, result, rated)
        # It may all be over before the learner's first turn: a result, but nothing to train on.
        return outcome(result) if any(seat.turns and seat.trained for seat in table.values()) else None

    def _learners(self, request: EpisodeRequest) -> Sequence[str]:
        """Those in it whom the policy plays, in order, if there are two or more."""
        cast = self.arena.episode(request.episode_type).actors or self.actors
        mine = [actor for actor in cast if actor not in request.models]
        return mine if len(mine) > 1 else []

    def state(self) -> dict[str, Any]:
        state = self.arena.state()
        return state if self.league is None else state | {"league": self.league.state()}

    def load(self, state: dict[str, Any]) -> None:
        self.arena.load(state)
        if self.league is not None and "league" in state:
            self.league.load(state["league"])


def outcome(result: EpisodeResult) -> Outcome:
    """Rewards by seat over the whole tree. Metrics of children are averaged under the name of their kind."""
    rewards: dict[str, float] = {}
    below: dict[str, list[float]] = {}
    for played in result.tree():
        rewards |= {seat: played.rewards[actor] for actor, seat in played.seats.items()}
        for name, value in played.metrics.items() if played is not result else ():
            below.setdefault(f"{played.request.episode_type}/{name}", []).append(value)
    averages = {name: fmean(values) for name, values in below.items()}
    return Outcome(rewards, result.metrics | averages | {"game_turns": float(len(result.steps))})


def arena_environment(config: Config) -> ArenaEnvironment:
    """The arena an import path names: an Arena class, or a function that makes one."""
    found = import_object(config.import_path)
    with user_code(f"the arena `{config.import_path}` ([[env]] `{config.name}`)"):
        arena = found(**config.kwargs) if callable(found) else found
    if not isinstance(arena, Arena):
        raise ArenaError(f"{config.import_path}: gave {arena!r}, not a paceline.selfplay.Arena")
    league = None if config.league is None else League(config.league, config.name)
    if league is not None and len(arena.actors) < 2:
        raise ArenaError(f"{config.import_path}: a league needs two actors or more, and this arena has one")
    return ArenaEnvironment(arena, config.train_examples, league)
