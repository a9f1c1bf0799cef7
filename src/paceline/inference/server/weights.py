"""New weights over HTTP: adapters in the request, whole models from allowed folders. Safetensors only."""

import asyncio
import base64
import binascii
import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastapi import Request, Response
from safetensors import SafetensorError

from paceline.inference.base import EngineError, Mismatch, OtherBase, Overloaded, PartialUpdateError, RequestError
from paceline.inference.link import EngineLink
from paceline.inference.server.bodies import AdapterBody, CanaryBody, WeightsBody
from paceline.inference.server.errors import MISMATCH, OTHER_BASE, Refusal, bad
from paceline.inference.server.http import CONTROL_BYTES, FastJsonResponse, read_body
from paceline.inference.server.service import Service, service_of
from paceline.inference.stored import StoredTensors
from paceline.model.adapter_names import canonical
from paceline.model.tensors import unpacked
from paceline.model.weights import Adapter, Canary, WeightUpdate

ADAPTER_ENDINGS = ("lora_A.weight", "lora_B.weight")


async def load_adapter(request: Request) -> Response:
    """Serve a LoRA adapter; answers once it is applied."""
    service = service_of(request)
    body = await read_body(request, AdapterBody, CONTROL_BYTES)
    update = await asyncio.to_thread(adapter_update, body)
    answer = await apply(service, update)
    await service.models.refresh()
    return FastJsonResponse(answer)


async def load_weights(request: Request) -> Response:
    """Serve weights from this machine's disk; answers once they are applied."""
    service = service_of(request)
    body = await read_body(request, WeightsBody)
    tensors = await opened(service, find_files(body.path, service.allowed))
    update = WeightUpdate(body.version, tensors, expected=body.fingerprint, canary=canary_of(body.canary))
    return FastJsonResponse(await apply(service, update))


async def opened(service: Service, files: Sequence[Path]) -> StoredTensors:
    """Files of weights, read now if the engine is in this process."""
    tensors = await asyncio.to_thread(StoredTensors, files)
    if not isinstance(service.engine, EngineLink):
        await asyncio.to_thread(tensors.fill)  # an engine in another process reads the files itself
    return tensors


async def apply(service: Service, update: WeightUpdate) -> dict[str, Any]:
    """Give the engine an update. A refused one is the sender's fault as long as the engine lives."""
    try:
        pause = await service.engine.load_weights(update)
    except (RequestError, Overloaded, PartialUpdateError):
        raise
    except OtherBase as error:
        raise Refusal(409, str(error), code=OTHER_BASE) from error
    except EngineError as error:
        await service.check_alive()
        raise bad(str(error), code=MISMATCH if isinstance(error, Mismatch) else "update_refused") from error
    except RuntimeError as error:  # torch's word for a shape that does not fit
        raise bad(f"the update does not fit this model: {error}", code="update_refused") from error
    named = update.adapter is not None and update.adapter.name
    held = update.fingerprint() if named else (await service.engine.policy()).fingerprint
    return {"version": update.version, "fingerprint": held, "pause_seconds": pause}


def adapter_update(body: AdapterBody) -> WeightUpdate:
    """The adapter a request carries. Names are accepted as PEFT saves them."""
    try:
        data = base64.b64decode(body.weights, validate=True)
    except (binascii.Error, ValueError) as error:
        raise bad(f"weights is not base64: {error}", "weights") from error
    try:
        tensors = {canonical(name): tensor for name, tensor in unpacked(data).items()}
    except (SafetensorError, ValueError, KeyError) as error:
        raise bad(f"weights is not a safetensors file: {error}", "weights") from error
    if not tensors:
        raise bad("weights holds no tensors", "weights")
    strange = [name for name in tensors if not name.endswith(ADAPTER_ENDINGS)]
    if strange:
        raise bad(f"`{strange[0]}` is no LoRA tensor: names end in {' or '.join(ADAPTER_ENDINGS)}", "weights")
    scale = body.scale if body.scale is not None else scale_of(metadata(data))
    adapter = Adapter(body.name or "", scale)
    return WeightUpdate(body.version, tensors, adapter, body.fingerprint, canary_of(body.canary))


def canary_of(body: CanaryBody | None) -> Canary | None:
    return None if body is None else Canary(tuple(body.token_ids), tuple(body.logprobs), body.tolerance)


def metadata(data: bytes) -> Mapping[str, str]:
    """A safetensors file's own notes; the file was read before, so its header is sound."""
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]).get("__metadata__") or {}


def scale_of(notes: Mapping[str, str]) -> float:
    """alpha / rank, where the file says so."""
    if "alpha" not in notes or "rank" not in notes:
        return 1.0
    try:
        return float(notes["alpha"]) / float(notes["rank"])
    except (ValueError, ZeroDivisionError) as error:
        raise bad(f"the file's metadata gives no scale: alpha {notes['alpha']}, rank {notes['rank']}") from error


def find_files(path: str, allowed: Sequence[Path]) -> list[Path]:
    """The safetensors files a path stands for, links followed before the folders are compared."""
    forbidden = Refusal(403, "weights load only from folders the server was started with (--allow)", param="path")
    try:
        asked = Path(path).resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise bad(f"`{path}` is no path: {error}", "path") from error
    # Whether something exists is told only about allowed folders.
    if not any(asked.is_relative_to(folder) for folder in allowed):
        raise forbidden
    files = sorted(asked.glob("*.safetensors")) if asked.is_dir() else [asked]
    if not files or not all(file.is_file() and file.suffix == ".safetensors" for file in files):
        raise bad(f"`{path}` is neither a .safetensors file nor a folder of them", "path")
    if not all(any(file.resolve().is_relative_to(folder) for folder in allowed) for file in files):
        raise forbidden
    return files
