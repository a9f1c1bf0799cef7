"""Attaches to endpoints of frozen models, which a run samples or scores but neither starts nor trains.

A `paceline serve` is asked through `HttpEngine` and scores at any temperature. Whatever else speaks OpenAI's API is
asked at `/v1/completions` in token ids. It must say which ids it sampled (`return_token_ids`, as vLLM does) to play,
and how likely a prompt's own tokens are (`prompt_logprobs`, or `echo` with `logprobs`) to score. Those are as the model
has them, so it scores at temperature 1 only.
"""

import asyncio
import dataclasses
from collections.abc import Awaitable, Sequence
from contextlib import AsyncExitStack
from typing import Any, NoReturn, Protocol, TypeVar

import httpx
from transformers import PreTrainedTokenizerBase

from paceline.clients.http import HttpConnection, HttpEngine
from paceline.clients.pool import Pool
from paceline.clients.registry import answer_within
from paceline.config.model import ModelRef
from paceline.config.secret import read_key, redact
from paceline.engine.base import Completion, Engine, EngineLimits, EngineStats, GenerateRequest, Listener
from paceline.errors import EngineError, RequestError
from paceline.weights.update import ServedPolicy, WeightUpdate

TIMEOUT_SECONDS = 600.0
PROBE_TEXT = "Foxes jump 12.75\n\n\tdef f(x):  # é 漢字 🙂"
"""Letters, numbers, white space and rare signs: two vocabularies that split all of it alike are taken for one."""
T = TypeVar("T")
LogprobOptions = tuple[dict[str, Any], ...]
PROMPT_LOGPROB_OPTIONS: LogprobOptions = ({"prompt_logprobs": 0}, {"echo": True, "logprobs": 1})
"""Parameters that ask an endpoint for the log probabilities of a prompt: vLLM's, then OpenAI's older ones."""


class FrozenEngine(Engine, Protocol):
    """An engine whose weights never change."""

    async def aclose(self) -> None: ...


class FrozenPool(Pool):
    """One model behind one or several endpoints, with a limit on concurrent requests."""

    def __init__(self, engines: Sequence[FrozenEngine], ref: ModelRef) -> None:
        super().__init__(engines)
        self.ref = ref
        self._engines = engines
        self._slots = asyncio.Semaphore(ref.concurrency)

    @property
    def scores_any_temperature(self) -> bool:
        return not any(isinstance(engine, CompletionsEngine) for engine in self._engines)

    async def generate(self, request: GenerateRequest, deadline: float | None = None) -> Completion:
        async with self._slots:  # bounded: each request before it has a deadline
            request = dataclasses.replace(request, model=self.ref.name)
            return await self._run_with_timeout(deadline, super().generate(request))

    async def score(
        self,
        sequences: Sequence[Sequence[int]],
        temperature: float = 1.0,
        model: str = "",
        deadline: float | None = None,
    ) -> list[list[float]]:
        async with self._slots:  # bounded: each request before it has a deadline
            return await self._run_with_timeout(deadline, super().score(sequences, temperature, model or self.ref.name))

    async def _run_with_timeout(self, seconds: float | None, work: Awaitable[T]) -> T:
        """Report a timeout as the endpoint's: the pool's own message addresses environment code."""

        def late() -> EngineError:
            cause = "" if self._registry.serving else f" ({self._registry.trouble})"
            return EngineError(f"no answer within {seconds:g} s{cause}")

        return await answer_within(seconds, work, late)

    async def aclose(self) -> None:
        self.close()
        for engine in self._engines:
            await engine.aclose()


async def attach(ref: ModelRef, tokenizer: PreTrainedTokenizerBase) -> FrozenPool:
    """The endpoints' model, once each is known to answer and to have the policy's vocabulary."""
    key = read_key(ref.api_key_env, f"`{ref.name}`")
    engines: list[HttpEngine | CompletionsEngine] = []
    async with AsyncExitStack() as on_failure:
        for url in ref.urls:
            engine = CompletionsEngine(url, ref.name, key)
            on_failure.push_async_callback(engine.aclose)
            theirs = await engine.tokenize(PROBE_TEXT)
            check_same_vocabulary(f"`{ref.name}` at {url}", tokenizer.encode(PROBE_TEXT), theirs)
            if await engine.is_paceline():
                await engine.aclose()
                engines.append(HttpEngine(url, api_key=key))
            else:
                engines.append(engine)
        on_failure.pop_all()
    return FrozenPool(engines, ref)


def check_same_vocabulary(who: str, ours: Sequence[int], theirs: Sequence[int]) -> None:
    """Raise unless the policy and the model `who` split `PROBE_TEXT` alike."""
    if list(ours) != list(theirs):
        raise EngineError(
            f"{who} has another vocabulary than the policy: it reads a text of {len(ours)} tokens as {len(theirs)}, or "
            "as others. A teacher or KL reference must share the policy's tokenizer"
        )


class CompletionsEngine(HttpConnection, Engine):
    """Speaks what a frozen model needs of the `Engine` protocol to any OpenAI-compatible endpoint."""

    def __init__(self, url: str, model: str, api_key: str | None = None) -> None:
        super().__init__(url, api_key, TIMEOUT_SECONDS, env_proxies=True)
        self._model = model
        self._logprob_options = PROMPT_LOGPROB_OPTIONS

    async def is_paceline(self) -> bool:
        """Whether a `paceline serve` answers here, which can do more."""
        try:
            answer = await self.get("/limits")
        except RequestError:
            return False
        return isinstance(answer, dict) and "vocabulary" in answer

    async def tokenize(self, text: str) -> list[int]:
        body = {"prompt": text, "max_tokens": 1, "return_token_ids": True}
        try:
            ids = (await self._complete(body)).get("prompt_token_ids")
        except RequestError:
            ids = None  # it may only score
        if ids is None:
            answer = await self.post("/tokenize", {"model": self._model, "prompt": text})
            ids = answer.get("tokens") if isinstance(answer, dict) else None
        if not isinstance(ids, list):
            raise EngineError(
                f"{self.name} does not say how it splits a text (`return_token_ids`, `/tokenize`), so Paceline cannot "
                "check that its vocabulary is the policy's: serve the model with `paceline serve` or vLLM"
            )
        return ids

    async def generate(self, request: GenerateRequest, listener: Listener | None = None) -> Completion:
        choice = await self._complete(
            {
                "prompt": list(request.prompt_ids),
                "max_tokens": request.max_tokens,
                "temperature": request.temperature,
                "top_p": request.top_p,
                "seed": request.noise % 2**31,
                "stop_token_ids": sorted(request.stop_token_ids),
                "return_token_ids": True,
            }
            | ({"top_k": request.top_k} if request.top_k else {})
        )
        ids = choice.get("token_ids")
        if not isinstance(ids, list) or not ids:
            raise EngineError(f"{self.name} does not say which tokens it sampled: it cannot play for the policy")
        finish = "length" if choice.get("finish_reason") == "length" else "stop"
        return Completion(token_ids=ids, logprobs=[0.0] * len(ids), versions=[0] * len(ids), finish=finish)

    async def score(
        self, sequences: Sequence[Sequence[int]], temperature: float = 1.0, model: str = ""
    ) -> list[list[float]]:
        if temperature != 1.0:
            raise RequestError(f"{self.name} scores at temperature 1 only, not at {temperature:g}")
        return list(await asyncio.gather(*(self._score(list(ids)) for ids in sequences)))

    async def _score(self, ids: list[int]) -> list[float]:
        refusal = ""
        for options in self._logprob_options:
            try:
                choice = await self._complete({"prompt": ids, "max_tokens": 1, "temperature": 1.0, **options})
            except RequestError as error:
                refusal = f" ({error})"
                continue
            if (scores := prompt_logprobs(choice, ids)) is not None:
                self._logprob_options = (options,)
                return scores
        raise RequestError(
            f"{self.name} gives no log probabilities of a prompt{refusal}: score with `paceline serve` or vLLM"
        )

    async def policy(self) -> ServedPolicy:
        await self.get("/v1/models")
        return ServedPolicy(0, "")

    async def limits(self) -> EngineLimits:
        return EngineLimits(max_context=1 << 30, vocabulary=1 << 31)

    async def stats(self) -> EngineStats:
        return EngineStats(capacity=1)

    async def load_weights(self, update: WeightUpdate) -> NoReturn:
        raise EngineError(f"{self.name} is frozen: it takes no weights")

    keep = load_weights

    async def pause(self) -> None: ...

    resume = sleep = wake = pause

    def start(self) -> None: ...

    @property
    def busy_seconds(self) -> float:
        return 0.0

    async def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = await self.post("/v1/completions", {"model": self._model, **body})
        try:
            return dict(answer["choices"][0])
        except (LookupError, TypeError, ValueError):
            raise EngineError(f"{self.name}/v1/completions answered without a choice") from None

    def _decode_response(self, response: httpx.Response) -> Any:
        answer = super()._decode_response(response)
        if isinstance(answer, str):
            words = redact(answer, self._key)[:200]  # the key goes first: cut in two, it would not be found
            raise EngineError(f"{self.name}{response.url.path} answered 200: {words}")
        return answer


def prompt_logprobs(choice: dict[str, Any], ids: Sequence[int]) -> list[float] | None:
    """The log probability of each token of the prompt, 0.0 for the first; None if the answer does not hold them."""
    logprobs = choice.get("prompt_logprobs")
    if logprobs is None:
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
    if not isinstance(logprobs, list) or len(logprobs) < len(ids):
        return None
    scores = [0.0]
    for token, entry in zip(ids[1:], logprobs[1 : len(ids)], strict=True):
        if isinstance(entry, dict):  # by token id, as text, with the most probable ones beside the prompt's own
            entry = entry.get(str(token))
            entry = entry.get("logprob") if isinstance(entry, dict) else entry
        if not isinstance(entry, int | float):
            return None
        scores.append(float(entry))
    return scores
