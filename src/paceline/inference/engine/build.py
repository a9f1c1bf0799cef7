"""Puts an engine together: the cache and the runner that suit the device."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paceline.config import inference
from paceline.inference.engine.catalog import POLICY, Catalog
from paceline.inference.engine.pages import PAGE, PageCache
from paceline.inference.engine.parts import Parts
from paceline.inference.engine.runner import EagerRunner
from paceline.inference.engine.scheduler import Scheduler
from paceline.inference.engine.served import Served
from paceline.inference.engine.slots import SlotCache
from paceline.model import Head
from paceline.model.adapters import Adapters
from paceline.model.adapters import install as install_adapters
from paceline.model.background_compile import BackgroundCompile
from paceline.model.native.layers import install as install_native
from paceline.model.shape import AttentionShape, attention_shape

FIRST_CACHE_LENGTH = 256
CPU_PAGES_BYTES = 1 << 30
FREE_MEMORY_SHARE = 0.5
"""Part of the GPU's free memory that the KV cache takes when the run file names no size."""


def build(
    model: PreTrainedModel,
    config: inference.Engine,
    deterministic: bool,
    fp32_head: bool,
    version: int,
    lora_targets: list[str] | str,
    background: BackgroundCompile | None = None,
    steps: int | None = None,
) -> Parts:
    head = Head(model, fp32_head)
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 20
    max_context = min(config.max_context or limit, limit)
    shape = attention_shape(model)
    adapters = _adapters(model, config, lora_targets)
    native = install_native(model, config.products)
    catalog = Catalog()
    catalog.versions[POLICY] = version
    if model.device.type == "cuda":
        from paceline.inference.engine.cuda.graphs import GraphRunner
        from paceline.inference.engine.cuda.memory import LentMemory

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
    return Parts(
        cache=cache,
        scheduler=Scheduler(cache, config.prefill_tokens, deterministic, catalog),
        runner=runner,
        served=Served(model, head, adapters, catalog, native),
        catalog=catalog,
        max_context=max_context,
        vocabulary=model.config.get_text_config().vocab_size,
    )


def _adapters(model: PreTrainedModel, config: inference.Engine, targets: list[str] | str) -> Adapters | None:
    if not config.adapters:
        return None
    # Captured steps round both numbers up, the second to a power of two from 128 on.
    most = max(2, config.max_running) + 2 * max(config.prefill_tokens, 128)
    return install_adapters(model, targets, config.adapters, config.adapter_rank, most)


def _pages(
    config: inference.Engine, shape: AttentionShape, dtype: torch.dtype, max_context: int, free_bytes: int
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
        """The tensor shrinks to nothing in place, so whoever holds it needs no telling."""
        assert self._pages is not None
        self._size = self._pages.untyped_storage().size()
        self._pages.untyped_storage().resize_(0)

    def wake(self) -> None:
        assert self._pages is not None
        self._pages.untyped_storage().resize_(self._size)
        self._pages.zero_()
