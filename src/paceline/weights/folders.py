"""Weights as folders that other engines read: safetensors under Hugging Face's names, and adapters in peft's form."""

import asyncio
import json
import shutil
import uuid
from pathlib import Path

from safetensors import safe_open

from paceline.errors import EngineError
from paceline.weights.tensors import framework, write_tensors
from paceline.weights.update import Array, WeightUpdate
from paceline.weights.weight_store import WeightStore, copied

PREFIX = "base_model.model."
"""What peft puts before the names of an adapter's tensors."""


class Folders:
    """A place both sides see under the same path.

    Full weights are kept as one file on a shelf, and shown to the engine as a folder that links to it.
    """

    def __init__(self, place: Path) -> None:
        self.place = place.resolve()
        self.head: str | None = None
        """The embedding that is the output layer too, for an engine whose copy of the model has the two apart."""
        self._shelf = WeightStore(self.place)

    async def keep(self, update: WeightUpdate) -> WeightUpdate:
        """A copy that can be sent again later, whatever the trainer has done to its tensors by then."""
        if update.adapter is not None:
            return copied(update)
        self.place.mkdir(parents=True, exist_ok=True)
        return await self._shelf.keep(update)

    async def whole(self, update: WeightUpdate) -> Path:
        """A folder with all of a model's weights; `remove` it once it is loaded."""
        file = await self._shelf.whole(await self.keep(update))
        return await asyncio.to_thread(self._show, file, update.version)

    async def adapter(self, update: WeightUpdate) -> Path:
        """A folder with an adapter, to stay for as long as it is served: engines may read it again."""
        return await asyncio.to_thread(self._write_adapter, update)

    def clear(self) -> None:
        """Remove the weights that lie there of ours."""
        self._shelf.clear()

    def _show(self, file: Path, version: int) -> Path:
        folder = self._fresh(f"whole-{version}")
        (folder / "model.safetensors").symlink_to(file.resolve())
        if self.head is not None:
            with safe_open(file, framework=framework()) as opened:
                self._write(folder / "head.safetensors", {"lm_head.weight": opened.get_tensor(self.head)})
        return folder

    def _write_adapter(self, update: WeightUpdate) -> Path:
        assert update.adapter is not None
        folder = self._fresh(f"adapter-{update.version}")
        named = {PREFIX + name.removeprefix(PREFIX): tensor for name, tensor in update.tensors.items()}
        self._write(folder / "adapter_model.safetensors", named)
        ranks = {tensor.shape[0] for name, tensor in named.items() if name.endswith("lora_A.weight")}
        if len(ranks) != 1:
            raise EngineError(f"an adapter of ranks {sorted(ranks)} cannot be served: give all its modules one rank")
        (rank,) = ranks
        modules = sorted({name.split(".lora_")[0].rsplit(".", 1)[-1] for name in named})
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": "",
            "r": rank,
            "lora_alpha": update.adapter.scale * rank,
            "target_modules": modules,
            "bias": "none",
        }
        (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        return folder

    def _fresh(self, name: str) -> Path:
        folder = self.place / f"{name}-{uuid.uuid4().hex[:12]}"
        folder.mkdir(parents=True)
        return folder

    def _write(self, file: Path, tensors: dict[str, Array]) -> None:
        try:
            write_tensors(tensors, file)
        except OSError as error:
            raise EngineError(
                f"the weights cannot be written to {self.place} ({error.strerror}): make room, then --resume latest"
            ) from error


def remove(folder: Path) -> None:
    """Take a folder of ours away; links are removed, not what they point to."""
    shutil.rmtree(folder, ignore_errors=True)
