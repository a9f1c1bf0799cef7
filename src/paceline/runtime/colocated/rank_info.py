"""Finds the rank of this process and the world size."""

import os
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from paceline.config import RunConfig
from paceline.errors import PacelineError
from paceline.observe.monitor import RunDirectory
from paceline.orchestrator import Checkpoints
from paceline.util.process_exit import free_port

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class RankInfo:
    """A place among the ranks, and where they meet."""

    rank: int
    world: int
    host: str
    port: int
    neighbours: int
    """Ranks on this machine, this one included: they share its cores."""
    given: bool
    """Whether another launcher, such as torchrun, has started the ranks."""

    @classmethod
    def found(cls) -> "RankInfo | None":
        """Read from the environment variables that torchrun sets; None if they are not set."""
        if any(not os.environ.get(name) for name in VARIABLES):
            return None
        world = _number("WORLD_SIZE")
        neighbours = _number("LOCAL_WORLD_SIZE") if os.environ.get("LOCAL_WORLD_SIZE") else world
        return cls(_number("RANK"), world, os.environ["MASTER_ADDR"], _number("MASTER_PORT"), neighbours, given=True)

    @classmethod
    def first(cls, world: int) -> "RankInfo":
        """The first rank of a run that starts the others itself, on this machine."""
        return cls(0, world, LOOPBACK, free_port(LOOPBACK), world, given=False)

    def of(self, rank: int) -> "RankInfo":
        """Another rank's."""
        return replace(self, rank=rank)

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that torchrun would set for it."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_WORLD_SIZE": str(self.neighbours),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
        }


def find_rank(config: RunConfig) -> tuple[RunConfig, RankInfo]:
    """The rank of this process, and the run file with as many ranks as there are."""
    info, ranks = RankInfo.found(), config.trainer.parallel.ranks
    if info is None:
        return config, RankInfo.first(ranks)
    if info.world == ranks:
        return config, info
    if "ranks" in config.trainer.parallel.model_fields_set:
        raise PacelineError(
            f"torchrun started {info.world} processes, but trainer.parallel.ranks = {ranks}: start {ranks}, or "
            "leave trainer.parallel.ranks out of the run file"
        )
    table = config.model_dump(mode="json", exclude_none=True)
    table["trainer"]["parallel"]["ranks"] = info.world
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they were heard when the file was read
            return RunConfig.model_validate(table), info
    except ValidationError as error:
        causes = "; ".join(each["msg"].removeprefix("Value error, ") for each in error.errors())
        raise PacelineError(f"torchrun started {info.world} processes: {causes}") from None


def again(config: RunConfig) -> RunConfig:
    """`--resume latest` under a torchrun that restarts lost ranks is said once for all lives: the first, which finds no
    checkpoint, begins."""
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    directory = RunDirectory(Path(config.runs) / config.name)
    if config.resume != "latest" or restarts == "0" or Checkpoints(directory.checkpoints, 1).all():
        return config
    return config.model_copy(update={"resume": None})


def refuse_torchrun(config: RunConfig) -> None:
    """Several processes of one torchrun must not each lead a run of their own."""
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1":
        raise PacelineError(
            f'torchrun started {os.environ["WORLD_SIZE"]} processes, but placement = "{config.placement}" needs one, '
            'which starts the others: set placement = "colocated", or use plain `paceline train`'
        )


def _number(name: str) -> int:
    value = os.environ[name]
    if not value.isdecimal():
        raise PacelineError(f"{name} is `{value}`, not a number: start the ranks with torchrun")
    return int(value)
