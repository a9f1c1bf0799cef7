"""The engine that runs in this process, with MLX."""

import atexit
import weakref
from collections.abc import Callable, Mapping

import mlx.core as mx

from paceline.config import inference
from paceline.inference.base import EngineError, Grammar, OtherBase
from paceline.inference.engine.catalog import POLICY, Catalog
from paceline.inference.engine.engine import DecodingEngine
from paceline.inference.engine.parts import EngineParts, StagedUpdate
from paceline.inference.engine.scheduler import Scheduler
from paceline.inference.engine.sequence import Guide
from paceline.inference.engine.weight_applier import WeightApplier
from paceline.inference.mlx.adapters import MlxAdapters, install
from paceline.inference.mlx.runner import MlxRunner
from paceline.inference.mlx.sampler import token_logprobs
from paceline.inference.mlx.slots import MlxSlots
from paceline.inference.mlx.step import key_shape
from paceline.model.canary_prompts import rounding
from paceline.model.mlx.arrays import as_array, settled
from paceline.model.mlx.loading import MlxModel, twin
from paceline.model.mlx.lora import put
from paceline.model.weights import Array, WeightUpdate


class MlxServed(WeightApplier):
    """The base and the adapters beside it. Arrays never change, so an update that comes from this process is taken as
    it is, and costs no memory."""

    def __init__(self, model: MlxModel, adapters: MlxAdapters | None, catalog: Catalog) -> None:
        super().__init__(adapters, catalog, model.vocabulary)
        self._model = model
        self._adapters = adapters
        self.bytes = sum(array.nbytes for array in self.parameters.values())

    @property
    def parameters(self) -> Mapping[str, mx.array]:
        return self._model.parameters()

    @property
    def rounding(self) -> float:
        return rounding(self._model.dtype)

    def warm(self) -> None: ...

    def mark(self) -> None:
        """A sender computes what it sends before it sends it."""

    def read(self, update: WeightUpdate, check: bool = True, mark: None = None) -> StagedUpdate:
        """All that can be done while decoding goes on, on any thread: read it, look whether it fits and is whole."""
        return self._read(update, check)

    def _at_hand(self, tensors: Mapping[str, Array]) -> dict[str, mx.array]:
        return settled({name: as_array(tensor) for name, tensor in tensors.items()})

    def _copy(self, tensors: Mapping[str, mx.array]) -> None:
        for name, array in tensors.items():
            replace_parameter(self._model, name, array)

    def _read_delta(self, update: WeightUpdate, check: bool) -> StagedUpdate:
        self._check_whole()
        raise OtherBase("an engine on MLX takes no deltas: send all weights")

    def _apply_delta(self, update: WeightUpdate, check: bool) -> str | None:
        raise AssertionError("a delta is refused when it is read")

    def logprobs(self, token_ids: tuple[int, ...], model: str) -> list[float]:
        if self._adapters is not None:
            self._adapters.route([self._catalog.slots[model]])
        hidden = self._model.hidden(mx.array(token_ids)[None])[0, :-1]
        return [0.0, *token_logprobs(self._model.logits(hidden), token_ids[1:], 1.0).tolist()]


def replace_parameter(model: MlxModel, name: str, array: mx.array) -> None:
    """From the next pass on the model computes with this array."""
    parent, _, child = name.rpartition(".")
    put(model.net, parent, child, array)


FIRST_CACHE_LENGTH = 256


def build(
    model: MlxModel, config: inference.EngineConfig, deterministic: bool, version: int, lora_targets: list[str] | str
) -> EngineParts:
    """The engine gets a module tree of its own, over the same arrays: updates and adapters never reach the caller's."""
    if config.cache == "pages":
        raise EngineError('engine.cache = "pages" is not there with mlx: leave it out')
    model = twin(model)
    mx.eval(model.net.parameters())
    max_context = min(config.max_context or model.max_context, model.max_context)
    shape = key_shape(model)
    adapters = install(model, lora_targets, config.adapters, config.adapter_rank) if config.adapters else None
    catalog = Catalog()
    catalog.versions[POLICY] = version
    first = max_context if deterministic else min(FIRST_CACHE_LENGTH, max_context)
    cache = MlxSlots(shape, config.max_running, first, max_context, steady=deterministic)
    return EngineParts(
        cache=cache,
        scheduler=Scheduler(cache, config.prefill_tokens, deterministic, catalog),
        runner=MlxRunner(model, cache, deterministic, adapters, config.in_flight or 0),
        served=MlxServed(model, adapters, catalog),
        catalog=catalog,
        max_context=max_context,
        vocabulary=model.vocabulary,
    )


class MlxEngine(DecodingEngine):
    """Serves one of mlx-lm's models from this process."""

    def __init__(
        self,
        model: MlxModel,
        config: inference.EngineConfig,
        *,
        deterministic: bool = False,
        version: int = 0,
        lora_targets: list[str] | str = "all-linear",
        grammars: Callable[[Grammar], Guide] | None = None,
    ) -> None:
        super().__init__(build(model, config, deterministic, version, lora_targets), config, grammars)
        here = weakref.ref(self)
        atexit.register(lambda: (engine := here()) and engine.close())  # mlx aborts a process that leaves it computing
