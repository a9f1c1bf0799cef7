"""Runs whose episodes judges grade: rewards, records, pages and failures, beside a real server and a real judge."""

import io
import json
import re
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from live_server import MODEL, served
from test_runs import metrics

from docs_blocks import blocks
from judge_server import judge_server
from paceline.commands.play import PlayOptions, play
from paceline.config import load
from paceline.data.rollout import Rollout
from paceline.data.sample import Ticket
from paceline.envs import Environment, Outcome
from paceline.observe.monitor.directory import RunDirectory
from paceline.observe.record import RunFolder
from paceline.observe.record.body import decode, encode
from paceline.observe.web import build_app
from paceline.runtime import train

SMALL = """
name = "judged"
steps = 2
batch_size = 8
group_size = 4
device = "cpu"
[sampling]
max_tokens = 4
[trainer]
threads = 1
compile = false
[record]
rollouts = 8
[eval]
every = 2
examples = 2
[failures]
judge = "drop"
[[env]]
type = "reverse-text"
task_weight = 0.0
"""
JUDGE = """
[[env.judges]]
name = "kind"
prompt = "Is {reply} kind, for {answer}?"
weight = 2.0
model = { name = "judge", base_url = "URL", retries = 0 }
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("paceline.config.filters.FIRST_PAUSE", 0.01)

    def run(text: str, url: str = "", **more):
        Path("run.toml").write_text(text.replace("URL", url))
        return train(load("run.toml").config, **more)

    return run


def by_length(body) -> str:
    """A grade that differs from reply to reply."""
    asked = body["messages"][-1]["content"]
    return f"It has its letters.\nScore: {sum(map(ord, asked.partition(',')[0])) % 11}"


def test_grades_are_the_reward_and_every_record_shows_them(run, tmp_path):
    with judge_server(by_length) as server:
        done = run(SMALL + JUDGE, server.url)
        asked = len(server.prompts())
        assert len(set(server.prompts())) == asked, "a question was asked twice"
    assert done.outcome.status == "finished", done.error
    lines = [json.loads(line) for line in (done.directory / "rollouts.jsonl").read_text().splitlines()]
    assert lines
    for line in lines:
        task, verdict = line["verdicts"]
        assert (task["judge"], task["weight"], verdict["judge"], verdict["model"]) == ("task", 0.0, "kind", "judge")
        assert verdict["text"] == f"It has its letters.\nScore: {verdict['value']:g}"
        assert line["reward"] == pytest.approx(2 * verdict["score"])
        assert line["metrics"]["judge/kind"] == verdict["score"] == verdict["value"] / 10
        assert line["metrics"]["task_reward"] == task["score"]
        assert line["messages"][-1]["role"] == "assistant", "a judge's words are none of the policy's"
    trained = [line for line in metrics(tmp_path, "judged") if line["step"]]
    assert all(0 <= line["metric/reverse-text/judge/kind"] <= 1 for line in trained)
    assert any("eval/reverse-text/judge/kind" in line for line in metrics(tmp_path, "judged"))
    kept = RunFolder(RunDirectory(done.directory)).rollouts
    stored = [kept.get(at) for at in range(kept.count)]
    assert {len(one.verdicts) for one in stored} == {2}
    assert any(one.verdicts[1]["cached"] for one in stored) or asked == len(stored)
    client = TestClient(build_app(tmp_path / "runs"), base_url="http://127.0.0.1")
    shown = client.get("/api/rollouts/one", params={"run": "judged", "id": 0}).json()["verdicts"]
    assert shown == stored[0].verdicts
    found = client.get("/api/rollouts", params={"run": "judged", "text": "has its letters"}).json()
    assert found["total"] == kept.count, "a judge's words can be searched for"


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        ("Lovely!", r"judge `kind` of environment `reverse-text`, `judge`: the judge gave no verdict that can be read"),
        (500, "judge `kind` of environment `reverse-text`, `judge`: .* answered 500: as told"),
    ],
)
def test_a_judge_that_fails_stops_the_run_by_its_name_and_never_scores_zero(run, answer, sentence):
    with judge_server(answer) as server:
        done = run(SMALL + JUDGE, server.url)
    assert done.outcome.status == "failed"
    assert re.search(sentence, done.outcome.message), done.outcome.message
    kept = RunFolder(RunDirectory(done.directory)).rollouts
    assert kept.count
    assert {kept.get(at).reward for at in range(kept.count)} == {None}


def test_a_judge_that_fails_now_and_then_loses_those_episodes_alone(run):
    def answer(body):
        return 400 if by_length(body).endswith(("0", "5")) else by_length(body)

    with judge_server(answer) as server:
        done = run(
            SMALL.replace('judge = "drop"', 'judge = "drop"\n[breaker]\nconsecutive = 100\nwindow = 1000') + JUDGE,
            server.url,
        )
    assert done.outcome.status == "finished", done.error
    assert sum(line.get("failed/judge", 0.0) for line in done.metrics)
    kept = RunFolder(RunDirectory(done.directory)).rollouts
    rewards = [kept.get(at).reward for at in range(kept.count)]
    assert None in rewards
    assert not {0.0, 1.0} & set(rewards), "a grade that was never given"


def test_a_failed_judge_is_asked_again_without_playing_again(run):
    tries: dict[str, int] = {}

    def answer(body):
        asked = body["messages"][-1]["content"]
        tries[asked] = tries.get(asked, 0) + 1
        return 400 if tries[asked] == 1 else by_length(body)

    with judge_server(answer) as server:
        played = Counted()
        text = (
            SMALL.replace('judge = "drop"', 'judge = "retry"')
            .replace("steps = 2", "steps = 1")
            .replace("every = 2", "every = 0")
        )
        done = run(text + JUDGE, server.url, environments={"reverse-text": played})
    assert done.outcome.status == "finished", done.error
    assert set(tries.values()) == {2}
    assert sum(line.get("retried/judge", 0.0) for line in done.metrics)
    assert played.episodes == len(played.seen), "no episode was played again"
    noted = (done.directory / "events.jsonl").read_text()
    assert re.search(r"asked again in [\d.]+ s, try 2 of 3 \(failures\.judge\)", noted)
    assert "played again" not in noted


class Counted(Environment):
    """Counts its episodes, each of which asks something else."""

    def __init__(self) -> None:
        self.episodes, self.seen = 0, set()

    def examples(self, split):
        return [{"messages": [{"role": "user", "content": "copy: a"}], "answer": "a"}] if split == "train" else []

    async def play(self, example, seats):
        self.episodes += 1
        reply = await seats["policy"].chat(example["messages"])
        self.seen.add(id(seats))
        # Another reply each time, for the judge.
        turn = seats["policy"].turns[-1]
        seats["policy"].turns[-1] = replace(turn, text=f"{reply.text} {self.episodes}")
        return Outcome.solo(0.0)


def test_a_dead_judge_is_refused_before_the_first_step(run):
    with judge_server("x") as server:
        url = server.url
    done = run(SMALL + JUDGE, url)
    assert done.outcome.status == "failed"
    assert "judge `kind` of environment `reverse-text`" in done.outcome.message
    assert "does not answer" in done.outcome.message
    assert not (done.directory / "metrics.jsonl").exists()


FUNCTION = """
async def rollout(row, seat, judges):
    await seat.chat(row["messages"])
    verdict = await judges["kind"].grade(seat, row)
    return verdict.score - 0.5
"""
ARENA = """
from paceline.selfplay import Actor, Arena, Artifact, EpisodeRequest, Rubric, SingleTurnEpisode


async def kind(state, arena):
    verdict = await arena.judges["kind"].grade(state.seating.seat("poet"), {"answer": "x"})
    return {"poet": verdict.score}


class Poem(SingleTurnEpisode):
    episode_type = "poem"
    rubric = Rubric([kind])

    def get_initial_prompt(self, arena, artifact, state):
        return f"reverse: {artifact.data}"


class Poets(Arena):
    def __init__(self):
        super().__init__()
        self.add_actor(Actor("poet"))
        self.add_episode(Poem())

    def requests(self, split):
        return [EpisodeRequest("poem", Artifact(word)) for word in ("ab", "cd")] if split == "train" else []
"""
BY_CODE = SMALL.replace('[[env]]\ntype = "reverse-text"\ntask_weight = 0.0\n', "").replace("every = 2", "every = 0")


def test_functions_and_arenas_ask_the_same_judges(run, tmp_path):
    rows = [{"messages": [{"role": "user", "content": f"reverse: {word}"}], "answer": word} for word in ("ab", "cd")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "poems.py").write_text(ARENA)
    (tmp_path / "play.py").write_text(FUNCTION)
    judge = JUDGE + "automatic = false\n"
    text = BY_CODE + '\n[[env]]\ntype = "custom"\nname = "function"\nimport_path = "play.py:rollout"\n'
    text += f'dataset = "rows.jsonl"\n{judge}\n[[env]]\ntype = "arena"\nimport_path = "poems.py:Poets"\n{judge}'
    with judge_server(by_length) as server:
        done = run(text, server.url)
    sys.modules.pop("poems", None)
    assert done.outcome.status == "finished", done.error
    lines = [json.loads(line) for line in (done.directory / "rollouts.jsonl").read_text().splitlines()]
    assert {line["env"] for line in lines} == {"function", "arena"}
    for line in lines:
        (verdict,) = line["verdicts"]
        assert line["reward"] == verdict["score"] - (0.5 if line["env"] == "function" else 0.0)
        assert line["metrics"]["judge/kind"] == verdict["score"]


def test_the_judges_of_the_docs_grade(run, tmp_path):
    """Both blocks of environments.md, as they are shown, at another address and with less to do."""
    shown = [block.text for block in blocks("toml", "python") if block.page == "environments.md"]
    section = next(text for text in shown if "[[env.judges]]" in text)
    assert section.startswith('[[env]]\ntype = "reverse-text"')
    with judge_server(by_length) as server:
        judged = section.replace("http://10.0.0.7:8000/v1", server.url).replace("api_key_env", "# api_key_env")
        done = run(BY_CODE + judged, server.url)
        assert done.outcome.status == "finished", done.error
        assert {"metric/reverse-text/judge/helpfulness", "metric/reverse-text/task_reward"} <= done.metrics[-1].keys()
        (tmp_path / "my_task.py").write_text(next(text for text in shown if text.startswith("# my_task.py")))
        rows = [{"messages": [{"role": "user", "content": word}], "answer": word} for word in ("ab", "cd")]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        server.answer = lambda body: "Score: 8"
        algo = 'algo = { type = "reward" }\n'  # one grade for all of them
        by_code = judged.replace(
            "task_weight = 1.0", algo + 'import_path = "my_task.py:rollout"\ndataset = "rows.jsonl"'
        )
        by_code = by_code.replace('"reverse-text"', '"custom"').replace("weight = 0.5", "automatic = false")
        done = run(BY_CODE.replace('"judged"', '"by-code"') + by_code, server.url)
        assert done.outcome.status == "finished", done.error
        assert done.metrics[-1]["metric/custom/judge/helpfulness"] == pytest.approx(
            done.metrics[-1]["reward/custom/mean"]
        )


def test_paceline_rollout_shows_the_verdicts(here, tmp_path):
    with judge_server(by_length) as server:
        Path("run.toml").write_text((SMALL + JUDGE).replace("URL", server.url))
        told = here("rollout", "run.toml", "-n", "2", "--json")
        assert told.returncode == 0, told.stderr
        for line in told.stdout.splitlines():
            record = json.loads(line)
            assert record["reward"] == pytest.approx(2 * record["verdicts"][1]["score"])
        told = here("rollout", "run.toml", "-n", "1")
        assert "judge kind: " in told.stdout
        assert "It has its letters. Score:" in told.stdout


def test_a_person_who_plays_sees_what_the_judges_wrote(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with judge_server("It is kind.\nScore: 4") as server:
        Path("run.toml").write_text((SMALL + JUDGE).replace("URL", server.url))
        out = io.StringIO()
        assert play(load("run.toml").config, PlayOptions(count=1), out, lambda prompt: "hello") == 0
        assert "hello" in server.prompts()[0]
    assert "judge kind: 0.400  It is kind. Score: 4" in out.getvalue()
    assert "policy (you) 0.800" in out.getvalue()


def test_an_endpoint_without_chat_is_named_with_its_address(run):
    class Plain(BaseHTTPRequestHandler):
        def log_message(self, *_): ...

        def do_GET(self):
            self.send_error(404)

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_error(404)

    with ThreadingHTTPServer(("127.0.0.1", 0), Plain) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        done = run(SMALL + JUDGE, url)
        server.shutdown()
    assert done.outcome.status == "failed"
    assert f"judge `kind` of environment `reverse-text`, `judge`: {url}/v1/chat/completions answered 404" in (
        done.outcome.message
    )


def test_a_paceline_serve_is_a_judge(run):
    """The quickstart model knows nothing of grades; its server makes it write one."""
    with served("--engine.max_running", "8", "--engine.max_context", "512", "--engine.threads", "1") as server:
        judge = JUDGE.replace('"judge"', f'"{MODEL}"') + 'extra_body = { regex = "Score: [0-9]" }\n'
        done = run(SMALL.replace("task_weight = 0.0", "") + judge, f"{server.url}/v1")
    assert done.outcome.status == "finished", done.error
    lines = [json.loads(line) for line in (done.directory / "rollouts.jsonl").read_text().splitlines()]
    assert all(line["verdicts"][1]["text"].startswith("Score: ") for line in lines)
    for line in lines:
        task, verdict = line["verdicts"]
        assert line["reward"] == pytest.approx(task["score"] + 2 * verdict["score"])


def test_the_record_keeps_whatever_a_judge_wrote():
    odd = {"judge": "x", "score": 0.5, "text": "\ud800 lone"}
    rollout = Rollout(ticket=Ticket(0, "e", 0, 0, 0), member=0, reward=1.0, verdicts=[odd])
    assert decode(encode(rollout)[0]).verdicts == [odd | {"text": "\\ud800 lone"}]
