"""Leads a `colocated` run on rank 0, and takes part in it on every other rank."""

from functools import partial
from pathlib import Path
from typing import TextIO

from paceline.cluster.colocated.follower import follow
from paceline.cluster.colocated.place import in_place
from paceline.cluster.colocated.rank_info import again, take_seat
from paceline.cluster.session import Given, RunResult, conduct
from paceline.cluster.signals import Signals
from paceline.config import RunConfig
from paceline.monitor import Monitor, RunOutcome


def colocated(
    config: RunConfig,
    environments: Given,
    overwrite: bool,
    screen: TextIO | Monitor | None,
    signals: Signals | None = None,
) -> RunResult:
    """Rank 0 leads the run and answers with all of it; every other rank answers, when it is over, with nothing."""
    config, seat = take_seat(config)
    if seat.rank == 0:
        place = partial(in_place, seat)
        return conduct(
            again(config), place, environments=environments, overwrite=overwrite, screen=screen, signals=signals
        )
    follow(config, seat)
    return RunResult(RunOutcome("finished", 0, ""), Path(config.runs) / config.name, [], [])
