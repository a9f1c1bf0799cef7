"""How many of the GPUs should sample: simulate some splits, then look closer where it matters."""

from collections.abc import Callable, Sequence

from paceline.simulate.plan import Plan
from paceline.simulate.run import Report, simulate

WAIT = 0.05
"""Most of its time that the trainer should wait in a plan."""


def sweep(
    plan: Plan, hours: float, splits: int = 9, closer: int = 4, tell: Callable[[Report], None] = lambda report: None
) -> list[Report]:
    """Reports by sampling GPUs: equal steps first, then `closer` more towards the place where waiting begins.

    Throughput rises with sampling GPUs while the trainer waits for them, and falls once it does not: there every GPU
    that samples is one that does not train. So the peak is where the trainer has just stopped waiting.
    """
    reports: dict[int, Report] = {}

    def look(gpus: int) -> None:
        reports[gpus] = simulate(plan.split(gpus), hours)
        tell(reports[gpus])

    for index in range(1, splits + 1):
        look(min(plan.gpus - 1, max(plan.cards_per_engine, round(plan.gpus * index / (splits + 1)))))
    for _ in range(closer):
        calm = min((gpus for gpus in reports if reports[gpus].waiting < WAIT), default=plan.gpus)
        hungry = max((gpus for gpus in reports if gpus < calm), default=0)
        if calm - hungry < 2:
            break
        look((calm + hungry) // 2)
    return [reports[gpus] for gpus in sorted(reports)]


def best(reports: Sequence[Report]) -> Report:
    """The most tokens trained, among splits whose trainer hardly waits; among all, if none is such."""
    calm = [report for report in reports if report.waiting < WAIT]
    return max(calm or reports, key=lambda report: report.tokens_per_second)
