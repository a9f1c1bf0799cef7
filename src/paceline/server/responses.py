"""OpenAI's Responses API for text and function tools, translated to chat bodies and back.

Nothing is stored: `store` has no effect, and `previous_response_id` is refused.
"""

import time
import uuid
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeVar

from fastapi import Request, Response
from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationError

from paceline.engine.base import GenerateRequest
from paceline.server.bodies import (
    INT64,
    ChatBody,
    ClientBody,
    Count,
    Function,
    GenerationBody,
    JsonSchema,
    NamedFunction,
    Neutral,
    check_text_only,
)
from paceline.server.completions import ChatWriter, build_chat_requests
from paceline.server.errors import PROMPT_FIELDS, SAMPLING_FIELDS, Refusal, invalid_body
from paceline.server.http import cancel_on_disconnect, encode_json
from paceline.server.service import Service

C = TypeVar("C", bound=ChatBody)
MOST_ITEMS = 4096
CHAT_FIELDS = (
    *("frequency_penalty", "function_call", "functions", "logit_bias", "logprobs", "max_completion_tokens"),
    *("max_tokens", "messages", "n", "presence_penalty", "response_format", "seed", "stop", "top_k"),
)
"""Parameters of the Chat Completions API that have no effect here."""
TEXT_TYPES = ("input_text", "output_text", "text")


class ContentText(ClientBody):
    """A piece of a message; text is the only kind."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


def check_text_parts(content: Any) -> Any:
    if isinstance(content, list):
        check_text_only([part for part in content if not isinstance(part, dict) or part.get("type") not in TEXT_TYPES])
    return content


Content = Annotated[str | Annotated[list[ContentText], Field(max_length=1024)], BeforeValidator(check_text_parts)]


class MessageItem(ClientBody):
    """A message of the user, the developer or the assistant."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class FunctionCallItem(ClientBody):
    """A call that the model made in an earlier response."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None
    namespace: str | None = None


class FunctionOutputItem(ClientBody):
    """What a function returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content
    id: str | None = None
    status: str | None = None


def item_type(item: Any) -> str | None:
    given = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "message")
    return given if isinstance(given, str) else None


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")],
    Discriminator(
        item_type,
        custom_error_type="item_type",
        custom_error_message="only items of type message, function_call and function_call_output are supported",
    ),
]


class FunctionTool(Function):
    """A function the model may call."""

    type: Literal["function"]


class NamedFunctionTool(NamedFunction):
    """The one function that must be called."""

    type: Literal["function"]


class TextFormat(JsonSchema):
    """The form the text takes."""

    type: Literal["text", "json_object", "json_schema"]


class TextSettings(ClientBody):
    """How the text is written."""

    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(ClientBody):
    """How much the model thinks. There is no separate reasoning, and so nothing to summarise."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponseStreamOptions(ClientBody):
    """How a stream is sent."""

    include_obfuscation: bool | None = None
    """Taken and ignored."""


class ResponseBody(GenerationBody):
    """Text, or items of a conversation, to respond to."""

    unsupported = (*PROMPT_FIELDS, *SAMPLING_FIELDS, *CHAT_FIELDS)

    input: Annotated[
        Annotated[str, Tag("str")]
        | Annotated[list[InputItem], Field(min_length=1, max_length=MOST_ITEMS), Tag("list[item]")],
        Discriminator(lambda given: "list[item]" if isinstance(given, list) else "str"),
    ]
    instructions: str | None = None
    """A system message before the input."""
    max_output_tokens: Count | None = None
    """Longest response in tokens; as much as the context holds when left out."""
    tools: Annotated[list[FunctionTool], Field(max_length=1024)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | None = None
    parallel_tool_calls: bool | None = None
    """Only the first call of a response is given when false."""
    text: TextSettings | None = None
    stream_options: ResponseStreamOptions | None = None
    prompt_cache_retention: str | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    """There is no reasoning to include."""
    max_tool_calls: Annotated[int, Field(ge=0, le=INT64)] | None = None
    """Taken and ignored: it bounds built-in tools, of which there are none."""
    reasoning: Reasoning | None = None
    top_logprobs: Annotated[int | None, Neutral(0)] = None
    truncation: Annotated[str | None, Neutral("disabled")] = None
    background: Annotated[bool | None, Neutral(False)] = None
    previous_response_id: Annotated[str | None, Neutral()] = None
    conversation: Annotated[Any | None, Neutral()] = None
    prompt: Annotated[dict[str, Any] | None, Neutral()] = None


SAME_FIELDS = ("model", "temperature", "top_p", "parallel_tool_calls", "stream", "user")


def to_chat_body(body: ResponseBody, kind: type[C]) -> C:
    chat: dict[str, Any] = {name: getattr(body, name) for name in SAME_FIELDS}
    chat |= {"messages": list(_chat_messages(body)), "max_completion_tokens": body.max_output_tokens}
    if body.tools:
        chat["tools"] = [{"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in body.tools]
    chat["tool_choice"] = choice = body.tool_choice
    if isinstance(choice, NamedFunctionTool):
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    if body.text and (form := body.text.format):
        schema = {"name": form.name, "schema": form.schema_, "strict": form.strict}
        chat["response_format"] = {"type": form.type} | ({"json_schema": schema} if form.type == "json_schema" else {})
    chat["reasoning_effort"] = body.reasoning.effort if body.reasoning else None
    chat["verbosity"] = body.text.verbosity if body.text and body.text.verbosity != "medium" else None
    try:
        return kind.model_validate({name: value for name, value in chat.items() if value is not None})
    except ValidationError as error:
        raise invalid_body(error) from None


def _chat_messages(body: ResponseBody) -> Iterator[dict[str, Any]]:
    """Messages of a chat. A message of the assistant and the calls that follow it are one."""
    if body.instructions:
        yield {"role": "system", "content": body.instructions}
    if isinstance(body.input, str):
        yield {"role": "user", "content": body.input}
        return
    assistant: dict[str, Any] | None = None
    for item in body.input:
        if isinstance(item, FunctionCallItem):
            assistant = assistant or {"role": "assistant", "content": None}
            call = {"name": item.name, "arguments": item.arguments}
            assistant.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": call})
            continue
        if assistant:
            yield assistant
            assistant = None
        if isinstance(item, FunctionOutputItem):
            yield {"role": "tool", "tool_call_id": item.call_id, "content": _join_text(item.output)}
        elif item.role == "assistant":
            assistant = {"role": "assistant", "content": _join_text(item.content)}
        else:
            yield {"role": item.role, "content": _join_text(item.content)}
    if assistant:
        yield assistant


def _join_text(content: str | list[ContentText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class ResponseWriter:
    """Writes one response, whole or as the events of a stream."""

    def __init__(self, body: ResponseBody, model: str, **settings: Any) -> None:
        """`settings` are those that differ from what the client asked for."""
        given = body.model_dump(exclude_none=True, by_alias=True)
        self._head: dict[str, Any] = {
            "id": _new_id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": given.get("text", {}).get("format", {"type": "text"})},
            "tool_choice": given.get("tool_choice", "auto"),
            "tools": given.get("tools", []),
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None,
            **settings,
        }
        self._num_events = 0
        self._message_id = _new_id("msg")
        self._text = ""
        """The text so far; the message begins with it."""
        self._calls: list[dict[str, Any]] = []

    def full_response(self, message: dict[str, Any], finish: str | None, usage: dict[str, Any]) -> dict[str, Any]:
        """The response that says what this chat message says."""
        self._text, self._calls = message.get("content") or "", message.get("tool_calls") or []
        return self._final_response(self._output_items(), finish, usage)

    def add(self, message: dict[str, Any]) -> bytes:
        """Events that a chunk of a chat's stream adds. Calls wait for the end of the text."""
        events = b""
        if not self._num_events:
            events += self._event("response.created", response=self._head)
            events += self._event("response.in_progress", response=self._head)
        self._calls += message.get("tool_calls") or []
        if text := message.get("content") or "":
            events += b"" if self._text else self._open_message()
            self._text += text
            events += self._part_event("response.output_text.delta", delta=text, logprobs=[])
        return events

    def end(self, finish: str | None, usage: dict[str, Any]) -> bytes:
        events = b"" if self._text or self._calls else self._open_message()
        output = self._output_items()
        for place, item in enumerate(output):
            if item["type"] == "message":
                events += self._part_event("response.output_text.done", text=self._text, logprobs=[])
                events += self._part_event("response.content_part.done", part=item["content"][0])
            else:
                at = {"item_id": item["id"], "output_index": place}
                fresh = item | {"arguments": "", "status": "in_progress"}
                call = {name: item[name] for name in ("name", "arguments")}
                events += self._event("response.output_item.added", output_index=place, item=fresh)
                events += self._event("response.function_call_arguments.delta", **at, delta=item["arguments"])
                events += self._event("response.function_call_arguments.done", **at, **call)
            events += self._event("response.output_item.done", output_index=place, item=item)
        response = self._final_response(output, finish, usage)
        return events + self._event(f"response.{response['status']}", response=response)

    def fail(self, message: str, code: str | None) -> bytes:
        error = {"code": "server_error", "message": message}
        failed = self._head | {"status": "failed", "error": error}
        begun = self._event("error", code=code, message=message, param=None)
        return begun + self._event("response.failed", response=failed)

    def _output_items(self) -> list[dict[str, Any]]:
        """The message, if there is text or nothing else, and the calls."""
        kind = {"type": "function_call", "status": "completed"}
        calls = [{"id": _new_id("fc"), **kind, "call_id": call["id"], **call["function"]} for call in self._calls]
        return calls if calls and not self._text else [self._message_item("completed", self._text), *calls]

    def _message_item(self, status: str, text: str) -> dict[str, Any]:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        return {"id": self._message_id, "type": "message", "role": "assistant", "status": status, "content": [part]}

    def _open_message(self) -> bytes:
        item = self._message_item("in_progress", "")
        begun = self._event("response.output_item.added", output_index=0, item=item | {"content": []})
        return begun + self._part_event("response.content_part.added", part=item["content"][0])

    def _part_event(self, kind: str, **more: Any) -> bytes:
        return self._event(kind, item_id=self._message_id, output_index=0, content_index=0, **more)

    def _event(self, kind: str, **more: Any) -> bytes:
        data = encode_json({"type": kind, "sequence_number": self._num_events, **more})
        self._num_events += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"

    def _final_response(self, output: list[Any], finish: str | None, usage: dict[str, Any]) -> dict[str, Any]:
        truncated = finish == "length"
        cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
        return self._head | {
            "status": "incomplete" if truncated else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if truncated else None,
            "output": output,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


class ResponseStream(ChatWriter):
    """Writes the one choice of a chat as a response."""

    def __init__(
        self, service: Service, body: ChatBody, requests: list[GenerateRequest], writer: ResponseWriter
    ) -> None:
        super().__init__(service, body, requests)
        self._writer, self._finish_reason = writer, None

    async def full_response(self) -> dict[str, Any]:
        whole = await super().full_response()
        (choice,) = whole["choices"]
        return self._writer.full_response(choice["message"], choice["finish_reason"], whole["usage"])

    def encode(self, chunk: dict[str, Any]) -> bytes:
        self._finish_reason = chunk["finish_reason"] or self._finish_reason
        return self._writer.add(chunk["delta"])

    def encode_failure(self, refusal: Refusal) -> bytes:
        return self._writer.fail(str(refusal), refusal.code)

    def encode_end(self) -> bytes:
        return self._writer.end(self._finish_reason, self.usage())


async def create_response(service: Service, body: ResponseBody, request: Request) -> Response:
    """Respond to text or to the items of a conversation."""
    chat = to_chat_body(body, ChatBody)
    requests = await cancel_on_disconnect(request.receive, build_chat_requests(service, chat))
    writer = ResponseWriter(body, body.model or service.name)
    return await ResponseStream(service, chat, requests, writer).respond(request)
