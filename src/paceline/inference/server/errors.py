"""Every refusal in OpenAI's shape: {"error": {"message", "type", "param", "code"}}, with the right status."""

import logging
from collections.abc import Mapping

import orjson
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from paceline.inference.base import EngineError, Mismatch, Overloaded, RequestError, UnknownModel

RETRY_SECONDS = "1"
CLIENT_GONE = 499
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

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


class ClientGone(Exception):
    """The client no longer waits for the answer."""


def bad(message: str, param: str | None = None, code: str | None = None) -> Refusal:
    return Refusal(400, message, param=param, code=code)


def error_object(status: int, message: str, param: str | None = None, code: str | None = None) -> bytes:
    body = ErrorBody(message=message, type=_kind(status), param=param, code=code)
    return orjson.dumps({"error": body.model_dump()})


def error_response(
    status: int,
    message: str,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    return Response(error_object(status, message, param, code), status, headers, "application/json")


def refusal_of(error: EngineError) -> Refusal:
    """The engine's error as an HTTP refusal."""
    if isinstance(error, UnknownModel):
        return Refusal(404, str(error), param="model", code="model_not_found")
    if isinstance(error, RequestError):
        return bad(str(error))
    if isinstance(error, Overloaded):
        return Refusal(429, str(error), code="overloaded")
    if isinstance(error, Mismatch):
        return Refusal(503, str(error), code=MISMATCH)
    return Refusal(503, str(error), code="engine_unavailable")


def invalid_body(error: ValidationError) -> Refusal:
    """The first problem pydantic found, by the name of its field."""
    detail = error.errors(include_url=False, include_input=False)[0]
    if detail["type"] == "json_invalid":
        return bad(f"the body is not JSON: {detail['ctx']['error']}", code="invalid_json")
    # Where a field may be of several types the location ends in the type's own name; a client knows only its fields.
    param = ".".join(str(part) for part in detail["loc"] if not _names_a_type(part)) or None
    if detail["type"] == "extra_forbidden":
        return bad(f"there is no field `{param}`: leave it out", param, "unknown_field")
    if detail["type"] == "missing":
        return bad(f"the field `{param}` is missing", param, "missing_field")
    message = detail["msg"].removeprefix("Value error, ")
    return bad(f"`{param}`: {message}" if param else message, param, "invalid_value")


def install_error_handlers(app: FastAPI) -> None:
    """One shape for whatever an endpoint raises; only a real bug is a 500."""

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, Refusal)
        headers = {"Retry-After": RETRY_SECONDS} if error.status == 429 else None
        return error_response(error.status, str(error), error.param, error.code, headers)

    async def engine_failed(request: Request, error: Exception) -> Response:
        assert isinstance(error, EngineError)
        return await refused(request, refusal_of(error))

    async def not_routed(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = {
            404: f"there is no {request.url.path} here: GET /openapi.json lists what there is",
            405: f"{request.url.path} does not take {request.method}",
        }.get(error.status_code, str(error.detail))
        return error_response(error.status_code, message, headers=error.headers)

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_GONE)

    async def bug(request: Request, error: Exception) -> Response:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return error_response(500, f"the server failed: {type(error).__name__}; its log has the cause")

    app.add_exception_handler(Refusal, refused)
    app.add_exception_handler(EngineError, engine_failed)
    app.add_exception_handler(HTTPException, not_routed)
    app.add_exception_handler(ClientGone, gone)
    app.add_exception_handler(ClientDisconnect, gone)  # in the middle of its body
    app.add_exception_handler(Exception, bug)


def _kind(status: int) -> str:
    named = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    return named.get(status, "server_error" if status >= 500 else "invalid_request_error")


def _names_a_type(part: str | int) -> bool:
    return isinstance(part, str) and (part in ("str", "int", "float", "bool", "none") or "[" in part)
