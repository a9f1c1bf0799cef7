"""Bit-identical resume: runs killed with SIGKILL at random moments, against runs without a kill.

A real training of the quickstart model, with `deterministic = true` and `staleness = 0`, is killed at random: any time
after a step, while a checkpoint is being written, while a resumed process restores one. It is resumed until it is
through. Bars: at least as many kill points as asked for, and in every such run each step's recorded batch (all streams,
byte by byte), loss and gradient norm are those of the unbroken run, and the run directory shows one unbroken history.

Two run files take turns: the plain quickstart, and one whose steps hang on what came before them (rae's moving
baselines, a curriculum, evaluation while groups are in flight).

    python benchmarks/resume.py --kills 20 --json benchmarks/results/resume-cpu.json
"""

import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from bars import arguments, machine
from paceline.orchestrator.saved_groups import read_groups

QUICKSTART = Path(__file__).parents[1] / "examples" / "quickstart.toml"
STEPS = 12
KILLS_A_RUN = 4
LIMIT = 300
"""Seconds any one process may take."""
CLOCKS = ("time", "memory", "tokens/s", "train_tokens/s", "wait_time_ratio", "overlap_ratio", "busy")
"""Metrics that say how long something took."""

RUN_FILE = f"""
include = ["{{quickstart}}"]
steps = {STEPS}
batch_size = 32
staleness = 0
deterministic = true
[eval]
every = {{every}}
examples = 32
concurrency = 8
[engine]
max_running = 64
max_context = 64
[trainer]
threads = 1
[checkpoint]
every = 2
[record]
batches = {STEPS}
[[env]]
type = "reverse-text"
curriculum = {{curriculum}}
[env.algo]
type = "{{algo}}"
"""
RUN_FILES = {
    "plain": {"every": 0, "curriculum": "false", "algo": "grpo"},
    "remembering": {"every": 2, "curriculum": "true", "algo": "rae"},
}


def lines(path: Path) -> list[dict]:
    """Whole lines of a file that may be growing."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


class KilledRun:
    """One run directory, and the processes that fill it."""

    def __init__(self, folder: Path, kind: str, name: str) -> None:
        self._folder, self._kind, self._name = folder, kind, name
        self.root = folder / "runs" / name
        self.kills: list[dict] = []

    @property
    def step(self) -> int:
        return max((line["step"] for line in lines(self.root / "metrics.jsonl")), default=0)

    @property
    def saved(self) -> int:
        """Step of the checkpoint that a resume would take, 0 if there is none."""
        latest = self.root / "checkpoints" / "latest"
        return int(latest.readlink().name.removeprefix("step-")) if latest.is_symlink() else 0

    def start(self) -> subprocess.Popen:
        how = ["--resume", "latest"] if self.saved else ["--overwrite"]
        command = [sys.executable, "-m", "paceline", "train", f"{self._kind}.toml", "--name", self._name, *how]
        log = (self._folder / f"{self._name}.log").open("ab")
        return subprocess.Popen(command, cwd=self._folder, stdout=log, stderr=log)

    def finish(self) -> None:
        code = self.start().wait(LIMIT)
        if code:
            tail = (self._folder / f"{self._name}.log").read_text(errors="replace")[-600:]
            raise RuntimeError(f"{self._name} ended with {code}: {tail}")

    def kill(self, rng: random.Random) -> bool:
        """Start it and kill it somewhere; False if it came to its end first."""
        kind, there, delay = self._moment(rng)
        process, until = self.start(), time.monotonic() + LIMIT
        try:
            while not there():
                if process.poll() is not None:
                    return False
                if time.monotonic() > until:
                    raise RuntimeError(f"{self._name} made no progress within {LIMIT} s")
                time.sleep(0.001)
            time.sleep(delay)
        finally:
            process.send_signal(signal.SIGKILL)
            code = process.wait(LIMIT)
        if code != -signal.SIGKILL:
            return False
        drafts = [path.name for path in (self.root / "checkpoints").glob(".step-*.tmp")]
        kept = len(read_groups(self.root / "checkpoints" / "latest").buffered)
        self.kills.append(
            {
                "when": kind,
                "at_step": self.step,
                "falls_back_to": self.saved,
                "finished_groups_kept": kept,
                "half_written": drafts,
            }
        )
        return True

    def _moment(self, rng: random.Random) -> tuple[str, Callable[[], bool], float]:
        kind = rng.choice(["after a step", "after a step", "while saving", "while restoring"])
        begun = len(self._begins())
        if kind == "while saving":
            return kind, self._saving(), rng.uniform(0, 0.03)
        if kind == "while restoring" and self.saved:
            return kind, lambda: len(self._begins()) > begun, rng.uniform(0, 0.2)
        aim = rng.randrange(min(self.saved, STEPS - 1), STEPS)  # the last checkpoint may stand: then while exporting

        def there() -> bool:
            return len(self._begins()) > begun and self.step >= aim

        return "after a step", there, rng.uniform(0, 0.4)

    def _saving(self) -> Callable[[], bool]:
        """Whether this process writes a checkpoint: what a killed one left half written goes first."""
        swept = False

        def there() -> bool:
            nonlocal swept
            drafts = any((self.root / "checkpoints").glob(".step-*.tmp"))
            swept = swept or not drafts
            return swept and drafts

        return there

    def _begins(self) -> list[dict]:
        return [event for event in lines(self.root / "events.jsonl") if event["event"] == "begin"]


def differences(ours: Path, whole: Path) -> list[str]:
    """Where a killed run differs from the unbroken one, down to the last bit."""
    found = []
    mine, theirs = lines(ours / "metrics.jsonl"), lines(whole / "metrics.jsonl")
    if [line["step"] for line in mine] != [line["step"] for line in theirs]:
        found.append(f"steps {[line['step'] for line in mine]}")
    for one, other in zip(mine, theirs, strict=False):
        timed = {key for key in one.keys() | other.keys() if key.startswith(CLOCKS)}
        found += [
            f"step {one['step']}: {key} is {one.get(key)}, not {other.get(key)}"
            for key in sorted((one.keys() | other.keys()) - timed)
            if one.get(key) != other.get(key)
        ]
    for step in range(1, STEPS + 1):
        name = f"batches/step-{step:06d}.msgpack"
        if not (ours / name).exists() or (ours / name).read_bytes() != (whole / name).read_bytes():
            found.append(f"{name} differs")
    trained = [
        [(r["step"], r["number"], r["row"]) for r in lines(root / "tickets.jsonl") if r["state"] == "trained"]
        for root in (ours, whole)
    ]
    if trained[0] != trained[1]:
        found.append("other tickets were trained")
    ended = Counter(r["number"] for r in lines(ours / "tickets.jsonl") if r["state"] in ("trained", "dropped"))
    found += [f"ticket {number} ended {times} times" for number, times in ended.items() if times > 1]
    return found


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng, begun = random.Random(given.seed), time.monotonic()
    found: dict[str, list[str]] = {}
    kills: list[dict] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = {}
        for kind, values in RUN_FILES.items():
            (folder / f"{kind}.toml").write_text(RUN_FILE.format(quickstart=QUICKSTART, **values))
            whole[kind] = KilledRun(folder, kind, f"{kind}-whole")
            whole[kind].finish()
        number = 0
        while len(kills) < given.kills:
            kind = list(RUN_FILES)[number % len(RUN_FILES)]
            killed = KilledRun(folder, kind, f"{kind}-{number}")
            number += 1
            for _ in range(KILLS_A_RUN):
                if len(kills) + len(killed.kills) >= given.kills or not killed.kill(rng):
                    break
                print(f"{killed.root.name}: killed {killed.kills[-1]}", flush=True)
            killed.finish()
            kills += [{"run": kind, **kill} for kill in killed.kills]
            found[killed.root.name] = differences(killed.root, whole[kind].root)
            print(f"{killed.root.name}: {len(found[killed.root.name])} differences", flush=True)
    different = {name: what for name, what in found.items() if what}
    result = {
        "title": "resume",
        "kills": len(kills),
        "kills_bar": given.kills,
        "by_moment": dict(Counter(kill["when"] for kill in kills)),
        "with_a_half_written_checkpoint": sum(bool(kill["half_written"]) for kill in kills),
        "with_finished_groups_kept": sum(bool(kill["finished_groups_kept"]) for kill in kills),
        "lineages": len(found),
        "steps_compared": STEPS * len(found),
        "different": {name: what[:5] for name, what in different.items()},
        "kill_points": kills,
        "seconds": time.monotonic() - begun,
        **machine(),
    }
    result["cleared"] = len(kills) >= given.kills and not different
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result))
    return 0 if result["cleared"] else 1


if __name__ == "__main__":
    sys.exit(main())
