"""`paceline export`: writes the policy of a checkpoint, of torch or mlx, as a Hugging Face folder."""

import asyncio
import contextlib
import shutil
import warnings
from pathlib import Path
from typing import Literal

from paceline.commands.targets import RunTarget
from paceline.config import RunConfig
from paceline.config.hardware import uses_mlx
from paceline.config.model import Dtype
from paceline.errors import PacelineError
from paceline.model import load_tokenizer
from paceline.observe.monitor import RunDirectory
from paceline.orchestrator import Checkpoints
from paceline.planner.hardware import with_dtype
from paceline.runtime.local import with_settled_dtype
from paceline.util.private_folder import PrivateFolder
from paceline.weights.manifest import write_manifest

ExportForm = Literal["all", "merged", "adapter"]
"""`all`: what the end of a run writes, the merged weights and under LoRA the adapter beside them."""

MODEL_FILES = ("model*.safetensors", "model*.index.json", "adapter_*", "adapter/adapter_*", "adapter-mlx/adapter*")
"""Files that would mix with those of another export."""


def export_run(
    target: RunTarget, folder: Path | None, form: ExportForm, dtype: Dtype | None, *, overwrite: bool
) -> Path:
    """Write the model folder of a checkpoint and return its path. A new folder appears atomically.

    Without a `folder` it is `export` in the run directory, or `export-STEP` where a step was asked for; without a
    `dtype` the weights keep that of the source checkpoint.
    """
    if target.checkpoint is None:
        raise PacelineError(f"{target.root} has no whole checkpoint to export: train it, or go on with --resume latest")
    if form == "adapter" and target.config.model.lora is None:
        raise PacelineError(f"{target.root} trained all weights (no [model.lora]): leave --adapter out")
    named = folder is not None
    if folder is None:
        newest = Checkpoints(RunDirectory(target.root).checkpoints, keep=1).all()[-1]
        step = "" if target.checkpoint == newest else f"-{target.step}"
        folder = target.root / f"export{step}{'-adapter' if form == 'adapter' else ''}"
    replaces = folder.is_dir() and any(folder.iterdir())
    if replaces and named and not overwrite:
        raise PacelineError(f"{folder} already holds files: name another folder with -o, or add --overwrite")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with PrivateFolder(folder.parent) as private:
        draft = private / "draft"
        draft.mkdir()
        config = with_settled_dtype(target.config, target.checkpoint)
        write = _write_mlx if uses_mlx(config.backend) else _write_torch
        write(config, target.checkpoint, draft, form, dtype)
        write_manifest(draft)  # of the form that was asked for
        if replaces:
            _replace_export(folder, draft)
        else:
            draft.replace(folder)
    return folder


def _replace_export(folder: Path, draft: Path) -> None:
    """Replace the files of an old export and keep all other files of the folder."""
    for pattern in MODEL_FILES:
        for old in folder.glob(pattern):
            old.unlink()
    for file in sorted(path for path in draft.rglob("*") if path.is_file()):
        place = folder / file.relative_to(draft)
        place.parent.mkdir(parents=True, exist_ok=True)
        file.replace(place)


def _write_torch(config: RunConfig, checkpoint: Path, folder: Path, form: ExportForm, dtype: Dtype | None) -> None:
    """Load the weights on the CPU without optimizer state, which takes a fraction of the memory of a resume."""
    import torch

    from paceline.model import attach_lora, load_model
    from paceline.trainer.torch.checkpoint import export, put_masters, save_adapter

    if dtype == "float32":  # wider than a half type the run computed in: straight from the masters
        config = with_dtype(config, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # how slowly this CPU would compute, and that no ranks are here
        model = attach_lora(load_model(config.model, "cpu"), config.model, config.seed)
        put_masters(model, checkpoint)
    tokenizer = load_tokenizer(config.model)
    if form == "adapter":
        save_adapter(model, folder)
        tokenizer.save_pretrained(folder)
    else:
        written = getattr(torch, dtype) if dtype else None
        export(model, folder, tokenizer, written=written, adapter=form == "all")


def _write_mlx(config: RunConfig, checkpoint: Path, folder: Path, form: ExportForm, dtype: Dtype | None) -> None:
    from paceline.runtime.local import LoadedMlxModel

    if dtype is not None:
        raise PacelineError('--dtype needs backend = "torch": with mlx an export keeps the checkpoint\'s type')
    trainer = LoadedMlxModel(config).trainer(config, folder)

    async def load_and_export() -> None:
        await trainer.load(checkpoint)
        await trainer.export(folder, load_tokenizer(config.model))

    try:
        asyncio.run(load_and_export())
    finally:
        trainer.close()
    if form == "merged":
        for name in ("adapter", "adapter-mlx"):
            shutil.rmtree(folder / name, ignore_errors=True)
    elif form == "adapter":  # in peft's form at the top of the folder, beside the tokenizer
        for file in [*folder.glob("model*.safetensors"), folder / "config.json", folder / "generation_config.json"]:
            file.unlink(missing_ok=True)
        for file in (folder / "adapter").iterdir():
            file.replace(folder / file.name)
        with contextlib.suppress(OSError):
            (folder / "adapter").rmdir()
