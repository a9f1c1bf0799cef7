"""What `make demo`, `make test`, `make smoke` and CI promise: what they install, run and do not skip."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from launching import run

ROOT = Path(__file__).parents[2]
PLAIN = {
    "ray": "tests/integration/test_ray_run.py::test_two_engines_on_ray_sample_for_one_trainer",
    "fsdp2": "tests/unit/test_parallel_ranks.py::test_two_ranks_make_the_update_of_one[fsdp2]",
    "tensor parallel": "tests/unit/test_parallel_ranks.py::test_two_ranks_make_the_update_of_one[tensor]",
    "context parallel": "tests/unit/test_parallel_ranks.py::test_two_ranks_make_the_update_of_one[context]",
    "colocated": "tests/integration/test_colocated.py"
    "::test_engines_sleep_while_ranks_train_and_wake_with_the_same_weights[sharded]",
}
"""What a plain `make test` runs of each way to spread a run."""
COLLECT = """
import sys
import pytest
from _pytest.skipping import evaluate_skip_marks

class Skips:
    def pytest_collection_finish(self, session):
        print(*(item.nodeid for item in session.items if not evaluate_skip_marks(item)), sep="\\n", file=sys.stderr)

sys.exit(pytest.main(["--collect-only", "-p", "no:cacheprovider", *sys.argv[1:]], plugins=[Skips()]))
"""


def planned(target: str, folder: Path) -> list[str]:
    """What make would run for a target where no environment is there yet."""
    environments = [f"{name}={folder}/{name}" for name in ("VENV", "MLX", "VERIFIERS")]
    command = ["make", "--dry-run", "--no-print-directory", target, *environments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def installs(lines: list[str]) -> list[str]:
    return [line.split()[-1] for line in lines if " pip " in line]


@pytest.mark.skipif(sys.platform != "linux", reason="a Mac installs other extras")
def test_the_demo_installs_the_package_and_no_developers_tools(tmp_path):
    assert installs(planned("demo", tmp_path)) == ["constraints.txt", "'.'"]
    assert installs(planned("test", tmp_path)) == ["constraints.txt", "'.'", "constraints.txt", "'.[dev]'"]


def test_ci_runs_the_tests_and_then_the_smoke(tmp_path):
    commands = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("make")]
    assert commands == ["make test", "make smoke"]
    smoke = "\n".join(planned("smoke", tmp_path))
    assert re.search(r"MLX/bin/python -m pytest .*tests/mlx/test_mlx_losses\.py::test_log_prob", smoke)
    assert re.search(r"MLX/bin/python -m pytest .*tests/mlx/test_mlx_runs\.py::test_a_run_needs_no_torch", smoke)
    assert re.search(r"VERIFIERS/bin/python -m pytest .*tests/integration/test_doors_train\.py::test_one", smoke)
    assert "scripts/smoke_wheel.py" in smoke
    assert smoke.count("PACELINE_NO_SKIPS=1") == 2


def test_the_smoke_environments_hold_what_their_tests_need_and_little_else(tmp_path):
    assert installs(planned("smoke", tmp_path))[1::2] == ["'.[test,torch,mlx]'", "'.[test,verifiers]'"]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert not [name for name in extras["test"] if name.startswith(("ray", "trl", "playwright"))]


def test_a_plain_run_skips_no_way_to_spread_a_run():
    """And the smoke's tests are where the Makefile says."""
    pytest.importorskip("ray", reason="needs the extra `ray`")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE_SCALE")}
    files = sorted({node.partition("::")[0] for node in PLAIN.values()})
    done = run([sys.executable, "-c", COLLECT, *files], cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout
    assert set(PLAIN.values()) <= set(done.stderr.splitlines())


def test_a_named_test_that_is_skipped_fails_where_skips_are_forbidden(tmp_path):
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "test_it.py").write_text("import pytest\n\ndef test_it():\n    pytest.skip('not installed')\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"]
    codes = [
        run(command, cwd=tmp_path, env=os.environ | {"PACELINE_NO_SKIPS": forbidden}).returncode for forbidden in "01"
    ]
    assert codes == [0, 1]


def test_the_smollm2_script_names_the_package_it_needs_before_it_downloads():
    hidden = "import sys; sys.path.insert(0, 'scripts'); import get_smollm2 as s; "
    code = hidden + "s.importlib.util.find_spec = lambda name: None; s.smollm2(s.Path('nowhere'))"
    done = run([sys.executable, "-c", code], cwd=ROOT)
    assert done.returncode == 1
    assert "needs the package gguf, which is not installed: " in done.stderr
    assert "-m pip install 'gguf>=0.19,<1'" in done.stderr
    assert not (ROOT / "nowhere").exists()
