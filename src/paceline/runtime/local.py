"""The `local` placement: engine and trainer in this process, of torch or mlx; and the parts that placements share."""

import importlib.util
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from transformers import PreTrainedTokenizerBase

from paceline.clients import Pool
from paceline.clients.frozen import FrozenPool
from paceline.clients.pool import LeaguePool
from paceline.config import RunConfig
from paceline.config.hardware import DTYPES, uses_mlx
from paceline.config.inference import NAMES, SamplingConfig
from paceline.config.model import Dtype, ModelConfig, ModelRef
from paceline.config.trainer import TrainerConfig
from paceline.engine.base import Engine, Grammar
from paceline.engine.sequence import GrammarMatcher
from paceline.envs import Environment
from paceline.errors import PacelineError
from paceline.model import end_tokens, load_tokenizer, short_switch_interval
from paceline.model.dtypes import resolve_dtype
from paceline.observe.monitor import RunDirectory
from paceline.orchestrator import TrainEnv, build_train_envs
from paceline.orchestrator.checkpoint import CheckpointError, Checkpoints
from paceline.orchestrator.league_checkpoints import league_envs
from paceline.planner.hardware import split_threads, usable_cores, with_dtype
from paceline.rollout import RecordingServer, Renderer, SamplingClient
from paceline.rollout.bridge_renderer import make_renderer
from paceline.rollout.render import OnDroppedTools
from paceline.trainer import Trainer
from paceline.trainer.checkpoint import read_state

if TYPE_CHECKING:
    from paceline.engine.mlx.engine import MlxEngine
    from paceline.runtime.torch_parts import LoadedTorchModel
    from paceline.trainer.mlx.trainer import MlxTrainer

log = logging.getLogger("paceline.dtypes")

LoadedModel: TypeAlias = "LoadedTorchModel | LoadedMlxModel"
"""A loaded model, from which engines and trainers are made. An engine has a module tree of its own and, under LoRA,
shares the frozen base with the trainer."""


def require_mlx() -> None:
    if any(importlib.util.find_spec(name) is None for name in ("mlx", "mlx_lm")):
        raise PacelineError("backend = \"mlx\" needs mlx and mlx-lm: pip install 'paceline[mlx]'")


class LoadedMlxModel:
    """A model of mlx-lm on this machine's unified memory."""

    def __init__(self, config: RunConfig) -> None:
        require_mlx()
        from paceline.model.mlx.loading import load_model, mlx_device

        self.device = mlx_device()
        self.model = load_model(config.model)
        self.parameters = self.model.size

    def engine(
        self, config: RunConfig, grammars: Callable[[Grammar], GrammarMatcher] | None = None, owns_model: bool = False
    ) -> "MlxEngine":
        from paceline.engine.mlx.engine import MlxEngine

        return MlxEngine(
            self.model,
            config.engine,
            deterministic=config.deterministic,
            lora_targets=config.model.lora.targets if config.model.lora else "all-linear",
            grammars=grammars,
        )

    def trainer(self, config: RunConfig, bad_batches: Path) -> "MlxTrainer":
        from paceline.model.mlx.loading import clone_model
        from paceline.model.mlx.lora import attach_lora
        from paceline.trainer.mlx.trainer import MlxTrainer

        model = attach_lora(clone_model(self.model), config.model.lora, config.seed)
        return MlxTrainer(model, config.trainer, total_steps=config.steps, dumps=bad_batches)

    def compute_settings(self) -> AbstractContextManager[object]:
        return nullcontext()


def load_run_model(config: RunConfig) -> LoadedModel:
    if uses_mlx(config.backend):
        return LoadedMlxModel(config)
    from paceline.runtime.torch_parts import LoadedTorchModel

    return LoadedTorchModel(config)


def trainer_of(model: Any, c: TrainerConfig) -> Trainer:
    if type(model).__module__.startswith("paceline.model.mlx"):
        from paceline.trainer.mlx.trainer import MlxTrainer

        return MlxTrainer(model, c)
    from paceline.trainer import TorchTrainer

    return TorchTrainer(model, c)


def with_settled_dtype(config: RunConfig, checkpoint: Path | None = None) -> RunConfig:
    """The run file with a definite compute type: that of the checkpoint the run goes on from, else what suits the
    model on this machine. Engine, trainer and record must agree on it, on whichever machines they run."""
    if config.model.dtype != "auto":
        return config
    if checkpoint is None and (resumed := resumed_checkpoint(config)) is not None:
        checkpoint, _ = resumed
    if checkpoint is not None:
        return with_dtype(config, checkpoint_compute_dtype(checkpoint))
    device = device_of(config)
    dtype = resolve_dtype(config.model, device)
    if dtype == "float32" and device == "cuda":
        why, advice = "the type of its weights (or this GPU has no bfloat16)", 'model.dtype = "bfloat16"'
        log.warning("`%s` computes in float32, %s: %s is several times faster here", config.model.name, why, advice)
    return with_dtype(config, dtype)


def checkpoint_compute_dtype(checkpoint: Path) -> Dtype:
    """The compute type of the run that wrote a checkpoint. Checkpoints that do not name it are from when that was
    float32 unless the run file said otherwise."""
    try:
        written = read_state(checkpoint).get("dtype")
    except (OSError, json.JSONDecodeError):
        written = None  # loading the checkpoint says what is wrong with it
    return DTYPES.get(str(written), "float32")


def resumed_checkpoint(config: RunConfig) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint a run goes on from and its state, where it can be found; restoring the run says why not."""
    if not config.resume:
        return None
    saved = Checkpoints(RunDirectory(Path(config.runs) / config.name).checkpoints, config.checkpoint.keep)
    try:
        return saved.find(config.resume)
    except CheckpointError:
        return None


def device_of(config: RunConfig) -> str:
    if uses_mlx(config.backend):
        if importlib.util.find_spec("mlx") is None:
            return "mlx-cpu"  # building the model says what to install
        from paceline.model.mlx.loading import mlx_device

        return mlx_device()
    from paceline.runtime.torch_parts import pick_device

    return pick_device(config.device)


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
    reference: Pool | None = None
    """The workers of the KL reference, where the placement has some."""


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
        make = make or (lambda: load_run_model(self.config).engine(self.config, owns_model=True))
        return LeaguePool(engines, make) if self.past else Pool(engines)

    def build_run_parts(
        self, pool: Pool, trainer: Trainer, ends: Sequence[int], device: str, parameters: int
    ) -> RunParts:
        """All parts, with clients that render and record as the run file says."""
        recorder = RecordingServer(**self.config.recording.model_dump())
        top_logprobs = self.config.record.top_logprobs if self.config.record.all else 0
        make_client = sampling_clients(
            pool, self.tokenizer, ends, self.config.model, recorder, top_logprobs=top_logprobs
        )
        return RunParts(pool, trainer, self.tokenizer, self.envs, make_client, device, parameters)


def prepare(
    config: RunConfig, phase: Callable[[str], None], environments: dict[str, Environment] | None = None, then: str = ""
) -> DriverParts:
    """Load the tokenizer and lay out the environments; the phase `then` follows where one is given."""
    phase("preparing environments")
    tokenizer = load_tokenizer(config.model)
    envs = build_train_envs(config, environments, len(tokenizer))
    if then:
        phase(then)
    past = sum(member.league.size for member in league_envs(envs))
    return DriverParts(with_adapter_slots(config, past), tokenizer, envs, past)


@asynccontextmanager
async def local_placement(
    config: RunConfig,
    run_folder: Path,
    phase: Callable[[str], None],
    environments: dict[str, Environment] | None = None,
) -> AsyncGenerator[RunParts]:
    """Build the parts, and take them down again whatever happens."""
    driver = prepare(config, phase, environments, f"loading model {config.model.name}")
    loaded = load_run_model(config)
    phase("starting the engine")
    config = share_cores(driver.config, loaded.parameters)
    is_external = config.engine.backend != "paceline"
    if is_external:
        from paceline.runtime.torch_parts import LoadedTorchModel, external_engine

        assert isinstance(loaded, LoadedTorchModel)  # as the config's checks have it
        engine: Engine = external_engine(config, loaded.model, driver.tokenizer, run_folder)
    else:
        engine = loaded.engine(config)
    with closing(engine):  # also where no trainer can be made beside it
        driver = replace(driver, config=config)
        pool = driver.pool([engine], lambda: loaded.engine(config))
        # The trainer is closed last: its last step may take long, and no episode samples for it any more.
        with with_trainer(loaded, driver, run_folder / "dumps", pool) as parts, closing(engine), closing(pool):
            engine.start()
            if is_external:
                phase(f"waiting for {NAMES[config.engine.backend]}")
            with loaded.compute_settings(), short_switch_interval(loaded.device):
                yield parts


@contextmanager
def with_trainer(loaded: LoadedModel, driver: DriverParts, bad_batches: Path, pool: Pool) -> Generator[RunParts]:
    """A trainer beside a pool, and sampling clients for episodes."""
    with closing(loaded.trainer(driver.config, bad_batches)) as trainer:
        ends = end_tokens(driver.tokenizer, loaded.model)
        yield driver.build_run_parts(pool, trainer, ends, loaded.device, loaded.parameters)


def sampling_clients(
    pool: Pool,
    tokenizer: PreTrainedTokenizerBase,
    ends: Sequence[int],
    model: ModelConfig,
    recorder: RecordingServer | None = None,
    dropped_tools: OnDroppedTools = "refuse",
    top_logprobs: int = 0,
) -> Callable[[SamplingConfig], SamplingClient]:
    """Makes clients that stop at the tokens that end a turn, and at those of their own config."""
    renderer = renderer_of(tokenizer, ends, model, dropped_tools)
    return lambda sampling: SamplingClient(
        pool, renderer, sampling, frozenset((*ends, *sampling.stop_token_ids)), recorder, top_logprobs
    )


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


def share_cores(
    config: RunConfig, parameters: int, local_world_size: int = 1, at_once: bool | None = None
) -> RunConfig:
    """Set the threads of engine and trainer that the run file leaves open. At staleness 0 they take turns, beyond they
    run at once. `local_world_size` processes, this one included, share the machine."""
    cores = max(1, usable_cores() // local_world_size)
    engine, trainer = split_threads(cores, parameters, config.staleness > 0 if at_once is None else at_once)
    return with_sections(
        config,
        engine={"threads": config.engine.threads or engine},
        trainer={"threads": config.trainer.threads or trainer},
    )


def with_sections(config: RunConfig, **sections: dict[str, Any]) -> RunConfig:
    changed = {name: getattr(config, name).model_copy(update=changes) for name, changes in sections.items()}
    return config.model_copy(update=changed)
