"""How long new weights take from a trainer to an engine, by each path, and how few of them a step changes.

    python benchmarks/weights.py --size small 0.5B --json FILE            on a CPU
    python benchmarks/weights.py --part paths --size 1.5B --only http --json FILE    one of them
    python benchmarks/weights.py --gpu --part paths --size 0.5B 1.5B --json FILE
    python benchmarks/weights.py --part delta --model FOLDER --rows FILE.jsonl

paths   Random Qwen2.5-shaped bfloat16 weights. A real `paceline serve` holds them, in a process of its own and on the
        same device as the sender. Between two updates the last bit of 2% of all elements changes. `publish` is from the
        trainer's tensors to the server's answer, fingerprints included; `pause` is what the engine says it stood still,
        while idle, with fingerprints checked. The first update is not counted: it is whole, and forms the group.
        On a GPU the files lie in /dev/shm. NCCL does not take two ranks on one card, so `broadcast` is gloo there,
        over the host's memory. `copy` is the engine in the sender's own process.

delta   A real model in float32, trained by the real trainer with AdamW, all parameters, on real text (GSM8K's worked
        solutions, next-token loss), and published in bfloat16 after each step: the masters rounded, as a bfloat16 model
        holds them. The bar is on the bytes of the updates after step 20 at a learning rate of 1e-6, against those of a
        full update. Next-token gradients agree from step to step more than a policy's do, so Adam's steps are longer
        and more elements change: this is the harder case.
"""

import argparse
import asyncio
import contextlib
import gc
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Generator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import paceline
from bars import arguments
from engine_gpu import SHAPES, VOCABULARY, Sheet
from paceline.clients import HttpEngine
from paceline.config import trainer as config
from paceline.config.inference import EngineConfig
from paceline.config.model import ModelConfig
from paceline.data import Sample
from paceline.engine import EmbeddedEngine
from paceline.model import ATTENTION, WeightUpdate, fingerprint, load_model, load_tokenizer
from paceline.trainer.torch.trainer import TorchTrainer
from paceline.weights.delta import DeltaEncoder
from paceline.weights.update import ServedPolicy, bits_of

ROOT = Path(__file__).parent.parent
SMALL = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512}
PATHS = ("disk", "http", "delta", "broadcast")
COPY = "copy"
LONGEST_SECONDS = 1800
CHANGED = 0.02
READY = re.compile(r"paceline: serving \S+ at (http://\S+)/v1")
BAR, AFTER = 0.10, 20


class Merged(Sheet):
    """Lines that are measured again take the place of the old ones in the file; the others stay."""

    def __init__(self, path: Path | None, title: str) -> None:
        super().__init__(path, title)
        if path is not None and path.exists():
            self.lines = json.loads(path.read_text(encoding="utf-8"))["lines"]

    def _add(self, what: str, *rest, **extra: float) -> None:
        self.lines = [line for line in self.lines if line["what"] != what]
        super()._add(what, *rest, **extra)


def model_of(shape: str, device: str) -> Qwen2ForCausalLM:
    small = shape == "small"
    c = Qwen2Config(
        **(SMALL if small else SHAPES[shape]),
        vocab_size=8192 if small else VOCABULARY,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
    )
    torch.manual_seed(0)
    with torch.device(device):
        return Qwen2ForCausalLM._from_config(c, attn_implementation=ATTENTION, dtype=torch.bfloat16).eval()


@contextlib.contextmanager
def serving(folder: Path, shared: Path, device: str) -> Generator[str]:
    """A real server of this model; what it spools lies beside the shared folder."""
    command = [sys.executable, "-m", "paceline", "serve", str(folder), "--port", "0", "--allow", str(shared)]
    command += ["--model.dtype", "bfloat16", "--device", device, "--engine.compile", "false"]
    command += ["--engine.max_running", "8", "--engine.max_context", "512"]
    command += ["--engine.cache_gib", "2"] if device == "cuda" else []
    environment = os.environ | {"TMPDIR": str(shared.parent)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        ready = next((found for line in process.stdout if (found := READY.match(line))), None)
        assert ready, "the server did not start"
        yield ready[1]
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(30)


def change(tensors: dict[str, torch.Tensor]) -> None:
    """Another bit in some elements, wherever they are."""
    for tensor in tensors.values():
        bits = bits_of(tensor)
        places = torch.randint(len(bits), (math.ceil(CHANGED * len(bits)),), device=bits.device)
        bits[places] = bits[places] ^ 1


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


async def publish(engine, tensors, rounds: int, device: str, first: int) -> tuple[float, float]:
    """Median seconds of an update and of the engine's pause, after a first one."""
    times, pauses = [], []
    for version in range(first, first + rounds + 1):
        change(tensors)
        wait(device)
        begin = time.perf_counter()
        # Where deltas are made the fingerprint comes with them; else the sender computes it, as a trainer does.
        deltas = isinstance(engine, HttpEngine) and engine._transport_args[0] == "delta"
        expected = None if deltas else fingerprint(tensors.items())
        pauses.append(await engine.load_weights(WeightUpdate(version, tensors, expected=expected)))
        times.append(time.perf_counter() - begin)
        held = await engine.policy()
        assert held == ServedPolicy(version, expected or fingerprint(tensors.items())), "other weights arrived"
    return statistics.median(times[1:]), statistics.median(pauses[1:])


def paths(sheet: Sheet, shape: str, device: str, rounds: int, only: list[str]) -> None:
    place = "/dev/shm" if device == "cuda" else None
    with tempfile.TemporaryDirectory(dir=place) as name:
        folder, shared = Path(name) / "model", Path(name) / "shared"
        shared.mkdir()
        model = model_of(shape, device)
        tensors = {n: p.detach() for n, p in model.named_parameters()}
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        sheet.note(f"{shape} full update", "MB", size / 1e6)
        model.save_pretrained(folder)
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(Path(paceline.__file__).parent / "quickstart" / file, folder)
        if apart := [path for path in only if path != COPY]:
            with serving(folder, shared, device) as url:
                for number, path in enumerate(apart):
                    asyncio.run(one_path(sheet, shape, url, path, shared, tensors, rounds, device, 1 + 100 * number))
        if COPY in only:
            in_process(sheet, shape, model, tensors, rounds, device)
    del model, tensors
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


async def one_path(sheet, shape, url, path, shared, tensors, rounds, device, first) -> None:
    engine = HttpEngine(url, folder=shared, path=path)
    try:
        took, paused = await asyncio.wait_for(publish(engine, tensors, rounds, device, first), LONGEST_SECONDS)
    finally:
        await engine.aclose()
    note(sheet, f"{shape} {path}{', gloo' if path == 'broadcast' else ''}", took, paused)


def in_process(sheet: Sheet, shape: str, model, tensors, rounds: int, device: str) -> None:
    room = {"cache_gib": 2.0} if device == "cuda" else {}
    own = {name: tensor.clone() for name, tensor in tensors.items()}  # the trainer's; the engine has the model's
    engine = EmbeddedEngine(model, EngineConfig(max_running=8, max_context=512, compile=False, **room))
    try:
        engine.start()
        took, paused = asyncio.run(asyncio.wait_for(publish(engine, own, rounds, device, 1), LONGEST_SECONDS))
    finally:
        engine.close()
    note(sheet, f"{shape} copy, in one process", took, paused)


def note(sheet: Sheet, what: str, took: float, paused: float) -> None:
    sheet.note(f"{what}: publish", "ms", 1e3 * took)
    sheet.note(f"{what}: pause", "ms", 1e3 * paused)


# -- how few elements a step changes ----------------------------------------------------------------------------------


def samples_of(rows: Path, model: ModelConfig, count: int, longest: int) -> list[Sample]:
    """Worked solutions as samples: every token of a solution is trained on."""
    tokenizer = load_tokenizer(model)
    made = []
    for line in rows.read_text(encoding="utf-8").splitlines()[:count]:
        row = json.loads(line)
        prompt = tokenizer.encode(f"Question: {row['question']}\nAnswer:")
        ids = (prompt + tokenizer.encode(f" {row['answer']}"))[:longest]
        weights = np.arange(len(ids)) >= min(len(prompt), len(ids) - 1)
        off = np.zeros(len(ids), bool)
        made.append(
            Sample(
                token_ids=np.array(ids),
                loss_mask=off,
                logprobs=np.zeros(len(ids)),
                versions=np.full(len(ids), -1),
                temperatures=np.ones(len(ids)),
                ce_weights=weights.astype(float),
                env="gsm8k",
            )
        )
    return made


async def shares(trainer: TorchTrainer, samples: list[Sample], steps: int, batch: int) -> list[dict[str, float]]:
    """Of each step: bytes of its delta against those of a full update, and changed elements among all."""
    last, lines, report = DeltaEncoder(share=4.0), [], None
    for step in range(steps + 1):
        delta = None
        if step < 2 or step >= min(AFTER, steps - 1):  # an update is compared with the one a step before
            update = await trainer.weights()
            published = {name: tensor.bfloat16() for name, tensor in update.tensors.items()}
            full = sum(t.numel() * t.element_size() for t in published.values())
            delta = last.advance(update.version, published)
        if delta is not None and delta.base.version == step - 1:
            changed = sum(entry.count for entry in delta.entries.values())
            norm = report.metrics["grad_norm"] if report is not None else 0.0
            lines.append({"step": step, "bytes": len(delta) / full, "elements": 2 * changed / full, "norm": norm})
            print({key: round(value, 5) for key, value in lines[-1].items()}, flush=True)
        if step < steps:
            start = step * batch % len(samples)
            report = await trainer.step(samples[start : start + batch])
    return lines


def deltas(sheet: Sheet, given: argparse.Namespace) -> None:
    for lr, bar in ((1e-6, BAR), (1e-5, None)):
        wanted = ModelConfig(name=str(given.model), dtype="float32")
        samples = samples_of(given.rows, wanted, given.steps * given.batch, given.longest)
        settings = config.TrainerConfig(optimizer=config.OptimizerConfig(lr=lr), micro_batch_tokens=1024)
        trainer = TorchTrainer(load_model(wanted, "cuda" if given.gpu else "cpu"), settings)
        try:
            lines = asyncio.run(shares(trainer, samples, given.steps, given.batch))
        finally:
            trainer.close()
        late = [line["bytes"] for line in lines if line["step"] > AFTER] or [lines[-1]["bytes"]]
        what = f"{given.model.name}, AdamW at {lr:g}: delta after step {AFTER}"
        worst, early = max(late), lines[0]["bytes"]
        if bar is None:
            sheet.note(what, "of full", worst)
        else:
            sheet.at_most(what, "of full", worst, bar)
        sheet.note(f"{given.model.name}, AdamW at {lr:g}: of the first step", "of full", early)
        elements = max(line["elements"] for line in lines if line["step"] > AFTER or line is lines[-1])
        sheet.note(f"{given.model.name}, AdamW at {lr:g}: changed elements", "of all", elements)
        norms = [line["norm"] for line in lines]
        sheet.note(f"{given.model.name}, AdamW at {lr:g}: median norm of the gradient", "", statistics.median(norms))


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--gpu", action="store_true", help="on CUDA")
    parser.add_argument("--part", choices=["paths", "delta", "all"], default="all")
    parser.add_argument("--size", nargs="+", choices=["small", *SHAPES], default=["small", "0.5B"])
    parser.add_argument("--only", nargs="+", choices=[*PATHS, COPY], default=[*PATHS, COPY], metavar="PATH")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", type=Path, default=ROOT / ".cache" / "smollm2", help="a real model's folder")
    parser.add_argument("--rows", type=Path, default=ROOT.parent / "shared" / "data" / "gsm8k" / "train.jsonl")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--longest", type=int, default=128)
    given = parser.parse_args()
    device = "cuda" if given.gpu else "cpu"
    sheet = Merged(given.json, "weights from trainer to engine")
    complete = False
    try:
        for shape in given.size if given.part != "delta" else []:
            paths(sheet, shape, device, given.rounds, given.only)
        if given.part != "paths":
            deltas(sheet, given)
        complete = True
    except Exception:
        traceback.print_exc()
    return sheet.finish(complete)


if __name__ == "__main__":
    raise SystemExit(main())
