"""Parses tool calls out of the model's text, also while it is still being written.

Two spellings are known, those of most open models:

    <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>          Qwen, Hermes and their kin
    {"name": "add", "parameters": {"a": 1}}; {"name": ...}                  Llama 3: the whole reply is JSON

A call that is not well formed, or names no tool of the request, stays text: the client sees what the model wrote.
"""

import json
import uuid
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function and its arguments as JSON text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    def as_dict(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


Heard = tuple[str, list[ToolCall]]


class ToolReader:
    """Splits text into what is said and what is called. Holds back whatever may still become a call."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        self._held = ""
        self._began = False
        """Whether anything but white space was said: a reply of bare JSON must begin with it."""
        self._after_call = False

    def feed(self, text: str) -> Heard:
        self._held += text
        said, calls = "", []
        while True:
            if self._after_call:
                self._held = self._held.lstrip()
                self._after_call = not self._held
            if self._may_be_bare():
                return said, calls
            before, mark, rest = self._held.partition(OPEN)
            body, closed, after = rest.partition(CLOSE)
            # White space that only separates calls is no answer, so it waits like a mark that has only begun.
            sure = before[: len(before) - (0 if mark else _overlap(before, OPEN))].rstrip()
            said, self._held = said + sure, self._held[len(sure) :]
            self._began = self._began or bool(sure)
            if not closed:
                return said, calls
            call = self._call(_json(body))
            if call is None:
                said += self._held[: len(self._held) - len(after)]
            else:
                calls.append(call)
            self._began, self._after_call, self._held = True, call is not None, after

    def flush(self) -> Heard:
        """The reply is over: what was held back is calls, if all of it is, or else text."""
        rest, self._held = self._held, ""
        if rest.lstrip().startswith(OPEN):
            call = self._call(_json(rest.lstrip().removeprefix(OPEN)))
            return ("", [call]) if call else (rest, [])
        calls = self._bare(rest) if not self._began else None
        return ("", calls) if calls else (rest, [])

    def _may_be_bare(self) -> bool:
        start = self._held.lstrip()
        return not self._began and (start.startswith(("{", PYTHON_TAG)) or PYTHON_TAG.startswith(start))

    def _bare(self, text: str) -> list[ToolCall] | None:
        """Every object of a reply that is nothing but calls, separated by semicolons or white space."""
        text = text.strip().removeprefix(PYTHON_TAG).strip()
        calls: list[ToolCall] = []
        decoder = json.JSONDecoder()
        while text:
            try:
                value, end = decoder.raw_decode(text)
            except (ValueError, RecursionError):
                return None
            call = self._call(value)
            if call is None:
                return None
            calls.append(call)
            text = text[end:].lstrip(" \t\r\n;")
        return calls

    def _call(self, value: Any) -> ToolCall | None:
        if not isinstance(value, dict) or not isinstance(value.get("name"), str) or value["name"] not in self._names:
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = _json(arguments)
        if not isinstance(arguments, dict):
            return None
        text = json.dumps(arguments, ensure_ascii=False)
        try:
            text.encode()
        except UnicodeEncodeError:  # JSON can spell half a character, which no text may hold
            return None
        return ToolCall(value["name"], text)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of the text with which the mark begins."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-n:])), 0)


def for_template(message: dict[str, Any]) -> dict[str, Any]:
    """A message as chat templates expect it: text content, and tool arguments as objects rather than JSON text."""
    said = {key: value for key, value in message.items() if value is not None}
    said["role"] = "system" if said["role"] == "developer" else said["role"]
    content = said.get("content", "")
    said["content"] = content if isinstance(content, str) else "".join(part["text"] for part in content)
    # Some templates refuse or respell a message that has calls, even if there are none.
    if calls := said.pop("tool_calls", None):
        said["tool_calls"] = [_with_object(call) for call in calls]
    return said


def with_calls_as_text(message: dict[str, Any]) -> dict[str, Any]:
    """A message as `for_template` gives it, its calls written into its text."""
    functions = [call.get("function", call) for call in message["tool_calls"]]
    calls = [{"name": f["name"], "arguments": f.get("arguments", {})} for f in functions]
    spelled = [f"{OPEN}\n{json.dumps(call, ensure_ascii=False)}\n{CLOSE}" for call in calls]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return rest | {"content": "\n".join([message["content"], *spelled] if message["content"] else spelled)}


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    if "function" not in call:
        return call
    function = call["function"]
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return {**call, "function": {**function, "arguments": arguments}}
