"""A run that an older version wrote opens in the dashboard, is reported on, replayed and resumed.

`run_of_november.tar.xz` holds four LoRA steps of the quickstart, recorded at d59e120 with its rollouts and its newest
checkpoint.
"""

import json
import tarfile
from pathlib import Path

import httpx
import pytest

from recorded_runs import served

ARCHIVE = Path(__file__).with_name("run_of_november.tar.xz")
PAGES = [
    *("runs", "run", "metrics", "lanes", "config", "advice", "replay", "rollouts", "rollouts/one?id=0"),
    *("rollouts/group?id=0", "rollouts/episode?id=0", "rollouts/league", "tickets", "ticket", "tokens?id=0"),
    "tokens/card?id=0&at=20",
]


@pytest.fixture
def run(tmp_path) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "runs" / "quickstart"


def test_every_page_of_the_dashboard_shows_it(run):
    with served(run.parent) as address, httpx.Client(base_url=f"{address}/api/", timeout=120) as client:
        answers = {
            page: client.get(page, params={"run": "quickstart"} | dict(httpx.URL(page).params)) for page in PAGES
        }
        assert {page: answer.status_code for page, answer in answers.items()} == dict.fromkeys(PAGES, 200)
        found = {page: answer.json() for page, answer in answers.items()}
    assert found["run"]["status"]["state"] == "finished"
    assert found["metrics"]["columns"]["step"][-1] == 4
    assert found["rollouts"]["total"] == 4 * 8 + 3 * 128  # trained, and evaluated at steps 0, 2 and 4


@pytest.mark.parametrize("command", [["report"], ["top"], ["doctor"], ["replay", "4"]])
def test_the_commands_read_it(here, run, command):
    done = here(command[0], str(run), *command[1:])
    assert done.returncode == 0, done.stderr


def test_it_resumes_from_its_checkpoint(here, run):
    """The optimizer's moments, the adapters and the ledger go on: steps 5 and 6 follow, and no ticket trains twice."""
    done = here("train", str(run / "config.toml"), "--resume", "latest", "--steps", "6", "--trainer.threads", "1")
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in lines(run / "metrics.jsonl") if line["step"] > 4] == [5, 6]
    ended = [line["number"] for line in lines(run / "tickets.jsonl") if line["state"] == "trained"]
    assert len(set(ended)) == len(ended) >= 12
    assert (run / "export" / "adapter").is_dir()


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]
