"""Which curves a report shows."""

import re

from paceline.record import RunFolder
from paceline.record.folder import Columns
from paceline.report.chart import chart
from paceline.report.lanes import lanes
from paceline.report.markup import Element, tag
from paceline.report.scale import Points

CHARTS = (
    ("Reward", "mean of what was sampled, before filters", r"reward/(.+)/mean", None),
    ("Held-out evaluation", "on rows that never train", r"eval/(.+/(?:reward|exact|pass@\d+))", None),
    ("Loss by component", "each with its own normaliser", r"loss/?(.*)", None),
    ("Gradient norm", "before clipping", r"(grad_norm.*)", 0.0),
    ("Entropy", "nats a token; a fall towards 0 is a collapse", r"(entropy.*)", 0.0),
    ("KL and mismatch", "how far trainer and sampler are apart", r"(ppo_kl|ref_kl|mismatch_kl)", 0.0),
    ("Staleness", "versions between sampling and training", r"staleness/(.+)", 0.0),
    ("Throughput", "tokens a second, sampled and trained", r"(tokens/s|train_tokens/s)", 0.0),
    ("Length", "tokens sampled", r"(length)", 0.0),
    ("Dropped, by reason", "groups and samples a step", r"dropped/(.+)", 0.0),
)
"""Title, hint, which metrics, and where the axis begins at the latest; as on the page of a run (`js/curves.js`)."""


def curves(run: RunFolder) -> Element:
    """All charts, and the lanes below them."""
    columns = run.metrics()
    drawn = []
    for title, hint, pattern, least in CHARTS:
        named = {name: found[1] for name in columns if (found := re.fullmatch(pattern, name, re.DOTALL))}
        series = {label.replace("_", " ") or "sum": _points(columns, name) for name, label in named.items()}
        if title.startswith("Dropped"):  # a reason that never struck needs no curve
            series = {label: points for label, points in series.items() if any(value for _, value in points)}
        drawn.append(chart(title, hint, series, least))
    drawn.append(lanes(run))
    if not any(drawn):
        return tag("p", "No step was finished, so there are no curves.", class_="faint")
    return tag("div", *drawn, class_="charts")


def _points(columns: Columns, name: str) -> Points:
    pairs = zip(columns["step"], columns[name], strict=True)
    return [(step, value) for step, value in pairs if step is not None and value is not None]
