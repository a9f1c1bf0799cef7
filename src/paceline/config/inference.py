"""The engine that samples from the policy, and how it samples."""

from typing import Literal

from pydantic import Field

from paceline.config.backends import Backend
from paceline.config.base import Section


class Sampling(Section):
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


class Engine(Backend):
    """The embedded engine: continuous batching over the trainer's own model code; or another maker's server."""

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
