"""Loads the model to train, and connects to the server it is sampled from."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from paceline.config.apple import on_mlx
from paceline.config.inference import SamplingConfig
from paceline.config.model import LoRAConfig, ModelConfig
from paceline.errors import PacelineError
from paceline.inference import HttpEngine, Pool
from paceline.model import end_tokens, load_tokenizer
from paceline.rollout import Renderer, SamplingClient

ADAPTER = LoRAConfig()


def load(
    name: str, lora: LoRAConfig | None = ADAPTER, seed: int = 0, backend: str = "auto"
) -> tuple[Any, PreTrainedTokenizerBase]:
    """A model ready to train, of torch or of mlx, with its tokenizer; `lora = None` trains all of it."""
    config = ModelConfig(name=name, lora=lora)
    if on_mlx(backend):
        from paceline.model.mlx import loading
        from paceline.model.mlx import lora as adapters

        return adapters.attach_lora(loading.load_model(config), lora, seed), load_tokenizer(config)
    from paceline.model import attach_lora, load_model

    return attach_lora(load_model(config), config, seed), load_tokenizer(config)


class Client:
    """A pool of engines that actors are sampled from."""

    def __init__(self, pool: Pool, sampling: SamplingConfig | None = None) -> None:
        self.pool = pool
        self._sampling = sampling or SamplingConfig()
        self._voice: SamplingClient | None = None

    def connect(self, model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        """From now on speak in this model's template. A `Trainer` does this for its client."""
        ends = end_tokens(tokenizer, model)
        self._voice = SamplingClient(self.pool, Renderer(tokenizer, ends), self._sampling, frozenset(ends))

    @property
    def voice(self) -> SamplingClient:
        if self._voice is None:
            raise PacelineError("this client does not know the model's template yet: make the SelfPlayTrainer first")
        return self._voice


class OpenAIClient(Client):
    """A running `paceline serve`. Adapters are sent to it over HTTP; full weights as a file in `folder`, which it must
    `--allow`."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        folder: Path | None = None,
        sampling: SamplingConfig | None = None,
    ) -> None:
        self._engine = HttpEngine(base_url, api_key=api_key, folder=folder)
        super().__init__(Pool([self._engine]), sampling)

    async def aclose(self) -> None:
        """Close the connections."""
        self.pool.close()
        await self._engine.aclose()
