"""Checks, applies and verifies weight updates, independent of the tensor library."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Protocol

from paceline.engine.catalog import BASE, BROKEN, POLICY, Catalog
from paceline.engine.parts import StagedUpdate
from paceline.errors import EngineError, Mismatch, OtherBase, PartialUpdateError
from paceline.model.adapter_names import AdapterError, check_scale
from paceline.weights.update import Adapter, Array, Canary, ServedPolicy, WeightUpdate, fingerprint


class AdapterSlots(Protocol):
    """Adapters beside a base: slot 0 is the base itself, they live in 1 to `slots`."""

    slots: int

    def fitted(self, tensors: Mapping[str, Array]) -> dict[str, Array]:
        """The tensors as a slot would hold them; refuses what `load` refuses."""
        ...

    def load(self, slot: int, tensors: Mapping[str, Array], scale: float) -> None: ...

    def tensors(self, slot: int) -> dict[str, Array]:
        """The tensors a slot really holds, by canonical name."""
        ...


class WeightApplier(ABC):
    """The base and the adapters beside it; keeps the catalog true."""

    def __init__(self, adapters: AdapterSlots | None, catalog: Catalog, vocabulary: int) -> None:
        self._slots = adapters
        self._catalog = catalog
        self._vocabulary = vocabulary
        self._free = list(range(adapters.slots, 0, -1)) if adapters is not None else []
        self._torn: set[str] = set()
        """Parameters that an update which broke off may have changed."""

    # -- what a library does ------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def parameters(self) -> Mapping[str, Array]:
        """The base's tensors that are really used, by name."""

    @property
    @abstractmethod
    def rounding(self) -> float:
        """How far log probabilities of the same weights may be apart because of what this engine computes in."""

    @abstractmethod
    def logprobs(self, token_ids: tuple[int, ...], model: str) -> list[float]:
        """Log probability of each token given those before it; 0.0 for the first."""

    @abstractmethod
    def _at_hand(self, tensors: Mapping[str, Array]) -> dict[str, Array]:
        """The same tensors, where they can be copied from while decoding waits."""

    @abstractmethod
    def _copy(self, tensors: Mapping[str, Array]) -> None:
        """Put these in place of the base's own."""

    @abstractmethod
    def _read_delta(self, update: WeightUpdate, check: bool) -> StagedUpdate: ...

    @abstractmethod
    def _apply_delta(self, update: WeightUpdate, check: bool) -> str | None: ...

    # -- before decoding has to pause ---------------------------------------------------------------------------------

    def policy(self) -> ServedPolicy:
        """The served version, and its fingerprint as verified; else taken now from the tensors really used."""
        version = self._catalog.versions[POLICY]
        mark = self._catalog.weights[POLICY].get(version)
        return ServedPolicy(version, mark or fingerprint(self._held(POLICY).items()))

    def _read(self, update: WeightUpdate, check: bool) -> StagedUpdate:
        if check and update.canary is not None:
            self._check_form(update.canary)
        if update.delta is not None:
            return self._read_delta(update, check)
        if update.adapter is not None:
            tensors = self._fit_adapter(update)
        else:
            self._check_names(update.tensors)
            tensors = self._at_hand(update.tensors)
            self._check_fit(tensors)
        sent = fingerprint(tensors.items()) if check else None
        if check and update.expected not in (None, sent):
            raise Mismatch(
                f"the weights of version {update.version} are damaged: their fingerprint is {sent}, not the "
                f"{update.expected} they were sent with"
            )
        return StagedUpdate(update, tensors, sent, check)

    def _check_form(self, canary: Canary) -> None:
        ids, most = canary.token_ids, self._vocabulary
        if len(ids) < 2 or len(ids) != len(canary.logprobs) or min(ids) < 0 or max(ids) >= most:
            raise EngineError(f"the canary needs two or more tokens from 0 to {most - 1}, each with its logprob")

    def _check_names(self, tensors: Mapping[str, Array]) -> None:
        if not tensors:
            raise EngineError("the update holds no tensors")
        unknown = tensors.keys() - self.parameters.keys()
        if unknown:
            raise EngineError(f"the update names tensors this model does not have: {sorted(unknown)[:3]}")

    def _check_fit(self, tensors: Mapping[str, Array]) -> None:
        held = self.parameters
        for name, tensor in tensors.items():
            mine = held[name]
            if mine.shape != tensor.shape or mine.dtype != tensor.dtype:
                raise EngineError(f"`{name}` is {_form(tensor)} in the update, but {_form(mine)} in the model")

    def _fit_adapter(self, update: WeightUpdate) -> dict[str, Array]:
        """The adapter as its slot would hold it; refuses what does not fit."""
        if self._slots is None:
            raise EngineError("this engine has no adapter slots: set engine.adapters to 1 or more")
        try:
            return self._slots.fitted(update.tensors)
        except AdapterError as error:
            raise EngineError(str(error)) from error

    # -- while decoding waits -----------------------------------------------------------------------------------------

    def apply(self, arrived: StagedUpdate) -> str | None:
        """Copy the update in place; answers with its fingerprint, if it is to be checked. Refusals change nothing; what
        breaks off in the middle leaves weights that have no name, and is told as `PartialUpdateError`."""
        update, sent = arrived.update, arrived.sent
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
            raise PartialUpdateError(
                f"the update to version {update.version} broke off ({type(error).__name__}: {error}), and this engine "
                "now holds neither the old weights nor the new: it answers no request until it is sent all of them"
            ) from error
        if update.adapter is None:
            self._torn.clear()

    def _check_whole(self) -> None:
        """A delta needs something to build on."""
        if self._torn:
            raise OtherBase(
                "an update broke off here, so nothing can build on what this engine holds: send all weights"
            )

    def _apply_base(self, arrived: StagedUpdate) -> None:
        if left := self._torn - arrived.tensors.keys():
            raise OtherBase(f"an update broke off here, and this one leaves {sorted(left)[:3]} as they are: send all")
        with self._writing(arrived.update):
            self._copy(arrived.tensors)

    def _apply_adapter(self, arrived: StagedUpdate, adapter: Adapter) -> None:
        assert self._slots is not None
        name, slots = adapter.name, self._catalog.slots
        if name == BASE:
            raise EngineError(f"`{BASE}` is the name of the plain base: give the adapter another")
        slot = slots.get(name, 0) or (self._free[-1] if self._free else 0)
        if not slot:
            raise EngineError(f"all adapter slots are taken by {sorted(self._catalog.adapters)}: raise engine.adapters")
        try:
            check_scale(adapter.scale)
        except AdapterError as error:
            raise EngineError(str(error)) from error
        with self._writing(arrived.update):
            self._slots.load(slot, arrived.tensors, adapter.scale)
        if not slots.get(name):
            self._free.pop()
        slots[name] = slot

    # -- before anything is sampled from them -------------------------------------------------------------------------

    def verify(self, update: WeightUpdate, sent: str) -> None:
        """Check that the weights held are those sent, and compute what the trainer computes."""
        name = POLICY if update.adapter is None else update.adapter.name
        held = self._held(name) if update.adapter is not None else self._named(update.names)
        if fingerprint(held.items()) != sent:
            raise Mismatch(f"the engine does not hold the weights of version {update.version} it was sent")
        if update.canary is not None:
            self.check_canary(update.canary, name)
        self._note(update, sent)

    def _note(self, update: WeightUpdate, sent: str) -> None:
        """These weights are proved: whatever is sampled from now on names them."""
        if update.adapter is None and update.names != self.parameters.keys():
            sent = fingerprint(self.parameters.items())
        known = {update.version: sent}
        self._catalog.weights |= dict.fromkeys(_touched(update), known)
        if update.adapter is None and self._catalog.slots[POLICY]:
            self._catalog.weights[POLICY] = {update.version: fingerprint(self._held(POLICY).items())}

    def check_canary(self, canary: Canary, model: str) -> None:
        """The trainer's log probabilities of a short prompt must be found again."""
        gap = canary.gap(self.logprobs(canary.token_ids, model))
        allowed = max(canary.tolerance, self.rounding)
        if not gap <= allowed:
            raise Mismatch(
                f"version {self._catalog.versions[model]} failed its canary: log probabilities of engine and trainer "
                f"differ by {gap:.2g} on average (allowed: {allowed:.2g})"
            )

    def _named(self, names: Iterable[str]) -> dict[str, Array]:
        held = self.parameters
        return {name: held[name] for name in names}

    def _held(self, model: str) -> dict[str, Array]:
        slot = self._catalog.slots[model]
        if slot and self._slots is not None:
            return self._slots.tensors(slot)
        return dict(self.parameters)


def _touched(update: WeightUpdate) -> tuple[str, ...]:
    return (POLICY, BASE) if update.adapter is None else (update.adapter.name,)


def _form(tensor: Array) -> str:
    return f"{str(tensor.dtype).rpartition('.')[2]} {list(tensor.shape)}"
