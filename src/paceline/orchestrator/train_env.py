"""Sets up the environments of a run: their rows, cursors and algorithms.

Applies the user's filters to finished groups, before and after credit is assigned.

length penalty -> credit -> truncated rollouts masked -> (no signal: dropped) -> the user's own filter

Remembers recent groups, so that they can train once more.

    trained -> remembered -> chosen for the batch of a version -> a ticket of its own -> trained again

Waiting to train and waiting to train again draw on one allowance of staleness: what trained at the limit is too old at
the next version. So the groups replayed are those that came quickly, on average the shorter ones. A replay keeps the
credit of its first training; algorithm, curriculum and sampling metrics have seen it and do not see it again.

A checkpoint keeps the memory, so a resumed run replays what an unbroken one would.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from paceline.algorithms import Algorithm, AlgorithmContext, credit_for
from paceline.clients.frozen import FrozenPool, attach
from paceline.config import ReplayConfig as Config
from paceline.config import RunConfig
from paceline.config.env import EnvConfig
from paceline.config.failures import DEFAULT_POLICY, FailurePolicy, FailuresConfig
from paceline.config.filters import LengthConfig
from paceline.config.model import ModelRef
from paceline.data import BadRows, Cursor, Row, Sample, Ticket, decontaminate, make_cursor, row_digest, skipped_rows
from paceline.envs import EnvError, Environment, build_environment
from paceline.errors import PacelineError
from paceline.orchestrator.buffered import groups_that_fit
from paceline.orchestrator.failures import Policies, policies
from paceline.orchestrator.gate import mask_stale_tokens
from paceline.rollout import Group, Rollout, SamplingClient
from paceline.util.importing import import_object
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
    policies: Policies = field(default_factory=lambda: policies(FailuresConfig()))
    """Policy for a failed episode, by kind of failure."""
    teacher: FailurePolicy = DEFAULT_POLICY
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
            await env.algorithm.begin(AlgorithmContext(env.name, env.rows, client, connect, env.teacher))
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
        policies=policies(config.failures),
        teacher=FailurePolicy(config.failures.teacher, config.failures.tries),
        row_digest=digest,
    )
    train_env.skip(*skipped_rows(rows), *skipped_rows(eval_rows))
    return train_env


LENGTH_PENALTY = "length/penalty"
"""The metric of a rollout that says what its length cost it: `reward` is what is left."""
GROUP_FILTER = "group_filter"
"""Why a group was dropped that the user's filter does not keep."""


class FilterError(PacelineError):
    """A user's filter that cannot be used, as a sentence for the user."""


class Filters:
    """The length rules and the user's own filter. They do not depend on the algorithm."""

    def __init__(self, config: RunConfig) -> None:
        self._hook = config.filters.group
        self._length, self._max_tokens = config.length, config.sampling.max_tokens
        self._user_filter: Callable[..., Any] | None = import_object(self._hook.import_path) if self._hook else None
        if self._hook and not callable(self._user_filter):
            raise FilterError(f"filters.group: {self._hook.import_path} is no function: name one `fn(group, **kwargs)`")

    def before_credit(self, group: Group) -> None:
        """Take what length costs off the rewards."""
        if self._length.buffer:
            for rollout in group.rollouts:
                apply_length_penalty(rollout, self._length, self._max_tokens)

    def after_credit(self, group: Group) -> None:
        """Silence what must not train."""
        for rollout in group.rollouts if self._length.mask_truncated else ():
            # A reply that was cut off may have been right so far: its reward blames tokens that did nothing wrong. So
            # nothing it said trains; its context may.
            if any(sample.ended == "truncated" for sample in rollout.samples):
                rollout.samples = [_mask_sample(sample) for sample in rollout.samples]

    def keeps(self, group: Group) -> bool:
        """The user's own judgement."""
        if self._user_filter is None or self._hook is None:
            return True
        where = f"filters.group: {self._hook.import_path}, env `{group.ticket.env}`, ticket {group.ticket.number}"
        with user_code(where):
            kept = self._user_filter(group, **self._hook.kwargs)
        if not isinstance(kept, bool | np.bool_):
            raise FilterError(f"{where}: gave {kept!r}: answer True to keep the group, False to drop it")
        return bool(kept)


def apply_length_penalty(rollout: Rollout, rule: LengthConfig, max_tokens: int) -> None:
    """The soft over-long penalty of DAPO (arXiv 2503.14476): with n the rollout's longest reply,

        0 for n <= max_tokens - buffer, then penalty * (n - (max_tokens - buffer)) / buffer, up to the whole penalty.

    A limit alone fines the token that crosses it and says nothing of those before; the slope says it early.
    """
    longest = max((len(turn.completion_ids) for turn in rollout.turns), default=0)
    share = min(1.0, max(0.0, (longest - (max_tokens - rule.buffer)) / rule.buffer))
    rollout.metrics = rollout.metrics | {LENGTH_PENALTY: rule.penalty * share}
    rollout.reward = (rollout.reward or 0.0) - rule.penalty * share


def reward_before_penalty(rollout: Rollout) -> float:
    """The environment's reward, before the length penalty."""
    return (rollout.reward or 0.0) + rollout.metrics.get(LENGTH_PENALTY, 0.0)


def _mask_sample(sample: Sample) -> Sample:
    context = None if sample.ce_weights is None else np.where(sample.loss_mask, np.float32(0), sample.ce_weights)
    nothing = np.zeros(len(sample), np.float32)
    return sample.with_streams(
        rl_weights=nothing, ref_kl_weights=None, ce_weights=context if context is not None and context.any() else None
    )


@dataclass(slots=True, kw_only=True)
class ReplayedGroup(Group):
    """A group that has trained before."""

    first: Ticket
    """The ticket of its first training."""


class Replay:
    """The memory. Which groups it offers is a function of what it was given and of the version, nothing else."""

    def __init__(self, config: Config, staleness: int) -> None:
        self._size = config.groups if config.share else 0
        self._times = config.times
        self._staleness = staleness
        self._memory: dict[Ticket, tuple[Group, int]] = {}
        """Groups, newest first, with how often each may still be replayed."""

    def remember(self, batch: Sequence[Group]) -> None:
        """A batch was trained. What it replayed is remembered by its first ticket, if at all."""
        new = {group.ticket: (group, self._times) for group in batch if not isinstance(group, ReplayedGroup)}
        kept = self._memory | new
        self._memory = {ticket: kept[ticket] for ticket in sorted(kept, reverse=True)[: self._size]}

    def choose(self, version: int, room: int) -> list[Group]:
        """The newest groups that may train at this version, as many as fit."""
        self._memory = {g.ticket: (g, left) for g, left in self._memory.values() if left and self._is_fresh(g, version)}
        return groups_that_fit((group for group, _ in self._memory.values()), room)

    def reissue(self, group: Group, number: int) -> ReplayedGroup:
        """The group under a new ticket: a copy, so that whatever becomes of one leaves the other alone."""
        self._memory[group.ticket] = group, self._memory[group.ticket][1] - 1
        ticket = group.ticket._replace(number=number)
        rollouts = [
            replace(r, ticket=ticket, samples=[replace(s, ticket=ticket) for s in r.samples]) for r in group.rollouts
        ]
        return ReplayedGroup(ticket=ticket, rollouts=rollouts, places=group.places, first=group.ticket)

    def state(self) -> list[tuple[Group, int]]:
        """The memory, newest first, with how often each group may still be replayed."""
        return list(self._memory.values())

    def load(self, state: Sequence[tuple[Group, int]]) -> None:
        """Back to a checkpoint's memory, as far as the run file leaves room for it."""
        self._memory = {group.ticket: (group, left) for group, left in state[: self._size]}

    def still_fresh(self, groups: Sequence[Group], version: int, room: int) -> list[Group]:
        """Of groups chosen before a restart, those that may train now."""
        return groups_that_fit(
            (group for group in groups if group.ticket in self._memory and self._is_fresh(group, version)), room
        )

    def _is_fresh(self, group: Group, version: int) -> bool:
        """Whole or not at all: `on_stale` is for what came late, not a licence to choose what is too old."""
        return all(mask_stale_tokens(s, version, self._staleness, "drop") is not None for s in group.samples())
