"""POST /v1/chat/completions."""

from typing import Any

from fastapi import Request, Response

from paceline.clients.tools import ToolCall, ToolReader, for_template
from paceline.server.answers import heading
from paceline.server.bodies import ChatBody
from paceline.server.errors import bad
from paceline.server.http import EventStream, FastJsonResponse, read_body, unless_gone
from paceline.server.output_processor import ChoiceDelta, ResponseChoices, chat_logprobs, stream
from paceline.server.plan import forced_call, grammar_of, plan
from paceline.server.service import Service, service_of


async def chat(request: Request) -> Response:
    """Continue a conversation."""
    service = service_of(request)
    body = await read_body(request, ChatBody)
    response = ChatResponse(service, body, await unless_gone(request.receive, plan_chat(service, body)))
    if body.stream:
        head = heading("chat.completion.chunk", "chatcmpl", body.model or service.models.name)
        return await EventStream.begin(request, stream(response.reply, head, response.chunks))
    return FastJsonResponse(await unless_gone(request.receive, response.answer()))


async def plan_chat(service: Service, body: ChatBody) -> ResponseChoices:
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
    told = body.tools if body.tools and body.tool_choice != "none" else None
    tools = [tool.model_dump(exclude_none=True) for tool in told] if told else None
    prompt = await service.tokenizer.render(messages, tools, body.chat_template_kwargs or {})
    requests = await plan(
        body,
        [prompt],
        service.models,
        service.tokenizer,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        top_logprobs=body.top_logprobs or 0,
        grammar=grammar or forced,
    )
    return await ResponseChoices.plan(service, body, requests, offsets=False)


class ChatResponse:
    """Shapes a reply as chat messages: text, tool calls, log probabilities."""

    def __init__(self, service: Service, body: ChatBody, reply: ResponseChoices) -> None:
        self._service = service
        self._body = body
        self.reply = reply
        names = [tool.function.name for tool in body.tools or [] if body.tool_choice != "none"]
        self._readers = [ToolReader(names) if names else None for _ in reply.requests]
        self._called = [0] * len(reply.requests)
        self._begun: set[int] = set()

    async def answer(self) -> dict[str, Any]:
        deltas = await self.reply.whole()
        choices = [self._choice(index, delta) for index, delta in enumerate(deltas)]
        head = heading("chat.completion", "chatcmpl", self._body.model or self._service.models.name)
        return head | {"choices": choices, "usage": self.reply.usage()}

    def chunks(self, index: int, delta: ChoiceDelta, ended: bool) -> list[dict[str, Any]]:
        """The stream's choices for one step: what is said, then what is called, then how it ended."""
        first = index not in self._begun
        text, calls = self._read(index, delta.text, ended)
        message: dict[str, Any] = {"role": "assistant", "content": text} if first else {"content": text}
        if calls:
            message["tool_calls"] = [
                {"index": self._called[index] + place, **call.as_dict()} for place, call in enumerate(calls)
            ]
            self._called[index] += len(calls)
        extras = self.reply.extras(index, delta, first)
        finish = self._finish(index) if ended else None
        shown = extras or (self._body.logprobs and delta.token_ids)
        if not (first or text or calls or finish or shown):
            return []
        self._begun.add(index)
        return [
            {"index": index, "delta": message, "logprobs": self._logprobs(delta), "finish_reason": finish, **extras}
        ]

    def _choice(self, index: int, delta: ChoiceDelta) -> dict[str, Any]:
        text, calls = self._read(index, delta.text, ended=True)
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        if calls:
            message["tool_calls"] = [call.as_dict() for call in calls]
            self._called[index] = len(calls)
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(delta),
            "finish_reason": self._finish(index),
            **self.reply.extras(index, delta),
        }

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
        return "tool_calls" if self._called[index] else self.reply.outputs[index].finish

    def _logprobs(self, delta: ChoiceDelta) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(delta, self._service.tokenizer.token_bytes, self._body.top_logprobs or 0)
