"""Entry point of the server, trainer and orchestrator processes.

python -m paceline.cluster.processes.child server | trainer | orchestrator
"""

import asyncio
import os
import sys
from pathlib import Path

import msgspec

from paceline.cluster.local import make_room_for_adapters
from paceline.cluster.processes.frames import RpcHello
from paceline.cluster.processes.host import TrainerHost, life
from paceline.cluster.processes.launch_spec import FATAL, LaunchSpec, RunEndReport, read_brief
from paceline.cluster.serving import serve_model
from paceline.cluster.session import conduct
from paceline.cluster.training import build_trainer
from paceline.config import RunConfig
from paceline.config.env.custom import ArenaEnvConfig as Arena
from paceline.config.serve import ServeConfig
from paceline.errors import PacelineError
from paceline.inference import EngineError
from paceline.model import end_tokens, load_tokenizer, small_products
from paceline.monitor import Monitors, watching
from paceline.monitor.plain import PlainLines
from paceline.util.process_exit import exit_process


def server(brief: LaunchSpec) -> int:
    """`paceline serve`, which may read the weights the trainer leaves, and nothing else."""
    config = make_room_for_adapters(brief.run, _past(brief.run))
    settings = ServeConfig(port=brief.port, api_key=brief.key, allow=[str(brief.weights)], grace=0)
    try:
        serve_model(config, settings)
    except EngineError as error:  # the engine is lost: another may live
        print(f"paceline: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def trainer(brief: LaunchSpec) -> int:
    """One trainer, asked over a socket."""
    config = brief.run
    built = build_trainer(config)
    address = Path(brief.socket)
    address.unlink(missing_ok=True)
    tokenizer = load_tokenizer(config.model)
    hello = RpcHello(life(), 0, built.parameters, built.device, end_tokens(tokenizer, built.model))
    host = TrainerHost(built.trainer, tokenizer, brief.weights, hello, config.weights.path)
    with small_products(built.model.dtype):
        asyncio.run(host.serve(address))
    return 0


def orchestrator(brief: LaunchSpec) -> int:
    """The training loop, with server and trainer at the addresses of `brief`."""
    from paceline.cluster.processes.connected import connected

    result = conduct(
        brief.run,
        lambda config, dumps, phase, given: connected(config, brief, phase),
        overwrite=brief.overwrite,
        screen=sys.stdout if brief.screen else None,
    )
    os.write(brief.report, msgspec.json.encode(RunEndReport.of(result.outcome)))
    return {"finished": 0, "failed": 1, "interrupted": 130}[result.outcome.status]


def _past(config: RunConfig) -> int:
    """Versions of the past that leagues keep in the server."""
    leagues = [env.league for env in config.env if isinstance(env, Arena)]
    return sum(league.size for league in leagues if league is not None)


def main(role: str) -> int:
    brief = read_brief()
    try:
        if role == "orchestrator":  # which watches over itself
            return orchestrator(brief)
        with watching(Monitors(PlainLines(sys.stderr)), Path(brief.folder).parent, 0, part=role):
            return {"server": server, "trainer": trainer}[role](brief)
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr, flush=True)
        return FATAL


if __name__ == "__main__":
    exit_process(main(sys.argv[1]))
