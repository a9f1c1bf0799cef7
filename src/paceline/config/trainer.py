"""Trainer settings: loss, optimizer, packing. They do not depend on the algorithm."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from paceline.config.base import Section, UserCode
from paceline.config.cluster import ParallelConfig
from paceline.config.model import ModelRef

if TYPE_CHECKING:
    from paceline.config.run import RunConfig

MAX_LOG_RATIO = 20.0
"""Exponents are clamped to this much either way: e^20 is far outside any trust region, and still a number."""
TEACHER_KL_TRUST = 0.2
"""A teacher's pull ends once the probability has moved this far its way."""


class DPPOConfig(Section):
    """Divergence PPO (arXiv 2602.04879): policy gradient with a trust region on the probability difference, plus a
    small squared log-ratio."""

    type: Literal["dppo"] = "dppo"
    low: float = Field(default=0.2, ge=0)
    """With a negative advantage, a token whose probability already fell by more than this is dropped."""
    high: float = Field(default=0.2, ge=0)
    """With a positive advantage, a token whose probability already rose by more than this is dropped."""
    kl_tau: float = Field(default=1e-3, ge=0)
    """Weight of (log ratio)^2, over all rl tokens."""


class PPOConfig(Section):
    """The clipped surrogate of PPO."""

    type: Literal["ppo"] = "ppo"
    clip_low: float = Field(default=0.2, ge=0, le=1)
    """Clip a token's ratio below at 1 - clip_low."""
    clip_high: float = Field(default=0.2, ge=0)
    """Clip a token's ratio above at 1 + clip_high."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Bound the loss of negative advantages at this ratio; off when left out."""


class GSPOConfig(Section):
    """PPO's clip on the whole sequence's ratio, the geometric mean of its tokens'. Turns `trainer.proximal` on."""

    type: Literal["gspo"] = "gspo"
    clip_low: float = Field(default=3e-4, ge=0, le=1)
    """Clip the sequence's ratio below at 1 - clip_low."""
    clip_high: float = Field(default=4e-4, ge=0)
    """Clip the sequence's ratio above at 1 + clip_high."""


class CISPOConfig(Section):
    """Policy gradient whose importance weight is clipped, so that no token loses its gradient."""

    type: Literal["cispo"] = "cispo"
    min_ratio: float = Field(default=0.0, ge=0)
    """Smallest weight of a token; 0 is no lower bound."""
    max_ratio: float = Field(default=5.0, gt=0)
    """Largest weight of a token."""


class ReinforceConfig(Section):
    """The plain policy gradient, -A log pi."""

    type: Literal["reinforce"] = "reinforce"
    max_ratio: float | None = Field(default=None, gt=0)
    """Weigh tokens by the ratio to the sampler (with `proximal`: to the batch's start), up to this much. When left out
    all weigh 1, as if just sampled by the policy."""


class CustomLossConfig(UserCode):
    """A user's loss `fn(streams, **kwargs)`, by import path: the loss of each rl token of one sequence."""

    type: Literal["custom"] = "custom"


LossConfig = Annotated[
    DPPOConfig | PPOConfig | GSPOConfig | CISPOConfig | ReinforceConfig | CustomLossConfig, Field(discriminator="type")
]


class ProximalConfig(Section):
    """Measure steps from the policy at the batch's start, and correct for who really sampled with a capped weight."""

    cap: float = Field(default=5.0, gt=0)
    """Largest importance weight of the batch's start over the sampler."""
    level: Literal["token", "sequence"] = "token"
    """One weight per token, or one per sequence: the product over its tokens."""
    geometric: bool = False
    """At sequence level, the geometric mean over tokens instead of the product."""


class KLConfig(Section):
    """Hold the policy near a reference."""

    how: Literal["loss", "advantage", "reward"] = "loss"
    """Add the divergence to the loss, subtract each sample's mean log ratio from its advantages, or subtract each
    rollout's divergence from its reward, before anything is compared with it."""
    kind: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the divergence in the loss and in the reward: d, d^2 / 2 or e^-d + d - 1, where
    d = log pi - log reference. In the reward pi is the policy that sampled."""
    coef: float = Field(default=0.1, ge=0)
    """Weight of the divergence."""
    kl_max: float = Field(default=10.0, gt=0)
    """In the advantage, a sample's mean log ratio is clipped to this much either way."""
    reference: Literal["base", "snapshot", "ema"] | ModelRef = "base"
    """The model the run started from, the policy as it was every so often, or a running mean of it; or another model
    behind an endpoint, `{ name = "MODEL", base_url = "http://HOST:PORT/v1" }`."""
    workers: int = Field(default=0, ge=0)
    """With `placement = "ray"`: actors that compute the reference, `base` or `snapshot`, in place of the trainer. Each
    has the cores and GPUs of a scorer (`cluster.scorer_cpus`, `cluster.scorer_gpus`)."""
    every: int = Field(default=40, ge=1)
    """Batches between two snapshots."""
    decay: float = Field(default=0.99, ge=0, lt=1)
    """How much of the running mean stays at each batch."""
    offload: bool = False
    """Keep the reference's tensors in CPU memory. Needless under LoRA, where they are small or none."""

    @property
    def is_in_trainer(self) -> bool:
        """Whether the trainer computes the reference itself."""
        return not (isinstance(self.reference, ModelRef) or self.workers or self.how == "reward")


def kl_problems(config: "RunConfig") -> Iterator[str]:
    """References that no part of the run can compute."""
    kl = config.trainer.kl
    if kl is None:
        return
    if kl.workers and config.placement != "ray":
        yield (
            f'trainer.kl.workers = {kl.workers} are actors of Ray, and placement = "{config.placement}" starts none: '
            'set placement = "ray", or leave workers out'
        )
    if kl.workers and isinstance(kl.reference, ModelRef):
        where = "at its base_url" if kl.reference.base_url else "by cluster.scorers"
        yield f"trainer.kl.workers hold the policy's own model, and reference is scored {where}: leave workers out"
    if kl.workers and kl.reference == "ema":
        yield (
            'trainer.kl.reference = "ema" moves with every batch, inside the trainer: set reference = "snapshot" or '
            '"base", or leave trainer.kl.workers out'
        )
    if kl.how != "reward" or kl.workers or isinstance(kl.reference, ModelRef):
        return
    # The engine has the base where the policy is an adapter beside it.
    if kl.reference != "base" or config.model.lora is None or config.engine.backend != "paceline":
        yield (
            f'trainer.kl.how = "reward" needs its reference when a group is sampled, and reference = "{kl.reference}" '
            f"is in the trainer here: start `paceline serve {config.model.name} --scores-only` and write reference = "
            f'{{ name = "{config.model.name}", base_url = "http://HOST:PORT/v1" }}; or set placement = "ray" with '
            'trainer.kl.workers = 1; or train an adapter ([model.lora]) with reference = "base"'
        )


class CriticConfig(Section):
    """A value model for samples that bring rewards instead of advantages. It has its own optimizer, set up like the
    policy's, and takes as much memory; under LoRA it shares the frozen base."""

    lr: float | None = Field(default=None, ge=0)
    """Learning rate; the policy's when left out."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount from one sampled token to the next."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """Generalised advantage estimation: 0 trusts the critic, 1 the rewards."""
    value_clip: float = Field(default=0.2, ge=0)
    """A value may move this far from the batch's start before its loss goes flat; 0 never clips."""
    freeze_steps: int = Field(default=0, ge=0)
    """Batches that train the critic alone before the policy moves."""
    whiten: bool = True
    """Give the critic's advantages mean 0 and variance 1 over the batch."""


Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    """AdamW."""

    lr: float = Field(default=1e-5, ge=0)
    """Learning rate after warm-up."""
    # Not strict, since TOML has lists only; the numbers in it still are.
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.95)
    """Decay of the running means of the gradient and of its square."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the denominator of an update."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay, times the learning rate."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Longer gradients are scaled down to this norm."""
    offload: bool = False
    """Keep masters, moments and gradient sums in the host's memory and step there: slower, and 16 bytes a parameter
    less on the GPU."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after warm-up, over the run's steps."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up."""
    final_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Where `linear` and `cosine` end, as a share of `lr`."""


class TrainerConfig(Section):
    """How a batch becomes a gradient."""

    optimizer: OptimizerConfig = OptimizerConfig()
    loss: LossConfig = DPPOConfig()
    """The policy loss, by `type`."""
    normalise: Literal["token", "sample", "fixed"] = "token"
    """Divide a component's sum by its tokens, by each rollout's own length and the number of rollouts, or by rollouts
    times `fixed_length`."""
    fixed_length: int = Field(default=1024, ge=1)
    """The constant length of `normalise = "fixed"`."""
    minibatches: int = Field(default=1, ge=1)
    """Optimizer steps per batch, each on its share of the rollouts. Above 1 it turns `proximal` on."""
    proximal: ProximalConfig | Literal[False] | None = None
    """Measure the policy's steps from the batch's start instead of from the sampler. When left out it is on with
    `minibatches` above 1 and with the gspo loss, and else off; `false` is always off."""
    kl: KLConfig | None = None
    """Hold the policy near a reference; off when left out."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    clip_skip_threshold: float | None = Field(default=None, gt=0, lt=1)
    """Leave out a sample with a larger share than this (say 0.3) of ratios outside 0.8 to 1.2; off when left out."""
    clip_skip_scope: Literal["sample", "micro_batch"] = "sample"
    """Judge each sample by its own tokens, whatever it is packed with, and keep its place in the normaliser; or leave
    out a whole micro-batch by its tokens together, which then counts nowhere (needs `stream = true`)."""
    critic: CriticConfig | None = None
    """A value model, needed by algorithms that give rewards instead of advantages; none when left out."""
    parallel: ParallelConfig = ParallelConfig()
    """Processes that train together, and how the model lies on them; one alone when left out."""
    micro_batch_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] = 4096
    """Token budget of one packed forward pass. `auto` tries, when the first batch is here, what the GPU's memory has
    room for beside the engine; on a CPU it is 4096."""
    stream: bool = False
    """Run micro-batches while the batch's last groups are still being sampled, instead of waiting for all of it. The
    update is the same; worth it where the trainer waits for long episodes. Takes a gradient's memory once more for each
    further component (rl, ce, teacher_kl) that trains, and with mlx a pass for each that a micro-batch holds."""
    max_sample_tokens: int | None = Field(default=None, ge=2)
    """Longer samples are truncated; the model's context when left out."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    compile: bool | Literal["auto"] = "auto"
    """On CUDA, run compiled layers: a quarter faster. `auto` as in [engine], for models in bfloat16 or float16 (float32
    stays uncompiled); of several ranks each compiles at its first step. `true` compiles before the first step."""
    max_bad_steps: int = Field(default=3, ge=1)
    """So many batches in a row with a bad step stop the run; under `on_bad_step = "roll_back"`, so many failures of the
    same step."""
    on_bad_step: Literal["skip", "stop", "roll_back"] = "skip"
    """What follows a step whose gradient is NaN or infinite, or a spike. Its optimizer step is left out and its batch
    kept in `dumps/` in any case; then go on, stop the run, or go back to the last checkpoint."""
    spike: float | None = Field(default=None, gt=1)
    """A gradient norm above so many times the median of the last 32 steps is a bad step too; off when left out."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads; a share of the cores when left out."""

    def check_keys(self) -> None:
        # Later steps of a batch are measured from its start; and GSPO's bounds are so narrow that the engine's rounding
        # alone would leave them.
        if self.proximal is None and (self.minibatches > 1 or isinstance(self.loss, GSPOConfig)):
            self.proximal = ProximalConfig()
        if self.clip_skip_scope == "micro_batch" and not self.stream:
            raise ValueError(
                'trainer.clip_skip_scope = "micro_batch" normalises by the micro-batches that were not left out, which '
                'are known once they have run: set trainer.stream = true, or clip_skip_scope = "sample"'
            )
        if self.stream and self.minibatches > 1:
            raise ValueError(
                "trainer.stream sums one gradient while a batch comes in: set minibatches = 1, or leave stream out"
            )
        if self.stream and self.critic is not None:
            raise ValueError("trainer.stream and trainer.critic do not go together: a critic judges whole batches")
        p = self.parallel
        groups = (
            (p.tensor * p.context > 1, "that share a sample", "tensor = 1 and context = 1"),
            (p.shard != "none", "of a sharded model", 'shard = "none"'),
        )
        for together, ranks, alone in groups:
            if self.stream and together:
                raise ValueError(
                    f"trainer.stream runs a micro-batch when it comes, and ranks {ranks} run each together: "
                    f"leave stream out, or set {alone} in [trainer.parallel]"
                )
            if self.micro_batch_tokens == "auto" and together:
                raise ValueError(
                    f'micro_batch_tokens = "auto" is tried on each rank for itself, and ranks {ranks} compute '
                    "only together: give a number, such as 4096"
                )
