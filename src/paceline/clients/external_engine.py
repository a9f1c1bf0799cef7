"""Base class of third-party engines: whole weights from a folder, adapters by name, checked by canary."""

import asyncio
import contextlib
import time
import uuid
from abc import abstractmethod
from collections.abc import Collection, Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import orjson

from paceline.clients.http import CONNECT_SECONDS, JSON_HEADERS, HttpConnection, finite_canary
from paceline.clients.rpc import deliver_whole
from paceline.engine.base import Completion, Engine, EngineLimits, EngineStats, GenerateRequest, Listener
from paceline.errors import EngineError, Mismatch, RequestError, UnknownModel, Unreachable
from paceline.weights.update import ServedPolicy, WeightUpdate
from paceline.weights.weight_store import WeightFolders, remove_folder

CONCURRENT_SCORES = 32
SEED_BITS = (1 << 63) - 1
COMMAND_SECONDS = 900.0
"""Timeout of a command: loading all weights from a slow disk takes longest."""
CLOSE_HEADERS = {**JSON_HEADERS, "Connection": "close"}
"""Commands are rare, and a server that fails one resets the connection, which must not be reused."""


@dataclass(slots=True)
class LoadedAdapter:
    """An adapter under the name the server knows it by: a new one for each version."""

    name: str
    version: int
    folder: Path
    running: int = 0


class ExternalEngine(HttpConnection, Engine):
    """Speaks the `Engine` protocol to a server that knows nothing of Paceline.

    Adapters: each version is loaded under a name of its own and proved by its canary before any request is sent to it.
    Requests end with the version they began with, and the last of them takes the adapter away.

    Whole weights: new requests are held while they change, and answers until the canary is found again, so that nothing
    sampled from unproved weights gets out. The server stores them in layouts of its own, so no fingerprint of ours can
    be compared: the canary is the proof, and `Completion.weights` stays empty.
    """

    remedy: ClassVar[str]
    """What to do where its log probabilities leave the temperature out."""
    unload_path: ClassVar[str]
    """Path that unloads an adapter."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        folder: Path,
        verify: bool = True,
        capacity: int = 1,
        vocabulary: int = 1 << 31,
    ) -> None:
        super().__init__(url, api_key)
        self._capacity, self._vocabulary = capacity, vocabulary
        self._folders = WeightFolders(folder)
        self._verify = verify
        self._session = uuid.uuid4().hex[:8]
        self._version: int | None = None
        """Of the whole weights; None before the first update."""
        self._adapters: dict[str, LoadedAdapter] = {}
        self._loaded_adapters: list[LoadedAdapter] = []
        """Every adapter of this run that the server holds, also those that only older requests use."""
        self._update_done: asyncio.Future[None] | None = None
        self._failure: EngineError | None = None
        """Why requests are refused until the next update."""
        self._running = self._tokens = self._swaps = 0
        self._busy_since = self._busy = self._pause_seconds = 0.0

    @abstractmethod
    async def _sample(self, request: GenerateRequest, adapter: LoadedAdapter | None) -> Completion:
        """One completion by an adapter or, with None, by the model itself."""

    @abstractmethod
    async def _logprobs(self, ids: Sequence[int], model: str | None) -> list[float]:
        """Of a prompt's own tokens at temperature 1; 0.0 for the first."""

    @abstractmethod
    async def _replace_weights(self, folder: Path, version: int) -> float:
        """Load whole weights while nothing is sampled; answers with the seconds of the pause."""

    @abstractmethod
    async def _load_adapter(self, name: str, folder: Path) -> None: ...

    @abstractmethod
    async def _served_version(self) -> int | None:
        """The version of the whole weights that the server reports; None if this run did not load them."""

    @abstractmethod
    async def _adapter_names(self) -> Collection[str]: ...

    @abstractmethod
    def _best_logprob(self, temperature: float) -> float:
        """Of the most probable token after token 0."""

    async def generate(self, request: GenerateRequest, listener: Listener | None = None) -> Completion:
        if request.grammar is not None:
            raise RequestError(f"{self.name} is not asked for grammars: use the embedded engine for such replies")
        if request.top_p < 1 or request.top_k > 0:
            raise RequestError(
                f"{self.name} reports log probabilities of what top-p and top-k have left, not of the policy itself: "
                "leave both out"
            )
        await self._wait_for_update()
        with self._adapter_in_use(request.model) as adapter:
            completion = await self._sample(request, adapter)
            if adapter is None:
                await self._wait_for_update()  # what came from new weights waits until they are proved
        self._tokens += len(completion.token_ids)
        return deliver_whole(completion, listener)

    async def score(
        self, sequences: Sequence[Sequence[int]], temperature: float = 1.0, model: str = ""
    ) -> list[list[float]]:
        if temperature != 1.0:
            raise RequestError(f"{self.name} scores at temperature 1 only, not at {temperature:g}")
        await self._wait_for_update()
        slots = asyncio.Semaphore(CONCURRENT_SCORES)
        with self._adapter_in_use(model) as adapter:

            async def one(ids: Sequence[int]) -> list[float]:
                async with slots:  # bounded: each request before it has a timeout
                    return await self._logprobs(ids, adapter.name if adapter else None)

            return list(await asyncio.gather(*map(one, sequences)))

    async def load_weights(self, update: WeightUpdate) -> float:
        if update.adapter is not None:
            await self._publish_adapter(update, update.adapter.name)
            return 0.0
        await self._wait_for_update(ignore_failure=True)
        change = self._update_done = asyncio.get_running_loop().create_future()
        try:
            return await self._publish_weights(update)
        finally:
            self._update_done = None
            change.set_result(None)

    async def policy(self) -> ServedPolicy:
        """The version held, as far as the server can tell; -1 if it is none that we gave it."""
        own = self._adapters.get("")
        if own is not None:
            return ServedPolicy(own.version if own.name in await self._adapter_names() else -1, "")
        version = await self._served_version()
        if self._failure is not None:
            raise self._failure
        if self._version is None:
            return ServedPolicy(0, "")
        return ServedPolicy(-1 if version is None else version, "")

    async def stats(self) -> EngineStats:
        """As far as this client counts itself."""
        return EngineStats(
            running=self._running,
            capacity=self._capacity,
            tokens=self._tokens,
            swaps=self._swaps,
            pause_seconds=self._pause_seconds,
            busy_seconds=self.busy_seconds,
        )

    async def store_update(self, update: WeightUpdate) -> WeightUpdate:
        return await self._folders.store_update(update)

    @property
    def busy_seconds(self) -> float:
        """Time in which a request of ours was under way: such a server does not tell how long it computed."""
        return self._busy + (time.monotonic() - self._busy_since if self._running else 0.0)

    def close(self) -> None:
        for adapter in self._loaded_adapters:
            with contextlib.suppress(EngineError):
                self.request_sync(self.unload_path, {"lora_name": adapter.name})
            remove_folder(adapter.folder)
        self._loaded_adapters.clear()
        self._folders.clear()
        super().close()

    async def aclose(self) -> None:
        await asyncio.to_thread(self.close)
        await super().aclose()

    async def get(self, path: str, **more: Any) -> Any:
        return await super().get(path, timeout=CONNECT_SECONDS, **more)

    async def send_command(self, path: str, body: Any = None, **query: Any) -> Any:
        """POST a command that is no request for tokens: load, pause, resume."""
        content = orjson.dumps(body) if body is not None else None
        return await self._request(
            "POST", path, content=content, params=query, headers=CLOSE_HEADERS, timeout=COMMAND_SECONDS
        )

    async def _publish_weights(self, update: WeightUpdate) -> float:
        folder = await self._folders.full_path(update)
        self._failure = Unreachable(f"{self.name} was left with half of version {update.version}")
        try:
            pause = await self._replace_weights(folder, update.version)
            self._version = update.version
            await self._check_canary(update, None)
        except EngineError as error:
            self._failure = error
            raise
        finally:
            remove_folder(folder)
        self._failure = None
        self._swaps += 1
        self._pause_seconds += pause
        return pause

    async def _publish_adapter(self, update: WeightUpdate, name: str) -> None:
        folder = await self._folders.adapter_folder(update)
        fresh = LoadedAdapter(
            f"paceline-{name or 'policy'}-{update.version}-{uuid.uuid4().hex[:8]}", update.version, folder
        )
        self._loaded_adapters.append(fresh)
        try:
            await self._load_adapter(fresh.name, folder)
            await self._check_canary(update, fresh.name)
        except EngineError:
            await self._unload_adapter(fresh)
            raise
        before, self._adapters[name] = self._adapters.get(name), fresh
        self._swaps += 1
        if before is not None and not before.running:
            await self._unload_adapter(before)

    async def _check_canary(self, update: WeightUpdate, model: str | None) -> None:
        canary = finite_canary(update) if self._verify else None
        if canary is None:
            return
        gap = canary.gap(await self._logprobs(canary.token_ids, model))
        if not gap <= canary.tolerance:
            raise Mismatch(
                f"version {update.version} failed its canary: log probabilities of {self.name} and trainer differ by "
                f"{gap:.2g} on average (allowed: {canary.tolerance:.2g})"
            )

    async def _unload_adapter(self, adapter: LoadedAdapter) -> None:
        with contextlib.suppress(EngineError):  # a server that was restarted does not know it
            await self.send_command(self.unload_path, {"lora_name": adapter.name})
        remove_folder(adapter.folder)
        if adapter in self._loaded_adapters:
            self._loaded_adapters.remove(adapter)

    async def _wait_for_update(self, ignore_failure: bool = False) -> None:
        """Wait until no weight update is running; raise if the last one failed."""
        while self._update_done is not None:
            await asyncio.wait([self._update_done], timeout=60.0)
        if self._failure is not None and not ignore_failure:
            raise self._failure

    @contextlib.contextmanager
    def _adapter_in_use(self, model: str) -> Generator[LoadedAdapter | None]:
        """The adapter of this name, which stays loaded meanwhile; None for the model itself."""
        if model and model not in self._adapters:
            raise UnknownModel(f"no adapter `{model}` is loaded; loaded are: {', '.join(self._adapters) or 'none'}")
        adapter = self._adapters.get(model)
        if not self._running:
            self._busy_since = time.monotonic()
        self._running += 1
        if adapter is not None:
            adapter.running += 1
        try:
            yield adapter
        finally:
            self._running -= 1
            if not self._running:
                self._busy += time.monotonic() - self._busy_since
            if adapter is not None:
                adapter.running -= 1
                if not adapter.running and adapter not in self._adapters.values():
                    self._unload_task = asyncio.ensure_future(self._unload_adapter(adapter))

    def _check_temperature(self) -> None:
        """Log probabilities must be those of log_softmax(logits / temperature), as the trainer has them."""
        cold, hot = self._best_logprob(0.5), self._best_logprob(2.0)
        if cold < -1e-3 and abs(cold - hot) < 1e-6:
            raise EngineError(f"{self.name} leaves the temperature out: {self.remedy}")

    def _limits(self, context: int) -> EngineLimits:
        adapters = {name: adapter.version for name, adapter in self._adapters.items() if name}
        return EngineLimits(max_context=context, vocabulary=self._vocabulary, adapters=adapters)

    def _versions(self, spans: Iterable[dict[str, Any]], count: int, adapter: LoadedAdapter | None) -> list[int]:
        """The version that sampled each of `count` tokens: the adapter's, or that of the weights of its span."""
        if adapter is not None:
            return [adapter.version] * count
        versions: list[int] = []
        for span in spans:
            if span["start"] >= span["end"]:
                continue
            version = self._version_of(label := span["version"])
            if version is None:
                raise Unreachable(f"{self.name} answered from weights `{label}`, which this run did not give it")
            versions += [version] * (span["end"] - span["start"])
        if len(versions) != count:
            raise EngineError(f"{self.name} named the weights of {len(versions)} tokens, not of {count}")
        return versions

    def _version_label(self, version: int) -> str:
        """The name of a version on the server, which no other run gives."""
        return f"paceline-{self._session}-{version}"

    def _version_of(self, label: str) -> int | None:
        """None where the server was started anew, and holds weights of no known version."""
        ours = f"paceline-{self._session}-"
        if label.startswith(ours):
            return int(label.removeprefix(ours))
        return 0 if self._version is None else None
