"""The run files of examples/seeds/async_rl_loop train, on the package's tiny model and a few rows."""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest

import paceline
from child_processes import run
from paceline.config import load as load_config
from paceline.config.keys import key_schema
from paceline.util.importing import import_object

PAGE = Path(__file__).parents[3] / "docs" / "seeds" / "async_rl_loop.md"
FOLDER = Path(__file__).parents[3] / "examples" / "seeds" / "async_rl_loop"
SHARED = Path(__file__).parents[4] / "shared" / "data" / "gsm8k" / "train.jsonl"
ROWS = [
    {"question": f"{n}+{n}?", "answer": f"Twice {n} is {n}+{n} = <<{n}+{n}={2 * n}>>{2 * n}.\n#### {2 * n}"}
    for n in range(40)
]
SHORT = {
    "model": "paceline:quickstart",
    "steps": 2,
    "batch_size": 16,
    "sampling": {"max_tokens": 12},
    "filters": {"zero_advantage": False},
    "eval": {"every": 2, "examples": 4, "concurrency": 4},
    "device": "cpu",
    "quiet": True,
}
"""Settings that make a run short, with a model of which no right answer is expected."""


@pytest.fixture(scope="module")
def questions(tmp_path_factory) -> Path:
    """A few short rows: of the dataset where it is beside the checkout, else made up."""
    rows = ROWS
    if SHARED.exists():
        given = map(json.loads, SHARED.read_text(encoding="utf-8").splitlines())
        rows = sorted(given, key=lambda row: len(row["question"]) + len(row["answer"]))[:40]
    file = tmp_path_factory.mktemp("gsm8k") / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def trained(name: str, questions: Path, runs: Path, **settings) -> list[dict]:
    """The metrics of a short run of an example."""
    flags = ["--env.0.dataset", str(questions), "--env.0.eval_dataset", str(questions)]
    result = paceline.train(load_config(FOLDER / name, flags), runs=str(runs), name="run", **SHORT | settings)
    assert result.outcome.status == "finished"
    lines = map(json.loads, (runs / "run" / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "optimizer_steps" in line]  # one evaluates the untrained model


def test_a_warm_up_lowers_the_loss_of_the_solutions_and_phase_two_starts_from_its_export(questions, tmp_path):
    keys = {"trainer": {"optimizer": {"lr": 1e-3}}, "eval": {"every": 0}}
    steps = trained("gsm8k_warm_up.toml", questions, tmp_path / "warm-up", **keys | {"steps": 6})
    assert steps[-1]["loss/ce"] < 0.8 * steps[0]["loss/ce"]
    phase_two = {"staleness": 2, "trainer": {"minibatches": 2}, "model": str(tmp_path / "warm-up" / "run" / "export")}
    steps = trained("gsm8k.toml", questions, tmp_path / "rl", **phase_two)
    assert [step["optimizer_steps"] for step in steps] == [2.0, 4.0]
    assert all(step["staleness/max"] <= 2 for step in steps)
    assert all(1 <= step["metric/gsm8k/tries"] <= 2 for step in steps)


def test_phase_one_is_one_optimizer_step_a_batch_at_most_one_version_behind(questions, tmp_path, monkeypatch):
    steps = trained("gsm8k.toml", questions, tmp_path)
    assert [step["optimizer_steps"] for step in steps] == [1.0, 2.0]
    assert all(step["staleness/max"] <= 1 and 0 <= step["wait_time_ratio"] <= 1 for step in steps)
    monkeypatch.syspath_prepend(FOLDER.parents[2] / "benchmarks")
    found = [importlib.import_module("gsm8k").marks(tmp_path / "run", step) for step in (0, 2)]
    assert all(len(marks) == 4 and set(marks) <= set("12.") for marks in found), found


def named_here(title: str, column: int) -> list[str]:
    """What a table of the page says things are called here."""
    table = PAGE.read_text(encoding="utf-8").partition(f"## {title}\n")[2].partition("\n## ")[0]
    cells = [line.split(" | ")[column] for line in table.splitlines() if line.startswith("| `")]
    return re.findall(r"`([\w./]+)`", " ".join(cells))


def test_the_page_names_keys_and_metrics_that_exist(questions, tmp_path):
    keys = [key for key in named_here("Settings", 2) if not key.startswith("clip_")]
    assert len(keys) >= 12
    for key in keys:
        assert key_schema(key), key
    names = {name.replace("ENV", "gsm8k") for name in named_here("Metrics", 1)} - {"failed/KIND"}
    assert len(names) > 15
    (last, *_) = reversed(trained("gsm8k.toml", questions, tmp_path))
    assert names - last.keys() <= {"kl", "staleness/min", "mismatch_kl"}  # not in every run


def test_the_token_in_example_makes_rows_that_train(questions, tmp_path):
    rows = tmp_path / "rows.jsonl"
    command = [sys.executable, str(FOLDER / "token_in.py"), str(questions), str(rows), "--model", "paceline:quickstart"]
    made = run(command)
    assert made.returncode == 0, made.stderr
    written, asked = (list(map(json.loads, file.read_text().splitlines())) for file in (rows, questions))
    assert [row["answer"] for row in written] == [
        row["answer"].rpartition("#### ")[2].replace(",", "") for row in asked
    ]
    steps = trained("token_in.toml", rows, tmp_path)
    assert all(step["turns"] == 1 for step in steps)


@pytest.mark.parametrize(
    ("text", "reward"),
    [("so \\boxed{1080}", 1), ("#### $1,080", 1), ("1080", 0), ("\\boxed{7}", 0), ("\\boxed{", 0), ("", 0)],
)
def test_the_token_in_scorer_reads_the_final_number(text, reward):
    score = import_object(f"{FOLDER / 'token_in.py'}:score")
    assert score({"answer": "1080"}, text) == reward
