"""Grades reversed words in a worker process, and has bad days: it answers nonsense, raises, or takes its time.

How often, the environment variable says; without it the grader is an honest one.
"""

import json
import os
import random
import time

FAULTS = "PACELINE_CHAOS_GRADER"
"""JSON: the share of grades that are garbage, that raise, that are slow."""


def grade(given: str, wanted: str) -> float | str:
    """1 for the word, else half a point for the share of letters in place."""
    dice, faults = random.Random(os.urandom(8)), json.loads(os.environ.get(FAULTS, "{}"))
    if dice.random() < faults.get("garbage", 0):
        return "banana"
    if dice.random() < faults.get("raise", 0):
        raise RuntimeError("the grader had a bad day")
    if dice.random() < faults.get("slow", 0):
        time.sleep(dice.uniform(0.2, 1.0))
    if given == wanted:
        return 1.0
    hits = sum(a == b for a, b in zip(given, wanted, strict=False))
    return 0.5 * hits / max(len(given), len(wanted), 1)
