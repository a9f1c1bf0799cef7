"""What happens to one batch: prepare it once, then step K times.

    credit (a critic, if rewards come without advantages) -> batch's start -> KL reference -> minibatch by minibatch:
    counts -> scales -> micro-batches backward -> gradients of all ranks -> clip -> step

What is prepared no later step may change: the K steps aim at fixed targets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from paceline.config import trainer as config
from paceline.data import MicroBatch, Sample, count, first_fit_decreasing, fold, minibatches, pack
from paceline.model import Canary, trainable
from paceline.model.canary import make_canary
from paceline.trainer.base import TrainerError
from paceline.trainer.blank import BLANK, filled_up
from paceline.trainer.critic import Critic, Lesson
from paceline.trainer.forward import Forward
from paceline.trainer.loss import Loss, Sums, metrics
from paceline.trainer.norms import Norms, Outcome
from paceline.trainer.optimizer import MasterAdamW
from paceline.trainer.reference import Reference, shaped
from paceline.trainer.scoring import score
from paceline.trainer.sharding import make_mesh, shard
from paceline.trainer.stream import Stream
from paceline.trainer.tokens import Tokens
from paceline.trainer.tuning import tuned
from paceline.trainer.world import World

STREAMS = ("versions", "advantages", "ref_logprobs", "base_logprobs", "prox_logprobs")
SCALES = ("rl_scale", "ce_scale", "ref_kl_scale", "policy_scale")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A batch with all that its optimizer steps aim at."""

    samples: list[Sample]
    prox: list[NDArray | None]
    """Log probabilities at the batch's start, where a step later than the first needs them."""
    lessons: dict[int, Lesson]
    """What the critic learns, by sample."""


class Learner:
    """A policy with its optimizer, and beside them whatever the settings ask for: a KL reference, a critic, ranks."""

    def __init__(
        self,
        model: PreTrainedModel,
        c: config.Trainer,
        total_steps: int | None = None,
        fp32_head: bool = False,
        group: ProcessGroup | None = None,
    ) -> None:
        self._model, self._config = model.eval(), c  # newly attached adapters come in training mode
        compiled = c.compile and model.device.type == "cuda"
        self.forward = Forward(model, fp32_head, compiled, again=c.stream)
        if group is not None and c.parallel.shard != "none":
            self.forward.layout = shard(model, make_mesh(group, model.device.type, c.parallel), c.parallel)
        self.layout = self.forward.layout
        self._loss = Loss(c)
        self._found: int | None = None
        total = total_steps and total_steps * c.minibatches
        waiting = 0 if c.critic is None else c.critic.freeze_steps * c.minibatches
        self.optimizer = MasterAdamW(trainable(model), c.optimizer, total and max(1, total - waiting), self.layout)
        self.world = World(group, model.device)
        self._reference = Reference(model, c.kl, self.layout) if c.kl is not None else None
        self._critic = Critic(model, c, total, self.world) if c.critic is not None else None
        self._stream: Stream | None = None
        self._norms = Norms(c.spike, self.world)

    def feed(self, samples: Sequence[Sample], version: int) -> None:
        """Samples of a batch that is still being gathered: what micro-batches they fill run now. `learn` then gets only
        the others."""
        self._stream = self._stream or Stream(self._config, self.optimizer)
        if not samples:
            return
        work = self._prepare(self._credit(samples)[0], {})
        self._run(self._stream, self._stream.add(work.samples, self._budget), version)

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
        samples, lessons, report = self._credit(samples)
        taught = bool(report)  # on some rank at least
        held = taught and self._critic is not None and self._critic.warming_up
        work = Prepared(list(samples), [None] * len(samples), lessons) if held else self._prepare(samples, lessons)
        steps: list[Outcome] = []
        critic: list[dict[str, float]] = []
        for number, members in enumerate(minibatches(work.samples, self._config.minibatches)):
            if not held and (outcome := self._step(work, members, version, first=number == 0)):
                steps.append(outcome)
            if taught and self._critic is not None:
                taken = self._critic.update([lessons[i] for i in members if i in lessons], BLANK)
                critic += [taken] if taken else []
        if taught and self._critic is not None:
            self._critic.batches += 1
            report |= {name: fmean(one[name] for one in critic) for name in critic[0]}
        return steps, report, critic

    def backward(self, micro_batch: MicroBatch, version: int, first: bool = True) -> Sums:
        """Add one micro-batch's gradient."""
        tokens, anchor = self.tokens(micro_batch)
        loss, sums = self._loss(tokens, version, first)
        self.optimizer.backward(loss, anchor)
        return sums

    def tokens(self, micro_batch: MicroBatch) -> tuple[Tokens, Tensor]:
        """The tokens that train, as the policy sees them now; and the forward pass's zero."""
        trained = np.logical_or.reduce([getattr(micro_batch, name) != 0 for name in SCALES]).nonzero()[0]
        owners = np.repeat(np.arange(len(micro_batch.lengths)), micro_batch.lengths)
        streams = {name: getattr(micro_batch, name) for name in (*STREAMS, *SCALES)}
        streams |= {"behaviour": micro_batch.logprobs, "segments": owners}
        at = {name: self.forward.send(stream[trained]) for name, stream in streams.items()}
        logprobs, entropy, anchor = self.forward.logprobs(
            micro_batch,
            self.forward.send(trained),
            entropy=True,
            entropy_grad=bool(self._config.entropy_coef),
        )
        assert entropy is not None
        return Tokens(logprobs=logprobs, entropy=entropy, names=micro_batch.names, **at), anchor

    def alone(self, samples: Sequence[Sample]) -> list[MicroBatch]:
        """Each sample in a micro-batch of its own, with its share of the whole batch's normalisers."""
        work = self._prepare(self._credit(samples)[0], {})
        scales = fold(work.samples, self._config.normalise, self._config.fixed_length)
        parts = zip(work.samples, scales, work.prox, strict=True)
        return [pack([sample], [scale], self._budget, [prox])[0] for sample, scale, prox in parts]

    def canary(self) -> Canary:
        """What the weights of now say of a few tokens."""
        # FSDP would keep a layer's memory for good as what inference mode made it, which no gradient may pass.
        quiet = torch.no_grad if self.layout.lockstep else torch.inference_mode
        with torch.no_grad():
            return self.layout.run(lambda: make_canary(self._model, self.forward.head, self.layout.dtype, quiet))

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
            "grad_norms": self._norms.state(),
        }

    def load(self, tensors: Mapping[str, Tensor], state: Mapping) -> None:
        self._stream = None  # what was fed belongs to a batch that is no more
        self.optimizer.zero()
        self._norms.load(state.get("grad_norms", ()))
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

    def _credit(self, samples: Sequence[Sample]) -> tuple[list[Sample], dict[int, Lesson], dict[str, float]]:
        for sample in samples:
            pulled = sample.ref_kl_weights is not None and sample.ref_kl_weights[sample.loss_mask].any()
            if pulled and sample.ref_logprobs is None:
                raise TrainerError(f"{sample.where}: tokens train with ref_kl but carry no `ref_logprobs`")
            if sample.advantages is not None or not sample.rl.any():
                continue
            if sample.rewards is None:
                raise TrainerError(f"{sample.where}: tokens train with rl but carry neither advantages nor rewards")
            if self._critic is None:
                raise TrainerError(
                    f"{sample.where}: carries rewards and no advantages, which needs a critic to turn one into the "
                    "other: write [trainer.critic] in the run file"
                )
        return (list(samples), {}, {}) if self._critic is None else self._critic.credit(samples)

    def _prepare(self, samples: Sequence[Sample], lessons: dict[int, Lesson]) -> Prepared:
        c = self._config
        samples = list(samples)
        shaping = c.kl is not None and c.kl.how == "advantage"
        started, lacking, frozen = self._unscored(samples, shaping)
        passes = self._passes(samples, started, lacking, frozen)
        prox = self._scored(samples, started, passes[0])
        if self._reference is not None and passes[1]:
            with self._reference.in_place():
                scores = self._scored(samples, lacking, passes[1])
            for i in lacking:
                samples[i] = samples[i].with_streams(base_logprobs=scores[i])
        if shaping and c.kl is not None:
            own = self._scored(samples, frozen, passes[2])
            known = zip(prox, [s.logprobs for s in samples], own, strict=True)
            policy = [next(stream for stream in streams if stream is not None) for streams in known]
            samples = shaped(samples, policy, c.kl)
        return Prepared(samples, prox, lessons)

    def _unscored(self, samples: Sequence[Sample], shaping: bool) -> tuple[list[int], list[int], list[int]]:
        """The samples that need scores: at the batch's start, by the reference, and by the policy for its KL shaping
        where nobody else gave any."""
        c = self._config
        started: list[int] = []
        if c.proximal is not None:
            # The first step needs none: it is taken from the batch's start itself.
            later = [i for part in minibatches(samples, c.minibatches)[0 if shaping else 1 :] for i in part]
            started = [i for i in later if samples[i].rl.any()]
        held = self._reference is not None
        lacking = [i for i, s in enumerate(samples) if held and s.base_logprobs is None and s.rl.any()]
        frozen = [i for i, s in enumerate(samples) if shaping and s.logprobs is None and i not in started]
        return started, lacking, frozen

    def _passes(self, samples: Sequence[Sample], *chosen: Sequence[int]) -> list[int]:
        """Micro-batches of each scoring pass; as many as the busiest rank's where all must keep step."""
        own = [len(self._bins([samples[i] for i in some])) for some in chosen]
        scores = self._config.proximal is not None or self._reference is not None
        if not self.layout.lockstep or not scores:
            return own
        return self.world.each(torch.tensor(own)).amax(0).int().tolist()

    def _bins(self, samples: Sequence[Sample]) -> list[list[int]]:
        """How this rank's samples are cut into micro-batches. The one place where a cut that all ranks have agreed on
        (`paceline.data.balance`) would come in."""
        return first_fit_decreasing([len(sample) for sample in samples], self._budget)

    def _scored(self, samples: Sequence[Sample], chosen: Sequence[int], passes: int) -> list[NDArray | None]:
        scores = score(self.forward, [samples[i] for i in chosen], self._budget, passes)
        found = dict(zip(chosen, scores, strict=True))
        return [found.get(i) for i in range(len(samples))]

    def _step(self, work: Prepared, members: Sequence[int], version: int, first: bool) -> Outcome | None:
        """One optimizer step on all ranks' samples; None when no rank has any. The ranks meet once to agree on it: on
        the normalisers, and on how many micro-batches each runs."""
        samples = [work.samples[i] for i in members]
        bins = self._bins(samples)
        counted = torch.from_numpy(np.append(count(samples).ravel(), [len(samples), len(bins)]))
        ranks = self.world.each(counted).cpu().numpy()
        totals, number = ranks[:, :-2].sum(0), int(ranks[:, -2].sum())
        if not number and self._config.minibatches > 1:
            return None
        scales = fold(samples, self._config.normalise, self._config.fixed_length, totals.reshape(-1, 2))
        packs = pack(samples, scales, self._budget, [work.prox[i] for i in members], bins)
        packs = filled_up(packs, max(1, int(ranks[:, -1].max()) if self.layout.lockstep else 1))
        outcome = self._gradient(packs, version, first)
        while not outcome.finite and self.optimizer.retreat(bool(outcome.sums.isfinite().all())):
            outcome = self._gradient(packs, version, first)
        return self._take(outcome, bool(totals.any()))

    def _take(self, outcome: Outcome, trains: bool) -> Outcome:
        """Step, or leave a bad step out. Where nothing trains on any rank there is no step: AdamW would take most of
        its last one again."""
        trouble = self._norms.trouble(outcome)
        if trouble or not trains:
            self.optimizer.zero()
        else:
            self.optimizer.step()
            self._norms.add(outcome.grad_norm)
        return replace(outcome, trouble=trouble)

    def _run(self, stream: Stream, packs: Sequence[MicroBatch], version: int) -> None:
        self._model.train()
        for micro_batch in packs:
            stream.backward(*self.tokens(micro_batch), self._loss, version)
        self._model.eval()

    def _finish(self, version: int) -> Outcome:
        """The step of a batch that was fed. A gradient that is not finite is computed once more from the whole."""
        assert self._stream is not None
        stream, self._stream = self._stream, None
        self._run(stream, stream.rest(self._budget), version)
        totals = self.world.sum(torch.from_numpy(count(stream.samples).ravel())).cpu().numpy().reshape(-1, 2)
        sums = stream.finish(totals)
        self.world.sum_gradients(self.optimizer.unsummed)
        outcome = Outcome(self.world.sum(sums), float(self.optimizer.clip()), stream.micro_batches)
        if not outcome.finite:
            self.optimizer.zero()
            whole = Prepared(stream.samples, [None] * len(stream.samples), {})
            again = self._step(whole, range(len(stream.samples)), version, first=True)
            return again or outcome
        return self._take(outcome, bool(totals.any()))

    def _gradient(self, packs: Sequence[MicroBatch], version: int, first: bool) -> Outcome:
        """All ranks' gradient, clipped."""
        self._model.train()
        sums = [self.backward(micro_batch, version, first) for micro_batch in packs]
        self._model.eval()
        self.world.sum_gradients(self.optimizer.unsummed)
        return Outcome(self.world.sum(Sums.total(sums)), float(self.optimizer.clip()), len(packs))


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
