"""Data sheets of GPUs, the types that hardware multiplies fast, and the type a checkpoint is stored in.

A checkpoint is computed in its own type where the hardware multiplies that type fast, else in float32. Instructions
decide, not a measurement: a machine under load must choose as an idle one does.
"""

import importlib.resources
import json
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from paceline.config.model import QUICKSTART, Dtype
from paceline.errors import PacelineError


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
_LONGEST_HEADER = 100 << 20


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
    """The type of the first floating-point tensor that a safetensors header lists."""
    for file in sorted(folder.glob("*.safetensors"))[:1]:
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            try:
                header = json.loads(stream.read(size)) if size <= _LONGEST_HEADER else {}
            except ValueError:
                return None
        found = (_SAFETENSORS_DTYPES.get(about.get("dtype")) for about in header.values() if isinstance(about, dict))
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
