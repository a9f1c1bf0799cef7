"""Checks requests before they enter the engine: each limit has a sentence of its own."""

import math

from paceline.engine.base import GenerateRequest
from paceline.engine.sequence import Catalog
from paceline.errors import RequestError, UnknownModel

MAX_TOP_LOGPROBS = 20
MIN_TEMPERATURE = 1e-20
INT64_MAX = (1 << 63) - 1


def check_request(request: GenerateRequest, catalog: Catalog, longest_prompt: int, vocabulary: int) -> None:
    """Raises for the first thing that is wrong."""
    prompt = len(request.prompt_ids)
    if prompt == 0:
        raise RequestError("the prompt is empty: give at least one token")
    if prompt > longest_prompt:
        raise RequestError(f"the prompt has {prompt} tokens, but the context has room for {longest_prompt}")
    if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= vocabulary:
        raise RequestError(f"the prompt holds token ids outside the vocabulary (0 to {vocabulary - 1})")
    if request.max_tokens < 1:
        raise RequestError(f"max_tokens is {request.max_tokens}: ask for at least one")
    if not (math.isfinite(request.temperature) and request.temperature >= 0):
        raise RequestError(f"temperature is {request.temperature}: give a number from 0 on")
    if 0 < request.temperature < MIN_TEMPERATURE:
        raise RequestError(f"temperature is {request.temperature}, too small to divide by: give 0 for greedy")
    if not 0 < request.top_p <= 1 or not 0 <= request.top_k <= INT64_MAX:
        raise RequestError("top_p must be above 0 and at most 1, top_k 0 or more")
    if not -INT64_MAX - 1 <= request.noise <= INT64_MAX:
        raise RequestError("the noise key must fit 64 bits: make it with noise_key")
    if not 0 <= request.top_logprobs <= MAX_TOP_LOGPROBS:
        raise RequestError(f"top_logprobs is {request.top_logprobs}: at most {MAX_TOP_LOGPROBS} are given")
    if request.model not in catalog.versions:
        served = ", ".join(sorted(catalog.adapters)) or "none"
        raise UnknownModel(f"no adapter `{request.model}` is loaded; loaded are: {served}")
