"""Engines of other makers: what a run file may ask of them, and how SGLang is spoken to.

There is no SGLang here. A small HTTP server replays the answers that its source builds and keeps what it was asked.
"""

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from pydantic import ValidationError

from paceline.clients import Pool
from paceline.clients.sglang import SglangEngine
from paceline.clients.vllm import VllmEngine
from paceline.config import RunConfig, dump, load
from paceline.engine import GenerateRequest
from paceline.errors import EngineError, Mismatch, Unreachable
from paceline.weights.update import Adapter, Canary, WeightUpdate

# --- the run file

ATTACHED = {"backend": "vllm", "base_url": "http://127.0.0.1:8000"}


@pytest.mark.parametrize(
    ("run", "sentence"),
    [
        ({"engine": {"backend": "vllm"}}, "needs base_url, where it is served, or a section [engine.launch]"),
        ({"engine": {**ATTACHED, "launch": {}}}, "not both"),
        ({"engine": {"backend": "sglang", "launch": {}}}, "start SGLang yourself"),
        ({"engine": {"base_url": "http://127.0.0.1:8000"}}, 'set backend = "vllm"'),
        ({"engine": {"backend": "vllm", "base_url": "127.0.0.1:8000"}}, "is no address"),
        ({"engine": ATTACHED, "placement": "processes"}, 'with vLLM set placement = "local"'),
        ({"engine": ATTACHED, "deterministic": True}, "as far as its own seeds go"),
        ({"engine": ATTACHED, "model": {"fp32_head": True}}, "model.fp32_head is not known to vLLM"),
        ({"engine": ATTACHED, "eval": {"sampling": {"top_p": 0.9}}}, "eval.sampling: vLLM reports"),
        (
            {
                "engine": ATTACHED,
                "env": [{"type": "arena", "import_path": "a:b", "name": "chess", "league": {}}],
            },
            "environment `chess`: a league needs the embedded engine",
        ),
    ],
)
def test_what_another_engine_cannot_do_is_said_before_anything_starts(run, sentence):
    with pytest.raises(ValidationError) as caught:
        RunConfig.model_validate(run)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    "engine", [ATTACHED, {"backend": "vllm", "launch": {"args": ["--enforce-eager"], "env": {"A": "1"}}}]
)
def test_an_engine_attached_or_launched_is_read_as_it_was_written(engine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a path that exists in the working directory is read as a whole one
    config = RunConfig.model_validate({"engine": engine})
    assert config.engine.model_dump(exclude_unset=True) == engine
    (tmp_path / "run.toml").write_text(dump(config))
    assert load(tmp_path / "run.toml", ()).config == config


# --- SGLang, replayed

CANARY = Canary((3, 1, 2), (0.0, -1.0, -2.0), 1e-3)


class Replay(ThreadingHTTPServer):
    """Counts up from the last token of a prompt, one token at a time; `cut` requests end as an abort does."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, dict]] = []
        self.version = "default"
        self.cut: list[int] = []
        self.spans: list[tuple[str, int, int]] = []
        self.fails = self.original = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def of(self, path: str) -> list[dict]:
        return [body for asked, body in self.asked if asked == path]

    def answer(self, path: str, body: dict) -> dict:
        if path == "/generate" and body["sampling_params"]["max_new_tokens"] == 0:
            logprobs = [None, -1.0, -2.0]
            told = [[p, t, None] for p, t in zip(logprobs, body["input_ids"], strict=True)]
            return {"text": "", "meta_info": {"input_token_logprobs": told, "weight_version": self.version}}
        if path == "/generate":
            most, reason = body["sampling_params"]["max_new_tokens"], {"type": "length"}
            if self.cut:
                most, reason = self.cut.pop(), {"type": "abort", "message": "Abort in waiting queue"}
            first = body["input_ids"][-1] + 1
            told = [[-0.5, first + place, None] for place in range(most)]
            meta = {"finish_reason": reason, "output_token_logprobs": told, "weight_version": self.version}
            if body.get("top_logprobs_num"):
                best = -0.5 if self.original else -0.5 * body["sampling_params"]["temperature"]
                meta["output_top_logprobs"] = [[[best, token, None]] for _, token, _ in told]
            if self.spans:
                meta["weight_versions"] = [{"version": v, "start": a, "end": b} for v, a, b in self.spans]
            return {"text": "", "output_ids": [t for _, t, _ in told], "meta_info": {**meta, "cached_tokens": 1}}
        if path == "/update_weights_from_disk":
            if self.fails:
                return {"success": False, "message": "Failed to get weights iterator", "num_paused_requests": 0}
            self.version = body["weight_version"]
            return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
        if path == "/load_lora_adapter":
            return {"success": True, "error_message": "", "loaded_adapters": {body["lora_name"]: body["lora_path"]}}
        if path in ("/model_info", "/server_info"):
            return {"model_path": "m", "weight_version": self.version, "max_req_input_len": 512}
        return {}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Replay

    def do_GET(self) -> None:
        self.reply(self.server.answer(self.path, {}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        self.server.asked.append((self.path, body))
        self.reply(self.server.answer(self.path, body))

    def reply(self, answer: dict) -> None:
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server():
    with Replay() as replay:
        threading.Thread(target=replay.serve_forever, daemon=True).start()
        yield replay
        replay.shutdown()


def whole(version: int, **more) -> WeightUpdate:
    return WeightUpdate(version, {"model.norm.weight": torch.ones(4)}, **{"canary": CANARY} | more)


def with_engine(server, folder, work):
    """What `work` does with an engine of the replaying server."""

    async def run():
        engine = SglangEngine(server.url, folder=folder)
        engine.start()
        try:
            return await asyncio.wait_for(work(engine), 240)
        finally:
            await engine.aclose()

    return asyncio.run(run())


def test_sglang_is_asked_in_tokens_and_names_the_version(server, tmp_path):
    request = GenerateRequest(
        prompt_ids=(5, 6), max_tokens=3, temperature=0.7, noise=(1 << 40) + 9, stop_token_ids=frozenset([9, 2])
    )

    async def work(engine):
        await engine.load_weights(whole(4))
        return await engine.generate(request), await engine.policy(), await engine.limits()

    said, policy, limits = with_engine(server, tmp_path, work)
    assert (said.token_ids, said.logprobs, said.versions) == ([7, 8, 9], [-0.5] * 3, [4] * 3)
    assert (said.finish, said.cached, policy.version, limits.max_context) == ("length", 1, 4, 512)
    sent = server.of("/generate")[-1]
    assert sent["input_ids"] == [5, 6]
    assert sent["return_logprob"] is True
    assert sent["sampling_params"] == {
        "max_new_tokens": 3,
        "temperature": 0.7,
        "stop_token_ids": [2, 9],
        "ignore_eos": True,
        "skip_special_tokens": False,
        "sampling_seed": 9,
    }


def test_an_update_pauses_loads_flushes_and_goes_on_in_that_order(server, tmp_path):
    async def work(engine):
        await engine.load_weights(whole(1))

    with_engine(server, tmp_path, work)
    paths = [path for path, body in server.asked if "top_logprobs_num" not in body]
    orders = ["/pause_generation", "/update_weights_from_disk", "/flush_cache", "/continue_generation", "/generate"]
    assert paths == orders
    assert server.of("/pause_generation") == [{"mode": "abort"}]
    assert server.of("/update_weights_from_disk")[0]["weight_version"].endswith("-1")


def test_a_request_that_an_update_cuts_goes_on_from_there_with_the_versions_told_apart(server, tmp_path):
    async def work(engine):
        await engine.load_weights(whole(1))
        server.cut = [2]
        first = server.answer

        def answer(path, body):
            told = first(path, body)
            if path == "/generate" and told["meta_info"].get("finish_reason", {}).get("type") == "abort":
                server.version = server.version.removesuffix("1") + "2"
            return told

        server.answer = answer
        return await engine.generate(GenerateRequest(prompt_ids=(5,), max_tokens=5, noise=3))

    said = with_engine(server, tmp_path, work)
    assert (said.token_ids, said.versions, said.recomputed) == ([6, 7, 8, 9, 10], [1, 1, 2, 2, 2], True)
    sent = server.of("/generate")[-1]
    assert (sent["input_ids"], sent["sampling_params"]["max_new_tokens"]) == ([5, 6, 7], 3)
    assert sent["sampling_params"]["sampling_seed"] == 5


def test_where_the_server_tells_spans_apart_each_token_has_its_own_version(server, tmp_path):
    async def work(engine):
        await engine.load_weights(whole(1))
        await engine.load_weights(whole(2))
        ours = server.version.removesuffix("2")
        server.spans = [(f"{ours}1", 0, 2), (f"{ours}2", 2, 5)]
        said = await engine.generate(GenerateRequest(prompt_ids=(5,), max_tokens=5))
        server.spans.pop()
        with pytest.raises(EngineError, match="named the weights of 2 tokens, not of 5"):
            await engine.generate(GenerateRequest(prompt_ids=(5,), max_tokens=5))
        return said

    assert with_engine(server, tmp_path, work).versions == [1, 1, 2, 2, 2]


def test_a_server_that_leaves_the_temperature_out_is_refused(server, tmp_path):
    server.original = True
    with pytest.raises(EngineError, match="unset SGLANG_RETURN_ORIGINAL_LOGPROB"):
        with_engine(server, tmp_path, None)


def test_weights_of_another_run_and_wrong_ones_are_not_taken_for_ours(server, tmp_path):
    request = GenerateRequest(prompt_ids=(5,), max_tokens=1)

    async def work(engine):
        await engine.load_weights(whole(1))
        server.version = "default"
        with pytest.raises(EngineError, match="which this run did not give it"):
            await engine.generate(request)
        assert (await engine.policy()).version == -1
        with pytest.raises(Mismatch, match="failed its canary"):
            await engine.load_weights(whole(2, canary=Canary((3, 1, 2), (0.0, -1.5, -2.0), 1e-3)))
        with pytest.raises(Mismatch):
            await engine.generate(request)
        server.fails = True
        with pytest.raises(EngineError, match="did not take version 3: Failed to get weights"):
            await engine.load_weights(whole(3))
        server.fails = False
        await engine.load_weights(whole(4))
        return await engine.generate(request)

    assert with_engine(server, tmp_path, work).versions == [4]


def test_an_adapter_gets_a_new_name_for_each_version_and_none_is_left(server, tmp_path):
    tensors = {"model.q_proj.lora_A.weight": torch.ones(2, 4), "model.q_proj.lora_B.weight": torch.ones(4, 2)}

    async def work(engine):
        pool, folders = Pool([engine]), []
        for version in (1, 2):
            await pool.load_weights(WeightUpdate(version, tensors, Adapter("", 2.0), canary=CANARY))
            folders.append(server.of("/load_lora_adapter")[-1]["lora_path"])
            said = await pool.generate(GenerateRequest(prompt_ids=(5,), max_tokens=1))
            assert said.versions == [version]
        pool.close()
        config = json.loads((tmp_path / folders[1] / "adapter_config.json").read_text())
        return config, [(tmp_path / folder).exists() for folder in folders]

    config, exist = with_engine(server, tmp_path, work)
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (2, 4.0, ["q_proj"])
    assert exist == [False, True]
    first, second = (body["lora_name"] for body in server.of("/load_lora_adapter"))
    assert first != second
    assert server.of("/unload_lora_adapter") == [{"lora_name": first}, {"lora_name": second}]
    assert server.of("/generate")[-1]["lora_path"] == second


def test_a_vllm_that_falls_silent_is_not_told_to_be_started_otherwise(tmp_path):
    """It answers its health and its models, and hangs up when it is asked what it offers."""

    class Silent(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/weight_info":
                body = json.dumps({"data": [{"id": "policy", "root": "nowhere"}]}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *words) -> None:
            """Nothing on stderr."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Silent) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        engine = VllmEngine(f"http://127.0.0.1:{server.server_address[1]}", folder=tmp_path)
        with pytest.raises(Unreachable, match=r"^http://127\.0\.0\.1:\d+ does not answer: "):
            engine.start()
        server.shutdown()
