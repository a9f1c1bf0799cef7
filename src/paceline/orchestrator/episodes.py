"""Plays episodes: a ticket becomes a group of finished rollouts."""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from math import nan
from typing import Any, TypeVar

from paceline.clients import NoEngineLeft
from paceline.data import Row, Ticket
from paceline.data.rollout import copy_value
from paceline.envs import Environment, Outcome
from paceline.envs.base import LARGEST_REWARD, short_repr
from paceline.errors import Mismatch
from paceline.orchestrator.failures import FailureKind, error_text, failure_kind, stop_error
from paceline.orchestrator.train_env import TrainEnv
from paceline.rollout import Group, Rollout, SamplingClient, Seat, SessionMap, assemble
from paceline.rollout.render import ToolsDropped
from paceline.util.deadlines import AbandonedError, Clock, DeadlineError, gather_or_cancel
from paceline.util.rate_limited_logger import RateLimitedLogger
from paceline.util.user_code import is_cancelled, is_ctrl_c

TRAIN, EVAL, MATCH = 0, 1, 2
"""Domains of sampling noise, so that evaluation and ratings never draw what training draws."""

T = TypeVar("T")
limited_log = RateLimitedLogger(logging.getLogger("paceline.episodes"))


class EpisodeLost(Exception):
    """An episode failed: why, and of which kind the failure is. It concerns that episode alone."""

    def __init__(self, cause: str, kind: FailureKind = "episode") -> None:
        super().__init__(cause)
        self.kind: FailureKind = kind


class RolloutRunner:
    """Plays an environment's episodes with the policy. A failing episode is an outcome with its error, never a crash.

    A failure is retried, given up or ends the run, as the environment's policy for its kind says. Each try is a whole
    run_episode: with fresh seats, with the same noise and so the same tokens from the same weights, and with all of the
    environment's `timeout` before it. An episode that fails in the end reports its first failure.
    """

    def __init__(self, client: SamplingClient, clock: Clock, seed: int, domain: int = TRAIN) -> None:
        self._client = client
        self._clock = clock
        self._seed = seed
        self._domain = domain
        self.retry_counts: Counter[str] = Counter()
        """Tries that were repeated, by kind of failure, since the last call of `metrics`."""
        self.failure_counts: Counter[str] = Counter()
        """Likewise, episodes and preparations that were given up, by the kind of what went wrong first."""

    def metrics(self) -> dict[str, float]:
        """Counts of failures since the last call, by kind."""
        kinds = {f"retried/{kind}": float(count) for kind, count in self.retry_counts.items()}
        kinds |= {f"failed/{kind}": float(count) for kind, count in self.failure_counts.items()}
        self.retry_counts.clear()
        self.failure_counts.clear()
        return kinds

    async def run_group(self, env: TrainEnv, ticket: Ticket) -> Group:
        """All rollouts of one ticket, the failed ones apart."""
        try:
            row = await self._prepare(
                env, lambda: assign_row(env.environment, env.rows[ticket.row], ticket, self._seed)
            )
        except EpisodeLost as lost:
            failed = [Rollout(ticket=ticket, member=0, error=str(lost), cause=lost.__cause__)]
            return Group(ticket=ticket, rollouts=[], size=env.group_size, failed=failed)
        members = range(env.group_size)
        episodes = await gather_or_cancel([self.run_episode(env, row, ticket, m, ticket.number) for m in members])
        return self.collect(env, ticket, episodes, env.group_size)

    @staticmethod
    def collect(env: TrainEnv, ticket: Ticket, episodes: Sequence[Sequence[Rollout]], size: int) -> Group:
        """The group of these episodes, with the samples of all rollouts that did not fail."""
        rollouts = [rollout for episode in episodes for rollout in episode]
        alive = [rollout for rollout in rollouts if rollout.error is None]
        for rollout in alive:
            rollout.samples = assemble(rollout)
            env.algorithm.observe(rollout)
        failed = [rollout for rollout in rollouts if rollout.error is not None]
        return Group(ticket=ticket, rollouts=alive, size=size, failed=failed)

    async def prepare(self, env: TrainEnv, row: Row) -> Row:
        """The prepared row that all episodes on a held-out row share; raises `EpisodeLost`."""
        return await self._prepare(env, lambda: env.environment.prepare(copy_value(row)))

    async def run_episode(self, env: TrainEnv, row: Row, ticket: Ticket, member: int, order: int) -> list[Rollout]:
        """One episode on a copy of the row: a rollout for each actor who spoke, or why there is none."""
        noise = (self._seed, self._domain, ticket.number, member)
        # In training a frozen model may speak in the policy's place, for it to learn from.
        client = (env.algorithm.client if self._domain == TRAIN else None) or self._client
        losses: list[EpisodeLost] = []
        while True:  # as in `_prepare`: a coroutine more for each of 20,000 episodes is work for the garbage collector
            seats = SessionMap(client, noise, order, env.environment.actors)
            try:
                outcome = await self._call_user_code(
                    env, client, "an episode", lambda at=seats: env.environment.play(copy_value(row), at)
                )
                if outcome is None:
                    text = f"{env.name}: dropped by the environment"
                    return [failed_rollout(ticket, member, seats, text, dropped=True)]
                return build_rollouts(env.name, ticket, member, seats, outcome)
            except EpisodeLost as lost:
                losses.append(lost)
            finally:
                seats.leave()
            try:
                await self._wait_for_retry(env, losses)
            except EpisodeLost as lost:
                return [failed_rollout(ticket, member, seats, str(lost), cause=lost.__cause__)]

    async def _prepare(self, env: TrainEnv, work: Callable[[], Awaitable[Row]]) -> Row:
        losses: list[EpisodeLost] = []
        while True:
            try:
                return await self._call_user_code(env, self._client, "the preparation", work)
            except EpisodeLost as lost:
                losses.append(lost)
            await self._wait_for_retry(env, losses)

    async def _wait_for_retry(self, env: TrainEnv, losses: Sequence[EpisodeLost]) -> None:
        """Wait before the next try; or raise the first cause, as the loss of the episode or as the end of the run."""
        if is_cancelled():
            raise asyncio.CancelledError  # the environment made a failure of it, and the caller waits for no other try
        first, last, failed = losses[0], losses[-1], len(losses)
        policy = env.failures.policy(last.kind)
        if policy.choice == "fail":
            text = f"{first} (failures.{last.kind} = {policy}): mend that, or let the run drop or retry"
            raise stop_error(text, first.__cause__)
        if not policy.retries(failed) or isinstance(last.__cause__, AbandonedError):
            self.failure_counts[first.kind] += 1
            more = f"; at last: {last}" if str(last) != str(first) else ""
            text = f"{first} (failures.{first.kind} = {env.failures.policy(first.kind)}){more}"
            raise EpisodeLost(text, first.kind) from first.__cause__
        pause = policy.pause(failed)
        self.retry_counts[last.kind] += 1
        text = "%s: played again in %g s, try %d of %d (failures.%s)"
        limited_log.warn((env.name, last.kind), text, last, pause, failed + 1, policy.tries, last.kind)
        await self._clock.sleep(pause)

    async def _call_user_code(
        self, env: TrainEnv, client: SamplingClient, what: str, work: Callable[[], Awaitable[T]]
    ) -> T:
        """The result of user code within its timeout; an exception in it loses the episode."""
        try:
            return await self._clock.wait_within(env.config.timeout, f"{what} of `{env.name}`", work())
        except (NoEngineLeft, Mismatch, ToolsDropped):
            raise  # no other episode would fare better, now or later
        except DeadlineError as error:
            # An episode that waited for an engine all that time is not to blame for it.
            trouble = client.pool.trouble
            if trouble is None:
                advice = env.config.raise_hint("timeout")
                raise EpisodeLost(f"{env.name}: {error}: {advice}", "timeout") from error
            raise EpisodeLost(f"{env.name}: {error}, and {trouble}", "engine") from error
        except asyncio.CancelledError as error:
            # Ours to pass on only if we were cancelled; otherwise something inside the environment was.
            if is_cancelled():
                raise
            text = f"{env.name}: something the environment awaited was cancelled ({error_text(error)})"
            raise EpisodeLost(text) from error
        except BaseException as error:  # `sys.exit` or `pytest.fail` in an environment ends its episode, not the run
            if is_ctrl_c(error):
                raise
            if refused := getattr(client.renderer, "dropped_tools_error", None):
                raise refused from error  # an agent behind a URL heard of it as an HTTP error like any other
            kind, trouble = failure_kind(error), client.pool.trouble
            if kind != "episode" or trouble is None:
                raise EpisodeLost(f"{env.name}: {error_text(error)}", kind) from error
            # An agent behind a URL hears of a lost engine as an HTTP error like any other.
            raise EpisodeLost(f"{env.name}: {error_text(error)}, and {trouble}", "engine") from error


async def assign_row(environment: Environment, row: Row, ticket: Ticket, seed: int) -> Row:
    """The prepared row that all episodes of a training ticket share."""
    dice = random.Random(f"{seed} {ticket.env} {ticket.draw}")
    return await environment.prepare(await environment.assign(copy_value(row), ticket.draw, dice))


def build_rollouts(
    name: str, ticket: Ticket, member: int, seats: Mapping[str, Seat], outcome: Outcome
) -> list[Rollout]:
    """A rollout for each trained seat that spoke; raises `EpisodeLost` where the outcome is none."""
    spoke = {at: seat for at, seat in seats.items() if seat.turns and seat.trained}
    if error := outcome_error(spoke, outcome):
        raise EpisodeLost(f"{name}: {error}")
    metrics = {key: metric_value(value) or 0.0 for key, value in outcome.metrics.items()}
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


def outcome_error(spoke: Mapping[str, Seat], outcome: Outcome) -> str | None:
    """Why an episode that was played to its end counts for nothing."""
    if not isinstance(outcome, Outcome):
        return f"the episode ended with {outcome!r}: return an Outcome, or None to drop the episode"
    if not spoke:
        return "the episode ended without a word from the policy"
    if missing := spoke.keys() - outcome.rewards.keys():
        return f"the outcome has no reward for {sorted(missing)}, though they spoke"
    for key, value in outcome.metrics.items():
        if metric_value(value) is None:
            return f"the metric `{key}` is {short_repr(value)}: a metric must be a number"
    return None


def metric_value(value: Any) -> float | None:
    """A metric of user code as a float; None if it is no number. What no mean can be taken of is NaN."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer beyond all floats
        return nan
    except Exception:  # an array of several numbers
        return None
    return number if abs(number) <= LARGEST_REWARD else nan


def failed_rollout(
    ticket: Ticket,
    member: int,
    seats: Mapping[str, Seat],
    error: str,
    dropped: bool = False,
    cause: BaseException | None = None,
) -> Rollout:
    """The record of an episode that gives no rollout."""
    rollout = Rollout(ticket=ticket, member=member, error=error, dropped=dropped, cause=cause)
    spoke = [seat for seat in seats.values() if seat.turns]
    for seat in [*spoke, *seats.values()][:1]:
        rollout.actor, rollout.turns = seat.actor, seat.turns
    return rollout
