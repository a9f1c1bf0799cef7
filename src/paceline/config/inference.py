"""The engine that samples from the policy, and how it samples."""

from typing import Literal

from pydantic import Field

from paceline.config.base import Section


class Sampling(Section):
    """How completions are drawn."""

    temperature: float = Field(default=1.0, ge=0, le=100)
    """0 is greedy, allowed for evaluation only."""
    max_tokens: int = Field(default=256, ge=1)
    """Longest completion of one turn."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    """0 keeps the whole vocabulary."""
    stop_token_ids: list[int] = Field(default_factory=list)
    """Tokens that end a turn, besides the tokenizer's end-of-turn token."""

    @property
    def truncates(self) -> bool:
        """Whether the sampled distribution differs from softmax(logits / temperature)."""
        return self.temperature == 0 or self.top_p < 1 or self.top_k > 0


class Engine(Section):
    """The embedded engine: continuous batching over the trainer's own model code."""

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
    threads: int | None = Field(default=None, ge=1)
    """CPU threads; a share of the cores when left out."""
