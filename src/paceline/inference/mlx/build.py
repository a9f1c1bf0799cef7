"""Puts an engine on MLX together."""

import mlx.core as mx

from paceline.config import inference
from paceline.inference.base import EngineError
from paceline.inference.engine.catalog import POLICY, Catalog
from paceline.inference.engine.parts import Parts
from paceline.inference.engine.scheduler import Scheduler
from paceline.inference.mlx.adapters import install
from paceline.inference.mlx.runner import MlxRunner
from paceline.inference.mlx.served import MlxServed
from paceline.inference.mlx.slots import MlxSlots
from paceline.inference.mlx.step import key_shape
from paceline.model.mlx.loading import MlxModel, twin

FIRST_CACHE_LENGTH = 256


def build(
    model: MlxModel, config: inference.Engine, deterministic: bool, version: int, lora_targets: list[str] | str
) -> Parts:
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
    return Parts(
        cache=cache,
        scheduler=Scheduler(cache, config.prefill_tokens, deterministic, catalog),
        runner=MlxRunner(model, cache, deterministic, adapters, config.in_flight or 0),
        served=MlxServed(model, adapters, catalog),
        catalog=catalog,
        max_context=max_context,
        vocabulary=model.vocabulary,
    )
