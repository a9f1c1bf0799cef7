"""The local web app over run directories, `paceline ui [RUNS]`. Imports neither torch nor transformers."""

from paceline.observe.web.app import KEY_VARIABLE, UiOptions, build_app, serve_ui

__all__ = ["KEY_VARIABLE", "UiOptions", "build_app", "serve_ui"]
