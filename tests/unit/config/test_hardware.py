"""A run on mlx: what it may ask for, and that nothing on its way knows torch."""

import platform
import subprocess
import sys

import pytest

from paceline.config import ConfigError, load
from paceline.config.hardware import uses_mlx
from paceline.errors import PacelineError
from paceline.runtime import train

WITHOUT_TORCH = """
import sys
for name in ("torch", "peft", "trl"):
    sys.modules[name] = None  # as if it were not installed
import importlib
for module in {modules}:
    importlib.import_module(module)
"""
ON_THE_WAY = (
    "paceline.commands",
    "paceline.runtime.session",
    "paceline.runtime.serving",
    "paceline.commands.ab",
    "paceline.runtime.local",
    "paceline.server",
    "paceline.engine.engine",
    "paceline.trainer",
    "paceline.selfplay",
    "paceline.observe.web",
    "paceline.observe.terminal.app",
    "paceline.observe.report",
    "paceline.planner.compare",
)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (["--placement", "processes"], "computes in one process"),
        (["--device", "cuda"], 'device = "cuda" is for torch'),
        (["--engine.backend", "vllm", "--engine.base_url", "http://there"], "fed by a trainer of torch"),
        (["--trainer.optimizer.offload", "true"], "trainer.optimizer.offload has nowhere to move to"),
        (["--trainer.kl.offload", "true"], "trainer.kl.offload has nowhere to move to"),
        (["--engine.cache", "pages"], "is torch's"),
    ],
)
def test_what_mlx_cannot_do_is_said_before_anything_starts(keys, sentence):
    with pytest.raises(ConfigError, match=sentence):
        load(None, ["--backend", "mlx", *keys])
    load(None, ["--backend", "torch", *keys])


@pytest.mark.parametrize(
    "keys",
    [["--device", "cpu"], ["--engine.products", "half"], ["--engine.cache_gib", "2"]],
    ids=lambda keys: keys[0],
)
def test_what_mlx_has_no_use_for_is_said_in_one_sentence(keys):
    (warning,) = load(None, ["--backend", "mlx", *keys]).warnings
    assert warning.startswith(keys[0].removeprefix("--"))
    assert 'has no effect with backend = "mlx"' in warning
    assert load(None, ["--backend", "mlx"]).warnings == load(None, ["--backend", "torch", *keys]).warnings == []


def test_where_the_machine_chooses_mlx_it_is_said_when_the_run_starts(monkeypatch, tmp_path):
    monkeypatch.setenv("PACELINE_BACKEND", "mlx")
    config = load(None, ["--placement", "processes", "--runs", str(tmp_path)]).config
    with pytest.raises(PacelineError, match="computes in one process"):
        train(config)
    assert not any(tmp_path.iterdir())


def test_a_mac_takes_mlx_by_itself_and_no_other_machine_does(monkeypatch):
    monkeypatch.delenv("PACELINE_BACKEND", raising=False)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert uses_mlx("auto")
    assert not uses_mlx("torch")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not uses_mlx("auto")
    assert uses_mlx("mlx")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert not uses_mlx("auto")


def test_the_environment_chooses_only_where_the_run_file_does_not(monkeypatch):
    monkeypatch.setenv("PACELINE_BACKEND", "mlx")
    assert uses_mlx("auto")
    assert not uses_mlx("torch")
    monkeypatch.setenv("PACELINE_BACKEND", "jax")
    with pytest.raises(PacelineError, match="write torch or mlx"):
        uses_mlx("auto")


def test_what_only_torch_can_do_says_so_where_it_is_missing():
    code = WITHOUT_TORCH.format(modules=()) + "from paceline.commands import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, "serve", "paceline:quickstart", "--backend", "torch"],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 2
    assert "pip install 'paceline[torch]'" in done.stderr


def test_the_way_to_a_run_and_to_a_server_needs_no_torch():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH.format(modules=ON_THE_WAY)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
