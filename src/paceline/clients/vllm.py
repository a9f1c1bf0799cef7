"""A vLLM server as the policy's engine, by its own calls for reinforcement learning.

It must be started with `VLLM_SERVER_DEV_MODE=1`, `--enable-scale-out` and `--logprobs-mode processed_logprobs`, and for
adapters with `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1` and `--enable-lora`; `VllmProcess` does.

Tokens go in and come out at `/inference/v1/generate`, whose answers say which weights sampled which tokens
(`weight_versions`). So requests may live through an update: they are frozen, the weights are read from a folder
(`collective_rpc` of `reload_weights`), the version is named, and they go on, each token with the version it was drawn
from.
"""

import asyncio
import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from paceline.clients.external_engine import SEED_BITS, ExternalEngine, LoadedAdapter
from paceline.engine.base import Completion, EngineLimits, EngineStats, GenerateRequest, TopLogprobs
from paceline.errors import EngineError, RequestError, Unreachable
from paceline.util.child_process import free_port
from paceline.weights.update import ServedPolicy, WeightUpdate

GENERATE_PATH = "/inference/v1/generate"
MIN_TEMPERATURE = 0.01
"""vLLM raises temperatures between 0 and this one to it."""
METRIC = re.compile(r"^vllm:(\w+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


class VllmEngine(ExternalEngine):
    """`on_swap` is as for the embedded engine: requests that live through an update of whole weights go on with the
    keys and values they have, or these are computed anew. Prefixes are shared under the version a request was sent at,
    never across. `tied` names the embedding that is the trainer's output layer too."""

    remedy = "add --logprobs-mode processed_logprobs"
    unload_path = "/v1/unload_lora_adapter"

    def __init__(
        self, url: str, *, tied: str | None = None, recompute: bool = False, priority: bool = False, **shared: Any
    ) -> None:
        super().__init__(url, **shared)
        self._tied, self._recompute, self._priority = tied, recompute, priority
        self._model = ""

    def start(self) -> None:
        """Check that a vLLM answers at this address, takes our key, and was started as a run needs it."""
        self.request_sync("/health")
        card = next(card for card in self.request_sync("/v1/models")["data"] if not card.get("parent"))
        self._model = card["id"]
        config = Path(card["root"]) / "config.json"
        # The server's copy of the model may have an output layer of its own.
        apart = config.is_file() and json.loads(config.read_text("utf-8")).get("tie_word_embeddings") is False
        self._folders.tied_embedding = self._tied if apart else None
        try:
            self.request_sync("/weight_info")
        except Unreachable:
            raise
        except EngineError as error:
            raise EngineError(
                f"{self.name} does not offer vLLM's calls for training (vLLM 0.32 does): start it with "
                f"VLLM_SERVER_DEV_MODE=1 and --enable-scale-out ({error})"
            ) from error
        self._check_temperature()

    def _best_logprob(self, temperature: float) -> float:
        params = {"max_tokens": 1, "temperature": temperature, "logprobs": 1, "detokenize": False}
        answer = self.request_sync(GENERATE_PATH, self._body([0], None) | {"sampling_params": params})
        (place,) = answer["choices"][0]["logprobs"]["content"]
        return max(entry["logprob"] for entry in place["top_logprobs"])

    async def limits(self) -> EngineLimits:
        cards = (await self.get("/v1/models"))["data"]
        return self._limits(next(card["max_model_len"] for card in cards if not card.get("parent")))

    async def stats(self) -> EngineStats:
        found: dict[str, float] = {}
        for name, value in METRIC.findall(await self.get("/metrics")):  # each name summed over its labels
            found[name] = found.get(name, 0.0) + float(value)
        return replace(
            await super().stats(),
            running=int(found.get("num_requests_running", 0)),
            waiting=int(found.get("num_requests_waiting", 0)),
            tokens=int(found.get("generation_tokens_total", self._tokens)),
            prompt_tokens=int(found.get("prompt_tokens_total", 0)),
            cached_tokens=int(found.get("prompt_tokens_cached_total", 0)),
            preempted=int(found.get("num_preemptions_total", 0)),
            cache_used=found.get("kv_cache_usage_perc", 0.0),
            asleep=bool((await self.get("/is_sleeping"))["is_sleeping"]),
        )

    async def pause(self) -> None:
        await self.send_command("/pause", mode="keep", clear_cache="false")

    async def resume(self) -> None:
        await self.send_command("/resume")

    async def sleep(self) -> None:
        """Needs `--enable-sleep-mode`; on a CPU vLLM only pauses."""
        await self.send_command("/sleep", level=1, mode="keep")

    async def wake(self) -> None:
        await self.send_command("/wake_up")

    async def _sample(self, request: GenerateRequest, adapter: LoadedAdapter | None) -> Completion:
        if 0 < request.temperature < MIN_TEMPERATURE:
            raise RequestError(
                f"temperature is {request.temperature}: vLLM samples at 0 or at {MIN_TEMPERATURE} and above"
            )
        body = self._body(request.prompt_ids, adapter.name if adapter else None)
        body["sampling_params"] = {
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "seed": request.noise & SEED_BITS,
            "logprobs": request.top_logprobs,
            "stop_token_ids": sorted(request.stop_token_ids),
            "ignore_eos": True,  # the request's own stop tokens are all there are
            "detokenize": False,
        }
        if self._priority:
            body["priority"] = request.order
        answer = await self.post(GENERATE_PATH, body)
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
            top=[_top_logprobs(place, request.top_logprobs) for place in places] if request.top_logprobs else None,
            recomputed=self._recompute and len(set(versions)) > 1,
            cached=details.get("cached_tokens") or 0,
        )

    async def _logprobs(self, ids: Sequence[int], model: str | None) -> list[float]:
        params = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False}
        answer = await self.post(GENERATE_PATH, self._body(ids, model) | {"sampling_params": params})
        found = answer["prompt_logprobs"]
        return [0.0, *(found[place][str(ids[place])]["logprob"] for place in range(1, len(ids)))]

    def _body(self, ids: Sequence[int], model: str | None) -> dict[str, Any]:
        # Adapters have a name for each version, which vLLM keeps prefixes apart by; whole weights need a salt.
        salt = {} if model else {"cache_salt": self._version_label(self._version or 0)}
        return {"token_ids": list(ids), "model": model or self._model or None, **salt}

    async def _replace_weights(self, folder: Path, version: int) -> float:
        began = time.monotonic()
        await self.send_command("/pause", mode="keep", clear_cache=str(self._recompute).lower())
        try:
            loaded = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            await self.send_command("/collective_rpc", loaded)
            await self.send_command("/update_weight_version", {"new_version": self._version_label(version)})
            await self.send_command("/reset_prefix_cache")
        except EngineError:
            # It is left without weights, and a step on none would end it: no request may resume.
            await self.send_command("/abort_requests", {})
            raise
        await self.send_command("/resume")
        return time.monotonic() - began

    async def _load_adapter(self, name: str, folder: Path) -> None:
        await self.send_command("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})

    async def _served_version(self) -> int | None:
        return self._version_of((await self.get("/weight_info"))["weight_version"])

    async def _adapter_names(self) -> set[str]:
        return {card["id"] for card in (await self.get("/v1/models"))["data"]}


def _top_logprobs(place: dict[str, Any], most: int) -> TopLogprobs:
    """vLLM puts the sampled token first, whatever its rank."""
    found = {entry["token_id"]: entry["logprob"] for entry in place["top_logprobs"]}
    return sorted(found.items(), key=lambda item: -item[1])[:most]


GUARD_FOLDER = Path(__file__).parent / "guard"
POLL_SECONDS = 0.5
STOP_SECONDS = 30.0
MOST_STARTS = 4
"""A server that dies more often than this is not started again."""
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM takes as the highest rank of an adapter."""


@dataclass(slots=True)
class VllmProcess:
    """One server on a loopback port, with a key of its own and its log in a file."""

    python: str
    arguments: Sequence[str]
    log: Path
    env: dict[str, str]
    seconds: float
    key: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    port: int = field(default_factory=free_port)
    starts: int = 0
    _process: "subprocess.Popen | None" = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def is_dead(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def start(self) -> None:
        """Start it, without waiting until it can be asked."""
        self.starts += 1
        places = [str(GUARD_FOLDER), os.environ.get("PYTHONPATH", "")]
        ours = {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_API_KEY": self.key,  # not as an argument, which every user of the machine can read
            "PYTHONPATH": os.pathsep.join(filter(None, places)),
        }
        command = [self.python, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--middleware", "paceline_guard.Guard", *self.arguments]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self.log.open("a", encoding="utf-8") as log:
                self._process = subprocess.Popen(
                    command,
                    env={**os.environ, **ours, **self.env},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C is for the run, which ends it in its own time
                )
        except OSError as error:
            raise EngineError(f"vLLM cannot be started with {self.python}: {error.strerror}") from error

    async def wait_ready(self) -> None:
        deadline = time.monotonic() + self.seconds
        async with httpx.AsyncClient(base_url=self.url, timeout=5.0, trust_env=False) as client:
            while time.monotonic() < deadline:
                if self.is_dead:
                    lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
                    last = next(reversed(lines), "nothing was said")
                    words = next((line for line in reversed(lines) if "Error" in line), last).strip()
                    raise EngineError(f"vLLM ended before it could be asked: {words} (all of it: {self.log})")
                with contextlib.suppress(httpx.TransportError):
                    if (await client.get("/health")).is_success:
                        return
                await asyncio.sleep(POLL_SECONDS)  # bounded: by the deadline
        raise EngineError(
            f"vLLM did not answer within {self.seconds:g} s: see {self.log}, or raise engine.launch.seconds"
        )

    def restart(self) -> None:
        """Start a dead one again, a few times at most."""
        if self.is_dead and self.starts < MOST_STARTS:
            if self._process is not None:
                _end_group(self._process)
            self.start()

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        _end_group(process)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)


class LaunchedVllm(VllmEngine):
    """A vLLM that belongs to this run: started with it, started again when it dies, ended with it."""

    def __init__(self, process: VllmProcess, **more: Any) -> None:
        super().__init__(process.url, api_key=process.key, priority=True, **more)
        self._process = process
        self._is_attached = False

    def start(self) -> None:
        """Begin only: it takes long to come up, and the first update waits for it without blocking the event loop."""
        self._process.start()

    async def load_weights(self, update: WeightUpdate) -> float:
        if not self._is_attached:
            await self._process.wait_ready()
            await asyncio.to_thread(super().start)
            self._is_attached = True
        return await super().load_weights(update)

    async def policy(self) -> ServedPolicy:
        self._process.restart()
        return await super().policy()

    async def limits(self) -> EngineLimits:
        """While a server is gone the pool asks for this again and again."""
        self._process.restart()
        return await super().limits()

    def close(self) -> None:
        self._process.stop()
        super().close()


def _end_group(process: subprocess.Popen) -> None:
    """Workers that outlived their server too."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def max_lora_rank(rank: int) -> int:
    """The smallest highest rank that vLLM knows and that has room for ours."""
    found = next((known for known in LORA_RANKS if known >= rank), None)
    if found is None:
        raise EngineError(f"vLLM serves adapters of rank {LORA_RANKS[-1]} at most, not {rank}: lower model.lora.rank")
    return found
