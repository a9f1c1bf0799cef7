"""Request bodies that clients may send. A field this server does not honour must have its neutral value."""

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Tag,
)
from pydantic_core import CoreSchema, core_schema

from paceline.data import part_problem
from paceline.server.errors import PROMPT_FIELDS, SAMPLING_FIELDS

INT64 = (1 << 63) - 1
MOST_PROMPTS = 2048
MOST_MESSAGES = 4096
MOST_PARTS = 1024
"""Of one message, and tools of one request."""
MOST_TOKENS = 1 << 20
"""Of one sequence. A longer list is refused before it is read to its end."""
TokenId = Annotated[int, Field(ge=0, le=INT64)]
TokenIds = Annotated[list[TokenId], Field(max_length=MOST_TOKENS)]
Count = Annotated[int, Field(ge=1, le=INT64)]


@dataclass(frozen=True)
class Neutral:
    """Marks a field of OpenAI's that this server does not implement: taken only where it changes nothing."""

    value: Any = None

    def check(self, given: Any) -> Any:
        if given is not None and given != self.value:
            allowed = "" if self.value is None else f" or set it to {json.dumps(self.value)}"
            raise ValueError(f"this is not supported: leave it out{allowed}")
        return given

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": [None] if self.value is None else [None, self.value]}


class RequestBody(BaseModel):
    """A request body: strict JSON types, no infinities, nothing that is not listed."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)


class ClientBody(RequestBody):
    """A request body of third-party clients: fields that are not listed are removed by `errors.pop_unknown_fields`."""

    model_config = ConfigDict(extra="allow")

    unsupported: ClassVar[Collection[str]] = ()
    """Fields of other servers that are refused, since the client relies on them."""


class StreamOptions(ClientBody):
    """How a stream is sent."""

    include_usage: bool | None = None
    """End the stream with a chunk that counts tokens."""
    continuous_usage_stats: bool | None = None
    """Extension. With `include_usage`, count tokens in every chunk, each for its own choice."""
    include_obfuscation: bool | None = None
    """Taken and ignored."""


class GenerationBody(ClientBody):
    """Fields that chats, completions and responses share."""

    model: str | None = None
    """The served model's name or an adapter's; the served model when left out."""
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stream: bool | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    """Taken and ignored: nothing is stored."""
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None


class SamplingBody(GenerationBody):
    """Fields that chats and completions share."""

    unsupported = (*PROMPT_FIELDS, *SAMPLING_FIELDS)
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT64)] | None = None
    """Extension. Keep only the k most probable tokens; 0 and -1 keep all."""
    stop: Annotated[str, Field(min_length=1)] | list[Annotated[str, Field(min_length=1)]] | None = None
    """Text that ends the answer and is left out of it."""
    seed: Annotated[int, Field(ge=-INT64 - 1, le=INT64)] | None = None
    """The same seed draws the same noise."""
    stream_options: StreamOptions | None = None
    regex: Annotated[str, Field(min_length=1)] | None = None
    """Extension. The answer matches this regular expression."""
    stop_token_ids: TokenIds | None = None
    """Extension. Tokens that end the answer, besides the model's own."""
    ignore_eos: bool | None = None
    """Extension. Go on past the model's own end-of-turn tokens."""
    return_token_ids: bool | None = None
    """Extension. Add `prompt_token_ids` and `token_ids` to each choice."""
    return_versions: bool | None = None
    """Extension. Add to each choice the policy version of every token."""
    prompt_logprobs: bool | None = None
    """Extension. Add to each choice the log probability of every prompt token; null for the first."""
    noise: Annotated[int, Field(ge=-INT64 - 1, le=INT64)] | None = None
    """Extension. The exact key of the noise stream; overrides `seed`."""
    order: Annotated[int, Field(ge=-INT64 - 1, le=INT64)] | None = None
    """Extension. Lower goes first when requests queue; below 0 only on a server with a key."""
    frequency_penalty: Annotated[float | None, Neutral(0)] = None
    presence_penalty: Annotated[float | None, Neutral(0)] = None
    repetition_penalty: Annotated[float | None, Neutral(1)] = None
    min_p: Annotated[float | None, Neutral(0)] = None
    logit_bias: Annotated[dict[str, Any] | None, Neutral({})] = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


def check_text_only(content: Any) -> Any:
    """Refuse parts that are no text by name, before each type that content may have complains for itself."""
    if problem := part_problem(content):
        raise ValueError(problem)
    return content


class TextPart(ClientBody):
    """A piece of a message; text is the only kind this server takes."""

    type: Literal["text"]
    text: str


class FunctionCall(ClientBody):
    """A function and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCallPart(ClientBody):
    """A call that the assistant made earlier."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class InputMessage(ClientBody):
    """One message of a conversation, of the client or as an earlier answer of this server."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str | Annotated[list[TextPart], Field(max_length=MOST_PARTS)] | None, BeforeValidator(check_text_only)
    ] = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCallPart], Field(max_length=MOST_PARTS)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: Annotated[dict[str, Any] | None, Neutral()] = None
    function_call: Annotated[dict[str, Any] | None, Neutral()] = None


class Function(ClientBody):
    """A tool's name and parameters."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(ClientBody):
    """A function the model may call."""

    type: Literal["function"]
    function: Function


class NamedFunction(ClientBody):
    """A function by name."""

    name: str


class NamedTool(ClientBody):
    """The one tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class JsonSchema(ClientBody):
    """The schema an answer follows."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")] = {}
    strict: bool | None = None


class ResponseFormat(ClientBody):
    """The form an answer takes."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatBody(SamplingBody):
    """A conversation to continue."""

    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    """Longest answer in tokens; as much as the context holds when left out."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MOST_PARTS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Extension. Passed on to the chat template, such as `{"enable_thinking": false}`."""
    parallel_tool_calls: bool | None = None
    """Only the first call of an answer is given when false."""
    modalities: Annotated[list[str] | None, Neutral(["text"])] = None
    audio: Annotated[dict[str, Any] | None, Neutral()] = None
    prediction: Annotated[dict[str, Any] | None, Neutral()] = None
    reasoning_effort: Annotated[str | None, Neutral()] = None
    verbosity: Annotated[str | None, Neutral()] = None
    functions: Annotated[list[Any] | None, Neutral()] = None
    function_call: Annotated[Any | None, Neutral()] = None
    web_search_options: Annotated[dict[str, Any] | None, Neutral()] = None


def prompt_kind(prompt: Any) -> str:
    """Which of its forms a prompt has, by its first item: trying all of them on a long list takes far longer."""
    first = prompt[0] if isinstance(prompt, list) and prompt else prompt
    if isinstance(prompt, list):
        return "list[str]" if isinstance(first, str) else "list[list[int]]" if isinstance(first, list) else "list[int]"
    return "str"


class CompletionBody(SamplingBody):
    """Text or exact tokens to continue."""

    prompt: Annotated[
        Annotated[str, Tag("str")]
        | Annotated[list[str], Field(min_length=1, max_length=MOST_PROMPTS), Tag("list[str]")]
        | Annotated[TokenIds, Field(min_length=1), Tag("list[int]")]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MOST_PROMPTS), Tag("list[list[int]]")],
        Discriminator(prompt_kind),
    ]
    max_tokens: Annotated[int, Field(ge=0, le=INT64)] | None = None
    """Longest completion in tokens, 16 when left out; 0 only with `echo`."""
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Give each token's log probability, and those of so many most probable ones beside it."""
    echo: bool | None = None
    """Repeat the prompt before the completion."""
    response_format: ResponseFormat | None = None
    flat: bool | None = None
    """Extension for training loops. Choices hold flat arrays and no text; nothing is detokenised."""
    best_of: Annotated[int | None, Neutral(1)] = None
    suffix: Annotated[str | None, Neutral("")] = None


class ScoreBody(RequestBody):
    """Sequences whose tokens get their log probability given those before."""

    token_ids: Annotated[list[Annotated[TokenIds, Field(min_length=1)]], Field(min_length=1, max_length=MOST_PROMPTS)]
    temperature: Annotated[float, Field(gt=0, le=100)] = 1.0
    model: str | None = None


class TokenizeBody(RequestBody):
    """A text to split into tokens."""

    prompt: str
    model: str | None = None


class CanaryBody(RequestBody):
    """A short sequence and what the trainer, with the weights it sends, gives its tokens."""

    token_ids: Annotated[TokenIds, Field(min_length=2)]
    logprobs: Annotated[list[float], Field(min_length=2)]
    """One per token at temperature 1; 0.0 for the first."""
    tolerance: Annotated[float, Field(ge=0)]
    """Largest mean absolute difference that still counts as the same weights."""


class UpdateHead(RequestBody):
    """The header `Paceline-Update` of weights that come as a body."""

    version: Annotated[int, Field(ge=0, le=INT64)]
    fingerprint: str | None = None
    """The sender's fingerprint of the tensors; other bits are refused."""
    canary: CanaryBody | None = None
    """Checked before anything is sampled from the weights."""


class AdapterBody(UpdateHead):
    """A LoRA adapter to serve."""

    weights: str
    """Base64 of a safetensors file whose names end in `lora_A.weight` and `lora_B.weight`."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:-]*$", max_length=256)] | None = None
    """The model name requests choose it by; the policy's own adapter when left out."""
    scale: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """alpha / rank; read from the file's metadata when left out, else 1."""


class TensorForm(RequestBody):
    """A tensor that will come."""

    name: Annotated[str, Field(min_length=1, max_length=1024)]
    dtype: Literal[
        "float32", "bfloat16", "float16", "float64", "uint8", "int8", "int16", "int32", "int64",
        "float8_e4m3fn", "float8_e5m2",
    ]  # fmt: skip
    shape: Annotated[list[Annotated[int, Field(ge=0, le=INT64)]], Field(max_length=16)]


class ReceiveBody(UpdateHead):
    """Weights that a group which was joined before will broadcast now."""

    tensors: Annotated[list[TensorForm], Field(min_length=1)]
    """In the order they come in."""


class GroupBody(RequestBody):
    """A group in which weights are broadcast: where its members meet, and who of them we are."""

    address: Annotated[str, Field(min_length=1, max_length=255)]
    port: Annotated[int, Field(ge=1, le=65535)]
    world: Annotated[int, Field(ge=2, le=65536)]
    rank: Annotated[int, Field(ge=1, le=65535)]
    seconds: Annotated[float, Field(gt=0, le=600)] = 120.0
    """Longest that the group may take to form, and that one bucket may take to arrive."""
    bucket: Annotated[int, Field(ge=1024, le=1 << 30)] = 64 << 20
    """Bytes sent at once."""


class WeightsBody(UpdateHead):
    """Weights on this machine's disk to serve."""

    path: Annotated[str, Field(min_length=1, max_length=4096)]
    """A safetensors file, or a folder of them, inside a folder the server was allowed to read."""
