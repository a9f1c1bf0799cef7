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
    """Ranks that share each matrix of a layer. Only 1 is supported."""
    context: int = Field(default=1, ge=1)
    """Ranks that share each sequence. Only 1 is supported."""

    @model_validator(mode="after")
    def _known(self) -> "Parallel":
        if self.tensor > 1:
            raise ValueError(
                f"tensor = {self.tensor} is not supported: a layer's matrices are computed whole on each rank; write "
                'tensor = 1 and shard = "full", which divides the memory of weights and optimizer by the ranks'
            )
        if self.context > 1:
            raise ValueError(
                f"context = {self.context} is not supported: a sequence is computed whole on one rank; write context = "
                "1, and for long samples trainer.gradient_checkpointing = true"
            )
        return self

    @model_validator(mode="after")
    def _fits(self) -> "Parallel":
        if self.shard != "hybrid" and self.replicas != 1:
            raise ValueError(
                f'replicas = {self.replicas} is for shard = "hybrid": with "{self.shard}" there is one model, or one '
                "on each rank"
            )
        if self.shard == "hybrid" and (self.replicas < 2 or self.ranks % self.replicas):
            raise ValueError(
                f'shard = "hybrid" cuts the {self.ranks} ranks into `replicas` groups of equal size: set replicas to 2 '
                f"or more, a divisor of ranks, not {self.replicas}"
            )
        if self.cpu_offload and self.shard == "none":
            raise ValueError(
                'cpu_offload keeps a sharded model on the host: set shard = "full", or with whole models keep only '
                "masters and moments there with trainer.optimizer.offload = true"
            )
        return self
