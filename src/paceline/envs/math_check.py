"""The check that runs in a worker: math-verify, with no time limit of its own, since the worker has one.

Loaded as a file, so that a worker imports sympy and not torch.
"""

import math_verify

UNLIMITED = 0


def check(said: str, answers: list[str]) -> dict[str, bool]:
    """Whether what was said equals one of the answers, and whether math-verify could read it, and any of them."""
    given = math_verify.parse(said, parsing_timeout=UNLIMITED)
    golds = [parse_gold(answer) for answer in answers]
    correct = any(math_verify.verify(gold, given, timeout_seconds=UNLIMITED) for gold in golds)
    return {"correct": correct, "parsed": is_parsed(given), "gold": any(map(is_parsed, golds))}


def parse_gold(answer: str) -> list:
    """An answer of a dataset: usually bare LaTeX, which math-verify only reads where it is marked as such."""
    marked = "\\boxed{" in answer or "$" in answer
    return math_verify.parse(answer if marked else f"\\boxed{{{answer}}}", parsing_timeout=UNLIMITED)


def is_parsed(parsed: list) -> bool:
    """Whether math-verify could parse it: it returns what it cannot parse as text."""
    return any(not isinstance(value, str) for value in parsed)
