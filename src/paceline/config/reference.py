"""A model that is asked and never trained."""

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from paceline.config.base import ModelName, Section


class ModelRef(Section):
    """A frozen model: behind an endpoint that somebody else started (another `paceline serve`, a vLLM, anything that
    speaks OpenAI's API in token ids) or, to score alone, on scorers of the run. It must have the policy's
    vocabulary."""

    name: ModelName = Field(min_length=1)
    """What the endpoint calls the model; without a `base_url`, its folder or hub name."""
    base_url: str | list[str] | None = None
    """Where it is served, such as `http://127.0.0.1:8001/v1`. A list names several servers of the same model, which
    share the work. Left out, `placement = "ray"` starts scorers for it (`cluster.scorers`)."""
    api_key_env: str | None = None
    """Environment variable that holds the endpoint's key; none is sent when left out."""
    concurrency: int = Field(default=16, ge=1)
    """Requests sent to it at once."""

    @field_validator("base_url")
    @classmethod
    def _addresses(cls, given: str | list[str] | None) -> str | list[str] | None:
        for url in [given] if isinstance(given, str) else given or []:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"`{url}` is no address: write where the model is served, http://HOST:PORT/v1")
        if given is not None and not given:
            raise ValueError("name at least one address")
        return given

    @field_validator("api_key_env")
    @classmethod
    def _a_key_for_somebody(cls, variable: str | None, info: ValidationInfo) -> str | None:
        if variable is not None and info.data.get("base_url", "") is None:
            raise ValueError("this is the key of an endpoint: give its base_url too, or leave the key out")
        return variable

    @property
    def urls(self) -> list[str]:
        return [self.base_url] if isinstance(self.base_url, str) else self.base_url or []

    @property
    def where(self) -> str:
        return " and ".join(self.urls) or "the run's own scorers"


Reference = Literal["policy"] | ModelRef
"""`"policy"`, the model that is being trained, as it is when it is asked; or a frozen model."""
