"""Real services and real episodes: the search server, endpoints, and what `paceline rollout` plays and prints."""

import asyncio
import contextlib
import hashlib
import io
import json
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from live_server import PLAIN, served
from openai import AsyncOpenAI
from rich.console import Console

from child_processes import Launched
from corpus_facts import plan
from paceline.commands.rollouts import EpisodePlayer, RolloutOptions, pick_env, play_episodes, preview_rollouts
from paceline.config import ConfigError, RunConfig
from paceline.config.env import RetrievalConfig, ReverseTextConfig
from paceline.config.inference import EngineConfig
from paceline.config.target import load_target
from paceline.data import Cursor
from paceline.envs import POLICY, EnvError, Environment, Outcome, build_environment
from paceline.envs.retrieval import Retrieval
from paceline.envs.search.index import BUILT_IN_CORPUS, Embedder, load_corpus, open_index
from paceline.envs.search.server import build_app
from paceline.errors import PacelineError
from paceline.model import load_tokenizer
from paceline.observe.monitor.show_rollout import show_rollout, show_summary
from paceline.runtime.episode_runtime import OpenAIServer, open_episode_runtime
from paceline.util.connections import listen

SEARCHING = re.compile(r"paceline: searching (\d+) documents at (http://\S+)/search")
SERVE = """
import sys
from paceline.envs.search.server import SearchOptions, serve_search
serve_search(SearchOptions(port=0, index=sys.argv[1], corpus=sys.argv[2], top_k=3))
"""


@contextlib.contextmanager
def listening(app: FastAPI):
    """An application behind a real socket, in a thread."""
    door = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[door])))
    thread.start()
    try:
        while not server.started:
            time.sleep(0.005)
        yield f"http://127.0.0.1:{door.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(240)
        door.close()


# --- the search server


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """A real search server in a process of its own; it must end by itself when told to."""
    folder = tmp_path_factory.mktemp("index")
    command = [sys.executable, "-c", SERVE, str(folder), str(BUILT_IN_CORPUS)]
    process = Launched(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        ready = SEARCHING.match(process.stdout.readline())
        assert ready, process.communicate()[1]
        assert ready[1] == "200"
        yield ready[2]
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0
        assert errors == "paceline: stopped\n"
        assert (folder / "bm25.npz").exists()
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def test_the_service_finds_what_the_index_finds(service):
    index = open_index(str(BUILT_IN_CORPUS))
    with httpx.Client(base_url=service, timeout=240) as client:
        for query, top_k in (("the market is held", 5), ("lens grinder", 100), ("nobody has heard of zzz", 1)):
            answer = client.post("/search", json={"query": query, "top_k": top_k})
            assert answer.status_code == 200
            assert answer.json() == {"results": [hit.as_dict() for hit in index.search(query, top_k)]}
        assert len(client.post("/search", json={"query": "the"}).json()["results"]) == 3
        assert client.get("/health").json() == {"status": "ok", "documents": 200, "retrieval": "bm25"}
        assert "/search" in client.get("/openapi.json").json()["paths"]


def test_many_ask_at_once_and_each_gets_its_own_answer(service):
    documents = load_corpus(BUILT_IN_CORPUS)[:64]
    with httpx.Client(base_url=service, timeout=240) as client, ThreadPoolExecutor(16) as threads:
        answers = threads.map(lambda d: client.post("/search", json={"query": d.title}).json()["results"][0], documents)
        assert [answer["title"] for answer in answers] == [d.title for d in documents]


JSON = {"content-type": "application/json"}
BAD = [
    ("POST", "/search", b"", JSON),
    ("POST", "/search", b"{", JSON),
    ("POST", "/search", b"[]", JSON),
    ("POST", "/search", b"null", JSON),
    ("POST", "/search", b"{}", JSON),
    ("POST", "/search", b'{"query": 3}', JSON),
    ("POST", "/search", b'{"query": " "}', JSON),
    ("POST", "/search", b'{"query": "a", "top_k": 0}', JSON),
    ("POST", "/search", b'{"query": "a", "top_k": 101}', JSON),
    ("POST", "/search", b'{"query": "a", "top_k": 1.5}', JSON),
    ("POST", "/search", b'{"query": "a", "top_k": true}', JSON),
    ("POST", "/search", b'{"query": "a", "topk": 1}', JSON),
    ("POST", "/search", b'{"query": "\\ud800"}', JSON),
    ("POST", "/search", b'{"query": "\xff"}', JSON),
    ("POST", "/search", b'{"query": "' + b"a" * 5000 + b'"}', JSON),
    ("POST", "/search", b'{"query": "' + b"a" * (2 << 20) + b'"}', JSON),
    ("POST", "/search", b"[" * 100_000, JSON),
    ("POST", "/search", b'{"query": "a"}', {"content-type": "text/plain"}),
    ("GET", "/search", b"", {}),
    ("POST", "/health", b"", {}),
    ("GET", "/nowhere", b"", {}),
]


@pytest.mark.parametrize(("method", "path", "body", "headers"), BAD, ids=range(len(BAD)))
def test_bad_input_is_refused_in_openais_shape(service, method, path, body, headers):
    answer = httpx.request(method, service + path, content=body, headers=headers, **PLAIN)
    assert 400 <= answer.status_code < 500
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]


@pytest.mark.parametrize("query", ["?", "\u0000", "ﬁ 中文 🙂", "a " * 2000, "\\\"'`"])
def test_any_text_may_be_looked_for(service, query):
    assert httpx.post(f"{service}/search", json={"query": query}, **PLAIN).status_code == 200


# --- search by meaning


def embeddings(asked: list[int]) -> FastAPI:
    """An embeddings endpoint: a text is the sum of its words, each a fixed direction of its own."""
    app = FastAPI()

    @app.post("/v1/embeddings")
    def embed(body: dict) -> dict:
        asked.append(len(body["input"]))
        rows = []
        for index, text in enumerate(body["input"]):
            vector = [0.0] * 64
            for word in re.findall(r"\w+", text.lower()):
                vector[hashlib.blake2b(word.encode(), digest_size=1).digest()[0] % 64] += 1.0
            rows.append({"index": index, "embedding": vector})
        return {"data": rows[::-1], "model": body["model"]}

    return app


def test_documents_are_embedded_once_and_queries_find_their_like(tmp_path):
    asked: list[int] = []
    with listening(embeddings(asked)) as url:
        embedder = Embedder(f"{url}/v1", "words")
        documents = load_corpus(BUILT_IN_CORPUS)
        index = open_index(str(BUILT_IN_CORPUS), str(tmp_path), embedder)
        assert sum(asked) == len(documents)
        again = open_index(None, str(tmp_path), embedder)
        assert sum(asked) == len(documents)
        with listening(build_app(again)) as service:
            for document in documents[:5]:
                ask = {"query": document.words, "top_k": 3}
                found = httpx.post(f"{service}/search", json=ask, **PLAIN).json()["results"]
                assert found[0]["id"] == document.id
                assert found[0]["score"] == pytest.approx(1, abs=1e-5)
                assert [f["score"] for f in found] == sorted((f["score"] for f in found), reverse=True)
                assert found == [hit.as_dict() for hit in index.search(document.words, 3)]
            assert httpx.get(f"{service}/health", **PLAIN).json()["retrieval"] == "dense"
    with listening(build_app(again)) as service:  # now without embeddings
        answer = httpx.post(f"{service}/search", json={"query": "a"}, **PLAIN)
        assert answer.status_code == 502
        assert f"the embeddings service at {url}/v1/embeddings does not answer" in answer.json()["error"]["message"]
    embedder.close()


# --- endpoints


def oracle() -> FastAPI:
    """A plain OpenAI endpoint, without token ids, whose model looks things up and reads."""
    app = FastAPI()

    @app.get("/v1/models")
    def models() -> dict:
        return {"object": "list", "data": [{"id": "oracle"}]}

    @app.post("/v1/chat/completions")
    def chat(body: dict) -> dict:
        assert body["model"] == "oracle"
        name, chain = plan(body["messages"][0]["content"].rpartition("Question: ")[2])
        for message in body["messages"][2::2]:
            (text,) = re.findall(rf"^\[\d+\] {name}: (.*)$", message["content"], re.MULTILINE)
            (name,) = re.findall(chain.pop(0), text)
        said = f"<search>{name}</search>" if chain else f"<answer>{name}</answer>"
        message = {"role": "assistant", "content": said, "refusal": None, "reasoning": None}
        usage = {"prompt_tokens": 50, "completion_tokens": 7}
        return {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": usage}

    return app


def played(environment: Environment, options: RolloutOptions, config: RunConfig | None = None, **changes) -> list[dict]:
    config = config or RunConfig()
    section = changes.get("section") or config.env[0]
    address = OpenAIServer(options.endpoint, options.endpoint_model, options.api_key) if options.endpoint else None
    with open_episode_runtime(config, config.sampling, address, options.concurrency) as house:
        player = EpisodePlayer(section, environment, house, options.split, config.seed)
        return asyncio.run(play_episodes(player, options))


def test_a_plain_endpoint_plays_retrieval_against_the_real_service(service):
    section = RetrievalConfig(name="lookups", url=service, top_k=5)
    with listening(oracle()) as url:
        options = RolloutOptions(count=12, split="eval", endpoint=url)
        records = played(Retrieval(section), options, section=section)
    assert [record["row"] for record in records] == list(range(12))
    for record in records:
        assert record["error"] is None
        assert (record["reward"], record["metrics"]["correct"], record["metrics"]["format"]) == (1, 1, 1)
        searches = int(record["metrics"]["searches"])
        assert record["sampled"] == list(range(1, 2 * searches + 2, 2))
        assert record["tokens"] == 7 * (searches + 1)
        assert "samples" not in record
    assert {record["metrics"]["searches"] for record in records} == {1, 2}


class Agent(Environment):
    """An agent that knows only a base URL and the `openai` client."""

    def examples(self, split):
        return [{"question": "In which year was the town of Here founded?"}]

    async def play(self, example, seats):
        client = AsyncOpenAI(base_url=await seats[POLICY].base_url(), api_key="none", max_retries=0)
        async with client:
            asked = [{"role": "user", "content": f"Question: {example['question']}"}]
            answer = await client.chat.completions.create(model="any", messages=asked, temperature=0.25)
        assert answer.choices[0].message.content == "<search>Here</search>"
        return Outcome.solo(0.5)


def test_an_agent_with_a_base_url_plays_at_any_endpoint():
    with listening(oracle()) as url:
        (record,) = played(Agent(), RolloutOptions(count=1, endpoint=f"{url}/v1"))
    assert record["error"] is None
    assert record["messages"][-1]["content"] == "<search>Here</search>"


def test_an_endpoint_that_is_not_there_ends_everything_with_a_sentence():
    with listening(FastAPI()) as url, pytest.raises(PacelineError, match=rf"{url}/v1/models answered 404"):
        played(Words(), RolloutOptions(endpoint=url))
    closed = "http://127.0.0.1:9"
    with pytest.raises(PacelineError, match=rf"{closed} does not answer"):
        played(Words(), RolloutOptions(endpoint=closed))


# --- our own model


def small() -> RunConfig:
    return RunConfig(env=[ReverseTextConfig()], deterministic=True, engine=EngineConfig(max_running=8, max_context=64))


@pytest.fixture(scope="module")
def local() -> list[dict]:
    config = small()
    return played(build_environment(config.env[0]), RolloutOptions(count=6), config)


def test_the_quickstart_model_really_plays(local):
    cursor = Cursor(2048, 0, "reverse-text")
    assert [record["row"] for record in local] == [cursor.draw()[2] for _ in local]
    for record in local:
        asked, said = record["messages"]
        assert asked["content"].startswith("reverse: ")
        assert said["content"].isalpha()
        assert (record["reward"] == 1) == (said["content"] == asked["content"].removeprefix("reverse: ")[::-1])
        assert record["tokens"] == len(said["content"]) + 1
        assert record["context"] > record["tokens"]
        assert (record["versions"], record["samples"], record["sampled"], record["error"]) == ([0], 1, [1], None)
    json.dumps(local)


def test_the_same_episodes_are_played_behind_a_server_of_the_same_model(local):
    config = small()
    with served("--deterministic", "--engine.max-running=8", "--engine.max-context=64") as server:
        for url in (server.url, f"{server.url}/v1"):
            records = played(build_environment(config.env[0]), RolloutOptions(count=6, endpoint=url), config)
            for ours, theirs in zip(local, records, strict=True):
                assert ours | {"seconds": 0} == theirs | {"seconds": 0}
        other = RunConfig(env=[ReverseTextConfig()], model={"name": "another"})
        in_words = played(Words(), RolloutOptions(count=2, endpoint=server.url), other)
        assert all("samples" not in record and record["tokens"] > 1 for record in in_words)
        tokens = played(Tokens(), RolloutOptions(count=1, endpoint=server.url, endpoint_model="paceline:quickstart"))
        assert tokens[0]["error"] is None
        (refused,) = played(Tokens(), RolloutOptions(count=1, endpoint=server.url), other)
        assert "this environment speaks in tokens" in refused["error"]


class Words(Environment):
    def examples(self, split):
        return [{"n": n} for n in range(3)] if split == "train" else []

    async def play(self, example, seats):
        await seats[POLICY].chat([{"role": "user", "content": "reverse: planet"}])
        return Outcome.solo(1.0)


class Tokens(Words):
    async def play(self, example, seats):
        await seats[POLICY].complete([3, 4, 5])
        return Outcome.solo(1.0)


class Troubled(Words):
    """Fails in a different way on each row; on the fourth it only takes its time."""

    prepared, pause = 0, 0

    async def prepare(self, example):
        self.prepared += 1
        if example["n"] == 5:
            raise RuntimeError("no luck")
        return example | {"shared": self.prepared}

    def examples(self, split):
        return [{"n": n} for n in range(8)]

    async def play(self, example, seats):
        n = example["n"]
        if n == 0:
            return Outcome.solo(0.0)
        await seats[POLICY].chat([{"role": "user", "content": "copy: ab"}])
        if n == 1:
            raise KeyError("lamp")
        if n == 2:
            return None
        if n == 3:
            await asyncio.sleep(self.pause)
        if n == 4:
            return Outcome({"judge": 1.0})
        if n == 6:
            done = asyncio.get_running_loop().create_future()
            done.cancel()
            await done
        return Outcome.solo(example["shared"], first=1)


def test_a_failed_episode_is_reported_and_harms_no_other():
    records = played(Troubled(), RolloutOptions(count=8, split="eval"))
    file = re.escape(Path(__file__).name)
    sentences = {
        0: "the episode ended without a word from the policy",
        1: rf"KeyError: 'lamp' \(.*{file}, line \d+\)",
        2: "dropped by the environment",
        4: r"the outcome has no reward for \['policy'\], though they spoke",
        5: rf"RuntimeError: no luck \(.*{file}, line \d+\)",
        6: "something the environment awaited was cancelled",
    }
    for row, sentence in sentences.items():
        assert re.search(sentence, records[row]["error"])
    for row in (3, 7):
        assert (records[row]["error"], records[row]["metrics"]) == (None, {"first": 1.0})


def test_an_episode_that_takes_too_long_is_ended():
    """Alone, since the others would have to be done in the same time, however slow the machine is."""
    late = Troubled()
    late.pause = 1000
    section = ReverseTextConfig(name="troubled", timeout=0.2)
    (record,) = played(late, RolloutOptions(count=1, row=3), section=section)
    assert "an episode of `troubled` took longer than 0.2 s: raise `timeout` in [[env]] (now 0.2)" in record["error"]


def test_episodes_on_one_row_are_a_group_with_what_it_has_in_common():
    records = played(Troubled(), RolloutOptions(count=3, row=7))
    assert [(record["row"], record["member"], record["reward"]) for record in records] == [
        (7, m, 1.0) for m in range(3)
    ]
    with pytest.raises(EnvError, match="has train rows 0 to 7, not 8"):
        played(Troubled(), RolloutOptions(row=8))
    with pytest.raises(EnvError, match="has no eval rows"):
        played(Words(), RolloutOptions(split="eval"))


class Table(Words):
    """A proposer, a branch, and a judge who is not trained."""

    async def play(self, example, seats):
        seat = seats[POLICY]
        asked = [{"role": "user", "content": "copy: ab"}]
        first = await seat.chat(asked)
        await seat.chat([*asked, first.message, {"role": "user", "content": "reverse: ab"}])
        await seat.chat([*asked, {"role": "assistant", "content": "given"}, {"role": "user", "content": "sort: ba"}])
        judge = seats.open("judge", trained=False)
        await seats[judge].chat([{"role": "user", "content": "add: 1+1"}])
        return Outcome.solo(1.0)


def test_every_seat_and_every_branch_is_told_once():
    policy, judge = played(Table(), RolloutOptions(count=1))
    assert [(len(c["messages"]), c["sampled"]) for c in policy["conversations"]] == [(4, [1, 3]), (4, [3])]
    assert (policy["trained"], judge["trained"], judge["reward"]) == (True, False, None)
    assert policy["samples"] == 2
    text = shown(policy)
    assert text.count("assistant, sampled") == 3
    assert "conversation 2 of 2" in text
    assert "judge · not trained" in shown(judge)


# --- the command's function


def test_the_function_prints_episodes_and_answers_with_an_exit_code():
    loaded = load_target("reverse-text", ["--partial-credit", "0.25", "--sampling.max-tokens", "12", "--seed=3"])
    assert (loaded.config.env[0].partial_credit, loaded.config.sampling.max_tokens, loaded.config.seed) == (0.25, 12, 3)
    out = io.StringIO()
    assert preview_rollouts(loaded.config, RolloutOptions(count=2), out) == 0
    text = out.getvalue()
    assert text.count("assistant, sampled") == text.count("· row ") == 2
    assert re.search(r"^2 rollouts  reward \d\.\d{3}", text.splitlines()[-1])


def test_json_is_one_object_a_rollout_and_raw_is_what_the_model_saw():
    config = load_target("calculator", ["--sampling.max-tokens", "4"]).config
    out = io.StringIO()
    preview_rollouts(config, RolloutOptions(count=2, json=True, raw=True, ids=True), out)
    played = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [record["env"] for record in played] == ["calculator"] * 2
    tokenizer = load_tokenizer(config.model)
    for record in played:
        assert record["reward"] is not None
        assert record["metrics"]["calls"] == 0
        assert [tool["function"]["name"] for tool in record["tools"]] == ["calculator"]
        (turn,) = record["turns"]
        assert turn["prompt"] == tokenizer.decode(turn["prompt_ids"])
        assert turn["prompt"].startswith("<|user|>What is ")
        assert turn["prompt"].endswith("<|end|><|assistant|>")
        assert turn["prompt_tokens"] == len(turn["prompt_ids"])
        assert record["tokens"] == len(turn["completion_ids"]) == len(turn["logprobs"])
        assert turn["completion"].startswith(record["messages"][-1]["content"])
    shown = io.StringIO()
    preview_rollouts(config, RolloutOptions(count=1, raw=True), shown)
    assert played[0]["turns"][0]["prompt"] in shown.getvalue(), "unbroken, at any width"


def test_tools_are_shown_with_the_episode():
    out = io.StringIO()
    preview_rollouts(load_target("calculator", ["--sampling.max-tokens", "4"]).config, RolloutOptions(count=1), out)
    assert "tool calculator(expression): Works out an arithmetic expression" in out.getvalue()
    out = io.StringIO()
    preview_rollouts(load_target("reverse-text", ["--sampling.max-tokens", "4"]).config, RolloutOptions(count=1), out)
    assert "tool " not in out.getvalue()


def test_what_cannot_be_played_is_a_sentence(tmp_path):
    with pytest.raises(ConfigError, match="reverse-txt"):
        load_target("reverse-txt", [])
    with pytest.raises(ConfigError, match="partial_credits"):
        load_target("reverse-text", ["--partial-credits", "1"])
    (tmp_path / "run.toml").write_text('[[env]]\ntype = "arithmetic"\n[[env]]\ntype = "reverse-text"\nname = "words"\n')
    config = load_target(str(tmp_path / "run.toml"), []).config
    with pytest.raises(PacelineError, match="several environments: choose one of `arithmetic`, `words` with --env"):
        pick_env(config, None)
    with pytest.raises(PacelineError, match="there is no environment `word`"):
        pick_env(config, "word")
    assert pick_env(config, "words").name == "words"
    with pytest.raises(PacelineError, match="at least one episode"):
        RolloutOptions(count=0)
    with pytest.raises(PacelineError, match="give its base URL with --endpoint"):
        RolloutOptions(api_key="secret")
    with pytest.raises(PacelineError, match="give --json too"):
        RolloutOptions(ids=True)


SLOW = """
import asyncio, sys
from paceline import Environment
from paceline.commands.rollouts import RolloutOptions, preview_rollouts
from paceline.config.target import load_target

class Slow(Environment):
    def examples(self, split):
        return [{}]

    async def play(self, example, seats):
        await seats["policy"].chat([{"role": "user", "content": "copy: a"}])
        print("playing", flush=True)
        await asyncio.sleep(1000)

try:
    config = load_target("custom", ["--import-path", "__main__:Slow"]).config
    preview_rollouts(config, RolloutOptions(count=2), sys.stderr)
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_ctrl_c_ends_it_cleanly():
    process = Launched([sys.executable, "-c", SLOW], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "playing\n", process.communicate()[1]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 130
    assert errors.splitlines() == ["custom, played by paceline:quickstart"]


# --- the picture


def shown(record: dict, **settings) -> str:
    console = Console(file=io.StringIO(), width=100, **settings)
    show_rollout(record, console)
    return console.file.getvalue()


CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
RECORD = {
    "env": "calculator",
    "row": 3,
    "reward": 0.5,
    "metrics": {"exact": 1.0},
    "tokens": 12,
    "versions": [2, 4],
    "error": None,
    "finish": "length",
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "be [bold]brief[/bold]"}]},
        {"role": "assistant", "content": "given"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "\x1b[31m2\x9b2J"},
        {"role": "assistant", "content": ""},
    ],
    "sampled": [2, 4],
}


def test_a_record_is_shown_whole_and_nothing_in_it_is_obeyed():
    text = shown(RECORD)
    for part in (
        "calculator · row 3",
        "be [bold]brief[/bold]",
        '→ add({"a": 1})',
        "␛[31m2",
        "(nothing)",
        "reward 0.500",
    ):
        assert part in text
    for part in ("exact 1.000", "12 tokens", "versions 2 to 4", "cut off at the token limit"):
        assert part in text
    assert text.count("assistant, sampled") == 2
    assert not {"\x1b", "\x9b"} & set(text)


def test_sampled_text_is_bright_given_text_is_dim_and_errors_are_red():
    record = {
        "messages": [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "say"}],
        "error": "oh no",
    }
    text = shown(record, force_terminal=True, color_system="standard")
    assert re.search(r"\x1b\[2m ?ask", text)
    assert re.search(r"\x1b\[1m ?say", text)
    assert re.search(r"\x1b\[31m ?oh no", text)
    assert "no reward" in text


def test_a_record_may_say_little():
    assert "episode" in shown({})
    console = Console(file=io.StringIO(), width=100)
    show_summary([{"reward": 1.0, "metrics": {"exact": 1}}, {"reward": 0.0, "metrics": {}}, {"error": "x"}], console)
    assert console.file.getvalue() == "3 rollouts  reward 0.500 (0.000 to 1.000)  exact 1.000  1 failed\n"
