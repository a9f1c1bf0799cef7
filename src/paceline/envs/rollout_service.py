"""Defines the HTTP contract of a rollout service: what it is sent, what it answers, and how an answer is checked.

docs/rollout-service.md describes it for other languages.
"""

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from paceline.data import Row
from paceline.envs.base import RefusedRollout, reward_problem
from paceline.rollout import Seat, Turn

SCHEMA_VERSION = 1
LARGEST_LOGPROB = 1e-3
"""A log probability is at most 0; float arithmetic may put it a little above."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, ser_json_inf_nan="null", ser_json_bytes="base64")


class PolicyAddress(_Strict):
    """Where to sample from the policy."""

    base_url: str
    """An OpenAI base URL that answers until the episode is over."""
    model: str = "policy"
    version: int
    """The policy's version when the episode began."""


class RequestedSampling(_Strict):
    """How to sample: a service with its own access to the policy must keep to it."""

    temperature: float
    top_p: float
    top_k: int | None
    max_tokens: int
    """Longest reply, in tokens."""


class RolloutRequest(_Strict):
    """What Paceline posts: one row to play once."""

    schema_version: Literal[1] = SCHEMA_VERSION
    id: str
    """Names this episode. A request that is posted again with the same id wants the same rollout, not a second one."""
    row: dict[str, Any]
    policy: PolicyAddress
    sampling: RequestedSampling
    tokenizer: str
    """Digest of the policy's vocabulary and chat template."""
    timeout: float
    """Seconds until the episode is given up."""

    @classmethod
    def build(cls, key: str, row: Row, seat: Seat, base_url: str, timeout: float) -> "RolloutRequest":
        keys = RequestedSampling.model_fields
        sampling = RequestedSampling.model_construct(**{key: seat.setting(key) for key in keys})
        policy = PolicyAddress(base_url=base_url, version=seat.version)
        digest = seat.tokenizer_digest
        return cls.model_construct(id=key, row=row, policy=policy, sampling=sampling, tokenizer=digest, timeout=timeout)


class ServiceTurn(_Strict):
    """A piece of the conversation as tokens: context, or what the policy said. Every token stands in exactly one."""

    role: Literal["system", "user", "assistant", "tool"]
    token_ids: list[int] = Field(min_length=1)
    """Its tokens; of the assistant those that were sampled, the end-of-turn token included."""
    prompt_token_ids: list[int] | None = None
    """Assistant: the whole prompt it was sampled from, in place of turns for the context. It begins with all tokens
    before this turn."""
    logprobs: list[float] | None = None
    """Assistant: the log probability of each token at the requested temperature."""
    versions: int | list[int] | None = None
    """Assistant: the policy version that sampled the tokens, or that of each token."""
    finish: Literal["stop", "length"] = "stop"
    """Assistant: `length` where the reply hit the token limit."""


class RolloutAnswer(_Strict):
    """What the service answers: the rollout and its reward, or why there is none."""

    schema_version: Literal[1]
    id: str
    """The request's."""
    dropped: str | None = None
    """Why the service gives this draw up; the other fields do not matter then."""
    tokenizer: str = ""
    """Digest of the tokenizer that made the ids; the request's where they come from `policy.base_url`."""
    turns: list[ServiceTurn] = Field(default_factory=list)
    reward: float | bool | None = None
    metrics: dict[str, float] = Field(default_factory=dict)


def parse_answer(body: bytes, who: str) -> RolloutAnswer:
    """The answer in a response's body; raises `RefusedRollout`."""
    try:
        return RolloutAnswer.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the body"
        start = repr(body[:80].decode(errors="replace"))
        detail = f"it begins with {start}" if first["type"] == "json_invalid" else f"{error.error_count()} problems"
        raise RefusedRollout("schema", f"{who}: `{place}`: {first['msg']} ({detail})") from None


def check_answer(answer: RolloutAnswer, request: RolloutRequest, seat: Seat, who: str) -> list[Turn]:
    """The policy's turns in an answer that keeps the contract; raises `RefusedRollout`."""
    if answer.tokenizer != request.tokenizer:
        text = f"{who}: its tokenizer is {answer.tokenizer or 'not named'}, the policy's {request.tokenizer}"
        raise RefusedRollout("tokenizer", f"{text}: sample from `policy.base_url`, or load the policy's tokenizer")
    if problem := reward_problem(answer.reward):
        raise RefusedRollout("reward", f"{who}: its reward is {answer.reward}: {problem}; `dropped` drops the episode")
    if not answer.turns or answer.turns[-1].role != "assistant":
        raise RefusedRollout("last_turn", f"{who}: the rollout must end in a turn of the assistant")
    context: list[int] = []
    turns: list[Turn] = []
    for place, turn in enumerate(answer.turns):
        where = f"{who}: turns.{place}"
        _check_ids(turn.token_ids, seat.vocabulary, where)
        if turn.role != "assistant":
            if (turn.prompt_token_ids, turn.logprobs, turn.versions) != (None, None, None):
                raise RefusedRollout("schema", f"{where}: only the assistant has prompts, log probabilities, versions")
            context += turn.token_ids
            continue
        if (prompt := turn.prompt_token_ids) is not None:
            _check_ids(prompt, seat.vocabulary, where)
            if prompt[: len(context)] != context:
                pairs = enumerate(zip(prompt, context, strict=False))
                same = next((at for at, (theirs, ours) in pairs if theirs != ours), len(prompt))
                text = f"its prompt differs from the turns before at token {same} of {len(context)}"
                raise RefusedRollout("prefix", f"{where}: {text}: a rollout is one conversation that only grows")
            context = list(prompt)
        if not context:
            raise RefusedRollout("prefix", f"{where}: there is no prompt before it")
        turns.append(_assistant_turn(turn, list(context), seat, where))
        context += turn.token_ids
    return turns


def _assistant_turn(turn: ServiceTurn, prompt: list[int], seat: Seat, where: str) -> Turn:
    count = len(turn.token_ids)
    logprobs = turn.logprobs or []
    if len(logprobs) != count:
        raise RefusedRollout("logprobs", f"{where}: {count} tokens have {len(logprobs)} log probabilities")
    if bad := [value for value in logprobs if not -float("inf") < value <= LARGEST_LOGPROB]:
        raise RefusedRollout("logprobs", f"{where}: {bad[0]} is no log probability: finite, and at most 0")
    versions = [turn.versions] * count if isinstance(turn.versions, int) else turn.versions or []
    if len(versions) != count:
        raise RefusedRollout("versions", f"{where}: {count} tokens have {len(versions)} versions: one for all will do")
    newest = seat.version + 1  # while weights are published, some engines have them before all do
    if bad := [version for version in versions if not 0 <= version <= newest]:
        raise RefusedRollout("versions", f"{where}: version {bad[0]} does not exist: the newest is {seat.version}")
    return Turn(
        prompt_ids=prompt,
        completion_ids=turn.token_ids,
        logprobs=logprobs,
        versions=versions,
        finish=turn.finish,
        temperature=seat.setting("temperature"),
        text=seat.decode(turn.token_ids),
    )


def _check_ids(ids: Sequence[int], vocabulary: int, where: str) -> None:
    if bad := [token for token in ids if not 0 <= token < vocabulary]:
        raise RefusedRollout("token_ids", f"{where}: token {bad[0]} is not one of the {vocabulary} of the policy")
