"""This version against an older one, side by side on one machine.

Each version has a process of its own for each measure (for the orchestrator, whose rate depends on how the process
began, one for each round). They are asked in turn, the first of a round alternating, while the other waits. So noise
and drift of the machine meet both alike. The measures are the functions of each version's own benchmarks; what counts
is the median of the rounds' ratios, and the bar is 0.97.

  git worktree add ../older d59e120
  python benchmarks/versions.py ../older                  orchestrator; engine, packed trainer and GRPO step on the CPU
  python benchmarks/versions.py ../older --gpu            the engine at 256, 64 and 1 requests and a packed trainer step
  python benchmarks/versions.py ../older --only engine    measures whose name begins so
"""

import itertools
import os
import statistics
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from bars import Row, arguments, finish

ROOT = Path(__file__).resolve().parent.parent
BAR = 0.97

CPU_ENGINE = """
import spine
work = spine.workload()
measure = lambda _: spine.engine_rate(work)
"""
CPU_STEP = """
import spine
measure = lambda _: 1 / spine.our_step_seconds()
"""
CPU_PACKED = """
import spine
batch = spine.samples()
measure = lambda _: spine.packed_rate(batch)
"""
ORCHESTRATOR = """
import argparse, os, statistics
import orchestrator
os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
options = argparse.Namespace(in_flight=20_000, batch=2_000, group=8)
measure = lambda _: statistics.median(orchestrator.rates(orchestrator.run(options, 1 + orchestrator.WARM + 8)))
"""
GPU_ENGINE = """
import itertools
import engine_gpu
engine, seeds = engine_gpu.Started(engine_gpu.random_model("0.5B")).engine, itertools.count()
def measure(count):
    seed = next(seeds)
    prompts = engine_gpu.prompts(count, 128, seed=f"{count} {seed}")
    return engine_gpu.rate(engine, engine_gpu.requests(prompts, [512] * count, seed=seed))
"""
GPU_STEP = """
import trainer
def measure(_):
    rate = trainer.ours("0.5B", "cuda", trainer.BUDGET, 6)[1]
    trainer.free()
    return rate
"""
SERVE = """
import contextlib, sys
given, answers = sys.stdin, sys.stdout
with contextlib.redirect_stdout(sys.stderr):
    for line in given:
        print(measure(int(line)), file=answers, flush=True)
"""


@dataclass(frozen=True)
class Measure:
    """What both versions are asked for: a function `measure`, as source, that returns a rate; more is better."""

    name: str
    unit: str
    source: str
    rounds: int
    argument: int = 0
    new_process: bool = False
    """Each round in a new process."""


MEASURES = {
    "cpu": [
        Measure("orchestrator, one core", "rollouts/s", ORCHESTRATOR, 9, new_process=True),
        Measure("engine, quickstart model", "tok/s", CPU_ENGINE, 7),
        Measure("trainer, quickstart model, packed", "tok/s", CPU_PACKED, 7),
        Measure("step of GRPO, quickstart", "steps/s", CPU_STEP, 5),
    ],
    "gpu": [
        Measure("engine 0.5B, 256 requests", "tok/s", GPU_ENGINE, 16, 256),
        Measure("engine 0.5B, 64 requests", "tok/s", GPU_ENGINE, 10, 64),
        Measure("engine 0.5B, 1 request", "tok/s", GPU_ENGINE, 6, 1),
        Measure("trainer 0.5B, packed step", "tok/s", GPU_STEP, 2),
    ],
}


class Version:
    """A process that answers each line with one measurement of the source under `tree`."""

    def __init__(self, tree: Path, source: str) -> None:
        self._tree, self._source = tree, source
        self._process: subprocess.Popen[str] | None = None

    def ask(self, measure: Measure) -> float:
        if measure.new_process:
            self.close()
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        print(measure.argument, file=process.stdin, flush=True)
        if not (answer := process.stdout.readline()):
            raise SystemExit(f"the measuring process ended with {process.wait()}: what it wrote is above")
        return float(answer)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self) -> subprocess.Popen[str]:
        paths = [str(self._tree / "src"), str(self._tree / "benchmarks"), os.environ.get("PYTHONPATH", "")]
        return subprocess.Popen(
            [sys.executable, "-c", self._source + SERVE],
            cwd=self._tree,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )


def compare(measure: Measure, older: Version, this: Version, rounds: int) -> dict[str, list[float]]:
    """The rates of both, after a first one that is not counted."""
    versions = {"older": older, "this": this}
    rates: dict[str, list[float]] = {name: [] for name in versions}
    for number in range(rounds + 1):
        got = {name: versions[name].ask(measure) for name in sorted(versions, reverse=number % 2 == 1)}
        note = ", ".join(f"{name} {rate:,.4g}" for name, rate in got.items())
        print(f"{measure.name}: {note} {measure.unit}{'' if number else ' (first, not counted)'}", flush=True)
        for name in versions if number else ():
            rates[name].append(got[name])
    return rates


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("older", type=Path, help="checkout of the older version")
    parser.add_argument("--gpu", action="store_true", help="measure on CUDA instead")
    parser.add_argument("--only", default="", help="measures whose name begins so")
    parser.add_argument("--rounds", type=int, help="how often each version is asked; each measure has its own number")
    options = parser.parse_args()
    chosen = [m for m in MEASURES["gpu" if options.gpu else "cpu"] if m.name.startswith(options.only)]
    if not chosen:
        parser.error(f"no measure begins with {options.only!r}")
    tree, each, rows = options.older.resolve(), {}, []
    for source, measures in itertools.groupby(chosen, key=lambda measure: measure.source):
        with closing(Version(tree, source)) as older, closing(Version(ROOT, source)) as this:
            for measure in measures:
                rates = each[measure.name] = compare(measure, older, this, options.rounds or measure.rounds)
                ours, theirs = statistics.median(rates["this"]), statistics.median(rates["older"])
                ratio = statistics.median(a / b for a, b in zip(rates["this"], rates["older"], strict=True))
                rows.append(Row(measure.name, measure.unit, ours, theirs, tree.name, ratio, BAR))
    return finish("this version against an older one", rows, options.json, each=each)


if __name__ == "__main__":
    sys.exit(main())
