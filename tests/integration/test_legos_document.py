"""The code blocks of the document that the library API is from run as they are printed, against a real server.

The blocks are read from the document where it is there, else from `docs/seeds/legos.md`, which prints the same ones.
"""

import ast
import asyncio
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from live_server import becomes, door, served

from child_processes import Launched
from paceline.config.inference import SamplingConfig
from paceline.data import Sample
from paceline.errors import PacelineError
from paceline.runtime import selfplay as library
from paceline.runtime.selfplay import GRPOCredit, OpenAIClient, Trainer, TrainerConfig, load, optim
from paceline.trainer.loss import Loss
from paceline.trainer.reference import subtract_kl
from paceline.trainer.terms import TrainedTokens

ROOT = Path(__file__).parents[2]
DOCUMENT = next(iter((ROOT.parent / "shared" / "seeds").glob("000_*.txt")), None)
PAGE = ROOT / "docs" / "seeds" / "legos.md"
SOURCES = [
    pytest.param(DOCUMENT, id="document", marks=pytest.mark.skipif(DOCUMENT is None, reason="shared/ is not here")),
    pytest.param(PAGE, id="page"),
]
MODEL_NAME = "mlx-community/Qwen2.5-1.5B-Instruct-4bit"
CACHE = ("--engine.adapters", "1", "--engine.max-context", "64")

sys.path.insert(0, str(ROOT / "examples" / "seeds" / "legos"))
from reverse_words import ReverseWords  # noqa: E402


def block(source: Path, words: str) -> str:
    """The Python block of a page that holds these words."""
    text = source.read_text(encoding="utf-8")
    (found,) = (one for one in re.findall(r"(?ms)^```python\n(.*?)^```", text) if words in one)
    return found


def scope_of(source: Path, *blocks: str, **names: Any) -> dict[str, Any]:
    """The names that these blocks define, among the library's own."""
    scope = {name: getattr(library, name) for name in library.__all__} | {"asyncio": asyncio} | names
    for words in blocks:
        exec(block(source, words), scope)
    return scope


class FewWords(ReverseWords):
    def get_batch(self):
        return super().get_batch()[:32]


@pytest.fixture(scope="module")
def server():
    with pytest.MonkeyPatch.context() as patch, served(*CACHE, key="mine") as running:
        patch.setenv("PACELINE_API_KEY", "mine")
        yield running


def printed_parts(url: str, tmp_path: Path, backend: str = "torch", **settings: Any) -> tuple[ReverseWords, Trainer]:
    model, _ = load("paceline:quickstart", backend=backend)
    config = TrainerConfig(checkpoint_dir=str(tmp_path), **settings)
    client = OpenAIClient(base_url=f"{url}/v1", sampling=SamplingConfig(max_tokens=12))
    trainer = Trainer(model, optim.Adam(learning_rate=1e-4), config, client)
    return FewWords(client, credit_assigner=GRPOCredit()), trainer


@pytest.mark.parametrize("source", SOURCES)
def test_the_async_loop_runs_as_printed(source, server, tmp_path):
    scope = scope_of(source, "async def training_loop(", episode_concurrency=16)
    arena, trainer = printed_parts(server.url, tmp_path)

    async def run():
        await scope["training_loop"](arena, trainer, 3, asyncio.Queue(maxsize=1))
        await trainer.flush()
        version = await trainer.client.get_policy_version()
        await trainer.client.aclose()
        return version

    assert asyncio.run(asyncio.wait_for(run(), 600)) == trainer.version == len(trainer.reports) >= 1
    trainer.close()


@pytest.mark.parametrize("source", SOURCES)
def test_the_synchronous_loop_runs_as_printed_and_plays_each_batch_with_the_weights_before_it(source, server, tmp_path):
    scope = scope_of(source, "async def synchronous_training_loop(")
    arena, trainer = printed_parts(server.url, tmp_path, clip_skip_threshold=None)
    batches = []
    step = arena.step

    async def watched(**more):
        batches.append(await step(**more))
        return batches[-1]

    arena.step = watched

    async def run():
        await scope["synchronous_training_loop"](arena, trainer, 3)
        await trainer.flush()
        await trainer.client.aclose()

    asyncio.run(asyncio.wait_for(run(), 600))
    trainer.close()
    assert [{record.meta["policy_version"] for record in batch.records} for batch in batches] == [{0}, {1}, {2}]
    assert trainer.version == 3

    printed = scope_of(source, "def form_micro_batch(")["form_micro_batch"]
    records = batches[0].records
    formed = printed(records, 100)
    assert formed == records[: len(formed)]
    assert 0 < sum(len(record.input_ids) for record in formed) <= 100

    filter_fresh = scope_of(source, "def filter_fresh(")["filter_fresh"]
    every = [record for batch in batches for record in batch.records]
    fresh = filter_fresh(every, 3, staleness_limit=2)
    assert fresh == [record for batch in batches[1:] for record in batch.records]


@pytest.mark.parametrize("source", SOURCES)
def test_the_last_example_runs_as_printed(source, server, tmp_path, monkeypatch):
    """Its model's name is a folder here, its port this server's; it takes 3 steps instead of 1000."""
    shutil.copytree(ROOT / "src" / "paceline" / "quickstart", tmp_path / MODEL_NAME)
    monkeypatch.chdir(tmp_path)
    text = block(source, "await training_loop(")
    for words, here in {"http://localhost:8000": server.url, "num_steps=1000": "num_steps=3"}.items():
        assert words in text
        text = text.replace(words, here)
    scope = scope_of(source, MyArena=FewWords)
    code = compile(text, "the last example", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)

    async def run():
        await eval(code, scope)
        await scope["client"].aclose()

    asyncio.run(asyncio.wait_for(run(), 600))
    trainer = scope["trainer"]
    trainer.close()
    assert [line["step"] for line in trainer.metrics] == list(range(1, trainer.version + 1))
    assert trainer.version >= 1
    assert server.get("/policy").json()["version"] == trainer.version


@pytest.mark.skipif(DOCUMENT is None, reason="shared/ is not here")
def test_the_settings_are_those_printed_with_their_defaults():
    scope: dict[str, Any] = {"dataclass": dataclasses.dataclass}
    assert DOCUMENT is not None
    exec("from typing import Optional\n" + block(DOCUMENT, "class TrainerConfig"), scope)
    printed = {field.name: field.default for field in dataclasses.fields(scope["TrainerConfig"])}
    assert printed == TrainerConfig().model_dump()


def test_the_page_lists_all_settings_with_their_defaults():
    rows = re.findall(r"(?m)^\| `(\w+)` \| ([^|]+) \|", PAGE.read_text(encoding="utf-8"))
    assert {name: json.loads(default) for name, default in rows} == TrainerConfig().model_dump()


@pytest.mark.parametrize("source", SOURCES)
def test_the_formulas_give_the_numbers_that_the_trainer_computes_with(source):
    """The printed lines, run on numbers, beside the terms of the loss; `ratio` is the `importance_ratio` of the line
    before it."""
    rng = np.random.default_rng(0)
    n = 12
    sampled = -rng.exponential(1.0, n)
    names = {
        "inference_logprobs": sampled,
        "trainer_logprobs": sampled + rng.normal(0, 0.3, n),
        "advantage": rng.normal(size=n),
        "epsilon": 0.2,
        "mask": np.ones(n, bool),
    }
    names |= {"exp": np.exp, "clip": np.clip, "min": np.minimum, "mean": np.mean}
    names["ratio"] = np.exp(names["trainer_logprobs"] - sampled)
    scope = scope_of(source, "log_ratio = trainer_logprobs", **names)
    exec(block(source, "si_clipped"), gspo := scope | {"epsilon": TrainerConfig().gspo_clip_epsilon})

    ones = np.ones(n)
    tokens = TrainedTokens(
        logprobs=names["trainer_logprobs"], rollout_logprobs=sampled, prox_logprobs=ones * np.nan,
        advantages=names["advantage"], teacher_logprobs=ones * np.nan, kl_ref_logprobs=ones * np.nan,
        rl_scale=ones, ce_scale=0 * ones, teacher_kl_scale=0 * ones, regulariser_scale=ones, entropy=0 * ones,
        versions=np.zeros(n, int), segments=np.zeros(n, int), names=("one",),
    )  # fmt: skip
    ours = Loss(TrainerConfig(clip_skip_threshold=None).section(optim.Adam())).per_token(tokens).terms["rl"]
    np.testing.assert_allclose(ours, scope["loss"], rtol=1e-12)
    sequence = TrainerConfig(clip_skip_threshold=None, importance_sampling="sequence").section(optim.Adam())
    ours = Loss(sequence).per_token(tokens).terms["rl"]
    a, s = names["advantage"], gspo["si"]
    np.testing.assert_allclose(ours, -np.minimum(s * a, gspo["si_clipped"] * a), rtol=1e-9)

    kl = TrainerConfig(use_kl_penalty=True, kl_max=0.2).section(optim.Adam()).kl
    assert kl is not None
    reference = sampled - 0.5
    scope |= {"trainer_logprobs": sampled, "reference_logprobs": reference, "kl_max": 0.2, "kl_coef": 0.1}
    exec(block(source, "k1_clipped"), scope)
    mask = np.arange(n + 1) > 0
    streams = {
        name: np.concatenate([[0.0], values])
        for name, values in {"logprobs": sampled, "advantages": a, "kl_ref_logprobs": reference}.items()
    }
    sample = Sample(
        token_ids=np.arange(n + 1), loss_mask=mask, versions=mask - 1, temperatures=np.ones(n + 1), **streams
    )
    shaped = subtract_kl(sample, streams["logprobs"], kl).advantages
    assert shaped is not None
    np.testing.assert_allclose(shaped[mask], scope["shaped_advantage"], rtol=1e-5)


def test_a_key_that_the_server_does_not_know_is_a_sentence(server, tmp_path):
    model, _ = load("paceline:quickstart")
    trainer = Trainer(model, None, None, OpenAIClient(f"{server.url}/v1", api_key="another"))
    arena = FewWords(trainer.client, credit_assigner=GRPOCredit())
    with pytest.raises(PacelineError, match=rf"the server {server.url} cannot be used: .*same key.* PACELINE_API_KEY"):
        asyncio.run(arena.step())
    trainer.close()


SCRIPT = f"""
import asyncio, sys
sys.path.insert(0, {str(ROOT / "examples" / "seeds" / "legos")!r})
from reverse_words import *

class FewWords(ReverseWords):
    def get_batch(self):
        return super().get_batch()[:32]

async def main(url, num_steps, resume):
    model, tokenizer = load("paceline:quickstart")
    config = TrainerConfig(checkpoint_every=2, eval_every=0, clip_skip_threshold=None)
    client = OpenAIClient(base_url=url, sampling=SamplingConfig(max_tokens=12))
    trainer = Trainer(model, optim.Adam(learning_rate=1e-4), config, client)
    arena = FewWords(client, credit_assigner=GRPOCredit())
    more = dict(resume=resume, metrics_file="metrics.jsonl")
    await training_loop(arena=arena, trainer=trainer, num_steps=num_steps, episode_concurrency=32, **more)

asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
"""


def test_a_script_that_is_killed_loses_its_server_and_is_stopped_trains_every_batch_once(tmp_path):
    """`kill -9` of the script, then of the server, which comes back with none of the adapters; then Ctrl-C."""
    (tmp_path / "script.py").write_text(SCRIPT)
    file, port = tmp_path / "metrics.jsonl", door()
    address, place = f"http://127.0.0.1:{port}", ("--port", str(port))

    def steps() -> list[int]:
        text = file.read_text() if file.exists() else ""
        return [json.loads(line)["step"] for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def started(num_steps: int, resume: str) -> Launched:
        command = [sys.executable, str(tmp_path / "script.py"), address, str(num_steps), resume]
        key = os.environ | {"PACELINE_API_KEY": "mine"}
        return Launched(command, cwd=tmp_path, env=key, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)

    def goes_on(script: Launched, count: int) -> bool:
        return becomes(lambda: len(steps()) >= count or script.poll() is not None) and script.poll() is None

    with served(*CACHE, *place, key="mine") as server:
        with started(1000, "") as script:
            assert goes_on(script, 3)
            script.kill()
        (tmp_path / "checkpoints" / ".step-000999.tmp").mkdir()  # as a script leaves that is killed while it writes
        with started(1000, "latest") as script:
            assert goes_on(script, len(steps()) + 2)
            server.stop(signal.SIGKILL)
            with served(*CACHE, *place, key="mine"):
                assert goes_on(script, len(steps()) + 3)
                script.send_signal(signal.SIGINT)
                words = script.communicate(timeout=240)[1]
                last = steps()[-1]
                assert f"stopped after step {last}, in batch " in words
                assert 'of 1000: go on with resume="latest"' in words
                assert "never awaited" not in words
                batches = int(re.search(r"in batch (\d+) of", words)[1])
                with started(batches + 1, "latest") as script:
                    assert script.wait(240) == 0, script.stderr.read()
    assert steps() == list(range(1, steps()[-1] + 1))
    assert last <= steps()[-1] <= last + 2
    folders = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert f"step-{steps()[-1]:06d}" in folders
    assert ".step-000999.tmp" not in folders
