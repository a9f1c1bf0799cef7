"""The run file: one document that says everything a run needs."""

import re
import warnings
from collections import Counter
from collections.abc import Iterator
from math import floor, gcd
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from paceline.config import cluster, hardware
from paceline.config.algorithm import AlgorithmConfig, EchoConfig, GAEConfig, GroupCreditConfig, GRPOConfig, SFTConfig
from paceline.config.base import PathKey, Section
from paceline.config.cluster import ClusterConfig
from paceline.config.env import EnvConfig, ReverseTextConfig
from paceline.config.filters import AdviceConfig, FailuresConfig, FiltersConfig, LengthConfig, ReplayConfig
from paceline.config.inference import EngineConfig, SamplingConfig, engine_problems
from paceline.config.model import ModelConfig
from paceline.config.secret import secrets_in
from paceline.config.trainer import TrainerConfig, kl_problems


class WeightsConfig(Section):
    """How an update travels. In one process (`placement = "local"` and `"colocated"`) it is copied and nothing here
    matters; a LoRA adapter always travels in a request."""

    path: Literal["auto", "disk", "http", "delta", "broadcast"] = "auto"
    """`disk`: as a file in the run directory, which both sides see. `http`: as the body of a request, nothing shared.
    `delta`: only the elements that changed since the version the engine holds, and all of them to one that holds
    another. `broadcast`: by a collective; with `placement = "ray"` from the trainer's first rank to all engines at
    once. `auto`: files where both see the folder, bodies elsewhere, and deltas in front of either where the published
    weights are bfloat16 or float16. With `placement = "ray"` there are two ways, and `auto` is `broadcast` where rank
    and engines have GPUs of their own and there are several engines, else Ray's object store."""


DEFAULT_STEPS = 100
FOLDER_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"


class ConfigWarning(UserWarning):
    """Legal, but probably not what was meant."""


class EvalConfig(Section):
    """Evaluation on the held-out split. It never touches training state."""

    every: int = Field(default=10, ge=0)
    """Batches between evaluations; 0 turns it off."""
    concurrency: int = Field(default=8, ge=1)
    """Episodes played at once."""
    samples: int = Field(default=1, ge=1)
    """Episodes per example; above 1, pass@k is reported too."""
    examples: int | None = Field(default=None, ge=1)
    """Use only the first n held-out examples."""
    sampling: SamplingConfig | None = None
    """Sampling for evaluation; the run's `sampling` when left out."""


class CheckpointConfig(Section):
    """Resumable state. A run always leaves one at its end."""

    every: int = Field(default=100, ge=0)
    """Batches between checkpoints; 0 keeps only the last one."""
    keep: int = Field(default=2, ge=1)
    """Older checkpoints are deleted."""
    allow_changed_rows: bool = False
    """Resume although the rows of an environment are not those the checkpoint was trained on. It holds for the command
    that says so and is not kept in the run directory."""


class PromotionConfig(Section):
    """Gates before a version is promoted: it is played on the held-out rows and compared with the last promoted one.
    The run's first weights are promoted as they are; `checkpoints/promoted` and the export are the last that passed."""

    every: int = Field(default=10, ge=1)
    """Batches between two gates; the last batch of a run has one too."""
    max_kl: float | None = Field(default=None, gt=0)
    """Bound on the KL divergence of the version from the reference, in nats a token; unbounded when left out. It is the
    mean of r - log r - 1 over the tokens of the reference's held-out replies, r being the ratio of both probabilities
    at temperature 1: an estimate of KL(reference || version) where evaluation samples at temperature 1 without
    truncation."""
    max_drop: float = Field(default=0.05, ge=0)
    """How far the held-out reward of any environment may be below the last promoted version's."""
    reference: Literal["promoted", "start"] = "promoted"
    """What the KL divergence is measured from: the last promoted version, or the run's first weights."""
    on_fail: Literal["keep", "stop", "roll_back"] = "keep"
    """What follows a version that fails: training goes on, the run stops with a checkpoint, or it goes back to the
    promoted checkpoint and never trains the draws since then."""


class RecordConfig(Section):
    """What a run shows and keeps."""

    rollouts: int = Field(default=4, ge=0)
    """Rollouts per batch written to `rollouts.jsonl`."""
    all: bool = True
    """Keep every finished rollout in `record/`: conversation, tokens, samples with all their streams, and what became
    of it. The pages read it from there."""
    top_logprobs: int = Field(default=0, ge=0, le=20)
    """Most likely tokens that `record/` keeps beside each sampled one, for the token page. Some nine bytes each; on a
    GPU sampling takes a slower path."""
    batches: int = Field(default=0, ge=0)
    """Keep the last n shipped batches with all their streams."""
    exporters: list[Literal["wandb", "tensorboard", "trackio"]] = Field(default_factory=list)
    """Also send metrics there; each needs its extra installed."""
    project: str = "paceline"
    """Project name for the exporters."""
    watchdog_seconds: float = Field(default=60.0, ge=0)
    """A run that has not moved or shown anything for so long says who waits for whom; 0 leaves it silent."""


class RecordingConfig(Section):
    """The server through which agents that know only a base URL reach their seat. Each episode has an unguessable
    address of its own."""

    host: str = "127.0.0.1"
    """Address to listen on; another than loopback for agents in a sandbox of their own."""
    port: int = Field(default=0, ge=0, le=65535)
    """0 picks a free one."""
    advertise: str | None = None
    """Host that agents are told, by which they reach this machine (`host.docker.internal`). When left out it is `host`,
    or this machine's own address where `host` stands for all of them."""

    @field_validator("advertise")
    @classmethod
    def _check_host(cls, host: str | None) -> str | None:
        if host is not None and (not host or host.count(":") == 1 or any(mark in host for mark in "/[] ")):
            raise ValueError(f"`{host}` is more than a host: leave out `http://`, the port and the path")
        return host


class BreakerConfig(Section):
    """When failing rollouts, groups without a signal, or user code that hangs stop the run."""

    consecutive: int = Field(default=5, ge=1)
    """Failures in a row."""
    window: int = Field(default=20, ge=1)
    """Or half of this many latest rollouts."""
    no_signal: int = Field(default=20, ge=0)
    """Batches' worth of groups in a row, at least 100 groups, in which no group's rewards differ, so that nothing
    trains. The run then fails with what it saw, or ends as finished where the task is solved; 0 draws on for ever."""
    blocked_seconds: float = Field(default=300.0, ge=0)
    """User code that blocks the event loop for so long (`time.sleep` in an async function) ends the run, with its file
    and line: nothing else can stop it. 0 lets it."""


class RunConfig(Section):
    """A Paceline run. Every key has a default; a run file holds only what differs."""

    schema_version: Literal[1] = 1
    """Version of this file's layout."""
    name: str = Field(default="run", json_schema_extra={"pattern": f"^{FOLDER_NAME}$"})
    """The run directory is `<runs>/<name>`."""
    runs: str = "runs"
    """Folder that holds run directories."""
    seed: int = Field(default=0, ge=0)
    """Fixes row order and sampling noise."""
    steps: int | None = Field(default=None, ge=1)
    """Batches to train in all, from the run's beginning; 100 when neither this nor `epochs` is given."""
    epochs: int | None = Field(default=None, ge=1)
    """Passes over the rows, instead of `steps`."""
    batch_size: int = Field(default=128, ge=1)
    """Rollouts (with several actors: episodes) trained in one step, between two updates of the engine's weights."""
    group_size: int = Field(default=8, ge=1)
    """Rollouts of one example that are compared with one another."""
    staleness: int = Field(default=1, ge=0)
    """How many versions the sampler may ride ahead of the trainer; 0 is synchronous."""
    on_stale: Literal["drop", "mask", "keep"] = "drop"
    """A sample over the limit is dropped, trains only its fresh tokens, or trains all the same."""
    cancel_stale: bool = False
    """Cancel a group that was started more than `staleness` versions ago, instead of playing its episodes to their end
    and dropping it there. Its slots are free at once, so that no row of slow episodes fills the gate. Groups with long
    episodes are hit, and now and then one that waited so long for its first token that it would have been young
    enough."""
    oversample: float = Field(default=0.0, ge=0, le=10)
    """Share of a batch that is sampled beyond what the batch needs, so that it fills from the groups that finish first
    and does not wait for one long episode. What is left over trains later, as far as `staleness` allows; at staleness
    0 it is cancelled and dropped when the batch ships, unless `on_stale` lets it train. Groups that finish first are
    on average shorter, so the batch is too."""
    max_inflight: int | None = Field(default=None, ge=1)
    """Most rollouts played at once; (staleness + 1) batches and what is sampled beyond them when left out."""
    deterministic: bool = False
    """Fixed shapes and ticket order in the engine; at staleness 0 a run repeats bit for bit, at some cost."""
    allow_truncated_sampling: bool = False
    """Train although top-p or top-k bends the sampled distribution."""
    backend: Literal["auto", "torch", "mlx"] = "auto"
    """The library that engine and trainer compute with. `auto`: mlx on a Mac with Apple silicon where it is installed,
    torch elsewhere; PACELINE_BACKEND in the environment says otherwise."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where torch computes; mlx takes the GPU of its machine."""
    placement: Literal["local", "processes", "colocated", "ray"] = "local"
    """Where engine and trainer run: `local`, `processes`, `colocated` or `ray`. `local`: in this process. `processes`:
    server, trainer and orchestrator as three processes of this machine, each started again when it dies. `colocated`:
    `trainer.parallel.ranks` processes, of this machine or of a torchrun, each with a trainer rank and an engine that
    sleeps while it trains. Above staleness 0 requests that run when a step begins are held, go on after it under the
    new weights, and their deadlines go on too. `ray`: engines and trainer ranks on a cluster, see [cluster]."""
    resume: Annotated[str, PathKey("checkpoint")] | None = None
    """`latest`, or the path of a checkpoint to go on from."""

    model: ModelConfig = ModelConfig()
    sampling: SamplingConfig = SamplingConfig()
    engine: EngineConfig = EngineConfig()
    trainer: TrainerConfig = TrainerConfig()
    cluster: ClusterConfig = ClusterConfig()
    algo: AlgorithmConfig = GRPOConfig()
    """The algorithm of all environments that name none of their own, by `type`."""
    env: Annotated[list[EnvConfig], Field(min_length=1)] = [ReverseTextConfig()]
    """The environments that rollouts come from, by `type`."""
    filters: FiltersConfig = FiltersConfig()
    length: LengthConfig = LengthConfig()
    replay: ReplayConfig = ReplayConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    promotion: PromotionConfig | None = None
    """Gates before a version is promoted and exported; off when left out. The section may be empty."""
    record: RecordConfig = RecordConfig()
    recording: RecordingConfig = RecordingConfig()
    breaker: BreakerConfig = BreakerConfig()
    failures: FailuresConfig = FailuresConfig()
    weights: WeightsConfig = WeightsConfig()
    advice: AdviceConfig = AdviceConfig()

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not re.fullmatch(FOLDER_NAME, name):
            raise ValueError(
                f"`{name}` cannot name the run directory: use letters, digits, `.`, `_` and `-`, "
                "and start with a letter or digit"
            )
        return name

    @model_validator(mode="after")
    def _resolve(self) -> "RunConfig":
        """Fill in what was left out, so that later code need not; then check what spans several keys."""
        explicit = set(self.model_fields_set)
        if self.steps is None and self.epochs is None:
            self.steps = DEFAULT_STEPS
        for place, env in enumerate(self.env):
            env.set_place(place)
            self._resolve_environment(env)
        if self.max_inflight is None:
            self.max_inflight = (self.staleness + 1) * self.batch_size + self.extra_rollouts
        self.model_fields_set.intersection_update(explicit)
        problems = [*self._problems(), *(problem for env in self.env for problem in self._env_problems(env))]
        if problems:
            raise ValueError("\n".join(problems))
        for warning in self.doubtful_settings():
            warnings.warn(warning, ConfigWarning, stacklevel=2)
        return self

    @property
    def extra_rollouts(self) -> int:
        """Rollouts sampled beyond what a batch needs: whole groups."""
        sizes = [env.group_size for env in self.env if env.group_size]
        slots = floor(self.oversample * self.batch_size + 1e-9)  # 0.29 of 100 is 29, whatever the product rounds to
        return slots - slots % gcd(*sizes) if slots >= min(sizes) else 0

    def _resolve_environment(self, env: EnvConfig) -> None:
        explicit = set(env.model_fields_set)
        env.name = env.name or env.type
        env.algo = env.algo or self.algo.model_copy(deep=True)
        # A demonstration is the same however often it is read.
        env.group_size = env.group_size or (self.group_size if env.algo.plays else 1)
        # A group of one says nothing only where every actor is compared with its group.
        relative = all(algo.is_group_relative for _, algo in env.algorithms)
        env.min_group_size = env.min_group_size or min(env.group_size, 2 if relative else 1)
        env.model_fields_set.intersection_update(explicit)  # another config made from this one resolves them again

    def _problems(self) -> Iterator[str]:
        yield from secrets_in(self.model_dump())
        yield from engine_problems(self)
        if self.backend == "mlx":  # left to the machine, it is looked at when the run starts: a file is checked alike
            yield from hardware.unsupported_settings(self)
        yield from cluster.cluster_problems(self)
        yield from kl_problems(self)
        if self.steps is not None and self.epochs is not None:
            yield "give either `steps` or `epochs`, not both"
        for name, count in Counter(env.name for env in self.env).items():
            if count > 1:
                yield f"{count} environments are named `{name}`: give each its own `name`"
        if self.oversample and self.deterministic:
            yield "with oversample the first to finish decide what trains: leave it out where deterministic = true"
        if self.cancel_stale and self.on_stale != "drop":
            yield (
                f'cancel_stale cancels what would be dropped, and on_stale = "{self.on_stale}" trains it: set '
                'on_stale = "drop", or leave cancel_stale out'
            )
        if self.trainer.parallel.ranks > 1 and self.placement not in ("ray", "colocated"):
            yield (
                f'trainer.parallel.ranks = {self.trainer.parallel.ranks} needs placement = "ray" or "colocated", and '
                f'placement = "{self.placement}" trains in one process: change one of them'
            )
        if self.trainer.parallel.tensor > 1 and self.model.lora is not None:
            yield (
                f"trainer.parallel.tensor = {self.trainer.parallel.tensor} cuts matrices and not the adapters beside "
                'them: leave [model.lora] out, or set tensor = 1 and shard = "full"'
            )
        if self.trainer.parallel.ranks > 1 and self.trainer.stream:
            yield "trainer.stream begins a batch before it can be dealt to several ranks: leave it out, or ranks = 1"
        if self.trainer.stream and self.deterministic:
            yield "trainer.stream adds gradients in the order groups finish: leave it out where deterministic = true"
        if self.sampling.temperature == 0:
            yield "training at temperature 0 has no distribution to learn from: raise sampling.temperature"
        elif self.sampling.truncates and not self.allow_truncated_sampling:
            yield (
                "training needs samples of the policy itself, but top_p or top_k bends the distribution: "
                "remove them from [sampling], or set allow_truncated_sampling = true"
            )

    def _env_problems(self, env: EnvConfig) -> Iterator[str]:
        assert self.max_inflight is not None
        assert env.group_size is not None
        assert env.min_group_size is not None
        if self.batch_size % env.group_size:
            yield (
                f"batch_size = {self.batch_size} is not a multiple of group_size = {env.group_size} "
                f"(environment `{env.name}`): a batch holds whole groups"
            )
        if env.min_group_size > env.group_size:
            least, size = env.min_group_size, env.group_size
            yield f"environment `{env.name}`: min_group_size = {least} is larger than group_size = {size}"
        if self.max_inflight < env.group_size:
            yield (
                f"max_inflight = {self.max_inflight} cannot hold one group of `{env.name}` "
                f"({env.group_size} rollouts): raise max_inflight or lower group_size"
            )
        for place, algo in env.algorithms:
            # A group of one may teach all the same: an arena's actor may sit in several seats of one episode, and echo
            # predicts what the policy is told.
            may_teach = env.type == "arena" or isinstance(algo, EchoConfig)
            if env.group_size == 1 and algo.is_group_relative and not may_teach:
                batch = 'baseline = "batch" beside it, or ' if isinstance(algo, GroupCreditConfig) else ""
                yield (
                    f"environment `{env.name}`{place}: {algo.type} compares the tries of one row with one another, and "
                    "group_size = 1 leaves nothing to compare: every advantage would be 0 and nothing would be "
                    f'learned. Write group_size = 8, or any number from 2; or {batch}type = "rae"'
                )
            if isinstance(algo, GAEConfig) and self.trainer.critic is None:
                yield (
                    f"environment `{env.name}`{place}: gae needs a critic that predicts the reward: "
                    "add a section [trainer.critic], which may be empty"
                )
            if self.trainer.stream and algo.needs_whole_batch:
                yield (
                    f"environment `{env.name}`{place}: its baseline is the whole batch's, and trainer.stream does not "
                    'wait for that: set baseline = "group", or leave stream out'
                )
            if isinstance(algo, SFTConfig) and env.seats:
                yield (
                    f"environment `{env.name}`{place}: sft plays whole episodes, not one seat of them: "
                    "give it an [[env]] of its own, without `seats`"
                )

    def doubtful_settings(self) -> Iterator[str]:
        """A sentence for each setting that is legal, but probably not meant."""
        sizes = [env.group_size for env in self.env if env.group_size]
        if self.replay.share and self.staleness == 0:
            yield (
                f"replay.share = {self.replay.share} has no effect at staleness = 0, where a group that has trained is "
                "already too old: raise staleness, or remove [replay]"
            )
        elif self.replay.share and not self.replay.slots(self.batch_size, sizes):
            yield (
                f"replay.share = {self.replay.share} has no effect: in a batch of {self.batch_size} it leaves no room "
                "for a replayed group beside a fresh one; raise replay.share or batch_size, or remove [replay]"
            )
        elif self.replay.chances and not self.replay.share:
            yield "replay.priority has no effect at replay.share = 0: set replay.share = 0.25, or leave priority out"
        if self.weights.path != "auto" and self.placement in ("local", "colocated"):
            yield (
                f'weights.path = "{self.weights.path}" has no effect with placement = "{self.placement}", where engine '
                'and trainer share a process: set placement = "processes", or remove [weights]'
            )
        yield from hardware.ignored_settings(self)
        if self.oversample and not self.extra_rollouts:
            yield (
                f"oversample = {self.oversample} has no effect: of a batch of {self.batch_size} that is less than one "
                f"group of {min(sizes)}; raise oversample or batch_size, or remove it"
            )
        if self.extra_rollouts and self.epochs and not self.staleness and self.on_stale == "drop":
            yield (
                f"oversample = {self.oversample} at staleness 0 drops the groups that finish late, and with `epochs` "
                "their rows do not come again: give `steps` instead, or raise staleness"
            )
        if self.length.buffer > self.sampling.max_tokens:
            yield (
                f"length.buffer = {self.length.buffer} is more than sampling.max_tokens = {self.sampling.max_tokens}, "
                "so that even the shortest reply costs reward: lower it"
            )
        for env in self.env:
            for seat, algo in env.algorithms:
                if algo.is_group_relative and env.group_size == 1:
                    yield (
                        f"environment `{env.name}`{seat}: {algo.type} compares rollouts of one group, and group_size "
                        "is 1: an actor with one rollout an episode gets no advantage; raise group_size"
                    )
