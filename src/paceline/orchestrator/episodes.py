"""Plays episodes: a ticket becomes a group of finished rollouts."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from paceline.data import Row, Ticket
from paceline.envs import Environment, Outcome
from paceline.inference import EngineError, Overloaded, RequestError
from paceline.orchestrator.clock import Clock
from paceline.orchestrator.course import Course
from paceline.rollout import Group, Rollout, Seat, Table, Voice, assemble
from paceline.rollout.types import own

TRAIN, EVAL, MATCH = 0, 1, 2
"""Domains of sampling noise, so that evaluation and ratings never draw what training draws."""

T = TypeVar("T")


class EpisodeLost(Exception):
    """What a user's code did instead of playing on. It belongs to its episode alone."""


class Player:
    """Seats the policy at an environment's table. A failing episode is an outcome with its error, never a crash."""

    def __init__(self, voice: Voice, clock: Clock, seed: int, domain: int = TRAIN) -> None:
        self._voice = voice
        self._clock = clock
        self._seed = seed
        self._domain = domain

    async def group(self, course: Course, ticket: Ticket) -> Group:
        """All rollouts of one ticket, the failed ones apart."""
        try:
            row = await self._users(
                course,
                "the preparation",
                lambda: assigned(course.environment, course.rows[ticket.row], ticket, self._seed),
            )
        except EpisodeLost as lost:
            failed = [Rollout(ticket=ticket, member=0, error=str(lost))]
            return Group(ticket=ticket, rollouts=[], places=course.group_size, failed=failed)
        members = range(course.group_size)
        episodes = await asyncio.gather(*(self.episode(course, row, ticket, m, ticket.number) for m in members))
        alive: list[Rollout] = []
        failed: list[Rollout] = []
        for rollout in (rollout for episode in episodes for rollout in episode):
            if rollout.error is not None:
                failed.append(rollout)
                continue
            rollout.samples = assemble(rollout)
            course.algorithm.observe(rollout)
            alive.append(rollout)
        return Group(ticket=ticket, rollouts=alive, places=course.group_size, failed=failed)

    async def prepare(self, course: Course, row: Row) -> Row:
        """What all episodes on a held-out row have in common; raises `EpisodeLost`."""
        return await self._users(course, "the preparation", lambda: course.environment.prepare(own(row)))

    async def episode(self, course: Course, row: Row, ticket: Ticket, member: int, order: int) -> list[Rollout]:
        """One episode on a copy of the row: a rollout for each actor who spoke, or why there is none."""
        noise = (self._seed, self._domain, ticket.number, member)
        # In training somebody else may speak in the policy's place, for it to learn from.
        voice = (course.algorithm.voice if self._domain == TRAIN else None) or self._voice
        seats = Table(voice, noise, order, course.environment.actors)
        try:
            outcome = await self._users(course, "an episode", lambda: course.environment.play(own(row), seats))
        except EpisodeLost as lost:
            return [failure(ticket, member, seats, str(lost))]
        finally:
            seats.leave()
        if outcome is None:
            return [failure(ticket, member, seats, f"{course.name}: dropped by the environment", dropped=True)]
        return finished(course.name, ticket, member, seats, outcome)

    async def _users(self, course: Course, what: str, work: Callable[[], Awaitable[T]]) -> T:
        """What a user's code answers within its time; whatever it raises is the loss of its episode."""
        try:
            return await self._clock.within(course.config.timeout, f"{what} of `{course.name}`", work())
        except EngineError as error:
            if not isinstance(error, RequestError | Overloaded):
                raise
            raise EpisodeLost(f"{course.name}: {error}") from error
        except asyncio.CancelledError as error:
            # Ours to pass on only if we were cancelled; otherwise something inside the environment was.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise EpisodeLost(f"{course.name}: something the environment awaited was cancelled") from error
        except (Exception, SystemExit) as error:  # `sys.exit` in an environment ends its episode, not the run
            raise EpisodeLost(f"{course.name}: {type(error).__name__}: {error}") from error


async def assigned(environment: Environment, row: Row, ticket: Ticket, seed: int) -> Row:
    """What all episodes of a ticket of training have in common."""
    dice = random.Random(f"{seed} {ticket.env} {ticket.draw}")
    return await environment.prepare(await environment.assign(own(row), ticket.draw, dice))


def finished(name: str, ticket: Ticket, member: int, seats: Mapping[str, Seat], outcome: Outcome) -> list[Rollout]:
    """A rollout for each trained seat that spoke."""
    spoke = {at: seat for at, seat in seats.items() if seat.turns and seat.trained}
    if error := fault(spoke, outcome):
        return [failure(ticket, member, seats, f"{name}: {error}")]
    metrics = {key: float(value) for key, value in outcome.metrics.items()}
    return [
        Rollout(
            ticket=ticket,
            member=member,
            actor=seat.actor,
            kind=seat.kind,
            parent=seat.parent,
            turns=seat.turns,
            reward=float(outcome.rewards[at]),
            metrics=metrics | {f"overridden/{key}": float(count) for key, count in seat.overrides.items()},
        )
        for at, seat in spoke.items()
    ]


def fault(spoke: Mapping[str, Seat], outcome: Outcome) -> str | None:
    """Why an episode that was played to its end counts for nothing."""
    if not isinstance(outcome, Outcome):
        return f"the episode ended with {outcome!r}: return an Outcome, or None to drop the episode"
    if not spoke:
        return "the episode ended without a word from the policy"
    if missing := spoke.keys() - outcome.rewards.keys():
        return f"the outcome has no reward for {sorted(missing)}, though they spoke"
    for key, value in outcome.metrics.items():
        if isinstance(value, str) or not hasattr(value, "__float__"):
            return f"the metric `{key}` is {value!r}: a metric must be a number"
    return None


def failure(ticket: Ticket, member: int, seats: Mapping[str, Seat], error: str, dropped: bool = False) -> Rollout:
    """What is left of an episode that gives no rollout."""
    rollout = Rollout(ticket=ticket, member=member, error=error, dropped=dropped)
    spoke = [seat for seat in seats.values() if seat.turns]
    for seat in [*spoke, *seats.values()][:1]:
        rollout.actor, rollout.turns = seat.actor, seat.turns
    return rollout
