"""POST /v1/chat/completions."""

from typing import Any

from fastapi import Request, Response

from paceline.clients.tools import ToolCall, ToolReader, for_template
from paceline.engine.base import GenerateRequest
from paceline.server.bodies import ChatBody
from paceline.server.errors import bad
from paceline.server.http import unless_gone
from paceline.server.output_processor import ChoiceDelta, ChoiceWriter, chat_logprobs
from paceline.server.plan import forced_call, grammar_of, plan
from paceline.server.service import Service


async def chat(service: Service, body: ChatBody, request: Request) -> Response:
    """Continue a conversation."""
    writer = ChatWriter(service, body, await unless_gone(request.receive, plan_chat(service, body)))
    await unless_gone(request.receive, writer.prepare())
    return await writer.respond(request)


async def plan_chat(service: Service, body: ChatBody) -> list[GenerateRequest]:
    """The choices to sample. Whatever can never be answered is refused here."""
    if body.top_logprobs and not body.logprobs:
        raise bad("top_logprobs needs `logprobs: true`", "top_logprobs")
    if body.stream_options and not body.stream:
        raise bad("stream_options needs `stream: true`", "stream_options")
    grammar = grammar_of(body.response_format, body.regex)
    forced = forced_call(body)
    if grammar and forced:
        raise bad("give either a `response_format` or a `tool_choice` that demands a call", "tool_choice")
    messages = [for_template(message.model_dump()) for message in body.messages]
    # A model that must not call is not told of its tools.
    shown = body.tools if body.tools and body.tool_choice != "none" else None
    tools = [tool.model_dump(exclude_none=True) for tool in shown] if shown else None
    prompt = await service.tokenizer.render(messages, tools, body.chat_template_kwargs or {})
    return await plan(
        body,
        [prompt],
        service.models,
        service.tokenizer,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        top_logprobs=body.top_logprobs or 0,
        grammar=grammar or forced,
    )


class ChatWriter(ChoiceWriter):
    """Writes choices as chat messages: text, tool calls, log probabilities."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"
    _body: ChatBody

    def __init__(self, service: Service, body: ChatBody, requests: list[GenerateRequest]) -> None:
        super().__init__(service, body, requests)
        names = [tool.function.name for tool in body.tools or [] if body.tool_choice != "none"]
        self._readers = [ToolReader(names) if names else None for _ in requests]
        self._called = [0] * len(requests)

    def chunk(self, index: int, delta: ChoiceDelta, ended: bool) -> dict[str, Any] | None:
        """What is said, what is called, and how it ended."""
        first = index not in self._begun
        text, calls = self._read(index, delta.text, ended)
        message: dict[str, Any] = {"role": "assistant", "content": text} if first else {"content": text}
        if calls:
            message["tool_calls"] = [
                {"index": self._called[index] + place, **call.as_dict()} for place, call in enumerate(calls)
            ]
            self._called[index] += len(calls)
        extras = self.extras(index, delta, first)
        finish = self._finish(index) if ended else None
        shown = extras or (self._body.logprobs and delta.token_ids)
        if not (first or text or calls or finish or shown):
            return None
        self._begun.add(index)
        return {"index": index, "delta": message, "logprobs": self._logprobs(delta), "finish_reason": finish, **extras}

    def choice(self, index: int, delta: ChoiceDelta) -> dict[str, Any]:
        text, calls = self._read(index, delta.text, ended=True)
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        if calls:
            message["tool_calls"] = [call.as_dict() for call in calls]
            self._called[index] = len(calls)
        ending = {"logprobs": self._logprobs(delta), "finish_reason": self._finish(index)}
        return {"index": index, "message": message, **ending, **self.extras(index, delta)}

    def _read(self, index: int, text: str, ended: bool) -> tuple[str, list[ToolCall]]:
        reader = self._readers[index]
        if reader is None:
            return text, []
        said, calls = reader.feed(text)
        if ended:
            rest, more = reader.flush()
            said, calls = said + rest, calls + more
        if self._body.parallel_tool_calls is False:
            calls = calls[: 0 if self._called[index] else 1]
        return said, calls

    def _finish(self, index: int) -> str | None:
        return "tool_calls" if self._called[index] else self.outputs[index].finish

    def _logprobs(self, delta: ChoiceDelta) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(delta, self._service.tokenizer.token_bytes, self._body.top_logprobs or 0)
