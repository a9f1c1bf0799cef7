"""One orchestrator, 256 engines on a local Ray: does its event loop stay quick?

Orchestrator, dispatcher, gate, ledger, seats, pool, registry and the run directory are the real code, and every request
and every update of weights goes to a Ray actor and back as it does in `placement = "ray"`. Only the GPUs are simulated:
a few actors hold 256 engines between them, which sample replies of long-tailed lengths in real time. A trainer that
only waits publishes a version per batch, to all 256.

While it runs, a meter asks the event loop every five milliseconds to be called back, and notes how late it is. A loop
that is late leaves finished rollouts lying and engines without work. The bar is 20 ms at the 99th percentile; median,
99.9th percentile and the worst are told beside it. The machine's own share of the lag, which is what the same meter
sees in an idle event loop of another process at the same time, is told too.
"""

import asyncio
import itertools
import os
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path

for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import numpy as np
import ray

from bars import Row, arguments, finish
from fleet_engines import LONGEST, SimulatedEngines
from paceline.clients import Pool
from paceline.config import CheckpointConfig, EvalConfig, RunConfig
from paceline.config.env import CustomEnvConfig
from paceline.config.inference import SamplingConfig
from paceline.data import State
from paceline.envs import Environment, Outcome
from paceline.observe.monitor import Monitor, Monitors, RunRecorder
from paceline.orchestrator import Checkpoints, Clock, Orchestrator, OrchestratorParts, build_train_envs
from paceline.rollout import SamplingClient
from paceline.runtime.ray.engines import RayEngine
from paceline.trainer import StepReport
from paceline.util.gc_tuning import tuned_gc
from paceline.weights.update import WeightUpdate

BAR_SECONDS = 0.020
EVERY_SECONDS = 0.005


class Slot:
    """One engine of a rack, called like an actor of its own."""

    def __init__(self, rack, number: int) -> None:
        self.answer, self.load = (Method(method, number) for method in (rack.answer, rack.load))
        self.order = self.answer  # whatever is asked of it besides requests


class Method:
    def __init__(self, method, number: int) -> None:
        self._method, self._number = method, number

    def remote(self, *arguments):
        return self._method.remote(self._number, *arguments)


class WaitingTrainer:
    """Takes its time, and hands out weights of a few bytes."""

    def __init__(self, seconds: float) -> None:
        self.version, self._seconds = 0, seconds

    async def step(self, batch) -> StepReport:
        await asyncio.sleep(self._seconds)
        self.version += 1
        return StepReport({"loss": 0.0})

    async def weights(self) -> WeightUpdate:
        return WeightUpdate(self.version, {})

    async def feed(self, samples) -> None: ...

    async def save(self, folder: Path) -> None: ...


class OneTurn(Environment):
    """Every second answer is right, so that no group is without a signal."""

    def __init__(self) -> None:
        self._played = itertools.count()

    def examples(self, split):
        return [{"prompt": list(range(i, i + 64))} for i in range(10_000)] if split == "train" else []

    async def play(self, example, seats):
        await seats["policy"].complete(example["prompt"])
        return Outcome.solo(float(next(self._played) % 2))


class NullRenderer:
    """A renderer that reads nothing."""

    def reply(self, ids) -> str:
        return ""


class Steps(Monitor):
    """Counts batches, and what they were made of."""

    def __init__(self) -> None:
        self.trained: list[float] = []
        self.stale: list[float] = []

    def step(self, step, metrics):
        self.trained.append(metrics["batch/rollouts"])
        self.stale.append(metrics["staleness/max"])


async def lags(seconds: float) -> list[float]:
    """How late the event loop called back, each time."""
    loop, late = asyncio.get_running_loop(), []
    end = loop.time() + seconds
    while loop.time() < end:
        due = loop.time() + EVERY_SECONDS
        await asyncio.sleep(EVERY_SECONDS)
        late.append(max(0.0, loop.time() - due))
    return late


def idle_lags(seconds: float, answers) -> None:
    answers.put(asyncio.run(lags(seconds)))


async def lead(options, racks: list, folder: Path) -> dict:
    per_rack = options.engines // len(racks)
    engines = [
        RayEngine(Slot(rack, number), f"engine-{which}-{number}")
        for which, rack in enumerate(racks)
        for number in range(per_rack)
    ]
    in_flight = options.engines * options.slots
    batch = in_flight // 4
    config = RunConfig(
        steps=1_000_000,
        batch_size=batch,
        group_size=8,
        staleness=8,
        max_inflight=in_flight,
        sampling=SamplingConfig(max_tokens=LONGEST),
        eval=EvalConfig(every=0),
        checkpoint=CheckpointConfig(every=0),
        env=[CustomEnvConfig(name="null", import_path="x:y", timeout=600.0)],
    )
    pool, steps = Pool(engines), Steps()  # ty: ignore
    client = SamplingClient(pool, NullRenderer(), config.sampling, frozenset({7}))  # ty: ignore
    parts = OrchestratorParts(
        pool=pool,
        trainer=WaitingTrainer(options.seconds / 8),  # ty: ignore
        client=client,
        eval_client=client,
        envs=build_train_envs(config, {"null": OneTurn()}),
        monitor=Monitors(RunRecorder(folder), steps),
        checkpoints=Checkpoints(folder / "checkpoints", 1),
        clock=Clock(),
    )
    conductor = Orchestrator(config, parts)
    running = asyncio.create_task(conductor.run())
    await asyncio.sleep(options.warm)  # the first thousands of requests all start at once
    began, before = time.perf_counter(), sum(steps.trained)
    context = get_context("spawn")
    idle = context.Queue()
    meter = context.Process(target=idle_lags, args=(options.measure, idle))
    meter.start()
    measuring = asyncio.create_task(lags(options.measure))
    ended, _ = await asyncio.wait({measuring, running}, return_when=asyncio.FIRST_COMPLETED)
    if running in ended:
        running.result()
    late = await measuring
    took = time.perf_counter() - began
    trained = sum(steps.trained) - before
    policies = await pool.policies()
    conductor.stop()
    await asyncio.wait_for(running, 120)
    ledger = conductor._ledger
    still_open = sum(ledger.count(state) for state in State)
    assert ledger.drawn == ledger.trained + ledger.dropped.total() + still_open
    return {
        "lags": late,
        "idle": await asyncio.to_thread(idle.get, timeout=60),
        "rollouts_per_s": trained / took,
        "batches": len(steps.trained),
        "staleness": max(steps.stale),
        "versions": sorted({policy.version for policy in policies}),
        "serving": len(policies),
    }


def told(values: list[float]) -> dict[str, float]:
    points = {"median": 50.0, "p99": 99.0, "p99.9": 99.9, "worst": 100.0}
    return {name: round(1e3 * float(np.percentile(values, at)), 2) for name, at in points.items()}


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--engines", type=int, default=256, help="simulated engines")
    parser.add_argument("--actors", type=int, default=4, help="Ray actors that hold them")
    parser.add_argument("--slots", type=int, default=8, help="requests an engine runs at once")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long a reply takes on average")
    parser.add_argument("--warm", type=float, default=20.0, help="seconds before anything is measured")
    parser.add_argument("--measure", type=float, default=60.0, help="seconds that are measured")
    options = parser.parse_args()
    ray.init(num_cpus=options.actors, include_dashboard=False, log_to_driver=False, configure_logging=False)
    here = {"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}}  # where the rack's own file is
    kind = ray.remote(SimulatedEngines).options(num_cpus=1, max_concurrency=100_000, runtime_env=here)
    racks = [
        kind.remote(options.engines // options.actors, options.slots, options.seconds) for _ in range(options.actors)
    ]
    with tempfile.TemporaryDirectory() as folder, tuned_gc():  # as every run is led
        found = asyncio.run(lead(options, racks, Path(folder)))
    ray.shutdown()
    loop, idle = told(found.pop("lags")), told(found.pop("idle"))
    print(f"lag in ms: {loop}; of an idle event loop meanwhile: {idle}")
    p99 = loop["p99"]
    what = f"{options.engines} engines, {options.engines * options.slots:,} requests at once: lag, 99th percentile"
    return finish(
        "orchestrator and registry on a local Ray",
        [Row(what, "ms", p99, 1e3 * BAR_SECONDS, "bar", 1e3 * BAR_SECONDS / max(p99, 1e-3), 1.0)],
        options.json,
        lag_ms=loop,
        idle_lag_ms=idle,
        **found,
    )


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
