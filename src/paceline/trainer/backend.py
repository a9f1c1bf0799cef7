"""Defines a trainer, what torch and mlx each implement for it, and a batch's layout. All other training code is shared.

`torch/` and `mlx/` hold the same modules: a policy and a critic's value model (`trainer.py`), their optimizer and
trainable tensors, their forward pass, array operations, and checkpoints. `torch/` has several ranks besides.

Each rank brings some samples of a batch and gets those of all: so every rank can count the normalisers, cut the
optimizer steps and deal out micro-batches by itself, with the same result. The traffic is small beside the weights:
some 25 bytes a token.
"""

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from paceline.config import trainer as config
from paceline.data import MicroBatch, Sample, Scales, collate, pack, token_scales
from paceline.data.packing import Bins, Cost, RankBins, bin_steps, flatten_bins
from paceline.data.sample import TokenScores
from paceline.planner.shape import read_shape
from paceline.trainer.loss import LossStats
from paceline.trainer.terms import TrainedTokens
from paceline.weights.update import Array, WeightUpdate

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from paceline.trainer.mlx.optimizer import MlxAdamW, MlxTensors
    from paceline.trainer.mlx.trainer import MlxValueModel
    from paceline.trainer.torch.optimizer import MasterAdamW, TorchTensors
    from paceline.trainer.torch.trainer import TorchValueModel

    Optimizer = MasterAdamW | MlxAdamW
    TrainableTensors = TorchTensors | MlxTensors
    ValueModel = TorchValueModel | MlxValueModel


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
    scores: TokenScores | None = None
    """What was computed for each trained token, by the sample's place in the batch."""


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


def policy_steps(c: config.TrainerConfig, batches: int | None) -> int | None:
    """Optimizer steps of the policy in a whole run: none are taken while the critic warms up."""
    if not batches:
        return None
    return max(1, (batches - (c.critic.freeze_steps if c.critic else 0)) * c.minibatches)


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
        c = self._config
        if self.steps < c.warmup_steps:
            return c.lr * (self.steps + 1) / c.warmup_steps
        if c.schedule == "constant" or not self._total:
            return c.lr
        done = min(1.0, (self.steps - c.warmup_steps) / max(1, self._total - c.warmup_steps))
        left = 1 - done if c.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
        return c.lr * (c.final_lr_ratio + (1 - c.final_lr_ratio) * left)

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


DUMMY_SAMPLE = Sample(token_ids=np.zeros(2), loss_mask=np.zeros(2), versions=np.full(2, -1), temperatures=np.ones(2))
"""A dummy sample for a rank without any, so that every rank runs something. Nothing in it trains."""
(DUMMY_PACK,) = pack([DUMMY_SAMPLE], token_scales([DUMMY_SAMPLE]), len(DUMMY_SAMPLE))


def collate_bins(
    samples: Sequence[Sample], scales: Mapping[int, Scales], bins: Bins, prox: Mapping[int, NDArray]
) -> list[MicroBatch]:
    """A rank's micro-batches as all have agreed on them, blank where it has nothing: every rank runs equally many."""
    return [collate(sorted(members), samples, scales, prox) if members else DUMMY_PACK for members in bins]


BUDGET = 4096
"""Tokens of a micro-batch where the run file leaves it open and no trial finds how many fit."""


@dataclass(frozen=True, slots=True)
class ValueTargets:
    """The critic's targets in one sample: each sampled token's value at the batch's start, and its return."""

    sample: Sample
    values: NDArray
    returns: NDArray


@dataclass(frozen=True, slots=True)
class Batch:
    """All samples in an order that is the same on every rank, how they are cut, and what the steps aim at, which is
    filled in for this rank's own samples."""

    samples: list[Sample]
    step_bins: list[RankBins]
    """For each optimizer step every rank's micro-batches."""
    rank: int
    prox: Mapping[int, NDArray] = field(default_factory=dict)
    """Log probabilities at the batch's start, where a step later than the first needs them, by sample."""
    value_targets: Mapping[int, ValueTargets] = field(default_factory=dict)
    valued: frozenset[int] = frozenset()
    """All samples the critic learns from, on whichever rank."""

    @classmethod
    def single_rank(cls, samples: Sequence[Sample], c: config.TrainerConfig, budget: int) -> Self:
        """A batch that no other rank has a part in."""
        return cls(list(samples), bin_steps(samples, c.minibatches, 1, budget, Cost(1, 0)), 0)

    @property
    def own(self) -> list[int]:
        """The samples of this rank."""
        return sorted(i for cut in self.step_bins for i in flatten_bins(cut[self.rank]))


def score_samples(
    scores_of: Callable[[MicroBatch], NDArray], samples: Sequence[Sample], bins: Bins
) -> dict[int, NDArray]:
    """What `scores_of` a micro-batch's sampled tokens gives, for each sample in `bins`, in float32; 0.0 elsewhere. An
    empty bin is a pass too: other ranks may wait for it."""
    scores: dict[int, NDArray] = {}
    own = flatten_bins(bins)
    scales = dict(zip(own, token_scales([samples[i] for i in own]), strict=True))
    for micro_batch in collate_bins(samples, scales, bins, {}):
        stream = np.zeros(len(micro_batch), np.float32)
        stream[micro_batch.loss_mask] = scores_of(micro_batch)
        if micro_batch is not DUMMY_PACK:
            parts = np.split(stream, np.cumsum(micro_batch.lengths)[:-1])
            scores |= zip(micro_batch.members, parts, strict=True)
    return scores


def cost_of(model: "PreTrainedConfig") -> Cost:
    """Forward flops of a token and of a pair of tokens; backward multiplies both about alike. 2 for each weight a token
    meets; 4 for each number of the heads and each pair, of which causality leaves half. Windows are left out."""
    text = model.get_text_config()
    # A family's own names, and transformers' for them.
    shape = read_shape(text.to_dict() | {name: getattr(text, name, None) for name in text.attribute_map})
    return Cost(2.0 * shape.active_parameters, 2.0 * shape.attending * shape.heads * shape.head_dim)


class PolicyBackend(ABC):
    """The model in training, with its optimizer; of a sharded one, this rank's part. All ranks call the same methods
    in the same order. What is not abstract here is that of one process alone, in the host's memory."""

    net: Any
    forward: Any
    optimizer: Any
    """An `Optimizer`, which its own policy knows more of."""
    parameters: "TrainableTensors"
    dtype: Any
    """What the model computes in."""
    rank = 0

    def __init__(self, c: config.TrainerConfig) -> None:
        self._config = c

    @property
    def budget(self) -> int:
        """Tokens of a micro-batch."""
        given = self._config.micro_batch_tokens
        return BUDGET if given == "auto" else given

    @abstractmethod
    def backward(
        self,
        micro_batch: MicroBatch,
        names: Sequence[str],
        losses_of: Callable[[TrainedTokens], tuple[Mapping[str, Array], LossStats]],
        accumulate_into: Callable[[str], AbstractContextManager] = nullcontext,
        on_tokens: Callable[[TrainedTokens], None] | None = None,
    ) -> LossStats:
        """Add the gradient of each named loss of a micro-batch's tokens, inside the context of its name. `losses_of`
        gives the losses by name, and the sums that metrics are made of; `on_tokens` sees the tokens, without a
        gradient."""

    def clip(self) -> Any:
        """Sum the gradient that is there over the ranks and clip it; answers with the norm it had."""
        return self.optimizer.clip()

    def sum(self, values: NDArray) -> NDArray:
        """Summed over the ranks that hold different samples, in float64."""
        return values.astype(np.float64)

    def sum_over_all_ranks(self, value: float) -> float:
        """A number, summed over all ranks."""
        return value

    def gather(self, samples: Sequence[Sample]) -> Batch:
        """All ranks' samples, and the same cut of them on every rank."""
        return Batch.single_rank(samples, self._config, self.budget)

    @abstractmethod
    def value_model(self, c: config.OptimizerConfig, total_steps: int | None) -> "ValueModel":
        """A copy of the policy with one number per token instead of logits, and its optimizer. The new layer starts at
        zero, so that the first advantages are plain returns."""

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

    def device_load(self) -> dict[str, float]:
        """How full and how busy the device is, with whatever else runs there."""
        return {}

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
