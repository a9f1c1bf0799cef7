"""Where the page's own files lie."""

from pathlib import Path

STATIC = Path(__file__).parent / "static"
