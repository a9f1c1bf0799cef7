"""Entry point of the server, trainer and orchestrator processes.

python -m paceline.runtime.processes.child server | trainer | orchestrator
"""

import asyncio
import logging
import os
import sys
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from paceline.clients import HttpEngine
from paceline.config import RunConfig
from paceline.config.env.base import ArenaEnvConfig as Arena
from paceline.config.serve import ServeConfig
from paceline.errors import EngineError, PacelineError
from paceline.model import end_tokens, load_tokenizer, small_products
from paceline.observe.monitor import Monitors, watching
from paceline.observe.monitor.plain import PlainLines
from paceline.orchestrator import build_train_envs
from paceline.runtime.local import Placed, make_room_for_adapters, past_versions, policy_clients, pool_of, share_cores
from paceline.runtime.processes.launch_spec import FATAL, OUTCOME, LaunchSpec, read_launch_spec
from paceline.runtime.processes.remote_trainer import RETURN_SECONDS, WORD_SECONDS, RemoteTrainer, TrainerHost, life
from paceline.runtime.rpc import RpcHello
from paceline.runtime.serving import serve_model
from paceline.runtime.session import run_session
from paceline.runtime.torch_backend import build_trainer, league_engine
from paceline.util.process_exit import exit_process

LOOK_SECONDS = 0.25
log = logging.getLogger("paceline.server")


def server(spec: LaunchSpec) -> int:
    """`paceline serve`, which may read the weights the trainer leaves, and nothing else."""
    config = make_room_for_adapters(spec.run, _past(spec.run))
    settings = ServeConfig(port=spec.port, api_key=spec.key, allow=[str(spec.weights)], grace=0)
    try:
        serve_model(config, settings)
    except EngineError as error:  # the engine is lost: another may live
        print(f"paceline: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def trainer(spec: LaunchSpec) -> int:
    """One trainer, asked over a socket."""
    config = spec.run
    built = build_trainer(config)
    address = Path(spec.socket)
    address.unlink(missing_ok=True)
    tokenizer = load_tokenizer(config.model)
    hello = RpcHello(life(), 0, built.parameters, built.device, end_tokens(tokenizer, built.model))
    host = TrainerHost(built.trainer, tokenizer, spec.weights, hello, config.weights.path)
    with small_products(built.model.dtype):
        asyncio.run(host.serve(address))
    return 0


def orchestrator(spec: LaunchSpec) -> int:
    """The training loop, with server and trainer at the addresses of `spec`."""
    result = run_session(
        spec.run,
        lambda config, dumps, phase, given: connected(config, spec, phase),
        overwrite=spec.overwrite,
        screen=sys.stdout if spec.screen else None,
    )
    os.write(spec.report, OUTCOME.dump_json(result.outcome))
    return {"finished": 0, "failed": 1, "interrupted": 130}[result.outcome.status]


def _past(config: RunConfig) -> int:
    """Versions of the past that leagues keep in the server."""
    leagues = [env.league for env in config.env if isinstance(env, Arena)]
    return sum(league.size for league in leagues if league is not None)


def main(role: str) -> int:
    spec = read_launch_spec()
    try:
        if role == "orchestrator":  # which watches over itself
            return orchestrator(spec)
        with watching(Monitors(PlainLines(sys.stderr)), Path(spec.folder).parent, 0, part=role):
            return {"server": server, "trainer": trainer}[role](spec)
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr, flush=True)
        return FATAL


@asynccontextmanager
async def connected(config: RunConfig, spec: LaunchSpec, phase: Callable[[str], None]) -> AsyncGenerator[Placed]:
    """Wait for server and trainer, and let go of them at the end."""
    phase("preparing environments")
    courses = build_train_envs(config)
    tokenizer = load_tokenizer(config.model)
    phase(f"waiting for a server and a trainer of {config.model.name}")
    trainer = RemoteTrainer(Path(spec.trainer))
    engine = HttpEngine(spec.url, api_key=spec.key, folder=spec.weights, path=config.weights.path)
    try:
        hello = await trainer.meet()
        await _up(engine)
        config = share_cores(config, hello.parameters)
        pool = pool_of([engine], past_versions(courses), lambda: league_engine(config))
        voice = policy_clients(config, pool, tokenizer, hello.ends)
        try:
            yield Placed(pool, trainer, tokenizer, courses, voice, hello.device, hello.parameters)
        finally:
            pool.close()
    finally:
        await engine.aclose()
        trainer.close()


async def _up(engine: HttpEngine) -> None:
    began, warned_at = time.monotonic(), 0.0
    while True:
        try:
            return await asyncio.to_thread(engine.start)
        except EngineError as error:
            waited = time.monotonic() - began
            if waited > RETURN_SECONDS:
                raise
            if waited - warned_at > WORD_SECONDS:
                warned_at = waited
                log.warning("waiting for the server for %.0f s: %s", waited, error)
        await asyncio.sleep(LOOK_SECONDS)  # bounded: by RETURN_SECONDS


if __name__ == "__main__":
    exit_process(main(sys.argv[1]))
