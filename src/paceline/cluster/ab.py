"""Two ways of training side by side: two adapters on one engine, over the same draws and the same noise."""

from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from paceline.cluster.duel import Duel
from paceline.cluster.local import Placed, engine_for, pick_device, renderer_of, share_cores
from paceline.cluster.session import Given, Led, Placement, conduct_all
from paceline.cluster.signals import USER, Signals
from paceline.config import RunConfig
from paceline.config.inference import Sampling
from paceline.errors import PacelineError
from paceline.inference import EmbeddedEngine, Pool
from paceline.inference.arm import Arm
from paceline.model import attach_lora, end_tokens, load_model, load_tokenizer, quick_handover, small_products
from paceline.model.loading import engine_twin
from paceline.orchestrator import lay_out
from paceline.orchestrator.past import members
from paceline.rollout import Recorder, Voice
from paceline.trainer import TorchTrainer

SHARED = ("model", "engine", "seed", "deterministic", "device", "placement", "batch_size", "group_size")
"""Keys in which the arms may not differ: one engine serves both, and both must draw alike."""


def compare(
    arms: Mapping[str, RunConfig], *, overwrite: bool = False, screen: TextIO | None = None, until_real: bool = False
) -> int:
    """Train both arms; each leaves a run directory like any other. With `until_real` they end as soon as the difference
    is beyond doubt. Answers with an exit code."""
    check(arms)
    signals = Signals()
    duel = Duel({arm: Path(c.runs) / c.name for arm, c in arms.items()}, screen, signals if until_real else None)
    with _shared(arms) as house:
        led = [Led(c, house.placement(arm), [duel.corner(arm)]) for arm, c in arms.items()]
        results = conduct_all(led, overwrite=overwrite, signals=signals)
    duel.conclude()
    ends = {result.outcome.status for result in results}
    return 1 if "failed" in ends else 130 if any(result.outcome.message == USER for result in results) else 0


def check(arms: Mapping[str, RunConfig]) -> None:
    """Raise a sentence if these two cannot be compared."""
    one, other = arms.values()
    if one.model.lora is None:
        raise PacelineError("`paceline ab` trains two adapters on one engine: set model.lora.rank, such as 8")
    if one.placement != "local" or one.engine.backend != "paceline":
        raise PacelineError('`paceline ab` runs in one process on our own engine: placement = "local"')
    for key in SHARED:
        if getattr(one, key) != getattr(other, key):
            raise PacelineError(f"both arms share `{key}`: leave out --a.{key} and --b.{key}, or give it to both")
    if not one.record.all or not other.record.all:
        raise PacelineError("the arms are compared by their records: leave record.all as it is")
    if one.model_dump(exclude={"name"}) == other.model_dump(exclude={"name"}):
        raise PacelineError("both arms are the same: say what differs, such as --b.env.0.algo.type max_rl")


@dataclass(frozen=True, slots=True)
class _House:
    """What both arms share."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    engine: EmbeddedEngine
    device: str

    def placement(self, arm: str) -> Placement:
        @asynccontextmanager
        async def place(
            config: RunConfig, dumps: Path, phase: Callable[[str], None], given: Given
        ) -> AsyncGenerator[Placed]:
            with self._placed(arm, config, dumps, phase, given) as parts:
                yield parts

        return place

    @contextmanager
    def _placed(
        self, arm: str, config: RunConfig, dumps: Path, phase: Callable[[str], None], given: Given
    ) -> Generator[Placed]:
        phase("preparing environments")
        courses = lay_out(config, given)
        if members(courses):
            raise PacelineError("a league's past would speak for both arms: leave [env.league] out of a comparison")
        model = attach_lora(engine_twin(self.model, config.model), config.model, config.seed)
        parameters = sum(p.numel() for p in model.parameters())
        config = share_cores(config, parameters)
        ends = end_tokens(self.tokenizer, model)
        renderer = renderer_of(self.tokenizer, ends, config.model)
        trainer = TorchTrainer(
            model, config.trainer, total_steps=config.steps, fp32_head=config.model.fp32_head, dumps=dumps
        )
        pool = Pool([Arm(self.engine, arm)])
        recorder = Recorder(config.recording.host, config.recording.port, config.recording.advertise)

        def voice(sampling: Sampling) -> Voice:
            return Voice(pool, renderer, sampling, frozenset((*ends, *sampling.stop_token_ids)), recorder)

        try:
            yield Placed(pool, trainer, self.tokenizer, courses, voice, self.device, parameters)
        finally:
            pool.close()
            trainer.close()


@contextmanager
def _shared(arms: Mapping[str, RunConfig]) -> Generator[_House]:
    config = next(iter(arms.values()))
    assert config.model.lora is not None
    device = pick_device(config.device)
    model = load_model(config.model, device)
    served = engine_twin(model, config.model)
    slots = {
        "adapters": max(len(arms), config.engine.adapters),
        "adapter_rank": max(config.model.lora.rank, config.engine.adapter_rank),
    }
    config = config.model_copy(update={"engine": config.engine.model_copy(update=slots)})
    engine = engine_for(served, share_cores(config, sum(p.numel() for p in model.parameters())))
    try:
        engine.start()
        with small_products(model.dtype), quick_handover():
            yield _House(model, load_tokenizer(config.model), engine, device)
    finally:
        engine.close()
