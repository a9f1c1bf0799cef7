"""Compiled code made by another process: when it starts, what it shows, when the run switches, how it ends."""

import asyncio
import json
import logging
import sys
import time

import pytest

from conftest import tiny_model
from paceline.config import RunConfig, inference
from paceline.engine import EmbeddedEngine, GenerateRequest, noise_key
from paceline.model.background_compile import (
    CACHE_VARIABLE,
    SWITCH_SECONDS,
    BackgroundCompile,
    compile_cache,
    number_layers,
)
from paceline.model.support import attention_shape
from paceline.runtime import compile_worker
from paceline.runtime.torch_parts import background_compile

READS = "import json, sys; spec = json.load(sys.stdin); "


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))


def job(code: str = "", gain: float = 0.5, **spec) -> BackgroundCompile:
    return BackgroundCompile("trainer", [sys.executable, "-c", READS + code], spec, gain)


def wait(until, seconds: float = 400.0) -> None:
    end = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_compiling_starts_when_the_switch_pays_for_itself():
    for seconds, steps, remaining, starts in (
        (1.0, 10, 30, False),  # the quickstart: 3 s are left, of which half would be saved
        (2.0 * SWITCH_SECONDS, 1, 1, False),
        (2.1 * SWITCH_SECONDS, 1, 1, True),
        (2.0, 1, 100, True),
        (1e9, 100, 0, False),  # nothing is left to speed up
        (2.0 * SWITCH_SECONDS, 1, None, False),  # nothing is known: as much again is expected
        (2.1 * SWITCH_SECONDS, 1, None, True),
    ):
        made = job()
        started = []
        made.start = lambda started=started: started.append(True)
        made.consider(seconds, steps, remaining)
        assert bool(started) is starts, (seconds, steps, remaining)


def test_a_worker_shows_progress_and_leaves_a_mark_for_later_runs(caplog):
    made = job("print('1 of 2'); print('2 of 2')", shape=7)
    assert not made.is_cached
    with caplog.at_level(logging.WARNING):
        made.start()
        assert made.is_compiling or made.is_ready
        wait(lambda: made.is_ready)
        made.mark_switched()
    said = [record.getMessage() for record in caplog.records]
    assert "compiling the trainer, 2 of 2; training goes on uncompiled" in said
    assert said[-1] == "the trainer runs compiled code from here on"
    assert not made.is_ready, "a switch happens once"
    assert job(shape=7).is_cached
    assert not job(shape=8).is_cached
    later = job("raise SystemExit(1)", shape=7)
    later.start()
    assert later.is_ready, "what is on disk is not made again"


def test_a_worker_that_fails_leaves_the_run_uncompiled(caplog):
    made = job("sys.exit('the GPU is full')")
    with caplog.at_level(logging.WARNING):
        made.start()
        wait(lambda: not made.is_compiling)
    assert not made.is_ready
    assert not made.is_cached
    assert caplog.records[-1].getMessage().endswith("stays uncompiled: the GPU is full")
    made.consider(1e9, 1, 1000)
    assert not made.is_compiling, "it is not tried again and again"


def test_closing_ends_the_worker():
    made = job("import time; print('1 of 3', flush=True); time.sleep(600)")
    made.start()
    assert made._process is not None
    made.close()
    assert made._process.wait(60) != 0


def test_the_cache_is_the_users_and_not_the_temporary_folder(monkeypatch, tmp_path):
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compile_cache() == tmp_path / "paceline" / "compiled"
    monkeypatch.setenv(CACHE_VARIABLE, "elsewhere")
    assert str(compile_cache()) == "elsewhere"


def test_a_few_layers_hold_one_of_each_kind():
    kinds = ["sliding", "sliding", "sliding", "sliding", "full", "sliding"]
    cut = compile_worker.truncate_layers(
        {"num_hidden_layers": 6, "layer_types": kinds, "hidden_size": 8, "pair": [1, 2]}
    )
    assert cut == {"num_hidden_layers": 5, "layer_types": kinds[:5], "hidden_size": 8, "pair": [1, 2]}
    assert compile_worker.truncate_layers({"num_hidden_layers": 24})["num_hidden_layers"] == 2
    assert compile_worker.truncate_layers({"num_hidden_layers": 1})["num_hidden_layers"] == 1
    inner = compile_worker.truncate_layers({"text_config": {"num_hidden_layers": 9}, "other": 1})
    assert inner == {"text_config": {"num_hidden_layers": 2}, "other": 1}


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_the_worker_builds_and_runs_both_parts_of_a_run(lora):
    """Here on a CPU, where nothing is compiled: that it runs what the run runs."""
    model = tiny_model()
    config = RunConfig.model_validate({"model": {"dtype": "float32", "lora": lora}})
    spec = {"model": json.loads(model.config.to_json_string(use_diff=False)), "dtype": "float32", "device": 0}
    blank = compile_worker.random_model(spec)
    assert type(blank) is type(model)
    compile_worker.compile_trainer(spec, config)
    compile_worker.compile_engine(spec, config)


class OnGpu:
    """A model that says it is on a GPU: what is decided from the config alone."""

    def __init__(self, model) -> None:
        import torch

        self.device, self.dtype, self.config = torch.device("cuda"), torch.bfloat16, model.config


def test_deterministic_runs_and_fixed_settings_have_nothing_to_switch_to(monkeypatch):
    monkeypatch.setattr("paceline.runtime.torch_parts.can_varlen", lambda *_: True)
    model = OnGpu(tiny_model())
    for part in ("engine", "trainer"):
        assert background_compile(part, RunConfig(), model) is not None
        assert background_compile(part, RunConfig(deterministic=True), model) is None
        for fixed in (True, False):
            assert background_compile(part, RunConfig.model_validate({part: {"compile": fixed}}), model) is None
        remote = RunConfig.model_validate({"model": {"trust_remote_code": True}})
        assert background_compile(part, remote, model) is None
    monkeypatch.setattr("paceline.runtime.torch_parts.can_varlen", lambda *_: False)
    assert background_compile("trainer", RunConfig(), model) is None, "float32 is compiled anew for every cut"


def test_the_default_starts_uncompiled():
    config = RunConfig()
    assert (config.engine.compile, config.trainer.compile) == ("auto", "auto")


def test_an_engine_switches_between_two_steps_and_changes_no_answer():
    requests = [GenerateRequest(prompt_ids=(1, 2, 3 + i), max_tokens=12, noise=noise_key(i)) for i in range(6)]

    async def tokens(switch: bool) -> list:
        engine = EmbeddedEngine(tiny_model(), inference.EngineConfig(max_running=4, in_flight=2), deterministic=True)
        switched = []
        if switch:
            engine._runner.should_use_compiled = lambda busy, swaps: engine.steps >= 5 and not switched
            engine._runner.use_compiled = lambda: switched.append(len(engine._steps_in_flight))
        engine.start()
        try:
            done = await asyncio.gather(*(engine.generate(request) for request in requests))
        finally:
            engine.close()
        assert switched == ([0] if switch else []), "nothing may be in flight while graphs are captured anew"
        return [(c.token_ids, c.logprobs, c.versions) for c in done]

    assert asyncio.run(tokens(True)) == asyncio.run(tokens(False))


def test_numbered_layers_have_the_same_shape():
    """A model may be looked at once its layers are compiled."""
    model = tiny_model()
    before = attention_shape(model)
    number_layers(model.get_decoder())
    assert attention_shape(model) == before
