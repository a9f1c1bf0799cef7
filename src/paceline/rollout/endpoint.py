"""Seats that are answered from outside the run, such as by an OpenAI-compatible endpoint.

No tokens are recorded, so their episodes can be inspected but not trained on.
"""

import json
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import httpx

from paceline.config.inference import SamplingConfig
from paceline.data.rollout import Message, Tools, Turn
from paceline.engine import Finish
from paceline.errors import EngineError, PacelineError, RequestError, Unreachable
from paceline.rollout.recording import RecordingServer
from paceline.rollout.seat import Reply, Seat, SeatClosed

CONNECT_SECONDS = 10.0


class Endpoint:
    """An OpenAI-compatible server (vLLM, SGLang, `paceline serve`): it answers `POST /chat/completions`."""

    def __init__(
        self,
        url: str,
        sampling: SamplingConfig,
        *,
        model: str | None = None,
        api_key: str | None = None,
        recorder: RecordingServer | None = None,
        timeout: float = 600.0,
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/chat/completions")
        if not urlsplit(self.url).path:
            self.url += "/v1"
        self.sampling, self.recorder, self._model = sampling, recorder, model
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeouts = httpx.Timeout(timeout, connect=CONNECT_SECONDS, pool=None)
        self._client = httpx.AsyncClient(headers=headers, timeout=timeouts)

    async def model(self) -> str:
        """The model that is asked: the one that was named, else the first of those the endpoint lists."""
        if self._model is None:
            listed = await self._ask("GET", "/models")
            try:
                self._model = str(listed["data"][0]["id"])
            except (KeyError, IndexError, TypeError):
                raise EngineError(f"{self.url}/models lists no model: name one") from None
        return self._model

    async def chat(
        self, messages: Sequence[Message], tools: Tools | None, model: str, max_tokens: int | None = None
    ) -> dict[str, Any]:
        """One choice as the endpoint gives it, with its `usage` beside it."""
        sampling = self.sampling
        body: dict[str, Any] = {
            "model": model or await self.model(),
            "messages": list(messages),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": max_tokens or sampling.max_tokens,
        }
        body |= {"top_k": sampling.top_k} if sampling.top_k else {}  # not of OpenAI's own API
        body |= {"tools": list(tools)} if tools else {}
        answer = await self._ask("POST", "/chat/completions", body)
        try:
            choice = answer["choices"][0]
            return {"message": choice["message"], "finish": choice.get("finish_reason"), "usage": answer.get("usage")}
        except (KeyError, IndexError, TypeError):
            raise EngineError(f"{self.url}/chat/completions answered without a message") from None

    def make_seat(self, seed_parts: Sequence[int], priority: int, actor: str, model: str) -> Seat:
        """A seat of one episode. Its `model` is the endpoint's name of it; the endpoint has noise of its own."""
        return EndpointSeat(self, actor=actor, model=model)

    async def close(self) -> None:
        await self._client.aclose()
        if self.recorder is not None:
            await self.recorder.close()

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        try:
            response = await self._client.request(method, self.url + path, json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            cause = str(error) or type(error).__name__
            raise Unreachable(f"{self.url} does not answer: {cause}") from error
        answer = None
        with suppress(ValueError):
            answer = response.json()
        if response.status_code == 200 and answer is not None:
            return answer
        # The sentence of OpenAI's error object, or whatever stands in its place.
        error = answer.get("error", answer.get("detail")) if isinstance(answer, dict) else None
        sentence = str(error.get("message") if isinstance(error, dict) else error) if error else ""
        sentence = sentence or " ".join(response.text[:200].split())
        # A refusal of this one request belongs to its episode; a wrong key or path, or a broken server, to all.
        kind = RequestError if response.status_code in (400, 413, 422) else EngineError
        raise kind(f"{self.url}{path} answered {response.status_code}: {sentence}")


class TextSeat(Seat):
    """A seat that is answered with text. Its turns hold messages but no tokens."""

    def __init__(self, sampling: SamplingConfig, recorder: RecordingServer | None, actor: str = "policy") -> None:
        # Not the parent's __init__, which is about tokens: none are seen here.
        self._init_session(actor, sampling, recorder)
        self.tokens = 0
        """Tokens sampled, as far as answers count them in `usage`."""

    @abstractmethod
    async def answer(self, messages: Sequence[Message], tools: Tools | None) -> dict[str, Any]:
        """The next message of a conversation: `message`, `finish` and `usage` as OpenAI's API has them."""

    async def chat(self, messages: Sequence[Message], tools: Tools | None = None) -> Reply:
        if self._closed:
            raise SeatClosed("the episode is over: this seat takes no more calls")
        conversation = [dict(message) for message in messages]
        choice = await self.answer(conversation, tools)
        if self._closed:
            raise SeatClosed("the episode ended while the policy was speaking")
        return self.record_reply(choice, conversation, tools)

    @property
    def vocabulary(self) -> int:
        """No limit: the source that answers has tokens of its own."""
        return 2**31

    @property
    def version(self) -> int:
        return 0

    @property
    def tokenizer_digest(self) -> str:
        raise PacelineError(
            "this environment speaks in tokens, and the model it is played with is asked in messages: "
            "play it with the model in this process, or with a `paceline serve` of it"
        )

    def record_reply(self, choice: dict[str, Any], messages: list[Message] | None, tools: Tools | None = None) -> Reply:
        answer = choice["message"]
        # Only what a conversation needs: endpoints add fields that they refuse when they come back.
        message: Message = {"role": "assistant", "content": answer.get("content") or ""}
        message |= {"tool_calls": answer["tool_calls"]} if answer.get("tool_calls") else {}
        finish: Finish = "length" if choice["finish"] == "length" else "stop"
        text = message["content"] + "".join(_tool_call_text(call) for call in message.get("tool_calls", []))
        more = {"messages": messages, "tools": list(tools) if tools else None, "text": text, "said": message}
        self.turns.append(Turn.unsampled([], [], finish=finish, temperature=self._sampling.temperature, **more))
        usage = choice["usage"] or {}
        prompt, sampled = int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
        self.tokens += sampled
        return Reply(text, finish == "length", message, tokens=sampled, prompt_tokens=prompt)


class EndpointSeat(TextSeat):
    def __init__(self, endpoint: Endpoint, actor: str = "policy", model: str = "") -> None:
        super().__init__(endpoint.sampling, endpoint.recorder, actor)
        self._endpoint, self._model = endpoint, model

    async def answer(self, messages: Sequence[Message], tools: Tools | None) -> dict[str, Any]:
        return await self._endpoint.chat(messages, tools, self._model, self.max_tokens)

    async def complete(self, token_ids: Sequence[int]) -> Reply:
        raise PacelineError(
            f"this environment speaks in tokens, and {self._endpoint.url} is asked in messages: "
            "play it with the model in this process, or with a `paceline serve` of it"
        )


def _tool_call_text(call: dict[str, Any]) -> str:
    function = call.get("function", {})
    name = json.dumps(function.get("name"))
    return f'<tool_call>{{"name": {name}, "arguments": {function.get("arguments")}}}</tool_call>'
