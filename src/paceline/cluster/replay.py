"""`paceline replay`: a recorded batch trained once more, on the CPU, with nothing kept of it.

    weights before the step (a checkpoint, or the model itself) + batches/step-N -> the same step, beside the record

Sampling, environments and engine play no part. What comes out differently is a matter of the trainer alone: another
device or type, another version of the code, or a setting given on the command line.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table

from paceline.config import RunConfig
from paceline.data import Sample, decode
from paceline.errors import PacelineError
from paceline.model import attach_lora, load_model
from paceline.monitor import RunDirectory, read_jsonl
from paceline.orchestrator import Checkpoints
from paceline.trainer import TorchTrainer

TIMES = ("train_tokens/s", "micro_batches", "lr", "optimizer_steps")
"""What a step reports besides what it computed."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """One step, as it was and as it came out now."""

    step: int
    samples: list[Sample]
    weights: str
    """Where the weights came from."""
    exact: bool
    """Whether they are those the step began with."""
    recorded: dict[str, float]
    now: dict[str, float]

    def differences(self) -> dict[str, float]:
        """Replayed minus recorded, where both are known."""
        return {name: self.now[name] - self.recorded[name] for name in self.now if name in self.recorded}


def replay(run: Path, step: int, config: RunConfig) -> Replayed:
    """Train the recorded batch of a step again."""
    directory = RunDirectory(run)
    samples = _batch(directory, step)
    torch.manual_seed(config.seed)
    model = attach_lora(load_model(config.model), config.model, config.seed)
    trainer = TorchTrainer(model, config.trainer, total_steps=config.steps, fp32_head=config.model.fp32_head)
    try:
        checkpoint = _before(directory, step)
        if checkpoint is not None:
            asyncio.run(trainer.load(checkpoint))
        exact = trainer.version == step - 1
        report = asyncio.run(trainer.step(samples))
    finally:
        trainer.close()
    weights = str(checkpoint) if checkpoint else f"{config.model.name}, untrained"
    now = {name: value for name, value in report.metrics.items() if name not in TIMES}
    return Replayed(step, samples, weights, exact, _recorded(directory, step), now)


def table(result: Replayed) -> Table:
    """Component by component."""
    shown = Table(title=f"step {result.step}: {len(result.samples)} samples, {sum(map(len, result.samples)):,} tokens")
    shown.add_column("")
    for heading in ("recorded", "replayed", "difference"):
        shown.add_column(heading, justify="right")
    apart = result.differences()
    for name in sorted(result.now, key=lambda name: (not name.startswith("loss"), name)):
        was = f"{result.recorded[name]:.6g}" if name in result.recorded else "-"
        shown.add_row(name, was, f"{result.now[name]:.6g}", f"{apart[name]:+.2g}" if name in apart else "-")
    return shown


def _batch(directory: RunDirectory, step: int) -> list[Sample]:
    path = directory.batches / f"step-{step:06d}.msgpack"
    if path.is_file():
        return decode(path.read_bytes())
    kept = [int(file.stem.removeprefix("step-")) for file in sorted(directory.batches.glob("step-*.msgpack"))]
    if not kept:
        raise PacelineError(f"{directory.root} holds no batches: train with --record.batches 10 to keep the last ten")
    raise PacelineError(f"the batch of step {step} is not kept; those kept are {_ranges(kept)}")


def _before(directory: RunDirectory, step: int) -> Path | None:
    """The newest checkpoint from before the step."""
    earlier = [p for p in Checkpoints(directory.checkpoints, keep=1).all() if int(p.name.removeprefix("step-")) < step]
    return earlier[-1] if earlier else None


def _recorded(directory: RunDirectory, step: int) -> dict[str, float]:
    lines = [line for line in read_jsonl(directory.metrics_file) if line["step"] == step]
    return lines[-1] if lines else {}


def _ranges(numbers: Sequence[int]) -> str:
    """Runs of numbers, shortly: 3 to 5, 9."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)
