"""The engine that runs in this process, with torch: on a CPU or a GPU."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paceline.config import inference
from paceline.engine.base import Grammar
from paceline.engine.cpu.kv_cache import SlotCache, TensorMemory
from paceline.engine.cpu.native import NativeLinear
from paceline.engine.cpu.native import install as install_native
from paceline.engine.cpu.runner import EagerRunner
from paceline.engine.engine import DecodingEngine
from paceline.engine.pages import PAGE, PageCache, PageMemory
from paceline.engine.sequence import GrammarMatcher
from paceline.engine.weight_applier import StagedUpdate, WeightApplier
from paceline.errors import DeltaBaseMismatch, EngineError, Mismatch
from paceline.model import LMHead, set_cpu_threads
from paceline.model.adapters import Adapters, install
from paceline.model.background_compile import BackgroundCompile
from paceline.model.head import CanaryScorer, sequence_logprobs
from paceline.model.support import cache_shape, check_cuda_engine, compute_experts_alone
from paceline.weights.delta import WeightDelta
from paceline.weights.update import BASE_MODEL, WeightUpdate, canary_ids, fingerprint

FIRST_CACHE_LENGTH = 256
CPU_PAGES_BYTES = 1 << 30
FREE_MEMORY_SHARE = 0.5
"""Part of the GPU's free memory that the KV cache takes when the run file names no size."""
PINNED_BYTES = 16 << 30
"""Of one update that lies in the host's memory and goes to a GPU: what is copied to where the GPU fetches it at full
speed. What is beyond waits where it is, and lengthens the pause."""


class EmbeddedEngine(DecodingEngine):
    """Serves a Hugging Face model from this process."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: inference.EngineConfig,
        *,
        deterministic: bool = False,
        fp32_head: bool = False,
        version: int = 0,
        lora_targets: list[str] | str = "all-linear",
        grammars: Callable[[Grammar], GrammarMatcher] | None = None,
        background: BackgroundCompile | None = None,
        steps: int | None = None,
    ) -> None:
        """`background` makes compiled code beside the engine where `compile` is "auto"; without it `auto` stays
        uncompiled. `steps` is how many weight updates are to come, where that is known."""
        head, text, device = LMHead(model, fp32_head), model.config.get_text_config(), model.device
        if deterministic:
            compute_experts_alone(model)
        limit = getattr(text, "max_position_embeddings", None) or 1 << 20
        max_context = min(config.max_context or limit, limit)
        shape, adapters = cache_shape(model), None
        if config.adapters:
            # Captured steps round both numbers up, the second to a power of two from 128 on.
            most = max(2, config.max_running) + 2 * max(config.prefill_tokens, 128)
            adapters = install(model, lora_targets, config.adapters, config.adapter_rank, most)
        native = install_native(model, config.products)  # how exactly a CPU multiplies

        def paged(memory: PageMemory, free_bytes: int) -> PageCache:
            """As many pages as the budget holds, but no more than all requests could ever fill."""
            page_bytes = sum(layer.numbers for layer in shape.attention.values()) * PAGE * model.dtype.itemsize
            budget = config.cache_gib * 2**30 if config.cache_gib else FREE_MEMORY_SHARE * free_bytes
            pages = max(2, min(int(budget // page_bytes), config.max_running * -(-max_context // PAGE)))
            return PageCache(
                shape.attention, config.max_running, pages, max_context, model.dtype, memory, deterministic
            )

        if device.type == "cuda":
            from paceline.engine.cuda.kv_cache import CudaVirtualMemory
            from paceline.engine.cuda.runner import GraphRunner

            check_cuda_engine(model, shape)
            cache = paged(CudaVirtualMemory(device), torch.cuda.mem_get_info(device)[0])
            runner = GraphRunner(model, head, cache, config, adapters, deterministic, background, steps)
        else:
            if config.cache == "pages":
                if shape.states:
                    raise EngineError(f'{type(model).__name__} keeps states: set engine.cache = "slots", not "pages"')
                cache = paged(TensorMemory(device), CPU_PAGES_BYTES)
            else:
                first = max_context if deterministic else min(FIRST_CACHE_LENGTH, max_context)
                slots = config.max_running
                cache = SlotCache(shape, slots, first, max_context, model.dtype, str(device), deterministic)
            runner = EagerRunner(model, head, cache, deterministic, adapters, config.in_flight or 0)
        weights = TorchWeights(model, head, adapters, native, version)
        super().__init__(
            config, cache, runner, weights, max_context=max_context, vocabulary=text.vocab_size,
            deterministic=deterministic, grammars=grammars,
        )  # fmt: skip
        self._threads = config.threads if device.type == "cpu" else None

    @contextmanager
    def _context(self) -> Generator[None]:
        if self._threads:
            set_cpu_threads(self._threads)
        with torch.inference_mode(), self._runner.context():
            yield


class TorchWeights(WeightApplier):
    """The base and the adapters beside it, changed in place, and proved to be what was sent."""

    def __init__(
        self, model: PreTrainedModel, head: LMHead, adapters: Adapters | None, native: list[NativeLinear], version: int
    ) -> None:
        super().__init__(adapters, head.vocabulary, model.dtype, version)
        self._model, self._head, self._adapters, self._native_linears = model, head, adapters, native
        self._canary = CanaryScorer(model, head)
        self._parameters = dict(model.named_parameters())
        self.weight_bytes = sum(tensor.numel() * tensor.element_size() for tensor in self._parameters.values())

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        return self._parameters

    def warm_up(self) -> None:
        """Do once what an update does, so that no running request waits for a kernel to be loaded."""
        if self._model.device.type != "cuda":
            return
        self.policy()
        if self._adapters is None:
            self._canary.logprobs(canary_ids(self._head.vocabulary))
        elif self._adapters.slots == len(self._free):
            zeros = {}
            for name, layer in self._adapters.layers.items():
                zeros[f"{name}.lora_A.weight"] = layer.weight.new_zeros(1, layer.in_features)
                zeros[f"{name}.lora_B.weight"] = layer.weight.new_zeros(layer.out_features, 1)
            fingerprint(self._adapters.fit_to_slot(zeros).items())
            self._adapters.load(1, zeros, 1.0)
            fingerprint(self._adapters.tensors(1).items())
            self._adapters.clear(1)

    def record_cuda_event(self) -> "torch.cuda.Event | None":
        """How far the sender's work on the GPU has come."""
        if self._model.device.type != "cuda":
            return None
        return torch.cuda.current_stream(self._model.device).record_event()

    def stage(
        self, update: WeightUpdate, check: bool = True, source_event: "torch.cuda.Event | None" = None
    ) -> StagedUpdate:
        with torch.no_grad(), nullcontext() if source_event is None else torch.cuda.device(self._model.device):
            if source_event is None:
                return super().stage(update, check)
            source_event.wait()  # bounded: orders two CUDA streams, the host goes on
            staged = super().stage(update, check)
            # What was left to the GPU comes before use.
            source_event.record(torch.cuda.current_stream(self._model.device))
            return replace(staged, ready_event=source_event)

    def _stage(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Nothing is left to be read from a file. A second copy of the weights is never made on the device; on the host
        it is, and only for a GPU."""
        device, room = self._model.device, PINNED_BYTES
        ready: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            tensor = tensor.detach()
            slow = device.type == "cuda" and tensor.device.type == "cpu" and not tensor.is_pinned()
            if slow and tensor.nbytes <= room:
                tensor = tensor.pin_memory(device)
                room -= tensor.nbytes
            ready[name] = tensor
        return ready

    def _stage_delta(self, delta: WeightDelta) -> None:
        delta.check_fit(self._parameters)
        delta.changes(self._model.device)

    def apply(self, staged: StagedUpdate) -> str | None:
        if staged.ready_event is None:
            return super().apply(staged)
        staged.ready_event.wait()  # bounded: orders two CUDA streams, the host goes on
        sent = super().apply(staged)
        # The sender may write into its tensors again once this returns.
        torch.cuda.current_stream(self._model.device).synchronize()
        return sent

    def _copy_weights(self, tensors: Mapping[str, Tensor]) -> None:
        mine: list[Tensor] = [self._parameters[name] for name in tensors]
        torch._foreach_copy_(mine, list(tensors.values()), non_blocking=True)
        self._refresh()

    def _refresh(self) -> None:
        """Bring up to date what was made from the weights: float16 copies for CPU kernels."""
        for linear in self._native_linears:
            linear.refresh()

    def _apply_delta(self, update: WeightUpdate, check: bool) -> str | None:
        """The delta's base is proved before: by the fingerprint it was proved with when it came, or else by looking at
        all of it. What the changed elements make of that is the new fingerprint, and must be the sender's."""
        delta = update.delta
        assert delta is not None
        self._check_base(delta)
        sent = delta.result_fingerprint(self._parameters)
        if {sent} != {sent, update.expected or sent, delta.result.fingerprint}:
            raise Mismatch(
                f"the delta to version {update.version} is damaged: it leads to weights {sent}, not to "
                f"{update.expected or delta.result.fingerprint}"
            )
        with self._guard_write(update):
            delta.write(self._parameters)
            self._refresh()
        return sent if check else None

    def _check_base(self, delta: WeightDelta) -> None:
        version, base, held = self.served.versions[BASE_MODEL], delta.base, None
        if version == base.version:
            whole = delta.entries.keys() == self._parameters.keys()
            held = self.served.fingerprints[BASE_MODEL].get(version) if whole else None
            held = held or fingerprint((name, self._parameters[name]) for name in delta.entries)
        if held != base.fingerprint:
            raise DeltaBaseMismatch(
                f"the delta builds on version {base.version} ({base.fingerprint}), and this engine holds version "
                f"{version}{f' ({held})' if held else ''}: send all weights"
            )

    def logprobs(self, token_ids: tuple[int, ...], model: str) -> list[float]:
        if self._adapters is not None:
            slots = torch.full((len(token_ids),), self.served.adapter_slots[model], device=self._model.device)
            self._adapters.route(slots)
            with torch.compiler.set_stance("force_eager"):
                return sequence_logprobs(self._model, self._head, token_ids)
        return self._canary.logprobs(token_ids)
