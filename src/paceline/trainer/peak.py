"""Measures this process's peak memory, to compare it with the planner's estimate."""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def peak_bytes(device: "torch.device") -> float:
    """On a GPU, the most that torch has held there at once; on a CPU, the most of the process that was in memory."""
    if device.type == "cuda":
        import torch

        return float(torch.cuda.max_memory_allocated(device))
    return process_bytes()


def process_bytes() -> float:
    """The most of this process that was in memory at once."""
    try:
        import resource
    except ImportError:  # Windows does not count
        return 0.0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(most if sys.platform == "darwin" else 1024 * most)
