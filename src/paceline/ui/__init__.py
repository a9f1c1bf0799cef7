"""The local web app over run directories: `paceline ui [RUNS]`. Imports neither torch nor transformers."""

from paceline.ui.app import build_app
from paceline.ui.serving import KEY_VARIABLE, UiOptions, load_options, serve_ui

__all__ = ["KEY_VARIABLE", "UiOptions", "build_app", "load_options", "serve_ui"]
