"""Defines the protocols an engine is assembled from, independent of the tensor library."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from paceline.engine.cache import Cache
from paceline.engine.catalog import Catalog
from paceline.engine.scheduler import Scheduler
from paceline.engine.sequence import Chunk
from paceline.weights.update import Array, ServedPolicy, WeightUpdate


class StepInFlight(Protocol):
    """A launched step."""

    chunks: Seq[Chunk]

    def land(self) -> None:
        """Wait for it, and put what was sampled and scored into its chunks."""
        ...


class Runner(Protocol):
    """Launches steps. At most `depth` of them may be in flight when the next is launched."""

    depth: int

    def place(self) -> AbstractContextManager[object]:
        """Held by the engine's thread all its life."""
        ...

    def warm(self) -> None:
        """Whatever must be built before the first request."""
        ...

    def launch(self, chunks: Seq[Chunk]) -> StepInFlight: ...

    def sync(self) -> None:
        """Wait until all that was launched is done."""
        ...

    @property
    def is_compiling(self) -> bool:
        """Whether faster code is being made, to which it may want to switch soon."""
        ...

    def wants_switch(self, busy_seconds: float, swaps: int) -> bool:
        """Whether faster code is ready. Told how long it has computed and how often the weights have changed, by which
        it decides whether such code is worth making."""
        ...

    def switch(self) -> None:
        """Run the faster code from the next step on. Nothing may be in flight."""
        ...

    def close(self) -> None:
        """Let go of what only this runner needs."""
        ...


class Landed:
    """A step that was computed while it was launched."""

    def __init__(self, chunks: Seq[Chunk]) -> None:
        self.chunks = chunks

    def land(self) -> None: ...


@dataclass(frozen=True, slots=True)
class StagedUpdate:
    """An update that was read and looked at before decoding has to pause for it. What is left to do is to copy it."""

    update: WeightUpdate
    tensors: Mapping[str, Array]
    """As they will be copied; none where a delta stands for them."""
    sent: str | None = None
    """Their fingerprint, unless it is not checked or a delta will lead to it."""
    check: bool = True
    ready: Any = None
    """When what reading left to the device is done, where that is not at once."""


class Weights(Protocol):
    """The weights an engine serves: the base and the adapters beside it."""

    bytes: int

    def warm(self) -> None:
        """Do once what an update does, where the first time takes long."""
        ...

    def policy(self) -> ServedPolicy: ...

    def mark(self) -> Any:
        """How far the sender's work on the device has come, taken on the sender's thread: reading comes after it."""
        ...

    def read(self, update: WeightUpdate, check: bool = True, mark: Any = None) -> StagedUpdate:
        """All that can be done while decoding goes on, on any thread: read it, look whether it fits and is whole."""
        ...

    def apply(self, arrived: StagedUpdate) -> str | None:
        """Copy the update in place and return its fingerprint, if it is to be checked. A refused update changes
        nothing; one that breaks off halfway leaves weights of no version and raises `PartialUpdateError`."""
        ...

    def verify(self, update: WeightUpdate, sent: str) -> None:
        """Check that the weights held are those sent, and compute what the trainer computes."""
        ...


@dataclass(frozen=True, slots=True)
class EngineParts:
    """All of them, and what the engine promises."""

    cache: Cache
    scheduler: Scheduler
    runner: Runner
    served: Weights
    catalog: Catalog
    max_context: int
    vocabulary: int
