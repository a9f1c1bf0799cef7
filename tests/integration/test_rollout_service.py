"""A run whose rollout service is killed again and again loses no episode and trains none twice."""

import json
import os
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from threading import Event, Thread

import paceline
from paceline.config import load as load_config

FOLDER = Path(__file__).parents[2] / "examples" / "seeds" / "async_rl_loop"
STEPS = 5


def read(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def lines(file: Path) -> int:
    return file.read_text().count("\n") if file.exists() else 0


def test_a_run_survives_kill_9_of_its_rollout_service(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    metrics, over, kills = tmp_path / "far" / "metrics.jsonl", Event(), []

    def serve() -> None:
        """Until the run is over, a service that is killed after each of the run's first three steps."""
        while not over.is_set():
            command = [sys.executable, str(FOLDER / "rollout_service.py"), str(port)]
            process = subprocess.Popen(command, env={**os.environ})
            while not over.wait(0.01):
                if len(kills) < 3 and lines(metrics) > len(kills):
                    kills.append(process.pid)
                    break
            process.kill()
            process.wait()

    service = Thread(target=serve, daemon=True)
    service.start()
    try:
        loaded = load_config(FOLDER / "remote.toml", ["--env.0.url", f"http://127.0.0.1:{port}/rollout"])
        result = paceline.train(
            loaded,
            name="far",
            runs=str(tmp_path),
            steps=STEPS,
            batch_size=16,
            group_size=4,
            staleness=2,
            filters={"zero_advantage": False},
            eval={"every": 0},
            device="cpu",
            quiet=True,
        )
    finally:
        over.set()
        service.join(60)
    assert result.outcome.status == "finished"
    assert len(kills) == 3
    steps = read(metrics)
    assert [step["dropped/failed_rollouts"] for step in steps] == [0.0] * STEPS
    assert all(0 < step["turns"] <= 2 and step["staleness/max"] <= 2 for step in steps)
    tickets = read(tmp_path / "far" / "tickets.jsonl")
    trained = Counter(ticket["number"] for ticket in tickets if ticket["state"] == "trained")
    assert (len(trained), set(trained.values())) == (STEPS * 4, {1})
