"""Chooses the compute type of a model whose run file says `model.dtype = "auto"`.

A checkpoint is computed in its own type where the hardware multiplies that type fast, else in float32. Instructions
decide, not a measurement: a machine under load must choose as an idle one does.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

from paceline.config import RunConfig
from paceline.config.model import Dtype
from paceline.planner.hardware import Hardware
from paceline.planner.shape import UnknownShape, config_file

HALVES: frozenset[Dtype] = frozenset(("bfloat16", "float16"))
WITHOUT_BFLOAT16 = ("v100", "t4")
"""Cards that have float16 tensor cores alone."""
DTYPES: dict[str, Dtype] = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16"}
_IN_FILES: dict[str, Dtype] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
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
    return _described(described) or _first_tensor(file.parent)


def fitting(stored: Dtype | None, fast: frozenset[Dtype]) -> Dtype:
    """The compute type of weights stored so, where these half types are fast."""
    return stored if stored in fast else "float32"


def fast_halves(hardware: Hardware) -> frozenset[Dtype]:
    """The half types that planned hardware multiplies fast."""
    if hardware.kind == "cpu":
        return cpu_halves()
    return frozenset(("float16",)) if hardware.card.name in WITHOUT_BFLOAT16 else HALVES


def cpu_halves(flags: Path = Path("/proc/cpuinfo")) -> frozenset[Dtype]:
    """bfloat16 where the CPU has instructions for it (AVX512-BF16, AMX, Arm's BF16), as Linux lists them.

    float16 is left out: training in it needs its losses scaled, and float32 does as well.
    """
    return frozenset(("bfloat16",)) if _flags(flags) & {"avx512_bf16", "amx_bf16", "bf16"} else frozenset()


def with_planned_dtype(config: RunConfig, hardware: Hardware) -> RunConfig:
    """The run file with the type that `auto` means on this hardware."""
    if config.model.dtype != "auto":
        return config
    return with_dtype(config, fitting(stored_dtype(config.model.name), fast_halves(hardware)))


def with_dtype(config: RunConfig, dtype: Dtype) -> RunConfig:
    return config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})


@cache
def _flags(file: Path) -> frozenset[str]:
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split() for line in lines if line.startswith(("flags", "Features"))), ()))


def _described(config: Any) -> Dtype | None:
    if not isinstance(config, dict):
        return None
    tables = [config, config.get("text_config") or {}]
    said = next((str(t[key]) for t in tables for key in ("dtype", "torch_dtype") if t.get(key)), "")
    return DTYPES.get(said.removeprefix("torch."))


def _first_tensor(folder: Path) -> Dtype | None:
    """The type of the first floating-point tensor that a safetensors header lists."""
    for file in sorted(folder.glob("*.safetensors"))[:1]:
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            try:
                header = json.loads(stream.read(size)) if size <= _LONGEST_HEADER else {}
            except ValueError:
                return None
        found = (_IN_FILES.get(about.get("dtype")) for about in header.values() if isinstance(about, dict))
        return next((dtype for dtype in found if dtype), None)
    return None
