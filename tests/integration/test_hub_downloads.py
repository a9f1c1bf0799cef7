"""Laws of downloads from the hub: a busy hub is asked again, a wrong name is not, and Ctrl-C ends the wait.

The hub is a real HTTP server, the client the hub's own library in a process of its own. Only the seconds are fewer.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import child_processes
from hub_server import hub_of
from paceline.model import resolve

# The hub's library waits by itself, for seconds; what is waited here is written to stdout in their place.
BEGIN = """
import sys, time, types
import huggingface_hub.utils._http as http
http.time = types.SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})
import paceline.util.hub_retry as retrying
from paceline.config.model import ModelConfig
from paceline.errors import PacelineError
from paceline.model import load_model, load_tokenizer
retrying.time = types.SimpleNamespace(sleep=lambda seconds: print("waited", seconds, flush=True))
"""
MODEL = f"""{BEGIN}
config = ModelConfig(name="me/tiny")
try:
    model = load_model(config)
    print("loaded", model.name_or_path, len(load_tokenizer(config)))
except PacelineError as error:
    print(type(error).__name__, str(error).splitlines()[0])
"""
DATASET = f"""{BEGIN}
from paceline.data import DataError, open_rows
try:
    print("loaded", len(open_rows("train@me/sums")))
except DataError as error:
    print("DataError", error)
"""


@pytest.fixture
def hub(tmp_path):
    shutil.copytree(resolve("paceline:quickstart"), tmp_path / "tiny")
    with hub_of(tmp_path / "tiny", "me/tiny") as running:
        yield running


def surroundings(hub, folder: Path) -> dict[str, str]:
    offline = {"HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "*"}
    return os.environ | offline | {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "hf")}


def said(hub, folder: Path, program: str) -> list[str]:
    done = child_processes.run([sys.executable, "-c", program], timeout=240, env=surroundings(hub, folder), cwd=folder)
    assert done.returncode == 0, done.stderr
    assert ("trying again in 10 s (1 of 5), Ctrl-C stops" in done.stderr) == ("waited 10.0" in done.stdout)
    return done.stdout.splitlines()


def test_a_model_comes_whole_through_a_hub_that_is_busy_at_first_and_then_from_the_cache(hub, tmp_path):
    hub.refuse = lambda number: 429 if number <= 4 else None
    *waits, loaded = said(hub, tmp_path, MODEL)
    assert waits[0] == "waited 10.0"
    assert loaded.startswith("loaded me/tiny ")
    hub.refuse = lambda number: 503
    assert said(hub, tmp_path, MODEL) == [loaded]


@pytest.mark.parametrize("status", [429, 503])
def test_a_hub_that_stays_busy_is_asked_six_times_and_then_named(hub, tmp_path, status):
    hub.refuse = lambda number: status
    *waits, end = said(hub, tmp_path, MODEL)
    assert waits == [f"waited {seconds:.1f}" for seconds in (10, 20, 40, 80, 160)]
    assert end.startswith("HubBusy model `me/tiny` cannot be loaded")
    assert str(status) in end


@pytest.mark.parametrize("status", [404, 401])
def test_a_wrong_name_and_a_closed_door_are_told_at_once(hub, tmp_path, status):
    hub.refuse = lambda number: status
    (end,) = said(hub, tmp_path, MODEL)
    assert end.startswith("ModelError model `me/tiny` cannot be loaded (there is no such folder")


def test_a_hub_that_is_not_there_is_waited_for(hub, tmp_path):
    hub.server_close()
    *waits, end = said(hub, tmp_path, MODEL)
    assert (len(waits), end.split()[0]) == (5, "HubBusy")


@pytest.mark.parametrize(("status", "reason"), [(429, "is busy (429, rate limit)"), (503, "answers 503")])
def test_a_dataset_of_a_hub_that_stays_busy_says_so(tmp_path, status, reason):
    pytest.importorskip("datasets")
    with hub_of(tmp_path, "me/sums") as hub:
        hub.refuse = lambda number: status
        *waits, end = said(hub, tmp_path, DATASET)
    assert len(waits) == 5
    assert end == (
        f"DataError dataset train@me/sums: cannot be loaded: the hub {reason}; without a network, name a local file "
        "instead"
    )


def test_a_dataset_comes_through_a_busy_hub_too(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "sums").mkdir()
    rows = [{"question": f"{i}+{i}", "answer": str(2 * i)} for i in range(7)]
    (tmp_path / "sums" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with hub_of(tmp_path / "sums", "me/sums") as hub:
        hub.refuse = lambda number: 429 if number <= 20 else None
        *waits, loaded = said(hub, tmp_path, DATASET)
    assert waits[:2] == ["waited 10.0", "waited 20.0"]
    assert loaded == "loaded 7"


def test_ctrl_c_ends_the_wait(hub, tmp_path):
    """Of a run, with the real seconds: the first Ctrl-C is enough."""
    hub.refuse = lambda number: 429
    patch = BEGIN.replace('print("waited", seconds, flush=True)', "time.sleep(seconds)")
    program = patch + "from paceline.__main__ import main\nmain()"
    flags = ["train", "reverse-text", "--model.name", "me/tiny", "--name", "run", "--steps", "1"]
    environment = surroundings(hub, tmp_path)
    run = subprocess.Popen(
        [sys.executable, "-c", program, *flags], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    )
    try:
        heard = ""
        while "trying again in 10 s" not in heard:
            line = run.stderr.readline()
            assert line, heard
            heard += line
        time.sleep(0.5)  # to be in the wait, which takes ten seconds
        began = time.monotonic()
        run.send_signal(signal.SIGINT)
        run.wait(timeout=60)
        assert run.returncode not in (0, None)
        assert "trying again in 20 s" not in run.stderr.read()
        assert time.monotonic() - began < 60
    finally:
        run.kill()
        run.wait(timeout=30)
