"""Data sheets of GPUs, the types that hardware multiplies fast, the type of a checkpoint, and whether a run uses mlx.

A checkpoint is computed in its own type where the hardware multiplies that type fast, else in float32. Instructions
decide, not a measurement: a machine under load must choose as an idle one does.
"""

import importlib.resources
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config.model import QUICKSTART, Dtype
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.config.run import RunConfig
    from paceline.config.trainer import TrainerConfig


class UnknownShape(PacelineError):
    """A model whose size cannot be told from here. The message is one sentence for the user."""


@dataclass(frozen=True, slots=True)
class HardwareSpec:
    """One GPU by its vendor's data sheet, or one CPU as measured: bytes, dense flops, bytes per second."""

    name: str
    memory: float
    flops: float
    """In bfloat16 without sparsity; in float16 where the card has no bfloat16."""
    flops32: float
    """In float32 outside tensor cores, which is how a float32 model multiplies."""
    bandwidth: float
    link: float
    """To another GPU of the machine, one way: NVLink or Infinity Fabric where there is one, else PCIe."""


def _card(name: str, gb: float, tflops: float, tflops32: float, tb_s: float, link_gb_s: float) -> HardwareSpec:
    return HardwareSpec(name, gb * 1e9, tflops * 1e12, tflops32 * 1e12, tb_s * 1e12, link_gb_s * 1e9)


CARDS = {
    card.name: card
    for card in (
        _card("b200", 180, 2250, 75, 7.7, 900),
        _card("h200", 141, 989, 67, 4.8, 450),
        _card("h100", 80, 989, 67, 3.35, 450),
        _card("a100-80", 80, 312, 19.5, 2.039, 300),
        _card("a100-40", 40, 312, 19.5, 1.555, 300),
        _card("mi300x", 192, 1307, 163.4, 5.3, 448),
        _card("l40s", 48, 362, 91.6, 0.864, 32),
        _card("a6000", 48, 155, 38.7, 0.768, 56),
        _card("rtx5090", 32, 209.5, 104.8, 1.792, 64),
        _card("rtx4090", 24, 165, 82.6, 1.008, 32),
        _card("rtx3090", 24, 71, 35.6, 0.936, 56),
        _card("l4", 24, 121, 30.3, 0.3, 32),
        _card("a10", 24, 125, 31.2, 0.6, 32),
        _card("v100", 32, 125, 15.7, 0.9, 150),
        _card("t4", 16, 65, 8.1, 0.32, 16),
    )
}
"""Figures of the vendors' data sheets (SXM or OAM boards where there are several), dense, in decimal units."""


HALF_DTYPES: frozenset[Dtype] = frozenset(("bfloat16", "float16"))
WITHOUT_BFLOAT16 = ("v100", "t4")
"""Cards that have float16 tensor cores alone."""
DTYPES: dict[str, Dtype] = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16"}
_SAFETENSORS_DTYPES: dict[str, Dtype] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def stored_dtype(name: str) -> Dtype | None:
    """The type of a checkpoint's weights, by its `config.json` or else its first safetensors file.

    None where neither is on this machine or says anything.
    """
    try:
        file = config_file(name)
        described = json.loads(file.read_text(encoding="utf-8"))
    except (UnknownShape, OSError, ValueError):
        return None
    return _config_dtype(described) or _first_tensor_dtype(file.parent)


def compute_dtype(stored: Dtype | None, fast: frozenset[Dtype]) -> Dtype:
    """The compute type of weights stored so, where these half types are fast."""
    return stored if stored in fast else "float32"


def cpu_half_dtypes(flags: Path = Path("/proc/cpuinfo")) -> frozenset[Dtype]:
    """bfloat16 where the CPU has instructions for it (AVX512-BF16, AMX, Arm's BF16), as Linux lists them.

    float16 is left out: training in it needs its losses scaled, and float32 does as well.
    """
    return frozenset(("bfloat16",)) if _flags(flags) & {"avx512_bf16", "amx_bf16", "bf16"} else frozenset()


@cache
def _flags(file: Path) -> frozenset[str]:
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split() for line in lines if line.startswith(("flags", "Features"))), ()))


def _config_dtype(config: Any) -> Dtype | None:
    if not isinstance(config, dict):
        return None
    tables = [config, config.get("text_config") or {}]
    name = next((str(t[key]) for t in tables for key in ("dtype", "torch_dtype") if t.get(key)), "")
    return DTYPES.get(name.removeprefix("torch."))


def _first_tensor_dtype(folder: Path) -> Dtype | None:
    from safetensors import SafetensorError, safe_open

    for file in sorted(folder.glob("*.safetensors"))[:1]:
        with suppress(SafetensorError), safe_open(file, "np") as tensors:
            found = (_SAFETENSORS_DTYPES.get(tensors.get_slice(name).get_dtype()) for name in tensors.offset_keys())
            return next((dtype for dtype in found if dtype), None)
    return None


def config_file(name: str) -> Path:
    """The `config.json` of a model that is on this machine."""
    if name == QUICKSTART:
        return Path(str(importlib.resources.files("paceline") / "quickstart")) / "config.json"
    folder = Path(name).expanduser()
    if (folder / "config.json").is_file():
        return folder / "config.json"
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub")) / f"models--{name.replace('/', '--')}"
    for found in sorted(cache.glob("snapshots/*/config.json")):
        return found
    raise UnknownShape(
        f"no config.json of `{name}` is on this machine, so nothing can be said about memory and time: get it with "
        f"`hf download {name} config.json`"
    )


BACKEND_VARIABLE = "PACELINE_BACKEND"
"""Environment variable that chooses for all runs whose file leaves it open."""


def uses_mlx(wanted: str) -> bool:
    wanted = os.environ.get(BACKEND_VARIABLE) or wanted if wanted == "auto" else wanted
    if wanted not in ("auto", "torch", "mlx"):
        raise PacelineError(f"{BACKEND_VARIABLE}={wanted}: write torch or mlx")
    if wanted != "auto":
        return wanted == "mlx"
    apple = sys.platform == "darwin" and platform.machine() == "arm64"
    return apple and importlib.util.find_spec("mlx") is not None


def ignored_settings(config: "RunConfig") -> Iterator[str]:
    """Settings that have no effect in a run file that asks for mlx."""
    if config.backend != "mlx":
        return
    if config.device == "cpu":
        yield 'device = "cpu" has no effect with backend = "mlx", which takes the GPU of its machine: remove it'
    if config.engine.products != "exact":
        yield 'engine.products = "half" has no effect with backend = "mlx": remove it'
    if config.engine.cache_gib is not None:
        yield 'engine.cache_gib has no effect with backend = "mlx", whose cache grows as it is needed: remove it'


def unsupported_settings(config: "RunConfig") -> Iterator[str]:
    if config.placement != "local":
        yield f'backend = "mlx" computes in one process, and placement = "{config.placement}" in several: change one'
    if config.device == "cuda":
        yield 'device = "cuda" is for torch: leave it out where backend = "mlx"'
    if config.engine.backend != "paceline":
        yield f'engine.backend = "{config.engine.backend}" is fed by a trainer of torch: set backend = "torch"'
    yield from unsupported_trainer_settings(config.trainer)
    if config.engine.cache == "pages":
        yield 'engine.cache = "pages" is torch\'s: leave it out where backend = "mlx"'


def unsupported_trainer_settings(c: "TrainerConfig") -> Iterator[str]:
    if c.parallel.ranks > 1:
        yield 'trainer.parallel is for several processes of torch: leave it out where backend = "mlx"'
    for name, asked in (("optimizer", c.optimizer.offload), ("kl", c.kl is not None and c.kl.offload)):
        if asked:
            yield f"trainer.{name}.offload has nowhere to move to on a machine with one memory: leave it out with mlx"
