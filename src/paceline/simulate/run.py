"""One simulated run, from a plan to a report.

Only engine, environment and trainer are simulated; conductor, dispatcher, gate, ledger, player, seats, pool, assembly,
credit, filters and metrics are those of every run.
"""

import asyncio
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from paceline.inference import Pool
from paceline.monitor import Monitor
from paceline.orchestrator import Checkpoints, Conductor, Parts, lay_out
from paceline.private_folder import PrivateFolder
from paceline.rollout import Voice
from paceline.simulate.clock import VirtualClock, leap
from paceline.simulate.engine import SimulatedEngine
from paceline.simulate.parts import Mute, SimulatedTrainer, Task
from paceline.simulate.plan import NAME, Plan

WARM = 0.2
"""The part of a run that is left out of its averages: the pipeline fills."""
KEPT = ("time/step", "time/sample", "time/train", "time/publish", "staleness/mean", "staleness/max", "drop_ratio")


@dataclass(slots=True)
class Report:
    """What a simulated run came to. All sums are over the time after the pipeline has filled."""

    plan: Plan
    hours: float
    """Simulated, all in all."""
    steps: list[dict[str, float]] = field(default_factory=list)
    """One line per batch: when it was done, its phases and its staleness, and the memory in use by then."""
    sampled_tokens: float = 0.0
    wall_seconds: float = 0.0

    @property
    def counted(self) -> list[dict[str, float]]:
        return [line for line in self.steps if line["hour"] > WARM * self.hours] or self.steps[-1:]

    def share(self, phase: str) -> float:
        """Of all time, what the conductor spent in a phase."""
        return self._sum(f"time/{phase}") / max(self._sum("time/step"), 1e-9)

    @property
    def waiting(self) -> float:
        """The part of all time that the trainer waited for a batch to be full."""
        return self.share("sample")

    @property
    def tokens_per_second(self) -> float:
        """Trained."""
        return self._sum("simulated/tokens") / max(self._sum("time/step"), 1e-9)

    @property
    def steps_per_hour(self) -> float:
        return 3600 * len(self.counted) / max(self._sum("time/step"), 1e-9)

    @property
    def busy(self) -> float:
        """The part of the time that engines decoded in, as if one that decodes at all were full."""
        return self._sum("busy/sampler") / max(len(self.counted), 1)

    @property
    def staleness(self) -> tuple[float, float]:
        """Mean and most."""
        lines = self.counted
        mean = sum(line["staleness/mean"] for line in lines) / max(len(lines), 1)
        return mean, max((line["staleness/max"] for line in self.steps), default=0.0)

    @property
    def stale(self) -> float:
        """Samples that came too late, by samples trained or too late."""
        late, trained = self._sum("dropped/stale_samples"), self._sum("batch/samples")
        return late / max(late + trained, 1)

    def growth(self, key: str = "blocks") -> float:
        """How much more memory the last quarter of the run held than the third."""
        third, last = (
            [line[key] for line in self.steps if low < line["hour"] / self.hours <= high]
            for low, high in ((0.5, 0.75), (0.75, 1.1))
        )
        return median(last) / median(third) - 1 if third and last else 0.0

    def _sum(self, key: str) -> float:
        return sum(line.get(key, 0.0) for line in self.counted)


class _Watch(Monitor):
    """Writes the report's lines, and ends the run when its time has come."""

    def __init__(self, report: Report, clock: VirtualClock) -> None:
        self.conductor: Conductor | None = None
        self._report, self._clock = report, clock

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        hour = self._clock.now() / 3600
        kept = (*KEPT, "busy/sampler", "simulated/tokens", "batch/samples", "dropped/stale_samples")
        line = {key: metrics[key] for key in kept}
        memory = {"blocks": float(sys.getallocatedblocks()), "resident": resident_bytes()}
        self._report.steps.append({"hour": hour, **line, **memory})
        if hour >= self._report.hours and self.conductor is not None:
            self.conductor.stop()


def simulate(plan: Plan, hours: float) -> Report:
    """Run the plan for so many simulated hours."""
    start = time.perf_counter()
    report = Report(plan, hours)
    with PrivateFolder() as folder:
        leap(_lead(plan, report, folder))
    report.wall_seconds = time.perf_counter() - start
    return report


async def _lead(plan: Plan, report: Report, folder: Path) -> None:
    config, clock = plan.config(), VirtualClock(asyncio.get_running_loop())
    engines = [
        SimulatedEngine(plan.bundled_slots, plan.step_seconds, plan.lengths, plan.transfer, plan.pause)
        for _ in range(plan.engines)
    ]
    pool = Pool(engines)  # ty: ignore[invalid-argument-type]
    voice = Voice(pool, Mute(), config.sampling, frozenset())  # ty: ignore[invalid-argument-type]
    monitor = _Watch(report, clock)
    parts = Parts(
        pool=pool,
        trainer=SimulatedTrainer(plan.learner, plan.bundle),
        voice=voice,
        eval_voice=voice,
        courses=lay_out(config, {NAME: Task(plan.prompt, seed=plan.seed)}),
        monitor=monitor,
        checkpoints=Checkpoints(folder / "checkpoints", 1),
        clock=clock,
    )
    monitor.conductor = conductor = Conductor(config, parts)
    # Also where no batch is ever full.
    asyncio.get_running_loop().call_later(2 * 3600 * report.hours, conductor.stop)
    try:
        await conductor.run()
    finally:
        pool.close()
    report.sampled_tokens = float(plan.bundle * sum(engine.tokens for engine in engines))


def resident_bytes() -> float:
    """Memory of this process, where the machine says so."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0.0
    return pages * 4096.0
