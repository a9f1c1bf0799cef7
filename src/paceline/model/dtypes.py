"""The compute type that `model.dtype = "auto"` stands for on a device of this machine."""

from paceline.config.hardware import HALF_DTYPES, compute_dtype, cpu_half_dtypes, stored_dtype
from paceline.config.model import Dtype, ModelConfig
from paceline.model.hub import HubBusy, fetch
from paceline.model.source import ModelError, resolve


def resolve_dtype(model: ModelConfig, device: str) -> Dtype:
    """The run file's type; under `auto` the checkpoint's own where `device` computes it fast, else float32."""
    if model.dtype != "auto":
        return model.dtype
    return compute_dtype(checkpoint_dtype(model.name), _fast_dtypes(device))


def checkpoint_dtype(name: str) -> Dtype | None:
    """The type a model's weights are stored in; of a hub model that is not here yet its `config.json` is fetched."""
    try:
        source = resolve(name)
    except ModelError:
        return None  # loading the model says what is wrong
    found = stored_dtype(source)
    if found is None and "/" in source and not source.startswith("/"):
        try:
            fetch(source, weights=False)
        except HubBusy:
            raise
        except ModelError:
            return None  # likewise
        found = stored_dtype(source)
    return found


def export_dtype(name: str | None, computed: str) -> str:
    """The type an export is written in: the checkpoint's own, unless the run computed in a narrower one."""
    stored = checkpoint_dtype(name) if name else None
    return computed if stored is None or (computed in HALF_DTYPES and stored not in HALF_DTYPES) else stored


def dtype_name(dtype: object) -> str:
    """`bfloat16` for torch's and mlx's objects of that name."""
    return str(dtype).rpartition(".")[2]


def _fast_dtypes(device: str) -> frozenset[Dtype]:
    if device.startswith("cuda"):
        import torch

        return HALF_DTYPES if torch.cuda.get_device_capability(device)[0] >= 8 else frozenset(("float16",))
    return HALF_DTYPES if device == "mlx-gpu" else frozenset() if device == "mlx-cpu" else cpu_half_dtypes()
