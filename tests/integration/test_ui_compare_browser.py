"""The pages that compare runs, in a real browser: Compare, Differences, Which is better."""

import numpy as np
import pytest
from test_ui_browser import SIDEWAYS, _expect, _open, browser, page, pytestmark, tab  # noqa: F401 - fixtures, and what skips

from recorded_runs import Told, record_rewards, served

ROWS = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Twelve runs: three seeds each of four learning rates. Two of them have an evaluation of the same rows."""
    runs = tmp_path_factory.mktemp("runs")
    for number, rate in enumerate((1e-5, 1e-4, 1e-3, 1e-2)):
        for seed in range(3):
            Told(runs, f"rate{number}-seed{seed}", seed=seed, **{"trainer.optimizer.lr": rate}).step(20).end()
    dice = np.random.default_rng(0)
    for name, level in (("rate0-seed0", 0.2), ("rate1-seed0", 0.8)):
        record_rewards(runs / name, 20, "evaluated", np.clip(dice.normal(level, 0.1, ROWS), 0, 1))
    return runs


@pytest.fixture(scope="module")
def address(folder):
    with served(folder) as here:
        yield here


def everyone(**more) -> str:
    names = [f"rate{number}-seed{seed}" for number in range(4) for seed in range(3)]
    query = [f"run={name}" for name in names] + [f"{key}={value}" for key, value in more.items()]
    return "#/compare?" + "&".join(query)


def test_any_number_of_runs_has_a_colour_and_dash_of_its_own_each(page, address):  # noqa: F811
    _open(page, address, everyone(by=""), ".picked .swatch")
    signs = page.evaluate(
        "[...document.querySelectorAll('.picked .swatch')].map((one) => one.className + one.getAttribute('style'))"
    )
    assert len(signs) == len(set(signs)) == 12
    assert not page.evaluate(SIDEWAYS)


def test_runs_are_grouped_by_seed_or_by_a_key_and_the_address_holds_it(page, address):  # noqa: F811
    _open(page, address, everyone(), ".picked .swatch")
    _expect(page.locator(".picked b")).to_have_text([f"rate{number}, 3 seeds" for number in range(4)])
    _expect(page.locator("main")).to_contain_text("bands the 95 % interval of the mean")
    page.get_by_label("Group by").select_option("trainer.optimizer.lr")
    rates = ("0.00001", "0.0001", "0.001", "0.01")
    _expect(page.locator(".picked b")).to_have_text([f"trainer.optimizer.lr = {rate}, 3 runs" for rate in rates])
    assert "by=trainer.optimizer.lr" in page.url
    page.reload()
    _expect(page.locator(".picked b").first).to_contain_text("trainer.optimizer.lr =")
    chart = page.get_by_role("region", name="Reward", exact=True)
    _expect(chart.locator(".legend .label")).to_have_text([f"trainer.optimizer.lr = {rate}" for rate in rates])


def test_the_band_is_the_interval_of_the_mean(page, address):  # noqa: F811
    _open(page, address, everyone(), ".picked .swatch")
    found = page.evaluate("""async () => {
      const { joinCurves } = await import('/static/js/seeds.js');
      const curve = (...ys) => ({ xs: ys.map((_, at) => at), ys });
      return joinCurves([curve(1, 5, 2), curve(2, 5), curve(3, 5)], 'step');
    }""")
    radius = 4.303 / 3**0.5  # Student's t of three values whose deviation is 1
    assert found["ys"] == [2, 5, 2]
    assert found["low"] == pytest.approx([2 - radius, 5, 2])
    assert found["high"] == pytest.approx([2 + radius, 5, 2])


def test_differences_begin_with_the_settings_and_name_the_runs(page, address):  # noqa: F811
    _open(page, address, "#/diff?a=rate0-seed0&b=rate1-seed0", "table.differs")
    sections = page.locator("main section h2").all_inner_texts()
    assert sections[0].startswith("Settings that differ")
    table = page.get_by_label("Settings that differ").locator("table")
    _expect(table.locator("thead th")).to_have_text(["Key", "rate0-seed0", "rate1-seed0"])
    _expect(table.locator("tbody th")).to_have_text(["trainer.optimizer.lr"])
    _expect(page.locator(".notice", has_text="bit differences are expected")).to_have_count(1)
    _expect(page.get_by_label("Curves").locator("h2")).to_have_text("1 metric further apart than chance explains")
    _expect(page.get_by_label("Curves").locator("tbody th").first).to_have_text("held-out reward, same rows")
    page.get_by_label("Bit for bit").check()
    _expect(page.get_by_label("Tolerance")).to_be_visible()
    assert "exact=1" in page.url


def test_which_is_better_names_the_runs_and_has_the_held_out_rows(page, address):  # noqa: F811
    _open(page, address, "#/ab?a=rate0-seed0&b=rate1-seed0", ".chart canvas")
    _expect(page.locator(".notice.good")).to_contain_text("rate1-seed0 is ahead on 64 held-out rows at step 20, at 95%")
    _expect(page.get_by_role("region", name="Held-out reward: rate1-seed0 less rate0-seed0")).to_be_visible()
    assert "b less" not in page.locator("main").inner_text()
