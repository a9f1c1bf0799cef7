"""How new weights get from the trainer to engines in other processes."""

from typing import Literal

from paceline.config.base import Section


class Weights(Section):
    """How an update travels. In one process (`placement = "local"` and `"colocated"`) it is copied and nothing here
    matters; a LoRA adapter always travels in a request."""

    path: Literal["auto", "disk", "http", "delta", "broadcast"] = "auto"
    """`disk`: as a file in the run directory, which both sides see. `http`: as the body of a request, nothing shared.
    `delta`: only the elements that changed since the version the engine holds, and all of them to one that holds
    another. `broadcast`: by a collective; with `placement = "ray"` from the trainer's first rank to all engines at
    once. `auto`: files where both see the folder, bodies elsewhere, and deltas in front of either where the published
    weights are bfloat16 or float16. With `placement = "ray"` there are two ways, and `auto` is `broadcast` where rank
    and engines have GPUs of their own and there are several engines, else Ray's object store."""

    def idle(self, placement: str) -> str | None:
        """Why a run that asks for a path will not see it."""
        if placement not in ("local", "colocated") or self.path == "auto":
            return None
        return (
            f'weights.path = "{self.path}" has no effect with placement = "{placement}", where engine and trainer '
            'share a process: set placement = "processes", or remove [weights]'
        )
