"""The page and the static report in a real browser: drawn, quiet, private, and usable."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from toolkit.report import export
from toolkit.store import RunStore

CHROMIUM = "/usr/bin/chromium"
ROOT = Path(__file__).parent.parent.parent
REQUIRED = os.environ.get("REQUIRE_BROWSER") == "1"
pytestmark = [pytest.mark.browser, pytest.mark.skipif(
    not Path(CHROMIUM).exists() and not REQUIRED, reason=f"no chromium at {CHROMIUM}; REQUIRE_BROWSER=1 insists")]


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM)
        yield opened
        opened.close()


class Watched:
    """A page that remembers what it asked for elsewhere and what it complained about."""

    def __init__(self, browser, **settings):
        self.page = browser.new_page(viewport={"width": 1280, "height": 1000}, **settings)
        self.page.set_default_timeout(90_000)
        self.elsewhere, self.complaints = [], []
        self.page.on("request", lambda request: self.elsewhere.append(request.url) if not request.url.startswith(
            ("http://127.0.0.1", "ws://127.0.0.1", "data:", "blob:", "file:")) else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))


@pytest.fixture
def served(stored_home):
    """``python -m ui`` on a free port, as ``toolkit ui`` starts it."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-m", "ui", "--home", str(stored_home.path), "--port", str(port),
                                "--headless"], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    for _ in range(240):
        try:
            urllib.request.urlopen(f"{address}/_stcore/health", timeout=1)
            break
        except OSError:
            assert process.poll() is None, "the server ended"
            time.sleep(0.25)
    yield address
    process.terminate()
    process.wait(timeout=20)


def test_choose_an_engine_on_the_page(browser, served):
    """Open, read the recommendation, change an axis, click an engine, send the link to somebody else."""
    watched = Watched(browser)
    page = watched.page
    page.goto(served)
    page.wait_for_selector(".st-key-recommendation")
    page.wait_for_selector(".js-plotly-plot .scatterlayer .point")
    assert "best TPOT" in page.inner_text(".st-key-recommendation")
    assert page.locator(".js-plotly-plot").first.locator(".point").count() == 5

    box = page.locator(".js-plotly-plot").first.locator(".trace").nth(4).locator(".point").bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.locator("details[open]").filter(has_text="int4_awq").wait_for()

    page.get_by_role("combobox", name="Cost").click()
    page.get_by_role("option", name="Size").click()
    page.wait_for_function("location.search.includes('cost=Size')")
    other = Watched(browser)
    other.page.goto(page.url)
    other.page.wait_for_selector(".js-plotly-plot .scatterlayer .point")
    assert "Size, MB" in other.page.locator(".js-plotly-plot").first.inner_text()
    assert watched.elsewhere == other.elsewhere == []
    assert watched.complaints == other.complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_a_phone(browser, served, scheme):
    watched = Watched(browser, color_scheme=scheme)
    watched.page.set_viewport_size({"width": 400, "height": 800})
    watched.page.goto(served)
    watched.page.wait_for_selector(".js-plotly-plot .scatterlayer .point")
    assert watched.page.evaluate("document.documentElement.scrollWidth") <= 400
    background = watched.page.evaluate("getComputedStyle(document.querySelector('.stApp')).backgroundColor")
    assert background == {"light": "rgb(255, 255, 255)", "dark": "rgb(18, 22, 28)"}[scheme]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_static_report_draws_without_a_network(browser, stored_home, tmp_path, scheme):
    with RunStore(stored_home.store) as store:
        path = tmp_path / "report.html"
        path.write_text(export.render(store, store.find_run(), "html"), encoding="utf-8")
    watched = Watched(browser, color_scheme=scheme, offline=True)
    watched.page.goto(path.as_uri())
    for name in ("tradeoff-tpot_ms", "tradeoff-size_bytes", "agreement", "latency-tpot_ms"):
        watched.page.wait_for_selector(f"#{name} .main-svg")
    assert watched.page.locator("#tradeoff-tpot_ms .point").count() == 5
    assert watched.page.locator("tbody tr").first.is_visible()
    assert watched.page.evaluate("document.documentElement.scrollWidth") <= 1280
    assert watched.elsewhere == []
    assert watched.complaints == []
