"""The runner on CUDA: every step is one captured graph, and the host runs ahead of the device.

A step's host work is one copy of small integers, one graph launch and one copy back. Sampled tokens stay on the device
for the next step, so nothing waits for the host to read them.
"""

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from paceline.config import inference
from paceline.engine.cpu.runner import score
from paceline.engine.cpu.sampler import sample, tensor_factory
from paceline.engine.cuda import attention
from paceline.engine.cuda.sampler import sample_into
from paceline.engine.cuda.step import TILE_ROWS, StepShape, device_fields, is_decode_only
from paceline.engine.pages import PageCache
from paceline.engine.runner import Runner, SamplerOutput, SamplingMetadata, StepInFlight
from paceline.engine.sequence import Chunk, SampledToken
from paceline.model import LMHead, hidden_states
from paceline.model.adapters import Adapters
from paceline.model.attention import Mixer, Scores
from paceline.model.background_compile import BackgroundCompile, compile_blocks, number_layers

DEPTH = 3
"""Steps in flight: enough that a slow moment of the host is never seen on the device."""
PRIORITY = -5
"""Of the engine's stream, above a trainer's on the same card: between long kernels there is room for a decode step's
short ones, which would each wait for a whole product otherwise."""
PROGRAMS = 512
"""Programs that keep an H100 or H200 busy: about four for each of its 132 multiprocessors."""
MOST_SPLITS = 16
SMALLEST_PREFILL = 128

_runner_ids = itertools.count()
_runners: "dict[int, GraphRunner]" = {}


@torch.library.custom_op("paceline::attend", mutates_args=(), device_types="cuda")
def _attend(q: Tensor, k: Tensor, v: Tensor, layer: Tensor, scale: float, window: int, runner: int) -> Tensor:
    """Attention of the step being captured. Opaque to the compiler, which so never sees cache or lengths."""
    return _runners[runner].attend(int(layer), q, k, v, scale, window or None)


@_attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, layer: Tensor, scale: float, window: int, runner: int) -> Tensor:
    return q.new_empty(q.shape)


class CustomOpPlan:
    """Hands the model's attention to a runner through the custom op."""

    def __init__(self, runner: int) -> None:
        self._runner = runner

    def attend(self, layer: Tensor, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
        return torch.ops.paceline.attend(q, k, v, layer, scores.scale, scores.window or 0, self._runner)

    def mix(self, layer: int, mixer: Mixer, hidden: Tensor) -> Tensor:
        raise AssertionError  # `check_cuda_engine`


@dataclass(slots=True)
class CapturedStep:
    """A graph, and the static tensors it reads and writes."""

    shape: StepShape
    inputs: Tensor
    fields: SimpleNamespace
    graph: torch.cuda.CUDAGraph | None = None
    hidden: Tensor | None = None
    logits: Tensor | None = None
    special: list[int] = field(default_factory=list)
    """Rows of its last step that want more than a plain draw."""


class GraphStepInFlight(StepInFlight):
    """A launched step on its way back."""

    def __init__(
        self, chunks: Sequence[Chunk], sampled_chunks: Sequence[Chunk], out: Tensor, done: torch.cuda.Event
    ) -> None:
        super().__init__(chunks)
        self._sampled_chunks, self._out, self._done = sampled_chunks, out, done
        self.special: list[tuple[list[Chunk], SamplerOutput]] = []
        self.scored: list[tuple[Chunk, Tensor]] = []

    def land(self) -> None:
        self._done.synchronize()
        n = len(self._sampled_chunks)
        tokens = self._out[0, :n].tolist()
        logprobs = self._out[1, :n].view(torch.float64).tolist()
        for chunk, token, logprob in zip(self._sampled_chunks, tokens, logprobs, strict=True):
            chunk.sampled_token = SampledToken(token, logprob)
        for chunks, sampled in self.special:
            sampled.assign_to(chunks)
        for chunk, logprobs in self.scored:
            chunk.scores = logprobs.tolist()


class GraphRunner(Runner):
    """Captures one graph per step size at the start, and picks the smallest that fits."""

    def __init__(
        self, model: PreTrainedModel, head: LMHead, cache: PageCache,
        config: inference.EngineConfig, adapters: Adapters | None, deterministic: bool,
        background: BackgroundCompile | None, steps: int | None,
    ) -> None:  # fmt: skip
        device = model.device
        # Deterministic steps launch several graphs each; with none in flight they cannot take each other's buffers.
        self.depth = 0 if deterministic else DEPTH if config.in_flight is None else config.in_flight
        self._decoder = model.get_decoder()
        number_layers(self._decoder)
        self._head, self._cache, self._adapters = head, cache, adapters
        self._device, self._deterministic = device, deterministic
        self._runner_id = next(_runner_ids)
        _runners[self._runner_id] = self
        self._plan = CustomOpPlan(self._runner_id)
        self._background, self._steps = background, steps
        self._compile = config.compile is True or (background is not None and background.is_cached)
        self._stream = torch.cuda.Stream(device, priority=PRIORITY)
        self._table = torch.zeros(cache.slots + 1, cache.columns, dtype=torch.int32, device=device)
        self._last = torch.zeros(cache.slots + 1, dtype=torch.long, device=device)
        rows = max(2, cache.slots)  # code compiled for any number of tokens means two or more
        self._out = torch.zeros(2, rows, dtype=torch.long, device=device)
        sizes = [rows] if deterministic else decode_sizes(rows)
        self._decoding = [self._new_step(StepShape(n, 0, n)) for n in sizes]
        self._mixed = [self._new_step(StepShape(rows, n, rows)) for n in prefill_sizes(config.prefill_tokens)]
        most = max(step.shape.size for step in (*self._decoding, *self._mixed))
        ring = range(self.depth + 2)
        self._input_buffers = [torch.empty(most, dtype=torch.long, pin_memory=True) for _ in ring]
        self._output_buffers = [torch.empty(2, rows, dtype=torch.long, pin_memory=True) for _ in ring]
        self._buffer_index = 0
        self._current_step = self._decoding[0]

    def _new_step(self, shape: StepShape) -> CapturedStep:
        inputs = torch.zeros(shape.size, dtype=torch.long, device=self._device)
        return CapturedStep(shape, inputs, device_fields(inputs, shape.sizes))

    def context(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def close(self) -> None:
        """Let go of the graphs and their memory."""
        if self._background is not None:
            self._background.close()
        self._stream.synchronize()
        _runners.pop(self._runner_id, None)
        self._drop_graphs()

    def _drop_graphs(self) -> None:
        for step in (*self._mixed, *self._decoding):
            step.graph = step.hidden = step.logits = None
            step.special = []

    # -- compiled code ------------------------------------------------------------------------------------------------

    @property
    def is_compiling(self) -> bool:
        return self._background is not None and (self._background.is_compiling or self._background.is_ready)

    def should_use_compiled(self, busy_seconds: float, swaps: int) -> bool:
        if self._background is None or self._compile:
            return False
        remaining = None if self._steps is None or not swaps else max(0, self._steps - swaps)
        self._background.consider(busy_seconds, max(1, swaps), remaining)
        return self._background.is_ready

    def use_compiled(self) -> None:
        """Capture every graph anew, from compiled layers. Requests, their KV and the page table stay as they are."""
        self._stream.synchronize()
        self._drop_graphs()
        self._compile = True
        self.warm_up()

    # -- capturing ----------------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Compile once for all sizes, then capture each: the largest first, so that the others reuse its memory."""
        self._stream.wait_stream(torch.cuda.default_stream(self._device))
        if self._compile:
            compile_blocks(self._decoder)
        pool = torch.cuda.graph_pool_handle()
        for step in sorted((*self._mixed, *self._decoding), key=lambda s: -s.shape.size):
            padding = np.zeros(step.shape.size, np.int64)
            step.shape.fill(padding, [], {}, self._cache.columns, self._cache.scratch)
            step.inputs.copy_(torch.from_numpy(padding))
            self._compute_step(step)
            self._stream.synchronize()
            step.graph = torch.cuda.CUDAGraph()
            # Not `torch.cuda.graph`: it waits for the whole device and empties its cache, a trainer's included.
            step.graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            self._compute_step(step)
            step.graph.capture_end()
        self._stream.synchronize()
        if self._compile and self._background is not None:
            self._background.write_marker()
            self._background.mark_switched()

    def _compute_step(self, step: CapturedStep) -> None:
        """The work of one graph, from the step's integers to its sampled tokens."""
        f = step.fields
        self._current_step = step
        self._table.view(-1).index_copy_(0, f.places, f.pages.int())
        if self._adapters is not None:
            self._adapters.route(f.adapters)
        ids = torch.where(f.ids >= 0, f.ids, self._last[f.slots])
        step.hidden = hidden_states(self._decoder, ids, f.positions, self._plan)
        step.logits = self._head.native_logits(step.hidden if not step.shape.prefill_tokens else step.hidden[f.rows])
        tokens, logprobs = self._out[0], self._out[1].view(torch.float64)
        sample_into(step.logits, f.temperatures, f.keys, f.indices, f.targets, tokens, logprobs, self._last)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        shape, f = self._current_step.shape, self._current_step.fields
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        attention.store(k, v, keys, values, self._table, f.slots, f.positions)
        n = shape.rows
        splits = num_splits(n * k.shape[1])
        attention.decode(q[:n], keys, values, self._table, f.slots, f.lengths, out, scale, window, splits)
        if shape.prefill_tokens:
            attention.prefill(q, keys, values, self._table, f.tiles, f.chunks, out, scale, window, TILE_ROWS)
        return out

    # -- launching ----------------------------------------------------------------------------------------------------

    def launch(self, chunks: Sequence[Chunk]) -> GraphStepInFlight:
        if not self._deterministic:
            return self._launch(chunks)
        # Each prompt alone and decoding at one size, so that a token's bits do not depend on its neighbours.
        for chunk in chunks:
            if chunk.length > 1:
                self._launch([chunk]).land()
        singles = [c for c in chunks if c.length == 1]
        if singles:
            return self._launch(singles, chunks)
        return GraphStepInFlight(chunks, [], self._output_buffers[0], self._stream.record_event())

    def _launch(self, chunks: Sequence[Chunk], land: Sequence[Chunk] | None = None) -> GraphStepInFlight:
        order = chunks if is_decode_only(chunks) else sorted(chunks, key=lambda c: (c.length > 1, not c.samples_token))
        step = self._pick_step(order)
        # The last step in these buffers has landed.
        self._buffer_index = (self._buffer_index + 1) % len(self._input_buffers)
        sent, back = self._input_buffers[self._buffer_index], self._output_buffers[self._buffer_index]
        changed = self._table_changes(step.shape.table_updates)
        sampled_chunks = step.shape.fill(sent.numpy(), order, changed, self._cache.columns, self._cache.scratch)
        step.inputs.copy_(sent[: step.shape.size], non_blocking=True)
        assert step.graph is not None
        step.graph.replay()
        done = torch.cuda.Event()
        flight = GraphStepInFlight(chunks if land is None else land, sampled_chunks, back, done)
        if not step.shape.same_sequences:
            step.special = [row for row, chunk in enumerate(sampled_chunks) if needs_full_sampler(chunk)]
            self._score(step, order, flight)
        if step.special:
            self._sample_special(step, sampled_chunks, flight)
        back.copy_(self._out, non_blocking=True)
        done.record(self._stream)
        return flight

    def _pick_step(self, chunks: Sequence[Chunk]) -> CapturedStep:
        lengths = [c.length for c in chunks]
        if extra := sum(lengths) - lengths.count(1):
            return next(step for step in self._mixed if step.shape.prefill_tokens >= extra)
        return next(step for step in self._decoding if step.shape.rows >= len(chunks))

    def _table_changes(self, room: int) -> dict[tuple[int, int], int]:
        """Changes of the page table; when they are many, the whole table is sent at once instead."""
        changed, self._cache.table_changes = self._cache.table_changes, {}
        if len(changed) <= room:
            return changed
        self._table.copy_(torch.from_numpy(self._cache.table).pin_memory(), non_blocking=True)
        return {}

    def _sample_special(self, step: CapturedStep, sampled_chunks: Sequence[Chunk], flight: GraphStepInFlight) -> None:
        """Rows that want more than a plain draw are drawn again, over the graph's token."""
        assert step.logits is not None
        chunks = [sampled_chunks[row] for row in step.special]
        logits = step.logits[torch.tensor(step.special, device=self._device)].float()
        column = tensor_factory(self._device)
        metadata = SamplingMetadata.from_chunks(chunks, column).for_step(chunks, logits.shape[-1], column)
        sampled = sample(logits, metadata)
        self._last[torch.tensor([c.sequence.slot for c in chunks], device=self._device)] = sampled.tokens
        flight.special.append((chunks, sampled))

    def _score(self, step: CapturedStep, chunks: Sequence[Chunk], flight: GraphStepInFlight) -> None:
        row, at = 0, step.shape.rows
        for chunk in chunks:
            begin = row if chunk.length == 1 else at
            row, at = (row + 1, at) if chunk.length == 1 else (row, at + chunk.length)
            if chunk.sequence.scores is None:
                continue
            assert step.hidden is not None
            flight.scored.append((chunk, score(self._head, step.hidden[begin:], chunk)))


def needs_full_sampler(chunk: Chunk) -> bool:
    request = chunk.sequence.request
    return bool(request.top_p < 1 or request.top_k or request.top_logprobs or chunk.sequence.matcher is not None)


def decode_sizes(most: int) -> list[int]:
    """Batch sizes worth a graph of their own: doubling, then in steps of 32 and of 64."""
    sizes = [n for n in (2, 4, 8, 16, 24, 32, 48) if n < most]
    sizes += [n for n in (*range(64, 257, 32), *range(320, most, 64)) if n < most]
    return [*sizes, most]


def prefill_sizes(most: int) -> list[int]:
    """Amounts of prompt tokens in a mixed step: doubling up to the prefill budget."""
    sizes = [SMALLEST_PREFILL]
    while sizes[-1] < most:
        sizes.append(sizes[-1] * 2)
    return sizes


def num_splits(programs: int) -> int:
    """Pieces a row's keys are cut into when there are too few rows to fill the device."""
    splits = 1
    while splits < MOST_SPLITS and programs * splits < PROGRAMS:
        splits *= 2
    return splits
