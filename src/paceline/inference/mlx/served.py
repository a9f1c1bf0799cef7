"""The weights an engine holds in MLX: the base and its adapters, replaced, and proved to be what was sent."""

from collections.abc import Mapping

import mlx.core as mx

from paceline.inference.base import OtherBase
from paceline.inference.engine.catalog import Catalog
from paceline.inference.engine.holding import HeldWeights
from paceline.inference.engine.parts import Arrived
from paceline.inference.mlx.adapters import MlxAdapters
from paceline.inference.mlx.sampler import token_logprobs
from paceline.model.mlx.arrays import as_array, settled
from paceline.model.mlx.loading import MlxModel
from paceline.model.mlx.lora import put
from paceline.model.song import rounding
from paceline.model.weights import Array, WeightUpdate


class MlxServed(HeldWeights):
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

    def read(self, update: WeightUpdate, check: bool = True, mark: None = None) -> Arrived:
        """All that can be done while decoding goes on, on any thread: read it, look whether it fits and is whole."""
        return self._read(update, check)

    def _at_hand(self, tensors: Mapping[str, Array]) -> dict[str, mx.array]:
        return settled({name: as_array(tensor) for name, tensor in tensors.items()})

    def _copy(self, tensors: Mapping[str, mx.array]) -> None:
        for name, array in tensors.items():
            replace_parameter(self._model, name, array)

    def _read_delta(self, update: WeightUpdate, check: bool) -> Arrived:
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
