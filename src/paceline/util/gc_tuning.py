"""Makes Python look less often for garbage that reference counts do not free."""

import gc
from collections.abc import Generator
from contextlib import contextmanager

YOUNG, MIDDLE, OLD = 50_000, 20, 20
"""Allocations before the youngest objects are looked through, and how often that happens before older ones are."""


def raise_gc_thresholds() -> None:
    """Python's usual thresholds look through all of torch again and again while it is imported: most of a second."""
    gc.set_threshold(YOUNG, MIDDLE, OLD)


@contextmanager
def tuned_gc() -> Generator[None]:
    """Look for cycles rarely while a run is led or a model served, and never among what was there before.

    With 20,000 rollouts in flight Python tracks over a million objects that are all alive. At its usual thresholds it
    walks through them again and again, which took half of the orchestrator's time while they were started and a fifth
    from then on. Nearly everything a run leaves behind is freed by its reference count. A caller that has frozen its
    objects already has done this itself, and finds them frozen afterwards: Python cannot unfreeze only ours.
    """
    before, ours = gc.get_threshold(), not gc.get_freeze_count()
    if ours:
        gc.collect()
        gc.freeze()
    raise_gc_thresholds()
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if ours:
            gc.unfreeze()


def freeze_new_objects() -> None:
    """Freeze what was made since, such as compiled code: it stays, and looking through it once took half a second."""
    if gc.get_freeze_count():
        gc.freeze()
