"""Turns errors into OpenAI's error object: {"error": {"message", "type", "param", "code"}}.

Decides about fields that a body does not list: harmless ones are ignored and named, the others refused.
"""

import difflib
import logging
import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from paceline.errors import EngineError, Mismatch, Overloaded, RequestError, UnknownModel
from paceline.util.rate_limited_logger import RateLimitedLogger

MISMATCH = "weights_mismatch"
OTHER_BASE = "other_base"
log = logging.getLogger("paceline.server")


class ErrorBody(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """OpenAI's error object."""

    error: ErrorBody


class Refusal(Exception):
    """An answer that is not 200, as a sentence for the client."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


class ClientGone(Exception):
    """The client no longer waits for the answer."""


bad_request = partial(Refusal, 400)


def error_object(status: int, message: str, param: str | None = None, code: str | None = None) -> bytes:
    types = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = types.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}})


def error_response(
    status: int,
    message: str,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    return Response(error_object(status, message, param, code), status, headers, "application/json")


ENGINE_ERRORS: dict[type, tuple[int, str | None, str | None]] = {
    UnknownModel: (404, "model", "model_not_found"),
    RequestError: (400, None, None),
    Overloaded: (429, None, "overloaded"),
    Mismatch: (503, None, MISMATCH),
    EngineError: (503, None, "engine_unavailable"),
}


def engine_refusal(error: EngineError) -> Refusal:
    status, param, code = next(ENGINE_ERRORS[kind] for kind in type(error).__mro__ if kind in ENGINE_ERRORS)
    return Refusal(status, str(error), param, code)


def invalid_body(error: ValidationError) -> Refusal:
    """The first problem pydantic found, by the name of its field."""
    detail = error.errors(include_url=False, include_input=False)[0]
    if detail["type"] == "json_invalid":
        return bad_request(f"the body is not JSON: {detail['ctx']['error']}", code="invalid_json")
    # Where a field may be of several types the location ends in the type's own name; a client knows only its fields.
    types = ("str", "int", "float", "bool", "none")
    param = ".".join(str(part) for part in detail["loc"] if part not in types and "[" not in str(part)) or None
    if detail["type"] == "extra_forbidden":
        return bad_request(f"there is no field `{param}`: leave it out", param, "unknown_field")
    if detail["type"] == "missing":
        return bad_request(f"the field `{param}` is missing", param, "missing_field")
    message = detail["msg"].removeprefix("Value error, ")
    return bad_request(f"`{param}`: {message}" if param else message, param, "invalid_value")


def install_error_handlers(app: FastAPI) -> None:
    """One shape for whatever an endpoint raises; only a real bug is a 500."""

    async def answer(request: Request, error: Exception) -> Response:
        if isinstance(error, ClientGone | ClientDisconnect):  # the second in the middle of its body
            return Response(status_code=499)
        if isinstance(error, HTTPException):
            message = {
                404: f"there is no {request.url.path} here: GET /openapi.json lists what there is",
                405: f"{request.url.path} does not take {request.method}",
            }.get(error.status_code, str(error.detail))
            return error_response(error.status_code, message, headers=error.headers)
        if isinstance(error, EngineError):
            error = engine_refusal(error)
        if isinstance(error, Refusal):
            headers = {"Retry-After": "1"} if error.status == 429 else None
            return error_response(error.status, str(error), error.param, error.code, headers)
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return error_response(500, f"the server failed: {type(error).__name__}; its log has the cause")

    for kind in (Refusal, EngineError, HTTPException, ClientGone, ClientDisconnect, Exception):
        app.add_exception_handler(kind, answer)


IGNORED_HEADER = "Paceline-Ignored"
"""Names, in an answer, the fields of the request that had no effect."""
MOST_UNKNOWN = 64
MIN_SIMILARITY = 0.8
"""From here on a name counts as a misspelling of a known one."""

# Parameters of vLLM, SGLang and llama.cpp that a client relies on, each with the values that change nothing.
PROMPT_FIELDS: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "truncate_prompt_tokens": (-1,),
}
_NEVER_NEUTRAL = (
    *("guided_choice", "guided_grammar", "guided_json", "guided_regex", "json_schema", "structured_outputs"),
    *("max_new_tokens", "n_predict"),
)
SAMPLING_FIELDS: dict[str, tuple[Any, ...]] = dict.fromkeys(_NEVER_NEUTRAL, ()) | {
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "min_tokens": (0,),
    "mirostat": (0,),
    "skip_special_tokens": (True,),
    "top_a": (0,),
    "typical_p": (1,),
    "use_beam_search": (False,),
}
_NEUTRAL_VALUES = PROMPT_FIELDS | SAMPLING_FIELDS
_IDENTIFIER = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_LIST_INDEX = re.compile(r"\.\d+(?=\.)")
_warnings = RateLimitedLogger(log)


def pop_unknown_fields(body: BaseModel) -> list[str]:
    """Remove the fields that no model lists from a body; returns their names.

    Refused is what the body's class calls `unsupported`, and a name that is nearly that of a known field.
    """
    refused = getattr(type(body), "unsupported", ())
    ignored: dict[str, None] = {}
    count = 0
    for where, model in _nested_models(body, ""):
        extra = model.__pydantic_extra__ or {}
        count += len(extra)
        if count > MOST_UNKNOWN:
            raise bad_request(f"the body has more than {MOST_UNKNOWN} fields that do not exist", code="unknown_field")
        for name, value in extra.items():
            if value is None or (not where and value in _NEUTRAL_VALUES.get(name, ())):
                continue
            # A client's own word stands in a header and in the name of a metric.
            path = where + name if _IDENTIFIER.fullmatch(where + name) else "(no identifier)"
            if not where and name in refused:
                raise bad_request(f"`{name}` is not supported: leave it out", name, "unsupported_field")
            if near := difflib.get_close_matches(name[:64], type(model).model_fields, 1, MIN_SIMILARITY):
                raise bad_request(f"there is no field `{path}`: did you mean `{near[0]}`?", path, "unknown_field")
            ignored[_LIST_INDEX.sub("", path)] = None
        extra.clear()
    return list(ignored)


def ignored_fields(request: Request) -> list[str]:
    """Fields that `read_body` took out of this request's body."""
    return getattr(request.state, "ignored", [])


def report_ignored_fields(request: Request, response: Response) -> Response:
    """Name ignored fields in the answer's header and, once in a while, in the log."""
    if names := ", ".join(ignored_fields(request)):
        response.headers[IGNORED_HEADER] = names
        _warnings.warn(request.url.path, "%s: ignored fields that do not exist: %s", request.url.path, names)
    return response


def _nested_models(value: BaseModel, where: str) -> Iterator[tuple[str, BaseModel]]:
    yield where, value
    for name, inner in value.__dict__.items():
        if isinstance(inner, BaseModel):
            yield from _nested_models(inner, f"{where}{name}.")
        # A list holds models or none: long lists of token ids are not gone through.
        elif isinstance(inner, list) and inner and isinstance(inner[0], BaseModel):
            for place, item in enumerate(inner):
                yield from _nested_models(item, f"{where}{name}.{place}.")
