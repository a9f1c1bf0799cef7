"""Converts a message for the page: texts, calls and images, whatever it holds.

Messages are untrusted values. An image is shown only if its bytes are in the message and are of a kind that a
browser draws without running anything; every other one is named and never loaded.
"""

import base64
import binascii
import json
import re
from typing import Any

MOST_TEXT = 1_000_000
"""Characters of one text that a page is sent."""
MOST_IMAGE = 8 << 20
"""Bytes of one image that a page is sent."""
RASTERS = {
    "image/png": (b"\x89PNG\r\n\x1a\n",),
    "image/jpeg": (b"\xff\xd8\xff",),
    "image/gif": (b"GIF87a", b"GIF89a"),
    "image/webp": (b"RIFF",),
}
"""Kinds of images that are drawn, and how their bytes begin."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_DATA = re.compile(r"data:([\w.+/-]+);base64,", re.ASCII)
_SHOWN = {"role", "name", "content", "tool_calls", "tool_call_id", *THOUGHTS}
_NAMED = 120

Part = dict[str, Any]


def shown(message: Any) -> dict[str, Any]:
    """One message: its role, its parts in order, the tools it calls, and which call it answers."""
    if not isinstance(message, dict):
        return {"role": "", "parts": [_other("a message that is no object", message)], "calls": []}
    thoughts = [
        _text(message[key], "thought") for key in THOUGHTS if isinstance(message.get(key), str) and message[key]
    ]
    more = {key: value for key, value in message.items() if key not in _SHOWN and value is not None}
    calls = message.get("tool_calls")
    return {
        "role": _word(message.get("role")),
        "name": _word(message.get("name")),
        "parts": [
            *thoughts,
            *_parts(message.get("content")),
            *([_other("also in this message", more)] if more else []),
        ],
        "calls": [_call(call) for call in calls] if isinstance(calls, list | tuple) else [],
        "answers": _word(message.get("tool_call_id")),
    }


def plain(message: Any) -> str:
    """A message as one text, to compare and to quote from."""
    told = shown(message)
    calls = [f"{call['name']}({call['arguments']})" for call in told["calls"]]
    return "\n".join([*(part["text"] for part in told["parts"]), *calls])


def _parts(content: Any) -> list[Part]:
    if content is None or content == "":
        return []
    if isinstance(content, list | tuple):
        return [_part(part) for part in content]
    return [_text(content) if isinstance(content, str) else _other("content that is no text", content)]


def _part(part: Any) -> Part:
    if isinstance(part, str):
        return _text(part)
    if not isinstance(part, dict):
        return _other("a part that is no object", part)
    if isinstance(part.get("text"), str):
        return _text(part["text"])
    kind = _word(part.get("type"))
    if "image" in kind:
        return _image(_source(part))
    return _other(f"a part of type {kind or 'unknown'}", {key: value for key, value in part.items() if key != "type"})


def _source(part: dict[str, Any]) -> str:
    """Where an image comes from, in the ways in which APIs write it."""
    for key in ("image_url", "image", "source", "url"):
        match part.get(key):
            case str(place):
                return place
            case {"url": str(place)}:
                return place
            case {"data": str(data), "media_type": str(kind)}:
                return f"data:{kind};base64,{data}"
    return ""


def _image(source: str) -> Part:
    found = _DATA.match(source)
    if found is None:
        where = _short(source.partition(",")[0]) if source else "nowhere"
        return {"kind": "unshown", "text": f"an image at {where}, which is not loaded"}
    kind, data = found[1].lower(), source[found.end() :]
    if kind not in RASTERS:
        return {"kind": "unshown", "text": f"an image of type {kind}, which is not drawn here"}
    if len(data) > MOST_IMAGE * 4 // 3:
        return {"kind": "unshown", "text": f"an image of {len(data) * 3 >> 22} MiB, which is too large for this page"}
    try:
        raw = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raw = b""
    if not raw.startswith(RASTERS[kind]):
        return {"kind": "unshown", "text": f"something that calls itself {kind} and is not"}
    return {"kind": "image", "text": f"image, {kind}, {len(raw):,} bytes", "source": f"data:{kind};base64,{data}"}


def _call(call: Any) -> dict[str, str]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return {"name": "", "arguments": _json(call), "id": ""}
    arguments = function.get("arguments")
    told = _parsed(arguments) if isinstance(arguments, str) else _json(arguments)
    return {"name": _word(function.get("name")), "arguments": told, "id": _word(call.get("id"))}


def _parsed(arguments: str) -> str:
    """Arguments with a line for each, if they are JSON; otherwise as they were written."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments[:MOST_TEXT]
    return _json(value) if isinstance(value, dict | list) else arguments[:MOST_TEXT]


def _text(text: str, kind: str = "text") -> Part:
    left = len(text) - MOST_TEXT
    return {"kind": kind, "text": text[:MOST_TEXT]} | ({"left_out": left} if left > 0 else {})


def _other(what: str, value: Any) -> Part:
    return {"kind": "other", "what": what, "text": _json(value)}


def _json(value: Any) -> str:
    try:
        return json.dumps(value, indent=1, ensure_ascii=False, default=str)[:MOST_TEXT]
    except (ValueError, TypeError, RecursionError):
        return str(type(value).__name__)


def _word(value: Any) -> str:
    return _short(value) if isinstance(value, str) else "" if value is None else _short(str(value))


def _short(text: str) -> str:
    return text if len(text) <= _NAMED else f"{text[:_NAMED]}…"
