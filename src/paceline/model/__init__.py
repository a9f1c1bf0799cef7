"""What engine and trainer share: Hugging Face models, tokenizers, LoRA, attention, weights."""

from paceline.model.attention import ATTENTION, PLAN, PackedPlan, UnsupportedModel
from paceline.model.cpu import quick_handover, small_products
from paceline.model.head import Head, token_logprobs
from paceline.model.loading import (
    ModelError,
    attach_lora,
    end_tokens,
    engine_twin,
    load_model,
    load_tokenizer,
    resolve,
    trainable,
    twin,
)
from paceline.model.weights import Adapter, Canary, Policy, WeightUpdate, fingerprint

__all__ = [
    "ATTENTION",
    "PLAN",
    "Adapter",
    "Canary",
    "Head",
    "ModelError",
    "PackedPlan",
    "Policy",
    "UnsupportedModel",
    "WeightUpdate",
    "attach_lora",
    "end_tokens",
    "engine_twin",
    "fingerprint",
    "load_model",
    "load_tokenizer",
    "quick_handover",
    "resolve",
    "small_products",
    "token_logprobs",
    "trainable",
    "twin",
]
