"""Settings of `paceline serve`: address, API key, readable folders. The model and engine come from the run file."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from paceline.config.base import Section
from paceline.config.errors import ConfigError
from paceline.config.load import LoadedConfig, load
from paceline.config.target import names_run_file, split_flag
from paceline.util.connections import is_loopback

SERVED_SECTIONS = {"model", "engine", "backend", "device", "deterministic", "seed", "trainer"}
"""Sections of a run file that a server uses; other overrides would be read and change nothing."""


class ServeConfig(Section):
    """A server of the OpenAI API over one engine."""

    host: str = "127.0.0.1"
    """Address to listen on; anything but loopback needs an API key."""
    port: int = Field(default=8000, ge=0, le=65535)
    """0 picks a free port."""
    api_key: str | None = Field(default=None, min_length=1, repr=False)
    """Clients must send it as `Authorization: Bearer KEY`."""
    name: str | None = Field(default=None, min_length=1)
    """The model's name for clients; the name it was loaded by when left out."""
    allow: list[str] = Field(default_factory=list)
    """Folders that /weights/load may read."""
    peers: list[str] = Field(default_factory=lambda: ["127.0.0.1"])
    """Addresses that /weights/group may connect to, to receive weights that are broadcast."""
    grace: float = Field(default=10.0, ge=0, le=86_400)
    """Seconds that requests under way get to finish after a signal."""
    max_body_bytes: int = Field(default=4 << 20, ge=1024)
    """Longest request body; that of a control call may have 64 MiB."""
    scores_only: bool = False
    """Score given tokens and never sample: a reference or teacher without a KV cache, by the trainer's own code."""
    isolate: bool | None = None
    """Run the engine in its own process; on a GPU unless this says otherwise."""

    def check_keys(self) -> None:
        if not self.api_key and not is_loopback(self.host):
            raise ValueError(
                f"{self.host} can be reached from other machines: give an API key (--api-key or PACELINE_API_KEY), "
                "or listen on 127.0.0.1"
            )
        for folder in self.allow:
            if not Path(folder).is_dir():
                raise ValueError(f"--allow: no such folder `{folder}`")


def load_served(model: str, overrides: Sequence[str]) -> LoadedConfig:
    """The model and engine to serve: from a run file, or by the model's name with every default."""
    strange = [flag for flag in overrides if flag.startswith("--") and split_flag(flag)[1] not in SERVED_SECTIONS]
    if strange:
        raise ConfigError(
            [f"command line: {strange[0]}: serving takes --model.*, --engine.*, --device, --deterministic"]
        )
    if names_run_file(model):
        return load(model, overrides)
    return load(None, ["--model.name", model, *overrides])
