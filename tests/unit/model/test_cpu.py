"""What is said of a CPU."""

import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from paceline.config.model import ModelConfig
from paceline.model import cpu, load_model, set_cpu_threads


def test_a_type_that_this_cpu_has_no_instructions_for_is_told_in_one_sentence(monkeypatch):
    monkeypatch.setattr(cpu, "slowness", lambda dtype: 240.4)
    with pytest.warns(UserWarning, match='multiplies bfloat16 240 times slower than float32: set model.dtype = "flo'):
        load_model(ModelConfig(dtype="bfloat16"))


@pytest.mark.parametrize(("dtype", "times"), [("bfloat16", 2.0), ("float32", 240.0)])
def test_what_is_quick_needs_no_word(monkeypatch, dtype, times):
    monkeypatch.setattr(cpu, "slowness", lambda dtype: times)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_model(ModelConfig(dtype=dtype))


def test_slowness_is_a_ratio_to_float32(monkeypatch):
    """Of each type the best product counts, and the first, for which torch prepares, does not."""
    taken = [1.0, 6.0, 3.0, 5.0, 0.1, 2.0, 1.5, 4.0]  # four products in float64, four in float32
    ticks = iter([tick for start, seconds in enumerate(taken) for tick in (100.0 * start, 100.0 * start + seconds)])
    monkeypatch.setattr(cpu, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    assert cpu.slowness(torch.float64) == 2.0


def test_each_thread_computes_with_the_count_it_has_set():
    """Also if another thread sets its own count before the first one has computed anything."""
    with ThreadPoolExecutor(1) as engine, ThreadPoolExecutor(1) as trainer:
        for thread, count in ((engine, 3), (trainer, 2)):
            thread.submit(set_cpu_threads, count).result()
        assert [thread.submit(torch.get_num_threads).result() for thread in (engine, trainer)] == [3, 2]
    assert torch.get_num_threads() == 1, "that of the tests' own thread, set in conftest.py"
