"""The engine that samples from the policy, Paceline's own or another, and how it samples."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, field_validator

from paceline.config.base import PathKey, Section

if TYPE_CHECKING:
    from paceline.config.run import RunConfig


NAMES = {"vllm": "vLLM", "sglang": "SGLang"}


class LaunchConfig(Section):
    """A vLLM that the run starts on this machine, on a loopback port with a key of its own, and ends with itself."""

    python: Annotated[str, PathKey("program")] = ".venv-vllm/bin/python"
    """The interpreter of the environment vLLM is installed in."""
    args: list[str] = Field(default_factory=list)
    """Further arguments of vLLM's server, such as `["--tensor-parallel-size", "2"]`; the last one counts."""
    env: dict[str, str] = Field(default_factory=dict)
    """Further variables of its environment."""
    seconds: float = Field(default=900.0, gt=0)
    """How long it may take to come up."""


class SamplingConfig(Section):
    """How completions are drawn."""

    temperature: float = Field(default=1.0, ge=0, le=100)
    """0 is greedy, allowed for evaluation only."""
    max_tokens: int = Field(default=256, ge=1)
    """Longest completion of one turn."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample among the likeliest tokens that together have this probability; 1 keeps all."""
    top_k: int = Field(default=0, ge=0)
    """0 keeps the whole vocabulary."""
    stop_token_ids: list[int] = Field(default_factory=list)
    """Tokens that end a turn, besides the tokenizer's end-of-turn token."""

    @property
    def truncates(self) -> bool:
        """Whether the sampled distribution differs from softmax(logits / temperature)."""
        return self.temperature == 0 or self.top_p < 1 or self.top_k > 0


class EngineConfig(Section):
    """The embedded engine: continuous batching over the trainer's own model code; or another maker's server."""

    backend: Literal["paceline", "vllm", "sglang"] = "paceline"
    """What samples: `paceline`, the embedded engine; `vllm` or `sglang` (experimental), a server of theirs. A server is
    attached by its `base_url`; vLLM may also be `launch`ed. SGLang was never tried on a GPU."""
    base_url: str | None = None
    """Address of a server that the run does not start. It must see `folder` under the same path."""
    api_key_env: str | None = None
    """Environment variable that holds its key."""
    folder: str | None = None
    """Where weights are written for it; `weights` in the run directory when left out."""
    launch: LaunchConfig | None = None
    """How a vLLM of the run's own is started; needed unless `base_url` is given."""
    max_running: int = Field(default=128, ge=1)
    """Requests decoded together."""
    max_context: int | None = Field(default=None, ge=2)
    """Longest prompt plus completion; the model's own limit when left out."""
    prefill_tokens: int = Field(default=4096, ge=1)
    """Most prompt tokens computed in one step, so that decoding is never held up for long."""
    max_waiting: int = Field(default=100_000, ge=1)
    """Requests that may queue before new ones are refused."""
    on_swap: Literal["keep", "recompute"] = "keep"
    """What running requests do with their KV cache when the weights change under them."""
    verify_weights: bool = True
    """Check the fingerprint and the canary of every weight update before anything is sampled from it."""
    in_flight: int | None = Field(default=None, ge=0, le=16)
    """Steps launched before the host reads the first one's tokens; 3 on CUDA and 0 on CPU when left out."""
    cache: Literal["auto", "slots", "pages"] = "auto"
    """How keys and values are kept: a row per request (CPU) or shared pages (CUDA, always)."""
    cache_gib: float | None = Field(default=None, gt=0)
    """Memory for the paged cache; half of the GPU's free memory when left out."""
    compile: bool | Literal["auto"] = "auto"
    """On CUDA, run compiled layers: up to twice as fast. `auto` starts uncompiled at once, has the code compiled by
    another process where the run is long enough to gain from it, and switches between two steps; a run that finds the
    code in the cache of an earlier one starts compiled. `true` compiles before the first token, half a minute or less.
    A deterministic run never switches: there `auto` means `false`."""
    products: Literal["exact", "half"] = "exact"
    """On a CPU, how a float32 model multiplies. `half` rounds both factors to float16 and sums in float32: up to twice
    as fast on 64-bit ARM, closer to float32 than bfloat16 is, for a float16 copy of the weights in memory."""
    adapters: int = Field(default=0, ge=0, le=64)
    """LoRA adapters that can be served at once, the policy's own included."""
    adapter_rank: int = Field(default=16, ge=1)
    """Highest rank of a served adapter."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads; a share of the cores when left out."""

    @field_validator("base_url")
    @classmethod
    def _check_url(cls, url: str | None) -> str | None:
        if url is not None and not url.startswith(("http://", "https://")):
            raise ValueError(f"`{url}` is no address: write where the engine is served, http://HOST:PORT")
        return url

    def check_keys(self) -> None:
        given = [name for name in ("base_url", "api_key_env", "folder", "launch") if getattr(self, name) is not None]
        if self.backend == "paceline":
            if given:
                raise ValueError(f'{" and ".join(given)} need another engine: set backend = "vllm" or "sglang"')
        elif self.backend == "sglang" and self.launch is not None:
            raise ValueError("only vLLM is launched: start SGLang yourself and give its base_url")
        elif (self.base_url is None) == (self.launch is None):
            both = "" if self.base_url is None else ", not both"
            launch = " or a section [engine.launch], which may be empty" if self.backend == "vllm" else ""
            raise ValueError(f'backend = "{self.backend}" needs base_url, where it is served,{launch}{both}')


def engine_problems(config: "RunConfig") -> Iterator[str]:
    engine = config.engine
    if engine.backend == "paceline":
        return
    name = NAMES[engine.backend]
    if config.placement != "local":
        yield f'placement = "{config.placement}" starts engines of Paceline: with {name} set placement = "local"'
    if config.deterministic:
        yield f"deterministic = true needs the embedded engine: {name} repeats a run as far as its own seeds go"
    if config.model.fp32_head:
        yield f"model.fp32_head is not known to {name}: leave it out"
    samplings = {"sampling": config.sampling, "eval.sampling": config.eval.sampling}
    for at, sampling in samplings.items():
        if sampling is not None and (sampling.top_p < 1 or sampling.top_k > 0):
            yield (
                f"{at}: {name} reports log probabilities of what top_p and top_k have left, not of the policy itself: "
                "leave both out, or use the embedded engine"
            )
    for env in config.env:
        if getattr(env, "league", None) is not None:
            yield f"environment `{env.name}`: a league needs the embedded engine, which serves past versions too"
