"""A model that is asked and never trained."""

from typing import Literal

from pydantic import Field, field_validator

from paceline.config.base import Section


class ModelRef(Section):
    """A frozen model behind an endpoint that somebody else started: another `paceline serve`, a vLLM, anything that
    speaks OpenAI's API in token ids. It must have the policy's vocabulary."""

    name: str = Field(min_length=1)
    """What the endpoint calls the model."""
    base_url: str
    """Where it is served, such as `http://127.0.0.1:8001/v1`."""
    api_key_env: str | None = None
    """Environment variable that holds the endpoint's key; none is sent when left out."""
    concurrency: int = Field(default=16, ge=1)
    """Requests sent to it at once."""

    @field_validator("base_url")
    @classmethod
    def _an_address(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"`{url}` is no address: write where the model is served, http://HOST:PORT/v1")
        return url


Reference = Literal["policy"] | ModelRef
"""`"policy"`, the model that is being trained, as it is when it is asked; or a frozen endpoint."""
