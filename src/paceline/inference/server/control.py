"""Endpoints beside generation: scores, tokens, what is served, health, metrics, and engine control."""

import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Request, Response

from paceline.inference.base import Engine
from paceline.inference.server.bodies import ScoreBody, TokenizeBody
from paceline.inference.server.errors import bad
from paceline.inference.server.http import FastJsonResponse, read_body, unless_gone
from paceline.inference.server.plan import check_vocabulary
from paceline.inference.server.service import Service, service_of


async def score(request: Request) -> Response:
    """Log probability of every token given those before it; 0.0 for the first."""
    service = service_of(request)
    body = await read_body(request, ScoreBody)
    model = await service.models.resolve(body.model)
    for sequence in body.token_ids:
        if len(sequence) > service.models.limits.max_context:
            raise bad(f"a sequence has {len(sequence)} tokens, more than the context", "token_ids")
        check_vocabulary(sequence, service.models, "token_ids")
    logprobs = await unless_gone(request.receive, _score(service.engine, body, model))
    return FastJsonResponse({"logprobs": logprobs})


async def _score(engine: Engine, body: ScoreBody, model: str) -> list[list[float]]:
    return await engine.score(body.token_ids, body.temperature, model)


async def tokenize(request: Request) -> Response:
    """How the model splits a text, its special tokens included."""
    service = service_of(request)
    body = await read_body(request, TokenizeBody)
    tokens = list(await service.scribe.encode(body.prompt, special=True))
    return FastJsonResponse({"tokens": tokens, "count": len(tokens)})


async def models(request: Request) -> Response:
    """The served model and its adapters."""
    service = service_of(request)
    await service.models.refresh()
    return FastJsonResponse({"object": "list", "data": [_model(service, name) for name in service.models.names()]})


def _model(service: Service, name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": service.started, "owned_by": "paceline"}


async def health(request: Request) -> Response:
    """200 while the engine lives."""
    await service_of(request).check_alive()
    return FastJsonResponse({"status": "ok"})


async def metrics(request: Request) -> Response:
    """Prometheus text."""
    service = service_of(request)
    text = service.meter.exposition(await service.engine.stats())
    return Response(text, media_type="text/plain; version=0.0.4")


async def policy(request: Request) -> Response:
    """Version and fingerprint of the weights really served."""
    return FastJsonResponse(dataclasses.asdict(await service_of(request).engine.policy()))


async def adapter_versions(request: Request) -> Response:
    """The policy's version, and each adapter's."""
    service = service_of(request)
    await service.models.refresh()
    served = await service.engine.policy()
    return FastJsonResponse({"version": served.version, "adapters": dict(service.models.limits.adapters)})


async def limits(request: Request) -> Response:
    """The engine's limits."""
    service = service_of(request)
    await service.models.refresh()
    known = service.models.limits
    shown = {field.name: getattr(known, field.name) for field in dataclasses.fields(known)}
    return FastJsonResponse(shown | {"adapters": dict(known.adapters), "model": service.models.name})


async def stats(request: Request) -> Response:
    """Vital signs, for routing."""
    return FastJsonResponse(dataclasses.asdict(await service_of(request).engine.stats()))


def lever(pull: Callable[[Engine], Awaitable[None]], text: str) -> Callable[[Request], Awaitable[Response]]:
    """An endpoint that does one thing to the engine."""

    async def endpoint(request: Request) -> Response:
        await pull(service_of(request).engine)
        return FastJsonResponse({"status": "ok"})

    endpoint.__doc__ = text
    return endpoint
