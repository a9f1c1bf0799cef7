"""Grades reversed words in a worker process; some calls return garbage, raise, or are slow.

An environment variable sets how many; without it there are no faults.
"""

import json
import os
import random
import time

FAULTS = "PACELINE_CHAOS_GRADER"
"""JSON: the share of grades that are garbage, that raise, that are slow."""


def grade(given: str, wanted: str) -> float | str:
    """1 for the word, else half a point for the share of letters in place."""
    rng, faults = random.Random(os.urandom(8)), json.loads(os.environ.get(FAULTS, "{}"))
    if rng.random() < faults.get("garbage", 0):
        return "banana"
    if rng.random() < faults.get("raise", 0):
        raise RuntimeError("the grader failed")
    if rng.random() < faults.get("slow", 0):
        time.sleep(rng.uniform(0.2, 1.0))
    if given == wanted:
        return 1.0
    hits = sum(a == b for a, b in zip(given, wanted, strict=False))
    return 0.5 * hits / max(len(given), len(wanted), 1)
