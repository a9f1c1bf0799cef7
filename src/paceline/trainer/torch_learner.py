"""Trains a policy in torch: on one device or many ranks, on whole batches or while one still comes in."""

from collections.abc import Sequence

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from paceline.config import trainer as config
from paceline.config.cluster import ParallelConfig
from paceline.data import MicroBatch, Sample, cuts
from paceline.model import Canary, trainable
from paceline.model.canary import CanaryScorer, make_canary
from paceline.model.canary_prompts import canary_ids, signed
from paceline.trainer.batch import Batch, cost_of
from paceline.trainer.forward import ForwardPass
from paceline.trainer.learner import Learner
from paceline.trainer.loss import LossStats
from paceline.trainer.optimizer import MasterAdamW
from paceline.trainer.peak import peak_bytes
from paceline.trainer.preparing import Preparation
from paceline.trainer.reference import KLReference
from paceline.trainer.schedule import lengths
from paceline.trainer.sharding import shard
from paceline.trainer.stepping import Stepper, streams_of, trained
from paceline.trainer.stream import Stream, component, components
from paceline.trainer.tokens import TrainedTokens
from paceline.trainer.torch_critic import TorchCritic
from paceline.trainer.tuning import tuned
from paceline.trainer.world import Ranks, together


class TorchStepper(Stepper):
    """Of several ranks each has micro-batches of its own, and all take the same step."""

    def __init__(
        self,
        model: PreTrainedModel,
        c: config.TrainerConfig,
        forward: ForwardPass,
        optimizer: MasterAdamW,
        ranks: Ranks,
    ) -> None:
        super().__init__(c, model, optimizer, ranks.all.total)
        self._forward, self._optimizer, self._ranks = forward, optimizer, ranks

    def backward(self, micro_batch: MicroBatch, version: int, first: bool = True) -> LossStats:
        """Add one micro-batch's gradient."""
        tokens, anchor = self.tokens(micro_batch)
        loss, sums = self._loss(tokens, version, first)
        if self.watch is not None:
            with torch.no_grad():
                self.watch(micro_batch, tokens, self._loss.judge(tokens))
        self._optimizer.backward(loss, anchor)
        return sums

    def tokens(self, micro_batch: MicroBatch) -> tuple[TrainedTokens, Tensor]:
        """The tokens that train, as the policy sees them now; and the forward pass's zero."""
        streams = {name: self._forward.send(stream) for name, stream in streams_of(micro_batch).items()}
        logprobs, entropy, anchor = self._forward.logprobs(
            micro_batch,
            self._forward.send(trained(micro_batch)),
            entropy=True,
            entropy_grad=bool(self._config.entropy_coef),
        )
        assert entropy is not None
        return TrainedTokens(logprobs=logprobs, entropy=entropy, names=micro_batch.names, **streams), anchor

    def _add(self, stream: Stream, micro_batch: MicroBatch, version: int) -> LossStats:
        tokens, anchor = self.tokens(micro_batch)
        parts, sums = self._loss.parts(tokens, version)
        held = components(micro_batch)
        for name in held:
            with stream.summing(name):
                self._optimizer.backward(component(parts, name), anchor, again=name != held[-1])
        return sums

    def _clip(self) -> Tensor:
        self._ranks.tokens.sum_gradients(self._optimizer.unsummed)
        self._forward.layout.settle(self._optimizer.masters)
        return self._optimizer.clip()

    def _over_ranks(self, values: Tensor | NDArray) -> NDArray:
        return self._ranks.data.sum(torch.as_tensor(values)).cpu().numpy()


class TorchLearner(Learner):
    """A policy with its optimizer, and beside them whatever the settings ask for: a KL reference, a critic, ranks."""

    optimizer: MasterAdamW
    stepper: TorchStepper

    def __init__(
        self,
        model: PreTrainedModel,
        c: config.TrainerConfig,
        total_steps: int | None = None,
        fp32_head: bool = False,
        group: ProcessGroup | None = None,
        device: torch.device | None = None,
        compiled: bool = False,
    ) -> None:
        super().__init__(c)
        self._model = model.eval()  # newly attached adapters come in training mode
        self.device = model.device if device is None else device
        # The compiler is not asked to see through matrices that lie on several ranks.
        compiled = compiled and self.device.type == "cuda" and c.parallel.tensor == 1
        self.ranks = Ranks(group, self.device, c.parallel)
        self.forward = ForwardPass(model, fp32_head, compiled, c.stream, self.ranks.context, self.device)
        self.layout = self.forward.layout = shard(
            model, self.ranks, c.parallel if group is not None else ParallelConfig()
        )
        self._found: int | None = None
        self._cost = cost_of(model.config)
        own, critics = lengths(c, total_steps)
        self.optimizer = MasterAdamW(trainable(model), c.optimizer, own, self.layout)
        self.stepper = TorchStepper(model, c, self.forward, self.optimizer, self.ranks)
        self.world = self.ranks.data
        self._reference = KLReference(model, c.kl, self.layout) if c.kl is not None else None
        self._critic = TorchCritic(model, c, critics, self.ranks) if c.critic is not None else None
        self._preparation = Preparation(c, self.forward, self._reference, self._critic)
        self._songbook = CanaryScorer(model, self.forward.head)

    @property
    def rank(self) -> int:
        return self.world.rank

    def total(self, value: float) -> float:
        return self.world.total(value)

    def peak_bytes(self) -> float:
        return peak_bytes(self.device)

    def canary(self) -> Canary:
        """Log probabilities of a few fixed tokens under the current weights."""
        if not self.layout.lockstep:
            ids = canary_ids(self.forward.head)
            return signed(ids, self._songbook.logprobs(ids), self.layout.dtype or self._model.dtype)
        # FSDP would keep a layer's memory for good as what inference mode made it, which no gradient may pass.
        with torch.no_grad():
            return self.layout.run(
                lambda: make_canary(self._model, self.forward.head, self.layout.dtype, torch.no_grad)
            )

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def room(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Memory for what a checkpoint holds under a name of `tensors`: this rank's part of it."""
        return self.layout.room(name.partition("/")[2], shape, dtype)

    # -- inside -----------------------------------------------------------------------------------------------------

    @property
    def _budget(self) -> int:
        """Tokens of a micro-batch; where that is to be found out, it is once, when the first batch is here."""
        if self._found is None:
            given = self._config.micro_batch_tokens
            self._found = tuned(self.forward, self._model, self._config) if given == "auto" else given
        return self._found

    def _together(self, samples: Sequence[Sample]) -> Batch:
        """All ranks' samples, and the same cut of them on every rank."""
        if self._critic is not None and self._critic.pupils(samples):
            self._critic.make()  # before the memory left for a micro-batch is measured
        everything, self._found = together(samples, self.world, self._budget)
        cut = cuts(everything, self._config.minibatches, self.world.size, self._found, self._cost)
        return Batch(everything, cut, self.world.rank)
