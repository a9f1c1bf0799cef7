"""Chat with a model from Python, such as the trained policy of a run's result."""

import asyncio
import base64
import html
import json
import secrets
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError
from transformers import PreTrainedTokenizerBase

from paceline.clients import Pool
from paceline.config import ConfigError, EvalConfig, RunConfig, load
from paceline.config.errors import explain_values
from paceline.config.hardware import uses_mlx
from paceline.config.inference import SamplingConfig
from paceline.config.model import LoRAConfig
from paceline.errors import PacelineError
from paceline.model import load_tokenizer
from paceline.observe.monitor import RunDirectory, RunOutcome
from paceline.observe.monitor.summary import MetricHistory, reward_picture
from paceline.observe.monitor.text import format_amount, format_score, one_line
from paceline.orchestrator import Checkpoints
from paceline.rollout import Message, Reply, Seat
from paceline.runtime.episode_runtime import saved_weights
from paceline.runtime.local import sampling_clients, with_sections
from paceline.runtime.serving import embedded_engine
from paceline.trainer.checkpoint import is_checkpoint
from paceline.weights.update import POLICY_MODEL, Adapter, WeightUpdate

ADAPTER = "adapter_config.json"
MAX_CONCURRENCY = 16
"""Requests decoded together: calls from several threads at most."""
Speak = Callable[[Seat, PreTrainedTokenizerBase], Awaitable[Reply]]
Weights = Callable[[], WeightUpdate]


class PolicyReply(str):
    """The text of a reply, with what else is known of it."""

    message: Message
    """To append to the conversation."""
    truncated: bool
    """The reply reached `max_tokens` before its end."""
    tokens: int

    @classmethod
    def of(cls, reply: Reply) -> Self:
        text = cls(reply.text)
        text.message, text.truncated, text.tokens = reply.message, reply.truncated, reply.tokens
        return text


class Policy:
    """A model in this process, behind two plain methods. The first call loads it, `close` frees it.

        policy = paceline.Policy("runs/sums")
        policy.chat("2 + 3 =")

    `source` is a run directory (its export, or a checkpoint if that is newer), an export, a checkpoint, a folder with a
    peft adapter, or the folder or name of a model. `settings` are keys of the run file, such as `device="cpu"`; for an
    adapter whose files do not name their base, `model="BASE"`. Calls may come from any thread, also from one that runs
    an event loop.
    """

    def __init__(self, source: str | Path, **settings: Any) -> None:
        self.source = str(source)
        config, weights = _find(self.source, settings)
        # Without the room that a batch of training needs.
        self._config = with_sections(config, engine={"max_running": min(config.engine.max_running, MAX_CONCURRENCY)})
        self._worker = _EngineThread(self._config, weights)
        self._finalizer = weakref.finalize(self, self._worker.close)

    def chat(self, messages: str | Sequence[Message], *, seed: int | None = None, **sampling: Any) -> PolicyReply:
        """The model's next message in a conversation; a text stands for one user message.

        `sampling` takes the keys of the run file's [sampling], such as `temperature=0`, and changes them for this call.
        """
        conversation = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        return self._ask(lambda seat, tokenizer: seat.chat(conversation), seed, sampling)

    def generate(self, prompt: str | Sequence[int], *, seed: int | None = None, **sampling: Any) -> PolicyReply:
        """The continuation of a text, or of token ids, without a chat template."""

        def speak(seat: Seat, tokenizer: PreTrainedTokenizerBase) -> Awaitable[Reply]:
            return seat.complete(tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)

        return self._ask(speak, seed, sampling)

    def close(self) -> None:
        """Free the model and end its thread; a later call loads it again."""
        self._worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Policy({self.source!r})"

    def _ask(self, speak: Speak, seed: int | None, changes: Mapping[str, Any]) -> PolicyReply:
        table = {"sampling": self._config.sampling.model_dump() | dict(changes)}
        try:
            sampling = EvalConfig.model_validate(table).sampling  # where greedy sampling is allowed
        except ValidationError as error:
            raise ConfigError(explain_values(error, table, EvalConfig, "Policy")) from None
        assert sampling is not None
        return self._worker.ask(speak, sampling, secrets.randbits(62) if seed is None else seed)


_Serving = tuple[asyncio.AbstractEventLoop, asyncio.Event, Callable[..., Coroutine[Any, Any, PolicyReply]]]
"""How another thread reaches a loaded model: its event loop, what stops it, and what asks it."""


class _EngineThread:
    """An engine with an event loop and a thread of its own, so that callers need neither."""

    def __init__(self, config: RunConfig, weights: Weights | None) -> None:
        self._config, self._weights = config, weights
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._ready: Future[_Serving] = Future()

    def ask(self, speak: Speak, sampling: SamplingConfig, seed: int) -> PolicyReply:
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._ready = Future()
                arguments = (self._ready,)
                self._thread = threading.Thread(target=self._run, args=arguments, name="paceline policy", daemon=True)
                self._thread.start()
            ready = self._ready
        loop, _, answered = ready.result()  # unbounded: a model loads as long as it loads, and Ctrl-C is heard
        answer = asyncio.run_coroutine_threadsafe(answered(speak, sampling, seed), loop)
        try:
            return answer.result()  # bounded: by max_tokens
        except BaseException:
            answer.cancel()  # Ctrl-C: the engine need not finish it
            raise

    def close(self) -> None:
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is None or self._ready.exception() is not None:  # bounded: by the loading of the model
            return
        loop, stop, _ = self._ready.result()  # bounded: it is done
        loop.call_soon_threadsafe(stop.set)
        thread.join()  # bounded: the engine's close is

    def _run(self, ready: "Future[_Serving]") -> None:
        try:
            with embedded_engine(self._config) as (engine, ends), asyncio.Runner() as runner:
                tokenizer = load_tokenizer(self._config.model)
                make_client = sampling_clients(Pool([engine]), tokenizer, ends, self._config.model)

                async def answered(speak: Speak, sampling: SamplingConfig, seed: int) -> PolicyReply:
                    return PolicyReply.of(await speak(Seat(make_client(sampling), (seed,), 0), tokenizer))

                async def serve() -> None:
                    if self._weights is not None:
                        await engine.load_weights(self._weights())
                    stop = asyncio.Event()
                    ready.set_result((asyncio.get_running_loop(), stop, answered))
                    await stop.wait()  # unbounded: until `close`

                runner.run(serve())
        except Exception as error:
            if ready.done():
                raise
            ready.set_exception(error)


def _find(source: str, settings: Mapping[str, Any]) -> tuple[RunConfig, Weights | None]:
    """The config that loads a model, and the weights to put on top of it, if these lie in a file of their own."""
    if isinstance(name := settings.get("model"), str):
        settings = {**settings, "model": {"name": name}}
    folder = Path(source).expanduser()
    if (run := RunDirectory(folder)).config_file.is_file():
        saved = [*([run.export] if run.export.is_dir() else []), *Checkpoints(run.checkpoints, 1).all()[-1:]]
        if not saved:
            raise PacelineError(f"{run.root} holds neither an export nor a checkpoint: train it first")
        folder = max(saved, key=lambda one: one.stat().st_mtime)
    if is_checkpoint(folder):
        checkpoint = folder.resolve()
        file = RunDirectory(checkpoint.parent.parent).config_file
        if not file.is_file():
            raise PacelineError(f"checkpoint {checkpoint} lies in no run directory: there is no {file} to read")
        config = load(file, settings=settings).config
        return config, lambda: saved_weights(checkpoint, config.model, uses_mlx(config.backend))
    if (folder / ADAPTER).is_file():
        return _adapter(folder, settings)
    run = RunDirectory(folder.resolve().parent)
    if folder.is_dir() and run.export == folder.resolve() and run.config_file.is_file():
        config = load(run.config_file, settings=settings).config
        whole = {"name": str(folder), "tokenizer": None, "chat_template": None, "lora": None}
        return with_sections(config, model=whole), None
    return load(None, settings={**settings, "model": {"name": source, **settings.get("model", {})}}).config, None


def _adapter(folder: Path, settings: Mapping[str, Any]) -> tuple[RunConfig, Weights]:
    from paceline.model.adapters import adapter_scale, read_adapter

    adapter = json.loads((folder / ADAPTER).read_text(encoding="utf-8"))
    adapter_scale(adapter)  # or say what is wrong with it
    run = RunDirectory(folder.resolve().parent.parent)
    section = settings.get("model", {})
    base = section.get("name") or adapter.get("base_model_name_or_path")
    if not base and run.config_file.is_file():
        base = load(run.config_file).config.model.name
    if not base:
        raise PacelineError(
            f"adapter {folder} does not name the model it belongs to: give it, as in Policy(..., model='BASE')"
        )
    config = load(None, settings={**settings, "model": {**section, "name": base}}).config
    lora = LoRAConfig(rank=adapter["r"], alpha=float(adapter["lora_alpha"]))

    def weights() -> WeightUpdate:
        tensors, scale = read_adapter(folder)
        return WeightUpdate(1, tensors, Adapter(POLICY_MODEL, scale))

    return with_sections(config, model={"lora": lora}), weights


PICTURE_DPI = 90
"""Of the curve in a notebook, which is as wide as a page."""


@dataclass(frozen=True, repr=False)
class RunResult:
    """The result of a run. In a notebook it shows its curve."""

    outcome: RunOutcome
    directory: Path
    metrics: list[dict[str, Any]]
    """One entry per step, as in `metrics.jsonl`."""
    summary: list[str]
    error: Exception | None = None

    @cached_property
    def policy(self) -> Policy:
        """The trained model, to chat with: `result.policy.chat("2 + 3 =")`. It is loaded when it is first used."""
        return Policy(self.outcome.export or self.outcome.checkpoint or self.directory)

    def __repr__(self) -> str:
        curves = {key: curve for key, curve in MetricHistory.of(self.metrics).rewards.items() if curve}
        scores = {key: (format_score(curve[0][1]), format_score(curve[-1][1])) for key, curve in curves.items()}
        rewards = [f"{key}: {first} → {last}" for key, (first, last) in scores.items()]
        parts = [f"{self.directory.name}: {self.outcome.status} after {format_amount(self.outcome.step, 'step')}"]
        parts += [f"reward {rewards[0].partition(': ')[2]}"] if len(rewards) == 1 else rewards
        parts += [one_line(self.outcome.message)] if self.outcome.status == "failed" else []
        return f"RunResult({', '.join([*parts, str(self.directory)])})"

    def _repr_html_(self) -> str:
        lines = "".join(f"<div>{html.escape(line)}</div>" for line in self.summary)
        if not any(MetricHistory.of(self.metrics).rewards.values()):
            return f"<div>{lines}</div>"
        picture = base64.b64encode(reward_picture(self.metrics, self.directory.name, PICTURE_DPI)).decode()
        name = html.escape(repr(self), quote=True)
        return f'<div>{lines}<img alt="{name}" src="data:image/png;base64,{picture}"></div>'


class RunFailed(PacelineError):
    """A run that ended because of an error. `result` is what it left behind up to there."""

    def __init__(self, result: RunResult) -> None:
        super().__init__(result.outcome.message)
        self.result = result
