"""`placement = "processes"`: the bits of `local`, whichever process dies. `benchmarks/chaos.py` does the same for
hundreds of steps, with bad wires, lying graders and a full disk."""

import contextlib
import io
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from child_processes import Launched, LaunchedPaceline
from paceline.config import load
from paceline.errors import PacelineError
from paceline.observe.monitor import read_jsonl
from paceline.runtime import train
from paceline.runtime.processes.supervisor import ManagedProcess, Supervisor

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.toml"
STEPS = 6
RUN_FILE = f"""
include = ["{{quickstart}}"]
steps = {STEPS}
batch_size = 32
staleness = 0
deterministic = true
[eval]
every = 3
examples = 16
[engine]
max_running = 32
max_context = 64
[trainer]
threads = 1
[checkpoint]
every = 2
[record]
batches = {STEPS}
"""
TIMED = ("time", "memory", "tokens/s", "train_tokens/s", "wait_time_ratio", "overlap_ratio", "busy", "engine/")


@pytest.fixture
def run_file(tmp_path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(RUN_FILE.format(quickstart=os.path.relpath(QUICKSTART, tmp_path)))
    return "run.toml"


@pytest.fixture
def forked(monkeypatch) -> None:
    """The processes a supervisor starts here need not import everything first."""
    monkeypatch.setattr(subprocess, "Popen", LaunchedPaceline)


def config_of(run_file: str, *overrides: str):
    return load(run_file, overrides).config


def steps(root: Path) -> list[dict]:
    lines = read_jsonl(root / "metrics.jsonl")
    return [{key: value for key, value in line.items() if not key.startswith(TIMED)} for line in lines]


def batches(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((root / "batches").iterdir())}


class Killer(threading.Thread):
    """Kills each of the three once, when a step is reached."""

    def __init__(self, run: Supervisor, plan: dict[int, str]) -> None:
        super().__init__(daemon=True)
        self.run_, self.plan, self.killed = run, dict(plan), []

    def run(self) -> None:
        metrics = self.run_.directory.metrics_file
        while self.plan:
            step, role = next(iter(self.plan.items()))
            done = -1
            with contextlib.suppress(FileNotFoundError):  # not yet there, or gone as the run begins anew
                done = max((line["step"] for line in read_jsonl(metrics)), default=-1)
            child = self.run_.children.get(role)
            if done >= step and child is not None and child.process.poll() is None:
                child.process.kill()
                self.killed.append(role)
                del self.plan[step]
            time.sleep(0.02)


def test_the_same_bits_as_local_whichever_process_is_killed(run_file, forked):
    """Server, trainer and orchestrator, each killed with SIGKILL in the middle of a run: losses, rewards, held-out
    scores and every stream of every batch are those of an unbroken run in one process. No ticket ends twice."""
    assert train(config_of(run_file, "--name", "whole")).outcome.status == "finished"
    screen = io.StringIO()
    run = Supervisor(config_of(run_file, "--name", "killed", "--placement", "processes"), screen=screen)
    killer = Killer(run, {1: "trainer", 2: "server", 3: "orchestrator"})  # early: a late look still finds it
    killer.start()
    result = run.run()
    assert result.outcome.status == "finished", screen.getvalue()
    assert killer.killed == ["trainer", "server", "orchestrator"]
    killed, whole = Path("runs/killed"), Path("runs/whole")
    assert steps(killed) == steps(whole)
    assert batches(killed) == batches(whole)
    assert len(batches(killed)) == STEPS
    ends = [record["number"] for record in read_jsonl(killed / "tickets.jsonl") if record["state"] == "trained"]
    assert len(ends) == len(set(ends))
    said = screen.getvalue()
    for role in killer.killed:
        assert f"the {role} was killed by SIGKILL; starting it again" in said
    assert re.search(r"going back to step-00000[024]", said)
    assert (result.outcome.export / "model.safetensors").is_file()
    assert not (killed / ".live" / "weights").exists()
    assert [child.process.poll() is not None for child in run.children.values()] == [True] * 3


TASK = """
import importlib.util
import paceline
from words import WORDS  # beside this file

class Task(paceline.SingleTurn):
    def examples(self, split):
        assert importlib.util.find_spec("lies_here") is None, "the current folder is on the path"
        return [{"messages": [{"role": "user", "content": f"copy: {word}"}]} for word in WORDS]

    def score(self, example, reply):
        return paceline.Outcome.solo(float(len(reply.text)))
"""
LOSS = """
import importlib.util

def loss(streams):
    assert importlib.util.find_spec("lies_here") is None, "the current folder is on the path"
    return -streams.advantages * streams.logprobs
"""


def test_the_current_folder_is_on_no_childs_path_and_user_code_is_found(run_file, tmp_path, forked):
    """A `grp.py` that lies there would hide Python's own. The task finds what lies beside it."""
    (tmp_path / "lies_here.py").write_text("")
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "task.py").write_text(TASK)
    (tmp_path / "task" / "words.py").write_text("WORDS = ['ab', 'cd', 'ef', 'gh']")
    (tmp_path / "task" / "losses.py").write_text(LOSS)
    hooks = ("--env.0.type", "custom", "--env.0.import_path", "task/task.py:Task")
    hooks += ("--trainer.loss.type", "custom", "--trainer.loss.import_path", "task/losses.py:loss")
    short = ("--steps", "1", "--batch_size", "8", "--eval.every", "0", "--record.batches", "0")
    result = Supervisor(config_of(run_file, "--name", "clean", "--placement", "processes", *hooks, *short)).run()
    assert result.outcome.status == "finished", result.outcome.message


def test_what_cannot_start_is_said_at_once(run_file, capfd):
    with pytest.raises(PacelineError, match="no such folder"):
        train(config_of(run_file, "--name", "bad", "--placement", "processes", "--model.name", "./nowhere"))


def test_a_full_disk_is_named_where_a_child_died_silently(run_file):
    run = Supervisor(config_of(run_file, "--name", "full", "--placement", "processes"))
    log = run.directory.live / "server.log"
    log.parent.mkdir(parents=True)
    log.touch()
    with subprocess.Popen(["true"]) as ended:
        child = ManagedProcess("server", ended, log)
    assert "cannot be written" not in run._last_output(child)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # no file may grow, as on a full disk
    try:
        said = run._last_output(child)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "cannot be written (File too large)" in said
    assert "--resume latest" in said
    assert "--overwrite" not in said


def test_objects_do_not_travel(run_file):
    with pytest.raises(PacelineError, match="cannot go to another process"):
        train(config_of(run_file, "--placement", "processes"), environments={"reverse-text": None})


@pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="looks at processes by /proc")
def test_ctrl_c_leaves_a_resumable_run_and_no_process_behind(run_file, tmp_path):
    """The first signal ends the run after its step, with a checkpoint; all processes of the run end."""
    command = [sys.executable, "-m", "paceline", "train", run_file, "--name", "stopped", "--placement", "processes"]
    command += ["--steps", "400"]
    with Launched(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        said = next(line for line in process.stdout if re.match(r"step +1/", line))
        assert len(inhabitants(tmp_path)) >= 4
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
    assert said
    assert process.returncode == 130, rest
    assert "interrupted at step" in rest
    assert (tmp_path / "runs/stopped/checkpoints/latest/state.json").is_file()
    assert not inhabitants(tmp_path)


def inhabitants(folder: Path) -> list[int]:
    """Processes whose folder it is, as everybody's is whom a run in it starts; not counting this one."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if (entry / "cwd").readlink() == folder:
                    found.append(int(entry.name))
    return found
