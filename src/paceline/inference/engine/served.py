"""The weights an engine holds: the base and its adapters, changed in place, and proved to be what was sent."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paceline.inference.base import EngineError, Mismatch, OtherBase, Torn
from paceline.inference.engine.arrived import at_hand
from paceline.inference.engine.catalog import BASE, BROKEN, POLICY, Catalog
from paceline.inference.engine.parts import Arrived
from paceline.inference.engine.patch import proved
from paceline.model import Adapter, Canary, Head, Policy, WeightUpdate, fingerprint
from paceline.model.adapters import AdapterError, Adapters
from paceline.model.canary import Songbook, canary_ids, rounding, sequence_logprobs
from paceline.model.delta import DeltaError
from paceline.model.native.layers import Native


class Served:
    """The base and the adapters beside it; keeps the catalog true."""

    def __init__(
        self, model: PreTrainedModel, head: Head, adapters: Adapters | None, catalog: Catalog, native: Native
    ) -> None:
        self._model = model
        self._head = head
        self._adapters = adapters
        self._catalog = catalog
        self._native = native
        self._songbook = Songbook(model, head)
        self._parameters = dict(model.named_parameters())
        self.bytes = sum(tensor.numel() * tensor.element_size() for tensor in self._parameters.values())
        self._free = list(range(adapters.slots, 0, -1)) if adapters is not None else []
        self._torn: set[str] = set()
        """Parameters that an update which broke off may have changed."""

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

    def policy(self) -> Policy:
        """As it was read off the tensors that are really used, when they came; or is now, where nobody did."""
        version = self._catalog.versions[POLICY]
        mark = self._catalog.weights[POLICY].get(version)
        return Policy(version, mark or fingerprint(self._held(POLICY).items()))

    def mark(self) -> "torch.cuda.Event | None":
        """How far the sender's work on the GPU has come."""
        if self._model.device.type != "cuda":
            return None
        mark = torch.cuda.Event()
        mark.record(torch.cuda.current_stream(self._model.device))
        return mark

    def read(self, update: WeightUpdate, check: bool = True, mark: "torch.cuda.Event | None" = None) -> Arrived:
        """All that can be done while decoding goes on, on any thread: read it, look whether it fits and is whole."""
        with torch.no_grad(), nullcontext() if mark is None else torch.cuda.device(self._model.device):
            if mark is None:
                return self._read(update, check)
            mark.wait()  # bounded: orders two CUDA streams, the host goes on
            arrived = self._read(update, check)
            mark.record(torch.cuda.current_stream(self._model.device))  # what was left to the GPU comes before use
            return replace(arrived, ready=mark)

    def _read(self, update: WeightUpdate, check: bool) -> Arrived:
        if check and update.canary is not None:
            self._check_form(update.canary)
        if update.delta is not None:
            try:
                update.delta.check_fit(self._parameters)
                update.delta.changes(self._model.device)
            except DeltaError as error:
                raise EngineError(str(error)) from error
            return Arrived(update, {}, check=check)
        if update.adapter is not None:
            tensors = self._fit_adapter(update)
        else:
            self._check_fit(update.tensors)
            tensors = at_hand(update.tensors, self._model.device)
        sent = fingerprint(tensors.items()) if check else None
        if check and update.expected not in (None, sent):
            raise Mismatch(
                f"the weights of version {update.version} are damaged: their fingerprint is {sent}, not the "
                f"{update.expected} they were sent with"
            )
        return Arrived(update, tensors, sent, check)

    def apply(self, arrived: Arrived) -> str | None:
        """Copy the update in place; answers with its fingerprint, if it is to be checked. Refusals change nothing; what
        breaks off in the middle leaves weights that have no name, and is told as `Torn`."""
        update, sent = arrived.update, arrived.sent
        if arrived.ready is not None:
            arrived.ready.wait()  # bounded: orders two CUDA streams, the host goes on
        if update.delta is not None:
            sent = self._apply_delta(update, arrived.check)
        elif update.adapter is not None:
            self._apply_adapter(arrived, update.adapter)
        else:
            self._apply_base(arrived)
        self._catalog.renew(_touched(update), update.version)
        return sent

    @contextmanager
    def _writing(self, update: WeightUpdate) -> Generator[None]:
        """From the first element that is changed to the last."""
        try:
            yield
        except Exception as error:
            models = [model for model in _touched(update) if model in self._catalog.versions]
            self._catalog.renew(models, BROKEN)
            if update.adapter is None:
                self._torn |= set(update.names)
            raise Torn(
                f"the update to version {update.version} broke off ({type(error).__name__}: {error}), and this engine "
                "now holds neither the old weights nor the new: it answers nobody until it is sent all of them"
            ) from error
        if update.adapter is None:
            self._torn.clear()

    def verify(self, update: WeightUpdate, sent: str) -> None:
        """What is held now must be what was sent, and compute what the trainer computes."""
        name = POLICY if update.adapter is None else update.adapter.name
        held = {n: self._parameters[n] for n in update.names} if update.adapter is None else self._held(name)
        if fingerprint(held.items()) != sent:
            raise Mismatch(f"the engine does not hold the weights of version {update.version} it was sent")
        if update.canary is not None:
            self.check_canary(update.canary, name)
        self._note(update, sent)

    def _note(self, update: WeightUpdate, sent: str) -> None:
        """These weights are proved: whatever is sampled from now on names them."""
        if update.adapter is None and update.names != self._parameters.keys():
            sent = fingerprint(self._parameters.items())
        known = {update.version: sent}
        self._catalog.weights |= dict.fromkeys(_touched(update), known)
        if update.adapter is None and self._catalog.slots[POLICY]:
            self._catalog.weights[POLICY] = {update.version: fingerprint(self._held(POLICY).items())}

    def _check_fit(self, tensors: Mapping[str, Tensor]) -> None:
        if not tensors:
            raise EngineError("the update holds no tensors")
        unknown = tensors.keys() - self._parameters.keys()
        if unknown:
            raise EngineError(f"the update names tensors this model does not have: {sorted(unknown)[:3]}")
        for name, tensor in tensors.items():
            mine = self._parameters[name]
            if mine.shape != tensor.shape or mine.dtype != tensor.dtype:
                raise EngineError(f"`{name}` is {_form(tensor)} in the update, but {_form(mine)} in the model")

    def _apply_base(self, arrived: Arrived) -> None:
        if left := self._torn - arrived.tensors.keys():
            raise OtherBase(f"an update broke off here, and this one leaves {sorted(left)[:3]} as they are: send all")
        mine: list[Tensor] = [self._parameters[name] for name in arrived.tensors]
        with self._writing(arrived.update):
            torch._foreach_copy_(mine, list(arrived.tensors.values()), non_blocking=True)
            self._native.refresh()

    def _apply_delta(self, update: WeightUpdate, check: bool) -> str | None:
        assert update.delta is not None
        if self._torn:
            raise OtherBase(
                "an update broke off here, so nothing can build on what this engine holds: send all weights"
            )
        sent = proved(self._parameters, update, self._catalog)
        with self._writing(update):
            update.delta.write(self._parameters)
            self._native.refresh()
        return sent if check else None

    def _fit_adapter(self, update: WeightUpdate) -> dict[str, Tensor]:
        """The adapter as its slot would hold it; refuses what does not fit."""
        if self._adapters is None:
            raise EngineError("this engine has no adapter slots: set engine.adapters to 1 or more")
        try:
            return self._adapters.fitted(update.tensors)
        except AdapterError as error:
            raise EngineError(str(error)) from error

    def _apply_adapter(self, arrived: Arrived, adapter: Adapter) -> None:
        assert self._adapters is not None
        name, slots = adapter.name, self._catalog.slots
        if name == BASE:
            raise EngineError(f"`{BASE}` is the name of the plain base: give the adapter another")
        slot = slots.get(name, 0) or (self._free[-1] if self._free else 0)
        if not slot:
            raise EngineError(f"all adapter slots are taken by {sorted(self._catalog.adapters)}: raise engine.adapters")
        try:
            self._adapters.check_scale(adapter.scale)
        except AdapterError as error:
            raise EngineError(str(error)) from error
        with self._writing(arrived.update):
            self._adapters.load(slot, arrived.tensors, adapter.scale)
        if not slots.get(name):
            self._free.pop()
        slots[name] = slot

    def _check_form(self, canary: Canary) -> None:
        ids, most = canary.token_ids, self._head.vocabulary
        if len(ids) < 2 or len(ids) != len(canary.logprobs) or min(ids) < 0 or max(ids) >= most:
            raise EngineError(f"the canary needs two or more tokens from 0 to {most - 1}, each with its logprob")

    def check_canary(self, canary: Canary, model: str) -> None:
        """The trainer's log probabilities of a short prompt must be found again."""
        mine = self.logprobs(canary.token_ids, model)
        gap = sum(abs(a - b) for a, b in zip(mine, canary.logprobs, strict=True)) / max(1, len(mine) - 1)
        allowed = max(canary.tolerance, rounding(self._model.dtype))
        if not gap <= allowed:
            raise Mismatch(
                f"version {self._catalog.versions[model]} failed its canary: log probabilities of engine and trainer "
                f"differ by {gap:.2g} on average (allowed: {allowed:.2g})"
            )

    def logprobs(self, token_ids: tuple[int, ...], model: str) -> list[float]:
        """Log probability of each token given those before it; 0.0 for the first."""
        if self._adapters is not None:
            slots = torch.full((len(token_ids),), self._catalog.slots[model], device=self._model.device)
            self._adapters.route(slots)
            with torch.compiler.set_stance("force_eager"):
                return sequence_logprobs(self._model, self._head, token_ids)
        return self._songbook.logprobs(token_ids)

    def _held(self, name: str) -> dict[str, Tensor]:
        slot = self._catalog.slots[name]
        if slot and self._adapters is not None:
            return self._adapters.tensors(slot)
        return dict(self._parameters)


def _touched(update: WeightUpdate) -> tuple[str, ...]:
    return (POLICY, BASE) if update.adapter is None else (update.adapter.name,)


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
