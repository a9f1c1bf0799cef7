"""Model code that engine and trainer share: loading, tokenizers, LoRA, attention, weights.

Code that needs torch is imported when it is first used: a run on MLX has none.
"""

from typing import TYPE_CHECKING

from paceline.model.cpu import avoid_onednn_on_arm, set_cpu_threads, short_switch_interval
from paceline.model.source import ModelError, resolve
from paceline.model.tokenizer import end_tokens, load_tokenizer, tokenizer_digest
from paceline.util.lazy_import import lazy_getattr
from paceline.weights.update import Adapter, Canary, ServedPolicy, WeightUpdate, fingerprint

if TYPE_CHECKING:
    from paceline.model.attention import ATTENTION, PackedPlan, UnsupportedModel, hidden_states
    from paceline.model.head import LMHead, token_logprobs
    from paceline.model.loading import attach_lora, clone_for_engine, clone_model, load_model, trainable_parameters

__all__ = [
    "ATTENTION",
    "Adapter",
    "Canary",
    "LMHead",
    "ModelError",
    "PackedPlan",
    "ServedPolicy",
    "UnsupportedModel",
    "WeightUpdate",
    "attach_lora",
    "avoid_onednn_on_arm",
    "clone_for_engine",
    "clone_model",
    "end_tokens",
    "fingerprint",
    "hidden_states",
    "load_model",
    "load_tokenizer",
    "resolve",
    "set_cpu_threads",
    "short_switch_interval",
    "token_logprobs",
    "tokenizer_digest",
    "trainable_parameters",
]

__getattr__ = lazy_getattr(
    __name__,
    {
        "attention": ("ATTENTION", "PackedPlan", "UnsupportedModel", "hidden_states"),
        "head": ("LMHead", "token_logprobs"),
        "loading": ("attach_lora", "clone_for_engine", "load_model", "trainable_parameters", "clone_model"),
    },
)
