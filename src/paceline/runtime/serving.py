"""Builds model and engine for `paceline serve`, in this process or one of their own, and ends it with its engine.

When the engine's thread has failed, nothing in this process can bring it back: perhaps the device is gone too. A
process that lived on would refuse every request, for ever; one that ends is restarted by its supervisor.
"""

import asyncio
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.clients.link import EngineLink
from paceline.clients.rpc import EngineHost
from paceline.config import RunConfig
from paceline.config.hardware import uses_mlx
from paceline.config.serve import ServeConfig
from paceline.engine.engine import DecodingEngine
from paceline.errors import EngineError, PacelineError
from paceline.model import end_tokens, load_tokenizer, short_switch_interval
from paceline.model.tokenizer import find_tokenizer
from paceline.planner.hardware import split_threads, usable_cores
from paceline.runtime.local import device_of, load_run_model, with_sections
from paceline.server import build_app, event_loop_factory, listen, serve
from paceline.util.child_process import end_child
from paceline.util.gc_tuning import tuned_gc

if TYPE_CHECKING:
    from paceline.runtime.scorer import Scorer


Ends = tuple[int, ...]
"""The tokens that end a turn."""
CLOSE_SECONDS = 30.0
SCORED_AT_ONCE = 32_768
"""Tokens of a scorer's micro-batch where the trainer would find out its own."""
FAREWELL_SECONDS = 1.0
"""For answers that are under way when the engine fails: every waiting request has just been failed."""
MOST_SECONDS = 30.0
"""For those that are still not sent by then: a busy machine is slow."""


def watch_engine(engine: "DecodingEngine | Scorer", then: Callable[[BaseException], None]) -> None:
    """Call `then`, on a thread of its own, once the engine has failed; never if it is only closed."""

    def wait() -> None:
        if (cause := engine.outlive()) is not None:
            then(cause)

    threading.Thread(target=wait, name="paceline-survivor", daemon=True).start()


async def wait_for_failure(engine: "DecodingEngine | Scorer") -> EngineError:
    loop = asyncio.get_running_loop()
    end: asyncio.Future[BaseException] = loop.create_future()

    def on_failure(cause: BaseException) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(lambda: end.done() or end.set_result(cause))

    watch_engine(engine, on_failure)
    cause = await end  # unbounded: as long as the engine serves
    return EngineError(f"the engine stopped: {cause}")


def exit_after_failure(cause: BaseException, waits: Callable[[], bool] = lambda: False) -> None:
    """End this process, after a moment for the last answers, and longer while a client `waits` for one. Nothing is
    unwound: threads of a broken device may hang."""
    end = time.monotonic() + MOST_SECONDS
    time.sleep(FAREWELL_SECONDS)
    while waits() and time.monotonic() < end:
        time.sleep(0.05)  # bounded: by MOST_SECONDS
    print(f"paceline: the engine stopped: {type(cause).__name__}: {cause}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def serve_model(config: RunConfig, settings: ServeConfig) -> None:
    """Serve until a signal comes, or until the engine is lost."""
    sock = listen(settings.host, settings.port)
    name = settings.name or config.model.name
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    address = f"http://{host}:{sock.getsockname()[1]}/v1"
    # Beside a GPU a process of its own pays off.
    isolated = settings.isolate if settings.isolate is not None else device_of(config) == "cuda"
    how = embedded_scorer if settings.scores_only else isolated_engine if isolated else embedded_engine
    with sock, how(config) as (engine, ends):
        app = build_app(
            engine,
            load_tokenizer(config.model),
            ends,
            name=name,
            api_key=settings.api_key,
            allowed=[Path(folder) for folder in settings.allow],
            peers=settings.peers,
            max_body_bytes=settings.max_body_bytes,
        )
        gone = engine.wait_closed if isinstance(engine, EngineLink) else partial(wait_for_failure, engine)
        ready = f"paceline: serving {name} at {address}"
        with asyncio.Runner(loop_factory=event_loop_factory()) as runner, tuned_gc():
            runner.run(serve(app, sock, settings.grace, lambda: print(ready, flush=True), gone))
    print("paceline: stopped", file=sys.stderr)


@contextmanager
def embedded_engine(config: RunConfig) -> Generator[tuple[DecodingEngine, Ends]]:
    find_tokenizer(config.model)  # a missing one is found before weights are read
    loaded = load_run_model(config)
    tokenizer = load_tokenizer(config.model)
    ends = end_tokens(tokenizer, loaded.model)
    lora = config.model.lora
    changes: dict[str, int] = {"threads": config.engine.threads or _threads(loaded.parameters)}
    if lora is not None and not config.engine.adapters:
        changes |= {"adapters": 1, "adapter_rank": lora.rank}
    grammars = None
    if importlib.util.find_spec("torch") is not None:  # which xgrammar needs
        from paceline.engine.grammar import grammar_matcher_factory

        grammars = grammar_matcher_factory(tokenizer, ends)
    engine = loaded.engine(with_sections(config, engine=changes), grammars, owns_model=True)
    with closing(engine), loaded.compute_settings(), short_switch_interval(loaded.device):
        engine.start()
        yield engine, ends


@contextmanager
def embedded_scorer(config: RunConfig, follows: bool = False) -> Generator[tuple["Scorer", Ends]]:
    """A scorer in this process: no cache, no decode loop. One that `follows` takes the policy's weights."""
    if uses_mlx(config.backend):
        raise PacelineError('--scores-only computes as the trainer of torch does: set backend = "torch"')
    from paceline.model import avoid_onednn_on_arm, load_model
    from paceline.runtime.scorer import Scorer
    from paceline.runtime.torch_parts import pick_device

    model = load_model(config.model, pick_device(config.device))
    ends = end_tokens(load_tokenizer(config.model), model)
    threads = config.engine.threads or _threads(sum(parameter.numel() for parameter in model.parameters()))
    budget = config.trainer.micro_batch_tokens
    scorer = Scorer(
        model,
        budget if isinstance(budget, int) else SCORED_AT_ONCE,
        fp32_head=config.model.fp32_head,
        threads=threads,
        follows=follows,
        lora=config.model.lora,
    )
    with closing(scorer), avoid_onednn_on_arm(model.dtype), short_switch_interval(model.device.type):
        scorer.start()
        yield scorer, ends


@contextmanager
def isolated_engine(config: RunConfig) -> Generator[tuple[EngineLink, Ends]]:
    """An engine in a process of its own, so that HTTP and JSON never hold the lock of the decode loop."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-P", "-m", "paceline.runtime.serving", str(theirs.fileno())]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[theirs.fileno()])
    theirs.close()
    assert child.stdin is not None
    with child.stdin as pipe:
        pipe.write(config.model_dump_json().encode())
    link = EngineLink(ours, cause=lambda: _cause(child))
    try:
        link.start()
        yield link, link.end_tokens
    finally:
        link.close()
        end_child(child, CLOSE_SECONDS, CLOSE_SECONDS)


def host_engine(descriptor: int, config: RunConfig) -> None:
    """The life of the engine's process: ends when the other side of its socket does."""
    # Ctrl-C reaches the whole group; the server decides when it is time, and then closes the socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock = socket.socket(fileno=descriptor)
    try:
        with embedded_engine(config) as (engine, ends), asyncio.Runner(loop_factory=event_loop_factory()) as runner:
            host = EngineHost(engine, ends)
            watch_engine(engine, lambda cause: exit_after_failure(cause, lambda: host.has_pending))
            runner.run(host.serve(sock))
    except PacelineError as error:
        EngineHost.refuse(sock, str(error))


def _cause(child: subprocess.Popen) -> str:
    try:
        code = child.wait(10.0)
    except subprocess.TimeoutExpired:
        return "it closed the connection"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _threads(parameters: int) -> int:
    """All cores but the one that speaks HTTP."""
    return split_threads(max(1, usable_cores() - 1), parameters, at_once=False)[0]


if __name__ == "__main__":
    host_engine(int(sys.argv[1]), RunConfig.model_validate_json(sys.stdin.buffer.read()))
