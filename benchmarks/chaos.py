"""Trains while processes are killed, the disk is filled, connections fail and graders return garbage.

The quickstart task in `processes` placement. Killed with SIGKILL, at random moments: orchestrator, trainer, server, and
the worker processes of the environment. Proxies between the orchestrator and the other two drop connections, delay
answers and send garbage; grades are garbage, raise, or are late. The disk is a size-limited mount of its own that is
filled a few times: the run must stop with a sentence that says so, and resume where it stood when there is room again.

The trainer also dies while the very first checkpoint is written, and while the model is exported.

Bars: as many kills as asked for, of each kind; every ticket ended once, trained ones in the batch that the records
name and in no other, dropped ones because they were stale or, few, because graders failed; each trained token's log
probability is what the weights of its version give it; each death named in a sentence, and never more than a minute
without a word; reward, over all steps and over the last, within noise of undisturbed runs.

    python benchmarks/chaos.py --json benchmarks/results/chaos-cpu.json
"""

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path

from bars import arguments, machine
from chaos_grader import FAULTS
from check_run import Archive, dropped, false_tokens, lines, wrong_tickets
from fault_proxy import FaultProxies, FaultRates
from paceline.config import load
from paceline.runtime.processes.supervisor import Supervisor

HERE = Path(__file__).parent.resolve()
ROOT = HERE.parent
ROLES = ("orchestrator", "trainer", "server", "worker")
BATCH, GROUP, EVERY, ENV, ROWS = 32, 8, 4, "world", 2048
DISK = "384m"
BALLAST = "ballast"
REWARD_APART = 0.05
LONGEST_SILENCE = 60.0
MOUNTED = "PACELINE_CHAOS_DISK"

RUN_FILE = """
include = ["{quickstart}"]
placement = "processes"
steps = {steps}
batch_size = {batch}
seed = {seed}
[engine]
on_swap = "recompute"
[filters]
zero_advantage = false
[eval]
every = 0
[checkpoint]
every = {every}
[record]
batches = {steps}
rollouts = {batch}
[[env]]
type = "custom"
name = "{env}"
import_path = "{world}:ChaosEnv"
timeout = 60
[env.algo]
type = "grpo"
"""


class OutputLog:
    """Lines that the run printed, with their times."""

    def __init__(self) -> None:
        self.printed: list[tuple[float, str]] = [(time.monotonic(), "begin")]
        self.on: dict[str, Callable[[], None]] = {}
        """What is done once, when a line begins so."""
        self.over = False

    def write(self, text: str) -> int:
        if text := text.strip():
            self.printed.append((time.monotonic(), text))
            print(f"    {text}"[:200], flush=True)
            for beginning in [beginning for beginning in self.on if text.startswith(beginning)]:
                self.on.pop(beginning)()
        return len(text)

    def flush(self) -> None: ...

    def silence(self) -> float:
        times = [at for at, _ in self.printed] + ([] if self.over else [time.monotonic()])
        return max(b - a for a, b in itertools.pairwise(times))


class Chaos:
    """One run and the faults that it meets."""

    def __init__(self, folder: Path, archive: Path, given) -> None:
        self._folder, self._given = folder, given
        self._rng = random.Random(given.seed)
        self.root = folder / "runs" / "chaos"
        self.screen = OutputLog()
        for moment in ("... saving checkpoint", "... exporting the model"):
            self.screen.on[moment] = lambda: self._kill_one(self._now, "trainer")
        self.kills: list[dict] = []
        self.disk: list[str] = []
        private = tempfile.mkdtemp(prefix="wires-")
        rates = FaultRates() if not given.gentle else FaultRates(0, 0, 0)
        self.wires = FaultProxies(rates, given.seed, private)
        self.archive = Archive(self.root / ".live" / "weights", archive)
        threading.Thread(target=self._give_up, name="patience", daemon=True).start()

    def run(self) -> str:
        """Train to the end, with as many restarts as that takes; return how it ended."""
        fills = sorted(self._rng.sample(range(2, self._given.steps - 2), self._given.fills))
        resume = False
        while True:
            run = Supervisor(self._config(resume), screen=self.screen, proxied_address=self.wires.proxy_for)
            self._now = run
            over = threading.Event()
            helpers = [
                threading.Thread(target=self._kill, args=(run, over), daemon=True),
                threading.Thread(target=self._fill, args=(fills, over), daemon=True),
            ]
            for helper in helpers:
                helper.start()
            result = run.run()
            over.set()
            for helper in helpers:
                helper.join(30)
            (self._folder / BALLAST).unlink(missing_ok=True)
            if result.outcome.status == "failed" and "No space left" in result.outcome.message:
                self.disk.append(result.outcome.message)
                print(f"  disk full: {result.outcome.message}", flush=True)
                resume = True
                continue
            self.screen.over = True
            return result.outcome.message or result.outcome.status

    def _give_up(self) -> None:
        """A run that hangs is a bar that is missed, not a benchmark that never ends."""
        while not self.screen.over:
            time.sleep(1)
            if self.screen.silence() > 5 * LONGEST_SILENCE:
                print(json.dumps({"title": "chaos", "cleared": False, "ended": "hangs", "kills": len(self.kills)}))
                os._exit(1)

    def _config(self, resume: bool):
        return load(
            str(self._folder / "run.toml"), ["--name", "chaos", *(["--resume", "latest"] if resume else [])]
        ).config

    @property
    def step(self) -> int:
        return max((line["step"] for line in lines(self.root / "metrics.jsonl")), default=0)

    def _kill(self, run: Supervisor, over: threading.Event) -> None:
        """Kill a process every few steps; sometimes another one before the first is back."""
        left = [role for role in ROLES for _ in range(-(-self._given.kills // len(ROLES)))]
        left = [role for role, n in (Counter(left) - Counter(k["who"] for k in self.kills)).items() for _ in range(n)]
        self._rng.shuffle(left)
        # Spread over the run, with time left at its end for the last to come back.
        most, room = len(self.kills) + len(left), max(1, self._given.steps - 4)
        while left and not over.is_set():
            again = self._rng.random() < 0.15
            aim = 0 if again else 1 + room * (len(self.kills) + self._rng.random()) / most
            while not over.is_set() and (self.step < aim or not self.step):
                time.sleep(0.02)
            if over.wait(self._rng.uniform(0, min(1.5, 0.1 * room))):
                return
            who = left.pop()
            if not self._kill_one(run, who):
                left.insert(0, who)
                time.sleep(0.2)

    def _kill_one(self, run: Supervisor, who: str) -> bool:
        child = run.children.get("orchestrator" if who == "worker" else who)
        if child is None or child.process.poll() is not None or (self._folder / BALLAST).exists():
            return False
        pid = child.process.pid
        if who == "worker":
            workers = _workers(pid)
            if not workers:
                return False
            pid = self._rng.choice(workers)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            self.kills.append({"who": who, "step": self.step, "at": time.monotonic()})
            print(f"  kill {len(self.kills)}: {who} at step {self.step}", flush=True)
            return True
        return False

    def _fill(self, fills: list[int], over: threading.Event) -> None:
        """Fill the disk to the last byte once a step is reached; the run then ends by itself."""
        if not os.environ.get(MOUNTED):
            return
        while fills and not over.wait(0.05):
            if self.step >= fills[0]:
                print(f"  filling the disk at step {self.step}", flush=True)
                fills.pop(0)
                with contextlib.suppress(OSError), (self._folder / BALLAST).open("wb", buffering=0) as ballast:
                    while ballast.write(b"\0" * (1 << 20)):
                        pass
                with contextlib.suppress(OSError), (self._folder / BALLAST).open("ab", buffering=0) as ballast:
                    while ballast.write(b"\0" * 512):
                        pass
                return


def _workers(parent: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == parent and b"worker_main" in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found


def undisturbed(folder: Path, seed: int, name: str) -> list[float]:
    """Rewards by step of a run without faults."""
    environment = {key: value for key, value in os.environ.items() if key != FAULTS}
    command = [sys.executable, "-m", "paceline", "train", "run.toml", "--name", name, "--seed", str(seed), "--quiet"]
    subprocess.run(command, cwd=folder, env=environment, check=True, timeout=3600, stdout=subprocess.DEVNULL)
    return rewards(folder / "runs" / name)


def rewards(root: Path) -> list[float]:
    return [line[f"reward/{ENV}/mean"] for line in lines(root / "metrics.jsonl") if line["step"]]


def unnamed(chaos: Chaos) -> list[str]:
    """Deaths of the three processes that no sentence names."""
    said = Counter(
        text.split()[2] for _, text in chaos.screen.printed if text.startswith("note: the ") and "killed by" in text
    )
    died = Counter(kill["who"] for kill in chaos.kills if kill["who"] != "worker")
    return [f"{died[role] - said[role]} deaths of the {role}" for role in died if said[role] < died[role]]


@contextlib.contextmanager
def mounted(small: str | None) -> Generator[Path]:
    """A folder to work in, on a small disk of its own where that is possible."""
    with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as name:
        if small:
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", name], check=True)
        try:
            yield Path(name)
        finally:
            os.chdir(ROOT)
            if small:
                subprocess.run(["umount", "-l", name], check=False)


def may_mount() -> bool:
    tried = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", tempfile.gettempdir()]
    return bool(shutil.which("unshare")) and subprocess.run(tried, check=False, capture_output=True).returncode == 0


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--fills", type=int, default=3, help="times the disk is filled")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gentle", action="store_true", help="no faults of connections and graders")
    parser.add_argument("--alone", action="store_true", help="no undisturbed run to compare with")
    given = parser.parse_args()
    if given.fills and not os.environ.get(MOUNTED) and may_mount():
        # A mount that only this process sees: filling it leaves the disk of the machine alone.
        os.environ[MOUNTED] = "1"
        os.execvp("unshare", ["unshare", "-rm", sys.executable, *sys.argv])
    begun = time.monotonic()
    with mounted(os.environ.get(MOUNTED)) as folder, tempfile.TemporaryDirectory() as kept:
        (folder / "run.toml").write_text(
            RUN_FILE.format(
                quickstart=ROOT / "examples" / "quickstart.toml",
                world=HERE / "chaos_env.py",
                steps=given.steps,
                batch=BATCH,
                every=EVERY,
                env=ENV,
                seed=given.seed,
            )
        )
        os.chdir(folder)
        calm: dict[str, list[float]] = {}
        if not given.alone:
            calm = {f"seed {given.seed + i}": undisturbed(folder, given.seed + i, f"calm-{i}") for i in range(2)}
            print(f"undisturbed: {time.monotonic() - begun:.0f} s", flush=True)
            for i in range(2):
                shutil.rmtree(folder / "runs" / f"calm-{i}")
        if not given.gentle:
            os.environ[FAULTS] = json.dumps({"garbage": 0.01, "raise": 0.01, "slow": 0.01})
        chaos = Chaos(folder, Path(kept), given)
        ended = chaos.run()
        seconds = time.monotonic() - begun
        result = check_bars(chaos, given, ended, calm)
        chaos.archive.close()
    result |= {"seconds": seconds, **machine()}
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result))
    return 0 if result["cleared"] else 1


def check_bars(chaos: Chaos, given, ended: str, calm: dict[str, list[float]]) -> dict:
    """What was measured, and whether each bar is cleared."""
    by_role = Counter(kill["who"] for kill in chaos.kills)
    wrong, tokens = ["the run did not finish"], Counter(false=-1)
    if ended == "finished":
        wrong = wrong_tickets(chaos.root, given.steps, BATCH // GROUP, ROWS, given.seed, ENV)
        tokens = false_tokens(chaos.root, given.steps, chaos.archive)
    tail = max(1, min(40, given.steps // 3))
    ours, quiet = rewards(chaos.root), list(calm.values())
    apart = {
        name: statistics.fmean(ours[part]) - statistics.fmean(statistics.fmean(values[part]) for values in quiet)
        for name, part in (("all steps", slice(None)), ("last steps", slice(-tail, None)))
        if ours and quiet
    }
    events = Counter(event["event"] for event in lines(chaos.root / "events.jsonl"))
    reasons, drawn = dropped(chaos.root), len({r["number"] for r in lines(chaos.root / "tickets.jsonl")})
    troubles = Counter()
    for line in lines(chaos.root / "metrics.jsonl"):
        troubles.update({key: value for key, value in line.items() if key.startswith(("retried/", "failed/"))})
    bars = {
        "finished": ended == "finished",
        f"at least {given.kills} kills": len(chaos.kills) >= given.kills and all(by_role[role] for role in ROLES),
        "no ticket lost, none twice": not wrong,
        "dropped only if stale, or for graders": reasons.keys() <= {"stale", "group_too_small"}
        and reasons["group_too_small"] <= 0.02 * drawn,
        "no token with a false version": tokens["false"] == 0,
        "a false version would be seen": tokens["seen if false"] > 0.2 * tokens["compared with the version before"],
        "every death named": not unnamed(chaos),
        f"never {LONGEST_SILENCE:g} s without a word": chaos.screen.silence() <= LONGEST_SILENCE,
    }
    if os.environ.get(MOUNTED):
        bars["the disk ran full"] = len(chaos.disk) >= given.fills
    if not given.gentle:
        bars["wires failed and graders lied"] = bool(chaos.wires.faults and troubles)
    if calm:
        bars[f"reward within {REWARD_APART}"] = all(abs(value) <= REWARD_APART for value in apart.values())
    for bar, cleared in bars.items():
        print(f"{'ok    ' if cleared else 'missed'}  {bar}")
    return {
        "title": "chaos",
        "cleared": all(bars.values()),
        "bars": bars,
        "ended": ended,
        "steps": given.steps,
        "kills": dict(by_role),
        "roll_backs": events["roll_back"],
        "lives": events["begin"],
        "wires": dict(chaos.wires.faults),
        "disk": chaos.disk,
        "wrong_tickets": wrong[:10],
        "unnamed": unnamed(chaos),
        "tokens": tokens,
        "longest_silence": chaos.screen.silence(),
        "dropped": dict(reasons),
        "tickets": drawn,
        "troubles": dict(troubles),
        "reward": {
            "last steps": tail,
            "chaos": statistics.fmean(ours[-tail:]) if ours else None,
            **{name: statistics.fmean(values[-tail:]) for name, values in calm.items()},
            "apart": apart,
        },
    }


if __name__ == "__main__":
    sys.exit(main())
