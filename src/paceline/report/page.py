"""Writes the report of a run as one self-contained HTML file: no script, no image, no font, no link out."""

import base64
import hashlib
from importlib.metadata import version
from pathlib import Path

from paceline.errors import PacelineError
from paceline.monitor.files import replace_file
from paceline.monitor.text import count
from paceline.record import RunFolder, open_run
from paceline.record.advice import advise, sight_of
from paceline.record.advice.telling import silence
from paceline.report.curves import curves
from paceline.report.markup import Element, joined, tag
from paceline.report.sections import advisories, commands, conversations, dropped, events, settings, summary, tiles
from paceline.top.signs import Signs, signs
from paceline.top.words import line, moment

STYLE = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")
_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
POLICY = f"default-src 'none'; style-src 'sha256-{_HASH}'; base-uri 'none'; form-action 'none'"
"""Text is escaped; should markup get in all the same, the browser runs and loads nothing of it."""


def page(run: RunFolder, rollouts: int, now: float | None = None) -> str:
    """The whole file."""
    told, sight, problems = signs(run, now), sight_of(run), run.problems()
    found = advise(sight)
    sections = {
        "Summary": joined(summary(told, found), tiles(told)),
        "Curves": curves(run),
        "Advice": advisories(found, silence(sight)),
        "Rollouts": conversations(run, rollouts),
        "Settings that differ from the defaults": settings(run),
        "Dropped, by reason": dropped(told),
        "Events": events(told),
        "See more, or go on": commands(told),
    }
    body = tag(
        "body",
        tag("header", _title(told), _trouble(told), _unread(problems)),
        tag("main", *(tag("section", tag("h2", title), content) for title, content in sections.items())),
        tag("footer", tag("p", f"Written by Paceline {version('paceline')} at {moment(told.now)}.", class_="faint")),
    )
    return f"<!doctype html>\n{tag('html', _head(told), body, lang='en')}\n"


def _head(told: Signs) -> Element:
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", f"{line(told.name, 80)}: a run of Paceline"),
        # The one text that must not be escaped: the browser hashes it as it stands.
        tag("style", Element(STYLE)),
    )


def _title(told: Signs) -> Element:
    status = told.status
    facts = [
        *told.tags,
        status.device,
        f"{count(status.parameters)} parameters" if status.parameters else "",
        f"began {moment(status.began)}" if status.began else "",
        f"ended {moment(status.ended)}" if status.ended else "",
    ]
    state = tag("span", status.state, class_=f"state {status.state}")
    return joined(
        tag("h1", line(told.name, 120), " ", state),
        tag("p", " · ".join(fact for fact in facts if fact), class_="faint"),
    )


def _trouble(told: Signs) -> Element | None:
    state = told.status.state
    if state in ("running", "starting", "finished"):
        return None
    title = tag("b", f"{state.capitalize()} at step {told.status.step}. ")
    why = f"{told.why[:1].upper()}{told.why[1:]}"
    return tag("div", title, why, class_=f"notice {'' if state == 'interrupted' else 'bad'}")


def _unread(problems: list[str]) -> Element | None:
    if not problems:
        return None
    return tag(
        "div",
        tag("b", "Not all of it could be read."),
        tag("ul", *(tag("li", one) for one in problems)),
        class_="notice",
    )


def write_report(directory: Path, file: Path | None, rollouts: int) -> Path:
    """Write the report of a run and return its path; a reader of an older one still sees that one whole."""
    if rollouts < 0:
        raise PacelineError(f"--rollouts {rollouts}: write how many, 0 or more")
    run = open_run(directory)
    file = Path(f"{run.name}-report.html") if file is None else file
    try:
        replace_file(file, [page(run, rollouts).encode("utf-8")], durable=False)
    except OSError as error:
        raise PacelineError(f"{file} cannot be written: {error.strerror}; name another place with -o") from None
    return file
