"""Responses of the routes: JSON by the fastest encoder, and errors as sentences.

The path of the page's static files.
"""

from pathlib import Path
from typing import Any

import orjson
from fastapi import HTTPException, Response


class FiniteJsonResponse(Response):
    """A value as JSON; what is not finite becomes null."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encoded(content)


def encoded(content: Any) -> bytes:
    """A value as the page's JSON. Text that is no Unicode (a lone surrogate) is shown with replacement characters."""
    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    try:
        return orjson.dumps(content, default=str, option=options)
    except TypeError:
        return orjson.dumps(_clean(content), default=str, option=options)


def refuse(status: int, sentence: str) -> HTTPException:
    """The exception that answers a request with an error."""
    return HTTPException(status, sentence)


def _clean(value: Any) -> Any:
    match value:
        case str():
            return value.encode("utf-8", "replace").decode()
        case dict():
            return {_clean(key) if isinstance(key, str) else key: _clean(item) for key, item in value.items()}
        case list() | tuple():
            return [_clean(item) for item in value]
        case int() if abs(value) >= 1 << 63:
            return float(value)
    return value


STATIC = Path(__file__).parent / "static"
