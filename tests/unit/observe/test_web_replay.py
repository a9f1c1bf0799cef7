"""The replay page's server: who may start a process, with which settings, how it ends, and what its result says."""

import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
from test_web import Client

from paceline.config import load
from paceline.observe.web import build_app
from paceline.observe.web.replay import CHECKPOINT, ReplayProcess, ReplayRunner, result_key
from paceline.observe.web.replay_result import ReplayResult, change_flags, form_fields
from recorded_runs import Told
from replayable_run import replayable

TIGHT = {"trainer.loss.type": "ppo", "trainer.loss.clip_low": 0.0, "trainer.loss.clip_high": 0.0}
OURS = {"Content-Type": "application/json", "Origin": "http://127.0.0.1:8200", "Sec-Fetch-Site": "same-origin"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return replayable(tmp_path_factory)


@pytest.fixture(scope="module")
def told(run):
    """What the command prints for step 3, as it was and with tight bounds."""
    from paceline.commands.replay import as_json, replay

    def of(*overrides: str) -> bytes:
        config = load(run / "config.toml", overrides).config
        return as_json(run, replay(run, 3, config), config)

    return of(), of("--trainer.loss.type=ppo", "--trainer.loss.clip_low=0", "--trainer.loss.clip_high=0")


class App:
    """The app over a folder, asked as a browser would."""

    def __init__(self, folder: Path, key: str | None = None) -> None:
        self.app = build_app(folder, key)
        self.app.state.replays = self.desk = ReplayRunner()

    def ask(self, method: str, path: str, **options) -> httpx.Response:
        return Client(self.app).request(method, f"/api/{path}", **options)

    def get(self, path: str, **params) -> dict:
        answer = self.ask("GET", path, params=params)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def start(self, run: str = "kept", headers: dict | None = None, **body) -> httpx.Response:
        content = json.dumps(body or {"step": 3})
        return self.ask("POST", "replay/start", params={"run": run}, content=content, headers=headers or OURS)


@pytest.fixture
def app(run):
    return App(run.parent)


@pytest.fixture
def shown(app, run, told):
    """An app that has both results."""
    path = run.resolve()
    for data, changes in zip(told, ({}, TIGHT), strict=True):
        app.desk.results.put(path, result_key(3, changes), ReplayResult(data, 3, changes))
    return app


def processes(run: Path) -> list[int]:
    """Replays of a run that are going on now."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"replay" in words and str(run).encode() in words:
                found.append(int(entry.name))
    return found


def until(condition, seconds: float = 240.0):
    """What the condition gives once it gives something."""
    pause = threading.Event()
    for _ in range(int(seconds / 0.02)):
        if value := condition():
            return value
        pause.wait(0.02)
    raise AssertionError("it did not come")


# -- what may be asked for --------------------------------------------------------------------------------------------


def test_the_page_is_told_which_steps_weights_and_settings_there_are(app):
    answer = app.get("replay", run="kept")
    assert answer["steps"] == [1, 2, 3]
    assert answer["checkpoints"] == [2, 3]
    assert answer["job"] is None
    assert {one["key"]: one["value"] for one in answer["settings"] if not one["of"]}["trainer.kl.coef"] == 0.1
    assert CHECKPOINT.fullmatch("step-12.part") is None


def test_no_setting_that_is_offered_names_code(run):
    for setting in form_fields(load(run / "config.toml").config.model_dump()):
        assert "custom" not in [*setting.options, setting.of]
        assert "import" not in setting.key


def test_every_offered_setting_becomes_a_flag_that_sets_just_that(run):
    table = load(run / "config.toml").config.model_dump(exclude_none=True)
    for setting in form_fields(table):
        value = {"choice": setting.options and setting.options[-1], "flag": True, "integer": 7, "number": 0.5}[
            setting.kind
        ]
        if setting.key.endswith("dual_clip"):
            value = 3.0
        changes = {setting.key: value} | ({"trainer.loss.type": setting.of} if setting.of else {})
        found = load(run / "config.toml", change_flags(run / "config.toml", table, changes)).config.trainer
        for name in setting.key.split(".")[1:]:
            found = getattr(found, name)
        assert found == value, setting.key


@pytest.mark.parametrize(
    "asked",
    [
        {"model.name": "/elsewhere"},
        {"trainer.loss.import_path": "os.system"},
        {"trainer.loss.type": "custom"},
        {"trainer.optimizer.lr": 1.0},
        {"--help": True},
        {"trainer.loss.low=1 --model.name": 1.0},
        {"trainer.loss.clip_low": 0.1},
        {"trainer.loss.low": "0.1 --model.name=x"},
        {"trainer.loss.low": True},
        {"trainer.loss.low": -1.0},
        {"trainer.loss.low": None},
        {"trainer.loss.low": [1]},
        {"trainer.fixed_length": 1.5},
        {"trainer.normalise": "words"},
        {"trainer.clip_skip_threshold": 5.0},
    ],
)
def test_a_name_or_value_that_does_not_belong_is_refused_with_a_sentence(app, asked):
    answer = app.start(step=3, settings=asked)
    assert answer.status_code == 400
    assert answer.json()["error"]
    assert app.get("replay/job", run="kept")["job"] is None


def test_infinity_is_no_number(app):
    content = '{"step": 3, "settings": {"trainer.loss.low": 1e999}}'
    answer = app.ask("POST", "replay/start", params={"run": "kept"}, content=content, headers=OURS)
    assert answer.status_code == 400


@pytest.mark.parametrize(
    "headers",
    [
        OURS | {"Origin": "http://evil.example"},
        OURS | {"Origin": "null"},
        OURS | {"Origin": "http://127.0.0.1:9"},
        OURS | {"Sec-Fetch-Site": "cross-site"},
        OURS | {"Sec-Fetch-Site": "same-site"},
        OURS | {"Content-Type": "text/plain"},
        OURS | {"Content-Type": "application/x-www-form-urlencoded"},
    ],
)
def test_only_our_own_page_starts_or_ends_a_process(app, headers):
    assert app.start(headers=headers).status_code in (403, 415)
    answer = app.ask("POST", "replay/cancel", params={"run": "kept"}, content="{}", headers=headers)
    assert answer.status_code in (403, 415)
    assert app.get("replay/job", run="kept")["job"] is None


def test_a_process_is_not_started_by_a_link_nor_without_the_key(run):
    assert App(run.parent).ask("GET", "replay/start", params={"run": "kept"}).status_code == 405
    keyed = App(run.parent, "s3cret")
    assert keyed.start().status_code == 401
    assert keyed.desk._children == {}


def test_only_runs_of_the_folder_and_steps_that_are_kept_are_replayed(app):
    for name in ("../kept", "nobody", str(app.app.state.runs.folder / "kept")):
        assert app.start(run=name).status_code == 404
    for step in (0, 4, 10**12):
        answer = app.start(step=step)
        assert answer.status_code == 404
        assert "not kept" in answer.json()["error"]
    assert app.start(step=-1).status_code == 400


def test_a_run_file_that_names_code_is_left_to_the_terminal(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "kept")
    text = (copy / "config.toml").read_text()
    (copy / "config.toml").write_text(re.sub(r"trust_remote_code = false", "trust_remote_code = true", text))
    app = App(tmp_path)
    assert "model.trust_remote_code" in app.get("replay", run="kept")["refusal"]
    answer = app.start()
    assert answer.status_code == 409
    assert f"paceline replay {copy} 3" in answer.json()["error"]
    custom = {"trainer": {"loss": {"type": "custom", "import_path": "os:system"}}}
    assert form_fields(custom)[0].value == "custom"


def test_a_run_without_samples_or_run_file_has_an_answer(tmp_path):
    Told(tmp_path, "bare").step(3).end()
    Told(tmp_path, "lost").step(3).end()
    (tmp_path / "lost" / "config.toml").unlink()
    Told(tmp_path, "strange").step(3).end()
    (tmp_path / "strange" / "config.toml").write_text('trainer = "x"\nmodel = 3\n')
    app = App(tmp_path)
    for name in ("bare", "lost", "strange"):
        assert app.get("replay", run=name)["steps"] == []
        assert app.start(run=name).status_code in (404, 409)


# -- how it ends ------------------------------------------------------------------------------------------------------


def test_a_failed_process_is_told_by_its_last_sentence(tmp_path):
    child = ReplayProcess(tmp_path / "nowhere", 3, [], lambda data: None)
    until(lambda: child.state != "working")
    assert child.state == "failed"
    assert child.failure.startswith("there is no run at")


def test_one_replay_of_a_run_at_a_time_and_cancelling_leaves_no_process(app, run):
    assert app.start().json()["job"]["state"] == "working"
    assert app.start(step=2).status_code == 409
    until(lambda: processes(run.resolve()))
    answer = app.ask("POST", "replay/cancel", params={"run": "kept"}, content="{}", headers=OURS)
    assert answer.json()["job"]["state"] == "cancelled"
    assert processes(run.resolve()) == []
    assert app.get("replay/result", run="kept", of="3")["result"] is None


def test_what_takes_too_long_is_ended_with_a_sentence(run):
    child = ReplayProcess(run.resolve(), 3, [], lambda data: None, limit=0.0)
    until(lambda: child.state != "working")
    assert (child.state, processes(run.resolve())) == ("failed", [])
    assert "longer than 0 seconds" in child.failure


def test_a_desk_that_closes_ends_its_processes(app, run):
    app.start()
    until(lambda: processes(run.resolve()))
    app.desk.close()
    assert processes(run.resolve()) == []
    assert app.desk.results.of_run(run.resolve()) == {}


@pytest.fixture
def orphanage():
    """Orphans of processes started here become children of this one, so that it learns how they end."""
    subreaper = 36
    ctypes.CDLL(None).prctl(subreaper, 1)
    yield
    ctypes.CDLL(None).prctl(subreaper, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_a_server_that_is_killed_leaves_no_process_behind(run, orphanage):
    command = [sys.executable, "-m", "paceline", "ui", str(run.parent), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        here = re.search(r"http://127\.0\.0\.1:\d+/", server.stdout.readline())[0]
        asked = {"params": {"run": "kept"}, "json": {"step": 3}, "timeout": 60}
        httpx.post(f"{here}api/replay/start", **asked).raise_for_status()
        (child,) = until(lambda: processes(run.resolve()))
        server.send_signal(signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert status != 0, "it was not ended, but came to its end"


# -- what came out ----------------------------------------------------------------------------------------------------


def test_a_result_is_summed_and_its_weightiest_tokens_come_first(shown):
    result = shown.get("replay/result", run="kept", of="3")["result"]
    assert result["about"]["weights"]["exact"]
    total = sum(row["share"] for row in result["samples"])
    assert total == pytest.approx(result["about"]["loss"]["loss"]["replayed"], abs=1e-6)
    sizes = [abs(one["share"]) for one in result["top"]]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == pytest.approx(result["largest"])
    part = shown.get("replay/result", run="kept", of="3", component="kl")["result"]
    assert sum(row["share"] for row in part["samples"]) == pytest.approx(part["about"]["loss"]["loss/kl"]["replayed"])


def test_two_results_are_compared_token_by_token(shown):
    keys = {"run": "kept", "of": "3", "against": result_key(3, TIGHT)}
    result = shown.get("replay/result", **keys)["result"]
    loss, other = (about["loss"]["loss"]["replayed"] for about in (result["about"], result["other"]["about"]))
    apart = sum(row["other"] - row["share"] for row in result["samples"])
    assert apart == pytest.approx(other - loss, abs=1e-6)
    assert abs(apart) > 0
    assert result["other_held_back"] > result["held_back"]
    first = result["top"][0]
    sample = shown.get("replay/sample", **keys, sample=first["sample"])["sample"]
    for name, told in (("share", sample["trained"]), ("other", sample["other"])):
        assert sum(values[first["token"]] for values in told["share"].values()) == pytest.approx(first[name])
    assert sample["ids"][first["place"]] == first["id"]


def test_results_of_other_samples_are_not_laid_side_by_side(shown, run, told):
    other = json.loads(told[0])
    other["samples"][0]["ids"][0] += 1
    shown.desk.results.put(run.resolve(), "3-strange", ReplayResult(json.dumps(other).encode(), 3, {"x": 1}))
    answer = shown.ask("GET", "replay/result", params={"run": "kept", "of": "3", "against": "3-strange"})
    assert answer.status_code == 409
    assert "replay the step again" in answer.json()["error"]


def test_a_result_or_sample_that_is_not_there_is_said(shown):
    assert shown.get("replay/result", run="kept", of="9")["result"] is None
    assert shown.get("replay/result", run="kept", of="3", against="9")["result"] is None
    assert shown.get("replay/sample", run="kept", of="9")["sample"] is None
    for number in (-1, 99):
        answer = shown.ask("GET", "replay/sample", params={"run": "kept", "of": "3", "sample": number})
        assert answer.status_code == 404


def test_few_results_are_remembered_and_the_newest_stay(shown, run, told):
    for number in range(10):
        shown.desk.results.put(run.resolve(), f"n{number}", ReplayResult(told[0], 3, {"n": number}))
    kept = [one["key"] for one in shown.get("replay", run="kept")["results"]]
    assert kept == [f"n{number}" for number in range(4, 10)]


def test_numbers_that_are_not_finite_are_gaps(run, told):
    odd = json.loads(told[0])
    odd["samples"][0]["trained"]["share"]["rl"][0] = None
    assert ReplayResult(json.dumps(odd).encode(), 3, {}).shares("rl")[0][0] == 0.0
