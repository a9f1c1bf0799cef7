"""One HTML file about a run: `paceline report RUN`. Imports neither torch nor transformers."""

from paceline.observe.report.page import write_report

__all__ = ["write_report"]
