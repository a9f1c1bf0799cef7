"""Defines what the decoding loop asks of a runner, independent of the tensor library."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from paceline.engine.sequence import Chunk


class StepInFlight:
    """A launched step. This one was computed while it was launched."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self.chunks = chunks

    def land(self) -> None:
        """Wait for it, and put what was sampled and scored into its chunks."""


class Runner:
    """Launches steps. At most `depth` of them may be in flight when the next is launched."""

    depth: int
    is_compiling = False
    """Whether faster code is being made, to which it may want to switch soon."""

    def launch(self, chunks: Sequence[Chunk]) -> StepInFlight:
        """Compute the chunks and sample where they ask for it."""
        raise NotImplementedError

    def context(self) -> AbstractContextManager[object]:
        """Held by the engine's thread all its life."""
        return nullcontext()

    def warm_up(self) -> None:
        """Build whatever must be there before the first request."""

    def sync(self) -> None:
        """Wait until all that was launched is done."""

    def should_use_compiled(self, busy_seconds: float, swaps: int) -> bool:
        """Whether faster code is ready, given how long the runner has computed and how often the weights have changed:
        by that it decides whether such code is worth making."""
        return False

    def use_compiled(self) -> None:
        """Run the faster code from the next step on. Nothing may be in flight."""

    def close(self) -> None:
        """Free what only this runner needs."""
