"""Plays an arena's batches on a served policy, and tags every sample with the policy version that sampled it."""

import asyncio
import copy
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from paceline.algorithms import Algorithm
from paceline.clients import HttpEngine, Pool
from paceline.config import BreakerConfig, EvalConfig
from paceline.config.env.base import ArenaEnvConfig
from paceline.config.inference import SamplingConfig
from paceline.data import Cursor, Sample, Ticket
from paceline.errors import EngineError, PacelineError
from paceline.model import end_tokens
from paceline.orchestrator import Breaker, Clock, TrainEnv
from paceline.orchestrator.admission import has_no_signal
from paceline.orchestrator.episodes import EVAL, RolloutRunner
from paceline.orchestrator.evaluation import evaluate
from paceline.rollout import Group, Renderer, Rollout, SamplingClient
from paceline.selfplay import Arena, ArenaEnvironment, ArenaError, Artifact, EpisodeRequest
from paceline.util.deadlines import gather_or_cancel, wait_within

EPISODE_SECONDS = 600.0
VERSION_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRecord(Sample):
    """A sample of an arena, with what is known of the episode it is from."""

    meta: dict[str, Any] = field(default_factory=dict)
    """The request's own, with `policy_version` (of its oldest token that trains), `episode_type`, `actor`, `reward`."""

    @property
    def input_ids(self) -> NDArray:
        """Prompt and completion."""
        return self.token_ids

    def with_streams(self, **streams: NDArray | None) -> Self:
        clone = Sample.with_streams(self, **streams)
        object.__setattr__(clone, "meta", self.meta)
        return clone


@dataclass(frozen=True, slots=True)
class ArenaSnapshot:
    """An arena and its credit as they were after a batch: from here the next batch is drawn."""

    arena: Arena
    credit: dict[str, Any]
    draws: int

    def state(self) -> dict[str, Any]:
        """State for the checkpoint, as JSON."""
        return {"arena": self.arena.state(), "credit": self.credit, "draws": self.draws}


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """One draw of the arena, played and credited."""

    records: Sequence[Sample]
    """Samples to train on. Groups in which all did equally well carry no signal and are left out."""
    groups: list[Group] = field(default_factory=list)
    snapshot: ArenaSnapshot | None = None

    def rewards(self) -> dict[str, float]:
        """Mean reward of each actor."""
        played: dict[str, list[float]] = {}
        for rollout in (rollout for group in self.groups for rollout in group.rollouts):
            played.setdefault(rollout.actor, []).append(rollout.reward or 0.0)
        return {actor: sum(rewards) / len(rewards) for actor, rewards in played.items()}


class Client:
    """A pool of engines that actors are sampled from."""

    def __init__(self, pool: Pool, sampling: SamplingConfig | None = None) -> None:
        self.pool = pool
        self.draws = 0
        """Groups drawn so far: no two of them share their noise."""
        self._sampling = sampling or SamplingConfig()
        self._sampling_client: SamplingClient | None = None
        self._before_play: Callable[[], Awaitable[None]] | None = None
        self._runners: dict[int, ArenaRunner] = {}

    def connect(
        self, model: Any, tokenizer: PreTrainedTokenizerBase, before_play: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """From now on speak in this model's template, and await `before_play` before each batch. A `SelfPlayTrainer`
        does this for its client."""
        ends = end_tokens(tokenizer, model)
        self._sampling_client = SamplingClient(self.pool, Renderer(tokenizer, ends), self._sampling, frozenset(ends))
        self._before_play = before_play

    @property
    def sampling_client(self) -> SamplingClient:
        if self._sampling_client is None:
            raise PacelineError("this client does not know the model's template yet: make the SelfPlayTrainer first")
        return self._sampling_client

    async def check(self) -> None:
        """Raise where no engine answers."""

    async def get_policy_version(self) -> int:
        """The version that is served now; the oldest, where several engines serve."""
        policies = await wait_within(VERSION_SECONDS, "the served policy's version", self.pool.policies())
        if not policies:
            raise self.pool.trouble or PacelineError("no engine serves a policy")
        return min(policy.version for policy in policies)

    def runner(self, arena: Arena) -> "ArenaRunner":
        """Plays this arena on this client, always the same."""
        if id(arena) not in self._runners:
            self._runners[id(arena)] = ArenaRunner(arena, self)  # which holds the arena, so that its id stays its own
        return self._runners[id(arena)]

    async def play(self, arena: Arena, concurrency: int = 8) -> TrainingBatch:
        """One batch of an arena; `Arena.step` calls this."""
        runner = self.runner(arena)
        if self._before_play is not None:
            await self._before_play()
        return await runner.step(concurrency)


class OpenAIClient(Client):
    """A running `paceline serve`. Adapters are sent to it over HTTP; full weights as a file in `folder`, which it must
    `--allow`. It takes weights from the holder of its key: `PACELINE_API_KEY` when left out, as the server's own."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        folder: Path | None = None,
        sampling: SamplingConfig | None = None,
    ) -> None:
        if not isinstance(base_url, str) or not base_url.startswith(("http://", "https://")):
            raise PacelineError(f"`{base_url}` is no address of a server: write one as http://HOST:PORT/v1")
        self._engine = HttpEngine(base_url, api_key=api_key or os.environ.get("PACELINE_API_KEY"), folder=folder)
        super().__init__(Pool([self._engine]), sampling)

    @property
    def url(self) -> str:
        """The server's address, without `/v1`."""
        return self._engine.name

    async def check(self) -> None:
        try:
            await asyncio.to_thread(self._engine.start)  # bounded: by the engine's own seconds to connect
        except EngineError as error:
            raise EngineError(
                f"the server {self.url} cannot be used: {error}. Start one there with `paceline serve NAME "
                "--engine.adapters 1`, and give it and this script the same key in PACELINE_API_KEY"
            ) from error

    async def aclose(self) -> None:
        """Close the connections."""
        self.pool.close()
        await self._engine.aclose()


class ArenaRunner:
    """Plays what an arena asks for. Requests of one episode type and artifact form a group."""

    def __init__(self, arena: Arena, client: Client, seed: int = 0) -> None:
        if not isinstance(arena.credit_assigner, Algorithm):
            raise ArenaError("the arena has no credit_assigner: give it GRPOCredit(), RAECredit() or ConstantCredit()")
        self._arena, self._client, self._seed = arena, client, seed
        self._runner = RolloutRunner(client.sampling_client, Clock(), seed)
        self._breaker = Breaker(BreakerConfig())
        self._env = TrainEnv(
            config=ArenaEnvConfig(name="arena", import_path="paceline.selfplay:Arena", timeout=EPISODE_SECONDS),
            environment=ArenaEnvironment(arena),
            algorithm=arena.credit_assigner,
            rows=(),
            eval_rows=(),
            cursor=Cursor(1, seed, "arena"),
        )

    async def step(self, concurrency: int = 8) -> TrainingBatch:
        """One batch of the arena, at most `concurrency` root episodes at once."""
        if not isinstance(concurrency, int) or concurrency < 1:
            raise ArenaError(f"concurrency = {concurrency!r} lets no episode begin: give a whole number, at least 1")
        version = self._client.pool.published_version
        tries: dict[tuple[str, str], list[EpisodeRequest]] = {}
        for request in self._checked(self._arena.get_batch(), "get_batch"):
            tagged = replace(request, meta={**request.meta, "policy_version": version})
            tries.setdefault(request.key, []).append(tagged)
        if not tries:
            raise ArenaError(f"{type(self._arena).__name__} has nothing to play: its get_batch() gave no request")
        semaphore = asyncio.Semaphore(concurrency)
        groups = await gather_or_cancel([self._group(requests, semaphore) for requests in tries.values()])
        for group in groups:
            for rollout in (*group.failed, *group.rollouts):
                if rollout.error is None:
                    self._breaker.record_success()
                elif not rollout.dropped:
                    self._breaker.record_failure(rollout.error, raised=rollout.cause)
            self._env.algorithm.assign(group)
        await self._env.algorithm.finish_batch([group for group in groups if not has_no_signal(group)])
        records = [
            _record(sample, rollout, requests[rollout.member])
            for group, requests in zip(groups, tries.values(), strict=True)
            if not has_no_signal(group)
            for rollout in group.rollouts
            for sample in rollout.samples
        ]
        snapshot = ArenaSnapshot(
            self._arena.isolated_copy(), copy.deepcopy(self._env.algorithm.state()), self._client.draws
        )
        return TrainingBatch(records, groups, snapshot)

    async def evaluate(self, concurrency: int) -> dict[str, float]:
        """Metrics `eval/...` of the arena's evaluation batch, each episode played in a copy of the arena."""
        requests = self._checked(self._arena.get_eval_batch(), "get_eval_batch")
        if not requests:
            return {}
        rows = [{"split": "eval", "request": request} for request in requests]
        runner = RolloutRunner(self._client.sampling_client, Clock(), self._seed, EVAL)
        env = replace(self._env, eval_rows=rows)
        return await evaluate({env.name: env}, runner, EvalConfig(concurrency=concurrency), lambda progress: None)

    def _checked(self, requests: object, method: str) -> Sequence[EpisodeRequest]:
        """What a method of the arena asks for; raise where it cannot be played."""
        where = f"{type(self._arena).__name__}.{method}()"
        if not isinstance(requests, Sequence):
            raise ArenaError(f"{where} gave {requests!r}: give a list of EpisodeRequests")
        for request in requests:
            if not isinstance(request, EpisodeRequest):
                raise ArenaError(f"{where} gave {request!r}: give EpisodeRequests")
            if not isinstance(request.artifact, Artifact) or not isinstance(request.meta, Mapping):
                raise ArenaError(f"{where} gave {request!r}: write EpisodeRequest(TYPE, Artifact(DATA), {{...}})")
            self._arena.check(request)
        return requests

    def load(self, state: dict[str, Any]) -> None:
        """Back to a snapshot's state."""
        self._arena.load(state["arena"])
        self._env.algorithm.load(state["credit"])
        self._client.draws = state["draws"]

    async def _group(self, requests: Sequence[EpisodeRequest], semaphore: asyncio.Semaphore) -> Group:
        number = self._client.draws
        self._client.draws += 1
        ticket = Ticket(number, self._env.name, 0, number, 0)

        async def one(member: int, request: EpisodeRequest) -> list[Rollout]:
            async with semaphore:  # bounded: each episode before it has a timeout
                row = {"split": "train", "request": request}
                return await self._runner.run_episode(self._env, row, ticket, member, number)

        episodes = await gather_or_cancel([one(member, request) for member, request in enumerate(requests)])
        return self._runner.collect(self._env, ticket, episodes, len(requests))


def _record(sample: Sample, rollout: Rollout, request: EpisodeRequest) -> TrainingRecord:
    oldest = sample.oldest_version
    known = {"episode_type": rollout.kind, "actor": rollout.actor, "reward": rollout.reward}
    version = {} if oldest is None else {"policy_version": oldest}
    fields = {name: getattr(sample, name) for name in Sample.__dataclass_fields__}
    return TrainingRecord(**fields, meta={**request.meta, **known, **version})
