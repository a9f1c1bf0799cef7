"""Sections of judges: frozen models behind endpoints that grade the episodes of an environment."""

from functools import partial
from typing import Any, Literal

from pydantic import Field, field_validator

from paceline.config.base import FilePath, Section, check_toml_values
from paceline.config.model import ModelRef

NOT_EXTRA = {
    "messages": "write `prompt` and `system`",
    "model": "write `name` in `model`",
    "stream": "an answer is read whole",
}
"""Fields of a request that are not extra, and what to do instead."""
TASK = "task"
"""The environment's own reward, as one part among those of its judges."""


class JudgeModelConfig(ModelRef):
    """A frozen model that answers `POST /chat/completions`: a vLLM, a `paceline serve`, anything that speaks OpenAI's
    API. It is asked in messages, so its vocabulary does not matter. The limits hold for the address: all judges of a
    run that name it share them, and the smallest counts."""

    base_url: str | list[str] | None = Field(default=None, validate_default=False)
    """The endpoint's address, such as `http://127.0.0.1:8001/v1`. A list names several servers of the same model,
    which are asked in turn."""
    requests_per_minute: float | None = Field(default=None, gt=0)
    """Requests sent to an address in a minute, evenly spaced; no limit when left out."""
    timeout: float = Field(default=60.0, gt=0)
    """Seconds one answer may take before it is asked for again."""
    retries: int = Field(default=6, ge=0)
    """Further requests after one that failed: a timeout, no connection, 429, a 5xx, or an answer that is no JSON.
    Pauses between them grow from 1 to 30 s, or are as long as the server asks for (`Retry-After`)."""

    def check_keys(self) -> None:
        if not self.urls:
            raise ValueError(
                f"a judge is never started by the run: serve `{self.name}` and write where, "
                f'model = {{name = "{self.name}", base_url = "http://HOST:PORT/v1"}}'
            )


class JudgeConfig(Section):
    """A frozen model that grades every reply of an environment. It is never trained."""

    name: str
    """Its name: `judge/NAME` is the metric with its mean grade. Must be unique in an environment."""
    model: JudgeModelConfig
    """The model and its address, `{name = "MODEL", base_url = "http://HOST:PORT/v1"}`."""
    prompt: str = ""
    """The question to the judge. `{conversation}` stands for all messages before the reply, `{reply}` for the reply,
    and any other `{field}` for that field of the row; `{{field}}` is the word in braces, and braces around anything
    else stay. How to answer is added at its end."""
    prompt_file: FilePath | None = None
    """A text file that holds the prompt, in place of `prompt`."""
    system: str = ""
    """System message in front of it; none when empty."""
    verdict: Literal["number", "json", "yes-no"] = "number"
    """How the grade is read. `number`: the number after the last `Score:`, else the only number there is. `json`: the
    field `key` of the last JSON object that has one. `yes-no`: the word after the last `Verdict:`, else the only one of
    the two. Thoughts (`<think>`) do not count. Anything else is asked for again."""
    key: str = "score"
    """The field that holds the grade, for `verdict = "json"`."""
    scale: list[float] = Field(default_factory=lambda: [0.0, 10.0], min_length=2, max_length=2)
    """The worst and the best grade, which count as 0 and 1. A number outside them is asked for again."""
    weight: float = 1.0
    """Factor of the grade, from 0 to 1, in the reward: the sum of `task_weight` times the environment's own and each
    judge's weight times its grade. 0 only reports it, a negative one is a penalty."""
    actors: list[str] = Field(default_factory=list)
    """Actors that are graded; all of them when left out."""
    automatic: bool = True
    """Grade every episode at its end. `false` leaves it to the environment's own code, `self.judges[NAME]`."""
    attempts: int = Field(default=3, ge=1)
    """Answers, at most, until a grade can be read: after each the judge is told what was wrong with it. Then the
    episode counts as failed (`failures.judge`)."""
    temperature: float | None = 0.0
    """Sampling temperature of the judge; `extra_body` for models that refuse one."""
    max_tokens: int = Field(default=512, ge=1)
    """Longest answer of the judge. One that was cut off is asked for again."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Further fields of the request (`{reasoning_effort = "low"}`), which replace those above; `"omit"` leaves one
    out (`{temperature = "omit"}`)."""
    cache: bool = True
    """Ask the same question once in a run, and remember the grade; `false` asks every time."""

    _check_toml = field_validator("extra_body")(partial(check_toml_values, key="extra_body"))

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not name or "/" in name or name == TASK:
            raise ValueError(f"a judge's name is part of a metric's: not empty, no '/' and not '{TASK}'")
        return name

    @field_validator("scale")
    @classmethod
    def _check_scale(cls, scale: list[float]) -> list[float]:
        if scale[0] == scale[1]:
            raise ValueError(f"the worst and the best grade are both {scale[0]:g}: write the two ends, [0, 10]")
        return scale

    @field_validator("extra_body")
    @classmethod
    def _check_extra_body(cls, extra: dict[str, Any]) -> dict[str, Any]:
        if own := [f"`{key}` ({where})" for key, where in NOT_EXTRA.items() if key in extra]:
            raise ValueError(f"{own[0]} cannot be given here")
        return extra

    def check_keys(self) -> None:
        if self.key != "score" and self.verdict != "json":
            raise ValueError(f'`key` is for verdict = "json", not "{self.verdict}": change that, or leave `key` out')
        if bool(self.prompt) == (self.prompt_file is not None):
            raise ValueError("a judge needs its question: write `prompt`, or name a text file with `prompt_file`")
