"""Defines the training sample, one token sequence with parallel per-token streams, and the scores of its tokens.

Encodes samples as msgpack with raw array buffers. Never pickle, never a Python list per token.

An array travels as (dtype, shape, bytes). Decoding wraps the buffer without copying, so decoded streams are read-only
views; the trainer copies once, when it packs.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.util.lazy_import import renamed_attributes

Ended = Literal["terminated", "truncated"]

STREAM_DTYPES: Mapping[str, type] = {
    "token_ids": np.int64,
    "loss_mask": np.bool_,
    "logprobs": np.float32,
    "versions": np.int32,
    "temperatures": np.float32,
    "advantages": np.float32,
    "rewards": np.float32,
    "rl_weights": np.float32,
    "ce_weights": np.float32,
    "teacher_kl_weights": np.float32,
    "teacher_logprobs": np.float32,
    "kl_ref_logprobs": np.float32,
    "kv_kept": np.bool_,
}
RENAMED_STREAMS = {
    "ref_logprobs": "teacher_logprobs",
    "base_logprobs": "kl_ref_logprobs",
    "ref_kl_weights": "teacher_kl_weights",
}
"""Streams by their names in files of earlier versions."""
_no_attribute = renamed_attributes(RENAMED_STREAMS | {"rl": "rl_token_weights"})
WEIGHT_STREAMS = ("rl_weights", "ce_weights", "teacher_kl_weights")
FIRST_IS_ZERO = {"loss_mask", *WEIGHT_STREAMS}
SAMPLING_STREAMS = {"loss_mask", "logprobs", "versions", "temperatures"}
"""Streams that say how a token was sampled, and must agree with one another."""


class Ticket(NamedTuple):
    """One draw of a dataset row. `number` orders tickets of all environments of a run."""

    number: int
    env: str
    epoch: int
    draw: int
    row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One token sequence. Every stream has its length; nothing here is a scalar advantage.

    `loss_mask` marks the tokens the policy sampled. `logprobs` are as sampled, at the sampling temperature, 0.0 off the
    mask; absent, the sampler was frozen and the ratio is 1. `versions` are -1 off the mask. Absent weight streams mean
    rl weight 1.0 on the loss mask. The first token has nothing before it to be predicted from, so it never trains.
    `teacher_logprobs` are for `teacher_kl`, `kl_ref_logprobs` for the penalty of `[trainer.kl]`. `kv_kept` marks tokens
    that were sampled on keys and values which older weights than the token's own had computed; absent, there are none.
    """

    token_ids: NDArray
    loss_mask: NDArray
    versions: NDArray
    temperatures: NDArray
    logprobs: NDArray | None = None
    advantages: NDArray | None = None
    rewards: NDArray | None = None
    rl_weights: NDArray | None = None
    ce_weights: NDArray | None = None
    teacher_kl_weights: NDArray | None = None
    teacher_logprobs: NDArray | None = None
    kl_ref_logprobs: NDArray | None = None
    kv_kept: NDArray | None = None

    ended: Ended = "terminated"
    env: str = ""
    ticket: Ticket | None = None
    rollout: int = 0
    spans: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        self._set(self.streams())

    @classmethod
    def as_sampled(cls, token_ids: Sequence[int] | NDArray, temperature: float = 1.0) -> Self:
        """All tokens but the first, as if the policy had just sampled them."""
        mask = np.arange(len(token_ids)) > 0
        temperatures = np.full(len(token_ids), temperature, np.float32)
        return cls(
            token_ids=np.asarray(token_ids), loss_mask=mask, versions=np.where(mask, 0, -1), temperatures=temperatures
        )

    def _set(self, streams: Mapping[str, NDArray | None]) -> None:
        """Set streams, each as a contiguous array of its type, and check them."""
        for name, stream in streams.items():
            if stream is not None:
                stream = np.ascontiguousarray(stream, dtype=STREAM_DTYPES.get(name) or _no_attribute(self, name))
            object.__setattr__(self, name, stream)
        if not (length := len(self.token_ids)):
            raise ValueError(f"{self.where}: a sample needs at least one token")
        for name in streams:
            stream = getattr(self, name)
            if stream is None:
                continue
            if stream.shape != (length,):
                raise ValueError(
                    f"{self.where}: stream `{name}` has shape {stream.shape}, but the sample has {length} tokens"
                )
            if name in FIRST_IS_ZERO and stream[0]:
                raise ValueError(f"{self.where}: `{name}` trains the first token, which nothing precedes")
        if not SAMPLING_STREAMS.isdisjoint(streams):
            self._check_sampling()

    def _check_sampling(self) -> None:
        sampled = self.versions >= 0
        # Nearly always the mask says the same as the versions, and comparing bytes is the shortest way to see it.
        if sampled.tobytes() != self.loss_mask.tobytes() or np.minimum.reduce(self.versions) < -1:
            if ((self.versions != -1) & ~self.loss_mask).any():
                raise ValueError(f"{self.where}: `versions` must be -1 off the loss mask")
            if self.logprobs is not None and (~sampled & self.loss_mask).any():
                raise ValueError(f"{self.where}: a token sampled by the policy needs its version")
        if not np.minimum.reduce(self.temperatures) > 0:
            raise ValueError(f"{self.where}: `temperatures` must be positive")

    def __len__(self) -> int:
        return len(self.token_ids)

    if not TYPE_CHECKING:
        __getattr__ = _no_attribute

    @property
    def where(self) -> str:
        number = "-" if self.ticket is None else self.ticket.number
        return f"env `{self.env}`, ticket {number}, rollout {self.rollout}"

    def streams(self) -> dict[str, NDArray]:
        return {name: value for name in STREAM_DTYPES if (value := getattr(self, name)) is not None}

    def with_streams(self, **streams: NDArray | None) -> Self:
        """A copy with some streams set; only what changed is checked."""
        clone = object.__new__(type(self))
        for name, value in zip(FIELDS, _fields_of(self), strict=True):
            object.__setattr__(clone, name, value)
        clone._set(streams)
        return clone

    def truncated_to(self, limit: int) -> Self:
        """Every stream sliced alike; marked as truncated when something was cut."""
        if len(self) <= limit:
            return self
        cut = {name: stream[:limit] for name, stream in self.streams().items()}
        spans = tuple((start, min(end, limit)) for start, end in self.spans if start < limit)
        return replace(self, **cut, spans=spans, ended="truncated")

    @property
    def rl_token_weights(self) -> NDArray:
        """Weight of each token in the rl component: `rl_weights`, or 1 where there are none; 0 off the loss mask."""
        if self.rl_weights is None:
            return self.loss_mask.astype(np.float32)
        return np.where(self.loss_mask, self.rl_weights, np.float32(0))

    @property
    def oldest_version(self) -> int | None:
        """Version of the oldest token that trains; None if a frozen model sampled it or nothing trains."""
        if self.logprobs is None:
            return None
        if self.rl_weights is None and self.teacher_kl_weights is None:
            # Off the mask stands -1, which unsigned is larger than any version.
            oldest = int(np.minimum.reduce(self.versions.view(np.uint32)))
            return oldest if oldest < 1 << 31 else None
        trained = self.rl_token_weights != 0
        for weights in (self.teacher_kl_weights, self.ce_weights):
            if weights is not None:
                trained |= self.loss_mask & (weights != 0)
        return int(self.versions[trained].min()) if trained.any() else None


FIELDS = tuple(f.name for f in fields(Sample))
DEFAULTS = {f.name: None if f.default is MISSING else f.default for f in fields(Sample)}
_fields_of = attrgetter(*FIELDS)


def unchecked_sample(**values: Any) -> Sample:
    """A sample of streams that are known to be right: contiguous, of their types, and in line with one another."""
    made = object.__new__(Sample)
    for name, value in (DEFAULTS | values).items():
        object.__setattr__(made, name, value)
    return made


SCALAR_FIELDS = tuple(name for name in FIELDS if name not in STREAM_DTYPES)
WIRE_VERSION = 1


class WireError(ValueError):
    """Bytes that are not a batch of samples."""


class WiredArray(msgspec.Struct, array_like=True):
    """An array as (dtype, shape, bytes)."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    @classmethod
    def of(cls, array: NDArray) -> "WiredArray":
        return cls(array.dtype.str, array.shape, array.data.cast("B") if array.size else memoryview(b""))

    def view(self) -> NDArray:
        return np.frombuffer(self.data, dtype=np.dtype(self.dtype)).reshape(self.shape)


class WiredSample(msgspec.Struct, array_like=True):
    streams: dict[str, WiredArray]
    ended: Ended
    env: str
    ticket: Ticket | None
    rollout: int
    spans: tuple[tuple[int, int], ...]


class _Batch(msgspec.Struct, array_like=True):
    version: int
    samples: list[WiredSample]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Batch)


def encode(samples: Sequence[Sample]) -> bytes:
    return _encoder.encode(_Batch(WIRE_VERSION, [wire(sample) for sample in samples]))


def decode(data: bytes | memoryview) -> list[Sample]:
    """The batch again; streams are views into `data`. Garbage raises `WireError`."""
    try:
        batch = _decoder.decode(data)
        if batch.version != WIRE_VERSION:
            raise WireError(f"a batch of wire version {batch.version} cannot be read by version {WIRE_VERSION}")
        return [unwire(wired) for wired in batch.samples]
    except (msgspec.DecodeError, RecursionError, TypeError, ValueError) as error:
        raise WireError(f"not a batch of samples: {error}") from error


def wire(sample: Sample) -> WiredSample:
    """A sample ready for the wire, without a copy of its streams."""
    return WiredSample(
        {name: WiredArray.of(stream) for name, stream in sample.streams().items()},
        *(getattr(sample, name) for name in SCALAR_FIELDS),
    )


def unwire(wired: WiredSample) -> Sample:
    """The sample again; whatever cannot be one raises `ValueError` or `TypeError`."""
    arrays = {RENAMED_STREAMS.get(name, name): array for name, array in wired.streams.items()}
    if unknown := arrays.keys() - STREAM_DTYPES.keys():
        raise WireError(f"unknown streams {sorted(unknown)}")
    for name, array in arrays.items():
        # Strings are compared, not dtypes: numpy evaluates parts of a dtype string, and this one came from outside.
        if array.dtype != (expected := np.dtype(STREAM_DTYPES[name]).str):
            raise WireError(f"stream `{name}` has dtype {array.dtype}, not {expected}")
    streams: dict[str, Any] = {name: array.view() for name, array in arrays.items()}
    return Sample(**streams, **{name: getattr(wired, name) for name in SCALAR_FIELDS})


# -- what the trainer computed for each token that trained, for the record, in seven bytes a token ---------------------

CLIPPED, SKIPPED = 1, 2
"""Flags: a bound of the loss held the token back; its sequence was left out (`trainer.clip_skip_threshold`)."""
TOKEN_SCORE = np.dtype([("logprob", "<f4"), ("entropy", "<f2"), ("flags", "u1")])
"""The policy's log probability in the forward pass of its optimizer step, the entropy before the token, and flags."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """The scores of a batch, sample after sample. Bytes, so that it travels and is written as it is.

    Only tokens that a component of the loss trains have scores. Where they lie in a sample follows from its weights
    (`trained_mask`), so no positions are kept.
    """

    samples: bytes
    """Which samples of the batch have scores, and how many each: pairs of u4."""
    tokens: bytes
    """`TOKEN_SCORE`s, in the order of `samples`."""

    @classmethod
    def of(cls, scores: Mapping[int, NDArray]) -> Self:
        """Of the `TOKEN_SCORE`s of each sample, by its place in the batch."""
        counts = np.array([(place, len(one)) for place, one in scores.items()], "<u4")
        return cls(counts.tobytes(), b"".join([one.tobytes() for one in scores.values()]))

    @classmethod
    def joined(cls, parts: Sequence["TokenScores"]) -> Self:
        """Of different samples."""
        return cls(b"".join([part.samples for part in parts]), b"".join([part.tokens for part in parts]))

    def by_sample(self) -> dict[int, NDArray]:
        """The scores of each sample, by its place in the batch."""
        counts = np.frombuffer(self.samples, "<u4").reshape(-1, 2)
        parts = np.split(np.frombuffer(self.tokens, TOKEN_SCORE), np.cumsum(counts[:, 1])[:-1])
        return dict(zip(counts[:, 0].tolist(), parts, strict=True)) if len(counts) else {}

    @classmethod
    def merged(cls, parts: Iterable["TokenScores | None"]) -> "TokenScores | None":
        """Those of all ranks. Ranks that share a sample have computed the same."""
        known = [part for part in parts if part is not None]
        if len(known) < 2:
            return known[0] if known else None
        return cls.of({place: one for part in known for place, one in part.by_sample().items()})

    def renumbered(self, places: Sequence[int] | Mapping[int, int]) -> "TokenScores":
        """The same samples at other places: sample i at `places[i]`."""
        counts = np.frombuffer(self.samples, "<u4").reshape(-1, 2).copy()
        counts[:, 0] = [places[place] for place in counts[:, 0].tolist()]
        return type(self)(counts.tobytes(), self.tokens)


NO_SCORES = TokenScores(b"", b"")


def trained_mask(sample: Sample) -> NDArray:
    """The tokens that a component of the loss trains."""
    trained = sample.rl_token_weights != 0
    if sample.ce_weights is not None:
        trained |= sample.ce_weights != 0
    if sample.teacher_kl_weights is not None:
        trained |= sample.loss_mask & (sample.teacher_kl_weights != 0)
    return trained
