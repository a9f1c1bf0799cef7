"""Stores weights as files that engines in other processes read and the trainer no longer changes."""

import asyncio
import dataclasses
import json
import shutil
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from paceline.errors import EngineError, RequestError
from paceline.weights.tensors import clone_to_host, framework, read_file, write_tensors
from paceline.weights.update import POLICY_MODEL, Adapter, Array, WeightUpdate

if TYPE_CHECKING:
    from paceline.weights.delta import WeightDelta

LONGEST_CHAIN = 64
"""Deltas since the last whole file. An engine that comes back is given the file with all of them applied."""
MOST_DELTA_ITEMSIZE = 2
"""Bytes of a published element up to which deltas are worth trying: of float32 a step changes nearly every one."""
PEFT_PREFIX = "base_model.model."
"""What peft puts before the names of an adapter's tensors."""


class StoredTensors(Mapping[str, Array]):
    """Tensors by name, in files that are read when the first of them is needed. Another process can be given the files
    instead of the bytes. `deltas` are files too: what was changed, one after the other, since `files` were written."""

    def __init__(self, files: Sequence[Path], deltas: Sequence[Path] = ()) -> None:
        self.files, self.deltas = tuple(files), tuple(deltas)
        self._tensors: dict[str, Array] | None = None
        self._names = [name for file in files for name in _tensor_names(file)]

    def load(self) -> dict[str, Array]:
        """Read the files now; else the first access to a tensor does."""
        if self._tensors is None:
            try:
                tensors = {name: tensor for file in self.files for name, tensor in read_file(file).items()}
            except (SafetensorError, OSError) as error:
                raise EngineError(f"the weights cannot be read any more: {error}") from error
            for file in self.deltas:
                _apply_delta_file(tensors, file)
            self._tensors = tensors
        return self._tensors

    def unload(self) -> None:
        """Give the memory back; the files are still there."""
        self._tensors = None

    def __getitem__(self, name: str) -> Array:
        return self.load()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def read_delta(data: bytes) -> "WeightDelta":
    from paceline.weights.delta import DeltaError, WeightDelta  # which needs torch

    try:
        return WeightDelta(data)
    except DeltaError as error:
        raise RequestError(str(error)) from error


def open_delta(file: Path) -> "WeightDelta":
    try:
        return read_delta(file.read_bytes())
    except (OSError, RequestError) as error:
        raise EngineError(f"{file.name} cannot be read: {error}") from error


def _apply_delta_file(tensors: dict[str, Array], file: Path) -> None:
    """The fingerprint that goes with the update proves the whole chain, so the links are not proved one by one."""
    delta = open_delta(file)
    try:
        delta.check_fit(tensors)
        delta.write(tensors)
    except EngineError as error:
        raise EngineError(f"{file.name} does not fit the weights before it: {error}") from error


def _tensor_names(file: Path) -> list[str]:
    """The tensors a file holds, from its header: a damaged file is found before anything is loaded."""
    try:
        with safe_open(file, framework=framework()) as opened:
            return list(opened.keys())
    except (SafetensorError, OSError, ValueError) as error:
        raise RequestError(f"{file.name} cannot be read: {error}") from error


class WeightStore:
    """A folder with the newest full weights, a safetensors file each; all but the last `most` updates are removed.

    With `deltas`, the store remembers what it kept last. Where few elements have changed, it writes those, and the
    update it returns has both: the delta, for an engine that holds the version before, and all tensors, read from the
    last whole file and the deltas since only if an engine needs them. A whole file is written once more when the deltas
    since are together as long.
    """

    def __init__(self, folder: Path, most: int = 1, deltas: bool = False) -> None:
        self.folder = folder.resolve()
        self._most = most
        self._stored_files: deque[tuple[Path, ...]] = deque()
        self._encoder = None
        if deltas:
            from paceline.weights.delta import DeltaEncoder  # which needs torch

            self._encoder = DeltaEncoder()
        self._file: Path | None = None
        self._chain: tuple[Path, ...] = ()
        self.last_delta: Path | None = None
        """The delta that led to what was stored last."""
        self._merged: tuple[StoredTensors, Path] | None = None
        """The last that was asked for as one file, and lay in several."""
        self._merge_lock = asyncio.Lock()

    def adopt(self) -> None:
        """Take over the files that lie there: an earlier process in this role wrote them."""
        left = (*self.folder.glob("*.safetensors"), *self.folder.glob("*.delta"))
        self._stored_files = deque([left] if left else [])
        for half in self.folder.glob("*.part"):
            half.unlink(missing_ok=True)

    async def store_update(self, update: WeightUpdate) -> WeightUpdate:
        """The same update, its tensors in a file of this folder."""
        tensors = update.tensors
        if isinstance(tensors, StoredTensors) and {file.resolve().parent for file in tensors.files} == {self.folder}:
            return update
        return await asyncio.to_thread(self._keep, update)

    async def full_path(self, update: WeightUpdate) -> Path:
        """A single safetensors file of this folder with all of its tensors."""
        tensors = (await self.store_update(update)).tensors
        assert isinstance(tensors, StoredTensors)
        if not tensors.deltas and len(tensors.files) == 1:
            return tensors.files[0]
        async with self._merge_lock:  # bounded: by the writing of one file
            if self._merged is None or self._merged[0] is not tensors:
                self._drop_merged()
                self._merged = tensors, await asyncio.to_thread(self._write, update.version, tensors)
                tensors.unload()
            return self._merged[1]

    def clear(self) -> None:
        """Remove what lies there of ours."""
        self._remove_old(0)
        self._drop_merged()

    def _drop_merged(self) -> None:
        if self._merged is not None:
            self._merged[1].unlink(missing_ok=True)
            self._merged = None

    def _keep(self, update: WeightUpdate) -> WeightUpdate:
        delta, known = self._encode_delta(update)
        link = None
        if delta is not None:
            link = self._write_file(update.version, "delta", lambda file: file.write_bytes(delta.data))
        self.last_delta = link
        self._chain = (*self._chain, link) if link else ()
        written = sum(delta.stat().st_size for delta in self._chain)
        if not link or not self._file or len(self._chain) >= LONGEST_CHAIN or written > self._file.stat().st_size:
            self._file, self._chain = self._write(update.version, update.tensors), ()
        self._stored_files.append((self._file, *self._chain, *([link] if link else [])))
        self._remove_old(self._most)
        stored = StoredTensors([self._file], self._chain)
        return dataclasses.replace(update, tensors=stored, delta=delta, expected=update.expected or known)

    def _encode_delta(self, update: WeightUpdate) -> tuple["WeightDelta | None", str | None]:
        """The delta from the last stored update, and the new fingerprint."""
        if self._encoder is None or update.adapter is not None:
            return None, None
        tensors = update.tensors.values()
        narrow = sum(tensor.nbytes for tensor in tensors if tensor.itemsize <= MOST_DELTA_ITEMSIZE)
        if 2 * narrow <= sum(tensor.nbytes for tensor in tensors):
            return None, None
        delta = self._encoder.advance(update.version, update.tensors)
        assert self._encoder.policy is not None
        return delta, self._encoder.policy.fingerprint

    def _remove_old(self, most: int) -> None:
        while len(self._stored_files) > most:
            needed = {file for files in list(self._stored_files)[1:] for file in files}
            for file in self._stored_files.popleft():
                if file not in needed:
                    file.unlink(missing_ok=True)

    def _write(self, version: int, tensors: Mapping[str, Array]) -> Path:
        return self._write_file(version, "safetensors", lambda file: write_tensors(tensors, file))

    def _write_file(self, version: int, ending: str, write: Callable[[Path], object]) -> Path:
        name = f"{version}-{uuid.uuid4().hex[:12]}"
        half, whole = self.folder / f"{name}.part", self.folder / f"{name}.{ending}"
        try:
            write(half)
            return half.rename(whole)  # a reader never sees half a file
        except OSError as error:
            half.unlink(missing_ok=True)
            self._chain, self._file = (), None  # what was to be written is missing from the chain
            raise _write_error(self.folder, error) from error


def clone_update(update: WeightUpdate) -> WeightUpdate:
    """The same update in memory of its own: right for adapters, which are small."""
    return dataclasses.replace(update, tensors={name: clone_to_host(tensor) for name, tensor in update.tensors.items()})


StoredUpdate = tuple[WeightUpdate, str]
"""An update, and its fingerprint, which tells files of equal weights."""


def save_update(stored: StoredUpdate, path: Path) -> None:
    """Keep an update as one file of a checkpoint. A file that an earlier checkpoint has is linked."""
    update, fingerprint = stored
    notes = {"fingerprint": fingerprint} | ({} if update.adapter is None else {"scale": repr(update.adapter.scale)})
    # Another run may have left other weights under the same name here.
    same = [file for file in sorted(path.parent.parent.glob(f"step-*/{path.name}")) if _read_metadata(file) == notes]
    try:
        path.hardlink_to(same[-1])
    except (IndexError, OSError):
        write_tensors(update.tensors, path, notes)


def read_update(path: Path, version: int) -> StoredUpdate:
    """What `save_update` kept; raises `OSError` or `SafetensorError` where that cannot be read."""
    with safe_open(path, framework=framework()) as file:
        tensors, notes = {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    adapter = Adapter(POLICY_MODEL, float(notes["scale"])) if "scale" in notes else None
    update = WeightUpdate(version, tensors, adapter)
    return update, notes.get("fingerprint") or update.fingerprint()


def _read_metadata(path: Path) -> dict[str, str] | None:
    """A file's metadata about its weights; None if it cannot be read."""
    try:
        with safe_open(path, framework=framework()) as file:
            return file.metadata()
    except (OSError, SafetensorError):
        return None


class WeightFolders:
    """Weights as folders that other engines read, at a path both sides see: safetensors under Hugging Face's names, and
    adapters in peft's form. Full weights are stored as one file, and shown to the engine as a folder that links to it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.tied_embedding: str | None = None
        """The embedding that is the output layer too, for an engine whose copy of the model has the two apart."""
        self._store = WeightStore(self.folder)

    async def store_update(self, update: WeightUpdate) -> WeightUpdate:
        """A copy that can be sent again later, whatever the trainer has done to its tensors by then."""
        if update.adapter is not None:
            return clone_update(update)
        self.folder.mkdir(parents=True, exist_ok=True)
        return await self._store.store_update(update)

    async def full_path(self, update: WeightUpdate) -> Path:
        """A folder with all of a model's weights; `remove` it once it is loaded."""
        file = await self._store.full_path(await self.store_update(update))
        return await asyncio.to_thread(self._link_folder, file, update.version)

    def clear(self) -> None:
        self._store.clear()

    def _link_folder(self, file: Path, version: int) -> Path:
        folder = self._make_folder(f"whole-{version}")
        (folder / "model.safetensors").symlink_to(file.resolve())
        if self.tied_embedding is not None:
            with safe_open(file, framework=framework()) as opened:
                self._write(folder / "head.safetensors", {"lm_head.weight": opened.get_tensor(self.tied_embedding)})
        return folder

    async def adapter_folder(self, update: WeightUpdate) -> Path:
        """A folder with an adapter, to stay for as long as it is served: engines may read it again."""
        return await asyncio.to_thread(self._write_adapter, update)

    def _write_adapter(self, update: WeightUpdate) -> Path:
        assert update.adapter is not None
        folder = self._make_folder(f"adapter-{update.version}")
        named = {PEFT_PREFIX + name.removeprefix(PEFT_PREFIX): tensor for name, tensor in update.tensors.items()}
        self._write(folder / "adapter_model.safetensors", named)
        ranks = {tensor.shape[0] for name, tensor in named.items() if name.endswith("lora_A.weight")}
        if len(ranks) != 1:
            raise EngineError(f"an adapter of ranks {sorted(ranks)} cannot be served: give all its modules one rank")
        (rank,) = ranks
        modules = sorted({name.split(".lora_")[0].rsplit(".", 1)[-1] for name in named})
        kind = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "", "bias": "none"}
        config = kind | {"r": rank, "lora_alpha": update.adapter.scale * rank, "target_modules": modules}
        (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        return folder

    def _make_folder(self, name: str) -> Path:
        folder = self.folder / f"{name}-{uuid.uuid4().hex[:12]}"
        folder.mkdir(parents=True)
        return folder

    def _write(self, file: Path, tensors: dict[str, Array]) -> None:
        try:
            write_tensors(tensors, file)
        except OSError as error:
            raise _write_error(self.folder, error) from error


def remove_folder(folder: Path) -> None:
    """Take a folder of ours away; links are removed, not what they point to."""
    shutil.rmtree(folder, ignore_errors=True)


def _write_error(folder: Path, error: OSError) -> EngineError:
    return EngineError(f"the weights cannot be written to {folder} ({error.strerror}): make room, then --resume latest")
