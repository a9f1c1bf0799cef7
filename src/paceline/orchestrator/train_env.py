"""Sets up the environments of a run: their rows, cursors and algorithms."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from paceline.algorithms import Algorithm, AlgorithmContext, credit_for
from paceline.config import RunConfig
from paceline.config.env import EnvConfig
from paceline.config.failures import USUAL, FailurePolicy, FailuresConfig, failure_policy
from paceline.config.model import ModelRef
from paceline.data import BadRows, Draws, Row, Ticket, decontaminate, order_of, row_digest, skipped
from paceline.envs import EnvError, Environment, build_environment
from paceline.inference.frozen import FrozenPool, attach
from paceline.orchestrator.failures import Policies, policies
from paceline.rollout import SamplingClient
from paceline.util.user_code import user_code


@dataclass(slots=True)
class TrainEnv:
    """An environment on its way through a run."""

    config: EnvConfig
    environment: Environment
    algorithm: Algorithm
    rows: Sequence[Row]
    eval_rows: Sequence[Row]
    cursor: Draws
    draws: int | None = None
    """Tickets to draw in all; None is no end."""
    late: int = 0
    """Groups of it that were dropped because they came too late for any batch."""
    paused: bool = False
    """Nothing is drawn from it for now."""
    forgone: float = 0.0
    """Places over the weight that went to others while it was paused."""
    note: str = ""
    """Something about the rows that the user should hear of."""
    policies: Policies = field(default_factory=lambda: policies(FailuresConfig()))
    """Policy for a failed episode, by kind of failure."""
    teacher: FailurePolicy = USUAL
    """Policy for a sample that a reference could not score."""

    row_digest: dict[str, Any] = field(default_factory=dict)
    """Of the training rows: a checkpoint keeps it, and a resumed run compares."""
    bad_rows: frozenset[int] = frozenset()
    """Rows that cannot train: their draws are dropped."""
    skipped: int = 0
    """Bad rows in all: those, and others that were left out when the datasets were opened."""

    def skip(self, *found: BadRows) -> None:
        """Take note of rows that cannot be used."""
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
        """Places drawn so far over the weight: the environment with the least is next. Groups that came too late do not
        count, so a slow environment draws them again and has its share of what trains. Filtered groups count: an
        environment without a signal must not keep the others waiting."""
        return (self.cursor.draws - self.late) * self.group_size / self.config.weight + self.forgone

    def draw(self, number: int) -> Ticket:
        epoch, draw, row = self.cursor.draw()
        return Ticket(number, self.name, epoch, draw, row)


def lay_out(config: RunConfig, given: dict[str, Environment] | None = None) -> dict[str, TrainEnv]:
    """The run's courses by name. `given` environments replace those the run file names."""
    given = given or {}
    unknown = given.keys() - {env.name for env in config.env}
    if unknown:
        raise EnvError(f"environments {sorted(unknown)} are not in the run file: add an [[env]] of that name")
    return {env.name: _course(env, config, given.get(env.name)) for env in config.env}


@asynccontextmanager
async def opened(
    courses: Mapping[str, TrainEnv],
    voice: SamplingClient,
    find: Callable[[ModelRef], Awaitable[FrozenPool]] | None = None,
) -> AsyncGenerator[None]:
    """Every algorithm ready, with the frozen models it names; the connections end with the run. `find` knows models
    that the placement itself serves; without it all are endpoints."""
    pools: dict[str, FrozenPool] = {}

    async def connect(ref: ModelRef) -> FrozenPool:
        key = ref.model_dump_json()
        if key not in pools:
            pools[key] = await (find(ref) if find else attach(ref, voice.renderer.tokenizer))
        return pools[key]

    try:
        for course in courses.values():
            await course.algorithm.begin(AlgorithmContext(course.name, course.rows, voice, connect, course.teacher))
            course.skip(course.algorithm.bad_rows)
            course.bad_rows = frozenset(course.algorithm.bad_rows.indices)
        yield
    finally:
        for pool in pools.values():
            await pool.aclose()


def _course(env: EnvConfig, config: RunConfig, given: Environment | None) -> TrainEnv:
    environment = given or build_environment(env)
    algorithm = credit_for(env, environment.actors)
    environment = algorithm.stage(environment)
    with user_code(f"`examples` of environment `{env.name}`"):
        rows, eval_rows, note = environment.examples("train"), environment.examples("eval"), ""
    if not rows:
        raise EnvError(f"environment `{env.name}` has no training rows")
    if env.contamination:
        rows, report = decontaminate(rows, eval_rows)
        note = f"{env.name}: {report}"
    with user_code(f"the rows of environment `{env.name}`"):
        digest = row_digest(rows)
    course = TrainEnv(
        config=env,
        environment=environment,
        algorithm=algorithm,
        rows=rows,
        eval_rows=eval_rows,
        cursor=order_of(rows, config.seed, env.name, env.curriculum),
        draws=None if config.epochs is None else config.epochs * len(rows),
        note=note,
        policies=policies(config.failures),
        teacher=failure_policy(config.failures.teacher, config.failures.tries),
        row_digest=digest,
    )
    course.skip(*skipped(rows), *skipped(eval_rows))
    return course
