"""Attacks a server and a training run with random requests, faults and signals, drawn from a seed.

Half of the time a server is attacked: requests that cost too much, control calls without the key, connections that
never end, bytes that are no request. Beside them an honest client checks that its answer never changes, and a prober
measures `/health`. In the other half a training run is started, disturbed and resumed many times: user code that
raises, hangs or ends the process; signals, a full disk, a clock that jumps, connections that fail, damaged checkpoints,
changed rows. At the end the records of its tickets are checked.

Bars: no hang without a sentence, no ticket lost or doubled, no silent corruption, no unauthorised control call,
`/health` under 100 ms at p99.9, memory back where it was, ends within 5 s, nothing left behind.

    python benchmarks/attack.py --minutes 30 --seed 101
    python benchmarks/attack.py --minutes 2 --seed 101 --only nasty_regex      repeats what seed 101 drew for it
"""

import asyncio
import contextlib
import functools
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from attack_env import FAULTS, VARIABLE, VARIABLE_FIRED
from attack_server import (
    ATTACKS,
    END_SECONDS,
    HEALTH_SECONDS,
    HONEST_SECONDS,
    AttackLog,
    enough,
    new_key,
    quantile,
    run_round,
    tree,
)
from bars import arguments, machine
from check_run import dropped, lines, wrong_tickets
from fault_proxy import FaultProxies, FaultRates

HERE = Path(__file__).parent.resolve()
ROOT = HERE.parent
BATCH, GROUP, ROWS, ENV, NAME = 16, 4, 192, "world", "attacked"
SILENCE_SECONDS = 90.0
START_SECONDS = 240.0
"""The same until the run begins: on a busy machine its processes load for long."""
MEASURING_SECONDS = 1.5
DISK = "512m"
MOUNTED = "PACELINE_ATTACK_DISK"
MOUNTING = "-m" if os.geteuid() == 0 else "-rm"
"""Root stays what it is, and may give the prober its priority."""
WIRED = "--wired"
CAMPAIGN_SECONDS = 300.0
WHOLE_MINUTES = 20
"""A run this long tries every attack at least once; a shorter one says which it left out."""
ROUND_SECONDS = 300.0

RUN_FILE = """
include = ["{quickstart}"]
name = "{name}"
placement = "{placement}"
steps = 100000
batch_size = {batch}
group_size = {group}
seed = {seed}
[engine]
max_context = 64
[filters]
zero_advantage = false
[eval]
every = 0
[checkpoint]
every = 1
keep = 3
[record]
batches = 100000
[trainer]
threads = 1
[[env]]
type = "custom"
name = "{env}"
dataset = "rows.jsonl"
import_path = "{world}:play"
timeout = 5
[env.algo]
type = "grpo"
"""
CLOCK = """
import random, time
_rng, _begun = random.Random({seed}), time.monotonic()
_jumps = [(_rng.uniform(0, 60), _rng.choice([-86400, -3600, 60, 3600, 4e7])) for _ in range(8)]
_true, _true_ns = time.time, time.time_ns
_off = lambda: sum(by for at, by in _jumps if time.monotonic() - _begun > at)
time.time = lambda: _true() + _off()
time.time_ns = lambda: _true_ns() + int(_off() * 1e9)
"""


class RunHangs(Exception):
    """A training process printed nothing for too long, and was killed."""


# -- one process ----------


class TrainProcess:
    """One `paceline train`, from start to end, with all it prints."""

    def __init__(self, run: "Run", command: list[str], environment: dict[str, str]) -> None:
        self._run = run
        self.output: list[str] = []
        self._heard = time.monotonic()
        self._grown, self._counted, self._begins = size(run.root / "metrics.jsonl"), 0.0, False
        self.begun = time.monotonic()
        self.first_step = run.step
        self.popen = subprocess.Popen(
            command,
            cwd=run.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.children: set[int] = set()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self._heard = time.monotonic()
            self._begins = self._begins or "writing to runs/" in line
            self.output.append(line[:2000])

    @property
    def text(self) -> str:
        return "".join(self.output)

    @property
    def alive(self) -> bool:
        return self.popen.poll() is None

    def watch(self, until: Callable[[], bool]) -> bool:
        """Wait until a condition holds or the process ends; too long without output is a hang."""
        while self.alive and not until():
            grown = size(self._run.root / "metrics.jsonl")
            if grown != self._grown:
                self._grown, self._heard = grown, time.monotonic()
            limit = SILENCE_SECONDS if self._begins else START_SECONDS
            if time.monotonic() - self._heard > limit:
                self._run.violate("hang", f"{limit:g} s without a step or a line", said=self.output[-5:])
                self.kill()
                raise RunHangs
            if time.monotonic() > self._counted + 0.5:
                self.children |= set(tree(self.popen.pid))
                self._counted = time.monotonic()
            time.sleep(0.05)
        return self.alive

    def some_moment(self, rng: random.Random) -> bool:
        """A random moment: while it starts, or after some of its steps. Whether it still lives then."""
        if rng.random() < 0.3:
            until = time.monotonic() + rng.uniform(0, 12)
            return self.watch(lambda: time.monotonic() > until)
        aim = self.first_step + rng.randint(1, 4)
        self.watch(lambda: self._run.step >= aim)
        until = time.monotonic() + rng.uniform(0, 2)
        return self.watch(lambda: time.monotonic() > until)

    def signal(self, number: int, whole_group: bool = False) -> float:
        """Send it; when."""
        with contextlib.suppress(ProcessLookupError):
            if whole_group:
                os.killpg(self.popen.pid, number)
            else:
                self.popen.send_signal(number)
        return time.monotonic()

    def ends_within(self, seconds: float, since: float, why: str) -> float:
        """How long it took; longer than asked for is a hang."""
        self.watch(lambda: time.monotonic() > since + max(60.0, 4 * seconds))
        took = time.monotonic() - since
        if self.alive or took > seconds + MEASURING_SECONDS:
            left = "and lives" if self.alive else "before it ended"
            self._run.violate("hang", f"{took:.1f} s after {why} {left}", said=self.output[-5:])
            self.kill()
        return took

    def kill(self) -> None:
        for pid in {self.popen.pid, *self.children}:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        self.popen.wait()

    def close(self) -> set[int]:
        """After its end: children that outlive it."""
        self.popen.wait()
        deadline = time.monotonic() + 10
        while (left := {pid for pid in self.children if living(pid)}) and time.monotonic() < deadline:
            time.sleep(0.1)
        self._reader.join(5)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return left


def living(pid: int) -> bool:
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


# -- one run, in many processes ----------


class Run:
    """A run directory and the processes that trained in it, one after another."""

    def __init__(self, folder: Path, temporary: Path, log: AttackLog, seed: int, placement: str) -> None:
        self.folder, self.temporary, self.log, self.seed, self.placement = folder, temporary, log, seed, placement
        self.root = folder / "runs" / NAME
        self.fired = temporary.with_suffix(".fired")
        """A line for each fault of user code."""
        self.what, self.number = "", 0
        self.faults: dict[str, float] = {}
        (folder / "run.toml").write_text(
            RUN_FILE.format(
                quickstart=ROOT / "examples" / "quickstart.toml",
                world=HERE / "attack_env.py",
                name=NAME,
                placement=placement,
                batch=BATCH,
                group=GROUP,
                seed=seed,
                env=ENV,
            )
        )
        rng = random.Random(seed)
        words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(3, 6))) for _ in range(ROWS)]
        asked = [
            {"messages": [{"role": "user", "content": f"reverse: {word}"}], "answer": word[::-1]} for word in words
        ]
        self.rows = [json.dumps(row) + "\n" for row in asked]
        self.write_rows(self.rows)

    def write_rows(self, rows: list[str]) -> None:
        (self.folder / "rows.jsonl").write_text("".join(rows))

    @property
    def step(self) -> int:
        with contextlib.suppress(json.JSONDecodeError):
            return max((line["step"] for line in lines(self.root / "metrics.jsonl")), default=0)
        return 0

    @property
    def checkpoints(self) -> list[Path]:
        return sorted((self.root / "checkpoints").glob("step-*"))

    @property
    def trained(self) -> bool:
        return any(record.get("state") == "trained" for record in lines(self.root / "tickets.jsonl"))

    def violate(self, kind: str, text: str, **more: object) -> None:
        where = {"number": self.number, "placement": self.placement, "run_seed": self.seed, "faults": self.faults}
        self.log.violate(kind, self.what, text, **where, **more)

    def begin(
        self, *more: str, rng: random.Random | None = None, clock: bool = False, wired: bool = False
    ) -> TrainProcess:
        """Start the next process, which resumes the run; `rng` draws the faults of its user code."""
        resume = ["--resume", "latest"] if self.checkpoints else ["--overwrite"] if self.root.exists() else []
        if "--resume" in more:
            resume = []
        environment = {**os.environ, "TMPDIR": str(self.temporary), "PYTHONUNBUFFERED": "1"}
        environment |= {"TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor")}
        self.faults = {}
        if rng is not None:
            names = rng.sample(list(FAULTS), rng.choice([0, 1, 1, 2, 3]))
            self.faults = {name: odds(name, rng) for name in names}
            environment[VARIABLE_FIRED] = str(self.fired)
            environment[VARIABLE] = json.dumps({"seed": rng.random(), "odds": self.faults})
        if clock:
            (self.folder / "clock").mkdir(exist_ok=True)
            (self.folder / "clock" / "sitecustomize.py").write_text(CLOCK.format(seed=self.number))
            environment["PYTHONPATH"] = str(self.folder / "clock")
        program = [str(HERE / "attack.py"), WIRED, str(self.number)] if wired else ["-m", "paceline"]
        return TrainProcess(self, [sys.executable, *program, "train", "run.toml", *resume, *more], environment)

    def check_end(self, process: TrainProcess, codes: tuple[int, ...], killed: bool = False) -> None:
        """What holds for every end: a sensible exit code, a sentence, no traceback of ours, no advice to erase."""
        left = process.close()
        text, code = process.text, process.popen.returncode
        if code not in codes:
            self.violate("sentence", f"exit code {code}, not one of {codes}", said=process.output[-8:])
        if left:
            self.violate("leftovers", f"{len(left)} processes outlive the run")
        if (found := traceback_of_ours(text)) and not killed:
            self.violate("sentence", "a traceback of Paceline's own", said=found)
        if "a bug in Paceline" in text:
            self.violate("sentence", "a bug in Paceline", said=[line for line in process.output if "bug in" in line])
        if self.trained and "--overwrite" in text:
            self.violate("sentence", "advises --overwrite after training", said=process.output[-8:])
        starting = code == -signal.SIGTERM and not process.output  # before the interpreter had read the package
        if code and not killed and not starting and not any(line.strip() for line in process.output):
            self.violate("sentence", f"ended with {code} without a word")

    def finish(self, steps: int, *more: str) -> None:
        """Train `steps` more without faults."""
        process = self.begin("--steps", str(self.saved_step(*more) + steps), *more)
        process.watch(lambda: False)
        self.check_end(process, (0,))

    def saved_step(self, *more: str) -> int:
        if "--resume" in more and (found := re.search(r"step-(\d+)", more[more.index("--resume") + 1])):
            return int(found[1])
        return max((int(path.name.removeprefix("step-")) for path in self.checkpoints), default=0)

    def books(self) -> dict:
        """At the end: every ticket ended once, every checkpoint is whole, nothing is left behind."""
        from paceline.orchestrator import Checkpoints

        self.what, self.number, self.faults = "books", 0, {}
        self.finish(2)
        steps = self.saved_step()
        for wrong in wrong_tickets(self.root, steps, BATCH // GROUP, ROWS, self.seed, ENV)[:5] if steps else []:
            self.violate("tickets", wrong)
        for path in self.checkpoints:
            try:
                asyncio.run(Checkpoints(self.root / "checkpoints", 3).check(path))
            except Exception as error:
                self.violate("corruption", f"{path.name}: {error}")
        if left := [path.name for path in self.temporary.iterdir()]:
            self.violate("leftovers", f"left in TMPDIR: {left[:10]}")
        tickets = len({record["number"] for record in lines(self.root / "tickets.jsonl")})
        fired = Counter(self.fired.read_text().split()) if self.fired.exists() else Counter()
        return {
            "placement": self.placement,
            "steps": steps,
            "tickets": tickets,
            "dropped": dropped(self.root),
            "faults": dict(fired),
        }


def odds(name: str, rng: random.Random) -> float:
    """Of a fault, per episode: what ends a process is rare, what holds an episode up is seldom."""
    if name == "leave_process":
        return 0.005
    return rng.choice(
        [0.005, 0.02] if name in ("sleep_for_ever", "swallow_cancellation", "block_loop") else [0.01, 0.05]
    )


def traceback_of_ours(text: str) -> list[str]:
    """Tracebacks in which a frame of the package stands."""
    blocks = text.split("Traceback (most recent call last)")[1:]
    return [block[:1500] for block in blocks if re.search(r'File "[^"]*paceline/[^"]*"', block[:6000])]


# -- disturbances of a process ----------

Fault = Callable[[Run, random.Random], str]
"""Runs one training process or several; returns in a word how it ended."""
TRAINING: dict[str, Fault] = {}
ANY_END = (0, 1, 130)


def training(function: Fault) -> Fault:
    TRAINING[function.__name__] = function  # ty: ignore[missing-attribute]
    return function


@training
def user_code(run: Run, rng: random.Random) -> str:
    """Faults of user code alone."""
    process = run.begin("--steps", str(run.saved_step() + rng.randint(3, 8)), rng=rng)
    process.watch(lambda: False)
    run.check_end(process, (0, 1))
    return ended(process)


def ended(process: TrainProcess) -> str:
    return {0: "finished", 1: "failed", 2: "refused", 130: "interrupted"}.get(process.popen.returncode, "killed")


@training
def sigkill(run: Run, rng: random.Random) -> str:
    """SIGKILL at a random moment; its children must end too."""
    process = run.begin(rng=rng)
    process.some_moment(rng)
    process.signal(signal.SIGKILL)
    run.check_end(process, (-9, *ANY_END), killed=True)
    return ended(process)


@training
def sigterm(run: Run, rng: random.Random) -> str:
    """One SIGTERM: ends in time."""
    process = run.begin(rng=rng)
    if process.some_moment(rng):
        process.ends_within(END_SECONDS, process.signal(signal.SIGTERM), "SIGTERM")
    run.check_end(process, (*ANY_END, -15))
    return ended(process)


@training
def sigint(run: Run, rng: random.Random) -> str:
    """Ctrl-C once: ends after the step under way; a second one comes only when that takes a minute."""
    process = run.begin(rng=rng)
    if process.some_moment(rng):
        since = process.signal(signal.SIGINT, whole_group=rng.random() < 0.5)
        if process.watch(lambda: time.monotonic() > since + 60):
            process.ends_within(END_SECONDS, process.signal(signal.SIGINT), "a second Ctrl-C, a minute later")
    run.check_end(process, ANY_END)
    return ended(process)


@training
def sigint_twice(run: Run, rng: random.Random) -> str:
    """Ctrl-C twice: ends in time, whatever the user's code does."""
    process = run.begin(rng=rng)
    if process.some_moment(rng):
        group = rng.random() < 0.5
        since = process.signal(signal.SIGINT, group)
        pause = rng.uniform(0.3, 2)
        process.watch(lambda: time.monotonic() > since + pause)
        process.ends_within(END_SECONDS, process.signal(signal.SIGINT, group), "the second Ctrl-C")
    run.check_end(process, ANY_END)
    return ended(process)


@training
def stop_and_continue(run: Run, rng: random.Random) -> str:
    """A process stopped for some seconds, then let go on."""
    process = run.begin("--steps", str(run.saved_step() + rng.randint(3, 6)), rng=rng)
    if process.some_moment(rng):
        pid = rng.choice(tree(process.popen.pid))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            until = time.monotonic() + rng.uniform(1, 10)
            process.watch(lambda: time.monotonic() > until)
            os.kill(pid, signal.SIGCONT)
    process.watch(lambda: False)
    run.check_end(process, (0, 1))
    return ended(process)


@training
def child_killed(run: Run, rng: random.Random) -> str:
    """One of the run's own processes is killed: the run goes on, or says why not."""
    process = run.begin("--steps", str(run.saved_step() + rng.randint(3, 6)), rng=rng)
    if process.some_moment(rng) and (below := tree(process.popen.pid)[1:]):
        with contextlib.suppress(ProcessLookupError):
            os.kill(rng.choice(below), signal.SIGKILL)
    process.watch(lambda: False)
    run.check_end(process, (0, 1))
    return ended(process)


@training
def full_disk(run: Run, rng: random.Random) -> str:
    """The disk is filled to the last byte: the run ends with a sentence that says so."""
    ballast = run.folder / "ballast"
    process = run.begin(rng=rng)
    process.some_moment(rng)
    for piece in (1 << 20, 512):
        with contextlib.suppress(OSError), ballast.open("ab", buffering=0) as file:
            while file.write(b"\0" * piece):
                pass
    try:
        process.watch(lambda: False)
    finally:
        ballast.unlink(missing_ok=True)
    run.check_end(process, (1, 2))
    over_user_code = "user code|rollouts failed"  # the run may end over its own faults before the disk is full
    if process.popen.returncode in (1, 2) and not re.search(f"No space left|{over_user_code}", process.text):
        run.violate("sentence", "a full disk is not named", said=process.output[-8:])
    return ended(process)


@training
def clock_jumps(run: Run, rng: random.Random) -> str:
    """The wall clock jumps by hours, forth and back."""
    process = run.begin("--steps", str(run.saved_step() + rng.randint(3, 6)), rng=rng, clock=True)
    process.watch(lambda: False)
    run.check_end(process, (0, 1))
    return ended(process)


@training
def bad_wires(run: Run, rng: random.Random) -> str:
    """Connections between the run's processes are cut, delayed, or carry garbage."""
    process = run.begin("--steps", str(run.saved_step() + rng.randint(3, 6)), "--placement", "processes", wired=True)
    process.watch(lambda: False)
    run.check_end(process, (0, 1))
    return ended(process)


@training
def two_at_once(run: Run, rng: random.Random) -> str:
    """A second command for a run that is under way is refused."""
    process = run.begin("--steps", str(run.saved_step() + 6))
    aim = process.first_step + 1
    if process.watch(lambda: run.step >= aim):
        second = run.begin("--steps", str(run.saved_step() + 100))
        second.watch(lambda: not process.alive)
        if process.alive:
            run.check_end(second, (1, 2))
            if "in use" not in second.text:
                run.violate("sentence", "a second run in one folder is not told", said=second.output[-5:])
        else:
            second.kill()
    process.watch(lambda: False)
    run.check_end(process, (0,))
    return ended(process)


def flip(file: Path, rng: random.Random) -> None:
    data = bytearray(file.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def truncate(file: Path, rng: random.Random) -> None:
    file.write_bytes(file.read_bytes()[: rng.choice([0, size(file) // 2, size(file) - 1])])


def remove(file: Path, rng: random.Random) -> None:
    file.unlink()


@training
def damaged_checkpoint(run: Run, rng: random.Random) -> str:
    """A file of the newest checkpoint is not what was written: the resume refuses and offers an older one."""
    if len(run.checkpoints) < 2:
        run.finish(3)
    newest = run.checkpoints[-1]
    file = rng.choice([path for path in sorted(newest.rglob("*")) if path.is_file() and size(path)])
    harm = rng.choice([flip, truncate, remove] if file.name != "manifest.json" else [truncate])
    harm(file, rng)
    run.faults = {f"{harm.__name__} {file.relative_to(newest)}": 1.0}
    process = run.begin("--steps", str(run.saved_step() + 2))
    run.faults = {f"{harm.__name__} {file.relative_to(newest)}": 1.0}
    process.watch(lambda: False)
    run.check_end(process, (1, 2))
    text = " ".join(process.text.split())
    offer = re.search(r"--resume (step-\d+)", text)
    if process.popen.returncode == 0:
        run.violate("corruption", "damage was not noticed")
    elif file.name not in text or not offer or offer[1] == newest.name:
        run.violate("sentence", "damage is not named, or no older checkpoint is offered", said=process.output[-8:])
        shutil.rmtree(newest)
    if offer and offer[1] != newest.name:
        run.finish(2, "--resume", offer[1])
    return ended(process)


@training
def changed_dataset(run: Run, rng: random.Random) -> str:
    """Rows shuffled, cut or edited between two lives are told, and the old ones go on."""
    if not run.checkpoints:
        run.finish(2)
    rows = list(run.rows)
    harm = rng.choice(["shuffled", "cut", "edited", "empty", "garbage"])
    if harm == "shuffled":
        rng.shuffle(rows)
    elif harm == "cut":
        del rows[rng.randrange(1, ROWS - 1) :]
    elif harm == "edited":
        rows[rng.randrange(ROWS)] = rows[0].replace("reverse", "copy")
    else:
        rows = [] if harm == "empty" else ["\0garbage\n"] * ROWS
    run.write_rows(rows)
    process = run.begin("--steps", str(run.saved_step() + 2))
    run.faults = {harm: 1.0}
    process.watch(lambda: False)
    run.check_end(process, (1, 2))
    if process.popen.returncode == 0:
        run.violate("corruption", f"rows that were {harm} are trained on without a word")
    elif harm in ("shuffled", "cut", "edited") and "has changed since" not in " ".join(process.text.split()):
        run.violate("sentence", f"rows that were {harm} are not named", said=process.output[-8:])
    run.write_rows(run.rows)
    return ended(process)


@training
def torn_records(run: Run, rng: random.Random) -> str:
    """Half a line at the end of the records, as a power cut leaves it."""
    for name in rng.sample(["metrics.jsonl", "events.jsonl", "tickets.jsonl", "rollouts.jsonl"], 2):
        if (run.root / name).exists() and run.checkpoints:
            with (run.root / name).open("ab") as file:
                file.write(rng.choice([b'{"step": 1, "ha', b"\0" * 100, b"\xff\xfe"]))
    run.finish(2)
    return "finished"


# -- the training's half of the time ----------


def campaign(
    log: AttackLog, seconds: float, names: list[str], rng: random.Random, folder: Path, placement: str
) -> dict:
    """Attack one run directory until the time is over, attacks not yet tried first; then check its records."""
    begun = time.monotonic()
    usable = [name for name in names if not (placement == "local" and name == "child_killed")]
    run_folder = Path(tempfile.mkdtemp(prefix="run-", dir=folder))
    temporary = Path(tempfile.mkdtemp(prefix="tmp-", dir=folder.parent))
    run = Run(run_folder, temporary, log, rng.randrange(1 << 20), placement)
    longest, order, lives = 20.0, [], 0
    while usable and time.monotonic() + 2 * longest < begun + seconds:
        order = order or sorted(rng.sample(usable, len(usable)), key=lambda name: name in log.attacks)
        name = order.pop(0)
        run.what, run.number = name, log.number(name)
        started = time.monotonic()
        try:
            how = TRAINING[name](run, log.rng(name, run.number))
        except RunHangs:
            how = "hung"
        took = time.monotonic() - started
        longest, lives = max(min(took, 60.0), 0.7 * longest), lives + 1
        log.add(name, Counter([how]), took)
        print(f"  {time.monotonic() - begun:5.0f} s  {name} {run.number} ({placement}): {how} in {took:.0f} s, "
              f"step {run.step} {' '.join(run.faults)}", flush=True)  # fmt: skip
    try:
        result = run.books()
    except RunHangs:
        result = {"placement": placement}
    for used in (run_folder, temporary):
        shutil.rmtree(used, ignore_errors=True)
    return {**result, "lives": lives, "seconds": time.monotonic() - begun}


def wired() -> int:
    """A training in `processes` placement behind faulty proxies: `attack.py --wired SEED train ...`."""
    from paceline.commands import main as paceline
    from paceline.runtime.processes import supervisor

    with tempfile.TemporaryDirectory(prefix="wires-") as private:
        wires = FaultProxies(FaultRates(), int(sys.argv[2]), private)
        supervisor.Supervisor = functools.partial(supervisor.Supervisor, proxied_address=wires.proxy_for)  # ty: ignore
        code = paceline(sys.argv[3:])
        wires.close()
    return code


# -- the whole ----------


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1000, 1 << 20))
    halves = {"server": [*ATTACKS], "training": [*TRAINING]}
    names = [*halves, *ATTACKS, *TRAINING]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help="these attacks, or this half, alone")
    given = parser.parse_args()
    # A shell that starts this in the background has it ignore Ctrl-C, and every run would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what it has started is ended on the way out
    if not os.environ.get(MOUNTED) and may_mount():
        # A mount of our own: what fills it does not fill the machine's disk.
        os.environ[MOUNTED] = "1"
        os.execvp("unshare", ["unshare", MOUNTING, sys.executable, *sys.argv])
    log = AttackLog(given.seed)
    names = [name for one in given.only or halves for name in halves.get(one, [one])]
    if not os.environ.get(MOUNTED):
        names = [name for name in names if name != "full_disk"]
        log.notes.append("full_disk was left out: no mount of its own is possible here")
    served, trained = [name for name in names if name in ATTACKS], [name for name in names if name in TRAINING]
    seconds = 60 * given.minutes / (bool(served) + bool(trained) or 1)
    rng = random.Random(given.seed)
    print(f"seed {given.seed}, {given.minutes:g} minutes", flush=True)
    rounds, campaigns = [], []
    with mounted() as folder:
        for begun, length in parts(seconds if served else 0, ROUND_SECONDS):
            key = new_key() if (begun == 0) == (given.seed % 3 > 0) else None
            print(f"server {'with' if key else 'without'} a key, {length:.0f} s", flush=True)
            rounds.append(run_round(log, length, served, rng, key))
        placements = rng.sample(["local", "processes"], 2)
        for begun, length in parts(seconds if trained else 0, CAMPAIGN_SECONDS):
            print(f"training, {length:.0f} s", flush=True)
            campaigns.append(campaign(log, length, trained, rng, folder, placements[begun % 2]))
    log.notes += [f"{name} was not tried: give it more minutes" for name in names if name not in log.attacks]
    return report(log, rounds, campaigns, given, len(names))


def parts(seconds: float, each: float) -> list[tuple[int, float]]:
    """A length of time in equal parts of about `each`."""
    count = max(1, round(seconds / each)) if seconds else 0
    return [(number, seconds / count) for number in range(count)]


@contextlib.contextmanager
def mounted() -> Generator[Path]:
    """A folder for the runs, on a small disk of its own where that is possible."""
    with tempfile.TemporaryDirectory(prefix="attack-", ignore_cleanup_errors=True) as name:
        (disk := Path(name) / "disk").mkdir()
        if os.environ.get(MOUNTED):
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(disk)], check=True)
        try:
            yield disk
        finally:
            if os.environ.get(MOUNTED):
                subprocess.run(["umount", "-l", str(disk)], check=False)


def may_mount() -> bool:
    tried = ["unshare", MOUNTING, "mount", "-t", "tmpfs", "tmpfs", tempfile.gettempdir()]
    return bool(shutil.which("unshare")) and subprocess.run(tried, check=False, capture_output=True).returncode == 0


def report(log: AttackLog, rounds: list[dict], campaigns: list[dict], given, wanted: int) -> int:
    """The table, the bars, and one JSON object."""
    kinds = Counter(violation["kind"] for violation in log.violations)
    latencies, calm, delays, honest = (
        [value for one in rounds for value in one.pop(name)] for name in ("latencies", "calm", "delays", "honest")
    )
    table = Table(title=f"attack, seed {given.seed}")
    for heading in ("attack", "times", "how it was answered or ended", "worst s", "violations"):
        table.add_column(heading)
    for name, tally in log.attacks.items():
        answers = ", ".join(f"{what}: {times}" for what, times in tally.answers.most_common(6))
        bad = f"[red]{tally.violations}[/]" if tally.violations else "0"
        table.add_row(name, str(tally.times), answers, f"{tally.worst_seconds:.2f}", bad)
    Console(width=140).print(table)
    for violation in log.violations:
        print(f"violation: {json.dumps(violation, default=str)[:1200]}")
    health, control = quantile(latencies, 0.999), quantile(delays, 0.999)
    memory = [one["memory"] for one in rounds]
    tried = sum(tally.times > 0 for tally in log.attacks.values())
    enough_tried = tried == wanted or (tried > 0 and given.minutes < WHOLE_MINUTES)
    bars = {
        "attacks were tried": (enough_tried, f"{tried} of {wanted}"),
        "no hang without a sentence": (not kinds["hang"], kinds["hang"]),
        "no ticket lost or doubled": (not kinds["tickets"], kinds["tickets"]),
        "no silent corruption": (not kinds["corruption"], kinds["corruption"]),
        "no unauthorised control call": (not kinds["control"], kinds["control"]),
        "the server lives, no 5xx but 503, no bug logged": (not kinds["server"], kinds["server"]),
        "every end has a sentence and an exit code": (not kinds["sentence"], kinds["sentence"]),
        "nothing left behind": (not kinds["leftovers"], kinds["leftovers"]),
    }
    if rounds:
        grown = [f"{one['before'] >> 20} -> {one['after'] >> 20} MiB" for one in memory]
        bars |= {
            "/health p99.9 under 100 ms": (health < HEALTH_SECONDS, f"{1000 * health:.1f} ms of {len(latencies)}"),
            "honest answers within 30 s": (
                max(honest, default=math.inf) < HONEST_SECONDS,
                f"{max(honest, default=math.inf):.2f} s of {len(honest)}",
            ),
            "memory back where it was": (all(enough(one["before"], one["after"]) for one in memory), grown),
        }
    for bar, (cleared, figure) in bars.items():
        print(f"{'ok    ' if cleared else 'missed'}  {bar}: {figure}")
    for slow in [line for one in rounds for line in one["slow_health"]][:12]:
        print(f"        /health {slow}")
    if rounds:
        quiet = f"/health p99.9 {1000 * quantile(calm, 0.999):.1f} ms of {len(calm)} without attacks"
        print(f"        the machine's share: {quiet}, an idle sleep late by {1000 * control:.1f} ms")
    result = {
        "title": "attack",
        "cleared": all(cleared for cleared, _ in bars.values()),
        "seed": given.seed,
        "minutes": given.minutes,
        "only": given.only,
        "bars": {bar: {"cleared": cleared, "figure": figure} for bar, (cleared, figure) in bars.items()},
        "health_ms": {share: 1000 * quantile(latencies, float(share)) for share in ("0.5", "0.99", "0.999", "1")},
        "calm_health_ms": {share: 1000 * quantile(calm, float(share)) for share in ("0.5", "0.99", "0.999", "1")},
        "idle_sleep_late_ms": {share: 1000 * quantile(delays, float(share)) for share in ("0.5", "0.99", "0.999", "1")},
        "attacks": {name: vars(tally) for name, tally in log.attacks.items()},
        "violations": log.violations,
        "servers": rounds,
        "trainings": campaigns,
        "notes": log.notes,
        **machine(),
    }
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(result, indent=2, default=str) + "\n", encoding="utf-8")
    print(json.dumps(result, default=str))
    return 0 if result["cleared"] else 1


if __name__ == "__main__":
    sys.exit(wired() if WIRED in sys.argv[1:2] else main())
