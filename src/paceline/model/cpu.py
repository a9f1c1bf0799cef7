"""CPU settings for speed: threads, small matrix products, lock handover, a warning about slow types."""

import platform
import sys
import time
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SLOW = 10.0
"""How many times as long as float32 a type may take before it is worth a warning."""


def warn_of_slow(dtype: "torch.dtype") -> None:
    """Say so where this CPU has no instructions for a type, and every product takes hundreds of times as long. torch
    says it with twenty lines of its own insides, which are kept back."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        times = slowness(dtype)
    warnings.filterwarnings("ignore", "mkldnn_matmul failed", UserWarning)
    if times > SLOW:
        name = str(dtype).removeprefix("torch.")
        warnings.warn(
            f'this CPU multiplies {name} {times:.0f} times slower than float32: set model.dtype = "float32"',
            stacklevel=3,
        )


def slowness(dtype: "torch.dtype") -> float:
    """How many times as long as in float32 a small product takes; the best of three, for others compute here too."""
    import torch

    def seconds(dtype: torch.dtype) -> float:
        matrix = torch.ones(64, 64, dtype=dtype)
        taken = []
        for _ in range(4):  # the first is for whatever torch prepares
            start = time.perf_counter()
            matrix @ matrix
            taken.append(time.perf_counter() - start)
        return min(taken[1:])

    return seconds(dtype) / seconds(torch.float32)


def set_cpu_threads(count: int) -> None:
    """Compute with this many CPU threads on the calling thread, whatever other threads of the process ask for.

    `torch.set_num_threads` alone does not last: the first parallel operation of a thread sets its count once more, to
    the one that any thread of the process has set last. Reading the count does that first.
    """
    import torch

    torch.get_num_threads()
    torch.set_num_threads(count)


@contextmanager
def avoid_onednn_on_arm(dtype: "torch.dtype") -> Generator[None]:
    """Route float32 matrix products around oneDNN on 64-bit ARM while the context lasts.

    There oneDNN plans every product anew, which costs about 0.7 ms however small it is; BLAS does a decode step's
    64 x 128 x 128 in 0.09 ms, and large products at the same speed. Elsewhere torch already chooses well.
    """
    import torch

    if platform.machine() not in ("aarch64", "arm64") or dtype != torch.float32:
        yield
        return
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False  # ty: ignore[invalid-assignment] - a property of the module
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before


@contextmanager
def short_switch_interval(device: str = "cpu") -> Generator[None]:
    """Let threads pass Python's lock on quickly while the context lasts.

    Engine, trainer and event loop are threads that release the lock around every tensor operation. By default a busy
    thread may keep it for 5 ms each time, which is longer than most of those operations take. On a GPU they take
    microseconds: a thread that waits for each of some thousand launches leaves it idle.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-5 if device.startswith("cuda") else 2e-4)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
