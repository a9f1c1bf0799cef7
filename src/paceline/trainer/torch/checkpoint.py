"""Writes and reads the trainer's part of a checkpoint in torch, by one process or many ranks.

Parts are written and read by torch.distributed.checkpoint, which cuts them anew for any number of ranks. Its own format
keeps the index in a pickle, through which a checkpoint could run code when read; so it is given safetensors storage,
where each file's header says which part of which tensor it holds. What that lacks is an index that would miss a lost
file: `trainer.json` has the number of files instead.

Exports the trained policy as a Hugging Face folder that anything can load.
"""

import copy
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed import ProcessGroup, get_rank, get_world_size
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from paceline.errors import TrainerError
from paceline.model.dtypes import dtype_name, export_dtype
from paceline.model.loading import trainable_parameters
from paceline.trainer.checkpoint import (
    FILE,
    FOLDER,
    check_files,
    is_checkpoint,
    mismatch_message,
    read_state,
    strip_prefix,
    wrap_checkpoint_errors,
    write_state,
)
from paceline.trainer.torch.optimizer import local_shard
from paceline.weights.manifest import write_manifest
from paceline.weights.tensors import raise_os_errors, write_tensors

Room = Callable[[str, torch.Size, torch.dtype], Tensor]
"""Memory for this rank's part of a tensor, by its name and what the checkpoint says of it."""


def write(folder: Path, tensors: Mapping[str, Tensor], state: Mapping, group: ProcessGroup | None) -> None:
    """Write this rank's parts, and as the first rank the state. Every rank must call it, with the same folder."""
    if group is None:
        write_tensors({name: local_shard(t).contiguous().cpu() for name, t in tensors.items()}, folder / FILE)
    else:
        (folder / FOLDER).mkdir(parents=True, exist_ok=True)
        storage = HuggingFaceStorageWriter(str(folder / FOLDER), save_distributed=True)
        with raise_os_errors(), _raise_rank_errors():
            dcp.save(dict(tensors), storage_writer=storage, process_group=group)
    if group is None or get_rank(group) == 0:
        write_state(folder, state, 1 if group is None else get_world_size(group))


def read(folder: Path, room: Room, group: ProcessGroup | None) -> tuple[dict[str, Tensor], dict]:
    """All tensors, of each what this rank has room for, and the state. However many ranks wrote them."""
    with wrap_checkpoint_errors(folder):
        state = read_state(folder)
        whole = (folder / FILE).is_file()
        if whole and group is None:
            return load_file(folder / FILE), state
        if not is_checkpoint(folder):
            raise TrainerError(f"checkpoint {folder} is damaged: {FILE} is missing")
        own = None
        if whole:  # beside it lie past versions, which are not the trainer's
            with safe_open(folder / FILE, "pt") as file:
                own = set(file.keys())
        elif (found := len(list((folder / FOLDER).glob("*.safetensors")))) != (ranks := state.get("ranks", 1)):
            raise TrainerError(
                f"checkpoint {folder} was written by {ranks} ranks but has the files of {found}: copy all of "
                f"{folder / FOLDER}, or go back to another checkpoint"
            )
        storage = HuggingFaceStorageReader(str(folder if whole else folder / FOLDER))
        tensors = {}
        for name, saved in storage.read_metadata().state_dict_metadata.items():
            if own is None or name in own:
                assert isinstance(saved, TensorStorageMetadata)
                tensors[name] = room(name, saved.size, saved.properties.dtype)
        with _raise_rank_errors():
            dcp.load(tensors, storage_reader=storage, process_group=group, no_dist=group is None)
        return tensors, state


def masters(folder: Path) -> dict[str, Tensor]:
    """The float32 weights of a checkpoint by parameter name, whole, whether one process or many ranks wrote it."""
    check_files(folder)
    if (folder / FILE).is_file():
        with wrap_checkpoint_errors(folder), safe_open(folder / FILE, "pt") as file:
            names = [name for name in file.keys() if name.startswith("master/")]  # noqa: SIM118 - no mapping
            tensors = {name: file.get_tensor(name) for name in names}
    else:
        tensors, _ = read(folder, lambda _, shape, dtype: torch.empty(shape, dtype=dtype), None)
    return strip_prefix("master/", tensors)


def put_masters(model: nn.Module, folder: Path) -> None:
    """Give a model the weights of a checkpoint, rounded to the types it computes in."""
    saved, own = masters(folder), trainable_parameters(model)
    if {name: t.shape for name, t in saved.items()} != {name: p.shape for name, p in own.items()}:
        raise TrainerError(mismatch_message(folder))
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(saved.pop(name))


@contextmanager
def _raise_rank_errors() -> Generator[None]:
    """Raise a rank's error as an ordinary exception: `except Exception` does not catch torch's own."""
    try:
        yield
    except dcp.CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        refused = next((cause for cause in causes if isinstance(cause, OSError)), None)
        if refused is not None:
            raise OSError(refused.errno, refused.strerror) from error
        raise next((c for c in causes if isinstance(c, SafetensorError)), TrainerError(f"{causes[0]}")) from error


def export(
    model: PreTrainedModel,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    state: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype | None = None,
    *,
    written: torch.dtype | None = None,
    adapter: bool = True,
) -> None:
    """Weights, config and tokenizer. Adapters are merged into the weights and also saved beside them in peft's form.

    Of a sharded model the whole tensors must be given, with the type they are in. Weights are `written` in the type of
    the checkpoint the model was loaded from unless another is given, so that an export is as large as its source."""
    folder.mkdir(parents=True, exist_ok=True)
    adapted = hasattr(model, "peft_config")
    state = model.state_dict() if state is None else state
    state = merged_state(model, state) if adapted else state
    # Saving reads the module's config, which names Paceline's attention and the adapters: a copy forgets both.
    shell = copy.copy(model)
    shell.config = copy.deepcopy(model.config)
    shell._hf_peft_config_loaded = False
    written = written or getattr(torch, export_dtype(model.name_or_path, dtype_name(dtype or model.dtype)))
    shell.save_pretrained(folder, state_dict=_to_saveable(state, written))
    if written != model.dtype:  # which saving takes from the module
        shell.config.dtype = written
        shell.config.save_pretrained(folder)
    if adapted and adapter:
        save_adapter(model, folder / "adapter")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    write_manifest(folder)


def _to_saveable(state: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors to write. What two names share stays shared, so that saving leaves the second one out."""
    out: dict[str, Tensor] = {}
    seen: dict[tuple, Tensor] = {}
    for name, tensor in state.items():
        key = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride())
        if key not in seen:
            kind = dtype if tensor.is_floating_point() else tensor.dtype
            seen[key] = tensor.detach().to("cpu", kind).contiguous()
        out[name] = seen[key]
    return out


def merged_state(model: PreTrainedModel, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A whole state dict with base + scale * B A computed in float32 and rounded once."""
    from peft.tuners.lora.layer import LoraLayer

    state = {name.replace(".base_layer.", "."): t for name, t in whole.items() if "lora_" not in name}
    for path, module in model.named_modules():
        if isinstance(module, LoraLayer):
            base = state[f"{path}.weight"]
            total = base.float()
            for adapter in module.active_adapters:
                a, b = (whole[f"{path}.lora_{half}.{adapter}.weight"].float() for half in "AB")
                total = total + (b @ a) * module.scaling[adapter]
            state[f"{path}.weight"] = total.to(base.dtype)
    return state


def save_adapter(model: PreTrainedModel, folder: Path) -> None:
    """The adapter alone, in peft's form."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    for name, adapter in model.peft_config.items():
        state = get_peft_model_state_dict(model, adapter_name=name)
        save_file(
            {f"base_model.model.{key}": t.detach().cpu().contiguous() for key, t in state.items()},
            folder / "adapter_model.safetensors",
        )
        adapter.save_pretrained(folder)


CPU, GPU = "rng", "rng_cuda"


def rng_states(device: torch.device, rank: int | None = None) -> dict[str, Tensor]:
    """States of the random number generators; of one rank among several under its number."""
    end = "" if rank is None else f"/{rank}"
    on_gpu = {f"{GPU}{end}": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    return {f"{CPU}{end}": torch.get_rng_state()} | on_gpu


def restore_rng(tensors: Mapping[str, Tensor], device: torch.device, rank: int) -> None:
    """Back to a rank's states. A rank the checkpoint does not know draws from where another was, but not the same; one
    that another backend wrote has none."""
    known = [CPU] if CPU in tensors else [f"{CPU}/{i}" for i in range(sum(n.startswith(f"{CPU}/") for n in tensors))]
    if not known:
        return
    end = known[rank % len(known)].removeprefix(CPU)
    torch.set_rng_state(tensors[f"{CPU}{end}"].cpu())
    if device.type == "cuda" and f"{GPU}{end}" in tensors:
        torch.cuda.set_rng_state(tensors[f"{GPU}{end}"].cpu(), device)
    if rank >= len(known):
        torch.manual_seed(int(torch.randint(1 << 62, ())) + rank)
