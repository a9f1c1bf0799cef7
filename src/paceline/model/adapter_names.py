"""What adapters are called: one name for a LoRA tensor, whoever wrote it."""

import re

from paceline.errors import PacelineError

_PREFIX = re.compile(r"^(?:_orig_mod\.|base_model\.model\.)+")
LORA = re.compile(r"^(?P<module>.+)\.lora_(?P<half>[AB])(?:\.[^.]+)?\.weight$")


class AdapterError(PacelineError):
    """An adapter that does not fit the model or its slots; nothing was changed."""


def canonical(name: str) -> str:
    """One name for a LoRA tensor, whoever wrote it.

    >>> canonical("base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight")
    'model.layers.0.self_attn.q_proj.lora_A.weight'
    """
    name = _PREFIX.sub("", name)
    found = LORA.match(name)
    return f"{found['module']}.lora_{found['half']}.weight" if found else name
