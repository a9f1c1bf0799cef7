"""Commands that listen or run machines: `serve`, `search-server`, `up`, `status` and `down`."""

import argparse
import os
import sys
from types import ModuleType

from paceline.commands.commands import arg, deprecated_option, subcommand
from paceline.config.errors import options_from_flags
from paceline.errors import PacelineError
from paceline.util.interrupts import interrupt_ends_process


@subcommand(
    arg("--join", metavar="ADDRESS", help="the cluster to be part of, HOST:PORT"),
    arg("--port", type=int, default=6379, help="where a new cluster is reached (6379)"),
    arg("--cpus", type=int, help="cores it may use here (all)"),
    arg("--gpus", type=int, help="GPUs it may use here (all)"),
)
def up(known: argparse.Namespace, rest: list[str]) -> None:
    """Make this machine a cluster, or a part of one.

    examples, on the first machine, then on each further one:
      paceline up
      paceline up --join HOST:6379                             the address that `up` printed

    then, on any of them:
      paceline train my-run.toml --placement ray --cluster.address HOST:6379 --cluster.engines 6
      paceline status                                          machines, runs, engines and their versions

    All machines must see the run directory and the model under the same path, and have the same versions installed.
    Where Ray asks for a token (it says so), copy ~/.ray/auth_token of the first machine to the others.
    """
    print(*_cluster_commands().up(known.join, known.port, known.cpus, known.gpus), sep="\n")


@subcommand(arg("address", nargs="?", default="auto", help="HOST:PORT (the cluster this machine is part of)"))
def status(known: argparse.Namespace, rest: list[str]) -> None:
    """Show a cluster: its machines, and the parts of every run on it.

    examples:
      paceline status                                          the cluster this machine is part of
      paceline status HOST:6379                                another one, by the address that `up` printed
    """
    print(*_cluster_commands().status(known.address), sep="\n")


@subcommand()
def down(known: argparse.Namespace, rest: list[str]) -> None:
    """Leave the cluster; what runs on this machine ends.

    examples:
      paceline down                                            on each machine that is to leave
    """
    print(*_cluster_commands().down(), sep="\n")


def _cluster_commands() -> ModuleType:
    try:
        from paceline.runtime.ray import commands
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise PacelineError('a cluster needs Ray: pip install "paceline[ray]"') from None
    return commands


@subcommand(
    arg(
        "model",
        help="Hugging Face folder or hub name, paceline:quickstart, a run directory, a run file (TOML) or an example",
    ),
    arg("--host", help="address to listen on (127.0.0.1)"),
    arg("--port", type=int, help="port; 0 picks a free one and prints it (8000)"),
    arg("--api-key", help="what clients must send; needed off loopback (env PACELINE_API_KEY)"),
    arg("--name", help="the model's name for clients (the name it is loaded by)"),
    arg("--allow", action="append", metavar="FOLDER", help="folder /weights/load may read; repeatable"),
    arg(
        "--peer", action="append", metavar="ADDRESS", help="where /weights/group may connect to (127.0.0.1); repeatable"
    ),
    arg("--grace", type=float, help="seconds that requests get to finish after a signal (10)"),
    arg("--max-body-bytes", type=int, help="longest request body (4 MiB)"),
    arg("--isolate", action=argparse.BooleanOptionalAction, help="run the engine in its own process (on a GPU)"),
    arg("--scores-only", action="store_true", default=None, help="score given tokens, never sample: for teachers"),
    keys=True,
)
def serve(known: argparse.Namespace, overrides: list[str]) -> int:
    """Serve a model with the OpenAI API.

    examples:
      paceline serve paceline:quickstart                       the tiny model of the package, at http://127.0.0.1:8000/v1
      paceline serve ./my-model --name mine --port 9000        a Hugging Face folder, under a name of your choice
      paceline serve runs/quickstart                           what that run exported
      paceline serve runs/quickstart/config.toml --engine.max_running 64
      paceline serve ./my-model --host 0.0.0.0 --api-key KEY   for other machines; the key may stand in PACELINE_API_KEY
      paceline serve ./my-model --allow runs                   POST /weights/load may read below runs/

    then any OpenAI client works:
      curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
        -d '{"messages": [{"role": "user", "content": "reverse: paceline"}]}'

    the model and engine sections of a run file can be set by their dotted path:
      --model.dtype bfloat16   --engine.max_context 4096   --deterministic
    """
    from paceline.config.serve import ServeConfig, load_served

    flags = {name: getattr(known, name, None) for name in ServeConfig.model_fields}
    key = known.api_key or os.environ.get("PACELINE_API_KEY")
    settings = options_from_flags(ServeConfig, flags | {"api_key": key, "peers": known.peer})
    from paceline.commands.targets import served_model

    loaded = load_served(served_model(known.model), overrides)
    from paceline.errors import EngineError

    with interrupt_ends_process():
        from paceline.runtime.serving import serve_model

    try:
        serve_model(loaded.config, settings)
    except EngineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return 1
    return 0


@subcommand(
    arg("--corpus", help="documents, .jsonl with `id`, `text` and perhaps `title` (those of the package)"),
    arg("--index", help="folder to keep the index in"),
    arg("--top-k", type=int, help="results for a query that does not say (5)"),
    arg("--host", help="address to listen on (127.0.0.1)"),
    arg("--port", type=int, help="port; 0 picks a free one (8100)"),
    arg("--api-key", help="what clients must send; needed off loopback (env PACELINE_SEARCH_API_KEY)"),
    arg("--embeddings-endpoint", help="base URL of an OpenAI-compatible endpoint, to search by meaning"),
    arg("--embeddings-model", help="its model"),
    arg("--embeddings-api-key", help="its key"),
    deprecated_option("--embeddings-url", "--embeddings-endpoint"),
)
def search_server(known: argparse.Namespace, rest: list[str]) -> None:
    """Serve a corpus to retrieval environments.

    examples:
      paceline search-server                                   the small corpus of the package, at http://127.0.0.1:8100
      paceline search-server --corpus documents.jsonl --index index --top-k 3
      paceline train my-run.toml --env.0.url http://127.0.0.1:8100         a retrieval environment that asks it
    """
    from paceline.config.env import SEARCH_KEY_VARIABLE
    from paceline.envs.search.server import SearchOptions, serve_search

    flags = {name: getattr(known, name, None) for name in SearchOptions.model_fields}
    flags["embeddings_url"] = known.embeddings_endpoint
    flags["api_key"] = known.api_key or os.environ.get(SEARCH_KEY_VARIABLE)
    serve_search(options_from_flags(SearchOptions, flags))
