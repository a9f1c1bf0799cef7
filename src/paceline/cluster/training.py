"""Building the trainer of a process that has nothing else to do."""

from dataclasses import dataclass
from pathlib import Path

from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from paceline.cluster.local import pick_device, share_cores
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
    """Load the run's model and a trainer for it; with a group, one rank of several."""
    device = pick_device(config.device)
    model = attach_lora(load_model(config.model, device), config.model, config.seed)
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
    )
    return Built(trainer, model, parameters, device)
