"""A vLLM server as the policy's engine, by its own calls for reinforcement learning.

It must be started with `VLLM_SERVER_DEV_MODE=1`, `--enable-scale-out` and `--logprobs-mode processed_logprobs`, and for
adapters with `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1` and `--enable-lora`; `paceline.clients.launched` does.

Tokens go in and come out at `/inference/v1/generate`, whose answers say which weights sampled which tokens
(`weight_versions`). So requests may live through an update: they are frozen, the weights are read from a folder
(`collective_rpc` of `reload_weights`), the version is named, and they go on, each token with the version it was drawn
from.
"""

import json
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from paceline.clients.external_engine import SEED_BITS, ForeignEngine, LoadedAdapter
from paceline.engine.base import Completion, EngineLimits, EngineStats, GenerateRequest, TopLogprobs
from paceline.errors import EngineError, RequestError, Unreachable

GENERATE = "/inference/v1/generate"
COLDEST = 0.01
"""vLLM raises temperatures between 0 and this one to it."""
METRIC = re.compile(r"^vllm:(\w+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


class VllmEngine(ForeignEngine):
    """`on_swap` is as for the embedded engine: requests that live through an update of whole weights go on with the
    keys and values they have, or these are computed anew. Prefixes are shared under the version a request was sent at,
    never across. `tied` names the embedding that is the trainer's output layer too."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        folder: Path,
        tied: str | None = None,
        verify: bool = True,
        recompute: bool = False,
        capacity: int = 1,
        vocabulary: int = 1 << 31,
        priority: bool = False,
    ) -> None:
        super().__init__(url, api_key=api_key, folder=folder, verify=verify)
        self._tied = tied
        self._recompute, self._priority = recompute, priority
        self._capacity, self._vocabulary = capacity, vocabulary
        self._model = ""

    # -- the engine's protocol ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Check that a vLLM answers at this address, takes our key, and was started as a run needs it."""
        self.wire.look("/health")
        card = next(card for card in self.wire.look("/v1/models")["data"] if not card.get("parent"))
        self._model = card["id"]
        self._folders.head = self._tied if _apart(Path(card["root"])) else None
        try:
            self.wire.look("/weight_info")
        except EngineError as error:
            raise EngineError(
                f"{self.name} does not offer vLLM's calls for training (vLLM 0.32 does): start it with "
                f"VLLM_SERVER_DEV_MODE=1 and --enable-scale-out ({error})"
            ) from error
        self._check_temperature()

    def _check_temperature(self) -> None:
        """Log probabilities must be those of log_softmax(logits / temperature), as the trainer has them."""

        def best(temperature: float) -> float:
            params = {"max_tokens": 1, "temperature": temperature, "logprobs": 1, "detokenize": False}
            answer = self.wire.look(GENERATE, self._body([0], None) | {"sampling_params": params})
            (place,) = answer["choices"][0]["logprobs"]["content"]
            return max(entry["logprob"] for entry in place["top_logprobs"])

        cold, hot = best(0.5), best(2.0)
        if cold < -1e-3 and abs(cold - hot) < 1e-6:
            raise EngineError(f"{self.name} leaves the temperature out: add --logprobs-mode processed_logprobs")

    async def limits(self) -> EngineLimits:
        cards = (await self.wire.get("/v1/models"))["data"]
        context = next(card["max_model_len"] for card in cards if not card.get("parent"))
        adapters = {name: adapter.version for name, adapter in self._adapters.items() if name}
        return EngineLimits(max_context=context, vocabulary=self._vocabulary, adapters=adapters)

    async def stats(self) -> EngineStats:
        told = _metrics(await self.wire.get("/metrics"))
        return EngineStats(
            running=int(told.get("num_requests_running", 0)),
            waiting=int(told.get("num_requests_waiting", 0)),
            capacity=self._capacity,
            tokens=int(told.get("generation_tokens_total", self._tokens)),
            prompt_tokens=int(told.get("prompt_tokens_total", 0)),
            cached_tokens=int(told.get("prompt_tokens_cached_total", 0)),
            preempted=int(told.get("num_preemptions_total", 0)),
            swaps=self._swaps,
            pause_seconds=self._paused,
            busy_seconds=self.busy_seconds,
            cache_used=told.get("kv_cache_usage_perc", 0.0),
            asleep=bool((await self.wire.get("/is_sleeping"))["is_sleeping"]),
        )

    async def pause(self) -> None:
        await self.wire.order("/pause", mode="keep", clear_cache="false")

    async def resume(self) -> None:
        await self.wire.order("/resume")

    async def sleep(self) -> None:
        """Needs `--enable-sleep-mode`; on a CPU vLLM only pauses."""
        await self.wire.order("/sleep", level=1, mode="keep")

    async def wake(self) -> None:
        await self.wire.order("/wake_up")

    # -- tokens -------------------------------------------------------------------------------------------------------

    async def _sample(self, request: GenerateRequest, adapter: LoadedAdapter | None) -> Completion:
        if 0 < request.temperature < COLDEST:
            raise RequestError(f"temperature is {request.temperature}: vLLM samples at 0 or at {COLDEST} and above")
        body = self._body(request.prompt_ids, adapter.name if adapter else None)
        body["sampling_params"] = _params(request)
        if self._priority:
            body["priority"] = request.order
        answer = await self.wire.ask(GENERATE, body)
        choice = answer["choices"][0]
        if choice["finish_reason"] not in ("stop", "length"):
            raise Unreachable(f"{self.name} gave a request up ({choice['finish_reason']})")
        places = choice["logprobs"]["content"]
        versions = self._versions(choice["weight_versions"] or [], len(places), adapter)
        details = answer.get("usage", {}).get("prompt_tokens_details") or {}
        return Completion(
            token_ids=[place["token_id"] for place in places],
            logprobs=[place["logprob"] for place in places],
            versions=versions,
            finish=choice["finish_reason"],
            top=[_top(place, request.top_logprobs) for place in places] if request.top_logprobs else None,
            recomputed=self._recompute and len(set(versions)) > 1,
            cached=details.get("cached_tokens") or 0,
        )

    async def _logprobs(self, ids: Sequence[int], model: str | None) -> list[float]:
        params = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False}
        answer = await self.wire.ask(GENERATE, self._body(ids, model) | {"sampling_params": params})
        told = answer["prompt_logprobs"]
        return [0.0, *(told[place][str(ids[place])]["logprob"] for place in range(1, len(ids)))]

    def _body(self, ids: Sequence[int], model: str | None) -> dict[str, Any]:
        # Adapters have a name for each version, which vLLM keeps prefixes apart by; whole weights need a salt.
        salt = {} if model else {"cache_salt": self._label(self._version or 0)}
        return {"token_ids": list(ids), "model": model or self._model or None, **salt}

    def _versions(self, spans: Iterable[dict[str, Any]], count: int, adapter: LoadedAdapter | None) -> list[int]:
        if adapter is not None:
            return [adapter.version] * count
        versions = [self._stamp(span["version"]) for span in spans for _ in range(span["start"], span["end"])]
        if len(versions) != count:
            raise EngineError(f"{self.name} named the weights of {len(versions)} tokens, not of {count}")
        return versions

    # -- weights ------------------------------------------------------------------------------------------------------

    async def _replace(self, folder: Path, version: int) -> float:
        began = time.monotonic()
        await self.wire.order("/pause", mode="keep", clear_cache=str(self._recompute).lower())
        try:
            loaded = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            await self.wire.order("/collective_rpc", loaded)
            await self.wire.order("/update_weight_version", {"new_version": self._label(version)})
            await self.wire.order("/reset_prefix_cache")
        except EngineError:
            # It is left without weights, and a step on none would end it: no request may resume.
            await self.wire.order("/abort_requests", {})
            raise
        await self.wire.order("/resume")
        return time.monotonic() - began

    async def _load_adapter(self, name: str, folder: Path) -> None:
        await self.wire.order("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})

    def _unloading(self, name: str) -> tuple[str, dict[str, str]]:
        return "/v1/unload_lora_adapter", {"lora_name": name}

    async def _held(self) -> int | None:
        return self._version_of((await self.wire.get("/weight_info"))["weight_version"])

    async def _adapter_names(self) -> set[str]:
        return {card["id"] for card in (await self.wire.get("/v1/models"))["data"]}


def _apart(source: Path) -> bool:
    """Whether the server's copy of the model has an output layer of its own."""
    config = source / "config.json"
    return config.is_file() and json.loads(config.read_text(encoding="utf-8")).get("tie_word_embeddings") is False


def _params(request: GenerateRequest) -> dict[str, Any]:
    return {
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "seed": request.noise & SEED_BITS,
        "logprobs": request.top_logprobs,
        "stop_token_ids": sorted(request.stop_token_ids),
        "ignore_eos": True,  # the request's own stop tokens are all there are
        "detokenize": False,
    }


def _top(place: dict[str, Any], most: int) -> TopLogprobs:
    """vLLM puts the sampled token first, whatever its rank."""
    found = {entry["token_id"]: entry["logprob"] for entry in place["top_logprobs"]}
    return sorted(found.items(), key=lambda item: -item[1])[:most]


def _metrics(text: str) -> dict[str, float]:
    """Prometheus' lines, each name summed over its labels."""
    told: dict[str, float] = {}
    for name, value in METRIC.findall(text):
        told[name] = told.get(name, 0.0) + float(value)
    return told
