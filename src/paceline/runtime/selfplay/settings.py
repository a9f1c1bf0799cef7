"""Defines the settings of a `SelfPlayTrainer`, and loads the model and the optimizer it trains with."""

from types import SimpleNamespace
from typing import Any, Literal

from pydantic import Field
from transformers import PreTrainedTokenizerBase

from paceline.config import trainer as sections
from paceline.config.base import Section
from paceline.config.hardware import uses_mlx
from paceline.config.model import LoRAConfig, ModelConfig
from paceline.errors import PacelineError
from paceline.model import load_tokenizer


class SelfPlayTrainerConfig(Section):
    """Settings of a `SelfPlayTrainer` and of the loops around it."""

    lr: float = Field(default=1e-5, ge=0)
    """Learning rate of Adam where the trainer is given no optimizer; an optimizer brings its own."""

    micro_batch_tokens: int = Field(default=4096, ge=1)
    """Token budget of one forward and backward pass. A longer sample has a pass of its own."""
    min_samples_per_step: int = Field(default=16, ge=1)
    """Samples whose gradients are accumulated before `accumulate` makes an optimizer step."""

    ppo_clip_min: float = Field(default=0.8, ge=0, le=1)
    """A token's ratio to the sampler is clipped below at this."""
    ppo_clip_max: float = Field(default=1.2, ge=1)
    """And above at this."""
    clip_skip_threshold: float | None = Field(default=0.3, gt=0, lt=1)
    """A micro-batch with a larger share of ratios outside 0.8 to 1.2 is left out; None leaves none out."""
    importance_sampling: Literal["token", "sequence"] = "token"
    """A ratio for each token (PPO), or one for each sample (GSPO), which then weighs all samples alike."""
    gspo_clip_epsilon: float = Field(default=3e-4, gt=0, lt=1)
    """A sample's ratio is clipped to 1 - epsilon and 1 + epsilon."""

    loss_type: Literal["token", "sample"] = "token"
    """The mean over all tokens (DAPO), or over samples of the mean over their tokens (GRPO)."""

    kl_coef: float = Field(default=0.1, ge=0)
    """With `use_kl_penalty`, the weight of the divergence."""
    use_kl_penalty: bool = False
    """Subtract each sample's mean log ratio to the base model, without adapters, from its advantages."""
    kl_max: float = Field(default=10.0, gt=0)
    """That mean log ratio is clipped to this much either way."""

    staleness_limit: int = Field(default=3, ge=0)
    """Versions that a sample's oldest token may be behind; older samples are left out and counted."""

    inference_url: str = "http://localhost:8000"
    """The server to sample from and to publish to where the trainer is given no client."""
    pad_token_id: int = Field(default=0, ge=0)
    """Checked to be a token of the model, and unused: samples are packed side by side without padding."""

    eval_every: int = Field(default=10, ge=0)
    """Optimizer steps between two evaluations of a loop; 0 turns them off."""
    eval_concurrency: int = Field(default=8, ge=1)
    """Episodes of an evaluation played at once."""

    checkpoint_every: int = Field(default=100, ge=0)
    """Optimizer steps between two checkpoints of a loop, which writes one more at its end; 0 turns them off."""
    checkpoint_dir: str = Field(default="checkpoints", min_length=1)
    """The folder they are in; the last two stay."""

    wandb_project: str | None = None
    """Project of Weights & Biases that a loop sends its metrics to; none when left out."""
    wandb_run_name: str | None = None
    """Name of the run there."""

    def check_keys(self) -> None:
        if self.wandb_run_name is not None and self.wandb_project is None:
            raise ValueError("wandb_run_name names a run of no project: set wandb_project too, or leave both out")

    def section(self, optimizer: sections.OptimizerConfig) -> sections.TrainerConfig:
        """The same as the trainer's section of a run file."""
        sequence, epsilon = self.importance_sampling == "sequence", self.gspo_clip_epsilon
        kl = sections.KLConfig(how="advantage", coef=self.kl_coef, kl_max=self.kl_max) if self.use_kl_penalty else None
        made = sections.TrainerConfig(
            optimizer=optimizer,
            loss=sections.GSPOConfig(clip_low=epsilon, clip_high=epsilon)
            if sequence
            else sections.PPOConfig(clip_low=1 - self.ppo_clip_min, clip_high=self.ppo_clip_max - 1),
            normalise="sample" if sequence else self.loss_type,
            kl=kl,
            clip_skip_threshold=self.clip_skip_threshold,
            clip_skip_scope="micro_batch",
            stream=True,
            micro_batch_tokens=self.micro_batch_tokens,
        )
        # A run file's GSPO measures from the batch's start; here both ratios are to the sampler.
        return made.model_copy(update={"proximal": None})


def Adam(learning_rate: float = 1e-5) -> sections.OptimizerConfig:
    """Adam with float32 masters."""
    return sections.OptimizerConfig(lr=learning_rate)


optim = SimpleNamespace(Adam=Adam)

ADAPTER = LoRAConfig()


def load(
    name: str, lora: LoRAConfig | None = ADAPTER, seed: int = 0, backend: str = "auto"
) -> tuple[Any, PreTrainedTokenizerBase]:
    """A model ready to train, of torch or of mlx, with its tokenizer; `lora = None` trains all of it.

    `name` is a Hugging Face folder, a name of the hub, or `paceline:quickstart`; with mlx the folder may be quantised.
    """
    if backend not in ("auto", "torch", "mlx"):
        raise PacelineError(f"load: backend = {backend!r} is none: write auto, torch or mlx")
    config = ModelConfig(name=name, lora=lora)
    if uses_mlx(backend):
        from paceline.model.mlx import loading

        model = loading.load_model(config)
    else:
        from paceline.model import load_model

        model = load_model(config)
    if lora is not None:
        apply_lora(model, lora, seed=seed)
    return model, load_tokenizer(config)


def apply_lora(model: Any, lora: LoRAConfig | None = None, *, inference_mode: bool = False, seed: int = 0) -> Any:
    """Freeze a model and put LoRA adapters beside its linear layers, in place. Adapters that `load` has put there stay.

    `inference_mode` freezes the adapters too, as peft does: such a model samples and cannot be trained.
    """
    check_model(model)
    has_adapters = _has_adapters(model)
    if has_adapters and lora is not None:
        raise PacelineError(
            "apply_lora: the model has adapters already, which stay as they are: leave `lora` out, or load the model "
            "with load(NAME, lora=None) first"
        )
    if is_mlx(model):
        from paceline.model.mlx import lora as adapters

        if not has_adapters:
            adapters.attach_lora(model, lora or ADAPTER, seed)
        for layer in adapters.adapted_layers(model.net).values():
            change = layer.freeze if inference_mode else layer.unfreeze
            change(keys=["lora_A", "lora_B"], recurse=False)
        return model
    from paceline.model import attach_lora

    if not has_adapters:
        attach_lora(model, ModelConfig(lora=lora or ADAPTER), seed)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.requires_grad_(not inference_mode)
    return model


def is_mlx(model: Any) -> bool:
    return type(model).__module__.startswith("paceline.model.mlx")


def check_model(model: Any) -> None:
    """Refuse what `load` did not give as a model."""
    if not hasattr(model, "config") or not hasattr(model, "name_or_path"):
        raise PacelineError(
            f"model: got a {type(model).__name__}, which is none: give the first of the two that `load` returns, as in "
            "`model, tokenizer = load(NAME)`"
        )


def check_trains(model: Any) -> None:
    """Refuse a model of which nothing trains."""
    check_model(model)
    trainable = model.net.trainable_parameters() if is_mlx(model) else any(p.requires_grad for p in model.parameters())
    if not trainable:
        raise PacelineError("nothing of this model trains: put adapters beside it, apply_lora(model)")


def _has_adapters(model: Any) -> bool:
    if is_mlx(model):
        from paceline.model.mlx.lora import adapted_layers

        return bool(adapted_layers(model.net))
    return hasattr(model, "peft_config")
