"""One simulated run, from a plan to a report.

Only engine, environment and trainer are simulated; orchestrator, dispatcher, gate, ledger, seats, pool, assembly,
credit, filters and metrics are those of every run.
"""

import asyncio
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from paceline.clients import Pool
from paceline.data import Row, Sample
from paceline.envs import Environment, Outcome
from paceline.envs.base import Split
from paceline.observe.monitor import Monitor
from paceline.orchestrator import Checkpoints, Orchestrator, OrchestratorParts, build_train_envs
from paceline.rollout import SamplingClient, Seat
from paceline.trainer import StepReport
from paceline.util.private_folder import PrivateFolder
from paceline.weights.update import WeightUpdate
from simulator.cost import NAME, SimulationPlan
from simulator.engine import SimulatedEngine, VirtualClock, run_virtual


class SimulatedTask(Environment):
    """Rows that are solved with a probability of their own, from 0 to 1. So the real filter has something to do: of
    groups of eight, two in nine are all right or all wrong, and are dropped."""

    def __init__(self, prompt: int, rows: int = 4096, seed: int = 0) -> None:
        self._prompt, self._rows = prompt, rows
        self._dice = random.Random(seed)

    def examples(self, split: Split) -> Sequence[Row]:
        rows = self._rows if split == "train" else 0
        return [{"prompt": self._prompt, "solved": (row + 0.5) / rows} for row in range(rows)]

    async def play(self, example: Row, seats: Mapping[str, Seat]) -> Outcome:
        # One token whose id says how many it stands for, as in the replies.
        await seats["policy"].complete([example["prompt"]])
        return Outcome.solo(float(self._dice.random() < example["solved"]))


class NoTextRenderer:
    """Token ids that are counts have no text."""

    def reply(self, token_ids: Sequence[int]) -> str:
        return ""


class SimulatedTrainer:
    """Takes as long for a batch as the tokens that its ids stand for would."""

    def __init__(self, plan: SimulationPlan) -> None:
        self.version = 0
        self._plan = plan

    async def feed(self, samples: Sequence[Sample]) -> None: ...

    async def step(self, batch: Sequence[Sample]) -> StepReport:
        tokens = self._plan.bundle * sum(int(sample.token_ids.sum()) for sample in batch)
        await asyncio.sleep(self._plan.train_seconds(tokens))
        self.version += 1
        return StepReport({"simulated/tokens": float(tokens)})

    async def weights(self) -> WeightUpdate:
        return WeightUpdate(self.version, {})

    async def save(self, folder: Path) -> None: ...

    async def load(self, folder: Path) -> None: ...

    async def export(self, folder: Path, tokenizer: object = None) -> None: ...

    def close(self) -> None: ...


WARMUP_SHARE = 0.2
"""The part of a run that is left out of its averages: the pipeline fills."""
METRICS = ("time/step", "time/sample", "time/train", "time/publish", "staleness/mean", "staleness/max", "drop_ratio")


@dataclass(slots=True)
class SimulationReport:
    """The outcome of a simulated run. All sums are over the time after the pipeline has filled."""

    plan: SimulationPlan
    hours: float
    """Simulated, all in all."""
    steps: list[dict[str, float]] = field(default_factory=list)
    """One line per batch: when it was done, its phases and its staleness, and the memory in use by then."""
    sampled_tokens: float = 0.0
    wall_seconds: float = 0.0

    @property
    def counted(self) -> list[dict[str, float]]:
        return [line for line in self.steps if line["hour"] > WARMUP_SHARE * self.hours] or self.steps[-1:]

    def share(self, phase: str) -> float:
        """Of all time, what the orchestrator spent in a phase."""
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
    def staleness(self) -> tuple[float, float]:
        """Mean and most."""
        mean = self._sum("staleness/mean") / max(len(self.counted), 1)
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


class _StepCollector(Monitor):
    """Writes the report's lines, and ends the run when its time has come."""

    def __init__(self, report: SimulationReport, clock: VirtualClock) -> None:
        self.orchestrator: Orchestrator | None = None
        self._report, self._clock = report, clock

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        hour = self._clock.now() / 3600
        names = (*METRICS, "simulated/tokens", "batch/samples", "dropped/stale_samples")
        memory = {"blocks": float(sys.getallocatedblocks()), "resident": resident_bytes()}
        self._report.steps.append({"hour": hour, **{name: metrics[name] for name in names}, **memory})
        if hour >= self._report.hours and self.orchestrator is not None:
            self.orchestrator.stop()


def simulate(plan: SimulationPlan, hours: float) -> SimulationReport:
    """Run the plan for so many simulated hours."""
    start = time.perf_counter()
    report = SimulationReport(plan, hours)
    with PrivateFolder() as folder:
        run_virtual(_run_orchestrator(plan, report, folder))
    report.wall_seconds = time.perf_counter() - start
    return report


async def _run_orchestrator(plan: SimulationPlan, report: SimulationReport, folder: Path) -> None:
    config, clock = plan.config(), VirtualClock(asyncio.get_running_loop())
    engines = [
        SimulatedEngine(plan.bundled_slots, plan.step_seconds, plan.lengths, plan.transfer, plan.pause)
        for _ in range(plan.engines)
    ]
    pool = Pool(engines)  # ty: ignore[invalid-argument-type]
    client = SamplingClient(pool, NoTextRenderer(), config.sampling, frozenset())  # ty: ignore[invalid-argument-type]
    monitor = _StepCollector(report, clock)
    parts = OrchestratorParts(
        pool=pool,
        trainer=SimulatedTrainer(plan),
        client=client,
        eval_client=client,
        envs=build_train_envs(config, {NAME: SimulatedTask(plan.prompt, seed=plan.seed)}),
        monitor=monitor,
        checkpoints=Checkpoints(folder / "checkpoints", 1),
        clock=clock,
    )
    monitor.orchestrator = orchestrator = Orchestrator(config, parts)
    # Also where no batch is ever full.
    asyncio.get_running_loop().call_later(2 * 3600 * report.hours, orchestrator.stop)
    try:
        await orchestrator.run()
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


MAX_WAIT_SHARE = 0.05
"""Most of its time that the trainer should wait in a plan."""


def sweep(
    plan: SimulationPlan,
    hours: float,
    splits: int = 9,
    closer: int = 4,
    tell: Callable[[SimulationReport], None] = lambda report: None,
) -> list[SimulationReport]:
    """Reports by sampling GPUs: equal steps first, then `closer` more towards the place where waiting begins.

    Throughput rises with sampling GPUs while the trainer waits for them, and falls once it does not: there every GPU
    that samples is one that does not train. So the peak is where the trainer has just stopped waiting.
    """
    reports: dict[int, SimulationReport] = {}

    def look(gpus: int) -> None:
        reports[gpus] = simulate(replace(plan, sampling_gpus=gpus), hours)
        tell(reports[gpus])

    for index in range(1, splits + 1):
        look(min(plan.gpus - 1, max(plan.cards_per_engine, round(plan.gpus * index / (splits + 1)))))
    for _ in range(closer):
        calm = min((gpus for gpus in reports if reports[gpus].waiting < MAX_WAIT_SHARE), default=plan.gpus)
        hungry = max((gpus for gpus in reports if gpus < calm), default=0)
        if calm - hungry < 2:
            break
        look((calm + hungry) // 2)
    return [reports[gpus] for gpus in sorted(reports)]


def best(reports: Sequence[SimulationReport]) -> SimulationReport:
    """The most tokens trained, among splits whose trainer hardly waits; among all, if none is such."""
    calm = [report for report in reports if report.waiting < MAX_WAIT_SHARE]
    return max(calm or reports, key=lambda report: report.tokens_per_second)
