"""Endpoints beside generation: scores, tokens, what is served, health, metrics, engine control, and new weights.

Adapters come in the request; whole models from allowed folders, as raw bodies, as deltas, or by broadcast in a group.
Safetensors only.
"""

import asyncio
import base64
import binascii
import dataclasses
import json
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from fastapi import Request, Response
from pydantic import ValidationError
from safetensors import SafetensorError

from paceline.clients.link import EngineLink
from paceline.errors import DeltaBaseMismatch, EngineError, Mismatch, Overloaded, PartialUpdateError, RequestError
from paceline.model.adapter_names import canonical_name
from paceline.server.bodies import (
    AdapterBody,
    GroupBody,
    ReceiveBody,
    ScoreBody,
    TokenizeBody,
    UpdateHead,
    WeightsBody,
)
from paceline.server.completions import check_vocabulary
from paceline.server.errors import MISMATCH, OTHER_BASE, Refusal, bad_request, invalid_body
from paceline.server.http import cancel_on_disconnect
from paceline.server.service import Service
from paceline.weights.tensors import deserialize
from paceline.weights.transports import UPDATE_HEADER
from paceline.weights.update import Adapter, Canary, WeightUpdate
from paceline.weights.weight_store import StoredTensors, read_delta


async def score(service: Service, body: ScoreBody, request: Request) -> dict[str, Any]:
    """Log probability of every token given those before it; 0.0 for the first."""
    model = await service.resolve_model(body.model)
    for sequence in body.token_ids:
        if len(sequence) > service.limits.max_context:
            raise bad_request(f"a sequence has {len(sequence)} tokens, more than the context", "token_ids")
        check_vocabulary(sequence, service.limits, "token_ids")
    work = service.engine.score(body.token_ids, body.temperature, model)
    return {"logprobs": await cancel_on_disconnect(request.receive, work)}


async def tokenize(service: Service, body: TokenizeBody, _: Request) -> dict[str, Any]:
    """How the model splits a text, its special tokens included."""
    tokens = list(await service.tokenizer.encode(body.prompt, special=True))
    return {"tokens": tokens, "count": len(tokens)}


async def models(service: Service, *_: object) -> dict[str, Any]:
    """The served model and its adapters."""
    await service.refresh_limits()
    shared = {"object": "model", "created": service.started_at, "owned_by": "paceline"}
    return {"object": "list", "data": [{"id": name, **shared} for name in service.model_names()]}


async def health(service: Service, *_: object) -> dict[str, Any]:
    """200 while the engine lives."""
    await service.engine.stats()
    return {"status": "ok"}


async def metrics(service: Service, *_: object) -> Response:
    """Prometheus text."""
    lines = service.meter.prometheus_lines(await service.engine.stats())
    return Response("".join(f"{line}\n" for line in lines), media_type="text/plain; version=0.0.4")


async def adapter_versions(service: Service, *_: object) -> dict[str, Any]:
    """The policy's version, and each adapter's."""
    limits = await service.refresh_limits()
    served = await service.engine.policy()
    return {"version": served.version, "adapters": dict(limits.adapters)}


async def limits(service: Service, *_: object) -> dict[str, Any]:
    """The engine's limits."""
    known = await service.refresh_limits()
    shown = {field.name: getattr(known, field.name) for field in dataclasses.fields(known)}
    return shown | {"adapters": dict(known.adapters), "model": service.name}


def engine_call(name: str, text: str) -> Callable[..., Awaitable[dict[str, Any]]]:
    """An endpoint that calls one method of the engine."""

    async def endpoint(service: Service, *_: object) -> dict[str, Any]:
        result = await getattr(service.engine, name)()
        return {"status": "ok"} if result is None else dataclasses.asdict(result)

    endpoint.__doc__ = text
    return endpoint


policy = engine_call("policy", "Version and fingerprint of the weights really served.")
stats = engine_call("stats", "Vital signs, for routing.")


ADAPTER_SUFFIXES = ("lora_A.weight", "lora_B.weight")


async def load_adapter(service: Service, body: AdapterBody, _: Request) -> dict[str, Any]:
    """Serve a LoRA adapter; answers once it is applied."""
    answer = await apply_update(service, await asyncio.to_thread(adapter_update, body))
    await service.refresh_limits()
    return answer


async def load_weights(service: Service, body: WeightsBody, _: Request) -> dict[str, Any]:
    """Serve weights from this machine's disk; answers once they are applied."""
    tensors = await open_tensors(service, find_files(body.path, service.allowed_folders))
    return await apply_update(service, build_update(body, tensors))


def build_update(
    head: UpdateHead, tensors: Mapping[str, Any], adapter: Adapter | None = None, delta: Any = None
) -> WeightUpdate:
    canary = None if (c := head.canary) is None else Canary(tuple(c.token_ids), tuple(c.logprobs), c.tolerance)
    return WeightUpdate(head.version, tensors, adapter, head.fingerprint, canary, delta)


async def open_tensors(service: Service, files: Sequence[Path]) -> StoredTensors:
    """Files of weights, read now if the engine is in this process."""
    tensors = await asyncio.to_thread(StoredTensors, files)
    if not isinstance(service.engine, EngineLink):
        await asyncio.to_thread(tensors.load)  # an engine in another process reads the files itself
    return tensors


async def apply_update(service: Service, update: WeightUpdate) -> dict[str, Any]:
    """Give the engine an update. A refused one is the sender's fault as long as the engine lives."""
    try:
        pause = await service.engine.load_weights(update)
    except (RequestError, Overloaded, PartialUpdateError):
        raise
    except DeltaBaseMismatch as error:
        raise Refusal(409, str(error), code=OTHER_BASE) from error
    except EngineError as error:
        await service.engine.stats()  # raises where it is gone
        raise bad_request(str(error), code=MISMATCH if isinstance(error, Mismatch) else "update_refused") from error
    except RuntimeError as error:  # torch's word for a shape that does not fit
        raise bad_request(f"the update does not fit this model: {error}", code="update_refused") from error
    named = update.adapter is not None and update.adapter.name
    held = update.fingerprint() if named else (await service.engine.policy()).fingerprint
    return {"version": update.version, "fingerprint": held, "pause_seconds": pause}


def adapter_update(body: AdapterBody) -> WeightUpdate:
    """The adapter a request carries. Names are accepted as PEFT saves them."""
    try:
        data = base64.b64decode(body.weights, validate=True)
    except (binascii.Error, ValueError) as error:
        raise bad_request(f"weights is not base64: {error}", "weights") from error
    try:
        tensors = {canonical_name(name): tensor for name, tensor in deserialize(data).items()}
    except (SafetensorError, ValueError, KeyError) as error:
        raise bad_request(f"weights is not a safetensors file: {error}", "weights") from error
    if not tensors:
        raise bad_request("weights holds no tensors", "weights")
    strange = [name for name in tensors if not name.endswith(ADAPTER_SUFFIXES)]
    if strange:
        raise bad_request(f"`{strange[0]}` is no LoRA tensor: names end in {' or '.join(ADAPTER_SUFFIXES)}", "weights")
    scale = body.scale if body.scale is not None else adapter_scale(data)
    return build_update(body, tensors, Adapter(body.name or "", scale))


def adapter_scale(data: bytes) -> float:
    """alpha / rank, where the metadata of a safetensors file says so. The file was read before: its header is sound."""
    (length,) = struct.unpack("<Q", data[:8])
    notes = json.loads(data[8 : 8 + length]).get("__metadata__") or {}
    if "alpha" not in notes or "rank" not in notes:
        return 1.0
    try:
        return float(notes["alpha"]) / float(notes["rank"])
    except (ValueError, ZeroDivisionError) as error:
        raise bad_request(
            f"the file's metadata gives no scale: alpha {notes['alpha']}, rank {notes['rank']}"
        ) from error


def find_files(path: str, allowed: Sequence[Path]) -> list[Path]:
    """The safetensors files a path stands for, links followed before the folders are compared."""
    forbidden = Refusal(403, "weights load only from folders the server was started with (--allow)", param="path")
    try:
        target = Path(path).resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise bad_request(f"`{path}` is no path: {error}", "path") from error
    # Whether something exists is told only about allowed folders.
    if not any(target.is_relative_to(folder) for folder in allowed):
        raise forbidden
    files = sorted(target.glob("*.safetensors")) if target.is_dir() else [target]
    if not files or not all(file.is_file() and file.suffix == ".safetensors" for file in files):
        raise bad_request(f"`{path}` is neither a .safetensors file nor a folder of them", "path")
    if not all(any(file.resolve().is_relative_to(folder) for folder in allowed) for file in files):
        raise forbidden
    return files


HEADER_BYTES = 8 << 20
"""Bytes a file may hold beside the numbers: names and shapes."""


async def upload_weights(service: Service, head: UpdateHead, request: Request) -> dict[str, Any]:
    """Serve weights that are the body, a safetensors file; answers once they are applied."""
    async with service.spool.body(request, await max_update_bytes(service), "safetensors") as file:
        return await apply_update(service, build_update(head, await open_tensors(service, [file])))


async def upload_delta(service: Service, head: UpdateHead, request: Request) -> dict[str, Any]:
    """Change the weights that are served as the body, a delta, says; answers once it is applied."""
    async with service.spool.body(request, await max_update_bytes(service), "delta") as file:
        change = await asyncio.to_thread(lambda: read_delta(file.read_bytes()))
    if change.result.version != head.version:
        raise bad_request(f"the delta leads to version {change.result.version}, and the header says {head.version}")
    return await apply_update(service, build_update(head, {}, delta=change))


async def join_group(service: Service, body: GroupBody, _: Request) -> dict[str, Any]:
    """Join a group in which weights are broadcast, and leave the one before; answers once all have come."""
    if body.rank >= body.world:
        raise bad_request(f"rank {body.rank} in a group of {body.world}", "rank")
    if body.address not in service.peers:
        raise Refusal(403, f"{body.address} is none of this server's peers (--peer)", param="address")
    if service.is_joining:
        raise Refusal(429, "this server is joining a group already", code="overloaded")
    if service.receiver is not None:
        service.receiver.close()
        service.receiver = None
    from paceline.weights.broadcast import Receiver  # which needs torch

    receiver = Receiver(body.address, body.port, body.world, body.rank, seconds=body.seconds, bucket=body.bucket)
    service.is_joining = True
    try:
        await asyncio.to_thread(receiver.form)
    except EngineError as error:
        raise bad_request(str(error), code="no_group") from error
    finally:
        service.is_joining = False
    service.receiver = receiver
    return {"status": "ok"}


async def receive_weights(service: Service, body: ReceiveBody, _: Request) -> dict[str, Any]:
    """Serve weights that the group broadcasts now; answers once they are applied."""
    receiver = service.receiver
    if receiver is None:
        raise bad_request("this server is in no group: POST /weights/group first", code="no_group")
    from paceline.weights.delta import DTYPES

    size = sum(prod(form.shape) * DTYPES[form.dtype].itemsize for form in body.tensors)
    if size > await max_update_bytes(service):
        raise bad_request(f"{size} bytes were announced, and this model's weights are smaller", "tensors")
    try:
        tensors = await asyncio.to_thread(receiver.receive, [form.model_dump() for form in body.tensors])
    except EngineError as error:
        service.receiver = None  # a collective that broke is over for all
        raise bad_request(str(error), code="no_group") from error
    return await apply_update(service, build_update(body, tensors))


def update_head(request: Request) -> UpdateHead:
    """The update's header, checked before anything of the body is read."""
    header = request.headers.get(UPDATE_HEADER)
    if header is None:
        raise bad_request(f"the header `{UPDATE_HEADER}` is missing: it says version and fingerprint, as JSON")
    try:
        return UpdateHead.model_validate_json(header)
    except ValidationError as error:
        raise invalid_body(error) from None


async def max_update_bytes(service: Service) -> int:
    return (await service.engine.limits()).weight_bytes + HEADER_BYTES
