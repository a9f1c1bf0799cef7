"""What the engine's law tests share: the matrix they run over, small adapters, and a runner that is no model."""

import functools

import torch
from transformers import PreTrainedModel

from backends import paged
from paceline.engine.pages import PAGE, PageCache
from paceline.engine.runner import Runner, StepInFlight
from paceline.engine.sequence import DecodeSequence, SampledToken
from paceline.engine.weight_applier import ServedModels
from paceline.model import clone_model
from paceline.weights.update import mix_int

MATRIX = [
    paged({"cache": cache, "in_flight": in_flight}, id=f"{cache}-{in_flight}")
    for cache in ("slots", "pages")
    for in_flight in (0, 3)
]
"""Both caches, each with steps that land at once and steps that land late, as on CUDA."""

PAGE_GIB = 2 * 2 * 2 * 8 * 16 * 4 / 2**30
"""One page of the tiny model: keys and values, 2 layers, 2 heads, 8 wide, 16 tokens, float32."""

TARGETS = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")


def random_adapter(model: PreTrainedModel, seed: int, rank: int = 4) -> dict[str, torch.Tensor]:
    """LoRA matrices large enough to be seen in every log probability."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in model.named_modules():
        if name.endswith(TARGETS):
            rows, columns = module.weight.shape
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, columns, generator=generator) * 0.3
            tensors[f"{name}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) * 0.3
    return tensors


def merge(base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """base + scale * B A in float32 from a pristine base, rounded once."""
    return (base.float() + scale * (b.float() @ a.float())).to(base.dtype)


def merged(model: PreTrainedModel, adapter: dict[str, torch.Tensor], scale: float) -> PreTrainedModel:
    """The plain model an adapter makes of another."""
    out = clone_model(model)
    with torch.no_grad():
        for name, parameter in out.named_parameters():
            module = name.removesuffix(".weight")
            if f"{module}.lora_A.weight" in adapter:
                a, b = adapter[f"{module}.lora_A.weight"], adapter[f"{module}.lora_B.weight"]
                parameter.copy_(merge(parameter, a, b, scale))
    return out


@functools.lru_cache(1 << 16)
def chain(before: int, token: int, weights: tuple) -> int:
    """What the keys of a token stand for: the weights that made them, the token, and all keys before it."""
    return mix_int(before ^ mix_int(hash((token, weights)))) >> 2


def content(weights: tuple, tokens: list[int]) -> list[int]:
    out, last = [], 0
    for token in tokens:
        out.append(last := chain(last, token, weights))
    return out


class SymbolicRunner(Runner):
    """Writes `chain` numbers where a model would write keys, reading what came before from the same cache. Where the
    cache keeps states they are the number of the last token, and must be at each chunk the one before it."""

    def __init__(self, cache, depth: int, served: ServedModels) -> None:
        self.depth, self.cache, self.served = depth, cache, served
        self.sampled: dict[DecodeSequence, list[int]] = {}
        self.table: dict[tuple[int, int], int] = {}
        self.writes: dict[StepInFlight, set[int]] = {}
        self.computed: dict[DecodeSequence, set[int]] = {}

    def launch(self, chunks) -> StepInFlight:
        assert len({id(c.sequence) for c in chunks}) == len(chunks)
        assert all(c.length > 0 for c in chunks)
        flight = StepInFlight(chunks)
        self.writes[flight] = self._pages(chunks) if isinstance(self.cache, PageCache) else set()
        if self.cache.keeps_states:
            self.cache.reset_states(chunks)
        for chunk in sorted(chunks, key=lambda c: c.start):  # a chunk that shares in this step reads what it wrote
            self._compute(chunk)
        if self.cache.keeps_states:
            self.cache.keep_prompt_states(chunks)
        return flight

    def _pages(self, chunks) -> set[int]:
        """The pages a step writes, by a device's own table, which hears of changes only."""
        changed, self.cache.table_changes = self.cache.table_changes, {}
        self.table.update(changed)
        written = set()
        for c in chunks:
            s = c.sequence
            columns = range(-(-(c.start + c.length) // PAGE))
            assert [self.table[s.slot, i] for i in columns] == s.pages[: len(columns)]
            mine = {s.pages[i] for i in columns if (i + 1) * PAGE > c.start}
            assert not mine & written
            for page in mine:
                others = [o for o in chunks if o is not c and page in o.sequence.pages]
                assert self.cache._ref_counts[page] == 1 + len(others), "every holder of the page has read it"
                assert all(o.start >= (o.sequence.pages.index(page) + 1) * PAGE for o in others)
            written |= mine
        return written

    def _compute(self, chunk) -> None:
        sequence, number = chunk.sequence, chunk.sequence.slot
        slot = torch.tensor([number])
        known = [*sequence.request.prompt_ids, *self.sampled.get(sequence, [])]
        weights = self.served.weights_key(sequence.request.model)
        assert chunk.version == self.served.versions[sequence.request.model]
        last = int(self.cache.read(0, slice(number, number + 1), chunk.start)[0][0, -1]) if chunk.start else 0
        if self.cache.keeps_states:
            assert int(self.cache.read_states(0, slot)["recurrent0"]) == last
        made = []
        for token in known[chunk.start : chunk.start + chunk.length]:
            made.append(last := chain(last, token, weights))
        numbers = torch.tensor(made)[:, None, None]
        positions = torch.arange(chunk.start, chunk.start + chunk.length)
        self.computed.setdefault(sequence, set()).update(positions.tolist())
        self.cache.write(0, slot.expand(chunk.length), positions, numbers, -numbers)
        if self.cache.keeps_states:
            self.cache.write_states(0, slot, {"recurrent0": torch.tensor([made[-1]])})
        if sequence.scores is not None:
            chunk.scores = made[: len(chunk.targets)]
        if chunk.samples_token:
            assert chunk.start + chunk.length == len(known)
            assert chunk.index == len(known) - len(sequence.request.prompt_ids)
            token = mix_int(last) % 20  # one in twenty stops
            self.sampled.setdefault(sequence, []).append(token)
            chunk.sampled_token = SampledToken(token, -float(last % 1000))
