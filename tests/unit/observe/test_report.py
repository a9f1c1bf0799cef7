"""`paceline report`: one HTML file about a run, from run directories that the real recorder wrote."""

import base64
import hashlib
import html.parser
import importlib.metadata
import json
import re
import shutil
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from paceline import __version__
from paceline.commands import main
from paceline.observe.analysis.vitals import vitals
from paceline.observe.record import open_run
from paceline.observe.record.advice import Advisory, Knob
from paceline.observe.report.charts import CURVE_BINS, ChartSpec, Scale, axis_bounds, build_chart, downsample
from paceline.observe.report.page import CONTENT_SECURITY_POLICY, STYLE, TEMPLATES, _fall_text, render_report
from paceline.observe.terminal.drawing import RunSnapshot
from recorded_runs import Told, torn
from token_run import tokened

HOSTILE = '</pre><script>document.title="owned"</script><img src=http://evil.test/x onerror=alert(1)>\x00\x1b\u202e'
ACTIVE = {"script", "iframe", "object", "embed", "img", "link", "base", "form", "input", "a", "video", "audio", "use"}


class Parsed(html.parser.HTMLParser):
    """Every element and attribute that a browser would see, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


def _passive(text: str) -> Parsed:
    """The page, of which nothing runs, loads or leads anywhere."""
    parsed = Parsed(text)
    assert not parsed.tags & ACTIVE
    assert not [name for name in parsed.attributes if name.startswith("on") or name in ("style", "href", "src")]
    return parsed


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    Told(folder, "finished").step(40).end()
    torn(Told(folder, "crashed").step(23).let_go().path / "metrics.jsonl")
    Told(folder, "failed").step(5).note(HOSTILE).end("failed", f"bad reward {HOSTILE}")
    Told(folder, "empty").let_go()
    (folder / "empty" / "metrics.jsonl").unlink()
    tokened(folder).end()
    return folder


def _told(runs: Path, name: str) -> str:
    return _passive(render_report(open_run(runs / name), 2)).text


def test_a_finished_run_is_told_in_words_figures_curves_and_settings(runs):
    text = _told(runs, "finished")
    for words in (
        "The run has finished: it has done 40 of 40 steps in",
        "The reward in training rose from 0.2",
        "The share of exactly right held-out replies rose from",
        "Dropped on the way:",
        "Who waits for whom: the sampler, for the trainer",
        "Loss by component",
        "Throughput",
        "Lanes",
        "zero advantage",
        "--resume latest --steps 80",
        "604k parameters",
    ):
        assert words in text, words


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ([0.9] * 20 + [0.3] * 20, "fell from 0.900 to 0.300: 67% of it is gone"),
        ([0.2] * 15 + [0.9] * 15 + [0.1] * 10, "fell from 0.900, its highest, to 0.100: 89% of it is gone"),
        ([0.5] * 20 + [-0.5] * 20, "fell from 0.500 to -0.500, by 1.000"),
        ([0.9, 0.4], "fell from 0.900 to 0.400: 56% of it is gone"),
        ([0.90, 0.92, 0.88] * 12, ""),
        ([0.1, 0.9] * 20, ""),
        ([0.4], ""),
    ],
    ids=["fall", "collapse after a rise", "negative", "two points", "little", "noise", "one"],
)
def test_a_fall_is_told_by_its_ends_and_share_and_noise_is_none(values, sentence):
    assert _fall_text(values) == sentence


def test_a_collapse_is_the_first_sentence(tmp_path):
    told = Told(tmp_path, "collapsed").step(20)
    told._reward = lambda step, env: 0.02
    text = _passive(render_report(open_run(told.step(20).end().path), 0)).text
    summary = text[text.index("Summary") + len("Summary") :].lstrip()
    assert re.match(r"The reward in training fell from 0\.\d+, its highest, to 0\.0\d+: 9\d% of it is gone", summary)
    assert "The share of exactly right held-out replies fell from" in summary


def test_only_settings_that_differ_are_listed(tmp_path):
    told = Told(tmp_path, "run", staleness=3).step(2).end()
    text = render_report(open_run(told.path), 0)
    settings = text[text.index("Settings that differ") : text.index("Dropped, by reason</h2>")]
    assert '<td class="code">staleness</td><td class="code">3</td><td class="code">1</td>' in settings
    assert "checkpoint" not in settings


def test_a_crashed_run_says_so_first_and_names_what_could_not_be_read(runs):
    text = _told(runs, "crashed")
    assert text.index("Crashed at step 23. Its process is gone") < text.index("Summary")
    assert "metrics.jsonl: a line is damaged and left out" in text
    assert "--name NAME  to begin anew beside it (no checkpoint was saved)" in text


def test_a_run_that_never_trained_has_a_report_too(runs):
    text = _told(runs, "empty")
    assert "No step was finished, so there are no curves." in text
    assert "No rollout was recorded." in text


def test_hostile_words_are_text_wherever_they_stand(runs):
    text = render_report(open_run(runs / "failed"), 2)
    assert _passive(text).text.count('<script>document.title="owned"</script>') == 3, "notice, note and end"
    assert not {"\x00", "\x1b", "\u202e"} & set(text)


def test_conversations_are_shown_as_text_best_first(runs):
    text = render_report(open_run(runs / "tokens"), 1)
    told = _passive(text).text
    assert re.findall(r"(best|median|worst): reward ([\d.]+)", told) == [
        ("best", "1"),
        ("median", "0.500"),
        ("worst", "0"),
    ]
    assert "ab the" in told
    assert "Left out" in _passive(render_report(open_run(runs / "tokens"), 0)).text


def test_a_run_without_a_record_shows_the_few_rollouts_it_wrote_down(tmp_path):
    told = Told(tmp_path, "run").step(3)
    long = {"role": "assistant", "content": "x" * 50_000}
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://evil.test/a.png"}}]}
    records = [
        {
            "env": told.envs[0],
            "ticket": n,
            "reward": n / 4,
            "messages": [{"role": HOSTILE, "content": HOSTILE}, image, long],
            "metrics": {"right": n / 4, HOSTILE: HOSTILE},
        }
        for n in range(5)
    ]
    told.recorder.rollouts(3, records)
    text = render_report(open_run(told.end().path), 2)
    shown = _passive(text).text
    assert "The run keeps no full record" in shown
    assert re.findall(r"(best|median|worst): reward ([\d.]+)", shown)[0] == ("best", "1")
    assert "an image at http://evil.test/a.png, which is not loaded" in shown
    assert "(and 47,000 more characters)" in shown
    assert "right 1," in shown
    assert len(text) < 200_000


def test_a_file_stays_small_however_much_was_said_and_however_long_the_run(tmp_path):
    told = Told(tmp_path, "run", steps=1200)
    few = [told._metrics(n) for n in range(1, 8)]
    lines = [{"step": n, "time": told.now + n, **few[n % 7]} for n in range(1, 1201)]
    (told.path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    talk = [{"role": "user", "content": "<" * 5000}] * 40
    told.recorder.rollouts(1200, [{"env": told.envs[0], "ticket": n, "reward": n, "messages": talk} for n in range(90)])
    told.end()
    text = render_report(open_run(told.path), 30)
    assert len(text.encode()) < 1_000_000
    assert "16 earlier messages are left out." in text
    assert "Left out: the file is large enough." in text


def test_the_policy_allows_the_style_that_is_there_and_nothing_else(runs):
    text = render_report(open_run(runs / "finished"), 2)
    [style] = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert style == STYLE
    assert f"style-src 'sha256-{digest}'" in CONTENT_SECURITY_POLICY
    assert CONTENT_SECURITY_POLICY.startswith("default-src 'none'; ")
    assert text.index("Content-Security-Policy") < text.index("<style>")
    assert "url(" not in style
    assert "@import" not in style


def test_the_command_writes_where_it_is_told_to(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(runs / "finished")]) == 0
    assert capsys.readouterr().out.startswith("finished-report.html (0.0")
    assert main(["report", str(runs / "finished"), "-o", "other.html", "--rollouts", "0"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"finished-report.html", "other.html"}
    assert (tmp_path / "other.html").read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere"], "there is no run at nowhere"),
        (
            ["finished", "-o", "no/such/folder/x.html"],
            "cannot be written: No such file or directory; name another place",
        ),
        (["finished", "--rollouts", "-1"], "write how many, 0 or more"),
    ],
)
def test_bad_input_is_answered_with_a_sentence(runs, capsys, monkeypatch, arguments, sentence):
    monkeypatch.chdir(runs)
    assert main(["report", *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_a_copied_run_makes_the_same_report(runs, tmp_path):
    """Nothing but the directory is read; only its place differs."""
    shutil.copytree(runs / "finished", tmp_path / "finished")
    here, there = (render_report(open_run(path / "finished"), 2, now=2e9) for path in (runs, tmp_path))
    assert here.replace(str(runs), "") == there.replace(str(tmp_path), "").replace(str(runs), "")


def test_advice_comes_with_its_evidence_and_the_setting_to_change_in_file_and_terminal(runs, monkeypatch):
    found = Advisory(
        rule="truncation",
        title="half of the replies are cut off",
        seen="0.5 <b>of</b> 128 replies",
        basis="standard error 0.04",
        caution="only what was recorded",
        steps=(3, 40),
        knobs=[Knob("sampling.max_tokens", 512, 256, "room to finish")],
        rollouts=[7, 9],
    )
    monkeypatch.setattr("paceline.observe.report.page.advise", lambda window: [found])
    told = _told(runs, "finished")
    for words in (found.title, found.seen, "(steps 3 to 40)", found.basis, found.caution, "7, 9", "(now 256)"):
        assert words in told
    assert "--sampling.max_tokens 512" in told
    monkeypatch.setattr("paceline.observe.report.page.advise", lambda window: [])
    monkeypatch.setattr("paceline.observe.report.page.silence_reason", lambda window: "nothing to say")
    assert "Nothing to say." in _told(runs, "finished")
    screen = Console(file=StringIO(), width=200)
    screen.print(RunSnapshot(vitals(open_run(runs / "finished")), [found], []).render(200))
    assert f"{found.title}: {found.seen}" in screen.file.getvalue()


def spec(**more) -> ChartSpec:
    return ChartSpec(title="any", pattern="", **more)


def test_parts_of_a_stack_stand_on_each_other_and_what_is_missing_counts_as_nothing():
    drawn = build_chart(spec(least=0.0, stacked=True), {"a": [(1, 1.0), (2, 1.0)], "b": [(2, 3.0)]})
    (first, second), floor = drawn["curves"], dict(drawn["rows"])
    places = [[float(pair.split(",")[1]) for pair in curve["line"].split()] for curve in (first, second)]
    one, four = places[0][0], places[1][1]
    zero = places[0][-1]
    assert floor[zero] == "0"
    assert places == [[one, one, zero, zero], [one, four, one, one]]
    assert zero - four == pytest.approx(4 * (zero - one), abs=0.5)
    assert [curve["last"] for curve in (first, second)] == ["1", "3"], "their own values, not the sums"


@pytest.mark.parametrize(
    "values", [[0.0], [5.0] * 9, [float("nan"), float("inf"), 1.0, -1e300], [1e20, -1e20], [1e-12, 2e-12], [-3.0, -3.0]]
)
def test_any_values_make_a_chart_within_its_frame(values):
    drawn = build_chart(spec(least=0.0), {"a": list(enumerate(values, 1))})
    (curve,) = drawn["curves"]
    numbers = [y for y, _ in drawn["rows"]] + [y for _, y in curve["dots"]]
    numbers += [float(pair.split(",")[1]) for pair in curve["line"].split()]
    assert numbers
    assert all(0 <= number <= 190 for number in numbers)


def test_no_two_curves_of_a_chart_look_the_same():
    drawn = build_chart(spec(), {f"curve {n}": [(1.0, float(n)), (2.0, 0.0)] for n in range(20)})
    looks = [curve["colour"] for curve in drawn["curves"]]
    assert len(set(looks)) == len(looks) == 16
    assert looks[7:9] == ["s8", "s1 dashed"]
    assert drawn["more"] == 4
    assert ".curve.dashed" in STYLE


@pytest.mark.parametrize(("steps", "high"), [(962, 1.2e6), (9_620, 0.00012), (99_999, 4.2e5), (7, 12_345.0)])
def test_labels_of_the_axes_fit_beside_the_plot(steps, high):
    drawn = build_chart(spec(least=0.0), {"": [(1.0, 0.0), (steps, high)]})
    letter = 6.5  # pixels, more than a digit takes at 11 pixels
    assert max(len(text) * letter for _, text in drawn["rows"]) <= 44 + letter
    assert all(x + len(text) * letter / 2 <= 460 for x, text in drawn["steps"])
    assert drawn["steps"]


def test_nothing_makes_no_chart():
    assert build_chart(spec(), {"a": [], "b": [(1, float("nan"))]}) is None


def test_thinning_keeps_every_spike():
    points = [(float(n), 0.0) for n in range(100_000)]
    points[77_777] = (77_777.0, 9.0)
    found = downsample(points, CURVE_BINS)
    assert len(found) <= 2 * CURVE_BINS
    assert (77_777.0, 9.0) in found
    assert list(found) == sorted(found)


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-0.004, 0.0037), (3.0, 3.01), (0.0, 123_456.0)])
def test_ticks_are_few_and_within(low, high):
    ticks = Scale(*axis_bounds([low, high]), 0, 100).ticks(4)
    assert 1 <= len(ticks) <= 6
    assert all(axis_bounds([low, high])[0] <= tick <= axis_bounds([low, high])[1] for tick in ticks)


def test_whatever_a_template_is_given_is_escaped():
    made = TEMPLATES.from_string('<p title="{{ title }}">{{ text }}</p>').render(title='"<', text="<b>\x1b\n")
    assert made == '<p title="&#34;&lt;">&lt;b&gt;\\x1b\n</p>'


def test_a_package_without_metadata_writes_a_report(runs, monkeypatch):
    def missing(name: str):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    assert f"Written by Paceline {__version__} at" in render_report(open_run(runs / "finished"), 0)
