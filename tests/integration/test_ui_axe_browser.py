"""Every page in a real browser, light and dark, on a desktop and on a phone: no serious finding of axe, no message of
the console, nothing that scrolls sideways. Skipped where `test_ui_browser.py` is, and where axe is not installed."""

from pathlib import Path

import pytest
import test_ui_browser as ui
import test_ui_rollouts_browser as rollouts

from paceline.observe.record import open_run
from paceline.observe.report.page import render_report
from recorded_runs import served

axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="the `dev` extra is not installed: no axe")

pytestmark = ui.pytestmark
folder, address, browser, tab = ui.folder, ui.address, ui.browser, ui.tab
SIZES = {"desktop": {"width": 1300, "height": 900}, "phone": {"width": 390, "height": 844}}
RULES = {"resultTypes": ["violations"], "runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]}
EVERY_PAGE = {
    f"#/run/said-finished/{name}{view}": wanted for name, views in ui.PAGES.items() for view, wanted in views.items()
}
EVERY_PAGE |= {f"#/{name}{view}": wanted for name, views in ui.FOLDER_PAGES.items() for view, wanted in views.items()}
EVERY_PAGE |= {
    f"#/run/crashed/{name}": wanted for name, wanted in (("overview", ".notice.bad"), ("rollouts", ".empty"))
}


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory):
    """An app over the runs of the tests of rollouts: tools, pictures, errors, self-play, a league."""
    runs = tmp_path_factory.mktemp("talks")
    rollouts._told(runs)
    rollouts.write_marked(runs)
    rated = rollouts.Told(runs, "rated").step(2)
    rated.recorder.step(3, {"league/duel/rating": 12.0})
    rollouts._league(rated.end().path)
    with served(runs) as here:
        yield here


@pytest.fixture(scope="module")
def report(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("report") / "report.html"
    file.write_text(render_report(open_run(folder / "said-finished"), 2), encoding="utf-8")
    return file.as_uri()


def serious(page) -> list[str]:
    """What axe calls serious or critical, each with the first elements that have it."""
    found = axe.Axe().run(page, options=RULES).response["violations"]
    return [
        f"{one['id']}: {one['help']}: {[' '.join(map(str, node['target'])) for node in one['nodes']][:4]}"
        for one in found
        if one["impact"] in ("serious", "critical")
    ]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_page_is_accessible_silent_and_fits_the_screen(tab, address, talks, report, theme, size):
    wrong: list[str] = []
    place = ""

    def hear(told) -> None:
        wrong.append(f"{place} complained: {getattr(told, 'text', told)}")

    tab.on("console", hear)
    tab.on("pageerror", hear)
    tab.emulate_media(color_scheme=theme, reduced_motion="reduce")
    tab.set_viewport_size(SIZES[size])
    places = {f"{address}/{one}": wanted for one, wanted in EVERY_PAGE.items()}
    places |= {f"{talks}/#/run/{one}": wanted for one, wanted in rollouts.PLACES.items()}
    places |= {f"{talks}/#/run/marked/rollouts?id=0": ".message.assistant .markup"}
    for place, wanted in (places | {report: "main"}).items():
        tab.goto(place)
        tab.wait_for_selector(wanted)
        ui.wait_until(tab, "() => !document.querySelector('main [aria-busy=true], main .reading')")
        wrong += [f"{place}: {one}" for one in serious(tab)]
        if tab.evaluate(ui.SIDEWAYS):
            wrong.append(f"{place} scrolls sideways")
        if place != report:
            ui.leave(tab)
    for what in ("console", "pageerror"):
        tab.remove_listener(what, hear)
    tab.goto("about:blank")
    assert not wrong, "\n".join(wrong)
