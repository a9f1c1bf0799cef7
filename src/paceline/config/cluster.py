"""Where the parts of a run go when they are spread over machines."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from paceline.config.base import Section
from paceline.config.reference import ModelRef

if TYPE_CHECKING:
    from paceline.config.run import RunConfig


class Cluster(Section):
    """How many of each part `placement = "ray"` starts, and what each is given. Trainer ranks are counted in
    [trainer.parallel]."""

    address: str | None = None
    """A running Ray to join, `host:port` or `auto`; without one, a Ray of this machine is started and ended with the
    run."""
    engines: int = Field(default=1, ge=1)
    """Engine replicas the run begins with."""
    most_engines: int | None = Field(default=None, ge=1)
    """A node that joins later gets a further replica, up to so many. None: `engines` is all."""
    engine_gpus: float | None = Field(default=None, ge=0)
    """GPUs of each engine; 1 where the cluster has any."""
    engine_cpus: float = Field(default=1.0, ge=0)
    """Cores of each engine."""
    rank_gpus: float | None = Field(default=None, ge=0)
    """GPUs of each trainer rank; 1 where the cluster has any."""
    rank_cpus: float = Field(default=1.0, ge=0)
    """Cores of each trainer rank."""
    workers: int = Field(default=0, ge=0)
    """Actors that run reward and tool code which needs a process of its own (maths, sandboxes); with 0 those processes
    run beside the orchestrator."""
    worker_cpus: float = Field(default=1.0, ge=0)
    """Cores of each worker."""
    scorers: int = Field(default=1, ge=1)
    """Logprob workers for each teacher that is named without a `base_url`. They load it by the trainer's own code,
    score what the policy sampled, and never sample."""
    scorer_gpus: float | None = Field(default=None, ge=0)
    """GPUs of each scorer; 1 where the cluster has any."""
    scorer_cpus: float = Field(default=1.0, ge=0)
    """Cores of each scorer."""

    @model_validator(mode="after")
    def _room_to_grow(self) -> "Cluster":
        if self.most_engines is not None and self.most_engines < self.engines:
            raise ValueError(f"most_engines = {self.most_engines} is less than engines = {self.engines}")
        return self


def scored_here(config: "RunConfig") -> list[str]:
    """The frozen models that the run itself serves, each once, in the order of the run file."""
    named = [ref.name for _, _, ref in references(config) if ref.base_url is None]
    return list(dict.fromkeys(named))


def problems(config: "RunConfig") -> Iterator[str]:
    """Teachers that nobody would serve."""
    for where, plays, ref in references(config):
        if ref.base_url is not None:
            continue
        if plays:
            yield (
                f"{where}: an sft teacher plays, and the run's own scorers only score: serve `{ref.name}` with "
                "`paceline serve` and give its base_url"
            )
        elif config.placement != "ray":
            yield (
                f"{where}: nobody serves `{ref.name}`: start `paceline serve {ref.name} --scores-only` and give its "
                'base_url, or set placement = "ray", which starts scorers for it'
            )


def references(config: "RunConfig") -> Iterator[tuple[str, bool, ModelRef]]:
    """Where a frozen model is named, whether it is to play there, and what is said of it."""
    for env in config.env:
        for place, algo in env.credits:
            ref = getattr(algo, "teacher", None)
            if isinstance(ref, ModelRef):
                yield f"environment `{env.name}`{place}", algo.type == "sft", ref
