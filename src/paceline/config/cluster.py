"""Placement of a run's parts: machines, GPUs, and the ranks that train together."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from paceline.config.base import Section
from paceline.config.model import ModelRef

if TYPE_CHECKING:
    from paceline.config.run import RunConfig


class ParallelConfig(Section):
    """Processes that train one batch together, each on its share of the samples. Any number gives the same update."""

    ranks: int = Field(default=1, ge=1)
    """Processes in all, on a GPU each."""
    shard: Literal["none", "full", "hybrid"] = "none"
    """`none`: every rank holds the whole model, its masters and moments. `full`: each holds one part of everything and
    gets the rest layer by layer while it computes (FSDP2). `hybrid`: groups of ranks share a model, each group has all
    of it."""
    replicas: int = Field(default=1, ge=1)
    """Groups of `shard = "hybrid"`; one a machine keeps the traffic of a layer inside it."""
    cpu_offload: bool = False
    """Keep sharded weights, masters and moments in the host's memory and step there; a layer comes to the GPU while it
    computes. Slower, and takes next to no GPU memory beside activations."""
    tensor: int = Field(default=1, ge=1)
    """Ranks that share each matrix of a layer, every one with some of the heads: neighbours, best on one machine. They
    train the same samples. For a layer too large for one GPU; needs key and value heads for all of them."""
    context: int = Field(default=1, ge=1)
    """Ranks that share each sequence, every one with some of its tokens and all keys and values. They train the same
    samples. For sequences whose activations are too large for one GPU."""

    @property
    def data_ranks(self) -> int:
        """Shares a batch is cut into. Ranks `i * tensor * context` to `(i + 1) * tensor * context - 1` get the i-th."""
        return self.ranks // (self.tensor * self.context)

    @property
    def divides_model(self) -> bool:
        """A rank holds only a part of the model."""
        return self.shard != "none" or self.tensor > 1

    def check_keys(self) -> None:
        together = self.tensor * self.context
        if self.ranks % together:
            raise ValueError(
                f"tensor = {self.tensor} and context = {self.context} make groups of {together} ranks that train the "
                f"same samples: set ranks to a multiple of {together}, not {self.ranks}"
            )
        if self.cpu_offload and self.tensor > 1:
            raise ValueError(
                "cpu_offload keeps whole matrices on the host, and tensor cuts them: set tensor = 1, or keep only "
                "masters and moments on the host with trainer.optimizer.offload = true"
            )
        if self.shard != "hybrid" and self.replicas != 1:
            raise ValueError(
                f'replicas = {self.replicas} is for shard = "hybrid": with "{self.shard}" there is one model, or one '
                "on each rank"
            )
        if self.shard == "hybrid" and (self.replicas < 2 or self.data_ranks % self.replicas):
            whole = "ranks" if self.data_ranks == self.ranks else "ranks / (tensor * context)"
            raise ValueError(
                f'shard = "hybrid" cuts the {self.ranks} ranks into `replicas` groups of equal size: set replicas to 2 '
                f"or more, a divisor of {whole}, not {self.replicas}"
            )
        if self.cpu_offload and self.shard == "none":
            raise ValueError(
                'cpu_offload keeps a sharded model on the host: set shard = "full", or with whole models keep only '
                "masters and moments there with trainer.optimizer.offload = true"
            )


class ClusterConfig(Section):
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

    def check_keys(self) -> None:
        if self.most_engines is not None and self.most_engines < self.engines:
            raise ValueError(f"most_engines = {self.most_engines} is less than engines = {self.engines}")


def scored_models(config: "RunConfig") -> list[str]:
    """The frozen models that the run itself serves, each once, in the order of the run file."""
    named = [ref.name for _, _, ref in frozen_models(config) if ref.base_url is None]
    return list(dict.fromkeys(named))


def cluster_problems(config: "RunConfig") -> Iterator[str]:
    """Teachers without an endpoint, where the run has no scorers for them."""
    for where, plays, ref in frozen_models(config):
        if ref.base_url is not None:
            continue
        if plays:
            yield (
                f"{where}: an sft teacher plays, and the run's own scorers only score: serve `{ref.name}` with "
                "`paceline serve` and give its base_url"
            )
        elif config.placement != "ray":
            yield (
                f"{where}: no server serves `{ref.name}`: start `paceline serve {ref.name} --scores-only` and "
                'give its base_url, or set placement = "ray", which starts scorers for it'
            )


def frozen_models(config: "RunConfig") -> Iterator[tuple[str, bool, ModelRef]]:
    """Each frozen model: the place that names it, whether it plays there, and its section."""
    for env in config.env:
        for place, algo in env.algorithms:
            ref = getattr(algo, "teacher", None)
            if isinstance(ref, ModelRef):
                yield f"environment `{env.name}`{place}: teacher", algo.type == "sft", ref
    if config.trainer.kl is not None and isinstance(config.trainer.kl.reference, ModelRef):
        yield "trainer.kl.reference", False, config.trainer.kl.reference
