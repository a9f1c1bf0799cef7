"""The `local` placement: engine and trainer in this process."""

from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from paceline.clients import Pool
from paceline.clients.frozen import FrozenPool
from paceline.clients.pool import LeaguePool
from paceline.config import RunConfig
from paceline.config.inference import NAMES, SamplingConfig
from paceline.config.model import ModelConfig, ModelRef
from paceline.engine.base import Engine
from paceline.envs import Environment
from paceline.model import load_tokenizer, quick_handover
from paceline.orchestrator import TrainEnv, build_train_envs
from paceline.orchestrator.league_checkpoints import members
from paceline.planner.hardware import split_threads, usable_cores
from paceline.rollout import RecordingServer, Renderer, SamplingClient
from paceline.rollout.known import make_renderer
from paceline.rollout.render import Dropped
from paceline.runtime.model_backends import ModelBackend, load_backend
from paceline.trainer import Trainer


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
    attach: Callable[[ModelRef], Awaitable[FrozenPool]] | None = None
    """Finds frozen models, where the placement serves some itself."""

    @property
    def past(self) -> LeaguePool | None:
        """The pool once more, where an environment has a league."""
        return self.pool if isinstance(self.pool, LeaguePool) else None


@contextmanager
def local(
    config: RunConfig, dumps: Path, phase: Callable[[str], None], environments: dict[str, Environment] | None = None
) -> Generator[Placed]:
    """Build the parts, and take them down again whatever happens."""
    phase("preparing environments")
    courses = build_train_envs(config, environments)
    phase(f"loading model {config.model.name}")
    tokenizer = load_tokenizer(config.model)
    backend = load_backend(config)
    phase("starting the engine")
    past = past_versions(courses)
    config = share_cores(make_room_for_adapters(config, past), backend.parameters)
    engine = backend.external_engine(config, tokenizer, dumps.parent) or backend.engine(config)

    def ready() -> None:
        engine.start()
        if config.engine.backend != "paceline":
            phase(f"waiting for {NAMES[config.engine.backend]}")

    try:
        pool = pool_of([engine], past, lambda: backend.engine(config))
        placing = with_trainer(backend, tokenizer, config, dumps, courses, pool, ready, engine.close)
        with placing as parts, backend.at_work(), quick_handover(backend.device):
            yield parts
    finally:
        engine.close()  # once more, where no trainer could be made beside it


@contextmanager
def with_trainer(
    backend: ModelBackend,
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
    voice = policy_clients(config, pool, tokenizer, backend.ends(tokenizer))
    trainer = backend.trainer(config, dumps)
    try:
        ready()
        yield Placed(pool, trainer, tokenizer, courses, voice, backend.device, backend.parameters)
    finally:
        pool.close()
        done()
        trainer.close()


def past_versions(courses: dict[str, TrainEnv]) -> int:
    """Versions that the leagues of a run keep beside the policy."""
    return sum(member.league.size for member in members(courses))


def pool_of(engines: Sequence[Engine], past: int, make: Callable[[], Engine]) -> Pool:
    """A pool of a run's engines. For a league, `make` gives the engine of a past version that is a whole model."""
    return LeaguePool(engines, make) if past else Pool(engines)


def policy_clients(
    config: RunConfig, pool: Pool, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]
) -> Callable[[SamplingConfig], SamplingClient]:
    """Makes clients that render and record as the run file says."""
    return sampling_clients(pool, renderer_of(tokenizer, ends, config.model), ends, recording_server(config))


def sampling_clients(
    pool: Pool, renderer: Renderer, ends: Sequence[int], recorder: RecordingServer | None = None
) -> Callable[[SamplingConfig], SamplingClient]:
    """Makes clients that stop at the tokens that end a turn, and at those of their own config."""
    return lambda sampling: SamplingClient(
        pool, renderer, sampling, frozenset((*ends, *sampling.stop_token_ids)), recorder
    )


def recording_server(config: RunConfig) -> RecordingServer:
    return RecordingServer(config.recording.host, config.recording.port, config.recording.advertise)


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
    return with_sections(config, engine=room)


def share_cores(config: RunConfig, parameters: int, neighbours: int = 1, at_once: bool | None = None) -> RunConfig:
    """Set the threads of engine and trainer that the run file leaves open. At staleness 0 they take turns, beyond they
    run at once. `neighbours` processes, this one included, share the machine."""
    cores = max(1, usable_cores() // neighbours)
    engine, trainer = split_threads(cores, parameters, config.staleness > 0 if at_once is None else at_once)
    return with_sections(
        config,
        engine={"threads": config.engine.threads or engine},
        trainer={"threads": config.trainer.threads or trainer},
    )


def with_sections(config: RunConfig, **sections: dict[str, Any]) -> RunConfig:
    """The run file with some settings of its sections changed."""
    changed = {name: getattr(config, name).model_copy(update=changes) for name, changes in sections.items()}
    return config.model_copy(update=changed)
