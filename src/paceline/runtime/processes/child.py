"""Entry point of the server, trainer and orchestrator processes, and the socket between the last two.

python -m paceline.runtime.processes.child server | trainer | orchestrator
"""

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
from transformers import PreTrainedTokenizerBase

from paceline.clients import HttpEngine
from paceline.clients.rpc import FRAME_HEADER, read_frame
from paceline.config import RunConfig
from paceline.config.env.base import ArenaEnvConfig
from paceline.config.serve import ServeConfig
from paceline.data import Sample
from paceline.errors import EngineError, PacelineError
from paceline.model import avoid_onednn_on_arm, end_tokens, load_tokenizer
from paceline.observe.monitor import Monitors, watch_run
from paceline.observe.monitor.plain import PlainLines
from paceline.runtime import rpc
from paceline.runtime.local import RunParts, prepare, share_cores, with_adapter_slots
from paceline.runtime.processes.supervisor import FATAL, OUTCOME, LaunchSpec
from paceline.runtime.serving import serve_model
from paceline.runtime.session import Given, run_session
from paceline.runtime.torch_parts import build_trainer
from paceline.trainer import StepReport, Trainer, TrainerLost
from paceline.util.deadlines import named_wait, record_progress
from paceline.util.process_exit import exit_process
from paceline.weights.transports import WeightPath
from paceline.weights.update import WeightUpdate
from paceline.weights.weight_store import StoredTensors, WeightStore, open_delta

SILENT_SECONDS = 60.0
"""A trainer at work sends `Alive` every few seconds; after this long without a message it counts as lost."""
RETURN_SECONDS = 900.0
"""How long a trainer or a server may take to come up: it loads the model, perhaps from a slow disk, and compiles it."""
WARN_SECONDS = 20.0
"""How often a warning is logged while waiting for one."""
FIRST_DELAY, MOST_DELAY = 0.05, 0.25
MAX_MESSAGE_BYTES = 1 << 36
T = TypeVar("T")
log = logging.getLogger("paceline.trainer")


class RemoteTrainer(rpc.RpcTrainer):
    """A trainer behind a socket.

    A connection that breaks is opened again and the question asked again: the other side does nothing twice. If the one
    who answers then is another trainer, what the old one knew is gone, and `load` is the only way on.
    """

    def __init__(self, address: Path, silent: float = SILENT_SECONDS) -> None:
        super().__init__()
        self._address, self._silent = address, silent
        self._incarnation = ""
        self._has_state = False
        """Whether this trainer process holds state that a restarted one would not."""
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._fed: dict[int, tuple[int, Sample]] = {}
        """Samples the other side has, by identity: where in its list, and the sample itself, so that it stays."""

    async def connect(self) -> rpc.RpcHello:
        await self._open_streams()
        return self._hello

    async def feed(self, samples: Sequence[Sample]) -> None:
        self._has_state = True
        await self._call("feed", samples=samples)
        self._fed |= {id(sample): (len(self._fed) + i, sample) for i, sample in enumerate(samples)}

    async def step(self, batch: Sequence[Sample]) -> StepReport:
        known = [self._fed.get(id(sample), (-1, sample))[0] for sample in batch]
        new = [sample for sample, at in zip(batch, known, strict=True) if at < 0]
        self._fed, self._has_state = {}, True
        done = await self._call("step", samples=new, order=known)
        assert done.report is not None
        return done.report

    async def weights(self) -> WeightUpdate:
        sent = (await self._call("weights")).sent
        assert sent is not None
        tensors = StoredTensors([Path(sent.file)], [Path(file) for file in sent.deltas])
        delta = await asyncio.to_thread(open_delta, Path(sent.delta)) if sent.delta else None
        return WeightUpdate(sent.version, tensors, sent.adapter, sent.expected, sent.canary, delta)

    async def load(self, folder: Path) -> None:
        self.close()
        self._incarnation, self._fed, self._has_state = "", {}, False  # any trainer process will do now
        await super().load(folder)
        self._has_state = True

    # -- the wire -----------------------------------------------------------------------------------------------------

    async def _call(
        self,
        method: rpc.RpcMethod,
        folder: Path | None = None,
        samples: Sequence[Sample] = (),
        order: Sequence[int] = (),
    ) -> rpc.RpcResult:
        call = self._make_call(method, folder, samples, order)
        while True:
            try:
                answer = await self._ask(call)
                break
            except (ConnectionError, asyncio.IncompleteReadError) as error:
                self.close()
                log.warning("the connection to the trainer broke (%s): asking again", error or type(error).__name__)
            except BaseException:
                self.close()  # cancelled or failed in the middle: its answer must not meet the next question
                raise
        if isinstance(answer, rpc.RpcFailure):
            raise answer.error()
        self.version = answer.version
        return answer

    async def _ask(self, call: rpc.RpcCall) -> rpc.RpcAnswer:
        reader, writer = self._streams or await self._open_streams()
        writer.write(rpc.encode_frame(call))
        async with asyncio.timeout(self._silent * 10):
            await writer.drain()
        while True:
            answer = await self._receive(reader)
            record_progress()  # a trainer at work is progress of the run
            if isinstance(answer, rpc.RpcAnswer) and answer.number == call.number:
                return answer
            if not isinstance(answer, rpc.Alive):
                raise ConnectionError(f"{type(answer).__name__} came for an answer")

    async def _receive(self, reader: asyncio.StreamReader) -> rpc.RpcHello | rpc.Alive | rpc.RpcAnswer:
        try:
            async with asyncio.timeout(self._silent):
                (length,) = FRAME_HEADER.unpack(await reader.readexactly(FRAME_HEADER.size))
                if length > MAX_MESSAGE_BYTES:
                    raise ConnectionError(f"a frame of {length} bytes was announced")
                return rpc.decode_from_trainer(await reader.readexactly(length))
        except TimeoutError:
            raise TrainerLost(
                f"the trainer has not said a word for {self._silent:g} s: look at its log, then add --resume latest"
            ) from None
        except msgspec.DecodeError as error:
            raise ConnectionError(f"the answer cannot be read: {error}") from error

    async def _open_streams(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        async def handshake() -> rpc.RpcHello:
            try:
                async with asyncio.timeout(self._silent):
                    self._streams = await asyncio.open_unix_connection(str(self._address))
                hello = await self._receive(self._streams[0])
                if not isinstance(hello, rpc.RpcHello):
                    raise ConnectionError(f"{type(hello).__name__} came for a greeting")
                return hello
            except BaseException:
                self.close()
                raise

        try:
            self._hello = hello = await _retry_until_up(handshake, "trainer", OSError, asyncio.IncompleteReadError)
        except (OSError, asyncio.IncompleteReadError) as error:
            cause = str(error) or type(error).__name__
            raise TrainerLost(f"the trainer did not come up within {RETURN_SECONDS:g} s: {cause}") from error
        if self._has_state and self._incarnation and self._incarnation != hello.incarnation:
            self.close()
            raise TrainerLost("the trainer's process ended and was started again")
        self._incarnation = hello.incarnation
        assert self._streams is not None
        return self._streams

    def close(self) -> None:
        """Close the connection; the next call opens another."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


async def _retry_until_up(attempt: Callable[[], Awaitable[T]], role: str, *down: type[Exception]) -> T:
    """The result of the first attempt that raises none of `down`; the error of the last one after `RETURN_SECONDS`."""
    began, warned_at, delay = time.monotonic(), 0.0, FIRST_DELAY
    while True:
        try:
            return await attempt()  # bounded: by the attempt itself
        except down as error:
            waited = time.monotonic() - began
            if waited > RETURN_SECONDS:
                raise
            if waited - warned_at > WARN_SECONDS:
                warned_at = waited
                cause = str(error) or type(error).__name__
                logging.getLogger(f"paceline.{role}").warning("waiting for the %s for %.0f s: %s", role, waited, cause)
        await asyncio.sleep(delay)  # bounded: by RETURN_SECONDS
        delay = min(MOST_DELAY, 2 * delay)


PULSE_SECONDS = 5.0
"""A caller that waits hears this often that we live."""
KEPT_WEIGHTS = 3
"""Files of weights that stay: an engine that comes back may ask for the last published."""


class TrainerHost(rpc.TrainerRpcHandler):
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
        hello: rpc.RpcHello,
        path: WeightPath = "auto",
    ) -> None:
        super().__init__(trainer, tokenizer)
        self._hello = hello
        self._store = WeightStore(weights, KEPT_WEIGHTS, deltas=path in ("auto", "delta"))
        self._store.adopt()
        self._callers: set[asyncio.StreamWriter] = set()
        self._last = ("", 0)
        self._answer: asyncio.Future[rpc.RpcAnswer] | None = None

    async def serve(self, address: Path) -> None:
        """Answer until the process ends."""
        server = await asyncio.start_unix_server(self._serve_connection, address)
        try:
            await asyncio.Future()  # unbounded: being asked is its job
        finally:
            server.close()
            for caller in self._callers:
                caller.close()

    async def _serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(rpc.encode_frame(self._hello))
        self._callers.add(writer)
        with contextlib.suppress(ConnectionError, TimeoutError):
            while (body := await read_frame(reader)) is not None:
                answer = self._run_once(rpc.decode_call(body))
                while not (await asyncio.wait({answer}, timeout=PULSE_SECONDS))[0]:
                    writer.write(rpc.encode_frame(rpc.Alive()))
                    await asyncio.wait_for(writer.drain(), PULSE_SECONDS)
                writer.write(rpc.encode_frame(answer.result()))  # bounded: it is done
        self._callers.discard(writer)
        writer.close()

    def _run_once(self, call: rpc.RpcCall) -> asyncio.Future[rpc.RpcAnswer]:
        caller, number = self._last
        if self._answer is None or caller != call.caller or call.number > number:
            self._last = (call.caller, call.number)
            self._answer = asyncio.ensure_future(self._run(call, self._answer))
        # An older call, from a connection that broke, gets an answer that its caller does not wait for.
        return self._answer

    async def _run(self, call: rpc.RpcCall, before: asyncio.Future[rpc.RpcAnswer] | None) -> rpc.RpcAnswer:
        if before is not None and not before.done():
            # What a lost caller asked for is finished first: not all of it is done by the trainer's one thread.
            await asyncio.wait({before})  # bounded: as the call itself was
        with named_wait(f"to {call.method}, as the orchestrator asked"):
            return await self.answer(call)

    async def _weights(self) -> rpc.SentWeights:
        update = await self.trainer.weights()
        stored_update = await self._store.store_update(update)
        expected = stored_update.expected or await asyncio.to_thread(update.fingerprint)
        stored = stored_update.tensors
        assert isinstance(stored, StoredTensors)
        deltas, delta = [str(file) for file in stored.deltas], str(self._store.last_delta or "")
        return rpc.SentWeights(
            update.version, str(stored.files[0]), update.adapter, expected, update.canary, deltas, delta
        )


def server(spec: LaunchSpec) -> None:
    """`paceline serve`, which may read the weights the trainer leaves, and nothing else."""
    leagues = [env.league for env in spec.run.env if isinstance(env, ArenaEnvConfig)]
    config = with_adapter_slots(spec.run, sum(league.size for league in leagues if league is not None))
    serve_model(config, ServeConfig(port=spec.port, api_key=spec.key, allow=[str(spec.weights)], grace=0))


def trainer(spec: LaunchSpec) -> None:
    """One trainer, asked over a socket."""
    config = spec.run
    built, tokenizer = build_trainer(config), load_tokenizer(config.model)
    address = Path(spec.socket)
    address.unlink(missing_ok=True)
    hello = rpc.RpcHello(built.parameters, built.device, end_tokens(tokenizer, built.model))
    host = TrainerHost(built.trainer, tokenizer, spec.weights, hello, config.weights.path)
    with avoid_onednn_on_arm(built.model.dtype):
        asyncio.run(host.serve(address))


def orchestrator(spec: LaunchSpec) -> int:
    """The training loop, with server and trainer at the addresses of `spec`."""
    screen = sys.stdout if spec.screen else None
    result = run_session(spec.run, partial(connect_parts, spec), overwrite=spec.overwrite, screen=screen)
    os.write(spec.report, OUTCOME.dump_json(result.outcome))
    return {"finished": 0, "failed": 1, "interrupted": 130}[result.outcome.status]


def main(role: str) -> int:
    spec = msgspec.json.decode(sys.stdin.buffer.readline(), type=LaunchSpec)
    try:
        if role == "orchestrator":  # which watches over itself
            return orchestrator(spec)
        with watch_run(Monitors(PlainLines(sys.stderr)), Path(spec.folder).parent, 0, part=role):
            {"server": server, "trainer": trainer}[role](spec)
            return 0
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr, flush=True)
        # Where the engine is lost, another may live.
        return 1 if role == "server" and isinstance(error, EngineError) else FATAL


@contextlib.asynccontextmanager
async def connect_parts(
    spec: LaunchSpec, config: RunConfig, run_folder: Path, phase: Callable[[str], None], given: Given
) -> AsyncGenerator[RunParts]:
    """Wait for server and trainer, and let go of them at the end."""
    driver = prepare(config, phase)
    phase(f"waiting for a server and a trainer of {config.model.name}")
    engine = HttpEngine(spec.url, api_key=spec.key, folder=spec.weights, path=config.weights.path)
    async with contextlib.aclosing(engine):
        with contextlib.closing(RemoteTrainer(Path(spec.trainer))) as trainer:
            hello = await trainer.connect()
            await _retry_until_up(lambda: asyncio.to_thread(engine.start), "server", EngineError)
            driver = replace(driver, config=share_cores(config, hello.parameters))
            with contextlib.closing(driver.pool([engine])) as pool:
                yield driver.build_run_parts(pool, trainer, hello.ends, hello.device, hello.parameters)


if __name__ == "__main__":
    exit_process(main(sys.argv[1]))
