"""Endpoints for new weights without a shared folder: raw bodies, deltas, or broadcast in a group."""

import asyncio
from math import prod

from fastapi import Request, Response
from pydantic import ValidationError

from paceline.inference.base import EngineError
from paceline.inference.server.bodies import GroupBody, ReceiveBody, UpdateHead
from paceline.inference.server.errors import Refusal, bad, invalid_body
from paceline.inference.server.http import FastJsonResponse, read_body
from paceline.inference.server.service import Service, service_of
from paceline.inference.server.weights import apply, canary_of, opened
from paceline.inference.stored import read_delta
from paceline.inference.transports import UPDATE_HEADER
from paceline.model.weights import WeightUpdate

HEADER_ROOM = 8 << 20
"""Bytes a file may hold beside the numbers: names and shapes."""


async def upload(request: Request) -> Response:
    """Serve weights that are the body, a safetensors file; answers once they are applied."""
    service, head = service_of(request), head_of(request)
    async with service.spool.body(request, await most_bytes(service), "safetensors") as file:
        tensors = await opened(service, [file])
        update = WeightUpdate(head.version, tensors, expected=head.fingerprint, canary=canary_of(head.canary))
        return FastJsonResponse(await apply(service, update))


async def delta(request: Request) -> Response:
    """Change the weights that are served as the body, a delta, says; answers once it is applied."""
    service, head = service_of(request), head_of(request)
    async with service.spool.body(request, await most_bytes(service), "delta") as file:
        change = await asyncio.to_thread(lambda: read_delta(file.read_bytes()))
    if change.result.version != head.version:
        raise bad(f"the delta leads to version {change.result.version}, and the header says {head.version}")
    update = WeightUpdate(head.version, {}, expected=head.fingerprint, canary=canary_of(head.canary), delta=change)
    return FastJsonResponse(await apply(service, update))


async def join(request: Request) -> Response:
    """Join a group in which weights are broadcast, and leave the one before; answers once all have come."""
    service = service_of(request)
    body = await read_body(request, GroupBody)
    if body.rank >= body.world:
        raise bad(f"rank {body.rank} in a group of {body.world}", "rank")
    if body.address not in service.peers:
        raise Refusal(403, f"{body.address} is none of this server's peers (--peer)", param="address")
    if service.joining:
        raise Refusal(429, "this server is joining a group already", code="overloaded")
    if service.receiver is not None:
        service.receiver.close()
        service.receiver = None
    from paceline.inference.broadcast import Receiver  # which needs torch

    receiver = Receiver(body.address, body.port, body.world, body.rank, seconds=body.seconds, bucket=body.bucket)
    service.joining = True
    try:
        await asyncio.to_thread(receiver.form)
    except EngineError as error:
        raise bad(str(error), code="no_group") from error
    finally:
        service.joining = False
    service.receiver = receiver
    return FastJsonResponse({"status": "ok"})


async def receive(request: Request) -> Response:
    """Serve weights that the group broadcasts now; answers once they are applied."""
    service = service_of(request)
    body = await read_body(request, ReceiveBody)
    receiver = service.receiver
    if receiver is None:
        raise bad("this server is in no group: POST /weights/group first", code="no_group")
    from paceline.model.delta import DTYPES

    size = sum(prod(form.shape) * DTYPES[form.dtype].itemsize for form in body.tensors)
    if size > await most_bytes(service):
        raise bad(f"{size} bytes were announced, and this model's weights are smaller", "tensors")
    try:
        tensors = await asyncio.to_thread(receiver.receive, [form.model_dump() for form in body.tensors])
    except EngineError as error:
        service.receiver = None  # a collective that broke is over for all
        raise bad(str(error), code="no_group") from error
    update = WeightUpdate(body.version, tensors, expected=body.fingerprint, canary=canary_of(body.canary))
    return FastJsonResponse(await apply(service, update))


def head_of(request: Request) -> UpdateHead:
    """The update's header, checked before anything of the body is read."""
    given = request.headers.get(UPDATE_HEADER)
    if given is None:
        raise bad(f"the header `{UPDATE_HEADER}` is missing: it says version and fingerprint, as JSON")
    try:
        return UpdateHead.model_validate_json(given)
    except ValidationError as error:
        raise invalid_body(error) from None


async def most_bytes(service: Service) -> int:
    return (await service.engine.limits()).weight_bytes + HEADER_ROOM
