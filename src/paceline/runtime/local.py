"""The `local` placement: engine and trainer in this process."""

import os
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from paceline.clients import Pool
from paceline.clients.frozen import FrozenPool
from paceline.clients.pool import LeaguePool
from paceline.config import RunConfig
from paceline.config.inference import NAMES, SamplingConfig
from paceline.config.model import ModelConfig, ModelRef
from paceline.envs import Environment
from paceline.model import load_tokenizer, quick_handover
from paceline.orchestrator import TrainEnv, lay_out
from paceline.orchestrator.league_checkpoints import members
from paceline.rollout import RecordingServer, Renderer, SamplingClient
from paceline.rollout.known import make_renderer
from paceline.rollout.render import Dropped
from paceline.runtime.model_backends import ModelBackend, kit_of
from paceline.trainer import Trainer

SMALL_MODEL = 20_000_000
"""Parameters below which one core decodes as fast as several."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A run's parts, wherever they live."""

    pool: Pool
    trainer: Trainer
    tokenizer: PreTrainedTokenizerBase
    courses: dict[str, TrainEnv]
    voice: Callable[[SamplingConfig], SamplingClient]
    device: str
    parameters: int
    past: LeaguePool | None = None
    """The pool once more, where an environment has a league."""
    attach: Callable[[ModelRef], Awaitable[FrozenPool]] | None = None
    """Finds frozen models, where the placement serves some itself."""


@contextmanager
def local(
    config: RunConfig, dumps: Path, phase: Callable[[str], None], environments: dict[str, Environment] | None = None
) -> Generator[Placed]:
    """Build the parts, and take them down again whatever happens."""
    phase("preparing environments")
    courses = lay_out(config, environments)
    phase(f"loading model {config.model.name}")
    tokenizer = load_tokenizer(config.model)
    kit = kit_of(config)
    phase("starting the engine")
    past = sum(member.league.size for member in members(courses))
    config = share_cores(make_room_for_adapters(config, past), kit.parameters)
    engine = kit.foreign(config, tokenizer, dumps.parent) or kit.engine(config)
    with_past = LeaguePool([engine], lambda: kit.engine(config)) if past else None

    def ready() -> None:
        engine.start()
        if config.engine.backend != "paceline":
            phase(f"waiting for {NAMES[config.engine.backend]}")

    try:
        pool = with_past or Pool([engine])
        seats = seated(kit, tokenizer, config, dumps, courses, pool, ready, engine.close)
        with seats as parts, kit.at_work(), quick_handover(kit.device):
            yield parts
    finally:
        engine.close()  # once more, where no trainer could be made beside it


@contextmanager
def seated(
    kit: ModelBackend,
    tokenizer: PreTrainedTokenizerBase,
    config: RunConfig,
    dumps: Path,
    courses: dict[str, TrainEnv],
    pool: Pool,
    ready: Callable[[], None] = lambda: None,
    done: Callable[[], None] = lambda: None,
) -> Generator[Placed]:
    """A trainer beside a pool, and sampling clients for episodes. `ready` is called once the trainer is built, `done`
    before it is closed: its last step may take long, and no episode samples for it any more."""
    ends = kit.ends(tokenizer)
    renderer = renderer_of(tokenizer, ends, config.model)
    trainer = kit.trainer(config, dumps)
    recorder = RecordingServer(config.recording.host, config.recording.port, config.recording.advertise)

    def voice(sampling: SamplingConfig) -> SamplingClient:
        return SamplingClient(pool, renderer, sampling, frozenset((*ends, *sampling.stop_token_ids)), recorder)

    try:
        ready()
        past = pool if isinstance(pool, LeaguePool) else None
        yield Placed(pool, trainer, tokenizer, courses, voice, kit.device, kit.parameters, past)
    finally:
        pool.close()
        done()
        trainer.close()


def renderer_of(
    tokenizer: PreTrainedTokenizerBase, ends: Sequence[int], model: ModelConfig, dropped_tools: Dropped = "refuse"
) -> Renderer:
    """The renderer of conversations into the model's tokens, and what it does where the template drops an
    environment's tools."""
    renderer = make_renderer(tokenizer, ends, model.renderer, model.known_as, model.keep_thoughts)
    renderer.on_dropped_tools = "allow" if model.allow_dropped_tools else dropped_tools
    return renderer


def make_room_for_adapters(config: RunConfig, past: int) -> RunConfig:
    """Under LoRA the policy is an adapter: the engine needs a slot for it and for each past version, beside whatever
    else the user wants served."""
    lora, engine = config.model.lora, config.engine
    if lora is None:
        return config
    room = {"adapters": max(1, engine.adapters) + past, "adapter_rank": max(lora.rank, engine.adapter_rank)}
    return config.model_copy(update={"engine": engine.model_copy(update=room)})


def share_cores(config: RunConfig, parameters: int) -> RunConfig:
    """Engine and trainer take turns at staleness 0, so each gets all cores; beyond, they run at once and split them.

    A small model decodes on one core: its products are too short to be worth waking a second thread for.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    engine = cores if config.staleness == 0 else max(1, cores // 2)
    engine = 1 if parameters < SMALL_MODEL else engine
    trainer = cores if config.staleness == 0 else max(1, cores - engine)
    return config.model_copy(
        update={
            "engine": config.engine.model_copy(update={"threads": config.engine.threads or engine}),
            "trainer": config.trainer.model_copy(update={"threads": config.trainer.threads or trainer}),
        }
    )
