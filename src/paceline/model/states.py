"""Layers that carry a state from token to token: linear attention, state-space layers, short convolutions.

Their code is transformers': a module that keeps its states in transformers' cache is handed the tokens of each sequence
apart, beside a cache of its own that begins where the sequence stands. Which tokens belong together, and where states
come from, is the plan's matter, as it is for attention.
"""

import inspect
from collections.abc import Iterator
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.model.attention import Mixer, UnsupportedModel, current_plan

States = dict[str, Tensor]
"""The states of one layer by their names, a row for each sequence."""

UPDATES = {"update_conv_state", "update_recurrent_state"}
CACHE_NAMES = ("cache_params", "past_key_values")


class StateCache:
    """What a module sees of transformers' cache: the states of its layer, empty at the beginning of a sequence."""

    def __init__(self, states: States | None = None) -> None:
        self.states = states or {}

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states.get(f"conv{state_idx}")

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Keep the last inputs of a convolution; the answer has those of before at its left."""
        before = self.get_conv_state(layer_idx, state_idx)
        if before is None:
            width = conv_kernel_size or conv_states.shape[-1]
            together = F.pad(conv_states, (max(0, width - conv_states.shape[-1]), 0))
        else:
            width = before.shape[-1]
            together = torch.cat((before, conv_states), -1)
        self.states[f"conv{state_idx}"] = together[..., -width:]
        return together

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states.get(f"recurrent{state_idx}")

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        self.states[f"recurrent{state_idx}"] = recurrent_states
        return recurrent_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return bool(self.states)

    def is_recording_past(self, layer_idx: int) -> bool:
        return False


def mixers(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The modules that keep states, each with the name of its cache argument."""
    for module in model.modules():
        parameters = inspect.signature(type(module).forward).parameters
        cache = next((name for name in CACHE_NAMES if name in parameters), None)
        if cache is not None and hasattr(module, "layer_idx") and _keeps_states(type(module)):
            yield module, cache


def _keeps_states(kind: type[nn.Module]) -> bool:
    methods = (inspect.unwrap(method) for method in vars(kind).values() if inspect.isfunction(method))
    return any(UPDATES & set(method.__code__.co_names) for method in methods)


def mix_by_plan(model: nn.Module) -> None:
    """Let the modules that keep states follow the plan of the forward pass; without one they are as they were."""
    for module, cache in mixers(model):
        module.forward = MethodType(partial(_forward, cache), module)


def _forward(cache: str, module: Any, *args: Any, **kwargs: Any) -> Tensor:
    plan = current_plan()
    if plan is None:
        return type(module).forward(module, *args, **kwargs)
    hidden = args[0] if args else kwargs["hidden_states"]
    return plan.mix(module.layer_idx, partial(_run, module, cache), hidden[0])[None]


def _run(module: Any, cache: str, hidden: Tensor, states: StateCache | None) -> Tensor:
    mixer = partial(_call, module, cache)
    if states is None or not states.states or hidden.shape[1] == 1:
        return mixer(hidden, states)
    kind = type(module)
    if kind not in _resumes:
        _resumes[kind] = _reads_states(mixer, hidden, states.states)
    return mixer(hidden, states) if _resumes[kind] else _by_token(mixer, hidden, states)


def _call(module: Any, cache: str, hidden: Tensor, states: StateCache | None) -> Tensor:
    out = type(module).forward(module, hidden, **{cache: states})
    if not isinstance(out, Tensor):
        raise UnsupportedModel(f"{type(module).__name__} answers with more than hidden states, which is not supported")
    return out


_resumes: dict[type, bool] = {}
"""Kinds of modules by whether several tokens go on from all states that are there: some code begins anew. All that are
supported go on token by token."""


def _reads_states(mixer: Mixer, hidden: Tensor, states: States) -> bool:
    """Whether another value of any state changes what several tokens come to, be it ever so little."""

    def run(changed: str = "") -> Tensor:
        own = {name: torch.full_like(one[:1], 1.0 + (name == changed)) for name, one in states.items()}
        return mixer(torch.ones_like(hidden[:1, :1]).expand(1, 3, -1), StateCache(own))

    plain = run()
    return all(not torch.equal(run(name), plain) for name in states)


def steps_like_whole(mixer: Mixer, like: Tensor) -> bool:
    """Whether tokens one by one come to what they come to together. `like` has their width and type."""
    tokens = torch.arange(6 * like.shape[-1], device=like.device).sin().view(1, 6, -1).to(like.dtype)
    together = mixer(tokens, StateCache())
    mixer(tokens[:, :3], cache := StateCache())
    mixer(tokens[:, 3:], cache)  # asks, before there are adapters, whether its kind goes on in pieces
    bound = 1e-4 if like.dtype == torch.float32 else 0.02
    return bool((_by_token(mixer, tokens, StateCache()) - together).abs().max() <= bound * together.abs().max())


def _by_token(mixer: Mixer, hidden: Tensor, states: StateCache) -> Tensor:
    return torch.cat([mixer(token, states) for token in hidden.split(1, dim=1)], 1)
