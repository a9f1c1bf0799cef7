"""Measures how many rollouts a second the orchestrator handles on one core.

Everything between a ticket and a trained batch is the real code: orchestrator, dispatcher, gate, ledger, rollouts,
chat sessions, pool, assembly, GRPO's credit, metrics, recorder. Only what would compute is null: an engine that answers
at once, an environment of one turn, a trainer that counts. What remains is the orchestrator's own cost.

20,000 rollouts are in flight from the first batch to the last: the engine holds their requests and answers the oldest
of them at each turn of the event loop. The bar is 5,000 rollouts per second of one core, the median over batches: the
process is bound to one core and its CPU seconds count, which on an idle core are those of the clock; both are kept.

A second run under cProfile says where the time goes. It is slower, and only its shares count.
"""

import asyncio
import cProfile
import itertools
import os
import pstats
import statistics
import sys
import tempfile
import time
from collections import deque
from pathlib import Path

for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

from bars import Row, arguments, finish
from paceline.clients import Pool
from paceline.config import CheckpointConfig, EvalConfig, RunConfig
from paceline.config.env import CustomEnvConfig
from paceline.config.inference import SamplingConfig
from paceline.engine import Completion, GenerateRequest
from paceline.envs import Environment, Outcome
from paceline.observe.monitor import Monitor, Monitors, RunRecorder
from paceline.orchestrator import Checkpoints, Clock, Orchestrator, OrchestratorParts, build_train_envs
from paceline.rollout import SamplingClient
from paceline.trainer import StepReport
from paceline.util.gc_tuning import tuned_gc
from paceline.weights.update import ServedPolicy, WeightUpdate

BAR = 5_000.0
PROMPT, REPLY = 16, 16
AT_ONCE = 256
"""Requests answered at one turn of the event loop."""
WARM = 2
"""The first batches start 20,000 episodes besides training their own."""
SHOWN = 30
"""Functions kept of the profile."""


class NullEngine:
    """Holds requests, and answers the oldest at each turn of the event loop."""

    def __init__(self) -> None:
        self.version, self.busy_seconds = 0, 0.0
        self._asked: deque[asyncio.Future[None]] = deque()

    async def generate(self, request: GenerateRequest) -> Completion:
        loop, version = asyncio.get_running_loop(), self.version
        if not self._asked:
            loop.call_soon(self._turn, loop)
        self._asked.append(answer := loop.create_future())
        await answer
        return Completion(token_ids=[7] * REPLY, logprobs=[-1.0] * REPLY, versions=[version] * REPLY, finish="stop")

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        for _ in range(min(AT_ONCE, len(self._asked))):
            answer = self._asked.popleft()
            if not answer.done():
                answer.set_result(None)
        if self._asked:
            loop.call_soon(self._turn, loop)

    async def load_weights(self, update: WeightUpdate) -> float:
        self.version = update.version
        return 0.0

    async def policy(self) -> ServedPolicy:
        return ServedPolicy(self.version, "")


class NullTrainer:
    """Counts."""

    version = 0

    async def step(self, batch) -> StepReport:
        self.version += 1
        return StepReport({"loss": 0.0})

    async def weights(self) -> WeightUpdate:
        return WeightUpdate(self.version, {})

    async def feed(self, samples) -> None: ...

    async def save(self, folder: Path) -> None: ...


class OneTurn(Environment):
    """Every second answer is right, so that no group is without a signal."""

    def __init__(self) -> None:
        self.playing = 0
        self._played = itertools.count()

    def examples(self, split):
        rows = 10_000 if split == "train" else 0
        return [{"prompt": list(range(i, i + PROMPT)), "answer": str(i)} for i in range(rows)]

    async def play(self, example, seats):
        self.playing += 1
        try:
            await seats["policy"].complete(example["prompt"])
        finally:
            self.playing -= 1
        return Outcome.solo(float(next(self._played) % 2))


class NullRenderer:
    """A renderer that reads nothing."""

    def reply(self, ids) -> str:
        return ""


class BatchTimes(Monitor):
    """When each batch was done, and how many rollouts were being played then; ends the run after the last one."""

    def __init__(self, environment: OneTurn, batches: int) -> None:
        self.orchestrator: Orchestrator | None = None
        self.marks: list[float] = []
        """CPU seconds of this process."""
        self.wall: list[float] = []
        self.rollouts_done: list[float] = []
        self.in_flight: list[int] = []
        self.stale: list[float] = []
        self._environment, self._batches = environment, batches

    def step(self, step, metrics):
        if step == self._batches and self.orchestrator is not None:
            self.orchestrator.stop()
        self.marks.append(time.process_time())
        self.wall.append(time.perf_counter())
        self.rollouts_done.append(metrics["batch/rollouts"])
        self.in_flight.append(self._environment.playing)
        self.stale.append(metrics["staleness/max"])


async def lead(config: RunConfig, batches: int, folder: Path) -> BatchTimes:
    """Lead a run of null parts through so many batches."""
    environment = OneTurn()
    times = BatchTimes(environment, batches)
    pool = Pool([NullEngine()])  # ty: ignore
    client = SamplingClient(pool, NullRenderer(), SamplingConfig(max_tokens=REPLY), frozenset({7}))  # ty: ignore
    envs = build_train_envs(config, {"null": environment})
    parts = OrchestratorParts(
        pool=pool,
        trainer=NullTrainer(),  # ty: ignore
        client=client,
        eval_client=client,
        envs=envs,
        monitor=Monitors(RunRecorder(folder), times),
        checkpoints=Checkpoints(folder / "checkpoints", 1),
        clock=Clock(),
    )
    times.orchestrator = Orchestrator(config, parts)
    await times.orchestrator.run()
    return times


def run(options, batches: int) -> BatchTimes:
    staleness = 2 * options.in_flight // options.batch
    config = RunConfig(
        steps=1_000_000,
        batch_size=options.batch,
        group_size=options.group,
        staleness=staleness,
        max_inflight=options.in_flight,
        eval=EvalConfig(every=0),
        checkpoint=CheckpointConfig(every=0),
        env=[CustomEnvConfig(name="null", import_path="x:y")],
    )
    with tempfile.TemporaryDirectory() as folder, tuned_gc():  # as every run is led
        return asyncio.run(lead(config, batches, Path(folder)))


def rates(times: BatchTimes) -> list[float]:
    """Rollouts per CPU second of each batch after the first ones."""
    pairs = itertools.pairwise(times.marks)
    return [done / (end - start) for done, (start, end) in zip(times.rollouts_done[1:], pairs, strict=True)][WARM:]


def profiled(options) -> tuple[list[dict], str]:
    """The functions that cost most, by their own time."""
    profile = cProfile.Profile()
    times = profile.runcall(run, options, WARM + 5)
    stats = pstats.Stats(profile)
    total = sum(own for _, _, own, _, _ in stats.stats.values())  # ty: ignore[missing-attribute]
    rollouts = sum(times.rollouts_done)
    ordered = sorted(stats.stats.items(), key=lambda item: -item[1][2])[:SHOWN]  # ty: ignore[missing-attribute]
    lines = [
        {
            "function": f"{short(file)}:{line} {name}",
            "share": round(own / total, 4),
            "with_callees": round(cumulative / total, 4),
            "calls_per_rollout": round(calls / rollouts, 3),
        }
        for (file, line, name), (_, calls, own, cumulative, _) in ordered
    ]
    text = "\n".join(
        f"{entry['share']:7.1%} {entry['with_callees']:7.1%} {entry['calls_per_rollout']:8.2f}  {entry['function']}"
        for entry in lines
    )
    return lines, f"  own    with callees   calls/rollout   function\n{text}"


def short(file: str) -> str:
    return file.split("/src/")[-1].split("/lib/")[-1] if "/" in file else file


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--in-flight", type=int, default=20_000, help="rollouts in flight")
    parser.add_argument("--batch", type=int, default=2_000, help="rollouts trained between two publishes")
    parser.add_argument("--group", type=int, default=8, help="rollouts of one example")
    parser.add_argument("--batches", type=int, default=20, help="batches that are timed")
    parser.add_argument("--no-profile", action="store_true", help="leave the run under cProfile out")
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    times = run(options, 1 + WARM + options.batches)
    each = rates(times)
    timed = sum(times.rollouts_done[1 + WARM :])
    rate = statistics.median(each)
    lines, text = ([], "") if options.no_profile else profiled(options)
    print(text)
    what = f"{options.in_flight:,} in flight, batches of {options.batch:,} in groups of {options.group}"
    return finish(
        "orchestrator, null engine, one core",
        [Row(what, "rollouts/s", rate, BAR, "bar", rate / BAR, 1.0)],
        options.json,
        rollouts_per_s={"median": round(rate), "slowest": round(min(each)), "fastest": round(max(each))},
        in_flight={"least": min(times.in_flight[WARM:]), "most": max(times.in_flight[WARM:])},
        rollouts=int(timed),
        cpu_seconds=round(times.marks[-1] - times.marks[WARM], 2),
        wall_seconds=round(times.wall[-1] - times.wall[WARM], 2),
        staleness={"allowed": 2 * options.in_flight // options.batch, "seen": max(times.stale)},
        profile=lines,
    )


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
