"""Keeps past versions for a run's leagues, saves them in checkpoints, and plays the rating games."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.clients.pool import LeaguePool, Pool
from paceline.data import Row, Ticket
from paceline.orchestrator.checkpoint import CheckpointError
from paceline.orchestrator.episodes import RolloutRunner, TrainEnv
from paceline.rollout import Rollout
from paceline.selfplay import ArenaEnvironment, League
from paceline.selfplay.league import version_name
from paceline.weights.update import WeightUpdate
from paceline.weights.weight_store import StoredUpdate, clone_update, read_update, save_update


@dataclass(frozen=True, slots=True)
class LeagueEnv:
    env: TrainEnv
    environment: ArenaEnvironment
    league: League


class LeagueCheckpoints:
    """Hands published versions on to the leagues that want them, and keeps a copy of each for the checkpoint."""

    def __init__(self, envs: dict[str, TrainEnv], pool: Pool, note: Callable[[str], None]) -> None:
        self.members = league_envs(envs)
        self._pool, self._note = pool, note
        self._weights: dict[int, StoredUpdate] = {}

    async def offer(self, update: WeightUpdate) -> None:
        """Offer a published version to every league; those that admit it have it served from now on."""
        for member in self.members:
            if (address := member.league.admit(update.version)) is None:
                continue
            with member.league.loading(update.version):
                if update.version not in self._weights:
                    self._weights[update.version] = await asyncio.to_thread(_copy_to_cpu, update)
                await self._serve_version(address, update.version)
        wanted = {version for member in self.members for version in member.league.versions}
        self._weights = {version: kept for version, kept in self._weights.items() if version in wanted}

    def save(self, folder: Path) -> None:
        """Every kept version, beside the checkpoint's own weights."""
        for version, stored in self._weights.items():
            save_update(stored, folder / _file_name(version))

    async def load(self, folder: Path) -> None:
        """Bring back those the restored leagues name."""
        for member in self.members:
            if left := member.league.shrink():
                self._note(f"{member.env.name}: its league is smaller now, and {', '.join(left)} left it")
            for version in member.league.versions:
                if version not in self._weights:
                    path = folder / _file_name(version)
                    self._weights[version] = await asyncio.to_thread(_read_version, path, version)
                address = member.league.address(version_name(version))
                assert address is not None
                await self._serve_version(address, version)

    async def rate_version(
        self,
        runner: RolloutRunner,
        version: int,
        concurrency: int,
        progress: Callable[[str], None],
        played: Callable[[Sequence[Rollout]], None] = lambda rollouts: None,
    ) -> dict[str, float]:
        """Let this version meet the past, enter the games in the books, and say how strong it is."""
        semaphore, done, metrics = asyncio.Semaphore(concurrency), Counter[str](), dict[str, float]()

        async def game(env: TrainEnv, rows: Sequence[Row], index: int) -> str | None:
            ticket = Ticket(index, env.name, 0, index, index)
            async with semaphore:
                rollouts = await runner.run_episode(env, rows[index], ticket, 0, -1)
            done[env.name] += 1
            played(rollouts)
            progress(f"rating {env.name} {done[env.name]}/{len(rows)}")
            return next((rollout.error for rollout in rollouts if rollout.error and not rollout.dropped), None)

        for member in self.members:
            if rows := member.environment.rating_games(version):
                errors = await asyncio.gather(*(game(member.env, rows, index) for index in range(len(rows))))
                metrics |= self._record_ratings(member, version, errors)
            elif any(kept != version for kept in member.league.versions):
                self._note(f"{member.env.name}: no version was rated: matches() gave no episode of two actors")
        return metrics

    def _record_ratings(self, member: LeagueEnv, version: int, errors: Sequence[str | None]) -> dict[str, float]:
        name, games = member.env.name, len(errors)
        if failed := games - member.league.record_ratings(version):
            cause = next(filter(None, errors), "dropped by the environment")
            self._note(f"{name}: {failed} of {games} games for the ratings failed; the first cause: {cause}")
        payoff, me = member.league.payoff, version_name(version)
        scores = {other: payoff.score(me, other) for other in payoff.players if other != me}
        metrics = {f"league/{name}/score/{other}": score for other, score in scores.items() if score is not None}
        metrics |= {f"league/{name}/rating": r.points for r in payoff.ratings() if r.player == me}
        return metrics | {f"league/{name}/failed": float(failed)}

    async def _serve_version(self, address: str, version: int) -> None:
        assert isinstance(self._pool, LeaguePool), "a placement hands over a pool with a past where there is a league"
        await self._pool.keep(address, self._weights[version][0])


def league_envs(envs: dict[str, TrainEnv]) -> list[LeagueEnv]:
    """The environments that have a league, from the run file or from the caller."""
    return [
        LeagueEnv(env, env.environment, env.environment.league)
        for env in envs.values()
        if isinstance(env.environment, ArenaEnvironment) and env.environment.league is not None
    ]


def _copy_to_cpu(update: WeightUpdate) -> StoredUpdate:
    kept = replace(clone_update(update), canary=None, delta=None)
    return kept, kept.fingerprint()


def _file_name(version: int) -> str:
    return f"past-{version_name(version)}.safetensors"


def _read_version(path: Path, version: int) -> StoredUpdate:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing, and with it version {version} of the league: resume elsewhere")
    return read_update(path, version)
