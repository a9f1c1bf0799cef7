"""Sets up the model of episodes that do not train: the run's in this process, or an endpoint's."""

import asyncio
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
from transformers import GenerationConfig

from paceline.clients import HttpEngine, Pool
from paceline.config import RunConfig
from paceline.config.hardware import uses_mlx
from paceline.config.inference import SamplingConfig
from paceline.config.model import ModelConfig
from paceline.config.secret import address_secret
from paceline.errors import EngineError, PacelineError
from paceline.model import end_tokens, load_tokenizer
from paceline.model.source import resolve
from paceline.rollout import RecordingServer, SamplingClient
from paceline.rollout.endpoint import Endpoint
from paceline.runtime.local import checkpoint_compute_dtype, sampling_clients, with_sections, with_settled_dtype
from paceline.runtime.serving import embedded_engine
from paceline.trainer.checkpoint import read_state
from paceline.weights.update import POLICY_MODEL, Adapter, WeightUpdate

ASK_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class EpisodeRuntime:
    client: SamplingClient | Endpoint
    """Makes the seats; only those of a sampling client have exact tokens."""
    recorder: RecordingServer
    """Gives a guest's seat its address."""
    close: Callable[[], Coroutine[Any, Any, None]]
    decode: Callable[[Sequence[int]], str]
    """A prompt that was given as tokens, for people."""


@dataclass(frozen=True, slots=True)
class OpenAIServer:
    url: str
    model: str | None = None
    """The model's name there; the first it lists when left out."""
    api_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """The address is in every sentence about the server; a secret must not be."""
        if secret := address_secret(self.url):
            raise PacelineError(
                f"the address has {secret}, where others may read it: give the key with --api-key instead"
            )


@contextmanager
def open_episode_runtime(
    config: RunConfig,
    sampling: SamplingConfig,
    address: OpenAIServer | None,
    concurrency: int,
    checkpoint: Path | None = None,
) -> Generator[EpisodeRuntime]:
    """Tokens are exact with the model in this process, and with a `paceline serve` of that very model. Any other
    endpoint is asked in words. The model in this process may speak with the weights of one of the run's checkpoints."""
    recorder = RecordingServer(**config.recording.model_dump())
    config = with_settled_dtype(config, checkpoint)
    if address is not None and not serves_model(address, config.model.name):
        endpoint = Endpoint(address.url, sampling, model=address.model, api_key=address.api_key, recorder=recorder)
        yield EpisodeRuntime(endpoint, recorder, endpoint.close, lambda ids: f"{len(ids)} tokens")
        return
    tokenizer = load_tokenizer(config.model)
    with ExitStack() as stack:
        if address is None:
            room = {"max_running": min(config.engine.max_running, concurrency)}
            engine, ends = stack.enter_context(embedded_engine(with_sections(config, engine=room)))
            if checkpoint is not None:
                asyncio.run(engine.load_weights(saved_weights(checkpoint, config.model, uses_mlx(config.backend))))
        else:
            engine = HttpEngine(address.url, api_key=address.api_key)
            engine.start()
            try:  # the model itself is not loaded for the tokens that end a turn
                generation = GenerationConfig.from_pretrained(resolve(config.model.name))
            except OSError:  # a model without generation settings of its own
                generation = None
            ends = end_tokens(tokenizer, SimpleNamespace(generation_config=generation))
        client = sampling_clients(Pool([engine]), tokenizer, ends, config.model, recorder, "warn")(sampling)

        async def close() -> None:
            await client.close()
            if isinstance(engine, HttpEngine):
                await engine.aclose()

        def decode(ids: Sequence[int]) -> str:
            return str(tokenizer.decode(list(ids), skip_special_tokens=False))

        yield EpisodeRuntime(client, recorder, close, decode)


def saved_weights(folder: Path, model: ModelConfig, mlx: bool = False) -> WeightUpdate:
    """The update that a checkpoint of a run of this model would publish: the trainer's masters in the compute type."""
    version = read_state(folder)["version"]
    dtype = checkpoint_compute_dtype(folder) if model.dtype == "auto" else model.dtype
    if mlx:
        import mlx.core as mx

        from paceline.trainer.mlx import checkpoint as mlx_checkpoint
        from paceline.weights.mlx_arrays import evaluate

        own = getattr(mx, "float32" if model.lora else dtype)  # adapters are float32 whatever the base is
        tensors = evaluate({name: master.astype(own) for name, master in mlx_checkpoint.masters(folder).items()})
    else:
        import torch

        from paceline.trainer.torch import checkpoint

        tensors = {name: master.to(getattr(torch, dtype)) for name, master in checkpoint.masters(folder).items()}
    if model.lora is None:
        return WeightUpdate(version, tensors)
    # peft names the one adapter it trains; an update's names do not.
    adapter = {name.replace(".default.", "."): tensor for name, tensor in tensors.items()}
    return WeightUpdate(version, adapter, Adapter(POLICY_MODEL, model.lora.alpha / model.lora.rank))


def serves_model(address: OpenAIServer, name: str) -> bool:
    """Whether the endpoint is a `paceline serve` of the model of this name, so that tokens can be exchanged."""
    if address.model not in (None, name):
        return False
    base = address.url.rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {address.api_key}"} if address.api_key else {}
    try:
        with httpx.Client(base_url=base, headers=headers, timeout=ASK_SECONDS) as client:
            if client.get("/limits").status_code != 200:
                return False
            return client.get("/v1/models").json()["data"][0]["id"] == name
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise EngineError(f"{address.url} does not answer: {str(error) or type(error).__name__}") from error
    except (ValueError, LookupError, TypeError):
        return False
