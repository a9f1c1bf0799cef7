"""Sets up the environments of a run (their rows, cursors and algorithms), and plays their episodes."""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from math import nan
from typing import Any, TypeVar

from numpy.typing import NDArray

from paceline.algorithms import Algorithm, AlgorithmContext, credit_for
from paceline.clients import NoEngineLeft
from paceline.clients.frozen import FrozenPool, attach
from paceline.config import RunConfig
from paceline.config.env import EnvConfig
from paceline.config.filters import FailuresConfig
from paceline.config.model import ModelRef
from paceline.data import (
    BadRows,
    Cursor,
    DataError,
    Row,
    Sample,
    Ticket,
    clean_rows,
    make_cursor,
    row_digest,
    skipped_rows,
)
from paceline.data.rollout import copy_value
from paceline.data.rows import ANSWER
from paceline.envs import EnvError, Environment, Outcome, build_environment
from paceline.envs.base import LARGEST_REWARD, JudgeFailed, RefusedRollout, short_repr, token_limits
from paceline.envs.judges import JudgePanel, JudgeService, verdict_metrics
from paceline.errors import Mismatch
from paceline.orchestrator.failures import EpisodeLost, error_text, failure_kind, stop_error
from paceline.rollout import Group, Rollout, SamplingClient, Seat, SessionMap, assemble
from paceline.rollout.render import ToolsDropped
from paceline.util.deadlines import AbandonedError, Clock, DeadlineError, gather_or_cancel
from paceline.util.episode_spans import Span, open_spans
from paceline.util.rate_limited_logger import RateLimitedLogger
from paceline.util.user_code import is_cancelled, is_ctrl_c, user_code

TRAIN, EVAL, MATCH = 0, 1, 2
"""Domains of sampling noise, so that evaluation and ratings never draw what training draws."""

MOST_ANSWERS, MOST_TARGET = 8, 500
"""Equally right answers, and characters of all of them, that the record of a rollout keeps."""
T = TypeVar("T")
limited_log = RateLimitedLogger(logging.getLogger("paceline.episodes"))


@dataclass(slots=True)
class TrainEnv:
    """An environment on its way through a run."""

    config: EnvConfig
    environment: Environment
    algorithm: Algorithm
    rows: Sequence[Row]
    eval_rows: Sequence[Row]
    cursor: Cursor
    draws: int | None = None
    """Tickets to draw in all; None is no end."""
    late_groups: int = 0
    """Groups of it that were dropped because they came too late for any batch."""
    paused: bool = False
    share_while_paused: float = 0.0
    """What others were given while it was paused, in units of `share`."""
    note: str = ""
    """Something about the rows that the user should hear of."""
    failures: FailuresConfig = field(default_factory=FailuresConfig)
    row_digest: dict[str, Any] = field(default_factory=dict)
    """Of the training rows: a checkpoint keeps it, and a resumed run compares."""
    contamination: dict[str, Any] = field(default_factory=dict)
    """Training rows that overlap held-out ones, as JSON; empty where they are not looked for."""
    bad_rows: frozenset[int] = frozenset()
    """Rows that cannot train: their draws are dropped."""
    judges: JudgePanel | None = None
    skipped: int = 0
    """Bad rows: those, and others that were left out when the datasets were opened."""

    def skip(self, *found: BadRows) -> None:
        for bad in filter(None, found):
            self.note = "; ".join(filter(None, [self.note, f"{self.name}: {bad}"]))
            self.skipped += len(bad)

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def group_size(self) -> int:
        assert self.config.group_size is not None
        return self.config.group_size

    @property
    def exhausted(self) -> bool:
        return self.draws is not None and self.cursor.draws >= self.draws

    @property
    def share(self) -> float:
        """Rollouts drawn so far, divided by `weight`: the environment with the least is next. Groups that came too late
        do not count, so a slow environment draws them again and has its share of what trains. Filtered groups count:
        an environment without a signal must not keep the others waiting."""
        return (self.cursor.draws - self.late_groups) * self.group_size / self.config.weight + self.share_while_paused

    def draw(self, number: int) -> Ticket:
        epoch, draw, row = self.cursor.draw()
        return Ticket(number, self.name, epoch, draw, row)


def build_train_envs(
    config: RunConfig, given: dict[str, Environment] | None = None, vocabulary: int | None = None
) -> dict[str, TrainEnv]:
    """The run's environments by name. `given` ones replace those the run file names. Rows of exact tokens beyond the
    `vocabulary`, or longer than the engine's context, are bad rows."""
    given = given or {}
    if unknown := given.keys() - {env.name for env in config.env}:
        raise EnvError(f"environments {sorted(unknown)} are not in the run file: add an [[env]] of that name")
    service = JudgeService()
    with token_limits(vocabulary, config.engine.max_context):
        return {env.name: _train_env(env, config, given.get(env.name), service) for env in config.env}


@asynccontextmanager
async def open_algorithms(
    envs: Mapping[str, TrainEnv],
    client: SamplingClient,
    find: Callable[[ModelRef], Awaitable[FrozenPool]] | None = None,
    token_penalty: Callable[[Sample], NDArray] | None = None,
) -> AsyncGenerator[Callable[[ModelRef], Awaitable[FrozenPool]]]:
    """Every algorithm ready, with the frozen models it names; the connections end with the run. `find` knows models
    that the placement itself serves; without it all are endpoints. Yields what connects to further ones."""
    pools: dict[str, FrozenPool] = {}

    async def connect(ref: ModelRef) -> FrozenPool:
        key = ref.model_dump_json()
        if key not in pools:
            pools[key] = await (find(ref) if find else attach(ref, client.renderer.tokenizer))
        return pools[key]

    try:
        for service in judge_services(envs):
            await service.check()
        for env in envs.values():
            teacher = env.failures.handling("teacher")
            await env.algorithm.begin(AlgorithmContext(env.name, env.rows, client, connect, teacher, token_penalty))
            env.skip(env.algorithm.bad_rows)
            env.bad_rows = frozenset(env.algorithm.bad_rows.indices)
        yield connect
    finally:
        for open_part in (*pools.values(), *judge_services(envs)):
            await open_part.aclose()


def judge_services(envs: Mapping[str, TrainEnv]) -> set[JudgeService]:
    """What the judges of these environments are asked through: one, unless they were built apart."""
    return {env.judges.service for env in envs.values() if env.judges is not None}


def _train_env(env: EnvConfig, config: RunConfig, given: Environment | None, service: JudgeService) -> TrainEnv:
    environment, note = given or build_environment(env), ""
    judges = service.panel(env, environment)
    algorithm = credit_for(env, environment.actors)
    environment = algorithm.stage(environment)
    with user_code(f"`examples` of environment `{env.name}`"):
        rows, eval_rows = environment.examples("train"), environment.examples("eval")
    if not rows:
        raise EnvError(f"environment `{env.name}` has no training rows")
    with user_code(f"the rows of environment `{env.name}`"):
        try:
            rows, report = clean_rows(rows, eval_rows, env.contamination)
        except DataError as error:
            raise EnvError(f"environment `{env.name}`: {error}") from error
    contamination = report.table() if report else {}
    if report:
        note = f"{env.name}: {report}"
    with user_code(f"the rows of environment `{env.name}`"):
        digest = row_digest(rows)
    cursor = make_cursor(rows, config.seed, env.name, env.curriculum)
    draws, failures = None if config.epochs is None else config.epochs * len(rows), config.failures
    parts = (env, environment, algorithm, rows, eval_rows, cursor)
    train_env = TrainEnv(
        *parts,
        draws=draws,
        note=note,
        failures=failures,
        row_digest=digest,
        contamination=contamination,
        judges=judges,
    )
    train_env.skip(*skipped_rows(rows), *skipped_rows(eval_rows))
    return train_env


class RolloutRunner:
    """Plays an environment's episodes with the policy. A failing episode is an outcome with its error, never a crash.

    A failure is retried, given up or ends the run, as the environment's policy for its kind says. Each try is a whole
    run_episode: with fresh seats, with the same sampling noise, and with all of the
    environment's `timeout` before it. An episode that fails in the end reports its first failure.
    """

    def __init__(
        self,
        client: SamplingClient,
        clock: Clock,
        seed: int,
        domain: int = TRAIN,
        running_calls: Counter[str] | None = None,
    ) -> None:
        self._client, self._clock = client, clock
        self._seed, self._domain = seed, domain
        self.running_calls: Counter[str] = Counter() if running_calls is None else running_calls
        """What episodes wait for now besides the engine, by kind."""
        self.retry_counts: Counter[str] = Counter()
        """Tries that were repeated, by kind of failure, since the last call of `metrics`."""
        self.failure_counts: Counter[str] = Counter()
        """Likewise, episodes and preparations that were given up, by the kind of what went wrong first."""

    def metrics(self) -> dict[str, float]:
        """Counts of failures since the last call, by kind; and of the template's markers that are no tokens."""
        kinds = {f"retried/{kind}": float(count) for kind, count in self.retry_counts.items()}
        kinds |= {f"failed/{kind}": float(count) for kind, count in self.failure_counts.items()}
        self.retry_counts.clear()
        self.failure_counts.clear()
        split = getattr(self._client.renderer, "split_markers", ())
        return kinds | ({"mismatch/markers": float(len(split))} if split else {})

    async def run_group(self, env: TrainEnv, ticket: Ticket) -> Group:
        """All rollouts of one ticket, the failed ones apart."""
        try:
            row = await self.prepare(
                env, lambda: row_for_ticket(env.environment, env.rows[ticket.row], ticket, self._seed)
            )
        except EpisodeLost as lost:
            failed = [failed_rollout(ticket, 0, {}, str(lost), cause=lost.__cause__)]
            return Group(ticket=ticket, rollouts=[], size=env.group_size, failed=failed)
        members = range(env.group_size)
        episodes = await gather_or_cancel([self.run_episode(env, row, ticket, m, ticket.number) for m in members])
        return self.collect(env, ticket, episodes, env.group_size)

    @staticmethod
    def collect(env: TrainEnv, ticket: Ticket, episodes: Sequence[Sequence[Rollout]], size: int) -> Group:
        """The group of these episodes, with the samples of all rollouts that did not fail."""
        rollouts = [rollout for episode in episodes for rollout in episode]
        finished = [rollout for rollout in rollouts if rollout.error is None]
        failed = [rollout for rollout in rollouts if rollout.error is not None]
        for rollout in finished:
            rollout.samples = assemble(rollout)
            env.algorithm.observe(rollout)
        return Group(ticket=ticket, rollouts=finished, size=size, failed=failed)

    async def run_episode(self, env: TrainEnv, row: Row, ticket: Ticket, member: int, order: int) -> list[Rollout]:
        """One episode on a copy of the row: a rollout for each actor who spoke, or why there is none."""
        seed_parts = (self._seed, self._domain, ticket.number, member)
        # In training a frozen model may speak in the policy's place, for it to learn from.
        client = (env.algorithm.frozen_sampler if self._domain == TRAIN else None) or self._client
        began = self._clock.now()
        losses: list[EpisodeLost] = []
        # No closure and no further coroutine: for each of 20,000 episodes that is work for the garbage collector.
        while True:
            seats = SessionMap(client, seed_parts, order, env.environment.actors)
            spans = open_spans(self.running_calls, seats.opened)  # so that turns and spans count from one moment
            try:
                outcome = await self._call_user_code(
                    env, client, "an episode", lambda at=seats: env.environment.play(copy_value(row), at)
                )
                if outcome is None:
                    error = f"{env.name}: dropped by the environment"
                    facts = self._facts(row, began, spans)
                    return [failed_rollout(ticket, member, seats, error, dropped=True, **facts)]
                rollouts = build_rollouts(env.name, ticket, member, seats, outcome, **self._facts(row, began, spans))
                if env.judges is None:
                    return rollouts
            except EpisodeLost as lost:
                losses.append(lost)
                outcome = None
            finally:
                seats.leave()
            try:
                if outcome is not None and env.judges is not None:
                    graded = await self._grade(env, env.judges, row, seats, outcome)
                    return build_rollouts(env.name, ticket, member, seats, graded, **self._facts(row, began, spans))
                await self._wait_for_retry(env, losses)
            except EpisodeLost as lost:
                facts = self._facts(row, began, spans)
                return [failed_rollout(ticket, member, seats, str(lost), cause=lost.__cause__, **facts)]

    def _facts(self, row: Row, began: float, spans: list[Span]) -> dict[str, Any]:
        """What every rollout of an episode tells besides, failed or not."""
        return {"target": target_text(row), "seconds": self._clock.now() - began, "spans": spans}

    async def _grade(
        self, env: TrainEnv, judges: JudgePanel, row: Row, seats: Mapping[str, Seat], outcome: Outcome
    ) -> Outcome:
        """The outcome with the judges' grades. Where one fails it is asked again; the episode is not played again."""
        losses: list[EpisodeLost] = []
        while True:
            try:
                return await judges.grade_episode(row, seats, outcome)
            except (JudgeFailed, EnvError) as error:
                losses.append(EpisodeLost(f"{env.name}: {error}", failure_kind(error)))
                losses[-1].__cause__ = error
            await self._wait_for_retry(env, losses, "asked again")

    async def prepare(self, env: TrainEnv, work: Callable[[], Awaitable[Row]]) -> Row:
        """The prepared row that all episodes on it share; raises `EpisodeLost`."""
        losses: list[EpisodeLost] = []
        while True:
            try:
                return await self._call_user_code(env, self._client, "the preparation", work)
            except EpisodeLost as lost:
                losses.append(lost)
            await self._wait_for_retry(env, losses)

    async def _wait_for_retry(self, env: TrainEnv, losses: Sequence[EpisodeLost], what: str = "played again") -> None:
        """Wait before the next try; or raise the first cause, as the loss of the episode or as the end of the run."""
        if is_cancelled():
            raise asyncio.CancelledError  # the environment made a failure of it, and the caller waits for no other try
        first, last, failed = losses[0], losses[-1], len(losses)
        policy = env.failures.handling(last.kind)
        if policy.choice == "fail":
            text = f"{first} (failures.{last.kind} = {policy}): mend that, or let the run drop or retry"
            raise stop_error(text, first.__cause__)
        if not policy.retries(failed) or isinstance(last.__cause__, AbandonedError):
            self.failure_counts[first.kind] += 1
            if isinstance(first.__cause__, RefusedRollout):
                self.failure_counts[f"{first.kind}/{first.__cause__.reason}"] += 1
            more = f"; at last: {last}" if str(last) != str(first) else ""
            text = f"{first} (failures.{first.kind} = {env.failures.handling(first.kind)}){more}"
            raise EpisodeLost(text, first.kind) from first.__cause__
        pause = policy.pause(failed)
        self.retry_counts[last.kind] += 1
        text = "%s: %s in %g s, try %d of %d (failures.%s)"
        limited_log.warn((env.name, last.kind), text, last, what, pause, failed + 1, policy.tries, last.kind)
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
            if (trouble := client.pool.trouble) is not None:
                raise EpisodeLost(f"{env.name}: {error}, and {trouble}", "engine") from error
            raise EpisodeLost(f"{env.name}: {error}: {env.config.raise_hint('timeout')}", "timeout") from error
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
            kind, trouble, text = failure_kind(error), client.pool.trouble, f"{env.name}: {error_text(error)}"
            if kind == "episode" and trouble is not None:  # behind a URL a lost engine is an HTTP error like any other
                kind, text = "engine", f"{text}, and {trouble}"
            raise EpisodeLost(text, kind) from error


def target_text(row: Row) -> str:
    """The answer that a row expects, as the record keeps it; empty where it has none."""
    answer = row.get(ANSWER) if isinstance(row, Mapping) else None  # a user's `prepare` may return anything
    if isinstance(answer, str) and len(answer) <= MOST_TARGET and answer.isascii():
        return answer  # nearly always, and asked for each of thousands of episodes in flight
    answers = answer if isinstance(answer, list) else [] if answer is None else [answer]
    texts = (one if isinstance(one, str) else short_repr(one) for one in answers[:MOST_ANSWERS])
    return " | ".join(texts)[:MOST_TARGET].encode(errors="replace").decode()


async def row_for_ticket(environment: Environment, row: Row, ticket: Ticket, seed: int) -> Row:
    """The prepared row that all episodes of a training ticket share."""
    dice = random.Random(f"{seed} {ticket.env} {ticket.draw}")
    return await environment.prepare(await environment.assign(copy_value(row), ticket.draw, dice))


def build_rollouts(
    name: str, ticket: Ticket, member: int, seats: Mapping[str, Seat], outcome: Outcome, **more: Any
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
            metrics=metrics
            | {f"overridden/{key}": float(count) for key, count in seat.overrides.items()}
            | (verdict_metrics(seat.verdicts) if seat.verdicts else {}),
            verdicts=[asdict(verdict) for verdict in seat.verdicts],
            **more,
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


def failed_rollout(ticket: Ticket, member: int, seats: Mapping[str, Seat], error: str, **more: Any) -> Rollout:
    rollout = Rollout(ticket=ticket, member=member, error=error, **more)
    for seat in sorted(seats.values(), key=lambda seat: not seat.turns)[:1]:
        rollout.actor, rollout.turns = seat.actor, seat.turns
    return rollout
