"""Grades a reply by math-verify against the row's `gt_answer`."""

import math_verify


def grade(row: dict, text: str) -> float:
    # A scorer runs on a thread of its own, where math-verify has no timeouts: they are signals.
    right = math_verify.parse(f"\\boxed{{{row['gt_answer']}}}", parsing_timeout=None)
    return float(math_verify.verify(right, math_verify.parse(text, parsing_timeout=None), timeout_seconds=None))
