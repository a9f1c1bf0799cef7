"""The engine on one GPU: whole-engine rates with log probabilities, sharing, mixed lengths, weight updates, start.

Random Qwen2.5-shaped weights in bf16, 128 prompt and 512 output tokens, temperature 1, as in the peers' figures.
"""

import argparse
import asyncio
import gc
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import Future, wait
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from bars import machine
from paceline.config.inference import EngineConfig
from paceline.engine import EmbeddedEngine, GenerateRequest, noise_key
from paceline.model import ATTENTION, Adapter, WeightUpdate

SHAPES = {
    "0.5B": {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "intermediate_size": 4864},
    "1.5B": {"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "intermediate_size": 8960},
}
VOCABULARY = 151_936
BARS = {
    ("0.5B", 256): 85_000,
    ("0.5B", 64): 30_000,
    ("0.5B", 1): 550,
    ("1.5B", 256): 50_000,
    ("1.5B", 64): 20_000,
    ("1.5B", 1): 380,
}


def random_model(shape: str, attention: str = ATTENTION) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        **SHAPES[shape],
        vocab_size=VOCABULARY,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=32_768,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        return Qwen2ForCausalLM._from_config(config, attn_implementation=attention, dtype=torch.bfloat16).eval()


def prompts(count: int, length: int, group: int = 1, seed: int | str = 0) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    out: list[tuple[int, ...]] = []
    while len(out) < count:
        out += [tuple(rng.randrange(VOCABULARY) for _ in range(length))] * group
    return out[:count]


def requests(given: list[tuple[int, ...]], outputs: list[int], seed: int = 0, **settings) -> list[GenerateRequest]:
    return [
        GenerateRequest(prompt_ids=p, max_tokens=n, noise=noise_key(seed, i), **settings)
        for i, (p, n) in enumerate(zip(given, outputs, strict=True))
    ]


class Started:
    """A warm engine, with the seconds it took to its first token."""

    def __init__(self, model, deterministic: bool = False, **settings) -> None:
        defaults = {"compile": True, "max_running": 256, "max_context": 2048, "prefill_tokens": 8192, "cache_gib": 24.0}
        begin = time.perf_counter()
        self.engine = EmbeddedEngine(model, EngineConfig(**(defaults | settings)), deterministic=deterministic)
        self.engine.start()
        self.engine.submit(requests(prompts(1, 16), [1])[0]).result(60)
        self.seconds = time.perf_counter() - begin

    def __enter__(self) -> EmbeddedEngine:
        return self.engine

    def __exit__(self, *_) -> None:
        self.engine.close()
        self.engine = None
        gc.collect()
        torch.cuda.empty_cache()


def rate(engine: EmbeddedEngine, wanted: list[GenerateRequest]) -> float:
    """Sampled tokens a second, from the first submission to the last answer."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    futures = [engine.submit(r) for r in wanted]
    done = sum(len(f.result(300).token_ids) for f in futures)
    return done / (time.perf_counter() - start)


def best(rounds: int, measure) -> float:
    return statistics.median(measure(i) for i in range(rounds))


def fixed(engine: EmbeddedEngine, count: int, rounds: int) -> float:
    return best(
        rounds, lambda i: rate(engine, requests(prompts(count, 128, seed=1000 * count + i), [512] * count, seed=i))
    )


def shared(engine: EmbeddedEngine, output: int, group: int, rounds: int) -> float:
    def measure(i: int) -> float:
        given = prompts(256, 1024, group, seed=f"{output} {group} {i}")  # never seen before: nothing is cached
        return rate(engine, requests(given, [output] * 256, seed=i))

    return best(rounds, measure)


def mixed(engine: EmbeddedEngine, total: int = 1536) -> float:
    """Outputs of 16 to 1,024 tokens, 256 requests kept running; neither ramp nor drain is counted."""
    rng = random.Random(1)
    queue = requests(prompts(total, 128, seed=99), [rng.randrange(16, 1025) for _ in range(total)])
    left = iter(queue)
    futures: list[Future] = []
    marks: list[tuple[float, int]] = []

    def more(_: object = None) -> None:
        request = next(left, None)
        if request is None:
            if len(marks) == 1:
                marks.append((time.perf_counter(), engine.tokens))
            return
        future = engine.submit(request)
        futures.append(future)
        future.add_done_callback(more)

    for _ in range(256):
        more()
    time.sleep(0.5)
    marks.append((time.perf_counter(), engine.tokens))
    while len(futures) < total:
        time.sleep(0.01)
    wait(futures, 300)
    (begin, before), (end, after) = marks[:2]
    return (after - before) / (end - begin)


def pauses(model, engine: EmbeddedEngine, adapter: bool, times: int = 3) -> tuple[float, float]:
    """Longest pause of a weight update under 256 running requests, and the longest gap between two steps around it."""
    if adapter:
        tensors = {}
        for name, module in model.named_modules():
            if name.endswith("_proj"):
                tensors[f"{name}.lora_A.weight"] = torch.randn(16, module.in_features, device="cuda").bfloat16() * 0.01
                tensors[f"{name}.lora_B.weight"] = torch.randn(module.out_features, 16, device="cuda").bfloat16() * 0.01
    else:
        tensors = {name: p.detach().clone() for name, p in model.named_parameters()}
    wanted = requests(prompts(256, 128, seed="pause"), [512] * 256)
    futures = [engine.submit(r) for r in wanted]
    longest = 0.0

    async def update() -> None:
        nonlocal longest
        for version in range(1, times + 1):
            await asyncio.sleep(0.3)
            kind = Adapter("", 2.0) if adapter else None
            longest = max(longest, await engine.load_weights(WeightUpdate(version, tensors, adapter=kind)))

    start = time.perf_counter()
    asyncio.run(update())
    spent = time.perf_counter() - start
    versions = {v for f in futures for v in f.result(300).versions}
    assert versions == set(range(times + 1)), versions
    return longest, spent


# -- over HTTP: server and engine in two processes, the client in a third ---------------------------------------------


class Serving:
    """`paceline serve` in its own processes, with the seconds from its start to its first token."""

    def __init__(self, folder: Path, *options: str, port: int = 8177) -> None:
        self.url = f"http://127.0.0.1:{port}"
        command = [
            sys.executable,
            "-m",
            "paceline",
            "serve",
            str(folder),
            "--name",
            "bench",
            "--port",
            str(port),
        ]
        # Compiled from its first token, as the engine that it is compared with.
        command += ["--isolate", "--model.dtype", "bfloat16", "--engine.max_running", "256", "--engine.compile", "true"]
        command += ["--engine.max_context", "2048", "--engine.prefill_tokens", "8192", "--engine.cache_gib", "24"]
        begin = time.perf_counter()
        self._process = subprocess.Popen([*command, *options])
        while time.perf_counter() - begin < 240 and self._process.poll() is None:
            try:
                self.load("flat", clients=1, output=1, rounds=1)
                break
            except subprocess.CalledProcessError:
                time.sleep(0.2)
        self.seconds = time.perf_counter() - begin

    def load(self, form: str, clients: int = 256, output: int = 512, rounds: int = 3) -> float:
        command = [sys.executable, str(Path(__file__).with_name("http_load.py")), self.url, "--form", form]
        command += ["--clients", str(clients), "--output", str(output), "--rounds", str(rounds)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return json.loads(done.stdout.splitlines()[-1])["median"]

    def __enter__(self) -> "Serving":
        return self

    def __exit__(self, *_) -> None:
        self._process.terminate()
        self._process.wait(60)


def over_http(shape: str, tokenizer: Path, engine_rate: float, sheet: "Sheet") -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = random_model(shape)
        model.save_pretrained(folder)
        del model
        gc.collect()
        torch.cuda.empty_cache()
        for file in tokenizer.iterdir():
            shutil.copy(file, folder)
        with Serving(folder) as server:
            sheet.note(f"{shape} serve: two processes, from nothing to the first token", "s", server.seconds)
            flat = server.load("flat")
            sheet.at_least(
                f"{shape} HTTP, token ids and flat logprobs", "of engine", flat / engine_rate, 0.70, rate=flat
            )
            for form, text in (("openai", "OpenAI logprobs"), ("stream", "OpenAI logprobs, streamed")):
                got = server.load(form)
                sheet.at_least(f"{shape} HTTP, {text}", "of engine", got / engine_rate, 0.35, rate=got)


# -- peers ------------------------------------------------------------------------------------------------------------


def generate_rate(model, count: int, output: int) -> float:
    """transformers' `generate`; it reports no log probabilities here, which favours it."""
    ids = torch.tensor(prompts(count, 128), device="cuda")
    settings = {"do_sample": True, "temperature": 1.0, "top_k": 0, "min_new_tokens": output, "max_new_tokens": output}
    torch.cuda.synchronize()
    start = time.perf_counter()
    with torch.inference_mode():
        model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **settings)
    torch.cuda.synchronize()
    return count * output / (time.perf_counter() - start)


def continuous_rate(model, count: int, output: int) -> float:
    """transformers' continuous batching."""
    from transformers import GenerationConfig

    settings = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, max_new_tokens=output, eos_token_id=-1, pad_token_id=0
    )
    given = [list(p) for p in prompts(count, 128)]
    start = time.perf_counter()
    answers = model.generate_batch(inputs=given, generation_config=settings, progress_bar=False)
    seconds = time.perf_counter() - start
    return sum(len(a.generated_tokens) for a in answers.values()) / seconds


def peers(shape: str, sheet: "Sheet", counts: tuple[int, ...] = (256, 64, 1), output: int = 24) -> None:
    model = random_model(shape, "sdpa")
    generate_rate(model, 2, 4)
    for count in counts:
        sheet.note(f"{shape} transformers generate, {count} requests", "tok/s", generate_rate(model, count, output))
    try:
        continuous_rate(model, 4, 4)
        sheet.note(
            f"{shape} transformers continuous batching, 64 requests", "tok/s", continuous_rate(model, 64, output)
        )
    except Exception as error:  # a peer that does not run is reported, not hidden
        sheet.note(f"{shape} transformers continuous batching: {type(error).__name__} {str(error)[:80]}", "", 0.0)
    del model
    gc.collect()
    torch.cuda.empty_cache()


# -- the sheet --------------------------------------------------------------------------------------------------------


class Sheet:
    """Lines with their bars."""

    def __init__(self, path: Path | None = None, title: str = "engine on one GPU") -> None:
        self._title = title
        self.lines: list[dict] = []
        self._path = path
        self._begin = time.perf_counter()

    def _add(self, what: str, unit: str, value: float, bar: str, cleared: bool | None, **extra: float) -> None:
        self.lines.append({"what": what, "unit": unit, "value": value, "bar": bar, "cleared": cleared, **extra})
        self.write(complete=False)
        mark = {True: "ok", False: "MISSED", None: ""}[cleared]
        more = "".join(f"  ({name} {number:,.0f})" for name, number in extra.items())
        at = time.perf_counter() - self._begin
        print(f"{at:4.0f} s  {what:58s} {value:12,.3f} {unit:10s} {bar:>14s} {mark}{more}", flush=True)

    def write(self, complete: bool) -> dict:
        """The result so far, also to the file: a run that is cut short leaves what it saw."""
        cleared = complete and all(line["cleared"] is not False for line in self.lines)
        result = {"title": self._title, "cleared": cleared, "complete": complete, "lines": self.lines}
        result |= machine()
        if self._path:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        return result

    def at_least(self, what: str, unit: str, value: float, bar: float, **extra: float) -> None:
        self._add(what, unit, value, f">= {bar:,g}", value >= bar, **extra)

    def at_most(self, what: str, unit: str, value: float, bar: float, **extra: float) -> None:
        self._add(what, unit, value, f"<= {bar:,g}", value <= bar, **extra)

    def note(self, what: str, unit: str, value: float) -> None:
        self._add(what, unit, value, "", None)

    def finish(self, complete: bool) -> int:
        """The last line, and the exit code."""
        result = self.write(complete)
        print(json.dumps(result))
        return 0 if result["cleared"] else 1


def one_shape(shape: str, sheet: Sheet, rounds: int) -> float:
    """Returns the rate at 256 requests."""
    model = random_model(shape)
    with Started(model) as engine:
        rates = {count: fixed(engine, count, rounds) for count in (256, 64, 1)}
        for count, value in rates.items():
            sheet.at_least(f"{shape} {count} requests, 128 in, 512 out", "tok/s", value, BARS[shape, count])
        mean = mixed(engine)
        sheet.at_least(f"{shape} mixed lengths, 256 kept running", "of fixed", mean / rates[256], 0.8, rate=mean)
        for output, bar in ((128, 2.0), (512, 1.25)):
            together, alone = (shared(engine, output, group, max(3, rounds)) for group in (8, 1))
            what = f"{shape} groups of 8, 1,024-token prompt, {output} out"
            sheet.at_least(what, "x unshared", together / alone, bar, rate=together)
        longest, _ = pauses(model, engine, adapter=False)
        sheet.at_most(f"{shape} update of all weights: decoding pauses", "ms", 1e3 * longest, 100)
    del model, engine
    gc.collect()
    torch.cuda.empty_cache()
    model = random_model(shape)
    with Started(model, adapters=1, adapter_rank=16) as engine:
        longest, _ = pauses(model, engine, adapter=True)
        sheet.at_most(f"{shape} update of a rank-16 adapter: decoding pauses", "ms", 1e3 * longest, 50)
        sheet.note(f"{shape} 256 requests through the adapter", "tok/s", fixed(engine, 256, 1))
    return rates[256]


def starts(shape: str, sheet: Sheet) -> None:
    """From a model on the device to its first token, in a process of its own: nothing is warm but the imports."""
    for compiled, bar in ((True, 60), (False, 15)):
        code = f"import engine_gpu as e; print(e.Started(e.random_model({shape!r}), compile={compiled}).seconds)"
        fresh = {"TORCHINDUCTOR_CACHE_DIR": tempfile.mkdtemp(), "TRITON_CACHE_DIR": tempfile.mkdtemp()}
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=Path(__file__).parent, env=os.environ | fresh, capture_output=True,
            text=True, check=True,
        )  # fmt: skip
        seconds = float(done.stdout.splitlines()[-1])
        sheet.at_most(f"{shape} start to first token, {'' if compiled else 'not '}compiled", "s", seconds, bar)


def determinism(shape: str, sheet: Sheet, usual: float) -> None:
    model = random_model(shape)
    with Started(model, deterministic=True, prefill_tokens=1024) as engine:
        wanted = requests(prompts(256, 128), [128] * 256)
        first = [engine.submit(r) for r in wanted]
        first = [f.result(300) for f in first]
        again = {i: engine.submit(wanted[i]) for i in random.Random(0).sample(range(256), 256)}
        same = all(again[i].result(300) == first[i] for i in range(256))
        sheet.at_least(f"{shape} deterministic: same bits in any order", "", float(same), 1)
        sheet.note(f"{shape} deterministic, 256 requests", "of usual", fixed(engine, 256, 1) / usual)


def main(given: argparse.Namespace) -> int:
    sheet = Sheet(given.json)
    complete = False
    try:
        if given.only == "http":
            with Started(random_model("0.5B")) as engine:
                rate = fixed(engine, 256, given.rounds)
            sheet.note("0.5B 256 requests, 128 in, 512 out", "tok/s", rate)
            over_http("0.5B", given.tokenizer, rate, sheet)
            return sheet.finish(complete=True)
        rates = {shape: one_shape(shape, sheet, given.rounds) for shape in SHAPES}
        starts("0.5B", sheet)
        if given.tokenizer:
            over_http("0.5B", given.tokenizer, rates["0.5B"], sheet)
        determinism("0.5B", sheet, rates["0.5B"])
        for shape in [] if given.no_peers else SHAPES:
            peers(shape, sheet)
        complete = True
    except Exception:
        traceback.print_exc(limit=-3)
    return sheet.finish(complete)
