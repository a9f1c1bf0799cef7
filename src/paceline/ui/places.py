"""The path of the page's static files."""

from pathlib import Path

STATIC = Path(__file__).parent / "static"
