"""Trains a Hugging Face model in torch, on one device or many ranks."""

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from math import inf
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed import ProcessGroup, get_world_size
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from paceline.config import trainer as config
from paceline.config.cluster import ParallelConfig
from paceline.data import MicroBatch, Sample, pack, token_scales
from paceline.data.packing import bin_steps
from paceline.errors import TrainerError
from paceline.model import (
    Adapter,
    Canary,
    WeightUpdate,
    clone_model,
    fingerprint,
    set_cpu_threads,
    trainable_parameters,
)
from paceline.model.attention import checkpoint_layers
from paceline.model.background_compile import BackgroundCompile
from paceline.model.head import CanaryScorer, make_canary
from paceline.model.loading import trained_adapter
from paceline.trainer.backend import BUDGET, Batch, PolicyBackend, cost_of, policy_steps, training
from paceline.trainer.loss import LossStats
from paceline.trainer.terms import TrainedTokens, streams_of, trained_positions
from paceline.trainer.torch import checkpoint
from paceline.trainer.torch.forward import ForwardPass
from paceline.trainer.torch.optimizer import MasterAdamW, RankLayout, TorchTensors, local_shard
from paceline.trainer.torch.sharding import empty_copy, fill, shard
from paceline.trainer.torch.world import Ranks, gather_samples
from paceline.trainer.trainer import LocalTrainer
from paceline.util.gc_tuning import freeze_new_objects
from paceline.weights.update import MASK, POLICY_MODEL, canary_ids, canary_of

log = logging.getLogger(__name__)

FIRST_COMPILED_TOKENS = 8192
"""Of the pass that compiles ahead of the first step: for fewer than about 6,000 tokens of a 0.5B model, torch compiles
the norms apart."""
SMALLEST = 4096
LARGEST = 1 << 17
"""Beyond this a larger micro-batch is no faster."""
SHARE = 0.85
"""Of the memory that is free; the rest is for whatever the trial did not see."""
SEQUENCE = 1024


class TorchPolicy(PolicyBackend):
    """A policy in torch, whole on one device or with its tensors and samples spread over ranks. What leaves it, weights
    and exports, leaves from the first rank."""

    def __init__(
        self,
        model: PreTrainedModel,
        c: config.TrainerConfig,
        total_steps: int | None = None,
        fp32_head: bool = False,
        group: ProcessGroup | None = None,
        device: torch.device | None = None,
        background: BackgroundCompile | None = None,
    ) -> None:
        super().__init__(c)
        if group is not None and (size := get_world_size(group)) != c.parallel.ranks:
            raise TrainerError(f"trainer.parallel.ranks is {c.parallel.ranks}, but {size} ranks have met")
        self.net, self._total_steps = model.eval(), total_steps  # new adapters come in training mode
        self.device = model.device if device is None else device
        compiled = c.compile is True or (c.compile == "auto" and group is not None)
        compiled |= background is not None and background.is_cached
        self.compiles_first = compiled and group is None and self.device.type == "cuda"
        """Compiled code is made, or loaded, before the first step."""
        # The compiler is not asked to see through matrices that lie on several ranks.
        compiled = compiled and self.device.type == "cuda" and c.parallel.tensor == 1
        if c.gradient_checkpointing:
            checkpoint_layers(model)
        self.ranks = Ranks(group, self.device, c.parallel)
        self.forward = ForwardPass(
            model, fp32_head, compiled, retain_graph=c.stream, context=self.ranks.context, device=self.device
        )
        self._parallel = c.parallel if group is not None else ParallelConfig()
        needs_copy = c.critic is not None and self._parallel.divides_model
        self._value_body = empty_copy(model) if needs_copy else None  # now: what is sharded cannot be copied
        self.layout = shard(model, self.ranks, self._parallel)
        self.forward.layout, self.dtype, self.rank = self.layout, self.layout.dtype, self.ranks.data.rank
        steps = policy_steps(c, total_steps)
        self._trained = trainable_parameters(model)
        self._adapter = trained_adapter(model)
        """Both are the model's own memory: training changes what they hold, and never which tensors they are."""
        self.optimizer = MasterAdamW(self._trained, c.optimizer, steps, self.layout)
        self._is_rank_zero = self.ranks.all.rank == 0
        self.parameters = TorchTensors(model, self.layout, c.kl is not None and c.kl.offload)
        self._canary = CanaryScorer(model, self.forward.head)
        self._cost = cost_of(model.config)
        self._found: int | None = None
        self._background = background
        self._eager_seconds, self._eager_steps, self._kept_code = 0.0, 0, False

    # -- gradients --------------------------------------------------------------------------------------------------

    def tokens(self, micro_batch: MicroBatch) -> tuple[TrainedTokens, Tensor]:
        """The tokens that train, as the policy sees them now; and a zero that depends on all hidden states, so that
        all ranks run backward."""
        streams = {name: self.forward.send(stream) for name, stream in streams_of(micro_batch).items()}
        logprobs, entropy, anchor = self.forward.logprobs(
            micro_batch,
            self.forward.send(trained_positions(micro_batch)),
            entropy=True,
            entropy_grad=bool(self._config.entropy_coef),
        )
        assert entropy is not None
        return TrainedTokens(logprobs=logprobs, entropy=entropy, names=micro_batch.names, **streams), anchor

    def backward(
        self,
        micro_batch: MicroBatch,
        names: Sequence[str],
        losses_of: Callable[[TrainedTokens], tuple[Mapping[str, Tensor], LossStats]],
        accumulate_into: Callable[[str], AbstractContextManager] = nullcontext,
        on_tokens: Callable[[TrainedTokens], None] | None = None,
    ) -> LossStats:
        """One forward pass, and a backward pass for each loss."""
        tokens, anchor = self.tokens(micro_batch)
        by_name, sums = losses_of(tokens)
        if on_tokens is not None:
            with torch.no_grad():
                on_tokens(tokens)
        for name in names:
            with accumulate_into(name):
                self.optimizer.backward(by_name[name], anchor, retain_graph=name != names[-1])
        return sums

    def clip(self) -> Tensor:
        if self.ranks.all.size > 1:
            self.ranks.gradient_group.sum_gradients(self.optimizer.unsummed_masters)
            self.layout.sync_replicated(self.optimizer.masters)
        return self.optimizer.clip()

    def value_model(self, c: config.OptimizerConfig, total_steps: int | None) -> "TorchValueModel":
        compiled = self._config.compile is True and self.device.type == "cuda" and self._parallel.tensor == 1
        if self._value_body is not None:
            body = copy.deepcopy(self._value_body)
            layout = shard(body, self.ranks, self._parallel)
            fill(body, self.net)
        else:
            body, layout = clone_model(self.net), RankLayout(self.dtype)
            body.set_output_embeddings(None)  # logits are not needed
            for name, parameter in body.named_parameters():
                parameter.requires_grad_(self.net.get_parameter(name).requires_grad)
        return TorchValueModel(body, layout, self.forward.of_copy(body, layout, compiled), c, total_steps, self.ranks)

    # -- ranks ------------------------------------------------------------------------------------------------------

    def sum(self, values: NDArray) -> NDArray:
        world = self.ranks.data
        return super().sum(values) if world.size == 1 else world.sum(torch.from_numpy(values)).cpu().numpy()

    def sum_over_all_ranks(self, value: float) -> float:
        return float(self.ranks.all.sum(torch.tensor([value])))

    @property
    def budget(self) -> int:
        """Tokens of a micro-batch; where that is to be found out, it is once, when the first batch is here."""
        if self._found is None:
            given = self._config.micro_batch_tokens
            self._found = find_token_budget(self.forward, self.net, self._config) if given == "auto" else given
        return self._found

    def gather(self, samples: Sequence[Sample]) -> Batch:
        world = self.ranks.data
        if world.size == 1:
            return super().gather(samples)
        everything, self._found = gather_samples(samples, world, self.budget)
        cut = bin_steps(everything, self._config.minibatches, world.size, self._found, self._cost)
        return Batch(everything, cut, world.rank)

    # -- weights ----------------------------------------------------------------------------------------------------

    def canary(self) -> Canary:
        """Log probabilities of a few fixed tokens under the current weights."""
        if not self.layout.is_sharded:
            ids = canary_ids(self.forward.head.vocabulary)
            return canary_of(ids, self._canary.logprobs(ids), self.dtype)
        with torch.no_grad():
            return self.layout.run_forward(lambda: make_canary(self.net, self.forward.head, self.dtype))

    def weights(self, version: int) -> WeightUpdate:
        """Sharded ones are gathered one at a time, and beside a model that one GPU cannot hold they wait on the
        host."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # an engine's streams need not fall silent
        canary = self.canary()
        if self._adapter is not None:
            tensors, scale = self._adapter
            return WeightUpdate(
                version, tensors if self._is_rank_zero else {}, Adapter(POLICY_MODEL, scale), canary=canary
            )
        out: dict[str, Tensor] = {}
        for name, whole in self._whole_weights():
            if self._is_rank_zero:
                out[name] = whole.cpu() if self.layout.is_sharded else whole
        return WeightUpdate(version, out, canary=canary)

    def copy_into(self, held: Mapping[str, Tensor], version: int) -> WeightUpdate:
        """Copy the weights of now into tensors that an engine of this process holds."""
        canary = self.canary()
        if self._adapter is not None:
            tensors, scale = self._adapter
            return WeightUpdate(version, tensors, Adapter(POLICY_MODEL, scale), fingerprint(tensors.items()), canary)
        copied, total = {}, 0
        for name, whole in self._whole_weights():
            copied[name] = held[name].copy_(whole)
            total += int(fingerprint([(name, whole)]), 16)  # of what was gathered: what is held must prove to be that
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return WeightUpdate(version, copied, None, f"{total & MASK:016x}", canary)

    def _whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._trained.items():
            whole = parameter.detach()
            yield name, self.layout.full_tensor(name, local_shard(whole)) if self.layout.is_sharded else whole

    def export(self, folder: Path, tokenizer: PreTrainedTokenizerBase | None) -> None:
        state = self.layout.state(self.net, keep=self._is_rank_zero)
        if self._is_rank_zero:
            checkpoint.export(self.net, folder, tokenizer, state, self.layout.dtype)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def save(self, folder: Path, tensors: Mapping[str, Tensor], state: Mapping) -> None:
        world = self.ranks.all
        random = checkpoint.rng_states(self.device, world.rank if world.group else None)
        checkpoint.write(folder, {**tensors, **random}, state, world.group)

    def read(self, folder: Path) -> tuple[dict[str, Tensor], dict]:
        def room(name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
            # A master or moment, the critic's under `critic/` and the name its value model has for the policy's body.
            return self.layout.empty_shard(name.rpartition("/")[2].removeprefix("body."), shape, dtype)

        return checkpoint.read(folder, room, self.ranks.all.group)

    def restore_random(self, tensors: Mapping[str, Tensor], state: Mapping) -> None:
        checkpoint.restore_rng(tensors, self.device, self.ranks.all.rank)

    # -- the process ------------------------------------------------------------------------------------------------

    def device_load(self) -> dict[str, float]:
        if self.device.type != "cuda":
            return {}
        free, total = torch.cuda.mem_get_info(self.device)
        load = {"memory/device": float(total - free)}
        with suppress(ImportError, RuntimeError):  # it needs NVML's bindings, which are not everywhere
            load["busy/device"] = torch.cuda.utilization(self.device) / 100
        return load

    def peak_bytes(self) -> float:
        on_gpu = self.device.type == "cuda"
        return float(torch.cuda.max_memory_allocated(self.device)) if on_gpu else super().peak_bytes()

    def on_thread_start(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # each thread has its own idea of the current one
        elif self._config.threads:
            set_cpu_threads(self._config.threads)

    def compile_first(self) -> None:
        """Compile while the engine starts and the first batch is sampled."""
        budget = self._config.micro_batch_tokens
        tokens = min(FIRST_COMPILED_TOKENS, budget) if isinstance(budget, int) else FIRST_COMPILED_TOKENS
        try:
            run_once(self.forward, self.net, self._config, tokens)
        except RuntimeError as error:  # the first step meets it too, if it stays
            log.warning("compiling the trainer ahead of its first step failed: %s", error)
            return
        if self._background is not None:
            self._background.write_marker()
            self._background.mark_switched()

    def after_step(self, seconds: float, version: int) -> None:
        """Have compiled code made if that pays, or switch to it if it is there."""
        if self.forward.is_compiled:
            if not self._kept_code:  # the first step with compiled code has just made it
                self._kept_code = True
                freeze_new_objects()
        elif self._background is not None:
            self._eager_seconds += seconds
            self._eager_steps += 1
            remaining = None if self._total_steps is None else max(0, self._total_steps - version)
            self._background.consider(self._eager_seconds, self._eager_steps, remaining)
            if self._background.is_ready:
                self.forward.compile()
                self._background.mark_switched()

    def close(self) -> None:
        if self._background is not None:
            self._background.close()


class TorchValueModel(nn.Module):
    """The critic's value model: a copy of the policy that lies on the ranks as the policy does, and a small head, whole
    on every rank. Frozen tensors are shared with the policy, trainable ones are its own."""

    def __init__(
        self,
        body: PreTrainedModel,
        layout: RankLayout,
        forward_pass: ForwardPass,
        c: config.OptimizerConfig,
        total_steps: int | None,
        ranks: Ranks,
    ) -> None:
        super().__init__()
        self._ranks, self.body, self.forward_pass = ranks, body, forward_pass
        self.value = nn.Linear(body.config.get_text_config().hidden_size, 1, device=ranks.device)
        nn.init.zeros_(self.value.weight)
        nn.init.zeros_(self.value.bias)
        self.eval()
        self._layout = layout.of_parent(self, "body")
        self.optimizer = MasterAdamW(trainable_parameters(self), c, total_steps, self._layout)

    def forward(self, micro_batch: MicroBatch, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Values of choosing at `positions`, read off the token before; and a zero that reaches every parameter."""
        dtype = self.value.weight.dtype

        def work() -> tuple[Tensor, Tensor]:
            rows, zero = self.forward_pass.read(micro_batch, positions, lambda before, _: self.value(before.to(dtype)))
            return rows[:, 0].clone(), zero  # FSDP must not hand out views

        values, zero = self._layout.run_forward(work)
        return values, zero + 0 * (self.value.weight.sum() + self.value.bias.sum())

    @torch.no_grad()
    def values(self, micro_batch: MicroBatch) -> NDArray:
        values, _ = self(micro_batch, self.forward_pass.send(micro_batch.loss_mask.nonzero()[0]))
        return values.cpu().numpy()

    def backward(
        self, micro_batch: MicroBatch, positions: NDArray, targets: Sequence[NDArray], loss_of: Callable[..., Tensor]
    ) -> Tensor:
        send = self.forward_pass.send
        values, anchor = self(micro_batch, send(positions))
        loss = loss_of(values, *map(send, targets))
        self.optimizer.backward(loss, anchor)
        return loss.detach()

    def clip(self, losses: list[Tensor]) -> tuple[float, float]:
        self._ranks.gradient_group.sum_gradients(self.optimizer.unsummed_masters)
        self._layout.sync_replicated(self.optimizer.masters)
        return self._ranks.data.sum(torch.stack(losses).sum()[None]).item(), self.optimizer.clip().item()

    def state(self) -> dict[str, int]:
        return {}

    def restore(self, state: Mapping) -> None:
        """Its dropout draws from the generators that the policy restores."""


class TorchTrainer(LocalTrainer):
    """Trains a Hugging Face causal LM, or the adapters injected into it.

    With a process group each rank brings samples of its own, or none, and all make the same update; all must call the
    same methods in the same order. What leaves the trainer, weights and exports, leaves from the first rank.
    """

    policy: TorchPolicy

    def __init__(
        self,
        model: PreTrainedModel,
        c: config.TrainerConfig,
        *,
        total_steps: int | None = None,
        fp32_head: bool = False,
        dumps: Path | None = None,
        group: ProcessGroup | None = None,
        device: torch.device | None = None,
        background: BackgroundCompile | None = None,
    ) -> None:
        """`background` makes compiled code beside the trainer where `compile` is "auto"; without it `auto` stays
        uncompiled on one device, and compiles at the first step on several ranks."""
        policy = TorchPolicy(model, c, total_steps, fp32_head, group, device, background)
        super().__init__(policy, c, model.config, total_steps, dumps)
        if policy.compiles_first:
            self._thread.submit(policy.compile_first)

    async def copy_into(self, held: Mapping[str, Tensor]) -> WeightUpdate:
        """Copy the weights of now into tensors that an engine of this process holds, on every rank and one at a time,
        so that no second copy of the model is needed. The update names those very tensors, or the adapter."""
        return await self._run(lambda: self.policy.copy_into(held, self.version))


# -- how many tokens of a micro-batch the GPU's memory holds -----------------------------------------------------------


def find_token_budget(forward: ForwardPass, model: PreTrainedModel, c: config.TrainerConfig) -> int:
    """The largest safe budget for this model, beside whatever else already lives on its device."""
    if model.device.type != "cuda":
        return BUDGET
    device = model.device

    def peak(tokens: int) -> int:
        """Bytes a backward pass over so many tokens needs beyond what is there before and after it."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run_once(forward, model, c, tokens)
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before

    peak(SMALLEST // 4)  # compiles what is compiled
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    # Gradient sums and two moments come with the first step, the critic's too.
    optimizers = 0 if c.optimizer.offload else 1 + (c.critic is not None)
    coming = 12 * optimizers * sum(p.numel() for p in trainable_parameters(model).values())
    found = largest_fitting(peak, int(SHARE * free) - coming)
    torch.cuda.empty_cache()
    return found


def run_once(forward: ForwardPass, model: PreTrainedModel, c: config.TrainerConfig, tokens: int) -> None:
    """One forward and backward pass over blank samples; the gradients are thrown away."""
    length = min(SEQUENCE, tokens)
    samples = [Sample.as_sampled(np.arange(length) % model.config.get_text_config().vocab_size)] * (tokens // length)
    try:
        with training(model):
            for micro_batch in pack(samples, token_scales(samples), tokens):
                positions = forward.send(np.arange(1, len(micro_batch)))
                values, _, anchor = forward.logprobs(micro_batch, positions, True, bool(c.entropy_coef))
                ((values * 0).sum() + anchor).backward()
    finally:  # also where it did not fit
        for parameter in trainable_parameters(model).values():
            parameter.grad = None


def largest_fitting(peak: Callable[[int], int], room: int) -> int:
    """The most tokens whose peak fits, in steps of `SMALLEST`: two trials show what a token costs, a third one checks.

    >>> largest_fitting(lambda tokens: 1000 + 2 * tokens, room=100_000)
    49152
    """

    def needed(tokens: int) -> float:
        try:
            return peak(tokens)
        except torch.cuda.OutOfMemoryError:
            return inf

    first, second = needed(SMALLEST // 2), needed(SMALLEST)
    if first == inf or second > room:
        return SMALLEST // 2
    each = max(1.0, (second - first) / (SMALLEST // 2))
    guess = int((room - first) / each) + SMALLEST // 2
    tokens = min(LARGEST, guess // SMALLEST * SMALLEST)
    while tokens > SMALLEST and needed(tokens) > room:
        tokens -= max(SMALLEST, tokens // 8 // SMALLEST * SMALLEST)
    return max(tokens, SMALLEST)
