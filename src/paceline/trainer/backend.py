"""Defines a trainer, and what torch and mlx each implement for it. All other training code is shared.

`torch/` and `mlx/` hold the same modules: a policy (`trainer.py`), its optimizer and trainable tensors, its forward
pass, the critic's value model, checkpoints and array operations.
"""

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.config import trainer as config
from paceline.data import MicroBatch, Sample
from paceline.trainer.batch import BUDGET, Batch
from paceline.trainer.loss import LossStats
from paceline.trainer.terms import TrainedTokens
from paceline.weights.update import Array, WeightUpdate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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

    async def step(self, batch: Sequence[Sample]) -> StepReport:
        """Train one batch; `version` is one higher afterwards."""

    async def weights(self) -> WeightUpdate:
        """The trainable tensors of the current version."""

    async def save(self, folder: Path) -> None:
        """Everything needed to go on from here."""

    async def load(self, folder: Path) -> None: ...

    async def export(self, folder: Path, tokenizer: "PreTrainedTokenizerBase | None" = None) -> None:
        """A Hugging Face folder, adapters merged."""

    def close(self) -> None: ...


LARGEST_SCALE, SMALLEST_SCALE = 2.0**16, 2.0**4
PATIENCE = 100
"""Steps until a scale that was too large is tried again."""


def learning_rate(c: config.OptimizerConfig, step: int, total: int | None) -> float:
    """Learning rate of the step after `step` others, of `total`."""
    if step < c.warmup_steps:
        return c.lr * (step + 1) / c.warmup_steps
    if c.schedule == "constant" or not total:
        return c.lr
    done = min(1.0, (step - c.warmup_steps) / max(1, total - c.warmup_steps))
    left = 1 - done if c.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return c.lr * (c.final_lr_ratio + (1 - c.final_lr_ratio) * left)


def schedule_lengths(c: config.TrainerConfig, batches: int | None) -> tuple[int | None, int | None]:
    """Optimizer steps of the policy, which takes none while the critic warms up, and of the critic in a whole run."""
    if not batches:
        return None, None
    waiting = 0 if c.critic is None else c.critic.freeze_steps
    return max(1, (batches - waiting) * c.minibatches), batches * c.minibatches


class Schedule:
    """How far an optimizer is: steps taken, the learning rate of the next one, and the scale of a float16 loss."""

    def __init__(self, c: config.OptimizerConfig, total_steps: int | None, half: bool) -> None:
        self._config, self._total = c, total_steps
        self.steps = 0
        self.scale = LARGEST_SCALE if half else 1.0
        """By what the loss of a float16 model is multiplied before it is differentiated (arXiv 1710.03740): one token's
        share of a large batch is a gradient below what that type can hold. Other types need none."""

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return learning_rate(self._config, self.steps, self._total)

    def lower_scale(self, sound: bool) -> bool:
        """After a gradient that was not finite: whether to compute it again, with its loss scaled up less. Not where
        the loss itself is at fault, not `sound`, and not for ever."""
        if not sound or self.scale <= SMALLEST_SCALE:
            return False
        self.scale /= 4
        return True

    def count_step(self) -> None:
        self.steps += 1
        if self.scale != 1 and self.steps % PATIENCE == 0:
            self.scale = min(2 * self.scale, LARGEST_SCALE)

    def load(self, steps: int, scale: float | None) -> None:
        """Back to a checkpoint's, which a model of another type may have written."""
        self.steps = steps
        self.scale = scale if scale and self.scale != 1 else self.scale


@dataclass(frozen=True, slots=True)
class NamedLosses:
    """What is differentiated of a micro-batch's tokens."""

    names: Sequence[str]
    of: Callable[[TrainedTokens], tuple[Mapping[str, Array], LossStats]]
    """The losses by name, and the sums that metrics are made of."""
    accumulate_into: Callable[[str], AbstractContextManager] = nullcontext
    """The gradient of a loss is added inside the context of its name."""
    on_tokens: Callable[[TrainedTokens], None] | None = None
    """Is given the tokens, without a gradient."""


class Optimizer(Protocol):
    """AdamW over float32 masters, with the gradient sums of several backward passes."""

    masters: dict[str, Any]
    schedule: Schedule

    def take_gradients(self) -> Mapping[str, Array]:
        """The gradient so far; what is added from here on is another one."""

    def add_gradients(self, held: Mapping[str, Array], factor: float = 1.0) -> None:
        """Add a gradient that was set aside, times a factor. It is used up."""

    def clip(self) -> Any:
        """Scale the gradient down to its allowed norm; answers with the norm before. Once per step, since a scaled
        loss's gradient gets its true size here. All ranks must call it."""

    def step(self) -> None:
        """One update, then the masters rounded into the model."""

    def zero(self) -> None: ...

    def tensors(self) -> Mapping[str, Array]:
        """Masters and moments by name, for a checkpoint."""

    def load(self, tensors: Mapping[str, Any], steps: int, scale: float | None = None) -> None:
        """Back to a checkpoint's masters, moments, step count and loss scale."""


class TrainableTensors(Protocol):
    """The tensors of a policy that train, for the KL reference to copy and replace."""

    @property
    def adapters_only(self) -> bool: ...

    def current(self) -> Mapping[str, Array]: ...

    def put(self, tensors: Mapping[str, Any]) -> None:
        """Write tensors into the model."""

    def set_aside(self, names: Mapping[str, Array]) -> Mapping[str, Array]:
        """The policy's tensors of these names, safe from `put`."""

    def copy(self, tensor: Any, wide: bool) -> Array:
        """A tensor to keep, in float32 if `wide`."""

    def copy_into(self, kept: dict[str, Any], tensors: Mapping[str, Any]) -> None:
        """Replace the values of kept copies."""

    def average_into(self, kept: dict[str, Any], name: str, master: Any, weight: float) -> None:
        """Move one kept copy towards a master."""

    def for_checkpoint(self, name: str, tensor: Any) -> Array:
        """A kept copy as a checkpoint writes it: of a sharded tensor this rank's part."""

    def fingerprint(self, kept: Mapping[str, Any]) -> str: ...


class ValueModel(Protocol):
    """A copy of the policy with one number per token instead of logits, and its optimizer. The new layer starts at
    zero, so that the first advantages are plain returns."""

    @property
    def optimizer(self) -> Optimizer: ...

    def train(self) -> Any: ...

    def eval(self) -> Any: ...

    def values(self, micro_batch: MicroBatch) -> NDArray:
        """Values of choosing the sampled tokens, read off the token before, without a gradient."""

    def backward(
        self, micro_batch: MicroBatch, positions: NDArray, targets: Sequence[NDArray], loss_of: Callable[..., Any]
    ) -> Any:
        """Add the gradient of `loss_of(values, *targets)` at `positions`; answers with the loss."""

    def clip(self, losses: list[Any]) -> tuple[float, float]:
        """Sum losses and gradient over the ranks and clip it; answers with the loss and the norm it had."""

    def state(self) -> dict[str, int]: ...

    def restore(self, state: Mapping) -> None: ...


class PolicyBackend(ABC):
    """The model in training, with its optimizer; of a sharded one, this rank's part. All ranks call the same methods
    in the same order. What is not abstract here is that of one process alone, in the host's memory."""

    net: Any
    forward: Any
    optimizer: Any
    """An `Optimizer`, which its own policy knows more of."""
    parameters: TrainableTensors

    def __init__(self, c: config.TrainerConfig) -> None:
        self._config = c

    @property
    def rank(self) -> int:
        return 0

    @property
    def budget(self) -> int:
        """Tokens of a micro-batch."""
        given = self._config.micro_batch_tokens
        return BUDGET if given == "auto" else given

    @abstractmethod
    def backward(self, micro_batch: MicroBatch, losses: NamedLosses) -> LossStats:
        """Add the gradient of each named loss of a micro-batch."""

    def clip(self) -> Any:
        """Sum the gradient that is there over the ranks and clip it; answers with the norm it had."""
        return self.optimizer.clip()

    def sum(self, values: Any) -> NDArray:
        """Summed over the ranks that hold different samples, as float64 numbers of the host."""
        return np.array(values, np.float64)

    def sum_over_all_ranks(self, value: float) -> float:
        """A number, summed over all ranks."""
        return value

    def gather(self, samples: Sequence[Sample]) -> Batch:
        """All ranks' samples, and the same cut of them on every rank."""
        return Batch.single_rank(samples, self._config, self.budget)

    @abstractmethod
    def value_model(self, c: config.OptimizerConfig, total_steps: int | None) -> ValueModel: ...

    @abstractmethod
    def weights(self, version: int) -> WeightUpdate:
        """The weights that train, whole, on the first rank."""

    @abstractmethod
    def export(self, folder: Path, tokenizer: "PreTrainedTokenizerBase | None") -> None: ...

    @abstractmethod
    def save(self, folder: Path, tensors: Mapping[str, Any], state: Mapping) -> None:
        """Write a checkpoint, the state of the random numbers with it."""

    @abstractmethod
    def read(self, folder: Path) -> tuple[Mapping[str, Any], dict]:
        """A checkpoint's tensors and state."""

    @abstractmethod
    def restore_random(self, tensors: Mapping[str, Any], state: Mapping) -> None: ...

    @abstractmethod
    def compute_dtype(self) -> object:
        """What the model computes in."""

    def peak_bytes(self) -> float:
        """The most memory this process has needed so far, to compare with the planner's estimate; on a GPU, the most
        that was held there at once."""
        try:
            import resource
        except ImportError:  # Windows does not count
            return 0.0
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return float(most if sys.platform == "darwin" else 1024 * most)

    def on_thread_start(self) -> None:  # noqa: B027 - nothing to do is what most need
        """First of all on the trainer's thread."""

    def after_step(self, seconds: float, version: int) -> None:  # noqa: B027
        """A batch has been trained in so long."""

    def close(self) -> None:  # noqa: B027
        """Ends what runs beside the trainer."""


@contextmanager
def training(net: Any) -> Generator[None]:
    """The model is in training mode inside, where adapters may drop out."""
    net.train()
    try:
        yield
    finally:
        net.eval()
