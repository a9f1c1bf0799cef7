"""Where the parts of a run go when they are spread over machines."""

from pydantic import Field, model_validator

from paceline.config.base import Section


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

    @model_validator(mode="after")
    def _room_to_grow(self) -> "Cluster":
        if self.most_engines is not None and self.most_engines < self.engines:
            raise ValueError(f"most_engines = {self.most_engines} is less than engines = {self.engines}")
        return self
