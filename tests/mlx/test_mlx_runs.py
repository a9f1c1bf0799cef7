"""Whole runs on mlx: learning, without torch, beside torch, and from a quantised base."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mlx_lm", reason="mlx is not installed here: `make test-mlx`")

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "integration"), str(ROOT / "examples" / "arenas")]

from live_server import served  # noqa: E402
from tic_tac_toe import TicTacToe  # noqa: E402

from paceline.config.inference import SamplingConfig  # noqa: E402
from paceline.runtime.selfplay import (  # noqa: E402
    GRPOCredit,
    OpenAIClient,
    SelfPlayTrainer,
    SelfPlayTrainerConfig,
    load,
    optim,
    training_loop,
)

QUICKSTART = str(ROOT / "examples" / "quickstart.toml")
WITHOUT_TORCH = """
import sys
for name in ("torch", "peft", "trl"):
    sys.modules[name] = None  # as if it were not installed
from paceline.commands import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.timeout(1800)
def test_an_async_quickstart_with_adapters_swapped_in_flight_reaches_the_demos_bar(tmp_path):
    # Keys of older weights under a new version's tokens would be a mismatch too, and not mlx's.
    adapters = ["--model.lora.rank", "16", "--trainer.optimizer.lr", "2e-3", "--engine.on-swap", "recompute"]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "paceline",
            "train",
            QUICKSTART,
            "--backend",
            "mlx",
            "--engine.max-context",
            "64",
            *adapters,
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=1700,
    )
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "quickstart"
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    exact = [line["eval/reverse-text/exact"] for line in steps if "eval/reverse-text/exact" in line]
    assert exact[0] <= 0.30
    assert exact[-1] >= 0.80
    assert max(line.get("staleness/max", 0) for line in steps) == 1
    assert max(line["overlap_ratio"] for line in steps[1:]) > 0.05
    assert max(line.get("mismatch_kl", 0.0) for line in steps) < 1e-5
    assert (run / "export" / "model.safetensors").is_file()


def test_a_run_needs_no_torch(tmp_path):
    small = ["--steps", "2", "--batch-size", "16", "--eval.examples", "8", "--engine.max-context", "64"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, "train", QUICKSTART, "--backend", "mlx", *small],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert "finished at step 2" in done.stdout


@pytest.mark.parametrize(("trains", "serves"), [("torch", "mlx"), ("mlx", "torch")])
def test_one_library_serves_what_the_other_trains(trains, serves, monkeypatch):
    """Adapters go over HTTP after every step; the mismatch of what was sampled is only rounding."""

    async def play(url: str) -> SelfPlayTrainer:
        model, tokenizer = load("paceline:quickstart", backend=trains)
        client = OpenAIClient(base_url=f"{url}/v1", sampling=SamplingConfig(max_tokens=4))
        config = SelfPlayTrainerConfig(min_samples_per_step=4, checkpoint_every=0)
        trainer = SelfPlayTrainer(model, optim.Adam(learning_rate=1e-3), config, client, tokenizer)
        await training_loop(TicTacToe(client, credit_assigner=GRPOCredit()), trainer, num_steps=3)
        await client.aclose()
        trainer.close()
        return trainer

    # Keys of older weights under a new version's tokens would be a mismatch too, and not the libraries'.
    monkeypatch.setenv("PACELINE_API_KEY", "mine")
    cache = ["--engine.max-context", "128", "--engine.on-swap", "recompute"]
    with served("--backend", serves, "--engine.adapters", "1", *cache, key="mine") as server:
        trainer = asyncio.run(play(server.url))
        assert server.get("/policy").json()["version"] == trainer.version
    assert trainer.version >= 3
    fresh = [r.metrics["mismatch_kl"] for r in trainer.reports if "mismatch_kl" in r.metrics]
    print(f"{trains} trained, {serves} served: mismatch_kl {fresh}")
    assert fresh
    assert max(fresh) < 1e-5


def test_the_seed_documents_last_example_runs_on_a_quantised_base(tmp_path):
    """4-bit base, LoRA, arena, credit within groups, generating and training at once, in thirty lines."""
    from mlx_lm import convert

    script = ROOT / "examples" / "arenas" / "on_a_mac.py"
    assert len(script.read_text().splitlines()) <= 30
    folder = tmp_path / "four-bit"
    convert(str(ROOT / "src" / "paceline" / "quickstart"), str(folder), quantize=True, q_bits=4, q_group_size=32)
    assert json.loads((folder / "config.json").read_text())["quantization"]["bits"] == 4
    with served(
        "--backend", "mlx", "--engine.adapters", "1", "--engine.max-context", "128", model=str(folder), key="mine"
    ) as server:
        done = subprocess.run(
            [sys.executable, str(script), str(folder), f"{server.url}/v1", "3"],
            capture_output=True,
            text=True,
            timeout=280,
            env=os.environ | {"PACELINE_API_KEY": "mine"},
        )
        assert done.returncode == 0, done.stderr
        assert server.get("/policy").json()["version"] >= 1
    assert "versions" in done.stdout
