"""The weights an engine holds in torch: the base and its adapters, changed in place, and proved to be what was sent."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paceline.engine.catalog import BASE, Catalog
from paceline.engine.parts import StagedUpdate
from paceline.engine.weight_applier import WeightApplier
from paceline.errors import EngineError, Mismatch, OtherBase
from paceline.model import LMHead, WeightUpdate, fingerprint
from paceline.model.adapters import Adapters
from paceline.model.canary import CanaryScorer, sequence_logprobs
from paceline.model.canary_prompts import canary_ids, rounding
from paceline.model.native.layers import Native
from paceline.weights.delta import DeltaError, WeightDelta

PINNED_BYTES = 16 << 30
"""Of one update that lies in the host's memory and goes to a GPU: what is copied to where the GPU fetches it at full
speed. What is beyond waits where it is, and lengthens the pause."""


def at_hand(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The same tensors, nothing of them to be read from a file any more. A second copy of the weights is never made on
    the device; on the host it is, and only for a GPU."""
    ready: dict[str, Tensor] = {}
    left = PINNED_BYTES
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        slow = device.type == "cuda" and tensor.device.type == "cpu" and not tensor.is_pinned()
        if slow and tensor.nbytes <= left:
            tensor = tensor.pin_memory(device)
            left -= tensor.nbytes
        ready[name] = tensor
    return ready


def proved(parameters: Mapping[str, Tensor], update: WeightUpdate, catalog: Catalog) -> str:
    """The fingerprint the weights will have once the update's delta is written to them. Nothing is changed yet.

    The base is proved before: by the mark it was proved with when it came, or else by looking at all of it. What the
    changed elements make of that mark is the new one, and must be the sender's.
    """
    delta = update.delta
    assert delta is not None
    try:
        _check_base(parameters, delta, catalog)
        sent = delta.moved(parameters)
        if {sent} != {sent, update.expected or sent, delta.result.fingerprint}:
            raise Mismatch(
                f"the delta to version {update.version} is damaged: it leads to weights {sent}, not to "
                f"{update.expected or delta.result.fingerprint}"
            )
    except DeltaError as error:
        raise EngineError(str(error)) from error
    return sent


def _check_base(parameters: Mapping[str, Tensor], delta: WeightDelta, catalog: Catalog) -> None:
    version, base = catalog.versions[BASE], delta.base
    held = None
    if version == base.version:
        whole = delta.entries.keys() == parameters.keys()
        held = catalog.weights[BASE].get(version) if whole else None
        held = held or fingerprint((name, parameters[name]) for name in delta.entries)
    if held != base.fingerprint:
        raise OtherBase(
            f"the delta builds on version {base.version} ({base.fingerprint}), and this engine holds version {version}"
            f"{f' ({held})' if held else ''}: send all weights"
        )


class ServedWeights(WeightApplier):
    """The base and the adapters beside it."""

    def __init__(
        self, model: PreTrainedModel, head: LMHead, adapters: Adapters | None, catalog: Catalog, native: Native
    ) -> None:
        super().__init__(adapters, catalog, head.vocabulary)
        self._model = model
        self._head = head
        self._adapters = adapters
        self._native = native
        self._songbook = CanaryScorer(model, head)
        self._parameters = dict(model.named_parameters())
        self.bytes = sum(tensor.numel() * tensor.element_size() for tensor in self._parameters.values())

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        return self._parameters

    @property
    def rounding(self) -> float:
        return rounding(self._model.dtype)

    def warm(self) -> None:
        """Do once what an update does, so that no running request waits for a kernel to be loaded."""
        if self._model.device.type != "cuda":
            return
        self.policy()
        if self._adapters is None:
            self._songbook.logprobs(canary_ids(self._head))
        elif self._adapters.slots == len(self._free):
            halves = {"lora_A": lambda layer: (1, layer.in_features), "lora_B": lambda layer: (layer.out_features, 1)}
            zeros = {
                f"{name}.{half}.weight": layer.weight.new_zeros(shape(layer))
                for name, layer in self._adapters.layers.items()
                for half, shape in halves.items()
            }
            fingerprint(self._adapters.fitted(zeros).items())
            self._adapters.load(1, zeros, 1.0)
            fingerprint(self._adapters.tensors(1).items())
            self._adapters.clear(1)

    def mark(self) -> "torch.cuda.Event | None":
        """How far the sender's work on the GPU has come."""
        if self._model.device.type != "cuda":
            return None
        mark = torch.cuda.Event()
        mark.record(torch.cuda.current_stream(self._model.device))
        return mark

    def read(self, update: WeightUpdate, check: bool = True, mark: "torch.cuda.Event | None" = None) -> StagedUpdate:
        """All that can be done while decoding goes on, on any thread: read it, look whether it fits and is whole."""
        with torch.no_grad(), nullcontext() if mark is None else torch.cuda.device(self._model.device):
            if mark is None:
                return self._read(update, check)
            mark.wait()  # bounded: orders two CUDA streams, the host goes on
            arrived = self._read(update, check)
            mark.record(torch.cuda.current_stream(self._model.device))  # what was left to the GPU comes before use
            return replace(arrived, ready=mark)

    def _at_hand(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return at_hand(tensors, self._model.device)

    def _read_delta(self, update: WeightUpdate, check: bool) -> StagedUpdate:
        assert update.delta is not None
        try:
            update.delta.check_fit(self._parameters)
            update.delta.changes(self._model.device)
        except DeltaError as error:
            raise EngineError(str(error)) from error
        return StagedUpdate(update, {}, check=check)

    def apply(self, arrived: StagedUpdate) -> str | None:
        if arrived.ready is not None:
            arrived.ready.wait()  # bounded: orders two CUDA streams, the host goes on
        return super().apply(arrived)

    def _copy(self, tensors: Mapping[str, Tensor]) -> None:
        mine: list[Tensor] = [self._parameters[name] for name in tensors]
        torch._foreach_copy_(mine, list(tensors.values()), non_blocking=True)
        self._native.refresh()

    def _apply_delta(self, update: WeightUpdate, check: bool) -> str | None:
        assert update.delta is not None
        self._check_whole()
        sent = proved(self._parameters, update, self._catalog)
        with self._writing(update):
            update.delta.write(self._parameters)
            self._native.refresh()
        return sent if check else None

    def logprobs(self, token_ids: tuple[int, ...], model: str) -> list[float]:
        if self._adapters is not None:
            slots = torch.full((len(token_ids),), self._catalog.slots[model], device=self._model.device)
            self._adapters.route(slots)
            with torch.compiler.set_stance("force_eager"):
                return sequence_logprobs(self._model, self._head, token_ids)
        return self._songbook.logprobs(token_ids)
