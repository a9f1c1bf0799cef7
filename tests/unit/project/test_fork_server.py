"""A process out of the fork server is what a fresh one would be: the tests that start one must not be able to tell."""

import ast
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import paceline
from child_processes import Launched, LaunchedPaceline, run

TELL = """
import json, os, random, signal, sys, threading
import numpy, torch
torch.set_num_threads(2)
print(json.dumps({
    "name": __name__,
    "arguments": sys.argv,
    "folder": os.getcwd(),
    "mine": os.environ.get("MINE"),
    "path": sys.path[1],
    "leads": os.getsid(0) == os.getpid(),
    "threads": [threading.active_count(), torch.get_num_threads(), float(torch.ones(500, 500).mm(torch.ones(500, 500)).sum())],
    "signals": [signal.getsignal(n) in (signal.SIG_DFL, signal.default_int_handler) for n in (2, 15, 17)],
    "blocked": [int(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
    "open": [n for n in range(3, 100) if os.path.exists(f"/proc/self/fd/{n}") and not os.readlink(f"/proc/self/fd/{n}").startswith(("/sys/", "/proc/"))],
    "draws": [random.random(), numpy.random.rand(), torch.rand(()).item()],
}))
print(sys.stdin.read(), file=sys.stderr, end="")
"""  # noqa: E501


def told(starts: type[subprocess.Popen], folder, passed: int) -> dict:
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    environment = os.environ | {"MINE": "ä", "PYTHONPATH": str(folder)}
    command = [sys.executable, "-c", TELL, "a", "b c"]
    with starts(
        command, cwd=folder, env=environment, text=True, start_new_session=True, pass_fds=[passed], **pipes
    ) as process:
        out, errors = process.communicate("heard", timeout=280)
    assert process.returncode == 0, errors
    assert errors.startswith("heard")  # a native library may report what it leaks when the interpreter ends
    return json.loads(out)


def test_every_python_that_is_started_keeps_the_current_folder_off_its_path():
    """`python -m` without `-P` would import a `json.py` that happens to lie there."""
    commands = 0
    for file in Path(paceline.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            items = node.elts if isinstance(node, ast.List) else node.args if isinstance(node, ast.Call) else []
            for first, second in itertools.pairwise(items):
                if ast.unparse(first) == "sys.executable":
                    commands += 1
                    assert ast.unparse(second) in ("'-P'", "'-I'"), f"{file}:{node.lineno}"
    assert commands >= 8


def test_the_fork_server_keeps_the_current_folder_off_the_path_where_it_is_told_to(tmp_path):
    code = [sys.executable, "-P", "-c", "import os, sys; print(os.getcwd() in sys.path)"]
    assert [run(code[:1] + code[at:], cwd=tmp_path).stdout.strip() for at in (1, 2)] == ["False", "True"]


@pytest.fixture
def interruptible():
    """Tests that run in a shell's background, or under nohup, ignore Ctrl-C, and so would what they start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(sys.platform != "linux", reason="forks on Linux only")
def test_surroundings_are_those_of_a_fresh_process_and_draws_are_its_own(tmp_path, interruptible):
    with Path(os.devnull).open() as passed:
        fresh, first, second = (
            told(starts, tmp_path, passed.fileno()) for starts in (subprocess.Popen, Launched, Launched)
        )
        assert first["open"] == fresh["open"] == [passed.fileno()]
    draws = [one.pop("draws") for one in (fresh, first, second)]
    assert fresh == first == second
    assert fresh["leads"]
    assert all(len(set(values)) == 3 for values in zip(*draws, strict=True)), draws


@pytest.mark.parametrize(
    ("code", "end"),
    [
        ("pass", 0),
        ("import sys; sys.exit(77)", 77),
        ("import sys; sys.exit('why')", 1),
        ("1 / 0", 1),
        ("import os; os._exit(3)", 3),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("import os; os.kill(os.getpid(), 15)", -signal.SIGTERM),
        ("import atexit, sys; atexit.register(print, 'bye'); sys.exit(5)", 5),
    ],
)
def test_it_ends_as_any_interpreter_does(code, end):
    done = run([sys.executable, "-c", code])
    assert done.returncode == end
    assert done.stdout == ("bye\n" if "bye" in code else "")
    assert ("Traceback" in done.stderr) == ("/" in code)


def test_it_can_be_waited_for_signalled_and_started_from_another():
    code = "import time; print('up', flush=True); time.sleep(1000)"
    with Launched([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "up\n"
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.05)
        process.terminate()
        assert process.wait(60) == process.poll() == -signal.SIGTERM
    start = "subprocess.Popen([sys.executable, '-m', 'paceline', '--help'])"
    done = run([sys.executable, "-c", f"import subprocess, sys; print(type({start}), flush=True)"])
    assert done.returncode == 0
    assert LaunchedPaceline.__name__ in done.stdout


def test_what_counts_on_import_gets_a_fresh_interpreter():
    code = "import sys; print('torch' in sys.modules)"
    command = [sys.executable, "-c", code]
    assert run(command).stdout == "True\n"
    assert run(command, env=os.environ | {"OMP_NUM_THREADS": "7"}).stdout == "False\n"
    assert run([sys.executable, "-I", *command[1:]]).stdout == "False\n"
