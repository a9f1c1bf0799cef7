"""Leagues of a run: which versions are kept as opponents, how they survive a restart, and how strong everybody is."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from paceline.arena import ArenaEnvironment, League
from paceline.arena.league import name_of
from paceline.data import Row, Ticket
from paceline.inference.past import PoolWithPast
from paceline.model.weights import Adapter, WeightUpdate
from paceline.orchestrator.checkpoint import CheckpointError
from paceline.orchestrator.course import Course
from paceline.orchestrator.episodes import Player


@dataclass(frozen=True, slots=True)
class Member:
    """An environment that has a league."""

    course: Course
    environment: ArenaEnvironment
    league: League


class Past:
    """Hands published versions on to the leagues that want them, and keeps a copy of each for the checkpoint."""

    def __init__(self, courses: dict[str, Course], pool: object) -> None:
        self.members = [
            Member(course, course.environment, course.environment.league)
            for course in courses.values()
            if isinstance(course.environment, ArenaEnvironment) and course.environment.league is not None
        ]
        self._pool = pool
        self._weights: dict[int, WeightUpdate] = {}

    async def offer(self, update: WeightUpdate) -> None:
        """A version was published: whoever keeps it from now on is told."""
        for member in self.members:
            if (address := member.league.admit(update.version)) is not None:
                kept = self._weights.setdefault(update.version, _copy(update))
                await self._speak(address, kept)
        wanted = {version for member in self.members for version in member.league.versions}
        self._weights = {version: kept for version, kept in self._weights.items() if version in wanted}

    def save(self, folder: Path) -> None:
        """Every kept version, beside the checkpoint's own weights. A file that the checkpoint before has is linked."""
        for version, update in self._weights.items():
            path = folder / _file(version)
            known = sorted(folder.parent.glob(f"step-*/{path.name}"))
            try:
                path.hardlink_to(known[-1])
            except (IndexError, OSError):
                scale = {} if update.adapter is None else {"scale": repr(update.adapter.scale)}
                save_file(dict(update.tensors), path, metadata=scale)

    async def load(self, folder: Path) -> None:
        """Bring back those the restored leagues name."""
        for member in self.members:
            for version in member.league.versions:
                if version not in self._weights:
                    self._weights[version] = await asyncio.to_thread(_read, folder / _file(version), version)
                address = member.league.address(name_of(version))
                assert address is not None
                await self._speak(address, self._weights[version])

    async def assess(
        self, player: Player, version: int, concurrency: int, progress: Callable[[str], None]
    ) -> dict[str, float]:
        """Let this version meet the past, enter the games in the books, and say how strong it is."""
        metrics: dict[str, float] = {}
        for member in self.members:
            if rows := member.environment.meetings(version):
                metrics |= await _assess(member, rows, player, version, concurrency, progress)
        return metrics

    async def _speak(self, address: str, update: WeightUpdate) -> None:
        assert isinstance(self._pool, PoolWithPast)
        await self._pool.keep(address, update)


async def _assess(
    member: Member, rows: Sequence[Row], player: Player, version: int, concurrency: int, progress: Callable[[str], None]
) -> dict[str, float]:
    places, name, done = asyncio.Semaphore(concurrency), member.course.name, 0

    async def one(index: int, row: Row) -> None:
        nonlocal done
        async with places:
            await player.episode(member.course, row, Ticket(index, name, 0, index, index), 0, -1)
        done += 1
        progress(f"rating {name} {done}/{len(rows)}")

    await asyncio.gather(*(one(index, row) for index, row in enumerate(rows)))
    payoff, me = member.league.payoff, name_of(version)
    scores = {other: payoff.score(me, other) for other in payoff.players if other != me}
    metrics = {f"league/{name}/score/{other}": score for other, score in scores.items() if score is not None}
    return metrics | {f"league/{name}/rating": r.points for r in payoff.ratings() if r.player == me}


def _copy(update: WeightUpdate) -> WeightUpdate:
    """The trainer goes on with its own tensors."""
    tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in update.tensors.items()}
    return replace(update, tensors=tensors, canary=None)


def _file(version: int) -> str:
    return f"past-{name_of(version)}.safetensors"


def _read(path: Path, version: int) -> WeightUpdate:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing, and with it version {version} of the league: resume elsewhere")
    with safe_open(path, framework="pt") as file:
        tensors: dict[str, torch.Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        scale = (file.metadata() or {}).get("scale")
    return WeightUpdate(version, tensors, None if scale is None else Adapter("", float(scale)))
