"""What a CPU needs to be told before it is fast."""

import platform
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@contextmanager
def small_products(dtype: "torch.dtype") -> Generator[None]:
    """Route float32 products around oneDNN on 64-bit ARM while the context lasts.

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
def quick_handover(seconds: float = 2e-4) -> Generator[None]:
    """Let threads pass Python's lock on quickly while the context lasts.

    Engine, trainer and event loop are threads that release the lock around every tensor operation. By default a busy
    thread may keep it for 5 ms each time, which is longer than most of those operations take.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
