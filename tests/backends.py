"""The engine under law: torch's, or MLX's where the environment says `PACELINE_BACKEND=mlx`.

The laws are the same and so is their oracle, a model in torch. What differs is here: how an engine is made of that
model, and how a test reaches the few parts it holds in its own hands.
"""

import functools
import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from paceline.engine.cpu import sampler as torch_sampler
from paceline.engine.cpu.kv_cache import SlotCache as TorchSlotCache
from paceline.engine.cpu.sampler import uniform as torch_uniform
from paceline.engine.runner import SamplerOutput, SamplingMetadata
from paceline.model.support import CacheShape

MLX = os.environ.get("PACELINE_BACKEND", "torch") == "mlx"
BITS = 1e-5 if MLX else 0.0
"""How far the same formula may be off where the oracle is torch's own function."""


def torch_only(why: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(MLX, reason=why)


PAGES = torch_only("pages are torch's: MLX keeps slots")


def paged(config: dict, **how: Any) -> Any:
    """A case with these engine settings."""
    return pytest.param(config, marks=[PAGES] if config.get("cache") == "pages" else [], **how)


if MLX:
    import mlx.core as mx
    import numpy as np

    from mlx_models import as_mlx
    from paceline.engine.engine import DecodingEngine
    from paceline.engine.mlx import engine as served
    from paceline.engine.mlx import sampler
    from paceline.engine.mlx.engine import MlxEngine
    from paceline.engine.mlx.kv_cache import KVShape, MlxSlotCache
    from paceline.weights.mlx_arrays import as_array
    from paceline.weights.update import uniform_array

    def engine_of(model: PreTrainedModel, config: Any, **settings: Any) -> DecodingEngine:
        return MlxEngine(as_mlx(model), config, **settings)

    class SlotCache(MlxSlotCache):
        """Slots of MLX that a test reads and writes with tensors."""

        def __init__(
            self, shape: CacheShape, slots: int, length: int, most: int, dtype: torch.dtype, device: str,
            deterministic: bool = False,
        ) -> None:  # fmt: skip
            kind = getattr(mx, str(dtype).removeprefix("torch."))
            layer = shape.attention[0]
            same = KVShape(len(shape.attention), layer.kv_heads, layer.key_dim, layer.value_dim, kind)
            super().__init__(same, slots, length, most, deterministic)

        def write(self, layer, slots, positions, keys, values) -> None:
            if not isinstance(keys, torch.Tensor):
                return super().write(layer, slots, positions, keys, values)
            where = [as_array(index)[:, None] for index in (slots, positions)]
            super().write(layer, *where, as_array(keys)[:, :, None], as_array(values)[:, :, None])
            mx.eval(self.arrays)

        def read(self, layer: int, slots: slice, width: int) -> tuple[torch.Tensor, torch.Tensor]:
            """As torch's slots give it: [slots, position, kv head, dim]."""
            rows = (store[layer][slots, :, :width] for store in (self.keys, self.values))
            keys, values = (torch.from_numpy(np.array(row.transpose(0, 2, 1, 3))) for row in rows)
            return keys, values

    def held_bytes(cache: Any) -> int:
        return sum(array.nbytes for array in cache.arrays)

    def interfere(monkeypatch: pytest.MonkeyPatch, copy_one: Callable) -> None:
        put, numbers = served.replace_layer, itertools.count()
        monkeypatch.setattr(
            served,
            "replace_layer",
            lambda net, name, array: copy_one(next(numbers), functools.partial(put, net, name), array),
        )

    def _numpy(draw: SamplingMetadata) -> SamplingMetadata:
        fields = {name: getattr(draw, name) for name in SamplingMetadata.__dataclass_fields__}
        return SamplingMetadata(**{n: v.numpy() if isinstance(v, torch.Tensor) else v for n, v in fields.items()})

    def _torch(array: mx.array | None) -> torch.Tensor | None:
        return None if array is None else torch.from_numpy(np.array(array))

    def sample(logits: torch.Tensor, draw: SamplingMetadata) -> SamplerOutput:
        got = sampler.sample(as_array(logits), _numpy(draw))
        top = None if got.top is None else (_torch(got.top[0]), _torch(got.top[1]))
        return SamplerOutput(_torch(got.tokens).long(), _torch(got.logprobs), _torch(got.log_z), top)

    def apply_top_k_top_p(probs: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
        ranks = sampler._top_k_limits(top_k.numpy(), probs.shape[-1])
        return _torch(sampler.apply_top_k_top_p(as_array(probs), as_array(top_p), ranks))

    def inverse_cdf(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        return _torch(sampler.inverse_cdf(as_array(probs), u.numpy()))

    def uniform(keys: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(uniform_array(keys.numpy(), indices.numpy()))

else:
    from paceline.engine import EmbeddedEngine as engine_of  # noqa: F401

    SlotCache = TorchSlotCache
    sample, apply_top_k_top_p, inverse_cdf = (
        torch_sampler.sample,
        torch_sampler.apply_top_k_top_p,
        torch_sampler.inverse_cdf,
    )
    uniform = torch_uniform

    def held_bytes(cache: Any) -> int:
        parts = (tensor.untyped_storage() for tensor in (*cache.keys.values(), *cache.values.values()))
        return sum({part.data_ptr(): part.nbytes() for part in parts}.values())

    def interfere(monkeypatch: pytest.MonkeyPatch, copy_one: Callable) -> None:
        """Let `copy_one(number, put, tensor)` stand for what an engine does with each tensor of an update."""

        def copied(mine: list[torch.Tensor], sent: list[torch.Tensor], non_blocking: bool = False) -> None:
            for number, (a, b) in enumerate(zip(mine, sent, strict=True)):
                copy_one(number, a.copy_, b)

        monkeypatch.setattr(torch, "_foreach_copy_", copied)
