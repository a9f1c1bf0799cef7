"""The hardware of a run, found on this machine or given by name; chooses the type that `model.dtype = "auto"` means."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from paceline.config import RunConfig
from paceline.config.hardware import (
    CARDS,
    HALF_DTYPES,
    WITHOUT_BFLOAT16,
    HardwareSpec,
    compute_dtype,
    cpu_half_dtypes,
    stored_dtype,
    uses_mlx,
)
from paceline.config.model import Dtype
from paceline.errors import PacelineError

SIDE = 48
"""So small that no library spreads it over threads, which on busy cores would wait for one another for ever."""
SMALL = 0.67
"""Speed of so small a product, relative to a large one: 23.6 of 35.6 Gflop/s on a Neoverse N1."""
COPIED = 1 << 24
"""Elements of a copy, beyond every cache."""


@cache
def calibrated(seconds: float) -> tuple[float, float]:
    """One core's float32 flops, and bytes read plus written, per second; measured once a process. numpy's products are
    as fast as torch's, and torch takes seconds to import."""
    import numpy as np

    a, b, product = (np.full((SIDE, SIDE), 0.5, np.float32) for _ in range(3))
    source = np.ones(COPIED, np.float32)
    target = np.zeros_like(source)
    flops = 2 * SIDE**3 / SMALL / _best(lambda: np.matmul(a, b, out=product), seconds / 2)
    return flops, 2 * source.nbytes / _best(lambda: np.copyto(target, source), seconds / 2)


def _best(work: Callable[[], object], seconds: float) -> float:
    """The quickest of as many calls as fit: threads that wake up and neighbours only ever add."""
    work()
    end, best = time.perf_counter() + seconds, float("inf")
    while (start := time.perf_counter()) < end or best == float("inf"):
        work()
        best = min(best, time.perf_counter() - start)
    return best


@dataclass(frozen=True, slots=True)
class Hardware:
    """Equal devices, and the host they are in."""

    card: HardwareSpec
    count: int = 1
    kind: str = "cuda"
    """`cuda`, `cpu`, or `mlx` for a Mac, whose GPU computes in the machine's own memory."""
    host_memory: float | None = None
    """None where it was not given."""
    cores: int = 1
    load: float = 0.0
    """Processes that wanted a core of it in the last minute, where it is this machine."""
    origin: str = "given"

    @property
    def label(self) -> str:
        if self.kind == "cpu":
            return f"{self.cores} CPU cores, {self.card.memory / 1e9:.0f} GB"
        if self.kind == "mlx":
            return f"a Mac whose GPU may take {self.card.memory / 1e9:.0f} GB of its memory"
        return f"{self.count} x {self.card.name}, {self.card.memory / 1e9:.0f} GB each"

    @property
    def busy(self) -> str:
        """A sentence where others leave the run fewer cores than it is planned with; empty where they do not."""
        if self.load < 0.75 * self.cores:
            return ""
        return f"this machine is busy (load {self.load:.1f} on {self.cores} cores): expect longer times than planned"

    @property
    def measured_speed(self) -> bool:
        """Whether anything is known about its speed."""
        return self.card.flops > 0


def mac(memory: float, origin: str = "given") -> Hardware:
    """A Mac with so much unified memory, of which macOS lets its GPU hold two thirds, or three quarters of 64 GB and
    more. Its speed has not been measured here."""
    share = 3 / 4 if memory >= 64e9 else 2 / 3
    return Hardware(HardwareSpec("mac", share * memory, 0.0, 0.0, 0.0, 0.0), 1, "mlx", memory, origin=origin)


def parse(text: str) -> Hardware:
    """`h200x8`, `a100-80x2`, `h100`; `mac32` for a Mac with 32 GB."""
    if apple := re.fullmatch(r"mac(\d+)", text.strip().lower().replace(" ", "")):
        return mac(int(apple[1]) * 1e9)
    match = re.fullmatch(r"(.+?)(?:x(\d+))?", text.strip().lower().replace(" ", ""))
    name, count = (match[1], int(match[2] or 1)) if match else (text, 1)
    name = {"a100": "a100-80", "4090": "rtx4090", "3090": "rtx3090", "5090": "rtx5090"}.get(name, name)
    if name not in CARDS or count < 1:
        raise PacelineError(
            f"--hardware {text}: write a GPU and how many, such as h200x8, or mac32 for a Mac with 32 GB; known are "
            f"{', '.join(CARDS)}"
        )
    return Hardware(CARDS[name], count)


def with_memory(hardware: Hardware, memory: str | None) -> Hardware:
    """The same with so much memory each."""
    if memory is None:
        return hardware
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*(g|gb|gib|m|mb|mib|t|tb)?", memory.strip().lower())
    units = {"g": 1e9, "gb": 1e9, "gib": 2**30, "m": 1e6, "mb": 1e6, "mib": 2**20, "t": 1e12, "tb": 1e12}
    size = float(match[1]) * units[match[2] or "gb"] if match else 0.0
    if size <= 0:
        raise PacelineError(f"--memory {memory}: write a size such as 24GB")
    return replace(hardware, card=replace(hardware.card, memory=size), origin=f"{hardware.origin}, memory given")


SMALL_MODEL = 20_000_000
"""Parameters below which the engine decodes on one core: its products are too short to wake a second thread for."""


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def split_threads(cores: int, parameters: int, at_once: bool) -> tuple[int, int]:
    """Threads of an engine and a trainer: all cores for each if they take turns, a part for each if they run at once.

    >>> split_threads(8, 10**9, at_once=False), split_threads(8, 10**9, at_once=True), split_threads(8, 10**6, True)
    ((8, 8), (4, 4), (1, 7))
    """
    engine = 1 if parameters < SMALL_MODEL else max(1, cores // 2) if at_once else cores
    return engine, max(1, cores - engine) if at_once else cores


def found(device: str = "auto", seconds: float = 0.3, backend: str = "torch") -> Hardware:
    """This machine: its GPUs if it has any and the run may use them, else its cores, whose speed is measured for
    `seconds`; where the run computes with mlx, the memory its GPU may take."""
    cores = usable_cores()
    host, load = _host_memory(), os.getloadavg()[0]
    if uses_mlx(backend):
        return replace(mac(host, "found"), cores=cores, load=load)
    if device != "cpu" and (gpus := _gpus()):
        name, memory = gpus[0]
        card = replace(_known(name), memory=memory)
        return Hardware(card, len(gpus), "cuda", host, cores, load, "found")
    flops, bandwidth = calibrated(seconds)
    unified = " (unified)" if sys.platform == "darwin" else ""
    card = HardwareSpec(f"cpu{unified}", host, cores * flops, cores * flops, bandwidth, bandwidth)
    return Hardware(card, 1, "cpu", host, cores, load, "found and measured")


def _gpus() -> list[tuple[str, float]]:
    """(name, bytes) of each: from torch where it is loaded already, else from the driver's own tool."""
    if torch := sys.modules.get("torch"):
        properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        return [(one.name, float(one.total_memory)) for one in properties]
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.rsplit(",", 1) for line in done.stdout.splitlines() if "," in line]
    return [(name, float(mib) * 2**20) for name, mib in rows]


def _known(name: str) -> HardwareSpec:
    """The data sheet that belongs to a name such as `NVIDIA H200`; one without speeds if there is none."""
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    known = (card for key, card in CARDS.items() if all(word in plain for word in key.split("-")))
    return next(known, HardwareSpec(name, 0.0, 0.0, 0.0, 0.0, 0.0))


def _host_memory() -> float:
    """Physical memory, or what this container may use of it."""
    total = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    try:
        return min(total, float(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    except (OSError, ValueError):  # no such limit
        return total


def with_planned_dtype(config: RunConfig, hardware: Hardware) -> RunConfig:
    """The run file with the type that `auto` means on this hardware."""
    if config.model.dtype != "auto":
        return config
    on_gpu: frozenset[Dtype] = frozenset(("float16",)) if hardware.card.name in WITHOUT_BFLOAT16 else HALF_DTYPES
    fast = cpu_half_dtypes() if hardware.kind == "cpu" else on_gpu
    return with_dtype(config, compute_dtype(stored_dtype(config.model.name), fast))


def with_dtype(config: RunConfig, dtype: Dtype) -> RunConfig:
    return config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
