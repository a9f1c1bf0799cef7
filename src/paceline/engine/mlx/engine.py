"""The engine that runs in this process, with MLX."""

import atexit
import weakref
from collections.abc import Callable, Mapping

import mlx.core as mx

from paceline.config import inference
from paceline.engine.base import Grammar
from paceline.engine.engine import DecodingEngine
from paceline.engine.mlx.adapters import MlxAdapters, install
from paceline.engine.mlx.kv_cache import MlxSlotCache, kv_shape
from paceline.engine.mlx.runner import MlxRunner
from paceline.engine.mlx.sampler import token_logprobs
from paceline.engine.sequence import GrammarMatcher
from paceline.engine.weight_applier import WeightApplier
from paceline.errors import EngineError
from paceline.model.mlx.loading import MlxModel, clone_model
from paceline.model.mlx.lora import replace_layer
from paceline.weights.mlx_arrays import as_array, evaluate
from paceline.weights.update import Array

FIRST_CACHE_LENGTH = 256


class MlxWeights(WeightApplier):
    """The base and the adapters beside it. Arrays never change, so an update that comes from this process is taken as
    it is, and costs no memory."""

    def __init__(self, model: MlxModel, adapters: MlxAdapters | None, version: int) -> None:
        super().__init__(adapters, model.vocabulary, model.dtype, version)
        self._model, self._adapters = model, adapters
        self.weight_bytes = sum(array.nbytes for array in self.parameters.values())

    @property
    def parameters(self) -> Mapping[str, mx.array]:
        return self._model.parameters()

    def _stage(self, tensors: Mapping[str, Array]) -> dict[str, mx.array]:
        return evaluate({name: as_array(tensor) for name, tensor in tensors.items()})

    def _copy_weights(self, tensors: Mapping[str, mx.array]) -> None:
        for name, array in tensors.items():
            replace_layer(self._model.net, name, array)

    def logprobs(self, token_ids: tuple[int, ...], model: str) -> list[float]:
        if self._adapters is not None:
            self._adapters.route([self.served.adapter_slots[model]])
        hidden = self._model.hidden(mx.array(token_ids)[None])[0, :-1]
        return [0.0, *token_logprobs(self._model.logits(hidden), token_ids[1:], 1.0).tolist()]


class MlxEngine(DecodingEngine):
    """Serves one of mlx-lm's models from this process.

    The engine gets a module tree of its own, over the same arrays: updates and adapters never reach the caller's.
    """

    def __init__(
        self,
        model: MlxModel,
        config: inference.EngineConfig,
        *,
        deterministic: bool = False,
        version: int = 0,
        lora_targets: list[str] | str = "all-linear",
        grammars: Callable[[Grammar], GrammarMatcher] | None = None,
    ) -> None:
        if config.cache == "pages":
            raise EngineError('engine.cache = "pages" is not there with mlx: leave it out')
        model = clone_model(model)
        mx.eval(model.net.parameters())
        max_context = min(config.max_context or model.max_context, model.max_context)
        shape = kv_shape(model)
        adapters = install(model, lora_targets, config.adapters, config.adapter_rank) if config.adapters else None
        first = max_context if deterministic else min(FIRST_CACHE_LENGTH, max_context)
        cache = MlxSlotCache(shape, config.max_running, first, max_context, deterministic=deterministic)
        runner = MlxRunner(model, cache, deterministic, adapters, config.in_flight or 0)
        super().__init__(
            config, cache, runner, MlxWeights(model, adapters, version), max_context=max_context,
            vocabulary=model.vocabulary, deterministic=deterministic, grammars=grammars,
        )  # fmt: skip
        here = weakref.ref(self)
        atexit.register(lambda: (engine := here()) and engine.close())  # mlx aborts a process that leaves it computing
