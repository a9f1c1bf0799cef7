"""Plays episodes: a ticket becomes a group of finished rollouts."""

import asyncio
import copy

from paceline.data import Row, Ticket
from paceline.envs import POLICY
from paceline.inference import EngineError, Overloaded, RequestError
from paceline.orchestrator.clock import Clock
from paceline.orchestrator.course import Course
from paceline.rollout import Group, Rollout, Seat, Voice, assemble

TRAIN, EVAL = 0, 1
"""Domains of sampling noise, so that evaluation never draws what training draws."""


class Player:
    """Seats the policy at an environment's table. A failing episode is an outcome with its error, never a crash."""

    def __init__(self, voice: Voice, clock: Clock, seed: int, domain: int = TRAIN) -> None:
        self._voice = voice
        self._clock = clock
        self._seed = seed
        self._domain = domain

    async def group(self, course: Course, ticket: Ticket) -> Group:
        """All rollouts of one ticket, the failed ones apart."""
        row = course.rows[ticket.row]
        members = range(course.group_size)
        rollouts = await asyncio.gather(*(self.episode(course, row, ticket, m, ticket.number) for m in members))
        alive = [rollout for rollout in rollouts if rollout.error is None]
        for rollout in alive:
            rollout.samples = assemble(rollout)
            course.algorithm.observe(rollout)
        failed = [rollout for rollout in rollouts if rollout.error is not None]
        return Group(ticket=ticket, rollouts=alive, places=course.group_size, failed=failed)

    async def episode(self, course: Course, row: Row, ticket: Ticket, member: int, order: int) -> Rollout:
        """One episode on a copy of the row."""
        rollout = Rollout(ticket=ticket, member=member)
        seat = Seat(self._voice, (self._seed, self._domain, ticket.number, member), order)
        rollout.turns = seat.turns
        what = f"an episode of `{course.name}`"
        try:
            play = course.environment.play(copy.deepcopy(row), {POLICY: seat})
            outcome = await self._clock.within(course.config.timeout, what, play)
            if outcome is None:
                rollout.error, rollout.dropped = f"{course.name}: dropped by the environment", True
            elif not seat.turns:
                rollout.error = f"{course.name}: the episode ended without a word from the policy"
            else:
                rollout.metrics = {name: float(value) for name, value in outcome.metrics.items()}
                rollout.reward = float(outcome.rewards[POLICY])
        except EngineError as error:
            if not isinstance(error, RequestError | Overloaded):
                raise
            rollout.error = f"{course.name}: {error}"
        except asyncio.CancelledError:
            # Ours to pass on only if we were cancelled; otherwise something inside the environment was.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            rollout.error = f"{course.name}: something the environment awaited was cancelled"
        except Exception as error:  # whatever a user's environment raises belongs to its episode alone
            rollout.error = f"{course.name}: {type(error).__name__}: {error}"
        return rollout
