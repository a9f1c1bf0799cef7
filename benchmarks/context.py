"""What context parallelism saves and costs: one long sample on one rank, and shared by 2 and 4. CPU, gloo, float32.

    python benchmarks/context.py --json FILE

A Llama of 4 layers, 256 wide, 8 heads, trains one sample of growing length, a whole optimizer step at a time. Memory is
what a rank's resident set grows by, above what it holds after a short step (weights, moments, gradients). Reported for
each number of ranks: the longest sample whose step fits into --memory MiB on every rank, and the seconds of a step, of
the clock and of the busiest rank's one core. Bars:

  longest sample on 4 ranks, over that on one                      at least 1.5x
  memory of a step at --length on 2 ranks, over that on one        at most 0.85x

Seconds have no bar: they hang on how many cores the ranks have, and gloo's threads compute beside them. The attention
of a CPU wants a mask of queries x keys where a sequence is cut; FlashAttention on a GPU wants none.
"""

import asyncio
import ctypes
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bars import arguments
from engine_gpu import Sheet
from paceline.config import trainer as config
from paceline.config.cluster import ParallelConfig
from paceline.data import Sample
from paceline.model import ATTENTION
from paceline.trainer import TorchTrainer
from paceline.trainer.torch.world import destroy_group, join

RANKS = (1, 2, 4)
LENGTHS = (1024, 2048, 2560, 3072, 4096, 5120, 6144, 8192)
MIB = 1 << 20
SECONDS = 1200
"""How long the ranks of one world may take."""


def tiny_llama() -> LlamaForCausalLM:
    shape = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8}
    settings = LlamaConfig(**shape, num_key_value_heads=4, vocab_size=512, max_position_embeddings=LENGTHS[-1])
    torch.manual_seed(0)
    return LlamaForCausalLM._from_config(settings, attn_implementation=ATTENTION).eval()


def sample_of(length: int) -> Sample:
    ids = np.random.default_rng(length).integers(0, 512, length)
    mask = np.arange(length) > 0
    return Sample(
        token_ids=ids,
        loss_mask=mask,
        versions=np.where(mask, 0, -1),
        temperatures=np.ones(length),
        logprobs=np.where(mask, -6.0, 0.0),
        advantages=np.where(mask, 1.0, 0.0),
    )


def resident(peak: bool) -> int:
    """Bytes of this process that are in memory now, or were at most since `reset_peak`."""
    name = "VmHWM" if peak else "VmRSS"
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def reset_peak() -> None:
    ctypes.CDLL(None).malloc_trim(0)  # what the step before has freed
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def rank_main(rank: int, ranks: int, meeting: str, memory: float, longest: int) -> None:
    """Train longer and longer samples; the first rank prints a line for each: length, bytes of the fullest rank,
    seconds of the clock, CPU seconds of the busiest rank."""
    torch.set_num_threads(1)
    group = join(rank, ranks, f"file://{meeting}", "gloo", seconds=300) if ranks > 1 else None
    parallel = ParallelConfig(ranks=ranks, context=ranks)
    c = config.TrainerConfig(threads=1, micro_batch_tokens=LENGTHS[-1], parallel=parallel)
    trainer = TorchTrainer(tiny_llama(), c, group=group)
    asyncio.run(trainer.step([sample_of(64)]))
    reset_peak()
    start = resident(peak=False)
    for length in (x for x in LENGTHS if x <= longest):
        reset_peak()
        begun, busy = time.perf_counter(), time.process_time()
        asyncio.run(trainer.step([sample_of(length)]))
        seconds = time.perf_counter() - begun
        own = torch.tensor([float(resident(peak=True) - start), time.process_time() - busy])
        everywhere = trainer.policy.ranks.all.all_gather(own) if ranks > 1 else [own]
        grown, cpu = torch.stack(everywhere).amax(0).tolist()
        if rank == 0:
            print(json.dumps([length, grown, seconds, cpu]), flush=True)
        if grown > memory:
            break
    trainer.close()
    destroy_group()


def measured(ranks: int, memory: float, longest: int) -> dict[int, tuple[float, float, float]]:
    """Bytes, seconds and CPU seconds of a step, by the sample's length."""
    with tempfile.TemporaryDirectory() as folder:
        given = [str(ranks), f"{folder}/meeting", str(memory), str(longest)]
        commands = [[sys.executable, __file__, "--rank", str(rank), *given] for rank in range(ranks)]
        processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
        try:
            texts = [process.communicate(timeout=SECONDS)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
    if any(process.returncode for process in processes):
        raise RuntimeError(f"a rank of {ranks} ended with {[process.returncode for process in processes]}")
    return {length: tuple(rest) for length, *rest in map(json.loads, texts[0].splitlines())}


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--memory", type=int, default=384, help="MiB that a rank's step may take")
    parser.add_argument("--length", type=int, default=2048, choices=LENGTHS, help="length that is timed")
    parser.add_argument("--quick", action="store_true", help="short samples, to see that it runs at all")
    given = parser.parse_args()
    memory, longest = given.memory * MIB, 1024 if given.quick else LENGTHS[-1]
    at = min(given.length, longest)
    sheet = Sheet(given.json, "one sample on 1, 2 and 4 ranks that share it")
    seen, fits = {}, {}
    for ranks in RANKS:
        lines = seen[ranks] = measured(ranks, memory, longest)
        for length, (size, seconds, cpu) in lines.items():
            sheet.note(f"context = {ranks}, {length} tokens: memory of a step", "MiB", size / MIB)
            sheet.note(f"context = {ranks}, {length} tokens: seconds of a step", "s", seconds)
            sheet.note(f"context = {ranks}, {length} tokens: CPU seconds of a rank", "s", cpu)
        fits[ranks] = max(length for length, (size, *_) in lines.items() if size <= memory)
        sheet.note(f"context = {ranks}: longest sample in {given.memory} MiB", "tokens", fits[ranks])
    sheet.at_least("longest sample, 4 ranks over one", "x", fits[4] / fits[1], 1.5)
    sheet.at_most(f"memory at {at} tokens, 2 ranks over one", "x", seen[2][at][0] / seen[1][at][0], 0.85)
    return sheet.finish(complete=not given.quick)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank, ranks, meeting, memory, longest = sys.argv[2:]
        rank_main(int(rank), int(ranks), meeting, float(memory), int(longest))
    else:
        raise SystemExit(main())
