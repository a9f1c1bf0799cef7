"""The `local` placement: engine and trainer in this process."""

import os
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from paceline.cluster.backends import foreign
from paceline.config import RunConfig
from paceline.config.backends import NAMES
from paceline.config.inference import Sampling
from paceline.config.model import Model
from paceline.config.reference import ModelRef
from paceline.envs import Environment
from paceline.errors import PacelineError
from paceline.inference import EmbeddedEngine, Pool
from paceline.inference.frozen import FrozenPool
from paceline.inference.past import PoolWithPast
from paceline.model import attach_lora, end_tokens, load_model, load_tokenizer, quick_handover, small_products
from paceline.model.loading import engine_twin
from paceline.orchestrator import Course, lay_out
from paceline.orchestrator.past import members
from paceline.rollout import Recorder, Renderer, Voice
from paceline.rollout.known import make_renderer
from paceline.trainer import TorchTrainer, Trainer

SMALL_MODEL = 20_000_000
"""Parameters below which one core decodes as fast as several."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A run's parts, wherever they live."""

    pool: Pool
    trainer: Trainer
    tokenizer: PreTrainedTokenizerBase
    courses: dict[str, Course]
    voice: Callable[[Sampling], Voice]
    device: str
    parameters: int
    past: PoolWithPast | None = None
    """The pool once more, where an environment has a league."""
    attach: Callable[[ModelRef], Awaitable[FrozenPool]] | None = None
    """Finds frozen models, where the placement serves some itself."""


@contextmanager
def local(
    config: RunConfig, dumps: Path, phase: Callable[[str], None], environments: dict[str, Environment] | None = None
) -> Generator[Placed]:
    """Build the parts, and take them down again whatever happens: engine and trainer with separate module trees and,
    under LoRA, one frozen base between them."""
    device = pick_device(config.device)
    phase("preparing environments")
    courses = lay_out(config, environments)
    phase(f"loading model {config.model.name}")
    tokenizer = load_tokenizer(config.model)
    model = load_model(config.model, device)
    served = engine_twin(model, config.model)
    model = attach_lora(model, config.model, config.seed)
    parameters = sum(p.numel() for p in model.parameters())
    past = sum(member.league.size for member in members(courses))
    config = share_cores(make_room_for_adapters(config, past), parameters)
    ends = end_tokens(tokenizer, model)
    renderer = renderer_of(tokenizer, ends, config.model)

    engine = foreign(config, served, tokenizer, dumps.parent) or engine_for(served, config)
    try:
        trainer = TorchTrainer(
            model, config.trainer, total_steps=config.steps, fp32_head=config.model.fp32_head, dumps=dumps
        )
    except BaseException:
        engine.close()  # it holds memory of the device already
        raise
    with_past = PoolWithPast([engine], lambda: engine_for(engine_twin(model, config.model), config)) if past else None
    pool = with_past or Pool([engine])
    recorder = Recorder(config.recording.host, config.recording.port, config.recording.advertise)

    def voice(sampling: Sampling) -> Voice:
        return Voice(pool, renderer, sampling, frozenset((*ends, *sampling.stop_token_ids)), recorder)

    try:
        engine.start()
        if config.engine.backend != "paceline":
            phase(f"waiting for {NAMES[config.engine.backend]}")
        with small_products(model.dtype), quick_handover():
            yield Placed(pool, trainer, tokenizer, courses, voice, device, parameters, with_past)
    finally:
        pool.close()
        engine.close()
        trainer.close()


def engine_for(
    model: PreTrainedModel, config: RunConfig, kind: type[EmbeddedEngine] = EmbeddedEngine
) -> EmbeddedEngine:
    """An engine of this process that serves the run's model."""
    return kind(
        model,
        config.engine,
        deterministic=config.deterministic,
        fp32_head=config.model.fp32_head,
        lora_targets=config.model.lora.targets if config.model.lora else "all-linear",
    )


def renderer_of(tokenizer: PreTrainedTokenizerBase, ends: Sequence[int], model: Model) -> Renderer:
    """Who turns conversations into the model's tokens."""
    return make_renderer(tokenizer, ends, model.renderer, model.known_as, model.keep_thoughts)


def pick_device(wanted: str) -> str:
    """`auto` takes the GPU if there is one."""
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise PacelineError('device = "cuda", but torch sees no GPU here: set device = "cpu" or "auto"')
    return wanted


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
