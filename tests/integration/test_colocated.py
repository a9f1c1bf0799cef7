"""`placement = "colocated"`: each rank hosts an engine that sleeps while it trains. Real processes, joined by gloo."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from child_processes import Launched, LaunchedPaceline
from paceline.config import load
from paceline.errors import PacelineError
from paceline.model import fingerprint
from paceline.observe.monitor import read_jsonl
from paceline.runtime import train
from paceline.runtime.colocated.place import colocated_placement
from paceline.runtime.colocated.ranks import (
    GREETING,
    RankInfo,
    RankSockets,
    accept_ranks,
    connect_to_rank_0,
    find_rank,
    open_listener,
)
from paceline.runtime.session import run_session

LONG = pytest.mark.skipif(os.environ.get("PACELINE_SCALE") != "1", reason="takes half a minute: `make scale`")
QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.toml"
RUN_FILE = """
include = ["{quickstart}"]
placement = "colocated"
name = "home"
steps = 3
batch_size = 32
[trainer]
threads = 1
[trainer.parallel]
shard = "full"
[engine]
max_running = 64
max_context = 64
[eval]
every = 0
[checkpoint]
every = 1
"""
TWO = ("--trainer.parallel.ranks", "2")
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.fixture
def run_file(tmp_path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(RUN_FILE.format(quickstart=os.path.relpath(QUICKSTART, tmp_path)))
    return "run.toml"


@pytest.fixture
def born(monkeypatch) -> list[subprocess.Popen]:
    """The other ranks, as they are started; they need not import everything first."""
    started: list[subprocess.Popen] = []

    class Noted(LaunchedPaceline):
        def __init__(self, *given, **more) -> None:
            super().__init__(*given, **more)
            if self.knows(self.args[1:]):
                started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    return started


def clean(root: Path, batches: int) -> None:
    """Every ticket that ended did so once, and every step trained a whole batch."""
    records = read_jsonl(root / "tickets.jsonl")
    ended = Counter(r["number"] for r in records if r["state"] in ("trained", "dropped"))
    assert set(ended.values()) == {1}
    steps = Counter(r["step"] for r in records if r["state"] == "trained")
    assert set(steps) == set(range(1, batches + 1))
    assert [line["step"] for line in read_jsonl(root / "metrics.jsonl") if line["step"]] == list(range(1, batches + 1))


def reached(root: Path, step: int, seconds: float = 400.0) -> None:
    deadline = time.monotonic() + seconds
    metrics = root / "metrics.jsonl"
    while not (metrics.exists() and any(line["step"] >= step for line in read_jsonl(metrics))):
        assert time.monotonic() < deadline, f"step {step} was not reached"
        time.sleep(0.05)


def holders(log: Path) -> set[int]:
    """Processes that have a rank's log open: the rank itself, and no other for long."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/1"):
        try:
            if link.readlink() == log.resolve():
                found.add(int(link.parts[2]))
        except OSError:
            continue
    return found


def gone(log: Path, seconds: float = 240.0) -> bool:
    deadline = time.monotonic() + seconds
    while holders(log) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not holders(log)


class Watched:
    """A trainer during whose steps a callback looks at the engines."""

    def __init__(self, trainer, pool) -> None:
        self._trainer, self._pool = trainer, pool
        self.stats: list = []

    def __getattr__(self, name: str):
        return getattr(self._trainer, name)

    async def step(self, batch):
        report = await self._trainer.step(batch)
        self.stats += await self._pool.stats()
        return report


@pytest.mark.parametrize("how", ["sharded", pytest.param("lora", marks=LONG)])
def test_engines_sleep_while_ranks_train_and_wake_with_the_same_weights(run_file, born, tmp_path, how):
    more = ["--trainer.parallel.shard=none", "--model.lora.rank=4", "--staleness=0"] if how == "lora" else []
    config = load(run_file, [*TWO, *more]).config
    seen = {}

    @asynccontextmanager
    async def watched(*given):
        async with colocated_placement(RankInfo.self_launched(2), *given) as parts:
            trainer = Watched(parts.trainer, parts.pool)
            object.__setattr__(parts, "trainer", trainer)
            yield parts
            seen.update(policies=await parts.pool.policies(), stats=await parts.pool.stats(), trained=trainer.stats)

    result = run_session(config, watched)
    assert result.outcome.status == "finished", result.outcome.message
    mine, theirs = seen["policies"]
    assert mine == theirs
    assert mine.version == 3
    assert all(engine.tokens > 0 and engine.swaps == 4 and not engine.asleep for engine in seen["stats"])
    assert len(seen["trained"]) == 6
    assert all(engine.asleep and engine.cache_used == 0 and engine.running == 0 for engine in seen["trained"])
    assert [process.wait(240) for process in born] == [0]
    root = tmp_path / "runs" / "home"
    clean(root, 3)
    exported = AutoModelForCausalLM.from_pretrained(root / "export")
    if how == "sharded":  # the export holds the very bits that the engines serve
        assert fingerprint(exported.named_parameters()) == mine.fingerprint


@LONG
def test_a_rank_that_is_killed_ends_the_run_with_a_sentence_and_it_can_be_resumed(run_file, born, tmp_path):
    root = tmp_path / "runs" / "home"

    def kill() -> None:
        reached(root, 2)
        born[0].kill()

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    result = train(load(run_file, [*TWO, "--steps=400"]).config)
    killer.join(240)
    assert result.outcome.status == "failed"
    assert "rank 1 of 2 is lost: it was killed by SIGKILL" in result.outcome.message
    assert "--resume latest" in result.outcome.message
    assert result.outcome.checkpoint is not None
    saved = int(result.outcome.checkpoint.name.removeprefix("step-"))
    assert saved >= 1
    again = train(load(run_file, [*TWO, f"--steps={saved + 2}", "--resume=latest"]).config)
    assert again.outcome.status == "finished", again.outcome.message
    clean(root, saved + 2)


@LONG
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for orphans in /proc")
def test_no_rank_outlives_the_first_however_that_ends(run_file, tmp_path):
    root = tmp_path / "runs" / "home"
    log = root / ".live" / "rank-1.log"
    command = [sys.executable, "-m", "paceline", "train", run_file, *TWO, "--steps", "400"]
    process = Launched(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    reached(root, 1)
    assert len(holders(log)) == 1
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=400)
    assert process.returncode == 130, said
    assert gone(log)
    done = len(read_jsonl(root / "metrics.jsonl"))
    assert (root / "checkpoints" / f"step-{done:06d}").is_dir()

    process = Launched([*command, "--resume", "latest"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    reached(root, done + 1)
    assert len(holders(log)) == 1
    process.kill()
    process.wait(240)
    assert gone(log)


@LONG
def test_torchrun_starts_the_same_run(run_file, tmp_path):
    """The number of ranks is torchrun's where the run file does not say it."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    command = [*torchrun, "-m", "paceline", "train", run_file, "--resume", "latest"]
    with Launched(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        said, _ = process.communicate(timeout=400)
    assert process.returncode == 0, said
    assert said.count("finished at step 3") == 1
    root = tmp_path / "runs" / "home"
    clean(root, 3)
    assert "ranks = 2" in (root / "config.toml").read_text()
    assert len(list((root / "checkpoints" / "step-000003" / "trainer").glob("*.safetensors"))) == 2


def test_torchrun_and_the_run_file_may_not_contradict_each_other(run_file, monkeypatch):
    config = load(run_file).config
    assert find_rank(config)[1].by_torchrun is False
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    counted, seat = find_rank(config)
    assert (counted.trainer.parallel.ranks, seat.rank, seat.world, seat.local_world_size) == (3, 0, 3, 3)
    with pytest.raises(PacelineError, match=r"started 3 processes, but trainer.parallel.ranks = 2: start 2, or leave"):
        find_rank(load(run_file, TWO).config)
    with pytest.raises(PacelineError, match=r"torchrun started 3 processes: trainer.stream begins a batch before"):
        find_rank(load(run_file, ["--trainer.stream", "--trainer.parallel.shard=none"]).config)


def test_torchrun_is_refused_where_one_process_leads(run_file, monkeypatch):
    for name, value in (TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(PacelineError, match=r'placement = "local" needs one, .* set placement = "colocated"'):
        train(load(run_file, ["--placement=local"]).config)


@pytest.mark.parametrize("host", ["127.0.0.1", ""])
def test_only_ranks_that_know_the_token_are_let_in(host):
    token, wrong = os.urandom(32), os.urandom(32)
    with open_listener(host) as door:
        port = door.getsockname()[1]
        seat = RankInfo(1, 2, "127.0.0.1", 0, 2, by_torchrun=False)
        admitted = []
        clerk = threading.Thread(target=lambda: admitted.extend(accept_ranks(door, 2, token)), daemon=True)
        clerk.start()
        strangers = connect_to_rank_0(seat, port, wrong)
        lost = socket.create_connection(("127.0.0.1", port))
        lost.sendall(GREETING.pack(token, 7, 0))
        known = connect_to_rank_0(seat, port, token)
        clerk.join(240)
        sent_away = [strangers.trainer, strangers.engine, strangers.life, lost]
        assert [stranger.recv(1) for stranger in sent_away] == [b""] * 4
        for purpose in RankSockets._fields:
            getattr(admitted[0], purpose).sendall(purpose.encode())
            assert getattr(known, purpose).recv(16) == purpose.encode()
        known.close()
        admitted[0].close()
