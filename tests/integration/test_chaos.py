"""A short training under fire: `benchmarks/chaos.py` in small. Every kind of process is killed, the disk runs full if
one may be mounted, wires are cut and garbled, graders lie."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "chaos.py"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds workers by /proc")
@pytest.mark.timeout(600)
def test_nothing_is_lost_under_fire(tmp_path):
    command = [sys.executable, str(BENCHMARK), "--steps", "12", "--kills", "4", "--fills", "1", "--alone"]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "chaos.json")],
        cwd=BENCHMARK.parent,
        env=os.environ | {"PYTHONPATH": str(BENCHMARK.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    result = json.loads((tmp_path / "chaos.json").read_text())
    assert set(result["kills"]) == {"orchestrator", "trainer", "server", "worker"}
    assert result["tokens"]["tokens"] > 1000
    assert result["tokens"]["false"] == 0
    assert result["wrong_tickets"] == []
