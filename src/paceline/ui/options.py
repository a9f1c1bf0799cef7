"""`paceline ui`: what it shows, and where it listens."""

from pathlib import Path

from pydantic import Field, model_validator

from paceline.config.base import Section
from paceline.config.errors import from_flags
from paceline.config.serve import is_loopback

KEY_VARIABLE = "PACELINE_UI_KEY"
"""Where the key may stand instead of the command line, which other users of the machine can read."""


class UiOptions(Section):
    """A web app over one folder of runs."""

    runs: str = "runs"
    """Folder that holds run directories, or one run directory."""
    host: str = "127.0.0.1"
    """Address to listen on; anything but loopback needs a key."""
    port: int = Field(default=8200, ge=0, le=65535)
    """0 picks a free port."""
    key: str | None = Field(default=None, min_length=1, repr=False)
    """What a browser must know to see anything."""

    @model_validator(mode="after")
    def _guarded(self) -> "UiOptions":
        if not self.key and not is_loopback(self.host):
            raise ValueError(
                f"{self.host} can be reached from other machines: give a key (--api-key or {KEY_VARIABLE}), "
                "or listen on 127.0.0.1"
            )
        if not Path(self.runs).is_dir():
            raise ValueError(f"there is no folder {self.runs}: name the folder that holds your runs, such as runs")
        return self


def load_options(**flags: object) -> UiOptions:
    """The options from the command line's flags; those that are None have their defaults."""
    return from_flags(UiOptions, flags)
