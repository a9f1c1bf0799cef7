"""The `Trainer` protocol, its step report and its errors."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from paceline.data import Sample
from paceline.errors import PacelineError
from paceline.weights.update import WeightUpdate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TrainerError(PacelineError):
    """Training cannot go on, as a sentence for the user."""


class TrainerLost(TrainerError):
    """The trainer's process ended, and with it everything since the newest checkpoint."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """One trained batch."""

    metrics: dict[str, float]
    skipped: bool = False
    """A gradient was not finite, or a spike: its step was left out, and the metrics are of the batch's other steps."""
    trouble: str = ""
    """What was wrong, as a sentence for the user; empty when nothing was."""
    roll_back: bool = False
    """The run file asks for the last good checkpoint after such a step: load it before anything is published."""
    memory: float = 0.0
    """Peak bytes of the trainer's process so far, or of its GPU; of the first rank, if there are several."""


class Trainer(Protocol):
    """Turns batches into policy versions. It knows no algorithm."""

    version: int

    async def feed(self, samples: Sequence[Sample]) -> None:
        """Samples of the batch that is still being gathered: work on them may begin. `step` gets them again, the same
        objects, among the whole batch; the update is the same as if they had not been fed."""
        ...

    async def step(self, batch: Sequence[Sample]) -> StepReport:
        """Train one batch; `version` is one higher afterwards."""
        ...

    async def weights(self) -> WeightUpdate:
        """The trainable tensors of the current version."""
        ...

    async def save(self, folder: Path) -> None:
        """Everything needed to go on from here."""
        ...

    async def load(self, folder: Path) -> None: ...

    async def export(self, folder: Path, tokenizer: "PreTrainedTokenizerBase | None" = None) -> None:
        """A Hugging Face folder, adapters merged."""
        ...

    def close(self) -> None: ...


def process_bytes() -> float:
    """The most of this process that was in memory at once, to compare with the planner's estimate."""
    try:
        import resource
    except ImportError:  # Windows does not count
        return 0.0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(most if sys.platform == "darwin" else 1024 * most)
