"""Parses tool calls out of the model's text, also while it is still being written.

Two spellings are known, those of most open models:

    <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>          Qwen, Hermes and their kin
    {"name": "add", "parameters": {"a": 1}}; {"name": ...}                  Llama 3: the whole reply is JSON

A call that is not well formed, or names no tool of the request, stays text: the client sees what the model wrote.
"""

import json
import uuid
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

CALL_START, CALL_END = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function and its arguments as JSON text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    def as_dict(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


ParsedText = tuple[str, list[ToolCall]]


class ToolParser:
    """Splits streamed text into plain text and tool calls. Buffers text that may still become a call."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        self._buffer = ""
        self._has_text = False
        """Whether anything but white space was said: a reply of bare JSON must begin with it."""
        self._after_call = False

    def feed(self, text: str) -> ParsedText:
        self._buffer += text
        plain_text, calls = "", []
        while True:
            if self._after_call:
                self._buffer = self._buffer.lstrip()
                self._after_call = not self._buffer
            if self._may_be_json():
                return plain_text, calls
            before, mark, rest = self._buffer.partition(CALL_START)
            body, closed, after = rest.partition(CALL_END)
            # White space that only separates calls is no answer, so it waits like a mark that has only begun.
            sure = before[: len(before) - (0 if mark else begun_mark_length(before, CALL_START))].rstrip()
            plain_text, self._buffer = plain_text + sure, self._buffer[len(sure) :]
            self._has_text = self._has_text or bool(sure)
            if not closed:
                return plain_text, calls
            call = self._parse_call(_parse_json(body))
            if call is None:
                plain_text += self._buffer[: len(self._buffer) - len(after)]
            else:
                calls.append(call)
            self._has_text, self._after_call, self._buffer = True, call is not None, after

    def flush(self) -> ParsedText:
        """The reply is over: what was held back is calls, if all of it is, or else text."""
        rest, self._buffer = self._buffer, ""
        if rest.lstrip().startswith(CALL_START):
            call = self._parse_call(_parse_json(rest.lstrip().removeprefix(CALL_START)))
            return ("", [call]) if call else (rest, [])
        calls = self._parse_json_calls(rest) if not self._has_text else None
        return ("", calls) if calls else (rest, [])

    def _may_be_json(self) -> bool:
        start = self._buffer.lstrip()
        return not self._has_text and (start.startswith(("{", PYTHON_TAG)) or PYTHON_TAG.startswith(start))

    def _parse_json_calls(self, text: str) -> list[ToolCall] | None:
        """Every object of a reply that is nothing but calls, separated by semicolons or white space."""
        text = text.strip().removeprefix(PYTHON_TAG).strip()
        calls: list[ToolCall] = []
        decoder = json.JSONDecoder()
        while text:
            try:
                value, end = decoder.raw_decode(text)
            except (ValueError, RecursionError):
                return None
            call = self._parse_call(value)
            if call is None:
                return None
            calls.append(call)
            text = text[end:].lstrip(" \t\r\n;")
        return calls

    def _parse_call(self, value: Any) -> ToolCall | None:
        if not isinstance(value, dict) or not isinstance(value.get("name"), str) or value["name"] not in self._names:
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = _parse_json(arguments)
        if not isinstance(arguments, dict):
            return None
        text = json.dumps(arguments, ensure_ascii=False)
        try:
            text.encode()
        except UnicodeEncodeError:  # JSON can spell half a character, which no text may hold
            return None
        return ToolCall(value["name"], text)


def reply_message(text: str, tools: Sequence[dict[str, Any]] | None) -> dict[str, Any]:
    """A whole reply as a message: calls of the tools there are, and the text around them."""
    parser = ToolParser([tool.get("function", tool).get("name", "") for tool in tools or ()])
    content, calls = parser.feed(text)
    rest, more = parser.flush()
    if not (calls := calls + more):
        return {"role": "assistant", "content": text}
    return {"role": "assistant", "content": content + rest, "tool_calls": [call.as_dict() for call in calls]}


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def begun_mark_length(text: str, *marks: str) -> int:
    """Length of the longest end of the text with which one of the marks begins."""
    longest = min(max(map(len, marks)) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if any(mark.startswith(text[-n:]) for mark in marks)), 0)


def template_message(message: dict[str, Any]) -> dict[str, Any]:
    """A message as chat templates expect it: text content, and tool arguments as objects rather than JSON text."""
    rendered = {key: value for key, value in message.items() if value is not None}
    rendered["role"] = "system" if rendered["role"] == "developer" else rendered["role"]
    content = rendered.get("content", "")
    rendered["content"] = content if isinstance(content, str) else "".join(part["text"] for part in content)
    # Some templates refuse or respell a message that has calls, even if there are none.
    if calls := rendered.pop("tool_calls", None):
        rendered["tool_calls"] = [_parse_arguments(call) for call in calls]
    return rendered


def inline_tool_calls(message: dict[str, Any]) -> dict[str, Any]:
    """A message as `template_message` gives it, its calls written into its text."""
    functions = [call.get("function", call) for call in message["tool_calls"]]
    calls = [{"name": f["name"], "arguments": f.get("arguments", {})} for f in functions]
    texts = [f"{CALL_START}\n{json.dumps(call, ensure_ascii=False)}\n{CALL_END}" for call in calls]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return rest | {"content": "\n".join([message["content"], *texts] if message["content"] else texts)}


def _parse_arguments(call: dict[str, Any]) -> dict[str, Any]:
    if "function" not in call:
        return call
    function = call["function"]
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return {**call, "function": {**function, "arguments": arguments}}
