"""The weights an engine holds: the base and its adapters, changed in place, and proved to be what was sent."""

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paceline.inference.base import EngineError, Mismatch, OtherBase
from paceline.inference.engine.catalog import BASE, POLICY, Catalog
from paceline.inference.engine.patch import patch
from paceline.model import Adapter, Canary, Head, Policy, WeightUpdate, fingerprint
from paceline.model.adapters import AdapterError, Adapters
from paceline.model.canary import rounding, sequence_logprobs
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
        self._parameters = dict(model.named_parameters())
        self.bytes = sum(tensor.numel() * tensor.element_size() for tensor in self._parameters.values())
        self._free = list(range(adapters.slots, 0, -1)) if adapters is not None else []

    def warm(self) -> None:
        """Do once what an update does, so that no running request waits for a kernel to be loaded."""
        self.policy()
        if self._adapters is not None and self._adapters.slots == len(self._free):
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
        """Read off the tensors that are really used."""
        return Policy(self._catalog.versions[POLICY], fingerprint(self._held(POLICY).items()))

    def apply(self, update: WeightUpdate, check: bool = True) -> str | None:
        """Copy the update in place; answers with its fingerprint, if it is to be checked. Refusals change nothing."""
        if update.delta is not None:
            try:
                return self._apply_delta(update, check)
            except OtherBase:
                if not update.tensors:
                    raise  # else all of it is here too
        tensors = dict(update.tensors) if update.adapter is None else self._fit_adapter(update)
        sent = fingerprint(tensors.items()) if check else None
        if check and update.expected not in (None, sent):
            raise Mismatch(
                f"the weights of version {update.version} are damaged: their fingerprint is {sent}, not the "
                f"{update.expected} they were sent with"
            )
        if check and update.canary is not None:
            self._check_form(update.canary)
        name = self._apply_base(update) if update.adapter is None else self._apply_adapter(tensors, update.adapter)
        self._catalog.versions[name] = update.version
        self._catalog.weights |= {model: {} for model in _touched(update)}
        return sent

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

    def _apply_base(self, update: WeightUpdate) -> str:
        if not update.tensors:
            raise EngineError("the update holds no tensors")
        unknown = update.tensors.keys() - self._parameters.keys()
        if unknown:
            raise EngineError(f"the update names tensors this model does not have: {sorted(unknown)[:3]}")
        for name, tensor in update.tensors.items():
            mine = self._parameters[name]
            if mine.shape != tensor.shape or mine.dtype != tensor.dtype:
                raise EngineError(f"`{name}` is {_form(tensor)} in the update, but {_form(mine)} in the model")
        mine: list[Tensor] = [self._parameters[name] for name in update.tensors]
        torch._foreach_copy_(mine, list(update.tensors.values()), non_blocking=True)
        return self._changed(update)

    def _apply_delta(self, update: WeightUpdate, check: bool) -> str | None:
        if check and update.canary is not None:
            self._check_form(update.canary)
        sent = patch(self._parameters, update, self._catalog)
        self._catalog.versions[self._changed(update)] = update.version
        self._catalog.weights |= {model: {} for model in _touched(update)}
        return sent if check else None

    def _changed(self, update: WeightUpdate) -> str:
        self._native.refresh()
        self._catalog.base_version = self._catalog.versions[BASE] = update.version
        return POLICY

    def _fit_adapter(self, update: WeightUpdate) -> dict[str, Tensor]:
        """The adapter as its slot would hold it; refuses what does not fit."""
        if self._adapters is None:
            raise EngineError("this engine has no adapter slots: set engine.adapters to 1 or more")
        try:
            return self._adapters.fitted(update.tensors)
        except AdapterError as error:
            raise EngineError(str(error)) from error

    def _apply_adapter(self, tensors: Mapping[str, Tensor], adapter: Adapter) -> str:
        assert self._adapters is not None
        name, slots = adapter.name, self._catalog.slots
        if name == BASE:
            raise EngineError(f"`{BASE}` is the name of the plain base: give the adapter another")
        slot = slots.get(name, 0) or (self._free[-1] if self._free else 0)
        if not slot:
            raise EngineError(f"all adapter slots are taken by {sorted(self._catalog.adapters)}: raise engine.adapters")
        try:
            self._adapters.load(slot, tensors, adapter.scale)
        except AdapterError as error:
            raise EngineError(str(error)) from error
        if not slots.get(name):
            self._free.pop()
        slots[name] = slot
        return name

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
        # A plan of another kind than the compiled one: compiling for a single short pass would hold everybody up.
        with torch.compiler.set_stance("force_eager"):
            return sequence_logprobs(self._model, self._head, token_ids)

    def _held(self, name: str) -> dict[str, Tensor]:
        slot = self._catalog.slots[name]
        if slot and self._adapters is not None:
            return self._adapters.tensors(slot)
        return dict(self._parameters)


def _touched(update: WeightUpdate) -> tuple[str, ...]:
    return (POLICY, BASE) if update.adapter is None else (update.adapter.name,)


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
