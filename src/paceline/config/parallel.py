"""How many ranks train together, and how a model lies on them. No torch here."""

from typing import Literal

from pydantic import Field, model_validator

from paceline.config.base import Section


class Parallel(Section):
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

    @model_validator(mode="after")
    def _groups(self) -> "Parallel":
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
        return self

    @model_validator(mode="after")
    def _fits(self) -> "Parallel":
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
        return self
