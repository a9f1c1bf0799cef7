"""Stages weight updates beside decoding (reads and checks them), and between two steps copies and verifies them."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from paceline.errors import DeltaBaseMismatch, EngineError, Mismatch, PartialUpdateError
from paceline.model.adapter_names import AdapterError, check_scale
from paceline.weights.update import (
    BASE_MODEL,
    POLICY_MODEL,
    Adapter,
    Array,
    ServedPolicy,
    WeightUpdate,
    dtype_tolerance,
    fingerprint,
)

if TYPE_CHECKING:
    from paceline.weights.delta import WeightDelta

WeightsKey = tuple[int, int, int]
"""The weights that keys and values were computed with: adapter slot, its version, the base's version."""
BROKEN_VERSION = -1
"""The version of weights that are no version: an update broke off while they were written."""


@dataclass(slots=True)
class ServedModels:
    """The policy, the base, and adapters by name."""

    adapter_slots: dict[str, int] = field(default_factory=lambda: {POLICY_MODEL: 0, BASE_MODEL: 0})
    """0 for a model without an adapter."""
    versions: dict[str, int] = field(default_factory=lambda: {POLICY_MODEL: 0, BASE_MODEL: 0})
    fingerprints: dict[str, dict[int, str]] = field(default_factory=lambda: {POLICY_MODEL: {}, BASE_MODEL: {}})
    """Version and fingerprint of what each model holds, as far as they were proved: of an adapter, its own tensors.
    Replaced, never changed, so that all completions of the same weights share one."""

    def set_version(self, models: Iterable[str], version: int) -> None:
        """Record that these models hold new weights, which are not verified yet."""
        self.versions |= dict.fromkeys(models, version)
        self.fingerprints |= {model: {} for model in models}

    def weights_key(self, model: str) -> WeightsKey:
        """Identifies the weights that keys and values are computed with."""
        return (self.adapter_slots[model], self.versions[model], self.versions[BASE_MODEL])

    @property
    def adapters(self) -> dict[str, int]:
        """Named adapters with their versions."""
        return {name: version for name, version in self.versions.items() if name not in (POLICY_MODEL, BASE_MODEL)}


class AdapterSlots(Protocol):
    """Adapters beside a base: slot 0 is the base itself, they live in 1 to `slots`."""

    slots: int

    def fit_to_slot(self, tensors: Mapping[str, Array]) -> dict[str, Array]: ...

    def load(self, slot: int, tensors: Mapping[str, Array], scale: float) -> None: ...

    def tensors(self, slot: int) -> dict[str, Array]: ...


@dataclass(frozen=True, slots=True)
class StagedUpdate:
    """An update that was read and checked before decoding has to pause for it. What is left to do is to copy it."""

    update: WeightUpdate
    tensors: Mapping[str, Array]
    """As they will be copied; none where a delta stands for them."""
    staged_fingerprint: str | None = None
    """Their fingerprint, unless it is not checked or a delta will lead to it."""
    check: bool = True
    ready_event: Any = None
    """When what reading left to the device is done, where that is not at once."""


class WeightApplier(ABC):
    """The weights an engine serves, the base and the adapters beside it; keeps `served` up to date."""

    weight_bytes: int
    """Of all parameters of the base."""

    def __init__(self, adapters: AdapterSlots | None, vocabulary: int, dtype: Any, version: int) -> None:
        self.served = ServedModels()
        self.served.versions[POLICY_MODEL] = version
        self._slots = adapters
        self._vocabulary = vocabulary
        self._tolerance = dtype_tolerance(dtype)
        """How far log probabilities of the same weights may be apart because of what this engine computes in."""
        self._free = list(range(adapters.slots, 0, -1)) if adapters is not None else []
        self._partial: set[str] = set()
        """Parameters that an update which broke off may have changed."""
        self.quarantine: dict[str | None, EngineError] = {}
        """Models whose last update failed its checks, and why; None for the base and so for all."""

    # -- what a library does ------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def parameters(self) -> Mapping[str, Array]:
        """The base's tensors that are really used, by name."""

    @abstractmethod
    def logprobs(self, token_ids: tuple[int, ...], model: str) -> list[float]:
        """Log probability of each token given those before it; 0.0 for the first."""

    @abstractmethod
    def _stage(self, tensors: Mapping[str, Array]) -> dict[str, Array]:
        """The same tensors, where they can be copied from while decoding waits."""

    @abstractmethod
    def _copy_weights(self, tensors: Mapping[str, Array]) -> None:
        """Put these in place of the base's own."""

    def _stage_delta(self, delta: "WeightDelta") -> None:  # noqa: B027 - one that is refused is not read
        """Read a delta and check that it fits, while decoding goes on."""

    def _apply_delta(self, update: WeightUpdate, check: bool) -> str | None:
        """Write the update's delta to the base's tensors; answers as `apply` does."""
        raise DeltaBaseMismatch("this engine takes no deltas: send all weights")

    def warm_up(self) -> None:  # noqa: B027 - only where the first time takes long
        """Do once what an update does."""

    def record_cuda_event(self) -> Any:
        """How far the sender's work on the device has come, taken on the sender's thread: reading comes after it."""
        return None

    # -- before decoding has to pause ---------------------------------------------------------------------------------

    def policy(self) -> ServedPolicy:
        """The served version, and its fingerprint as verified; else taken now from the tensors really used."""
        version = self.served.versions[POLICY_MODEL]
        verified = self.served.fingerprints[POLICY_MODEL].get(version)
        return ServedPolicy(version, verified or fingerprint(self._served_tensors(POLICY_MODEL).items()))

    def stage(self, update: WeightUpdate, check: bool = True, source_event: Any = None) -> StagedUpdate:
        """All that can be done while decoding goes on, on any thread: read it, and check that it fits and is whole."""
        if check and (canary := update.canary) is not None:
            ids, most = canary.token_ids, self._vocabulary
            if len(ids) < 2 or len(ids) != len(canary.logprobs) or min(ids) < 0 or max(ids) >= most:
                raise EngineError(f"the canary needs two or more tokens from 0 to {most - 1}, each with its logprob")
        if update.delta is not None:
            self._stage_delta(update.delta)
            return StagedUpdate(update, {}, check=check)
        if update.adapter is None:
            tensors = self._fit_base(update.tensors)
        elif self._slots is None:
            raise EngineError(
                "this engine has no adapter slots: serve with `--engine.adapters 1`, or set engine.adapters above 0"
            )
        else:
            try:
                check_scale(update.adapter.scale)
                tensors = self._slots.fit_to_slot(update.tensors)
            except AdapterError as error:
                raise EngineError(str(error)) from error
        staged_fingerprint = fingerprint(tensors.items()) if check else None
        if check and update.expected not in (None, staged_fingerprint):
            raise Mismatch(
                f"the weights of version {update.version} are damaged: their fingerprint is "
                f"{staged_fingerprint}, not the {update.expected} they were sent with"
            )
        return StagedUpdate(update, tensors, staged_fingerprint, check)

    def _fit_base(self, tensors: Mapping[str, Array]) -> dict[str, Array]:
        """The base's new tensors, ready to be copied; refuses what does not fit."""
        held = self.parameters
        if not tensors:
            raise EngineError("the update holds no tensors")
        if unknown := tensors.keys() - held.keys():
            raise EngineError(f"the update names tensors this model does not have: {sorted(unknown)[:3]}")
        staged = self._stage(tensors)
        for name, tensor in staged.items():
            if held[name].shape != tensor.shape or held[name].dtype != tensor.dtype:
                raise EngineError(
                    f"`{name}` is {_describe(tensor)} in the update, but {_describe(held[name])} in the model"
                )
        return staged

    # -- while decoding waits -----------------------------------------------------------------------------------------

    def apply(self, staged: StagedUpdate) -> str | None:
        """Copy the update in place; answers with its fingerprint, if it is to be checked. Refusals change nothing; what
        breaks off in the middle leaves weights without a fingerprint, and raises `PartialUpdateError`."""
        update, staged_fingerprint = staged.update, staged.staged_fingerprint
        if update.delta is not None:
            if self._partial:
                raise DeltaBaseMismatch(
                    "an update broke off here, so nothing can build on what this engine holds: send all weights"
                )
            staged_fingerprint = self._apply_delta(update, staged.check)
        elif update.adapter is not None:
            self._apply_adapter(staged, update.adapter)
        elif left := self._partial - staged.tensors.keys():
            raise DeltaBaseMismatch(
                f"an update broke off here, and this one leaves {sorted(left)[:3]} as they are: send all"
            )
        else:
            with self._guard_write(update):
                self._copy_weights(staged.tensors)
        self.served.set_version(_updated_models(update), update.version)
        return staged_fingerprint

    @contextmanager
    def _guard_write(self, update: WeightUpdate) -> Generator[None]:
        """If the write of an update fails midway, the weights have no version and serve no request."""
        try:
            yield
        except Exception as error:
            models = [model for model in _updated_models(update) if model in self.served.versions]
            self.served.set_version(models, BROKEN_VERSION)
            if update.adapter is None:
                self._partial |= set(update.names)
            raise PartialUpdateError(
                f"the update to version {update.version} broke off ({type(error).__name__}: {error}), and this engine "
                "now holds neither the old weights nor the new: it answers no request until it is sent all of them"
            ) from error
        if update.adapter is None:
            self._partial.clear()

    def _apply_adapter(self, staged: StagedUpdate, adapter: Adapter) -> None:
        assert self._slots is not None
        name, slots = adapter.name, self.served.adapter_slots
        if name == BASE_MODEL:
            raise EngineError(f"`{BASE_MODEL}` is the name of the plain base: give the adapter another")
        slot = slots.get(name, 0) or (self._free[-1] if self._free else 0)
        if not slot:
            raise EngineError(f"all adapter slots are taken by {sorted(self.served.adapters)}: raise engine.adapters")
        with self._guard_write(staged.update):
            self._slots.load(slot, staged.tensors, adapter.scale)
        if not slots.get(name):
            self._free.pop()
        slots[name] = slot

    # -- before anything is sampled from them -------------------------------------------------------------------------

    def verify(self, update: WeightUpdate, staged_fingerprint: str) -> None:
        """Check that the weights held are those sent, and that they give the trainer's log probabilities of the canary.
        Whatever is sampled from now on carries their fingerprint."""
        name, known = POLICY_MODEL if update.adapter is None else update.adapter.name, self.served.fingerprints
        mine, canary = self.parameters, update.canary
        held = self._served_tensors(name) if update.adapter is not None else {key: mine[key] for key in update.names}
        if fingerprint(held.items()) != staged_fingerprint:
            raise Mismatch(f"the engine does not hold the weights of version {update.version} it was sent")
        if canary is not None:
            gap = canary.gap(self.logprobs(canary.token_ids, name))
            allowed = max(canary.tolerance, self._tolerance)
            if not gap <= allowed:
                raise Mismatch(
                    f"version {update.version} failed its canary: log probabilities of engine and trainer "
                    f"differ by {gap:.2g} on average (allowed: {allowed:.2g})"
                )
        if update.adapter is None and update.names != mine.keys():
            staged_fingerprint = fingerprint(mine.items())
        verified = {update.version: staged_fingerprint}
        known |= dict.fromkeys(_updated_models(update), verified)
        if update.adapter is None and self.served.adapter_slots[POLICY_MODEL]:
            known[POLICY_MODEL] = {update.version: fingerprint(self._served_tensors(POLICY_MODEL).items())}

    def _served_tensors(self, model: str) -> dict[str, Array]:
        slot = self.served.adapter_slots[model]
        if slot and self._slots is not None:
            return self._slots.tensors(slot)
        return dict(self.parameters)

    def check_trusted(self, model: str) -> None:
        """Refuse a request for weights whose last update failed its checks."""
        for name in (None, model):
            if (error := self.quarantine.get(name)) is not None:
                raise type(error)(str(error))


def _updated_models(update: WeightUpdate) -> tuple[str, ...]:
    return (POLICY_MODEL, BASE_MODEL) if update.adapter is None else (update.adapter.name,)


def _describe(tensor: Array) -> str:
    return f"{str(tensor.dtype).rpartition('.')[2]} {list(tensor.shape)}"
