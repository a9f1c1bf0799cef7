"""Ten planted defects: `paceline diff` names each where it is, and not its consequences; and so does the page, in five
clicks or fewer from the list of runs."""

import re

import pytest
from test_ui_browser import CHROMIUM, browser, page, playwright, tab  # noqa: F401 - fixtures

from paceline.commands import main
from paceline.observe.record import open_run
from paceline.observe.record.first_difference import compare
from planted_defects import DEFECTS, Defect, sound, spoilt
from recorded_runs import served

NAMES = list(DEFECTS)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def address(runs):
    with served(runs) as here:
        yield here


@pytest.fixture(scope="module")
def plain(runs):
    return sound(runs, "sound", DEFECTS[NAMES[0]], runs)


@pytest.fixture(scope="module")
def pair(runs, plain, tmp_path_factory):
    """The sound run and the spoilt one, made when they are first asked for."""
    made: dict[str, tuple] = {}

    def make(name: str):
        if name not in made:
            defect, scratch, slug = DEFECTS[name], tmp_path_factory.mktemp("scratch"), re.sub(r"\W+", "-", name)
            own = defect.env or defect.prepare(scratch)
            good = sound(runs, f"{slug}-sound", defect, scratch) if own else plain
            made[name] = good, spoilt(runs, slug, defect, scratch)
        return made[name]

    return make


@pytest.mark.parametrize("name", NAMES)
def test_a_defect_is_named_where_it_is(pair, name, request, address):
    defect: Defect = DEFECTS[name]
    good, bad = pair(name)
    found = compare(open_run(good), open_run(bad), defect.tolerance)
    first = found.first
    assert found.settings == []
    assert first is not None
    assert first.kind == defect.kind
    assert defect.said in first.what
    assert first.step == defect.step
    assert first.stream == defect.stream or not defect.stream
    if CHROMIUM is not None:
        led_there(request.getfixturevalue("page"), address, good.name, bad.name, defect)


def led_there(here, address: str, good: str, bad: str, defect: Defect) -> None:
    """Four clicks from the list of runs, five where rounding is looked past."""
    here.goto(f"{address}/#/")
    here.reload()  # the tab is shared, and remembers who was compared before
    for run in (good, bad):
        here.locator(f"tr[data-key='{run}'] input").check()
    here.get_by_role("button", name="Differences").click()
    here.get_by_label("Bit for bit").check()
    told = here.get_by_role("heading", name="First difference")
    told.wait_for()
    past = here.get_by_role("button", name="Look past differences")
    if defect.tolerance and past.count():
        past.click()
        told.wait_for()
    playwright.expect(told).to_contain_text(defect.said.strip("`"))
    playwright.expect(here.get_by_label("First difference").locator("p b").first).to_contain_text(f"step {defect.step}")


def test_the_command_says_it(pair, capsys):
    good, bad = pair("a spike of the learning rate")
    assert main(["diff", str(good), str(bad), "--exact"]) == 1
    assert re.search(r"where\W+step 2\b", capsys.readouterr().out)
