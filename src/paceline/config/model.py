"""The policy: which weights, which tokenizer, full fine-tuning or LoRA."""

from typing import Literal

from pydantic import Field

from paceline.config.base import FilePath, ModelName, Section

Dtype = Literal["float32", "bfloat16", "float16"]
QUICKSTART = "paceline:quickstart"
"""The tiny model that ships with the package."""


class Lora(Section):
    """Train low-rank adapters and leave the base frozen."""

    rank: int = Field(default=16, ge=1)
    """Rows of the low-rank factors."""
    alpha: float = Field(default=32.0, gt=0)
    """The adapter's output is scaled by alpha / rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of an adapter's inputs that training sets to zero."""
    targets: list[str] | Literal["all-linear"] = "all-linear"
    """Module names that get an adapter."""


class Model(Section):
    """A Hugging Face causal language model: a local folder, a hub name, or `paceline:quickstart`."""

    name: ModelName = QUICKSTART
    """Folder, hub name, or `paceline:quickstart` for the tiny model that ships with the package."""
    tokenizer: ModelName | None = None
    """Folder or hub name of the tokenizer; the model's own when left out."""
    chat_template: FilePath | None = None
    """Path of a Jinja file that replaces the tokenizer's chat template."""
    renderer: Literal["auto", "template", "renderers"] = "auto"
    """Who writes conversations as tokens. `auto`: the `renderers` package where it is installed, knows the model and
    agrees with its chat template, else the template; `renderers`: an error where the package cannot."""
    known_as: str | None = None
    """The model's hub name or family in `renderers` (such as `qwen3`), for a local folder or a fine-tune."""
    keep_thoughts: bool = False
    """Go on from a reply with its thoughts where the template would drop them; needs `renderers`."""
    allow_dropped_tools: bool = False
    """Play on where the chat template writes nothing of the tools an environment offers: for tools that the environment
    describes in its messages. Otherwise such a run is refused."""
    dtype: Dtype | Literal["auto"] = "auto"
    """Compute type of trainer and engine. `auto`: the checkpoint's own type where the machine that starts the run
    multiplies it fast (CUDA, a Mac's GPU, a CPU with bfloat16 instructions), else float32. A run keeps what was chosen
    when it began. Masters and moments are always float32."""
    fp32_head: bool = False
    """Compute logits in float32 whatever `dtype` says, alike in engine and trainer."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    lora: Lora | None = None
    """Adapters to train; full fine-tuning when left out."""
