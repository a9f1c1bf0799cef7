"""The trainer on one GPU: a packed step beside a plain Hugging Face step, and whole GRPO steps.

    python benchmarks/trainer.py --gpu --tokenizer FOLDER

Random Qwen2.5-shaped weights in bfloat16 with float32 masters. A step is four micro-batches of 16k tokens, sequences of
100 to 1,500 tokens, every token trained; its time includes the optimizer. Utilisation counts 6 N D with the tied matrix
once, plus causal attention, and no recomputation, against 790 TFLOP/s. The plain step pads nothing: 16 x 1,024 tokens,
`sdpa`, full logits, the same optimizer.
"""

import argparse
import asyncio
import contextlib
import gc
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from bars import arguments
from engine_gpu import SHAPES as GPU_SHAPES
from engine_gpu import VOCABULARY, Sheet
from paceline import Environment, Outcome, RunConfig, train
from paceline.config import trainer as config
from paceline.data import Sample
from paceline.model import ATTENTION, trainable_parameters
from paceline.runtime import session
from paceline.trainer.torch.optimizer import MasterAdamW
from paceline.trainer.torch.trainer import TorchTrainer
from timed_recorder import AlternatingRecorder, TimedRecorder

TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
PEAK = 790e12
BUDGET = 16_384
LARGE = 65_536
"""What a whole step packs to, well within what `micro_batch_tokens = "auto"` finds safe on such a card."""
WARM = 3
"""Steps of a run that are not counted. Nor is its last: it samples nothing ahead, which flatters a run that does."""
BARS = {"0.5B": 0.40, "1.5B": 0.47}


def model_of(shape: str, device: str, attention: str = ATTENTION) -> Qwen2ForCausalLM:
    c = Qwen2Config(
        **(GPU_SHAPES | {"tiny": TINY})[shape],
        vocab_size=VOCABULARY,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=32_768,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
    )
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        return Qwen2ForCausalLM._from_config(c, attn_implementation=attention, dtype=dtype).eval()


def batch_of(packs: int, budget: int, seed: int) -> list[Sample]:
    """Sequences of mixed length that fill `packs` micro-batches nearly to the brim."""
    rng = np.random.default_rng(seed)
    samples: list[Sample] = []
    for _ in range(packs):
        room = budget - budget // 50  # first-fit leaves a little
        while room >= 2:
            length = int(rng.integers(min(100, room), min(1500, room) + 1)) if room > 1600 else min(room, 1500)
            samples.append(_sample(rng, length))
            room -= length
    return samples


def _sample(rng: np.random.Generator, length: int) -> Sample:
    mask = np.arange(length) > 0
    return Sample(
        token_ids=rng.integers(0, VOCABULARY, length),
        loss_mask=mask,
        logprobs=np.where(mask, np.float32(-12), np.float32(0)),
        versions=np.where(mask, 0, -1),
        temperatures=np.ones(length),
        advantages=mask * rng.normal(),
        env="bench",
    )


def flops(model: PreTrainedModel, lengths: Sequence[int]) -> float:
    c = model.config
    parameters = sum(p.numel() for p in model.parameters())
    attention = 6 * c.num_hidden_layers * c.hidden_size * sum(n * n for n in lengths)
    return 6 * parameters * sum(lengths) + attention


def static_bytes(model: PreTrainedModel) -> int:
    """Weights, masters, two moments and gradients."""
    return sum(p.numel() * (p.element_size() + 16) for p in model.parameters())


def peak_memory(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device == "cuda" else 0


def ours(shape: str, device: str, budget: int, rounds: int, **settings) -> tuple[float, float, float]:
    """Share of the peak, tokens a second, and bytes beyond static state."""
    model = model_of(shape, device)
    trainer = TorchTrainer(model, config.TrainerConfig(micro_batch_tokens=budget, compile=True, **settings))
    batches = [batch_of(4, budget, seed) for seed in range(rounds + 2)]

    async def steps() -> list[float]:
        times = []
        for i, batch in enumerate(batches):
            if i == 2 and device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            begin = time.perf_counter()
            await trainer.step(batch)
            times.append(time.perf_counter() - begin)
        print("seconds a step:", " ".join(f"{t:.3f}" for t in times), flush=True)
        return times[2:]

    shares, rates = [], []
    for seconds, batch in zip(asyncio.run(steps()), batches[2:], strict=True):
        lengths = [len(s) for s in batch]
        shares.append(flops(model, lengths) / seconds / PEAK)
        rates.append(sum(lengths) / seconds)
    beyond = peak_memory(device) - static_bytes(model)
    trainer.close()
    return statistics.median(shares), statistics.median(rates), beyond


def plain(shape: str, device: str, budget: int, rounds: int) -> tuple[float, float, float]:
    """A Hugging Face step with full logits: the same figures."""
    model = model_of(shape, device, "sdpa").train()
    optimizer = MasterAdamW(trainable_parameters(model), config.OptimizerConfig(), None)
    length = 1024
    times = []
    for i in range(rounds + 1):
        if i == 1 and device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        ids = torch.randint(VOCABULARY, (max(1, budget // length), length), device=device)
        begin = time.perf_counter()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.gather()
        optimizer.clip().item()
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    rows = max(1, budget // length)
    seconds = statistics.median(times[1:])
    share = flops(model, [length] * rows) / seconds / PEAK
    return share, rows * length / seconds, peak_memory(device) - static_bytes(model)


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# -- whole GRPO steps -------------------------------------------------------------------------------------------------


class Guessing(Environment):
    """Random prompts, rewards by chance: what a step costs does not depend on what is learnt."""

    def __init__(self, rows: int, length: int) -> None:
        rng = np.random.default_rng(0)
        self._rows = [{"ids": rng.integers(0, 100_000, length).tolist()} for _ in range(rows)]

    def examples(self, split: str) -> list[dict]:
        return self._rows

    async def play(self, example: Mapping, seats: Mapping) -> Outcome:
        reply = await seats["policy"].complete(example["ids"])
        return Outcome.solo(float(reply.text.count("a") % 2 + reply.tokens % 2))


def whole_steps(
    folder: Path, staleness: int, steps: int, tiny: bool, recorder: type[TimedRecorder] = TimedRecorder
) -> tuple[list[float], float]:
    """Seconds of each step of 32 prompts x 8, 128 in, 512 out, once the run is warm; and of each, what it cost to keep
    its rollouts, in seconds of CPU."""
    prompts, group, inside, out = (4, 4, 16, 16) if tiny else (32, 8, 128, 512)
    run = {
        "name": f"step-{staleness}",
        "runs": str(folder / "runs"),
        "steps": steps,
        "batch_size": prompts * group,
        "group_size": group,
        "staleness": staleness,
        "model": {"name": str(folder), "dtype": "float32" if tiny else "bfloat16"},
        "sampling": {"max_tokens": out},
        "engine": {
            "max_running": prompts * group * (1 + staleness),  # a batch begins beside the last tokens of the one before
            "max_context": 2048,
            "prefill_tokens": 8192,
            "cache_gib": 16.0,
            "compile": True,
        },
        "trainer": {"compile": True, "micro_batch_tokens": BUDGET if tiny else LARGE, "optimizer": {"lr": 1e-6}},
        "eval": {"every": 0},
        "checkpoint": {"every": 0},
        "filters": {"zero_advantage": False},  # a group drawn anew would be one more, slow pass
        "env": [{"type": "reverse-text", "name": "bench"}],
    }
    session.RolloutRecorder = recorder
    bench = {"bench": Guessing(prompts * (steps + 2), inside)}
    result = train(RunConfig.model_validate(run), environments=bench, overwrite=True, quiet=True)
    for line in result.metrics:
        parts = ("time/step", "time/sample", "time/score", "time/train", "time/publish")
        print({key: round(line[key], 3) for key in parts if key in line}, flush=True)
    shutil.rmtree(folder / "runs", ignore_errors=True)
    return [line["time/step"] for line in result.metrics[WARM:-1]], TimedRecorder.made.pop().cost / steps


@contextlib.contextmanager
def policy(tokenizer: Path, device: str, tiny: bool) -> Generator[Path]:
    """A folder with a model of random weights and a real tokenizer."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model_of("tiny" if tiny else "0.5B", device).save_pretrained(folder)
        free()
        for file in tokenizer.iterdir():
            shutil.copy(file, folder)
        yield folder


def grpo(sheet: Sheet, tokenizer: Path, device: str, tiny: bool, steps: int = 20, rounds: int = 1) -> None:
    """Both kinds of step in turn. Means, not medians: a step that samples ahead takes time from its neighbour, and only
    their sum counts."""
    with policy(tokenizer, device, tiny) as folder:
        seconds: dict[int, list[float]] = {0: [], 1: []}
        kept: list[float] = []
        for _ in range(rounds):
            for staleness, taken in seconds.items():
                some, recording = whole_steps(folder, staleness, steps, tiny)
                taken += some
                kept.append(recording)
                free()
        together, ahead = (statistics.fmean(taken) for taken in seconds.values())
        sheet.at_most("0.5B whole synchronous GRPO step, 32 x 8, 128 in, 512 out", "s", together, 3.5)
        sheet.at_most("0.5B at staleness 1", "of synchronous", ahead / together, 0.92, seconds=ahead)
        sheet.note("0.5B, record of every rollout: CPU time", "of a step", statistics.fmean(kept) / ahead)


def record(sheet: Sheet, tokenizer: Path, device: str, tiny: bool, steps: int = 52) -> None:
    """What the record costs a step, in one run that keeps its rollouts now and then. What a step leaves behind is
    written while the next one samples. Medians: a step that stumbles says nothing of the record."""
    with policy(tokenizer, device, tiny) as folder:
        seconds, _ = whole_steps(folder, 0, steps, tiny, AlternatingRecorder)
    arms: dict[bool, list[float]] = {True: [], False: []}
    for step, taken in enumerate(seconds, start=WARM + 1):
        arms[AlternatingRecorder.kept(step - 1)].append(taken)
    kept, left_out = (statistics.median(arms[which]) for which in (True, False))
    for which, name in ((True, "kept"), (False, "left out")):
        spread = statistics.stdev(arms[which]) / len(arms[which]) ** 0.5
        print(f"rollouts {name}: {len(arms[which])} steps, mean {statistics.fmean(arms[which]):.4f} +- {spread:.4f} s")
    sheet.at_most("0.5B, record of every rollout", "more a step", kept / left_out - 1, 0.01, seconds=left_out)


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--gpu", action="store_true", help="the real shapes; a tiny one on the CPU otherwise")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokenizer", type=Path, help="folder of a tokenizer, for the whole steps")
    parser.add_argument("--only", choices=["step", "grpo", "record"], help="one part of the sheet")
    given = parser.parse_args()
    device, budget = ("cuda", BUDGET) if given.gpu else ("cpu", 512)
    sheet = Sheet(given.json, "trainer on one GPU")
    complete = False
    try:
        if given.only in (None, "step"):
            for shape in BARS if given.gpu else ["tiny"]:
                measure(sheet, shape, device, budget, given)
        if given.tokenizer and given.only in (None, "grpo"):
            grpo(sheet, given.tokenizer, device, tiny=not given.gpu)
        if given.tokenizer and given.only in (None, "record"):
            record(sheet, given.tokenizer, device, tiny=not given.gpu)
        complete = given.only is None and given.tokenizer is not None
    except Exception:
        traceback.print_exc()
    return sheet.finish(complete)


def measure(sheet: Sheet, shape: str, device: str, budget: int, given: argparse.Namespace) -> None:
    share, rate, beyond = ours(shape, device, budget, given.rounds)
    free()
    sheet.at_least(f"{shape} packed step", "of 790 TFLOP/s", share, BARS.get(shape, 0.0), rate=rate)
    peer, peer_rate, peer_beyond = plain(shape, device, budget, given.rounds)
    free()
    sheet.note(f"{shape} plain Hugging Face step", "of 790 TFLOP/s", peer)
    sheet.note(f"{shape} plain Hugging Face step", "tok/s", peer_rate)
    if device == "cuda":
        sheet.note(f"{shape} plain step's memory beyond static state", "GB", peer_beyond / 1e9)
        sheet.at_most(f"{shape} memory beyond static state", "of plain", beyond / peer_beyond, 0.5, GB=beyond / 1e9)


if __name__ == "__main__":
    raise SystemExit(main())
