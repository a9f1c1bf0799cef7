"""Every command of README and docs is run as it is printed, with fewer steps, or is named below with the reason."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import paceline
from child_processes import Launched, run
from docs_blocks import blocks, command_lines
from paceline.commands import main
from run_once import once

COMMANDS = sorted(
    {shlex.join(words[1:]) for b in blocks("bash") for words in command_lines(b) if words[0] == "paceline"}
)
STOPPED = {"serve", "ui"}
"""These go on until they are interrupted."""
NOT_RUN = {
    "serve MODEL-4bit --model.dtype bfloat16": "tests/mlx serves quantised models; torch has none",
    "up": "needs a machine of its own; tests/integration/test_ray.py starts clusters",
    "up --join HOST:6379": "needs a second machine",
    "train my-run.toml --placement ray --cluster.address HOST:6379 --cluster.engines 24": "needs a cluster",
    "status": "needs a cluster",
    "train examples/seeds/async_grpo/run.toml": "starts eight processes; `make smoke` trains it",
    "down": "would end the clusters of other tests",
    "top runs/quickstart": "takes the terminal; tests/unit/observe/test_terminal.py",
    "top runs": "takes the terminal; tests/unit/observe/test_terminal.py",
    "play arenas/tic_tac_toe --seat o": "asks at the keyboard; tests/integration/test_play.py",
    "play arenas/tic_tac_toe --model runs/tic-tac-toe/export --reveal": "asks at the keyboard; test_play.py",
    "replay runs/my-run --dump 12": "needs a step that was left out; tests/integration/test_replay_command.py",
    "eval ./my-model --env gsm8k --dataset train.jsonl --eval-dataset test.jsonl": "tests/unit/envs/test_tasks.py",
    "diff runs/cpu runs/gpu --tolerance 1e-3": "the same command is run with runs/a and runs/b",
}
SHORTER = {
    "train": ["--steps", "2", "--batch-size", "16", "--eval.every", "0"],
    "ab": ["--steps", "2", "--batch-size", "16", "--eval.every", "0"],
    "eval": ["--examples", "4"],
}
"""What makes a command quick and leaves all else as it is."""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A folder with the files and runs that the pages speak of."""
    return once(tmp_path_factory, "documented", _prepare)


def _prepare(folder: Path) -> None:
    above = Path.cwd()
    os.chdir(folder)
    try:
        assert main(["init", "reward", "--name", "my-run"]) == 0
        text = Path("my-run.toml").read_text()
        Path("my-run.toml").write_text(text.replace("[model]\n", "[model]\nlora.rank = 8\n"))
        small = ["--steps", "2", "--batch-size", "16", "--eval.every", "0", "--checkpoint.every", "1", "--quiet"]
        assert main(["train", "my-run.toml", *small, "--record.batches", "2"]) == 0
        assert main(["train", "quickstart", *small]) == 0
        for name in ("a", "b", "demo-0", "reward", "algorithm-grpo"):
            shutil.copytree("runs/quickstart", f"runs/{name}")
        shutil.copytree("runs/quickstart/export", "my-model")
        shutil.copytree("runs/quickstart/export", "teacher")
        _write_pages_files()
    finally:
        os.chdir(above)


def _write_pages_files() -> None:
    """The files of environments.md, as the page says to make them."""
    rows, _ = (
        b for b in blocks("bash") if b.page == "environments.md" and ("python -" in b.text or "rollout" in b.text)
    )
    exec(re.search(r"(?s)<<'END'\n(.*)\nEND", rows.text)[1], {})
    Path("tool.py").write_text(next(b.text for b in blocks("python") if b.page == "environments.md"))
    Path("tool.toml").write_text(next(b.text for b in blocks("toml") if 'name = "tool"' in b.text))


def test_what_is_not_run_is_still_printed_somewhere():
    assert [command for command in NOT_RUN if command not in COMMANDS] == []


@pytest.mark.parametrize("command", [command for command in COMMANDS if command not in NOT_RUN])
def test_the_command_works(prepared, tmp_path, command):
    folder = shutil.copytree(prepared, tmp_path / "folder")
    words = shlex.split(command.replace("@200", "@2").replace("runs/my-run 40", "runs/my-run 2"))
    if words[0] == "init":
        assert main(["init", words[1], "--to", str(tmp_path / "new")]) == 0
        return
    if "reward.toml" in words:
        assert main(["init", "reward", "--to", str(folder), "--force"]) == 0
    words += SHORTER.get(words[0], [])
    if "--resume" in words:  # goes on with what the same command began
        begun = [word for word in words if word not in ("--resume", "latest")]
        assert run([sys.executable, "-m", "paceline", *begun, "--overwrite"], cwd=folder).returncode == 0
        words += ["--steps", "3"]
    elif words[0] == "train":
        words.append("--overwrite")
    if words[0] == "export" and "-o" not in words:
        shutil.rmtree(folder / "runs/my-run/export")
    if words[0] in STOPPED:
        _run_until_ready([*words, "--port", "0"], folder)
        return
    done = run([sys.executable, "-m", "paceline", *words], cwd=folder)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "Traceback" not in done.stderr


def _run_until_ready(words: list[str], folder: Path) -> None:
    """Start it, wait for the line with its address, and interrupt it."""
    if "0.0.0.0" in words:  # what the page sets in the environment
        words = [*words, "--api-key", "KEY"]
    command = [sys.executable, "-m", "paceline", *words]
    with Launched(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder) as process:
        try:
            assert process.stdout is not None
            assert re.search(r"http://\S+", process.stdout.readline())
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=240)
        except BaseException:
            process.kill()
            raise
    assert process.returncode in (0, 130), errors
    assert "Traceback" not in errors


# -- Python ------------------------------------------------------------------------------------------------------------


def shown(page: str, start: str) -> str:
    return next(b.text for b in blocks("python") if b.page == page and b.text.startswith(start))


def test_the_query_of_the_record_finds_rollouts(prepared, monkeypatch, capsys):
    monkeypatch.chdir(prepared)
    exec(shown("record.md", "from paceline.observe.record").replace(', text="igtoc"', ""), {})
    assert capsys.readouterr().out


def test_the_task_that_others_write_differently_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = shown("coming-from.md", "import paceline").replace("steps=30", "steps=1")
    scope: dict = {}
    exec(code, scope)
    assert scope["result"].outcome.status == "finished"
    Path("exact.py").write_text(code.partition("result =")[0])
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in scope["rows"]))
    Path("exact.toml").write_text(next(b.text for b in blocks("toml") if 'name = "exact"' in b.text))
    assert main(["train", "exact.toml", "--steps", "1", "--eval.every", "0", "--quiet"]) == 0


def test_a_credit_function_as_shown_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my_credit.py").write_text(shown("algorithms.md", "def credit"))
    table = next(b.text for b in blocks("toml") if "my_credit.py" in b.text)
    Path("run.toml").write_text(f'[[env]]\ntype = "reverse-text"\n{table}')
    assert main(["train", "run.toml", "--steps", "1", "--batch-size", "16", "--eval.every", "0", "--quiet"]) == 0


def test_an_environment_and_an_algorithm_of_the_readme_train(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for start in ("# parrot.py", "# mine.py"):
        Path(start[2:]).write_text(shown("README.md", start))
    echo = next(b.text for b in blocks("toml") if b.text.startswith("# parrot.toml"))
    algorithm = next(b.text for b in blocks("toml") if "mine.py:leave_one_out" in b.text)
    Path("parrot.toml").write_text(f"{echo}\n{algorithm}")
    result = paceline.train("parrot.toml", steps=1, batch_size=16, eval={"every": 0}, quiet=True)
    assert result.outcome.status == "finished"
