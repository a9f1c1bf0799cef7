"""Model settings: the policy with its weights, tokenizer and LoRA, and frozen models."""

from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, ValidationInfo, field_validator

from paceline.config.base import FilePath, ModelName, Section
from paceline.config.secret import address_secret


class ModelRef(Section):
    """A frozen model: behind an endpoint that the run does not start (another `paceline serve`, a vLLM, anything that
    speaks OpenAI's API in token ids) or, to score alone, on scorers of the run. It must have the policy's
    vocabulary."""

    name: ModelName = Field(min_length=1)
    """The model's name at the endpoint; without a `base_url`, its folder or hub name."""
    base_url: str | list[str] | None = None
    """The endpoint's address, such as `http://127.0.0.1:8001/v1`. A list names several servers of the same model,
    which share the work. Left out, `placement = "ray"` starts scorers for it (`cluster.scorers`)."""
    api_key_env: str | None = None
    """Environment variable that holds the endpoint's key; none is sent when left out."""
    concurrency: int = Field(default=16, ge=1)
    """Requests sent to it at once."""

    @field_validator("base_url")
    @classmethod
    def _check_urls(cls, given: str | list[str] | None) -> str | list[str] | None:
        for url in [given] if isinstance(given, str) else given or []:
            parts = urlsplit(url)
            if parts.query and not address_secret(url):  # which has a sentence of its own
                raise ValueError("an address has no `?`: write where the model is served, http://HOST:PORT/v1")
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(f"`{url}` is no address: write where the model is served, http://HOST:PORT/v1")
        if given is not None and not given:
            raise ValueError("name at least one address")
        return given

    @field_validator("api_key_env")
    @classmethod
    def _check_key_has_an_endpoint(cls, variable: str | None, info: ValidationInfo) -> str | None:
        if variable is not None and info.data.get("base_url", "") is None:
            raise ValueError("this is the key of an endpoint: give its base_url too, or leave the key out")
        return variable

    @property
    def urls(self) -> list[str]:
        return [self.base_url] if isinstance(self.base_url, str) else self.base_url or []

    @property
    def where(self) -> str:
        return " and ".join(self.urls) or "the run's own scorers"


PolicyOrModel = Literal["policy"] | ModelRef
"""`"policy"`, the model that is being trained, as it is when it is asked; or a frozen model."""


Dtype = Literal["float32", "bfloat16", "float16"]
QUICKSTART = "paceline:quickstart"
"""The tiny model that ships with the package."""


class LoRAConfig(Section):
    """Train low-rank adapters and leave the base frozen."""

    rank: int = Field(default=16, ge=1)
    """Rows of the low-rank factors."""
    alpha: float = Field(default=32.0, gt=0)
    """The adapter's output is scaled by alpha / rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of an adapter's inputs that training sets to zero."""
    targets: list[str] | Literal["all-linear"] = "all-linear"
    """Module names that get an adapter."""


class ModelConfig(Section):
    """A Hugging Face causal language model: a local folder, a hub name, or `paceline:quickstart`."""

    name: ModelName = QUICKSTART
    """Folder, hub name, or `paceline:quickstart` for the tiny model that ships with the package."""
    tokenizer: ModelName | None = None
    """Folder or hub name of the tokenizer; the model's own when left out."""
    chat_template: FilePath | None = None
    """Path of a Jinja file that replaces the tokenizer's chat template."""
    renderer: Literal["auto", "template", "renderers"] = "auto"
    """How conversations become tokens. `auto`: by the `renderers` package where it is installed, knows the model and
    agrees with its chat template, else by the template; `renderers`: an error where the package cannot."""
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
    lora: LoRAConfig | None = None
    """Adapters to train; full fine-tuning when left out."""
