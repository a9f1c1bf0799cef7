"""A short training under fire: `benchmarks/chaos.py` in small. Every kind of process is killed, wires are cut and
garbled, graders lie. The disk runs full in the benchmark and in test_faults.py."""

import json
import os
import sys
from pathlib import Path

import pytest

import child_processes

pytestmark = pytest.mark.skipif(os.environ.get("PACELINE_SCALE") != "1", reason="takes half a minute: `make scale`")
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "chaos.py"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds workers by /proc")
def test_nothing_is_lost_under_fire(tmp_path):
    command = [sys.executable, str(BENCHMARK), "--steps", "8", "--kills", "4", "--fills", "0", "--alone"]
    environment = os.environ | {"PYTHONPATH": str(BENCHMARK.parent)}
    done = child_processes.run(
        [*command, "--json", str(tmp_path / "chaos.json")], timeout=580, cwd=BENCHMARK.parent, env=environment
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    result = json.loads((tmp_path / "chaos.json").read_text())
    assert set(result["kills"]) == {"orchestrator", "trainer", "server", "worker"}
    assert result["tokens"]["tokens"] > 500
    assert result["tokens"]["false"] == 0
    assert result["wrong_tickets"] == []
