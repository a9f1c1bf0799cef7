"""What happens to one batch: know all of it on every rank, prepare it once, then step K times.

together -> cut -> prepare -> minibatch by minibatch:
scales -> this rank's micro-batches backward -> gradients of all ranks -> clip -> step
"""

from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from paceline.config import trainer as config
from paceline.config.parallel import Parallel
from paceline.data import MicroBatch, Sample, count, cuts, fold, lay
from paceline.data.cutting import everyone, held
from paceline.model import Canary, trainable
from paceline.model.canary import Songbook, canary_ids, make_canary, signed
from paceline.trainer.batch import Batch, cost_of, scales_of, together
from paceline.trainer.blank import BLANK_PACK, packed
from paceline.trainer.critic import Critic
from paceline.trainer.forward import Forward
from paceline.trainer.loss import metrics
from paceline.trainer.norms import Outcome
from paceline.trainer.optimizer import MasterAdamW
from paceline.trainer.preparing import Preparation, Prepared
from paceline.trainer.reference import Reference
from paceline.trainer.sharding import shard
from paceline.trainer.stepping import Stepper
from paceline.trainer.stream import Stream
from paceline.trainer.tuning import tuned
from paceline.trainer.world import Ranks


class Learner:
    """A policy with its optimizer, and beside them whatever the settings ask for: a KL reference, a critic, ranks."""

    def __init__(
        self,
        model: PreTrainedModel,
        c: config.Trainer,
        total_steps: int | None = None,
        fp32_head: bool = False,
        group: ProcessGroup | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._model, self._config = model.eval(), c  # newly attached adapters come in training mode
        self.device = model.device if device is None else device
        # The compiler is not asked to see through matrices that lie on several ranks.
        compiled = c.compile and self.device.type == "cuda" and c.parallel.tensor == 1
        self.ranks = Ranks(group, self.device, c.parallel)
        self.forward = Forward(model, fp32_head, compiled, c.stream, self.ranks.context, self.device)
        self.layout = self.forward.layout = shard(model, self.ranks, c.parallel if group is not None else Parallel())
        self._found: int | None = None
        self._cost = cost_of(model.config)
        total = total_steps and total_steps * c.minibatches
        waiting = 0 if c.critic is None else c.critic.freeze_steps * c.minibatches
        self.optimizer = MasterAdamW(trainable(model), c.optimizer, total and max(1, total - waiting), self.layout)
        self.stepper = Stepper(model, c, self.forward, self.optimizer, self.ranks)
        self.world = self.ranks.data
        self._reference = Reference(model, c.kl, self.layout) if c.kl is not None else None
        self._critic = Critic(model, c, total, self.ranks) if c.critic is not None else None
        self._preparation = Preparation(c, self.forward, self._reference, self._critic)
        self._songbook = Songbook(model, self.forward.head)
        self._stream: Stream | None = None

    def feed(self, samples: Sequence[Sample], version: int) -> None:
        """Samples of a batch that is still being gathered: what micro-batches they fill run now. `learn` then gets only
        the others."""
        self._stream = self._stream or Stream(self._config, self.optimizer)
        if not samples:
            return
        work = self._alone(samples)
        self.stepper.feed(self._stream, self._stream.add(work.batch.samples, self._budget), version)

    def learn(self, samples: Sequence[Sample], version: int) -> tuple[dict[str, float], str]:
        """Train one batch, sampled by `version` or earlier: its metrics, and what was wrong with a step that was left
        out, if one was. What was fed before belongs to it."""
        rate = self.optimizer.lr
        if self._stream is not None:
            self.feed(samples, version)
            steps, report, critic = [self._finish(version)], {}, []
        else:
            steps, report, critic = self._learn(samples, version)
        if self._reference is not None:
            self._reference.follow(version + 1, self.optimizer)
        if steps:
            good = [step for step in steps if not step.trouble] or steps  # one NaN would be everybody's
            report |= metrics(torch.stack([step.sums for step in good]).sum(0), len(good))
            report["grad_norm"] = fmean(step.grad_norm for step in good)
            report["micro_batches"] = float(sum(step.micro_batches for step in good))
            report["lr"] = rate
        troubles = [step.trouble for step in steps if step.trouble]
        if not all(np.isfinite(list(one.values())).all() for one in critic):
            troubles.append("the critic's loss or gradient was not finite")
        return report, troubles[0] if troubles else ""

    def _learn(
        self, samples: Sequence[Sample], version: int
    ) -> tuple[list[Outcome], dict[str, float], list[dict[str, float]]]:
        """K steps on a whole batch: how they went, and what the critic reports of the batch and of each step."""
        work, report = self._preparation.credit(self._together(samples))
        critic = self._critic if work.taught else None
        waits = critic is not None and critic.warming_up
        work = work if waits else self._preparation.scored(work)
        steps: list[Outcome] = []
        reports: list[dict[str, float]] = []
        for number in range(self._config.minibatches):
            if not waits and (outcome := self._step(work, number, version)):
                steps.append(outcome)
            if critic is not None and (taken := self._teach(critic, work, number)):
                reports.append(taken)
        if critic is not None:
            critic.batches += 1
            report |= {name: fmean(one[name] for one in reports) for name in reports[0]}
        return steps, report, reports

    def alone(self, samples: Sequence[Sample]) -> list[MicroBatch]:
        """Each sample in a micro-batch of its own, with its share of the whole batch's normalisers."""
        work = self._alone(samples)
        scales = dict(enumerate(fold(work.batch.samples, self._config.normalise, self._config.fixed_length)))
        return [lay([i], work.batch.samples, scales, work.prox) for i in scales]

    def canary(self) -> Canary:
        """What the weights of now say of a few tokens."""
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

    def tensors(self) -> dict[str, Tensor]:
        out = self.optimizer.tensors()
        if self._reference is not None:
            out |= {f"reference/{name}": tensor for name, tensor in self._reference.tensors().items()}
        if self._critic is not None:
            out |= {f"critic/{name}": tensor for name, tensor in self._critic.tensors().items()}
        return out

    def state(self) -> dict:
        return {
            "optimizer_steps": self.optimizer.steps,
            "loss_scale": self.optimizer.scale,
            "base": "" if self._reference is None else self._reference.base_fingerprint(),
            "critic": {} if self._critic is None else self._critic.state(),
            "grad_norms": self.stepper.norms.state(),
        }

    def load(self, tensors: Mapping[str, Tensor], state: Mapping) -> None:
        self._stream = None  # what was fed belongs to a batch that is no more
        self.optimizer.zero()
        self.stepper.norms.load(state.get("grad_norms", ()))
        self.optimizer.load(tensors, state["optimizer_steps"], state.get("loss_scale"))
        if self._reference is not None:
            self._reference.load(_under("reference/", tensors), state.get("base", ""))
        if self._critic is not None:
            self._critic.load(_under("critic/", tensors), state.get("critic", {}))

    # -- inside -----------------------------------------------------------------------------------------------------

    @property
    def _budget(self) -> int:
        """Tokens of a micro-batch; where that is to be found out, it is once, when the first batch is here."""
        if self._found is None:
            given = self._config.micro_batch_tokens
            self._found = tuned(self.forward, self._model, self._config) if given == "auto" else given
        return self._found

    def _alone(self, samples: Sequence[Sample]) -> Prepared:
        """Samples that no other rank needs to know of."""
        batch = Batch.alone(samples, self._config, self._budget)
        return self._preparation.scored(self._preparation.credit(batch)[0])

    def _together(self, samples: Sequence[Sample]) -> Batch:
        """All ranks' samples, and the same cut of them on every rank."""
        if self._critic is not None and self._critic.pupils(samples):
            self._critic.make()  # before anybody looks how much memory is left for a micro-batch
        everything, self._found = together(samples, self.world, self._budget)
        cut = cuts(everything, self._config.minibatches, self.world.size, self._found, self._cost)
        return Batch(everything, cut, self.world.rank)

    def _step(self, work: Prepared, number: int, version: int) -> Outcome | None:
        """One optimizer step on all ranks' samples; None for one of several that has none."""
        batch, cut = work.batch, work.batch.cuts[number]
        members, bins = everyone(cut), cut[batch.rank]
        if not members and self._config.minibatches > 1:
            return None
        scales = scales_of(batch.samples, members, held(bins), self._config)
        packs = packed(batch.samples, scales, bins, work.prox) or [BLANK_PACK]
        trains = bool(count([batch.samples[i] for i in members]).any())
        return self.stepper.step(packs, version, number == 0, trains)

    def _teach(self, critic: Critic, work: Prepared, number: int) -> dict[str, float] | None:
        """The critic's step beside one of the policy's; None where nothing in it teaches."""
        cut = work.batch.cuts[number]
        members = [i for i in everyone(cut) if i in work.taught]
        own = [i for i in held(cut[work.batch.rank]) if i in work.lessons]
        if not members:
            return None
        scales = scales_of(work.batch.samples, members, own, self._config)
        return critic.update([work.lessons[i] for i in own], [scales[i] for i in own])

    def _finish(self, version: int) -> Outcome:
        """The step of a batch that was fed. A gradient that is not finite is computed once more from the whole."""
        assert self._stream is not None
        stream, self._stream = self._stream, None
        self.stepper.feed(stream, stream.rest(self._budget), version)
        if outcome := self.stepper.finish(stream):
            return outcome
        again = self._step(Prepared(self._together(stream.samples), {}, {}), 0, version)
        assert again is not None  # what is fed has one step
        return again


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
