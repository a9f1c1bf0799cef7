"""The engine that runs in this process, with MLX.

Runs one step of the model with MLX: tokens in, sampled tokens out.
"""

import atexit
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import mlx.core as mx

from paceline.config import inference
from paceline.engine.base import Grammar
from paceline.engine.catalog import POLICY, Catalog
from paceline.engine.engine import DecodingEngine
from paceline.engine.mlx.adapters import MlxAdapters, install
from paceline.engine.mlx.sampler import MlxSamplerOutput, MlxSamplingMetadata, sample, token_logprobs
from paceline.engine.mlx.step import MlxSlots, Pass, decoding, key_shape, prompting
from paceline.engine.parts import EngineParts, StagedUpdate
from paceline.engine.scheduler import Scheduler
from paceline.engine.sequence import Chunk, Guide, hand_out
from paceline.engine.weight_applier import WeightApplier
from paceline.errors import EngineError, OtherBase
from paceline.model.canary_prompts import rounding
from paceline.model.mlx.loading import MlxModel, twin
from paceline.model.mlx.lora import put
from paceline.weights.mlx_arrays import as_array, settled
from paceline.weights.update import Array, WeightUpdate

SCORED_ROWS = 256
"""Positions whose logits are held at once when a text is scored."""


class MlxFlight:
    """A step that is being computed."""

    def __init__(self, chunks: Sequence[Chunk], drawn: list[Chunk], sampled: MlxSamplerOutput | None) -> None:
        self.chunks = chunks
        self._drawn, self._sampled = drawn, sampled

    def land(self) -> None:
        if (got := self._sampled) is not None:
            log_z = None if got.log_z is None else got.log_z.tolist()
            top = None if got.top is None else (got.top[0].tolist(), got.top[1].tolist())
            hand_out(self._drawn, got.tokens.tolist(), got.logprobs.tolist(), log_z, top)


class MlxRunner:
    """The model with its cache. With `fixed_shape`, decoding always runs at the full batch and each prompt alone, so a
    token's bits do not depend on its neighbours.

    Whatever a step touches is computed with it, the cache too: a graph never evaluated only grows. Steps in
    flight are possible but do not pay: while one still reads the cache, the next cannot write to the same memory, and
    copies all of it.
    """

    def __init__(
        self, model: MlxModel, cache: MlxSlots, fixed_shape: bool, adapters: MlxAdapters | None, depth: int
    ) -> None:
        self.depth = depth
        self._model, self._cache = model, cache
        self._fixed_shape = fixed_shape
        self._adapters = adapters
        self._device = mx.default_device()
        self._last = mx.zeros(cache.slots + 1, mx.int32)
        """The token each slot sampled last, for those whose step has not landed."""
        mx.eval(self._last)

    def place(self) -> AbstractContextManager[object]:
        return mx.stream(self._device)

    is_compiling = False

    def warm(self) -> None: ...

    def wants_switch(self, busy_seconds: float, swaps: int) -> bool:
        return False

    def switch(self) -> None: ...

    def sync(self) -> None:
        mx.synchronize()

    def close(self) -> None:
        self._last = mx.zeros(0, mx.int32)

    def launch(self, chunks: Sequence[Chunk]) -> MlxFlight:
        """Compute the chunks and sample where they ask for it."""
        singles = sorted((c for c in chunks if c.length == 1), key=lambda c: c.sequence.slot)
        passes = prompting(self._cache, [c for c in chunks if c.length > 1], self._fixed_shape)
        if singles:
            passes.append(decoding(self._cache, singles, self._fixed_shape))
        drawn: list[Chunk] = []
        logits: list[mx.array] = []
        for step in passes:
            hidden = self._hidden(step)
            self._score(step, hidden)
            if ends := [(row, chunk) for row, chunk in step.chunks if chunk.samples]:
                drawn += [chunk for _, chunk in ends]
                logits.append(self._ends(hidden, ends))
        sampled = self._sample(drawn, mx.concatenate(logits)) if drawn else None
        mx.async_eval(self._cache.arrays, self._last, sampled.arrays if sampled else [])
        return MlxFlight(chunks, drawn, sampled)

    def _hidden(self, step: Pass) -> mx.array:
        if self._adapters is not None:
            slots = [0] * step.rows
            for row, chunk in step.chunks:
                slots[row] = chunk.adapter
            self._adapters.route(slots)
        return self._model.hidden(self._tokens(step), step.caches)

    def _tokens(self, step: Pass) -> mx.array:
        rows = [[0] * step.tokens_per_row for _ in range(step.rows)]
        unseen = []
        for row, chunk in step.chunks:
            known = chunk.sequence.tokens[chunk.start : chunk.start + chunk.length]
            rows[row][: len(known)] = known
            if not known:
                unseen.append((row, chunk.sequence.slot))
        tokens = mx.array(rows)
        if unseen:  # sampled in a step that has not landed
            at, slots = zip(*unseen, strict=True)
            tokens[mx.array(at), 0] = self._last[mx.array(slots)]
        return tokens

    def _ends(self, hidden: mx.array, ends: list[tuple[int, Chunk]]) -> mx.array:
        """Logits after the last token of each of these rows."""
        rows = mx.array([row for row, _ in ends])
        if self._fixed_shape:
            return self._model.logits(hidden[:, -1])[rows]
        return self._model.logits(hidden[rows, mx.array([chunk.length - 1 for _, chunk in ends])])

    def _sample(self, drawn: list[Chunk], logits: mx.array) -> MlxSamplerOutput:
        sampled = sample(logits, MlxSamplingMetadata.of(drawn, logits.shape[-1]))
        self._last[mx.array([chunk.sequence.slot for chunk in drawn])] = sampled.tokens
        return sampled

    def _score(self, step: Pass, hidden: mx.array) -> None:
        for row, chunk in step.chunks:
            if chunk.sequence.scores is None:
                continue
            targets, chunk.scores = chunk.targets, []
            for at in range(0, len(targets), SCORED_ROWS):
                some = targets[at : at + SCORED_ROWS]
                logits = self._model.logits(hidden[row, at : at + len(some)])
                chunk.scores += token_logprobs(logits, some, chunk.sequence.request.temperature).tolist()


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
