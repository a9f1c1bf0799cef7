"""How a run went, in plain words and in a few figures."""

from collections.abc import Iterable

from paceline.monitor.text import amount, change, count, reasons, score, seconds
from paceline.record.advice import Advisory
from paceline.report.markup import Element, tag
from paceline.top.signs import Course, Signs
from paceline.top.words import around, figure, line

STATES = {
    "running": "is running",
    "starting": "is starting",
    "finished": "has finished",
    "interrupted": "was interrupted",
    "failed": "failed",
    "crashed": "crashed",
}


def summary(signs: Signs, advice: list[Advisory]) -> Element:
    """Sentences for somebody who has not seen the run."""
    return tag("div", *(tag("p", sentence) for sentence in _sentences(signs, advice)))


def _sentences(signs: Signs, advice: list[Advisory]) -> Iterable[str]:
    status = signs.status
    steps = (
        amount(status.step, "step") if not status.total_steps else f"{status.step:,} of {status.total_steps:,} steps"
    )
    took = f" in {around(signs.seen - status.began)}" if signs.seen and status.began else ""
    yield f"The run {STATES[status.state]}: it has done {steps}{took}{f' on {status.device}' if status.device else ''}."
    for env, course in _single(signs.rewards).items():
        yield f"The reward in training{env} {_went(course)}."
    for env, course in _single(signs.held_out).items():
        what = "share of exactly right replies" if signs.kind == "exact" else "reward"
        yield f"On held-out rows{env} the {what} {_went(course)}."
    if signs.recent:
        yield f"Who waits for whom: {signs.waits}."
    if signs.dropped:
        yield f"Dropped on the way: {line(reasons(signs.dropped))}."
    if advice:
        yield f"Its own figures raise {amount(len(advice), 'point')}, below."


def _single(courses: dict[str, Course]) -> dict[str, Course]:
    """Environments one by one, by the words that name them; a single one needs no name."""
    envs = {f" of {line(env, 60)}": course for env, course in courses.items() if env}
    return envs if len(envs) > 1 else dict(list(courses.items())[:1])


def _went(course: Course) -> str:
    first, last = score(course.first), score(course.last)
    if len(course.curve) < 2:
        return f"was measured once, {last}"
    if first == last:
        return f"stayed at {last}"
    return f"{'rose' if course.last > course.first else 'fell'} from {first} to {last}"


def tiles(signs: Signs) -> Element:
    """The vital signs, as on the page of a run."""
    status, recent = signs.status, signs.recent
    allowed = "" if signs.allowed is None else f"versions old; {signs.allowed} allowed"
    pace = "" if signs.pace is None else f"{seconds(signs.pace)} a step"
    left = "" if signs.left is None else f", about {around(signs.left)} left"
    found = [
        ("Step", f"{status.step:,}" + (f" of {status.total_steps:,}" if status.total_steps else ""), pace + left),
        ("Reward", *_ends(signs.rewards.get(""))),
        (f"Held-out {signs.kind}", *_ends(signs.held_out.get(""))),
        ("Loss", figure(recent.get("loss")), ""),
        ("Gradient norm", figure(recent.get("grad_norm")), "before clipping"),
        ("Entropy", figure(recent.get("entropy")), "nats a token"),
        ("Mismatch", figure(recent.get("mismatch_kl")), "KL of trainer and sampler"),
        ("Staleness", figure(recent.get("staleness/mean")), allowed),
        ("Tokens a second", _speed(recent.get("tokens/s")), f"sampled; {_speed(recent.get('train_tokens/s'))} trained"),
    ]
    busy = [(lane.lane, f"{lane.share:.0%}", lane.detail or "busy, at the end") for lane in signs.busy.lanes]
    return tag("dl", *(_tile(*one) for one in [*found, *busy]), class_="tiles")


def _ends(course: Course | None) -> tuple[str, str]:
    if course is None:
        return "–", "not measured"
    return score(course.last), f"{score(course.first)} at the start, {change(course.first, course.last)}"


def _tile(name: str, value: str, more: str) -> Element:
    return tag("div", tag("dt", line(name, 60)), tag("dd", value), tag("dd", more) if more else None)


def _speed(value: float | None) -> str:
    return "–" if value is None else count(value)
