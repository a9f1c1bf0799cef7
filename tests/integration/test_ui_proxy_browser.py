"""The web app behind a reverse proxy, in a real browser. Skipped where `test_ui_browser.py` is."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import test_ui_browser as ui

from child_processes import Launched
from recorded_runs import Told

pytestmark = ui.pytestmark
browser = ui.browser
expect = ui.playwright.expect
PROXY = Path(__file__).parents[1] / "reverse_proxy.py"
PREFIX = "/tools/paceline"


@contextmanager
def proxied(folder: Path, *flags: str, strip: bool) -> Iterator[tuple[str, str]]:
    """`paceline ui` behind the proxy: the address that the proxy shows it at, and what the command printed."""
    command = [sys.executable, "-m", "paceline", "ui", str(folder), "--port", "0", *flags]
    with killed_at_the_end(command) as server:
        printed = server.stdout.readline()
        upstream = re.search(r"http://127\.0\.0\.1:\d+", printed)[0]
        wrapped = [sys.executable, str(PROXY), upstream, PREFIX, *(["--strip"] if strip else [])]
        with killed_at_the_end(wrapped) as proxy:
            yield proxy.stdout.readline().strip() + PREFIX, printed


@contextmanager
def killed_at_the_end(command: list[str]) -> Iterator[Launched]:
    with Launched(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("strip", [True, False])
def test_pages_live_updates_and_the_key_work_below_a_path_of_the_proxy(browser, tmp_path, strip):
    told = Told(tmp_path, "living", began=time.time() - 10).step(5)
    with proxied(tmp_path, "--token", "s3cret", "--root-path", PREFIX, strip=strip) as (address, printed):
        assert f"{PREFIX}/ (the page asks for the key)" in printed
        browser.clear_cookies()  # which know no ports
        page, wrong = browser.new_page(), []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda asked: None if asked.url.startswith(f"{address}/") else wrong.append(asked.url))
        page.goto(f"{address}/")
        page.get_by_label("Key").fill("s3cret")
        page.get_by_role("button", name="Show the runs").click()
        page.wait_for_selector(ui.RUNS)
        assert page.url == f"{address}/"
        page.get_by_role("link", name="living").click()
        expect(page.locator(".vitals")).to_contain_text("5 of 40")
        told.step(3)
        expect(page.locator(".vitals")).to_contain_text("8 of 40")
        for name in ("Advice", "Rollouts", "Tokens", "Tickets", "Replay", "Config"):
            page.get_by_role("navigation", name="Pages of this run").get_by_role("link", name=name).click()
            expect(page.locator("main h1")).to_be_visible()
        posted = page.evaluate(
            "fetch('api/replay/start', {method: 'POST', body: '{}'}).then((answer) => answer.status)"
        )
        assert posted != 403, "our own page is not a foreign one"
        page.goto("about:blank")
        page.close()
        assert wrong == []
    told.let_go()


def test_a_proxy_that_takes_its_path_off_needs_no_root_path(browser, tmp_path):
    Told(tmp_path, "done").step(5).end()
    with proxied(tmp_path, strip=True) as (address, _):
        page = browser.new_page()
        page.goto(f"{address}/")
        page.wait_for_selector(ui.RUNS)
        page.goto("about:blank")
        page.close()
