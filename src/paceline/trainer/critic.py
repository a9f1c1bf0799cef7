"""The critic: a value model that turns rewards into advantages, and learns from how wrong it was."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from paceline.config import trainer as config
from paceline.data import MicroBatch, Sample, Scales, fold, pack
from paceline.model import trainable, twin
from paceline.trainer.blank import BLANK
from paceline.trainer.forward import Forward
from paceline.trainer.gae import gae, per_action
from paceline.trainer.layout import Layout
from paceline.trainer.optimizer import MasterAdamW
from paceline.trainer.tuning import SMALLEST
from paceline.trainer.world import Ranks, World


@dataclass(frozen=True, slots=True)
class Lesson:
    """What the critic learns from one sample: per token, its value at the batch's start and the return it should have
    given. Only sampled tokens count."""

    sample: Sample
    values: NDArray
    returns: NDArray


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
        self.forwards = Forward(self.body, compiled=compiled, context=context)

    def forward(self, micro_batch: MicroBatch, places: Tensor) -> tuple[Tensor, Tensor]:
        """Values of choosing at `places`, read off the token before; and a zero that reaches every parameter."""
        dtype = self.value.weight.dtype
        values, zero = self.forwards.read(micro_batch, places, lambda before, _: self.value(before.to(dtype)))
        return values[:, 0], zero + 0 * (self.value.weight.sum() + self.value.bias.sum())


class Critic:
    """Values, advantages and the value model's own optimizer. The model is made when first needed."""

    def __init__(self, policy: PreTrainedModel, c: config.Trainer, total_steps: int | None, ranks: Ranks) -> None:
        assert c.critic is not None
        self._policy, self._trainer, self._config = policy, c, c.critic
        self._ranks, self._world = ranks, ranks.data
        self._budget = SMALLEST if c.micro_batch_tokens == "auto" else c.micro_batch_tokens
        self._total = total_steps
        self._model: ValueModel | None = None
        self._optimizer: MasterAdamW | None = None
        self.batches = 0

    @property
    def warming_up(self) -> bool:
        """The policy is held while the critic learns what it is worth."""
        return self.batches < self._config.freeze_steps

    def pupils(self, samples: Sequence[Sample]) -> list[int]:
        """Samples that bring rewards instead of advantages."""
        return [i for i, s in enumerate(samples) if s.advantages is None and s.rewards is not None and s.rl.any()]

    def credit(
        self, samples: Sequence[Sample], own: Sequence[int]
    ) -> tuple[list[Sample], dict[int, Lesson], dict[str, float]]:
        """Advantages for those of a batch that are this rank's and bring rewards instead, the lessons in them by index,
        and metrics of all ranks; none where nobody brings rewards."""
        pupils = set(self.pupils(samples))
        if not pupils:
            return list(samples), {}, {}
        chosen = [i for i in own if i in pupils]
        self.make()
        wanted = [samples[i] for i in chosen]
        lessons = [self._lesson(s, v) for s, v in zip(wanted, self._values(wanted), strict=True)]
        advantages = [lesson.returns - lesson.values for lesson in lessons]
        metrics = self._explained(lessons)
        if self._config.whiten:
            advantages = self._whitened(wanted, advantages)
        out = list(samples)
        for i, stream in zip(chosen, advantages, strict=True):
            out[i] = samples[i].with_streams(advantages=stream)
        return out, dict(zip(chosen, lessons, strict=True)), metrics

    def update(self, lessons: Sequence[Lesson], scales: Sequence[Scales]) -> dict[str, float]:
        """One optimizer step, on these lessons and those of the other ranks; a rank without any runs a blank. No step
        where the gradient is not finite."""
        optimizer = self._made[1]
        if not lessons:
            lessons, scales = [Lesson(BLANK, np.zeros(len(BLANK)), np.zeros(len(BLANK)))], fold([BLANK])
        packs = pack([lesson.sample for lesson in lessons], scales, self._budget)
        loss, norm = self._gradient(packs, lessons)
        while not np.isfinite(norm) and optimizer.retreat(bool(np.isfinite(loss))):
            loss, norm = self._gradient(packs, lessons)
        optimizer.step() if np.isfinite([loss, norm]).all() else optimizer.zero()
        return {"critic/loss": loss, "critic/grad_norm": norm}

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        return {} if self._optimizer is None else self._optimizer.tensors()

    def state(self) -> dict[str, float]:
        made = self._optimizer
        steps = {} if made is None else {"optimizer_steps": made.steps, "loss_scale": made.scale}
        return {"batches": self.batches} | steps

    def load(self, tensors: Mapping[str, Tensor], state: Mapping) -> None:
        self.batches = state.get("batches", 0)
        if tensors:
            self.make()
            self._made[1].load(tensors, state["optimizer_steps"], state.get("loss_scale"))

    # -- inside -----------------------------------------------------------------------------------------------------

    def make(self) -> None:
        """Have the value model, with all the memory it takes."""
        if self._model is not None:
            return
        c = self._trainer
        compiled = c.compile and self._policy.device.type == "cuda"
        self._model = ValueModel(self._policy, compiled, self._ranks.context).eval()
        rate = c.optimizer.lr if self._config.lr is None else self._config.lr
        settings = c.optimizer.model_copy(update={"lr": rate})
        self._optimizer = MasterAdamW(trainable(self._model), settings, self._total, Layout(self._policy.dtype))

    @property
    def _made(self) -> tuple[ValueModel, MasterAdamW, config.Critic]:
        assert self._model is not None
        assert self._optimizer is not None
        return self._model, self._optimizer, self._config

    @torch.no_grad()
    def _values(self, samples: Sequence[Sample]) -> list[NDArray]:
        """Values of the sampled tokens; 0.0 elsewhere."""
        values = [np.zeros(len(s)) for s in samples]
        for micro_batch in pack(samples, fold(samples), self._budget):
            stream = np.zeros(len(micro_batch))
            places = micro_batch.loss_mask.nonzero()[0]
            given, _ = self._made[0](micro_batch, torch.from_numpy(places).to(self._policy.device))
            stream[places] = given.cpu().numpy()
            parts = np.split(stream, np.cumsum(micro_batch.lengths)[:-1])
            for member, part in zip(micro_batch.members, parts, strict=True):
                values[member] = part
        return values

    def _lesson(self, sample: Sample, values: NDArray) -> Lesson:
        mask, returns = sample.loss_mask, np.zeros(len(sample))
        advantages = gae(per_action(sample), values[mask], self._config.gamma, self._config.lam)
        returns[mask] = advantages + values[mask]
        return Lesson(sample, values, returns)

    def _gradient(self, packs: Sequence[MicroBatch], lessons: Sequence[Lesson]) -> tuple[float, float]:
        """All ranks' gradient, clipped: the loss, and the norm it had."""
        model, optimizer, _ = self._made
        model.train()
        losses = [self._backward(one, [lessons[i] for i in one.members]) for one in packs]
        model.eval()
        self._ranks.tokens.sum_gradients(optimizer.unsummed)
        return self._world.sum(torch.stack(losses).sum()[None]).item(), optimizer.clip().item()

    def _backward(self, micro_batch: MicroBatch, lessons: Sequence[Lesson]) -> Tensor:
        model, optimizer, c = self._made
        places = micro_batch.policy_scale.nonzero()[0]

        def here(stream: NDArray) -> Tensor:
            return torch.from_numpy(stream[places].astype(np.float32)).to(self._policy.device)

        values, anchor = model(micro_batch, torch.from_numpy(places).to(self._policy.device))
        old, returns = (here(np.concatenate([getattr(x, n) for x in lessons])) for n in ("values", "returns"))
        loss = (value_loss(values, old, returns, c.value_clip) * here(micro_batch.policy_scale)).sum()
        optimizer.backward(loss, anchor)
        return loss.detach()

    def _explained(self, lessons: Sequence[Lesson]) -> dict[str, float]:
        """How much of the returns' variance the values foresaw: 1 is all, 0 no better than a constant."""
        masks = [x.sample.loss_mask for x in lessons]
        returns = _joined([x.returns[m] for x, m in zip(lessons, masks, strict=True)])
        values = _joined([x.values[m] for x, m in zip(lessons, masks, strict=True)])
        mean, spread = self._moments(returns)
        _, left = self._moments(returns - values)
        value, _ = self._moments(values)
        explained = {"critic/explained_variance": 1 - left / spread} if spread > 0 else {}
        return {"critic/return": mean, "critic/value": value} | explained

    def _whitened(self, samples: Sequence[Sample], advantages: Sequence[NDArray]) -> list[NDArray]:
        """Mean 0 and variance 1 over the rl tokens of all ranks: the step's size no longer hangs on the rewards'."""
        members = [s.rl != 0 for s in samples]
        mean, variance = self._moments(_joined([a[m] for a, m in zip(advantages, members, strict=True)]))
        return [
            np.where(s.loss_mask, (a - mean) / np.sqrt(variance + 1e-8), 0.0)
            for s, a in zip(samples, advantages, strict=True)
        ]

    def _moments(self, values: NDArray) -> tuple[float, float]:
        n, total = self._world.sum(torch.tensor([len(values), values.sum()], dtype=torch.float64)).tolist()
        mean = total / max(1.0, n)
        (squares,) = self._world.sum(torch.tensor([((values - mean) ** 2).sum()], dtype=torch.float64)).tolist()
        return mean, squares / max(1.0, n)


def value_loss(values: Tensor, old: Tensor, returns: Tensor, clip: float) -> Tensor:
    """max((V - R)^2, (V_old + clip(V - V_old) - R)^2) / 2 per token, as in the implementation that came with arXiv
    1707.06347: like the policy's clip, a value that has moved far enough towards its return stops there."""
    wrong = (values - returns).square()
    if clip:
        near = old + (values - old).clamp(-clip, clip)
        wrong = torch.maximum(wrong, (near - returns).square())
    return wrong / 2


def _joined(parts: Sequence[NDArray]) -> NDArray:
    return np.concatenate([*parts, np.zeros(0)])
