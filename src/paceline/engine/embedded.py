"""The engine that runs in this process, with torch: on a CPU or a GPU."""

from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paceline.config import inference
from paceline.engine.base import Grammar
from paceline.engine.catalog import POLICY, Catalog
from paceline.engine.engine import DecodingEngine
from paceline.engine.pages import PAGE, PageCache
from paceline.engine.parts import EngineParts
from paceline.engine.runner import EagerRunner
from paceline.engine.scheduler import Scheduler
from paceline.engine.sequence import Guide
from paceline.engine.served_weights import ServedWeights
from paceline.engine.slots import SlotCache
from paceline.model import LMHead, set_cpu_threads
from paceline.model.adapters import Adapters
from paceline.model.adapters import install as install_adapters
from paceline.model.background_compile import BackgroundCompile
from paceline.model.native.layers import install as install_native
from paceline.model.support import AttentionShape, attention_shape

FIRST_CACHE_LENGTH = 256
CPU_PAGES_BYTES = 1 << 30
FREE_MEMORY_SHARE = 0.5
"""Part of the GPU's free memory that the KV cache takes when the run file names no size."""


def build(
    model: PreTrainedModel,
    config: inference.EngineConfig,
    deterministic: bool,
    fp32_head: bool,
    version: int,
    lora_targets: list[str] | str,
    background: BackgroundCompile | None = None,
    steps: int | None = None,
) -> EngineParts:
    head = LMHead(model, fp32_head)
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 20
    max_context = min(config.max_context or limit, limit)
    shape = attention_shape(model)
    adapters = _adapters(model, config, lora_targets)
    native = install_native(model, config.products)
    catalog = Catalog()
    catalog.versions[POLICY] = version
    if model.device.type == "cuda":
        from paceline.engine.cuda.graphs import GraphRunner
        from paceline.engine.cuda.memory import LentMemory

        memory = LentMemory(model.device)
        pages = _pages(config, shape, model.dtype, max_context, torch.cuda.mem_get_info(model.device)[0])
        cache = PageCache(shape, config.max_running, pages, max_context, model.dtype, memory, steady=deterministic)
        runner = GraphRunner(model, head, cache, shape, config, adapters, deterministic, background, steps)
    elif config.cache == "pages":
        pages = _pages(config, shape, model.dtype, max_context, CPU_PAGES_BYTES)
        memory = PlainMemory(model.device)
        cache = PageCache(shape, config.max_running, pages, max_context, model.dtype, memory, steady=deterministic)
        runner = EagerRunner(model, head, cache, deterministic, adapters, config.in_flight or 0)
    else:
        first = max_context if deterministic else min(FIRST_CACHE_LENGTH, max_context)
        cache = SlotCache(
            shape, config.max_running, first, max_context, model.dtype, str(model.device), steady=deterministic
        )
        runner = EagerRunner(model, head, cache, deterministic, adapters, config.in_flight or 0)
    return EngineParts(
        cache=cache,
        scheduler=Scheduler(cache, config.prefill_tokens, deterministic, catalog),
        runner=runner,
        served=ServedWeights(model, head, adapters, catalog, native),
        catalog=catalog,
        max_context=max_context,
        vocabulary=model.config.get_text_config().vocab_size,
    )


def _adapters(model: PreTrainedModel, config: inference.EngineConfig, targets: list[str] | str) -> Adapters | None:
    if not config.adapters:
        return None
    # Captured steps round both numbers up, the second to a power of two from 128 on.
    most = max(2, config.max_running) + 2 * max(config.prefill_tokens, 128)
    return install_adapters(model, targets, config.adapters, config.adapter_rank, most)


def _pages(
    config: inference.EngineConfig, shape: AttentionShape, dtype: torch.dtype, max_context: int, free_bytes: int
) -> int:
    """As many pages as the budget holds, but no more than all requests could ever fill."""
    page_bytes = 2 * shape.layers * shape.kv_heads * shape.head_dim * PAGE * dtype.itemsize
    budget = config.cache_gib * 2**30 if config.cache_gib else FREE_MEMORY_SHARE * free_bytes
    return max(2, min(int(budget // page_bytes), config.max_running * -(-max_context // PAGE)))


class PlainMemory:
    """Pages as an ordinary tensor."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pages: Tensor | None = None

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        self._pages = torch.zeros(shape, dtype=dtype, device=self._device)
        return self._pages

    def sleep(self) -> None:
        """Shrink the tensor to nothing in place, so that its holders need not be told."""
        assert self._pages is not None
        self._size = self._pages.untyped_storage().size()
        self._pages.untyped_storage().resize_(0)

    def wake(self) -> None:
        assert self._pages is not None
        self._pages.untyped_storage().resize_(self._size)
        self._pages.zero_()


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
        grammars: Callable[[Grammar], Guide] | None = None,
        background: BackgroundCompile | None = None,
        steps: int | None = None,
    ) -> None:
        """`background` makes compiled code beside the engine where `compile` is "auto"; without it `auto` stays
        uncompiled. `steps` is how many weight updates are to come, where that is known."""
        parts = build(model, config, deterministic, fp32_head, version, lora_targets, background, steps)
        super().__init__(parts, config, grammars)
        self._threads = config.threads if model.device.type == "cpu" else None

    @contextmanager
    def _place(self) -> Generator[None]:
        if self._threads:
            set_cpu_threads(self._threads)
        with torch.inference_mode(), self._runner.place():
            yield
