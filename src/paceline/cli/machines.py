"""A cluster of machines."""

import argparse
from types import ModuleType

from paceline.cli.commands import Commands
from paceline.errors import PacelineError

CLUSTER = """
examples, on the first machine, then on each further one:
  paceline up
  paceline up --join HOST:6379                             the address that `up` printed

then, on any of them:
  paceline train my-run.toml --placement ray --cluster.address HOST:6379 --cluster.engines 6
  paceline status                                          machines, runs, engines and their versions

All machines must see the run directory and the model under the same path, and have the same versions installed. Where
Ray asks for a token (it says so), copy ~/.ray/auth_token of the first machine to the others.
"""


STATUS = """
examples:
  paceline status                                          the cluster this machine is part of
  paceline status HOST:6379                                another one, by the address that `up` printed
"""

DOWN = """
examples:
  paceline down                                            on each machine that is to leave
"""


def add_up(commands: Commands) -> None:
    up = commands.add("up", _up, "Make this machine a cluster, or a part of one.", CLUSTER)
    up.add_argument("--join", metavar="ADDRESS", help="the cluster to be part of, HOST:PORT")
    up.add_argument("--port", type=int, default=6379, help="where a new cluster is reached (6379)")
    up.add_argument("--cpus", type=int, help="cores it may use here (all)")
    up.add_argument("--gpus", type=int, help="GPUs it may use here (all)")


def _up(known: argparse.Namespace, _: list[str]) -> int:
    return _tell(_cluster().up(known.join, known.port, known.cpus, known.gpus))


def add_status(commands: Commands) -> None:
    status = commands.add("status", _status, "Show a cluster: its machines, and the parts of every run on it.", STATUS)
    status.add_argument("address", nargs="?", default="auto", help="HOST:PORT (the cluster this machine is part of)")


def _status(known: argparse.Namespace, _: list[str]) -> int:
    return _tell(_cluster().status(known.address))


def add_down(commands: Commands) -> None:
    commands.add("down", _down, "Leave the cluster; what runs on this machine ends.", DOWN)


def _down(known: argparse.Namespace, _: list[str]) -> int:
    return _tell(_cluster().down())


def _cluster() -> ModuleType:
    try:
        from paceline.cluster.ray import commands
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise PacelineError('a cluster needs Ray: pip install "paceline[ray]"') from None
    return commands


def _tell(lines: list[str]) -> int:
    print(*lines, sep="\n")
    return 0
