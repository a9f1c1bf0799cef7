"""A child ends with its parent."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SLOW = "import time\nprint('imports', flush=True)\ntime.sleep(600)\n"
PARENT = """
import subprocess, sys, time
from paceline.util.child_process import start_child
child = start_child("slow", line=b"what it will read\\n", stdout=None, stderr=sys.stderr)
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_child_ends_with_its_parent_also_while_it_imports(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    printed = {parent.stdout.readline().strip() for _ in range(2)}
    assert "imports" in printed
    [pid] = printed - {"imports"}
    parent.kill()
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()
    assert parent.wait(60) == -signal.SIGKILL
    parent.stdout.close()
