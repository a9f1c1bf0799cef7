"""Sets up the environments of a run (their rows, cursors and algorithms), and pauses them.

An environment pauses for some steps when an advisory that the run file names fires for it:

    a step ends -> a thread records it and applies the rules -> pauses are known before the next draws

Pauses take effect when the next weights are published: at staleness 0 no episode runs then, so that a deterministic
run pauses at the same draw.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.algorithms import Algorithm, AlgorithmContext, credit_for
from paceline.clients.frozen import FrozenPool, attach
from paceline.config import RunConfig
from paceline.config.env import EnvConfig
from paceline.config.filters import FailuresConfig
from paceline.config.model import ModelRef
from paceline.data import BadRows, Cursor, Row, Ticket, decontaminate, make_cursor, row_digest, skipped_rows
from paceline.envs import EnvError, Environment, build_environment
from paceline.rollout import Rollout, SamplingClient
from paceline.util.user_code import user_code


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
    """Nothing is drawn from it for now."""
    forgone_share: float = 0.0
    """Places over the weight that went to others while it was paused."""
    note: str = ""
    """Something about the rows that the user should hear of."""
    failures: FailuresConfig = field(default_factory=FailuresConfig)
    """Policies for failed episodes, and for samples that a reference could not score."""
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
        return (self.cursor.draws - self.late_groups) * self.group_size / self.config.weight + self.forgone_share

    def draw(self, number: int) -> Ticket:
        epoch, draw, row = self.cursor.draw()
        return Ticket(number, self.name, epoch, draw, row)


def build_train_envs(config: RunConfig, given: dict[str, Environment] | None = None) -> dict[str, TrainEnv]:
    """The run's environments by name. `given` ones replace those the run file names."""
    given = given or {}
    unknown = given.keys() - {env.name for env in config.env}
    if unknown:
        raise EnvError(f"environments {sorted(unknown)} are not in the run file: add an [[env]] of that name")
    return {env.name: _train_env(env, config, given.get(env.name)) for env in config.env}


@asynccontextmanager
async def open_algorithms(
    envs: Mapping[str, TrainEnv],
    client: SamplingClient,
    find: Callable[[ModelRef], Awaitable[FrozenPool]] | None = None,
) -> AsyncGenerator[None]:
    """Every algorithm ready, with the frozen models it names; the connections end with the run. `find` knows models
    that the placement itself serves; without it all are endpoints."""
    pools: dict[str, FrozenPool] = {}

    async def connect(ref: ModelRef) -> FrozenPool:
        key = ref.model_dump_json()
        if key not in pools:
            pools[key] = await (find(ref) if find else attach(ref, client.renderer.tokenizer))
        return pools[key]

    try:
        for env in envs.values():
            teacher = env.failures.policy("teacher")
            await env.algorithm.begin(AlgorithmContext(env.name, env.rows, client, connect, teacher))
            env.skip(env.algorithm.bad_rows)
            env.bad_rows = frozenset(env.algorithm.bad_rows.indices)
        yield
    finally:
        for pool in pools.values():
            await pool.aclose()


def _train_env(env: EnvConfig, config: RunConfig, given: Environment | None) -> TrainEnv:
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
    train_env = TrainEnv(
        config=env,
        environment=environment,
        algorithm=algorithm,
        rows=rows,
        eval_rows=eval_rows,
        cursor=make_cursor(rows, config.seed, env.name, env.curriculum),
        draws=None if config.epochs is None else config.epochs * len(rows),
        note=note,
        failures=config.failures,
        row_digest=digest,
    )
    train_env.skip(*skipped_rows(rows), *skipped_rows(eval_rows))
    return train_env


Played = list[tuple[str, Sequence[Rollout]]]
"""States, and rollouts that came to them."""


class Advisor(Protocol):
    """Remembers the last steps and finds problems in them (`observe.record.advice`)."""

    def take(self, step: int, metrics: Mapping[str, float], played: Played) -> None: ...
    def advise(self, rules: frozenset[str]) -> Sequence[Any]: ...
    def forget(self, env: str) -> None: ...


class Pauses:
    """The paused environments, why, and until when. A run without an advisor, or rules to pause by, pauses none."""

    def __init__(
        self, config: RunConfig, envs: Mapping[str, TrainEnv], advisor: Advisor | None, note: Callable[[str], None]
    ) -> None:
        self._envs, self._note = envs, note
        self._every, self._pause_len = config.advice.interval, config.advice.steps
        usual = config.advice.pause
        self._pause_rules = {
            name: frozenset(usual if env.config.pause is None else env.config.pause) for name, env in envs.items()
        }
        self._rules: frozenset[str] = frozenset().union(*self._pause_rules.values()) if advisor else frozenset()
        self._advisor = advisor
        self._played: Played = []
        self.advice_task: asyncio.Task[Sequence[Any]] | None = None
        """Looks for advisories after the latest step; `apply` takes what it found."""
        self._step = 0
        self._until: dict[str, int] = {}
        """The step after which a resting environment is drawn from again."""
        self._reasons: dict[str, str] = {}
        for env in envs.values():
            env.paused = False

    def played(self, state: str, rollouts: Sequence[Rollout]) -> None:
        """Take finished rollouts, which do not change any more."""
        if self._rules and rollouts:
            self._played.append((state, rollouts))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take a finished step; every `advice.interval` steps the rules are applied."""
        self._step = step
        if self._rules:
            played, self._played = self._played, []
            self.advice_task = asyncio.create_task(asyncio.to_thread(self._advise, step, dict(metrics), played))

    async def apply(self) -> None:
        """Let what was seen take effect, before anything is drawn."""
        assert self.advice_task is not None
        look, self.advice_task = self.advice_task, None
        try:
            found = await look  # bounded: some thousand rows in memory, asked for a step ago
        except Exception as error:  # a run is worth more than advice
            self._rules, found = frozenset(), []
            self._note(f"advice failed and pauses no environment from now on: {type(error).__name__}: {error}")
        self._limit_catch_up()
        for name, until in list(self._until.items()):
            if self._step >= until or not self._rules:
                self._resume(name)
        for advisory in found:
            for name in [advisory.env] if advisory.env else list(self._envs):
                if advisory.rule in self._pause_rules[name] and name not in self._until:
                    self._pause(name, advisory)

    def close(self) -> None:
        if self.advice_task is not None:
            self.advice_task.cancel()

    def halt_reason(self) -> str:
        """Why a run that has drawn all it may ends, if that is because environments are paused; else empty."""
        left = [name for name, env in self._envs.items() if env.paused and not env.exhausted]
        if not left:
            return ""
        why = "; ".join(dict.fromkeys(self._reasons[name] for name in left))
        return (
            f"only environments that rest are left to draw from. {why}. Mend that, or take it out of `advice.pause`, "
            "and go on with --resume latest"
        )

    def _advise(self, step: int, metrics: dict[str, float], played: Played) -> Sequence[Any]:
        assert self._advisor is not None
        self._advisor.take(step, metrics, played)
        return self._advisor.advise(self._rules) if step % self._every == 0 else []

    def _pause(self, name: str, advisory: Any) -> None:
        self._envs[name].paused = True
        self._until[name] = self._step + self._pause_len
        self._reasons[name] = f"`{advisory.rule}` of `{name}`: {advisory.title}. {advisory.seen}".rstrip(".")
        self._note(
            f"step {self._step}: nothing more is drawn from `{name}` for {self._pause_len} steps, since `advice.pause` "
            f"names `{advisory.rule}`: {advisory.title}. {advisory.seen}"
        )

    def _resume(self, name: str) -> None:
        """Drawn from again, and judged by what comes from now on."""
        self._envs[name].paused = False
        del self._until[name]
        if self._advisor is not None:
            self._advisor.forget(name)
        self._note(f"step {self._step}: `{name}` has rested and is drawn from again")

    def _limit_catch_up(self) -> None:
        """A paused environment must not have all draws to itself afterwards."""
        awake = [env.share for env in self._envs.values() if not (env.paused or env.exhausted)]
        for env in self._envs.values():
            if env.paused and awake:
                env.forgone_share += max(0.0, min(awake) - env.share)
