"""Defines what torch and mlx each implement for the trainer. All other training code is shared.

`torch/` and `mlx/` hold the same modules: a policy (`trainer.py`), its optimizer and trainable tensors, its forward
pass, the critic's value model, checkpoints and array operations.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from numpy.typing import NDArray

from paceline.config import trainer as config
from paceline.data import MicroBatch, Sample
from paceline.trainer.batch import Batch, TrainedTokens
from paceline.trainer.loss import LossStats
from paceline.trainer.optimizer import Schedule
from paceline.weights.update import Array, WeightUpdate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Losses = Callable[[TrainedTokens], tuple[Mapping[str, Array], LossStats]]
"""The losses of a micro-batch's tokens, by name, and the sums that its metrics are made of."""


class Optimizer(Protocol):
    """AdamW over float32 masters, with the gradient sums of several backward passes."""

    masters: dict[str, Any]
    schedule: Schedule

    def take_gradients(self) -> Mapping[str, Array]:
        """The gradient so far; what is added from here on is another one."""
        ...

    def add_gradients(self, held: Mapping[str, Array], factor: float = 1.0) -> None:
        """Add a gradient that was set aside, times a factor. It is used up."""
        ...

    def clip(self) -> Any:
        """Scale the gradient down to its allowed norm; answers with the norm before. Once per step, since a scaled
        loss's gradient gets its true size here. All ranks must call it."""
        ...

    def step(self) -> None:
        """One update, then the masters rounded into the model."""
        ...

    def zero(self) -> None: ...

    def tensors(self) -> Mapping[str, Array]:
        """Masters and moments by name, for a checkpoint."""
        ...

    def load(self, tensors: Mapping[str, Any], steps: int, scale: float | None = None) -> None:
        """Back to a checkpoint's masters, moments, step count and loss scale."""
        ...


class TrainableTensors(Protocol):
    """The tensors of a policy that train, for the KL reference to copy and replace."""

    @property
    def adapters_only(self) -> bool: ...

    def current(self) -> Mapping[str, Array]: ...

    def put(self, tensors: Mapping[str, Any]) -> None:
        """Write tensors into the model."""
        ...

    def set_aside(self, names: Mapping[str, Array]) -> Mapping[str, Array]:
        """The policy's tensors of these names, safe from `put`."""
        ...

    def copy(self, tensor: Any, wide: bool) -> Array:
        """A tensor to keep, in float32 if `wide`."""
        ...

    def copy_into(self, kept: dict[str, Any], tensors: Mapping[str, Any]) -> None:
        """Replace the values of kept copies."""
        ...

    def average_into(self, kept: dict[str, Any], name: str, master: Any, weight: float) -> None:
        """Move one kept copy towards a master."""
        ...

    def for_checkpoint(self, name: str, tensor: Any) -> Array:
        """A kept copy as a checkpoint writes it: of a sharded tensor this rank's part."""
        ...

    def fingerprint(self, kept: Mapping[str, Any]) -> str: ...


class ValueModel(Protocol):
    """A copy of the policy with one number per token instead of logits, and its optimizer. The new layer starts at
    zero, so that the first advantages are plain returns."""

    @property
    def optimizer(self) -> Optimizer: ...

    def train(self) -> Any: ...

    def eval(self) -> Any: ...

    def values(self, micro_batch: MicroBatch, positions: NDArray) -> NDArray:
        """Values of choosing at `positions`, read off the token before, without a gradient."""
        ...

    def backward(
        self, micro_batch: MicroBatch, positions: NDArray, targets: Sequence[NDArray], loss_of: Callable[..., Any]
    ) -> Any:
        """Add the gradient of `loss_of(values, *targets)` at `positions`; answers with the loss."""
        ...

    def clip(self, losses: list[Any]) -> tuple[float, float]:
        """Sum losses and gradient over the ranks and clip it; answers with the loss and the norm it had."""
        ...

    def state(self) -> dict[str, int]: ...

    def restore(self, state: Mapping) -> None: ...


class PolicyBackend(Protocol):
    """The model in training, with its optimizer; of a sharded one, this rank's part. All ranks call the same methods
    in the same order."""

    net: Any
    forward: Any

    @property
    def optimizer(self) -> Optimizer: ...

    @property
    def parameters(self) -> TrainableTensors: ...

    @property
    def rank(self) -> int: ...

    @property
    def budget(self) -> int:
        """Tokens of a micro-batch."""
        ...

    def backward(
        self,
        micro_batch: MicroBatch,
        names: Sequence[str],
        losses: Losses,
        accumulate_into: Callable[[str], AbstractContextManager],
        on_tokens: Callable[[TrainedTokens], None] | None,
    ) -> LossStats:
        """Add the gradient of each named loss of a micro-batch, inside `accumulate_into(name)`. `on_tokens` is given
        its tokens."""
        ...

    def clip(self) -> Any:
        """Sum the gradient that is there over the ranks and clip it; answers with the norm it had."""
        ...

    def sum(self, values: Any) -> NDArray:
        """Summed over the ranks that hold different samples, as float64 numbers of the host."""
        ...

    def total(self, value: float) -> float:
        """A number, summed over the ranks that hold different samples."""
        ...

    def sum_over_all_ranks(self, value: float) -> float:
        """A number, summed over all ranks."""
        ...

    def gather(self, samples: Sequence[Sample]) -> Batch:
        """All ranks' samples, and the same cut of them on every rank."""
        ...

    def value_model(self, c: config.OptimizerConfig, total_steps: int | None) -> ValueModel: ...

    def weights(self, version: int) -> WeightUpdate:
        """The weights that train, whole, on the first rank."""
        ...

    def export(self, folder: Path, tokenizer: "PreTrainedTokenizerBase | None") -> None: ...

    def save(self, folder: Path, tensors: Mapping[str, Any], state: Mapping) -> None:
        """Write a checkpoint, the state of the random numbers with it."""
        ...

    def read(self, folder: Path) -> tuple[Mapping[str, Any], dict]:
        """A checkpoint's tensors and state."""
        ...

    def restore_random(self, tensors: Mapping[str, Any], state: Mapping) -> None: ...

    def compute_dtype(self) -> object:
        """What the model computes in."""
        ...

    def peak_bytes(self) -> float:
        """The most memory this process has needed so far; on a GPU, the most that was held there at once."""
        ...

    def on_thread_start(self) -> None:
        """First of all on the trainer's thread."""
        ...

    def after_step(self, seconds: float, version: int) -> None:
        """A batch has been trained in so long."""
        ...

    def close(self) -> None: ...


@contextmanager
def training(net: Any) -> Generator[None]:
    """The model is in training mode inside, where adapters may drop out."""
    net.train()
    try:
        yield
    finally:
        net.eval()
