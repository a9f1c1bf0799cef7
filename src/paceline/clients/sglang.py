"""Samples the policy on an SGLang server by its own HTTP calls: those of version 0.5.23, whose source a test reads.

Experimental: tried against a live server on a CPU without SGLang's kernels, never on a GPU (docs/engines.md).

Requests are aborted by an update, which gives back what they have so far, and asked again from there. So each stretch
was sampled by one version, which its answer names (`meta_info.weight_version`), also on servers that do not tell spans
apart (`meta_info.weight_versions`). Adapters need no such care: each version has its name.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.clients.external_engine import ExternalEngine, LoadedAdapter
from paceline.engine.base import Completion, EngineLimits, GenerateRequest, TopLogprobs
from paceline.errors import EngineError, Unreachable

SEED_BITS = (1 << 31) - 1
MOST_SEGMENTS = 64
"""Updates that may cut one request."""


class SglangEngine(ExternalEngine):
    """Attached to a server that you started; where the run trains adapters, with `--enable-lora`, their rank and their
    modules."""

    remedy = "unset SGLANG_RETURN_ORIGINAL_LOGPROB there"
    unload_path = "/unload_lora_adapter"
    _names: frozenset[str] = frozenset()

    def start(self) -> None:
        self.request_sync("/health")
        if "weight_version" not in self.request_sync("/model_info"):
            raise EngineError(f"{self.name} does not name the version of its weights: take a newer SGLang")
        self._check_temperature()

    def _best_logprob(self, temperature: float) -> float:
        params = {"max_new_tokens": 1, "temperature": temperature}
        body = {"input_ids": [0], "sampling_params": params, "return_logprob": True, "top_logprobs_num": 1}
        (place,) = self.request_sync("/generate", body)["meta_info"]["output_top_logprobs"]
        return float(place[0][0])

    async def limits(self) -> EngineLimits:
        info = await self.get("/server_info")
        context = info.get("max_req_input_len") or info.get("context_length") or 1 << 30
        return self._limits(int(context))

    async def pause(self) -> None:
        await self.send_command("/pause_generation", {"mode": "in_place"})

    async def resume(self) -> None:
        await self.send_command("/continue_generation", {})

    async def sleep(self) -> None:
        """Needs `--enable-memory-saver`."""
        await self.send_command("/pause_generation", {"mode": "retract"})
        await self.send_command("/release_memory_occupation", {"tags": ["kv_cache"]})

    async def wake(self) -> None:
        await self.send_command("/resume_memory_occupation", {"tags": ["kv_cache"]})
        await self.send_command("/continue_generation", {})

    async def _sample(self, request: GenerateRequest, adapter: LoadedAdapter | None) -> Completion:
        """Stretch after stretch, until one ends of itself."""
        ids: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        top: list[TopLogprobs] = []
        cached = 0
        for _ in range(MOST_SEGMENTS):
            answer = await self.post("/generate", _generate_body(request, ids, adapter))
            meta = answer["meta_info"]
            found = meta.get("output_token_logprobs") or []
            ids += [int(entry[1]) for entry in found]
            logprobs += [float(entry[0]) for entry in found]
            whole = {"version": meta["weight_version"], "start": 0, "end": len(found)} if adapter is None else {}
            versions += self._versions(meta.get("weight_versions") or [whole], len(found), adapter)
            if request.top_logprobs:
                top += [[(int(e[1]), float(e[0])) for e in place] for place in meta.get("output_top_logprobs") or []]
            cached = cached or int(meta.get("cached_tokens") or 0)
            reason = (meta.get("finish_reason") or {}).get("type")
            if reason == "abort" and len(ids) < request.max_tokens:
                await self._wait_for_update()  # it was cut for an update: go on with the new weights
                continue
            if reason not in ("stop", "length", "abort"):
                raise Unreachable(f"{self.name} gave a request up ({reason})")
            return Completion(
                token_ids=ids,
                logprobs=logprobs,
                versions=versions,
                finish="stop" if reason == "stop" else "length",
                top=top if request.top_logprobs else None,
                recomputed=len(set(versions)) > 1,
                cached=cached,
            )
        raise Unreachable(f"{self.name} cut a request {MOST_SEGMENTS} times")

    async def _logprobs(self, ids: Sequence[int], model: str | None) -> list[float]:
        body: dict[str, Any] = {
            "input_ids": list(ids),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        answer = await self.post("/generate", body | ({"lora_path": model} if model else {}))
        scored = answer["meta_info"]["input_token_logprobs"]
        if [int(entry[1]) for entry in scored] != list(ids):
            raise EngineError(f"{self.name} scored other tokens than it was given")
        return [0.0, *(float(entry[0]) for entry in scored[1:])]

    async def _replace_weights(self, folder: Path, version: int) -> float:
        began = time.monotonic()
        await self.send_command("/pause_generation", {"mode": "abort"})
        body = {"model_path": str(folder), "weight_version": self._version_label(version), "flush_cache": True}
        answer = await self.send_command("/update_weights_from_disk", body)
        if not answer["success"]:
            raise EngineError(f"{self.name} did not take version {version}: {answer.get('message')}")
        await self.send_command("/flush_cache")
        await self.send_command("/continue_generation", {})
        return time.monotonic() - began

    async def _load_adapter(self, name: str, folder: Path) -> None:
        answer = await self.send_command("/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
        if not answer["success"]:
            raise EngineError(f"{self.name} did not take an adapter: {answer.get('error_message')}")
        self._names = frozenset(answer.get("loaded_adapters") or {name})

    async def _served_version(self) -> int | None:
        return self._version_of(str((await self.get("/model_info"))["weight_version"]))

    async def _adapter_names(self) -> frozenset[str]:
        """As of the last load: SGLang lists them then. A server that was restarted refuses the name."""
        await self.get("/model_info")
        return self._names


def _generate_body(request: GenerateRequest, so_far: list[int], adapter: LoadedAdapter | None) -> dict[str, Any]:
    params = {
        "max_new_tokens": request.max_tokens - len(so_far),
        "temperature": request.temperature,
        "stop_token_ids": sorted(request.stop_token_ids),
        "ignore_eos": True,  # the request's own stop tokens are all there are
        "skip_special_tokens": False,
        # Other noise for each stretch: the same would be drawn again from the start.
        "sampling_seed": (request.noise + len(so_far)) & SEED_BITS,
    }
    body: dict[str, Any] = {
        "input_ids": [*request.prompt_ids, *so_far],
        "sampling_params": params,
        "return_logprob": True,
    }
    if request.top_logprobs:
        body["top_logprobs_num"] = request.top_logprobs
    if adapter is not None:
        body["lora_path"] = adapter.name
    return body
