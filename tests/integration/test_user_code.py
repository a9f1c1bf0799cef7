"""User code that raises ends its run as failed, and everything that speaks of the run names file, line and row."""

import json
import sys
from pathlib import Path

import pytest

from paceline.clients.rpc import FRAME_HEADER
from paceline.config import EvalConfig, RunConfig
from paceline.config.env import CustomEnvConfig
from paceline.config.inference import SamplingConfig
from paceline.observe.monitor import RunDirectory
from paceline.observe.monitor.doctor import diagnose
from paceline.observe.record.folder import RunFolder
from paceline.runtime import session, train
from paceline.runtime.processes.supervisor import OUTCOME
from paceline.runtime.rpc import RpcCall, TrainerRpcHandler, decode_answer, encode_frame
from paceline.runtime.session import result_of
from paceline.util.user_code import InternalError, UserCodeError, trace_to_print

HOOKS = """
import json
import paceline
from paceline.algorithms import Algorithm


def deeper(value):
    return json.loads(value)  # HERE


def loss(streams):
    return deeper("{loss")


def credit(inputs):
    return deeper("{credit")


class Whole(Algorithm):
    def assign(self, group):
        pass

    async def finish_batch(self, groups):
        deeper("{score")


class Rowless(paceline.SingleTurn):
    def examples(self, split):
        return deeper("{examples")

    def score(self, example, reply):
        return paceline.Outcome.solo(0.0)


class Judging(Rowless):
    def examples(self, split):
        return [{"messages": [{"role": "user", "content": f"copy: {word}"}]} for word in ("ab", "cd", "ef")]

    def score(self, example, reply):
        return deeper("{judge")
"""
LINE = HOOKS.split("# HERE")[0].count("\n") + 1


@pytest.fixture
def hooks(tmp_path) -> Path:
    (tmp_path / "hooks.py").write_text(HOOKS)
    return tmp_path / "hooks.py"


def run(folder: Path, **keys):
    settings = {"runs": str(folder / "runs"), "steps": 1, "batch_size": 8, "group_size": 4, "eval": EvalConfig(every=0)}
    return train(RunConfig(**settings | {"sampling": SamplingConfig(max_tokens=4), "device": "cpu"} | keys))


CASES = {
    "loss": ({"trainer": {"loss": {"type": "custom", "import_path": "{}:loss"}}}, "(trainer.loss) raised", "ticket "),
    "credit": ({"algo": {"type": "custom", "import_path": "{}:credit"}}, "credit function", ", ticket "),
    "algorithm": ({"algo": {"type": "custom", "import_path": "{}:Whole"}}, "`finish_batch` of the algo", "ticket 0"),
    "examples": ({"env": "{}:Rowless"}, "`examples` of environment `toy` raised", ""),
    "score": ({"env": "{}:Judging"}, "5 rollouts failed in a row", "(row "),
}


@pytest.mark.parametrize("case", CASES)
def test_what_a_hook_raises_is_the_outcome_of_its_run(hooks, tmp_path, case):
    keys, hook, row = CASES[case]
    keys = json.loads(json.dumps(keys).replace("{}", str(hooks)))
    if "env" in keys:
        keys["env"] = [CustomEnvConfig(name="toy", import_path=keys["env"])]
    done = run(tmp_path, **keys)
    message = done.outcome.message
    assert done.outcome.status == "failed"
    assert isinstance(done.error, UserCodeError)
    assert isinstance(done.error.__cause__, json.JSONDecodeError), "the user's own exception, to look at"
    assert f"hooks.py, line {LINE}, in deeper" in message
    assert hook in message
    assert row in message
    frames = done.outcome.frames
    assert "# HERE" in frames
    assert "JSONDecodeError" in frames
    assert all(file.endswith("hooks.py") for file in frames.split('"')[1::2] if file.startswith("/"))

    end = json.loads((done.directory / "events.jsonl").read_text().splitlines()[-1])
    assert (end["event"], end["status"], end["message"]) == ("end", "failed", message)
    assert "src/paceline" in end["traceback"] or "paceline/" in end["traceback"], "all frames are in the events"
    assert "json/decoder.py" in end["traceback"]
    verdict = diagnose(done.directory).verdict
    assert message in verdict
    assert "SIGKILL" not in verdict
    if case != "examples":  # which fails before there is anything to look at
        assert message in RunFolder(RunDirectory(done.directory)).status().message


WANDERER = """
import os
import sys
import paceline


class Wanderer(paceline.SingleTurn):
    def examples(self, split):
        return [{"messages": [{"role": "user", "content": f"copy: {word}"}]} for word in ("ab", "cd", "ef")]

    def score(self, example, reply):
        os.chdir("/")
        sys.path.clear()
        sys.setrecursionlimit(400)
        return paceline.Outcome.solo(float(len(reply.text)))
"""


def test_user_code_may_leave_the_working_directory_and_what_modules_are_found_by(tmp_path, monkeypatch):
    limit = sys.getrecursionlimit()
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "wanderer.py").write_text(WANDERER)
    monkeypatch.chdir(tmp_path)
    env = [CustomEnvConfig(name="toy", import_path="wanderer.py:Wanderer")]
    done = run(Path(), runs="runs", name="away", steps=3, env=env, checkpoint={"every": 1})
    assert Path.cwd() == Path("/")
    assert (done.directory / "rewards.png").is_file()
    assert any(entry.endswith("site-packages") for entry in sys.path)
    assert sys.getrecursionlimit() == limit
    assert (done.outcome.status, done.outcome.step) == ("finished", 3), done.outcome.message
    assert [line["step"] for line in done.metrics][-3:] == [1, 2, 3]
    assert done.directory == tmp_path / "runs" / "away"
    assert (done.directory / "export" / "config.json").is_file()
    assert done.summary[1].startswith("run runs/away, curve runs/away/rewards.png, model runs/away/export")
    assert "paceline train runs/away/config.toml --resume latest" in done.summary[2]


def test_a_bug_of_our_own_ends_the_run_as_failed_and_asks_for_a_report(tmp_path, monkeypatch):
    broken = compile("def write_plan(config, root):\n    return {}['lost']\n", str(Path(session.__file__)), "exec")
    names: dict = {}
    exec(broken, names)  # a function whose frames lie in the package
    monkeypatch.setattr(session, "write_plan", names["write_plan"])
    done = run(tmp_path)
    assert done.outcome.status == "failed"
    assert isinstance(done.error, InternalError)
    assert isinstance(done.error.__cause__, KeyError)
    assert "a bug in Paceline: KeyError: 'lost', at " in done.outcome.message
    assert f"report it with {done.directory / 'events.jsonl'}" in done.outcome.message
    end = json.loads((done.directory / "events.jsonl").read_text().splitlines()[-1])
    assert "KeyError: 'lost'" in end["traceback"]
    assert "SIGKILL" not in diagnose(done.directory).verdict


class RaisingHandler(TrainerRpcHandler):
    def __init__(self, hooks: Path):
        self._hooks = hooks

    async def _do(self, call):
        from paceline.util.importing import import_object
        from paceline.util.user_code import user_code

        with user_code("the loss `x` (trainer.loss)", "ticket 3"):
            import_object(f"{self._hooks}:loss")(None)


def test_the_words_of_another_process_are_the_same(hooks, tmp_path, monkeypatch):
    """A trainer behind a socket or on a cluster answers with a frame; a child tells its supervisor by a report."""
    import asyncio

    failed = asyncio.run(RaisingHandler(hooks).answer(RpcCall("me", 1, "step")))
    error = decode_answer(encode_frame(failed)[FRAME_HEADER.size :]).error()
    assert isinstance(error, UserCodeError)
    assert f"line {LINE}, in deeper" in str(error)
    assert "# HERE" in error.frames
    outcome = session._failed(RunDirectory(tmp_path / "none"), RunConfig(), error)
    told = result_of(RunDirectory(tmp_path / "none"), OUTCOME.validate_json(OUTCOME.dump_json(outcome)))
    assert isinstance(told.error, UserCodeError)
    assert (told.error.frames, told.error.trace) == (error.frames, error.trace)
    assert trace_to_print(error.frames, error.trace) == error.frames
    monkeypatch.setenv("PACELINE_TRACEBACK", "1")
    assert trace_to_print(error.frames, error.trace) == error.trace
