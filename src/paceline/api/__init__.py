"""The Python interface: `paceline.train`."""

from paceline.api.training import train

__all__ = ["train"]
