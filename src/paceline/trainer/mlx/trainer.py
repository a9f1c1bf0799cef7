"""The mlx trainer: samples in, new weights out."""

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from paceline.config import trainer as config
from paceline.model.mlx.loading import MlxModel
from paceline.model.mlx.lora import adapter_tensors
from paceline.trainer.mlx.checkpoint import export, read, write
from paceline.trainer.mlx.learner import MlxLearner
from paceline.trainer.trainer import ThreadedTrainer
from paceline.weights.mlx_arrays import settled
from paceline.weights.update import Adapter, WeightUpdate


class MlxTrainer(ThreadedTrainer[MlxLearner]):
    """Trains a causal LM of mlx-lm, or the adapters beside its layers, in one process.

    An array that is still to be computed belongs to the thread that asked for it: everything that leaves this one, and
    everything a step leaves behind, has been computed.
    """

    def __init__(
        self, model: MlxModel, c: config.TrainerConfig, *, total_steps: int | None = None, dumps: Path | None = None
    ) -> None:
        self._model = model
        super().__init__(MlxLearner(model, c, total_steps), c, model.config, dumps)

    def _weights(self) -> WeightUpdate:
        canary = self.learner.canary()
        adapter = adapter_tensors(self._model.net)
        if adapter is None:
            return WeightUpdate(self.version, settled(self.learner.parameters.now()), canary=canary)
        tensors, scale = adapter
        return WeightUpdate(self.version, settled(tensors), Adapter("", scale), canary=canary)

    def _save(self, folder: Path) -> None:
        write(folder, self.learner.tensors(), self._state(self._model.dtype))

    def _load(self, folder: Path) -> None:
        self._resume_from(folder, *read(folder))

    def _export(self, folder: Path, tokenizer: PreTrainedTokenizerBase | None) -> None:
        export(self._model, folder, tokenizer)
