"""Serves one trainer over a Unix socket: the trainer's side."""

import asyncio
import contextlib
import uuid
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from paceline.clients.frames import read_frame
from paceline.data import Sample, decode
from paceline.runtime.processes.frames import (
    Alive,
    RpcCall,
    RpcFailure,
    RpcHello,
    RpcResult,
    Sent,
    answered,
    decode_call,
    framed,
)
from paceline.trainer import Trainer
from paceline.util.deadlines import waiting
from paceline.weights.transports import WeightPath
from paceline.weights.weight_store import StoredTensors, WeightStore

PULSE_SECONDS = 5.0
"""A caller that waits hears this often that we live."""
KEPT_WEIGHTS = 3
"""Files of weights that stay: an engine that comes back may ask for the last published."""


class TrainerHost:
    """Executes each call once.

    A connection may break at any moment, so a caller may repeat a call: the call of the same caller and number is not
    done twice, its answer is given again. One caller speaks at a time; what a lost one had asked for is finished first,
    since the trainer has one thread.
    """

    def __init__(
        self,
        trainer: Trainer,
        tokenizer: PreTrainedTokenizerBase,
        weights: Path,
        hello: RpcHello,
        path: WeightPath = "auto",
    ) -> None:
        self._trainer, self._tokenizer, self._hello = trainer, tokenizer, hello
        self._shelf = WeightStore(weights, KEPT_WEIGHTS, deltas=path in ("auto", "delta"))
        self._shelf.adopt()
        self._fed: list[Sample] = []
        self._callers: set[asyncio.StreamWriter] = set()
        self._last = ("", 0)
        self._answer: asyncio.Future[RpcResult | RpcFailure] | None = None

    async def serve(self, address: Path) -> None:
        """Answer until the process ends."""
        server = await asyncio.start_unix_server(self._meet, address)
        try:
            await server.serve_forever()  # unbounded: being asked is its job
        finally:
            for caller in self._callers:
                caller.close()

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._hello.version = self._trainer.version
        writer.write(framed(self._hello))
        self._callers.add(writer)
        with contextlib.suppress(ConnectionError, TimeoutError):
            while (body := await read_frame(reader)) is not None:
                answer = self._once(decode_call(body))
                while not (await asyncio.wait({answer}, timeout=PULSE_SECONDS))[0]:
                    writer.write(framed(Alive()))
                    await asyncio.wait_for(writer.drain(), PULSE_SECONDS)
                writer.write(framed(answer.result()))  # bounded: it is done
        self._callers.discard(writer)
        writer.close()

    def _once(self, call: RpcCall) -> asyncio.Future[RpcResult | RpcFailure]:
        caller, number = self._last
        if self._answer is None or caller != call.caller or call.number > number:
            self._last = (call.caller, call.number)
            self._answer = asyncio.ensure_future(self._do(call, self._answer))
        # An older call, from a connection that broke, gets an answer that its caller does not wait for.
        return self._answer

    async def _do(self, call: RpcCall, before: asyncio.Future[RpcResult | RpcFailure] | None) -> RpcResult | RpcFailure:
        if before is not None and not before.done():
            # What a lost caller asked for is finished first: not all of it is done by the trainer's one thread.
            await asyncio.wait({before})  # bounded: as the call itself was
        with waiting(f"to {call.what}, as the orchestrator asked"):
            return await answered(call, getattr(self, f"_{call.what}")(call))

    def _done(self, call: RpcCall, **fields: object) -> RpcResult:
        return RpcResult(call.number, self._trainer.version, **fields)  # ty: ignore[invalid-argument-type]

    async def _feed(self, call: RpcCall) -> RpcResult:
        samples = decode(call.data)
        await self._trainer.feed(samples)
        self._fed += samples
        return self._done(call)

    async def _step(self, call: RpcCall) -> RpcResult:
        new = iter(decode(call.data))
        fed, self._fed = self._fed, []
        report = await self._trainer.step([next(new) if at < 0 else fed[at] for at in call.order])
        return self._done(call, report=report)

    async def _weights(self, call: RpcCall) -> RpcResult:
        update = await self._trainer.weights()
        kept = await self._shelf.keep(update)
        expected = kept.expected or await asyncio.to_thread(update.fingerprint)
        stored = kept.tensors
        assert isinstance(stored, StoredTensors)
        deltas, delta = [str(file) for file in stored.deltas], str(self._shelf.link or "")
        sent = Sent(update.version, str(stored.files[0]), update.adapter, expected, update.canary, deltas, delta)
        return self._done(call, sent=sent)

    async def _save(self, call: RpcCall) -> RpcResult:
        await self._trainer.save(Path(call.path))
        return self._done(call)

    async def _load(self, call: RpcCall) -> RpcResult:
        self._fed = []
        await self._trainer.load(Path(call.path))
        return self._done(call)

    async def _export(self, call: RpcCall) -> RpcResult:
        await self._trainer.export(Path(call.path), self._tokenizer)
        return self._done(call)


def life() -> str:
    return uuid.uuid4().hex
