"""The last example of the document that the library API is from runs with mlx on a 4-bit base, as it is printed."""

import ast
import asyncio
import sys
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("mlx.core", exc_type=ImportError)

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "integration"), str(ROOT / "examples" / "seeds" / "legos")]

from live_server import served  # noqa: E402
from test_legos_document import (  # noqa: E402
    CACHE,
    DOCUMENT,
    MODEL_NAME,
    PAGE,
    FewWords,
    block,
    printed_parts,
    scope_of,
)

from paceline.model.mlx.lora import adapted_layers  # noqa: E402
from paceline.runtime.selfplay import apply_lora, load  # noqa: E402


def test_the_last_example_runs_as_printed_on_a_quantised_base(tmp_path, monkeypatch):
    from mlx_lm import convert

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PACELINE_API_KEY", "mine")
    Path(MODEL_NAME).parent.mkdir()
    convert(str(ROOT / "src" / "paceline" / "quickstart"), MODEL_NAME, quantize=True, q_bits=4, q_group_size=32)
    source = DOCUMENT or PAGE
    text = block(source, "await training_loop(").replace("num_steps=1000", "num_steps=3")
    with served("--backend", "mlx", *CACHE, model=MODEL_NAME, key="mine") as server:
        text = text.replace("http://localhost:8000", server.url)
        scope = scope_of(source, MyArena=FewWords, load=partial(load, backend="mlx"))
        code = compile(text, "the last example", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)

        async def run():
            await eval(code, scope)
            await scope["client"].aclose()

        asyncio.run(asyncio.wait_for(run(), 600))
        trainer = scope["trainer"]
        trainer.close()
        assert trainer.version >= 1
        assert server.get("/policy").json()["version"] == trainer.version


LOOPS = {"training_loop": [asyncio.Queue(maxsize=1)], "synchronous_training_loop": []}


@pytest.mark.parametrize("loop", LOOPS)
def test_both_loops_run_as_printed(loop, tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_API_KEY", "mine")
    scope = scope_of(DOCUMENT or PAGE, f"async def {loop}(", episode_concurrency=16)
    with served("--backend", "mlx", *CACHE, key="mine") as server:
        arena, trainer = printed_parts(server.url, tmp_path, "mlx", clip_skip_threshold=None)

        async def run():
            await scope[loop](arena, trainer, 2, *LOOPS[loop])
            await trainer.flush()
            await trainer.client.aclose()

        asyncio.run(asyncio.wait_for(run(), 600))
        trainer.close()
        assert trainer.version == len(trainer.reports) >= 1
        assert server.get("/policy").json()["version"] == trainer.version


def test_adapters_are_frozen_and_trained_again():
    model, _ = load("paceline:quickstart", lora=None, backend="mlx")
    apply_lora(model, inference_mode=True)
    assert adapted_layers(model.net)
    assert not _leaves(model)
    apply_lora(model, inference_mode=False)
    assert {name.rpartition(".")[2] for name in _leaves(model)} == {"lora_A", "lora_B"}


def _leaves(model):
    from mlx.utils import tree_flatten

    return dict(tree_flatten(model.net.trainable_parameters()))
