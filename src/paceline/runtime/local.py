"""The `local` placement: engine and trainer in this process."""

from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
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
from paceline.model import end_tokens, load_tokenizer, quick_handover
from paceline.orchestrator import TrainEnv, build_train_envs
from paceline.orchestrator.league_checkpoints import league_envs
from paceline.planner.hardware import split_threads, usable_cores
from paceline.rollout import RecordingServer, Renderer, SamplingClient
from paceline.rollout.bridge_renderer import make_renderer
from paceline.rollout.render import OnDroppedTools
from paceline.runtime.model_backends import ModelBackend, load_backend
from paceline.trainer import Trainer


@dataclass(frozen=True, slots=True)
class RunParts:
    """A run's parts, wherever they live."""

    pool: Pool
    trainer: Trainer
    tokenizer: PreTrainedTokenizerBase
    envs: dict[str, TrainEnv]
    make_client: Callable[[SamplingConfig], SamplingClient]
    device: str
    parameters: int
    attach: Callable[[ModelRef], Awaitable[FrozenPool]] | None = None
    """Finds frozen models, where the placement serves some itself."""


@dataclass(frozen=True, slots=True)
class DriverParts:
    """Parts of a run that every placement has in the orchestrator's process."""

    config: RunConfig
    tokenizer: PreTrainedTokenizerBase
    envs: dict[str, TrainEnv]
    past: int = 0
    """Versions that the leagues of the run keep beside the policy."""

    def pool(self, engines: Sequence[Engine], make: Callable[[], Engine] | None = None) -> Pool:
        """A pool of a run's engines. For a league, `make` gives the engine of a past version that is a whole model: one
        of this process where it is left out."""
        return LeaguePool(engines, make or partial(league_engine, self.config)) if self.past else Pool(engines)

    def placed(self, pool: Pool, trainer: Trainer, ends: Sequence[int], device: str, parameters: int) -> RunParts:
        """All parts, with clients that render and record as the run file says."""
        renderer = renderer_of(self.tokenizer, ends, self.config.model)
        make_client = sampling_clients(pool, renderer, ends, recording_server(self.config))
        return RunParts(pool, trainer, self.tokenizer, self.envs, make_client, device, parameters)


def prepare(
    config: RunConfig, phase: Callable[[str], None], environments: dict[str, Environment] | None = None, then: str = ""
) -> DriverParts:
    """Lay out the environments and load the tokenizer, which is in the phase `then` where one is given."""
    phase("preparing environments")
    envs = build_train_envs(config, environments)
    if then:
        phase(then)
    past = sum(member.league.size for member in league_envs(envs))
    return DriverParts(with_adapter_slots(config, past), load_tokenizer(config.model), envs, past)


def league_engine(config: RunConfig) -> Engine:
    """An engine of this process that has the model for itself."""
    return load_backend(config).engine(config, alone=True)


@contextmanager
def local(
    config: RunConfig, dumps: Path, phase: Callable[[str], None], environments: dict[str, Environment] | None = None
) -> Generator[RunParts]:
    """Build the parts, and take them down again whatever happens."""
    driver = prepare(config, phase, environments, f"loading model {config.model.name}")
    backend = load_backend(config)
    phase("starting the engine")
    config = share_cores(driver.config, backend.parameters)
    engine = backend.external_engine(config, driver.tokenizer, dumps.parent) or backend.engine(config)

    def ready() -> None:
        engine.start()
        if config.engine.backend != "paceline":
            phase(f"waiting for {NAMES[config.engine.backend]}")

    try:
        driver = replace(driver, config=config)
        pool = driver.pool([engine], lambda: backend.engine(config))
        placing = with_trainer(backend, driver, dumps, pool, ready, engine.close)
        with placing as parts, backend.at_work(), quick_handover(backend.device):
            yield parts
    finally:
        engine.close()  # once more, where no trainer could be made beside it


@contextmanager
def with_trainer(
    backend: ModelBackend,
    driver: DriverParts,
    dumps: Path,
    pool: Pool,
    ready: Callable[[], None] = lambda: None,
    done: Callable[[], None] = lambda: None,
) -> Generator[RunParts]:
    """A trainer beside a pool, and sampling clients for episodes. `ready` is called once the trainer is built, `done`
    before it is closed: its last step may take long, and no episode samples for it any more."""
    trainer = backend.trainer(driver.config, dumps)
    try:
        ends = end_tokens(driver.tokenizer, backend.model)
        placed = driver.placed(pool, trainer, ends, backend.device, backend.parameters)
        ready()
        yield placed
    finally:
        pool.close()
        done()
        trainer.close()


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
    tokenizer: PreTrainedTokenizerBase,
    ends: Sequence[int],
    model: ModelConfig,
    dropped_tools: OnDroppedTools = "refuse",
) -> Renderer:
    """The renderer of conversations; `dropped_tools` says what it does where the template drops tools."""
    renderer = make_renderer(tokenizer, ends, model.renderer, model.known_as, model.keep_thoughts)
    renderer.on_dropped_tools = "allow" if model.allow_dropped_tools else dropped_tools
    return renderer


def with_adapter_slots(config: RunConfig, past: int) -> RunConfig:
    """Under LoRA the policy is an adapter: add engine slots for it and for each past version to those asked for."""
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
