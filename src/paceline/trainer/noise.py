"""The generators that dropout draws from, in a checkpoint."""

from collections.abc import Mapping

import torch
from torch import Tensor

CPU, GPU = "rng", "rng_cuda"


def noise(device: torch.device, rank: int | None = None) -> dict[str, Tensor]:
    """Their states; of one rank among several under its number."""
    end = "" if rank is None else f"/{rank}"
    on_gpu = {f"{GPU}{end}": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    return {f"{CPU}{end}": torch.get_rng_state()} | on_gpu


def restore_noise(tensors: Mapping[str, Tensor], device: torch.device, rank: int) -> None:
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
