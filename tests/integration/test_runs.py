"""Real runs of the real command: learning, killing, resuming, stopping, refusing.

What must die, learn at full speed or be told by a signal has a process of its own; whatever else a command does is
called in this one, where torch is loaded already.
"""

import json
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from child_processes import Launched, run

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "examples" / "quickstart.toml")
ALONE = ["--trainer.threads", "1"]
"""Threads that wait for each other by spinning starve on cores that other tests use too."""
SMALL = ["--batch-size", "32", "--eval.every", "0", "--engine.max-running", "32", "--engine.max-context", "64", *ALONE]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "paceline", *arguments]


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def metrics(folder: Path, name: str = "quickstart") -> list[dict]:
    return lines(folder / "runs" / name / "metrics.jsonl")


def test_at_staleness_0_sampling_and_training_take_turns(tmp_path, here):
    done = here("train", QUICKSTART, *SMALL, "--staleness", "0", "--steps", "4", "--engine.in-flight", "0")
    assert done.returncode == 0, done.stderr
    steps = [line for line in metrics(tmp_path) if line["step"]]
    assert max(line["overlap_ratio"] for line in steps) == 0
    assert max(line["staleness/max"] for line in steps) == 0


def test_an_evaluation_may_sample_otherwise_than_training(tmp_path, here):
    own = ["--eval.every", "1", "--eval.examples", "8", "--eval.sampling.max_tokens", "1", "--sampling.max_tokens", "8"]
    done = here("train", QUICKSTART, *SMALL, *own, "--steps", "1")
    assert done.returncode == 0, done.stderr
    held_out, trained = (
        [line[name] for line in metrics(tmp_path) if name in line] for name in ("eval/reverse-text/length", "length")
    )
    assert held_out == [1.0, 1.0]  # before the first step, and after it
    assert trained[0] > 2


def test_the_quickstart_learns_while_sampling_and_training_overlap(tmp_path):
    """Half of its steps, and more than half of the way: `make demo` runs all of it."""
    half = ["--steps", "15", "--eval.every", "15"]
    done = run(command("train", QUICKSTART, "--staleness", "2", *half, *ALONE), timeout=880, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    steps = metrics(tmp_path)
    exact = [line["eval/reverse-text/exact"] for line in steps if "eval/reverse-text/exact" in line]
    assert exact[0] <= 0.30
    assert exact[-1] >= 0.60
    assert max(line["overlap_ratio"] for line in steps[1:]) > 0.05
    assert max(line["staleness/max"] for line in steps[1:]) <= 2
    assert len(done.stdout.strip().splitlines()[-3:]) == 3
    saved = tmp_path / "runs" / "quickstart"
    assert (saved / "rewards.png").read_bytes().startswith(b"\x89PNG")
    assert (saved / "export" / "model.safetensors").is_file()
    assert (saved / "export" / "tokenizer.json").is_file()


def test_a_resume_that_is_refused_costs_nothing(tmp_path, here):
    """Going back to an older checkpoint cuts what came after it, but only once that checkpoint is taken up."""
    arguments = ["train", QUICKSTART, *SMALL, "--steps", "3", "--checkpoint.every", "1", "--checkpoint.keep", "5"]
    assert here(*arguments).returncode == 0
    run = tmp_path / "runs" / "quickstart"
    before = {path: path.read_text() for path in (run / "metrics.jsonl", run / "tickets.jsonl", run / "config.toml")}
    saved = sorted(path.name for path in (run / "checkpoints").iterdir())
    older = ["--resume", str(run / "checkpoints" / "step-000001")]
    refused = here(*arguments, *older, "--env.0.name", "another")
    assert refused.returncode == 1
    assert "knows no environment" in refused.stderr
    assert {path: path.read_text() for path in before} == before
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == saved
    assert here(*arguments, *older).returncode == 0
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3]


def test_ctrl_c_leaves_a_run_that_goes_on(tmp_path, here):
    arguments = ["train", QUICKSTART, *SMALL, "--steps", "400"]
    with Launched(command(*arguments), cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if re.match(r"step +3/", line):
                process.send_signal(signal.SIGINT)
                break
        rest = process.stdout.read()
    assert process.returncode == 130
    assert "--resume latest" in rest.splitlines()[-1]
    reached = metrics(tmp_path)[-1]["step"]
    assert 3 <= reached < 400
    done = here(*arguments, "--steps", str(reached + 2), "--resume", "latest")
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in metrics(tmp_path)] == list(range(1, reached + 3))


def test_a_second_run_into_the_same_directory_is_refused(tmp_path, here):
    arguments = ["train", QUICKSTART, *SMALL, "--steps", "1"]
    assert here(*arguments).returncode == 0
    before = (tmp_path / "runs" / "quickstart" / "metrics.jsonl").read_text()
    refused = here(*arguments)
    assert refused.returncode == 2
    assert "already holds a run" in refused.stderr
    # An overwrite that cannot even load its model must not cost the old run.
    broken = here(*arguments, "--overwrite", "--model.name", "./nowhere")
    assert broken.returncode == 2
    assert (tmp_path / "runs" / "quickstart" / "metrics.jsonl").read_text() == before
    assert here(*arguments, "--overwrite").returncode == 0


REWARDS = """
async def raises(row, seat):
    reply = await seat.chat(row["messages"])
    return row["anwser"] == reply.text

async def not_a_number(row, seat):
    await seat.chat(row["messages"])
    return float("nan")

async def letters(row, seat):
    reply = await seat.chat(row["messages"])
    return reply.text.count("ba") / 4
"""


@pytest.fixture
def user(tmp_path):
    """A user's folder: rewards, rows, and a run file over them."""
    (tmp_path / "rewards.py").write_text(REWARDS)
    row = {"messages": [{"role": "user", "content": "reverse: banana"}], "answer": "ananab"}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(20)))
    (tmp_path / "run.toml").write_text(
        "name = 'mine'\nbatch_size = 16\ngroup_size = 4\nsteps = 2\n[sampling]\nmax_tokens = 8\n"
        "[[env]]\ntype = 'custom'\nname = 'mine'\nimport_path = 'rewards.py:letters'\ndataset = 'rows.jsonl'\n"
    )
    return tmp_path


def test_a_function_of_the_users_own_trains(user, here):
    done = here("train", "run.toml")
    assert done.returncode == 0, done.stderr
    assert metrics(user, "mine")[-1]["step"] == 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--model.name", "./no-such-model"], "no such folder"),
        (["--model.name", "nobody/knows-this"], "nobody/knows-this"),
        (["--env.0.dataset", "rows.xyz"], "dataset rows.xyz: not a .json, .jsonl, .csv"),
        (["--env.0.dataset", "missing.jsonl"], "no such file"),
        (["--env.0.dataset", "bad.jsonl"], "bad.jsonl:2"),
        (["--env.0.import_path", "rewards.py:raises"], "KeyError: 'anwser'"),
        (["--env.0.import_path", "rewards.py:not_a_number"], "finite number"),
        (["--env.0.import_path", "rewards.py:nothing"], "has no `nothing`"),
        (["--group-size", "5"], "not a multiple of group_size"),
        (["--trainer.learning_rate", "1"], "trainer.optimizer.lr"),
        (["--device", "cuda"], "sees no GPU"),
        (["--resume", "latest"], "no checkpoint"),
    ],
)
def test_bad_input_gets_one_sentence(user, here, arguments, sentence):
    row = (user / "rows.jsonl").read_text().splitlines()[0]
    (user / "bad.jsonl").write_text(f'{row}\n{{"messages": \n')
    done = here("train", "run.toml", *arguments)
    assert done.returncode in (1, 2)
    assert sentence in done.stderr
    assert "Traceback (most recent call last)" not in done.stderr, "frames are the user's, if any are shown"
    assert "src/paceline" not in done.stderr
    assert sum(line.startswith("paceline: ") for line in done.stderr.splitlines()) == 1


def test_the_command_itself_complains_and_tells_the_shell(user):
    done = run(command("train", "run.toml", "--group-size", "5"), cwd=user)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("paceline: ")
    assert done.stderr.count("\n") == 1


LIBRARY = """
import paceline
from paceline.config import EvalConfig
from paceline.config.env import CustomEnvConfig

class Shout(paceline.SingleTurn):
    def examples(self, split):
        return [{"messages": [{"role": "user", "content": f"reverse: {w}"}]} for w in ("cab", "dab", "tab", "crab")]

    def score(self, example, reply):
        return paceline.Outcome.solo(reply.text.count("ab"))

config = paceline.RunConfig(name="library", steps=2, batch_size=16, group_size=4, eval=EvalConfig(every=0),
                            sampling={"max_tokens": 12}, env=[CustomEnvConfig(name="shout", import_path="here:Shout")])
result = paceline.train(config, environments={"shout": Shout()})
print(result.outcome.status, result.metrics[-1]["step"])
"""


def test_fifteen_lines_of_python_do_what_a_run_file_does(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "library.py").write_text(LIBRARY)
    runpy.run_path("library.py", run_name="__main__")
    assert capsys.readouterr().out.splitlines()[-1] == "finished 2"
    assert (tmp_path / "runs" / "library" / "export" / "config.json").is_file()


def test_check_prints_a_file_that_resolves_to_itself(tmp_path, here):
    first = here("check", QUICKSTART, "--staleness", "3")
    (tmp_path / "resolved.toml").write_text(first.stdout)
    second = here("check", "resolved.toml")
    assert first.returncode == second.returncode == 0
    assert first.stdout == second.stdout
    assert "staleness = 3" in first.stdout
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("extra", [["--model.lora.rank", "4"], ["--model.dtype", "bfloat16"]])
def test_lora_and_bf16_run_end_to_end(tmp_path, here, extra):
    """Synchronously, so that no reply spans a swap: only then do engine and trainer speak of the same numbers."""
    brief = ["--batch-size", "8", "--steps", "2", "--staleness", "0"]  # bfloat16 is slow where the CPU lacks it
    done = here("train", QUICKSTART, *SMALL, *brief, *extra)
    assert done.returncode == 0, done.stderr
    AutoModelForCausalLM.from_pretrained(tmp_path / "runs" / "quickstart" / "export")
    fresh = [line["mismatch_kl"] for line in metrics(tmp_path) if "mismatch_kl" in line]
    assert max(fresh) < (1e-6 if "lora" in extra[0] else 1e-2)


def test_two_environments_share_a_batch_by_weight(tmp_path, here):
    (tmp_path / "two.toml").write_text(
        f"include = ['{os.path.relpath(QUICKSTART, tmp_path)}']\nname = 'two'\nsteps = 4\n"
        "[[env]]\ntype = 'reverse-text'\nweight = 3\n[[env]]\ntype = 'arithmetic'\ngroup_size = 4\n"
        "[env.algo]\ntype = 'max_rl'\n"
    )
    done = here("train", "two.toml", *SMALL)
    assert done.returncode == 0, done.stderr
    drawn = [r for r in lines(tmp_path / "runs" / "two" / "tickets.jsonl") if r["state"] == "in flight"]
    places = {"reverse-text": 8, "arithmetic": 4}
    share = {env: sum(places[env] for r in drawn if r["env"] == env) for env in places}
    # Equal weights would give 1. A group of four slips in where one of eight does not fit, so it is not quite 3.
    assert 1.5 < share["reverse-text"] / share["arithmetic"] < 4.5
