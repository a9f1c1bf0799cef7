"""The trainer: loss, optimizer, packing. It knows no algorithm."""

from typing import Annotated, Literal

from pydantic import Field

from paceline.config.base import Section


class DPPO(Section):
    """Policy gradient with a trust region on the probability difference, plus a small squared log-ratio."""

    type: Literal["dppo"] = "dppo"
    low: float = Field(default=0.2, ge=0)
    """With a negative advantage, a token whose probability already fell by more than this is dropped."""
    high: float = Field(default=0.2, ge=0)
    """With a positive advantage, a token whose probability already rose by more than this is dropped."""
    kl_tau: float = Field(default=1e-3, ge=0)
    """Weight of (log ratio)^2, over all rl tokens."""


class PPO(Section):
    """The clipped surrogate of PPO."""

    type: Literal["ppo"] = "ppo"
    clip_low: float = Field(default=0.2, ge=0, le=1)
    clip_high: float = Field(default=0.2, ge=0)
    dual_clip: float | None = Field(default=None, gt=1)
    """Bound the loss of negative advantages at this ratio; off when left out."""


LossConfig = Annotated[DPPO | PPO, Field(discriminator="type")]


Beta = Annotated[float, Field(ge=0, lt=1)]


class Optimizer(Section):
    """AdamW."""

    lr: float = Field(default=1e-5, ge=0)
    # Not strict, since TOML has lists only; the numbers in it still are.
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after warm-up, over the run's steps."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up."""
    final_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Where `linear` and `cosine` end, as a share of `lr`."""


class Trainer(Section):
    """How a batch becomes a gradient."""

    optimizer: Optimizer = Optimizer()
    loss: LossConfig = DPPO()
    normalise: Literal["token", "sample", "fixed"] = "token"
    """Divide a component's sum by its tokens, its samples' own lengths, or samples times `fixed_length`."""
    fixed_length: int = Field(default=1024, ge=1)
    """The constant length of `normalise = "fixed"`."""
    micro_batch_tokens: int = Field(default=4096, ge=1)
    """Token budget of one packed forward pass."""
    max_sample_tokens: int | None = Field(default=None, ge=2)
    """Longer samples are truncated; the model's context when left out."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    compile: bool = True
    """On CUDA, run compiled layers: about a third faster, after a minute at the start."""
    max_bad_steps: int = Field(default=3, ge=1)
    """Steps with a NaN or infinite gradient are skipped; this many in a row stop the run."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads; a share of the cores when left out."""
