"""Every path, field and answer that our SGLang backend names is in SGLang's own source, with the type we send.

SGLang serves nothing on this CPU: its imports ask for CUDA libraries. Its source is read instead, from the wheel that
`scripts/get_vllm_cpu.py` unpacks.
"""

import ast
import asyncio
import json
import os
import re
import threading
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from paceline.clients.sglang import SglangEngine
from paceline.engine import GenerateRequest
from paceline.model import WeightUpdate
from paceline.weights.update import Adapter, Canary

SOURCE = Path(__file__).parents[2] / ".venv-vllm" / "sglang" / "sglang" / "srt"
pytestmark = [
    pytest.mark.skipif(os.environ.get("PACELINE_VLLM") != "1", reason="part of `make vllm`"),
    pytest.mark.skipif(not SOURCE.is_dir(), reason="needs SGLang's source: python scripts/get_vllm_cpu.py"),
]
INPUTS = {
    "/generate": "GenerateReqInput",
    "/update_weights_from_disk": "UpdateWeightFromDiskReqInput",
    "/load_lora_adapter": "LoadLoRAAdapterReqInput",
    "/unload_lora_adapter": "UnloadLoRAAdapterReqInput",
    "/pause_generation": "PauseGenerationReqInput",
    "/continue_generation": "ContinueGenerationReqInput",
    "/release_memory_occupation": "ReleaseMemoryOccupationReqInput",
    "/resume_memory_occupation": "ResumeMemoryOccupationReqInput",
}
WORDS = {int: "int", float: "float", str: "str", bool: "bool", list: "List|Set", dict: "Dict"}
"""How their annotations call what JSON makes of a value."""


@cache
def tree(path: str) -> ast.Module:
    return ast.parse((SOURCE / path).read_text(encoding="utf-8"))


def fields(path: str, name: str) -> dict[str, str]:
    """The annotated fields of a class, its bases' in the same file among them."""
    (found,) = [node for node in tree(path).body if isinstance(node, ast.ClassDef) and node.name == name]
    own = {n.target.id: ast.unparse(n.annotation) for n in found.body if isinstance(n, ast.AnnAssign)}
    here = {node.name for node in tree(path).body if isinstance(node, ast.ClassDef)}
    bases = [base.id for base in found.bases if isinstance(base, ast.Name) and base.id in here]
    return {k: v for base in bases for k, v in fields(path, base).items()} | own


def routes() -> dict[str, set[str]]:
    """The paths of the HTTP server, and the methods each takes."""
    found: dict[str, set[str]] = {}
    for node in tree("entrypoints/http_server.py").body:
        for call in getattr(node, "decorator_list", []):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.args):
                continue
            if isinstance(call.args[0], ast.Constant) and ast.unparse(call.func.value) == "app":
                given = [ast.literal_eval(k.value) for k in call.keywords if k.arg == "methods"]
                found.setdefault(call.args[0].value, set()).update(given[0] if given else [call.func.attr.upper()])
    return found


def words(path: str) -> set[str]:
    return {n.value for n in ast.walk(tree(path)) if isinstance(n, ast.Constant) and isinstance(n.value, str)}


class Asked(ThreadingHTTPServer):
    """Answers whatever keeps the backend going, and keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, str, dict]] = []


class Handler(BaseHTTPRequestHandler):
    server: Asked

    def do_GET(self) -> None:
        self.reply("GET", {})

    def do_POST(self) -> None:
        self.reply("POST", json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}"))

    def reply(self, method: str, body: dict) -> None:
        self.server.asked.append((method, self.path, body))
        temperature = body.get("sampling_params", {}).get("temperature", 1.0)
        meta = {
            "input_token_logprobs": [
                [None if not i else -1.0, t, None] for i, t in enumerate(body.get("input_ids", []))
            ],
            "output_token_logprobs": [[-0.5, 7, None]],
            "output_top_logprobs": [[[-temperature, 7, None]]],
            "finish_reason": {"type": "length"},
            "weight_version": next(
                (b["weight_version"] for _, _, b in self.server.asked[::-1] if "weight_version" in b), ""
            ),
        }
        data = json.dumps({"success": True, "weight_version": "default", "meta_info": meta}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def asked(tmp_path):
    """All that the backend asks in the course of a run, of whole weights and of adapters."""
    lora = {"model.q_proj.lora_A.weight": torch.ones(2, 4), "model.q_proj.lora_B.weight": torch.ones(4, 2)}
    canary = Canary((3, 1), (0.0, -1.0), 1e-3)
    request = GenerateRequest(prompt_ids=(5,), max_tokens=1, top_logprobs=1, stop_token_ids=frozenset([2]))

    async def work(engine: SglangEngine) -> None:
        await engine.load_weights(WeightUpdate(1, {"model.norm.weight": torch.ones(4)}, canary=canary))
        await engine.generate(request)
        await engine.load_weights(WeightUpdate(2, lora, Adapter("", 2.0), canary=canary))
        await engine.generate(request)
        for step in (engine.policy, engine.limits, engine.pause, engine.resume, engine.sleep, engine.wake):
            await step()
        await engine.aclose()

    with Asked() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        engine = SglangEngine(f"http://127.0.0.1:{server.server_address[1]}", folder=tmp_path)
        engine.start()
        asyncio.run(asyncio.wait_for(work(engine), 30))
        server.shutdown()
    return server.asked


def test_every_path_we_ask_is_served_by_the_method_we_ask_with(asked):
    known = routes()
    assert {path for _, path, _ in asked} >= {*INPUTS, "/health", "/model_info", "/server_info", "/flush_cache"}
    for method, path, _ in asked:
        assert method in known[path], f"{method} {path}: SGLang has {known[path]}"


def test_every_field_we_send_has_that_name_and_type(asked):
    for _, path, body in asked:
        if path in INPUTS:
            check(body, fields("managers/io_struct.py", INPUTS[path]), path)
        if "sampling_params" in body:
            check(body["sampling_params"], fields("sampling/sampling_params.py", "SamplingParams"), "sampling_params")


def check(body: dict, known: dict[str, str], where: str) -> None:
    for name, value in body.items():
        assert name in known, f"{where} has no {name}"
        if known[name].startswith("Literal"):
            assert repr(value) in known[name], f"{where}.{name} takes {known[name]}, not {value!r}"
        else:
            word = rf"\b({WORDS[type(value)]})\b"
            assert re.search(word, known[name]), f"{where}.{name} is {known[name]}, not {value!r}"


def test_every_answer_we_read_is_written_by_sglang():
    told = words("managers/tokenizer_manager.py")
    assert told >= {"input_token_logprobs", "output_token_logprobs", "output_top_logprobs"}
    assert told >= {"weight_version", "cached_tokens", "finish_reason", "meta_info", "abort"}
    assert {"weight_versions", "version", "start", "end"} <= words("utils/weight_versions.py")
    assert "weight_version" in words("entrypoints/http_server.py")
    assert "max_req_input_len" in words("managers/scheduler.py")
    assert {"success", "error_message", "loaded_adapters"} <= set(fields("managers/io_struct.py", "LoRAUpdateOutput"))
    assert {"success", "message"} <= set(fields("managers/io_struct.py", "UpdateWeightFromDiskReqOutput"))
