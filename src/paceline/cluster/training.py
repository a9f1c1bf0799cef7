"""Builds the trainer of a process that runs nothing else."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from paceline.cluster.local import share_cores
from paceline.cluster.torch_kit import background_compile, pick_device
from paceline.config import RunConfig
from paceline.model import attach_lora, load_model
from paceline.trainer import TorchTrainer


@dataclass(frozen=True, slots=True)
class Built:
    """A trainer with its model."""

    trainer: TorchTrainer
    model: PreTrainedModel
    parameters: int
    device: str


def build_trainer(config: RunConfig, group: ProcessGroup | None = None) -> Built:
    """Load the run's model and a trainer for it; with a group, one rank of several. A model that is to be cut up waits
    in its file, mapped into memory, and comes to the device layer by layer: whole it might not fit there."""
    device, parallel = pick_device(config.device), config.trainer.parallel
    in_parts = group is not None and parallel.shard != "none" and parallel.tensor == 1
    model = attach_lora(load_model(config.model, "cpu" if in_parts else device), config.model, config.seed)
    parameters = sum(p.numel() for p in model.parameters())
    config = share_cores(config, parameters)
    dumps = Path(config.runs) / config.name / "dumps"
    trainer = TorchTrainer(
        model,
        config.trainer,
        total_steps=config.steps,
        fp32_head=config.model.fp32_head,
        dumps=dumps,
        group=group,
        device=torch.empty(0, device=device).device,  # with its number, which every thread must know
        background=background_compile("trainer", config, model) if group is None else None,
    )
    return Built(trainer, model, parameters, device)
