"""Trains a policy in torch, with its critic and KL reference, on one device or many ranks."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from paceline.config import trainer as config
from paceline.config.cluster import ParallelConfig
from paceline.data import MicroBatch, Sample, cuts
from paceline.model import Canary, trainable, twin
from paceline.model.head import CanaryScorer, make_canary
from paceline.trainer.batch import Batch, TrainedTokens, cost_of
from paceline.trainer.critic import Critic, value_loss
from paceline.trainer.learner import Learner, Stream, component, components, streams_of, trained
from paceline.trainer.loss import LossStats
from paceline.trainer.optimizer import schedule_lengths
from paceline.trainer.reference import KLReference
from paceline.trainer.torch.forward import ForwardPass
from paceline.trainer.torch.optimizer import MasterAdamW
from paceline.trainer.torch.sharding import shard
from paceline.trainer.torch.tuning import tuned
from paceline.trainer.torch.world import RankLayout, Ranks, World, local, together
from paceline.weights.update import canary_ids, canary_of


class TorchKLReference(KLReference):
    """On the CPU with `offload`, as are the policy's tensors while it scores; of a sharded model this rank's part."""

    def __init__(self, model: PreTrainedModel, c: config.KLConfig, layout: RankLayout) -> None:
        self._layout = layout
        self._parameters = {name: local(p.detach()) for name, p in trainable(model).items()}
        self._place = torch.device("cpu") if c.offload else None
        super().__init__(c, hasattr(model, "peft_config"))

    def tensors(self) -> dict[str, Tensor]:
        return {name: self._layout.like(name, tensor) for name, tensor in super().tensors().items()}

    def _now(self) -> dict[str, Tensor]:
        return self._parameters

    def _copy(self, parameter: Tensor) -> Tensor:
        mean, dtype = self._config.reference == "ema", self._layout.narrow(parameter)
        kept = parameter.to(self._place or parameter.device, copy=True)
        return kept.to(torch.float32 if mean and dtype.itemsize < 4 else dtype)

    def _aside(self, names: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: (p := self._parameters[name]).to(self._place or p.device, copy=True) for name in names}

    @torch.no_grad()
    def _put(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self._parameters[name].copy_(tensor)

    @torch.no_grad()
    def _keep(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self._tensors[name].copy_(local(tensor))

    @torch.no_grad()
    def _average(self, name: str, master: Tensor, weight: float) -> None:
        self._tensors[name].lerp_(master.to(self._tensors[name].device), weight)

    def _fingerprint(self) -> str:
        return self._layout.fingerprint(self._tensors)


class ValueModel(nn.Module):
    """A copy of the policy with one number per token instead of logits. The new layer starts at zero, so that the first
    advantages are plain returns. Frozen tensors are shared with the policy, trainable ones are its own."""

    def __init__(self, policy: PreTrainedModel, compiled: bool, context: World | None = None) -> None:
        super().__init__()
        self.body = twin(policy)
        names = trainable(policy).keys()
        unused = {id(p) for p in self.body.get_output_embeddings().parameters()}
        unused -= {id(p) for p in self.body.get_input_embeddings().parameters()}
        for name, parameter in self.body.named_parameters():
            parameter.requires_grad_(name in names and id(parameter) not in unused)
        self.value = nn.Linear(self.body.config.get_text_config().hidden_size, 1, device=policy.device)
        nn.init.zeros_(self.value.weight)
        nn.init.zeros_(self.value.bias)
        self.forwards = ForwardPass(self.body, compiled=compiled, context=context)

    def forward(self, micro_batch: MicroBatch, places: Tensor) -> tuple[Tensor, Tensor]:
        """Values of choosing at `places`, read off the token before; and a zero that reaches every parameter."""
        dtype = self.value.weight.dtype
        values, zero = self.forwards.read(micro_batch, places, lambda before, _: self.value(before.to(dtype)))
        return values[:, 0], zero + 0 * (self.value.weight.sum() + self.value.bias.sum())


class TorchCritic(Critic):
    """On one device, or on ranks that each value their own samples."""

    def __init__(self, policy: PreTrainedModel, c: config.TrainerConfig, total_steps: int | None, ranks: Ranks) -> None:
        super().__init__(c, total_steps)
        self._policy, self._ranks, self._device = policy, ranks, policy.device

    def _build(self, c: config.OptimizerConfig) -> MasterAdamW:
        compiled = self._trainer.compile is True and self._device.type == "cuda"
        self._model = ValueModel(self._policy, compiled, self._ranks.context).eval()
        return MasterAdamW(trainable(self._model), c, self._total, RankLayout(self._policy.dtype))

    @torch.no_grad()
    def _read(self, micro_batch: MicroBatch, places: NDArray) -> NDArray:
        values, _ = self._model(micro_batch, self._send(places))
        return values.cpu().numpy()

    def _backward(self, micro_batch: MicroBatch, places: NDArray, *targets: NDArray) -> Tensor:
        old, returns, scales = map(self._send, targets)
        values, anchor = self._model(micro_batch, self._send(places))
        loss = (value_loss(values, old, returns, self._config.value_clip) * scales).sum()
        self._optimizer.backward(loss, anchor)
        return loss.detach()

    def _clip(self, losses: list[Tensor]) -> tuple[float, float]:
        self._ranks.tokens.sum_gradients(self._optimizer.unsummed)
        return self._ranks.data.sum(torch.stack(losses).sum()[None]).item(), self._optimizer.clip().item()

    def _send(self, stream: NDArray) -> Tensor:
        return torch.from_numpy(stream).to(self._device)

    def _summed(self, numbers: Sequence[float]) -> list[float]:
        return self._ranks.data.sum(torch.from_numpy(np.array(numbers, np.float64))).tolist()


class TorchLearner(Learner):
    forward: ForwardPass
    optimizer: MasterAdamW

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
        self._model = model.eval()  # newly attached adapters come in training mode
        self.device = model.device if device is None else device
        # The compiler is not asked to see through matrices that lie on several ranks.
        compiled = compiled and self.device.type == "cuda" and c.parallel.tensor == 1
        self.ranks = Ranks(group, self.device, c.parallel)
        self.world = self.ranks.data
        forward = ForwardPass(model, fp32_head, compiled, c.stream, self.ranks.context, self.device)
        self.layout = forward.layout = shard(model, self.ranks, c.parallel if group is not None else ParallelConfig())
        self._found: int | None = None
        self._cost = cost_of(model.config)
        own, critics = schedule_lengths(c, total_steps)
        optimizer = MasterAdamW(trainable(model), c.optimizer, own, self.layout)
        reference = TorchKLReference(model, c.kl, self.layout) if c.kl is not None else None
        critic = TorchCritic(model, c, critics, self.ranks) if c.critic is not None else None
        super().__init__(c, model, forward, optimizer, reference, critic, self.ranks.all.total)
        self._canary = CanaryScorer(model, forward.head)

    def backward(self, micro_batch: MicroBatch, version: int, first: bool = True) -> LossStats:
        tokens, anchor = self.tokens(micro_batch)
        loss, sums = self._loss(tokens, version, first)
        if self.watch is not None:
            with torch.no_grad():
                self.watch(micro_batch, tokens, self._loss.per_token(tokens))
        self.optimizer.backward(loss, anchor)
        return sums

    def tokens(self, micro_batch: MicroBatch) -> tuple[TrainedTokens, Tensor]:
        """The tokens that train, as the policy sees them now; and the forward pass's zero."""
        streams = {name: self.forward.send(stream) for name, stream in streams_of(micro_batch).items()}
        logprobs, entropy, anchor = self.forward.logprobs(
            micro_batch,
            self.forward.send(trained(micro_batch)),
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
                self.optimizer.backward(component(parts, name), anchor, again=name != held[-1])
        return sums

    def _clip(self) -> Tensor:
        self.ranks.tokens.sum_gradients(self.optimizer.unsummed)
        self.layout.sync_replicated(self.optimizer.masters)
        return self.optimizer.clip()

    def _over_ranks(self, values: Tensor | NDArray) -> NDArray:
        return self.ranks.data.sum(torch.as_tensor(values)).cpu().numpy()

    @property
    def rank(self) -> int:
        return self.world.rank

    def total(self, value: float) -> float:
        return self.world.total(value)

    def peak_bytes(self) -> float:
        """On a GPU, the most that torch has held there at once."""
        on_gpu = self.device.type == "cuda"
        return float(torch.cuda.max_memory_allocated(self.device)) if on_gpu else super().peak_bytes()

    def canary(self) -> Canary:
        if not self.layout.lockstep:
            ids = canary_ids(self.forward.head.vocabulary)
            return canary_of(ids, self._canary.logprobs(ids), self.layout.dtype or self._model.dtype)
        # FSDP would keep a layer's memory for good as what inference mode made it, which no gradient may pass.
        with torch.no_grad():
            return self.layout.run(
                lambda: make_canary(self._model, self.forward.head, self.layout.dtype, torch.no_grad)
            )

    def room(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Memory for what a checkpoint holds under a name of `tensors`: this rank's part of it."""
        return self.layout.room(name.partition("/")[2], shape, dtype)

    @property
    def _budget(self) -> int:
        """Tokens of a micro-batch; where that is to be found out, it is once, when the first batch is here."""
        if self._found is None:
            given = self._config.micro_batch_tokens
            self._found = tuned(self.forward, self._model, self._config) if given == "auto" else given
        return self._found

    def _together(self, samples: Sequence[Sample]) -> Batch:
        if self._critic is not None and self._critic.lacking_advantages(samples):
            self._critic.make()  # before the memory left for a micro-batch is measured
        everything, self._found = together(samples, self.world, self._budget)
        cut = cuts(everything, self._config.minibatches, self.world.size, self._found, self._cost)
        return Batch(everything, cut, self.world.rank)
