"""What `make demo`, `make test`, `make smoke` and CI promise: what they install, run and do not skip."""

import ast
import importlib
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from child_processes import run

ROOT = Path(__file__).parents[3]
PLAIN = {
    "ray": "tests/integration/test_ray_run.py::test_two_engines_on_ray_sample_for_one_trainer",
    "fsdp2": "tests/unit/trainer/test_parallel_ranks.py::test_two_ranks_make_the_update_of_one[fsdp2]",
    "tensor parallel": "tests/unit/trainer/test_parallel_ranks.py::test_two_ranks_make_the_update_of_one[tensor]",
    "context parallel": "tests/unit/trainer/test_parallel_ranks.py::test_two_ranks_make_the_update_of_one[context]",
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
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def installs(lines: list[str]) -> list[str]:
    return [line.split()[-1] for line in lines if " pip " in line]


@pytest.mark.skipif(sys.platform != "linux", reason="a Mac installs other extras")
def test_the_demo_installs_the_package_and_no_developers_tools(tmp_path):
    assert installs(planned("demo", tmp_path)) == ["constraints.txt", "'.'"]
    assert installs(planned("test", tmp_path)) == ["constraints.txt", "'.'", "constraints.txt", "'.[dev]'"]


@pytest.mark.parametrize("target", ["test-mlx", "scale", "doors", "clients", "vllm"])
def test_the_files_that_a_target_tests_are_there(tmp_path, target):
    words = [word.strip("'").partition("::")[0] for line in planned(target, tmp_path) for word in line.split()]
    files = [word for word in words if word.startswith("tests/")]
    assert files
    assert [file for file in files if not (ROOT / file).exists()] == []


def test_ci_runs_the_tests_and_then_the_smoke(tmp_path):
    commands = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("make")]
    assert commands == ["make test", "make smoke"]
    smoke = "\n".join(planned("smoke", tmp_path))
    assert re.search(r"MLX/bin/python -m pytest .*tests/mlx/test_mlx_losses\.py::test_log_prob", smoke)
    assert re.search(r"MLX/bin/python -m pytest .*tests/mlx/test_mlx_runs\.py::test_a_run_needs_no_torch", smoke)
    assert re.search(r"VERIFIERS/bin/python -m pytest .*tests/integration/test_doors_train\.py::test_one", smoke)
    assert "scripts/smoke_wheel.py" in smoke
    assert smoke.count("PACELINE_NO_SKIPS=1") == 3


def test_the_smoke_trains_every_folder_of_the_seed_examples(tmp_path):
    words = " ".join(planned("smoke", tmp_path)).split()
    files = {word.strip("'").partition("::")[0] for word in words if word.strip("'").startswith("tests/")}
    text = "\n".join((ROOT / file).read_text() for file in sorted(files))
    folders = {folder.name for folder in (ROOT / "examples" / "seeds").iterdir() if folder.is_dir()}
    assert len(folders) == 5
    assert {name for name in folders if re.search(rf'(?i)seeds["/ ]+{name}\b', text)} == folders


def test_the_smoke_environments_hold_what_their_tests_need_and_little_else(tmp_path):
    installed = ["'.'", "'.[dev]'", "'.[test,torch,mlx]'", "'.[test,verifiers]'"]
    assert installs(planned("smoke", tmp_path))[1::2] == installed
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
    done = run(command, cwd=tmp_path, env=os.environ | {"PACELINE_NO_SKIPS": "1"})
    assert (done.returncode, "not installed" in done.stdout) == (1, True), done.stdout


@pytest.fixture
def newcomer(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("newcomer")


def test_a_newcomer_has_an_empty_home_and_the_machines_pip(newcomer, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", "/wheels")
    monkeypatch.setenv("PACELINE_SCALE", "1")
    monkeypatch.setenv("HOME", str(tmp_path / "old"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.delenv("PIP_CONFIG_FILE", raising=False)
    config = tmp_path / "old" / ".config" / "pip" / "pip.conf"
    config.parent.mkdir(parents=True)
    config.touch()
    got = newcomer.surroundings(tmp_path / "home", tmp_path / "tmp", tmp_path / "pip")
    assert (got["HOME"], got["TMPDIR"]) == (str(tmp_path / "home"), str(tmp_path / "tmp"))
    assert (got["PIP_FIND_LINKS"], got["PIP_CONFIG_FILE"]) == ("/wheels", str(config))
    assert "PACELINE_SCALE" not in got
    assert not list((tmp_path / "home").iterdir())


@pytest.mark.parametrize("more", [2, 30, 80])
def test_a_newcomers_temporary_folders_have_their_lengths(newcomer, tmp_path, more):
    length = len(str(tmp_path)) + more
    assert len(str(newcomer.folder_of_length(tmp_path, length))) == length


def test_a_failed_command_shows_in_a_newcomers_table(newcomer, tmp_path, capsys):
    environment = {"TMPDIR": "/tmp", "PATH": os.environ["PATH"]}
    commands = {"good": "pass", "bad": "raise SystemExit('no such target')"}
    good, bad = (
        newcomer.attempt(name, [sys.executable, "-c", code], tmp_path, environment, tmp_path / f"{name}.log")
        for name, code in commands.items()
    )
    assert (good.passed, bad.passed) == (True, False)
    assert "no such target" in capsys.readouterr().out
    assert [line.split()[-1] for line in newcomer.table([good, bad]).splitlines()[1:]] == ["passed", "FAILED"]


def test_the_smollm2_script_names_the_package_it_needs_before_it_downloads():
    hidden = "import importlib.util, sys; sys.path.insert(0, 'scripts'); import get_smollm2 as s; "
    code = hidden + "importlib.util.find_spec = lambda name: None; s.smollm2(s.Path('nowhere'))"
    done = run([sys.executable, "-c", code], cwd=ROOT)
    assert done.returncode == 1
    assert "needs the package gguf, which is not installed: " in done.stderr
    assert "-m pip install 'gguf>=0.19,<1'" in done.stderr
    assert not (ROOT / "nowhere").exists()


def test_what_benchmarks_and_scripts_import_is_there():
    """No type checker reads them."""
    files = [*ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("scripts/*.py")]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    wanted = {
        (node.module, name.name)
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "paceline"
        for name in node.names
    }
    assert len(wanted) > 100
    for module, name in sorted(wanted):
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if (error.name or "paceline").startswith("paceline"):
                raise  # only an optional package may be missing
        else:
            assert hasattr(found, name) or importlib.util.find_spec(f"{module}.{name}"), f"{module}.{name}"
