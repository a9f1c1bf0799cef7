"""Laws of the remote environment: an answer that keeps the contract trains as it is, any other is dropped by name, and
a service that dies is posted the same episode again."""

import asyncio
import copy
import json
import math
import os
import re
import socket
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import httpx
import pytest

import paceline
from paceline.config import ConfigError, RunConfig
from paceline.config.env import RemoteEnvConfig
from paceline.envs import POLICY, build_environment
from paceline.envs.base import RefusedRollout
from paceline.envs.rollout_service import RolloutAnswer
from paceline.errors import EngineError, PacelineError, RequestError, Unreachable
from paceline.model import tokenizer_digest
from real_seats import stage

ROOT = Path(__file__).parents[3]
SERVICE = ROOT / "examples" / "seeds" / "async_rl_loop" / "rollout_service.py"
ROW = {"messages": [{"role": "user", "content": "reverse: abc"}], "answer": "cba"}


@pytest.fixture(scope="module")
def actors():
    with stage() as running:
        yield running


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def remote(url: str, name: str = "far", **keys):
    return build_environment(RemoteEnvConfig(name=name, dataset="rows.jsonl", url=url, **keys))


def play(actors, environment, row=ROW, timeout: float = 60):
    """The outcome, or what was raised, and the seat."""

    async def episode(seats):
        async with asyncio.timeout(timeout):
            return await environment.play(copy.deepcopy(row), seats)

    ((ended, seats),) = actors.play(episode)
    return ended, seats[POLICY]


class Script:
    """An HTTP server that answers each post as the next function of `answers` says, the last one for ever."""

    def __init__(self, *answers) -> None:
        self.answers, self.posts = list(answers), []
        script = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                script.posts.append((body, dict(self.headers)))
                answer = script.answers.pop(0) if len(script.answers) > 1 else script.answers[0]
                answer(self, body)

            def log_message(self, *_) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/rollout"

    def __enter__(self):
        Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self.server.shutdown()
        self.server.server_close()


def send(data: bytes, status: int = 200, length: int | None = None):
    def answer(handler, _) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(data) if length is None else length))
        handler.end_headers()
        handler.wfile.write(data)

    return answer


def good(body: dict) -> dict:
    turns = [
        {"role": "user", "token_ids": [3, 4]},
        {"role": "assistant", "token_ids": [5, 6], "logprobs": [-0.5, -1.0], "versions": 0},
        {"role": "tool", "token_ids": [7]},
        {"role": "assistant", "token_ids": [8, 6], "logprobs": [-0.25, 0], "versions": [0, 0], "finish": "length"},
    ]
    answer = {"schema_version": 1, "id": body["id"], "tokenizer": body["tokenizer"], "turns": turns}
    return answer | {"reward": 0.75, "metrics": {"tries": 2}}


def answering(change):
    def answer(handler, body) -> None:
        send(json.dumps(change(good(body))).encode())(handler, body)

    return answer


def test_an_answer_becomes_turns_as_it_stands_and_the_request_says_all_it_needs(actors, monkeypatch):
    monkeypatch.setenv("FAR_KEY", "s3cret-value")
    with Script(answering(lambda answer: answer)) as service:
        outcome, seat = play(actors, remote(service.url, api_key_env="FAR_KEY", timeout=50))
    assert (dict(outcome.rewards), dict(outcome.metrics)) == ({POLICY: 0.75}, {"tries": 2.0})
    first, second = seat.turns
    assert (first.prompt_ids, first.completion_ids, first.logprobs) == ([3, 4], [5, 6], [-0.5, -1.0])
    assert (second.prompt_ids, second.completion_ids, second.versions) == ([3, 4, 5, 6, 7], [8, 6], [0, 0])
    assert (first.finish, second.finish, second.temperature) == ("stop", "length", 1.0)
    ((body, headers),) = service.posts
    assert (headers["Authorization"], headers["Idempotency-Key"]) == ("Bearer s3cret-value", body["id"])
    assert (body["schema_version"], body["row"], body["timeout"]) == (1, ROW, 50)
    assert body["sampling"] == {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 8}
    assert body["tokenizer"] == tokenizer_digest(actors._renderer.tokenizer)
    assert (body["policy"]["model"], body["policy"]["version"]) == ("policy", 0)


def test_a_row_is_posted_as_json_that_every_language_reads(actors):
    """JSON knows no NaN and no bytes."""
    with Script(answering(lambda answer: answer)) as service:
        play(actors, remote(service.url), row=ROW | {"weight": math.nan, "image": b"\xff\x00", "seed": 10**30})
    ((body, _),) = service.posts
    assert body["row"] == ROW | {"weight": None, "image": "_wA=", "seed": 10**30}


def change(path: str, value):
    """The good answer with one value replaced; ... removes it."""

    def changed(answer: dict) -> dict:
        node, *keys = [answer, *(int(key) if key.isdigit() else key for key in path.split("."))]
        for key in keys[:-1]:
            node = node[key]
        if value is ...:
            del node[keys[-1]]
        else:
            node[keys[-1]] = value
        return answer

    return answering(changed)


BROKEN = {
    "no JSON": (send(b"<html>hello</html>"), "schema", "<html>hello"),
    "an empty body": (send(b""), "schema", "the body"),
    "half an object": (send(b'{"schema_version": 1, "turns": [{"ro'), "schema", "schema_version"),
    "no object": (send(b"[1, 2]"), "schema", "the body"),
    "not UTF-8": (send(b'{"id": "\xff\xfe"}'), "schema", "the body"),
    "another schema": (change("schema_version", 2), "schema", "schema_version"),
    "a field too many": (change("turns.1.logprob", []), "schema", "turns.1.logprob"),
    "text for tokens": (change("turns.1.token_ids", ["5", 6]), "schema", "turns.1.token_ids.0"),
    "an empty turn": (change("turns.0.token_ids", []), "schema", "turns.0.token_ids"),
    "another episode": (change("id", "x"), "id", "episode 'x'"),
    "another tokenizer": (change("tokenizer", "abc"), "tokenizer", "its tokenizer is abc"),
    "no tokenizer": (change("tokenizer", ...), "tokenizer", "not named"),
    "no reward": (change("reward", ...), "reward", "reward is None"),
    "a reward of NaN": (change("reward", math.nan), "reward", "finite"),
    "a reward beyond all bounds": (change("reward", 1e300), "reward", "scale it"),
    "no turns": (change("turns", []), "last_turn", "must end in a turn of the assistant"),
    "the tool last": (change("turns.3.role", "tool"), "last_turn", "must end in a turn of the assistant"),
    "an unknown token": (change("turns.1.token_ids", [5, 10**6]), "token_ids", "token 1000000"),
    "a negative token": (change("turns.0.token_ids", [-1]), "token_ids", "token -1"),
    "too few log probabilities": (change("turns.1.logprobs", [-1.0]), "logprobs", "2 tokens have 1 log"),
    "no log probabilities": (change("turns.1.logprobs", ...), "logprobs", "2 tokens have 0 log"),
    "NaN": (change("turns.1.logprobs", [math.nan, -1.0]), "logprobs", "nan is no log probability"),
    "minus infinity": (change("turns.1.logprobs", [-math.inf, -1.0]), "logprobs", "-inf is no log probability"),
    "a log probability above 0": (change("turns.1.logprobs", [0.5, -1.0]), "logprobs", "0.5 is no log probability"),
    "no version": (change("turns.1.versions", ...), "versions", "2 tokens have 0 versions"),
    "too many versions": (change("turns.1.versions", [0, 0, 0]), "versions", "2 tokens have 3 versions"),
    "a version of the future": (change("turns.1.versions", 9), "versions", "version 9 does not exist"),
    "a negative version": (change("turns.1.versions", -1), "versions", "version -1 does not exist"),
    "another past": (change("turns.3.prompt_token_ids", [3, 4, 5, 9, 7]), "prefix", "at token 3 of 5"),
    "a shorter past": (change("turns.3.prompt_token_ids", [3, 4]), "prefix", "at token 2 of 5"),
    "no prompt": (change("turns", [good({"id": 0, "tokenizer": 0})["turns"][1]]), "prefix", "no prompt before it"),
    "log probabilities of the user": (change("turns.0.logprobs", [-1.0, -1.0]), "schema", "only the assistant"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_an_answer_that_breaks_the_contract_is_dropped_with_its_reason(actors, case):
    answer, reason, words = BROKEN[case]
    with Script(answer) as service:
        refused, _ = play(actors, remote(service.url))
    assert isinstance(refused, RefusedRollout), refused
    assert refused.reason == reason
    assert words in str(refused)
    assert service.url in str(refused)
    assert len(service.posts) == 1


def test_a_prompt_that_extends_the_turns_before_stands_for_the_context(actors):
    with Script(change("turns.3.prompt_token_ids", [3, 4, 5, 6, 7, 9])) as service:
        _, seat = play(actors, remote(service.url))
    assert seat.turns[1].prompt_ids == [3, 4, 5, 6, 7, 9]


def test_a_draw_that_the_service_gives_up_is_no_failure(actors):
    with Script(answering(lambda a: {"schema_version": 1, "id": a["id"], "dropped": "flaky page"})) as service:
        assert play(actors, remote(service.url))[0] is None


def test_a_huge_answer_is_refused_before_it_is_held(actors):
    with Script(send(b" " * (3 << 20))) as service:
        refused, _ = play(actors, remote(service.url, max_answer_mb=1))
    assert refused.reason == "too_large"
    assert "raise `max_answer_mb`" in str(refused)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_trouble_that_passes_is_waited_out_under_the_same_id(actors, status):
    half = send(b'{"half', length=5000)
    with Script(send(b"later", status), half, answering(lambda answer: answer)) as service:
        outcome, _ = play(actors, remote(service.url))
    assert outcome.rewards[POLICY] == 0.75
    assert len({body["id"] for body, _ in service.posts}) == 1
    assert len(service.posts) == 3


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_a_refusal_is_told_at_once_and_never_repeats_the_key(actors, status, monkeypatch):
    monkeypatch.setenv("FAR_KEY", "s3cret-value")
    with Script(send(b"wrong key s3cret-value", status)) as service:
        error, _ = play(actors, remote(service.url, api_key_env="FAR_KEY"))
    assert isinstance(error, RequestError)
    assert f"answered {status}: wrong key ***" in str(error)
    assert len(service.posts) == 1
    assert ("FAR_KEY" in str(error)) == (status == 401)


def test_a_service_that_stays_away_is_named_at_once_and_in_the_end(actors, caplog):
    url = f"http://127.0.0.1:{free_port()}/rollout"
    error, _ = play(actors, remote(url, name="away", reconnect_seconds=0.3))
    said = (
        f"the rollout service at {url} does not answer: All connection attempts failed; its episodes are posted again"
    )
    assert said in caplog.text
    assert isinstance(error, Unreachable)
    assert f"the rollout service at {url} does not answer" in str(error)
    assert "raise `reconnect_seconds`" in str(error)


def test_a_slow_drip_ends_with_the_episode(actors):
    def drip(handler, _) -> None:
        handler.send_response(200)
        handler.end_headers()
        while True:
            handler.wfile.write(b" ")
            time.sleep(0.02)

    with Script(drip) as service:
        late, _ = play(actors, remote(service.url), timeout=1)
    assert isinstance(late, TimeoutError)


def test_a_key_that_is_not_set_and_an_address_that_is_none_are_refused_at_start(monkeypatch):
    monkeypatch.delenv("FAR_KEY", raising=False)
    with pytest.raises(PacelineError, match="variable FAR_KEY is not set"):
        remote("http://far/rollout", api_key_env="FAR_KEY")
    for url in ("far:8900", "ftp://far/x", "http://", ""):
        with pytest.raises(ConfigError, match="write http://HOST:PORT/PATH"):
            RemoteEnvConfig(dataset="rows.jsonl", url=url)


def test_a_run_goes_on_without_broken_answers_and_counts_them_by_reason(tmp_path):
    played = iter(range(10**6))

    def mostly(handler, body) -> None:
        number = next(played)
        (change("turns.1.logprobs", [0.0]) if number % 8 == 3 else change("reward", number % 2))(handler, body)

    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "reverse: abc", "answer": "cba"}) + "\n")
    with Script(mostly) as service:
        env = {"type": "remote", "name": "far", "dataset": str(rows), "url": service.url}
        result = paceline.train(
            RunConfig(env=[env], runs=str(tmp_path), name="run", steps=2, batch_size=16, group_size=8, device="cpu"),
            quiet=True,
        )
    assert result.outcome.status == "finished"
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    counts = [line.get("failed/episode/logprobs", 0.0) for line in lines]
    assert sum(counts) >= 2


def test_the_page_shows_a_good_answer_and_the_schema_it_is_checked_by(actors):
    page = (ROOT / "docs" / "rollout-service.md").read_text(encoding="utf-8")
    shown, schema = (json.loads(text) for text in re.findall(r"(?ms)^```json\n(.*?)^```", page))
    assert schema == RolloutAnswer.model_json_schema()
    with Script(answering(lambda answer: shown | {"id": answer["id"], "tokenizer": answer["tokenizer"]})) as service:
        outcome, _ = play(actors, remote(service.url))
    assert outcome.rewards[POLICY] == shown["reward"]
    table = page.partition("| reason |")[2].partition("\n\n")[0]
    reasons = {reason for _, reason, _ in BROKEN.values()} | {"too_large"}
    assert set(re.findall(r"(?m)^\| `(\w+)` \|", table)) == reasons
    cells = re.findall(r"(?m)^\| (`.*?) \|", page.partition("## What is answered")[0])
    fields = re.findall(r"`([\w.]+)`", " ".join(cells))
    (body, _), *_ = service.posts
    assert {field.partition(".")[0] for field in fields} == body.keys()


# --- the service of the examples, in a process of its own


def start(port: int, **variables: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, str(SERVICE), str(port)], env={**os.environ, **variables})


def test_the_example_service_survives_kill_9_in_the_middle_of_an_episode(actors):
    """It is killed while its second try is sampled. Started again, it plays the row anew, and only that is kept."""
    port, calls = free_port(), []
    environment = remote(f"http://127.0.0.1:{port}/rollout")
    processes = [start(port)]

    async def episode(seats):
        seat = seats[POLICY]
        chat = seat.chat

        async def kill_at_the_second(messages, tools=None):
            calls.append(len(messages))
            if len(calls) == 2:
                processes[0].kill()
                processes[0].wait()
                processes.append(start(port))
            return await chat(messages, tools)

        seat.chat = kill_at_the_second
        async with asyncio.timeout(200):
            return await environment.play(ROW | {"answer": "not to be guessed"}, seats)

    try:
        ((outcome, seats),) = actors.play(episode)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert not isinstance(outcome, BaseException), outcome
    assert (outcome.rewards[POLICY], calls) == (0.0, [1, 3, 1, 3])
    first, second = seats[POLICY].turns
    assert first.prompt_ids == actors._renderer.prompt(ROW["messages"])
    assert second.prompt_ids[: len(first.prompt_ids) + len(first.completion_ids)] == [
        *first.prompt_ids,
        *first.completion_ids,
    ]
    assert all(len(turn.logprobs) == len(turn.completion_ids) == len(turn.versions) for turn in (first, second))


def test_the_example_service_samples_an_id_once_and_wants_its_key(actors):
    port, answers = free_port(), []
    url = f"http://127.0.0.1:{port}/rollout"

    async def episode(seats):
        seat = seats[POLICY]
        body = {"id": "1", "row": ROW, "tokenizer": seat.tokenizer_digest, "timeout": 60}
        body["policy"] = {"base_url": await seat.base_url(), "model": "policy", "version": 0}
        async with httpx.AsyncClient(timeout=60) as client:
            for key in ("right", "wrong", "right"):
                headers = {"Authorization": f"Bearer {key}"}
                answers.append(await client.post(url, json=body, headers=headers))
        return len(seat.turns)

    process = start(port, ROLLOUT_KEY="right")
    try:
        wait_for(port)
        ((sampled, _),) = actors.play(episode)
    finally:
        process.kill()
        process.wait()
    first, wrong, again = answers
    assert wrong.status_code == 401
    assert first.json() == again.json()
    assert sampled == len(first.json()["turns"])


def wait_for(port: int) -> None:
    for _ in range(600):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise EngineError("the service did not start within a minute")
