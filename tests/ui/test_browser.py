"""The pages and the static report in a real browser: a user's job on each, drawn, quiet, private, and usable."""

import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from toolkit.jobs import JobTable
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


class Server:
    """``python -m ui`` on a port of its own, as ``toolkit ui`` starts it."""

    def __init__(self, home, *options):
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port = found.getsockname()[1]
        self.home, self.options = home, options
        self.address = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ui", "--home", str(self.home.path), "--port", str(self.port), "--headless",
             *self.options], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(480):
            try:
                urllib.request.urlopen(f"{self.address}/_stcore/health", timeout=1)
                return
            except OSError:
                assert self.process.poll() is None, "the server ended"
                time.sleep(0.25)
        raise AssertionError("the server did not start")

    def stop(self):
        self.process.terminate()
        self.process.wait(timeout=20)


@pytest.fixture(scope="module")
def served(full_home):
    server = Server(full_home)
    yield server
    server.stop()


class Watched:
    """A page that remembers what it asked for elsewhere and what it complained about."""

    def __init__(self, browser, **settings):
        self.page = browser.new_page(viewport={"width": 1280, "height": 1000}, **settings)
        self.page.set_default_timeout(90_000)
        self.elsewhere, self.complaints = [], []
        self.page.on("request", lambda request: self.elsewhere.append(request.url) if not request.url.startswith(
            ("http://127.0.0.1", "ws://127.0.0.1", "data:", "blob:", "file:")) else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def quiet(self):
        assert self.elsewhere == []
        assert self.complaints == []
        assert self.page.locator("[data-testid=stException]").count() == 0
        self.page.close()


@pytest.fixture
def watched(browser):
    opened = Watched(browser)
    yield opened
    opened.quiet()


def choose(page, box, option, *, exact=False):
    """Take an option of a select box; once more where the page was written anew in between, which shuts its list."""
    from playwright.sync_api import TimeoutError

    for turn in range(6):
        page.get_by_role("combobox", name=box, exact=exact).click()
        try:
            page.get_by_role("option", name=option).click(timeout=15_000)
            return
        except TimeoutError:
            if turn == 5:
                raise
            page.keyboard.press("Escape")


def push(page, label, key, times):
    """Move a labelled slider by keys, as somebody without a mouse does."""
    thumb = page.get_by_role("slider", name=label)
    thumb.focus()
    for _ in range(times):
        thumb.press(key)


#: Where the int4_awq point is drawn, in script: SVG text is no HTML text.
POINT = """(() => {
  const text = [...document.querySelectorAll('.js-plotly-plot .textpoint')].find(t => t.textContent == 'int4_awq');
  const point = text && text.closest('.trace').querySelector('.point');
  return point && point.getBoundingClientRect().toJSON();
})()"""


def test_choose_an_engine_with_the_sliders(browser, served, watched):
    """Open, read the recommendation, tighten a limit by keyboard, click an engine, send the link to somebody else."""
    page = watched.page
    page.goto(served.address)
    page.wait_for_selector(".js-plotly-plot .scatterlayer .point")
    assert "int8 has the best TPOT" in page.inner_text(".st-key-recommendation")

    push(page, "ΔNLL at most", "ArrowLeft", 5)
    page.locator(".st-key-recommendation", has_text="bf16 has the best TPOT").wait_for()
    page.wait_for_function("location.search.includes('delta=0.01')")

    choose(page, "Cost", "Size")
    page.wait_for_function("location.search.includes('cost=Size')")
    page.wait_for_function("document.querySelector('.js-plotly-plot').textContent.includes('Size, MB')")
    page.wait_for_function("!document.querySelector('[data-testid=stStatusWidget]')")
    page.wait_for_function(POINT)
    box = page.evaluate(POINT)
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.locator("details[open]").filter(has_text="int4_awq").wait_for()

    other = Watched(browser)
    other.page.goto(page.url)
    other.page.locator(".st-key-recommendation", has_text="bf16 has the best TPOT").wait_for()
    other.page.wait_for_selector(".js-plotly-plot .scatterlayer .point")
    assert "Size, MB" in other.page.locator(".js-plotly-plot").first.inner_text()
    other.quiet()


def test_open_a_flip(served, watched):
    page = watched.page
    page.goto(f"{served.address}/accuracy?engine=int8")
    page.get_by_text("Which one is 0?").click()
    page.get_by_text("the wrong 0").wait_for()
    assert page.get_by_text("the right 0").first.is_visible()
    page.get_by_role("radio", name="Wrong to right").click()
    page.get_by_text("Which one is 5?").wait_for()
    page.wait_for_function("location.search.includes('flips=Wrong')")
    page.get_by_text("Which one is 0?").wait_for(state="detached")


def test_set_an_objective_and_keep_the_run_from_page_to_page(served, watched, full_home):
    page = watched.page
    with RunStore(full_home.store) as store:
        older = next(run.id for run in store.runs() if run.job == "tiny")
    page.goto(f"{served.address}/latency?run={older}")
    page.get_by_text("Set a limit").wait_for()
    push(page, "TPOT at most", "ArrowLeft", 1)
    page.get_by_text("All requests of a batch share its times").wait_for()
    page.get_by_role("link", name="Engine", exact=True).click()
    page.get_by_text("Where it comes from").wait_for()
    assert page.get_by_role("combobox", name="Run").input_value() == older or older in page.inner_text("body")
    page.get_by_text("Memory map").wait_for()


def test_raise_a_layer_and_export_the_recipe(browser, served, watched, tmp_path):
    from calib.recipe import load_recipe

    page = watched.page
    page.goto(f"{served.address}/layers?format=int4_awq")
    page.get_by_text("+0.0500").wait_for()
    choose(page, "Layers left in 16 bits", "layer 3")
    page.get_by_text("+0.0300").wait_for()
    page.keyboard.press("Escape")
    with page.expect_download() as found:
        page.get_by_role("button", name="Recipe").click()
    found.value.save_as(tmp_path / found.value.suggested_filename)
    assert load_recipe(tmp_path / "int4_awq-keep-3.yaml").keep == ("model.layers.3.*",)
    other = Watched(browser)
    other.page.goto(page.url)
    other.page.get_by_text("+0.0300").wait_for()
    other.quiet()

    choose(page, "Layers raised to 8 bits", "layer 3")
    page.get_by_text("raised to int8").first.wait_for()
    page.keyboard.press("Escape")
    page.wait_for_function("!location.search.includes('kept=') && location.search.includes('raised=layer')")
    with page.expect_download() as found:
        page.get_by_role("button", name="Recipe").click()
    found.value.save_as(tmp_path / found.value.suggested_filename)
    raised = load_recipe(tmp_path / "int4_awq-int8-3.yaml")
    assert (raised.keep, raised.raised) == ((), {"int8": ("model.layers.3.*",)})


def test_start_a_job_refresh_and_restart_the_server(browser, served, watched, full_home):
    """The job is still there after a refresh, in a second tab, and for a new server; and it ends."""
    page = watched.page
    page.goto(f"{served.address}/jobs?kind=Sweep")
    page.get_by_role("textbox", name="Cells").fill("1x8x4,2x8x4")
    page.get_by_role("button", name="Start", exact=True).click()
    page.get_by_text("was started").wait_for()
    with JobTable(full_home.store) as table:
        job = next(work for work in table.list() if work.verb == "sweep")
    page.reload()
    page.get_by_text("All jobs", exact=True).wait_for()
    served.stop()
    served.start()
    second = Watched(browser)
    second.page.goto(f"{served.address}/jobs")
    second.page.get_by_text("All jobs", exact=True).wait_for()
    for _ in range(600):
        with JobTable(full_home.store) as table:
            work = table.find(job.id)
        if work.over:
            break
        time.sleep(0.2)
    assert (work.state, work.exit_code) == ("finished", 0)
    second.quiet()


def test_the_engines_speak_side_by_side(served, watched, full_home):
    page = watched.page
    with RunStore(full_home.store) as store:
        run = next(run.id for run in store.runs() if run.job == "tiny")
    page.goto(f"{served.address}/compare?runs={run}&tokens=16")
    page.get_by_label("Your prompt").fill("the river and the")
    page.get_by_label("Your prompt").press("Control+Enter")
    page.get_by_role("button", name="Generate").click()
    for _ in range(600):
        with JobTable(full_home.store) as table:
            found = [work for work in table.list() if work.verb == "generate"]
        if len(found) == 2 and all(work.over for work in found):
            break
        time.sleep(0.2)
    assert [work.state for work in found] == ["finished", "finished"]
    page.wait_for_function("location.search.includes('prompt=')")


def test_approve_publish_and_roll_back(served, watched, full_home):
    from toolkit.release import list_releases, read_audit
    from toolkit.target import FolderTarget

    page = watched.page
    target = FolderTarget(full_home.path / "releases")
    for number, engine in enumerate(("fp8", "int8 kv=fp8")):
        page.goto(f"{served.address}/releases")
        page.get_by_text("Approve an engine").click()
        choose(page, "Engine", re.compile(rf"✓ {re.escape(engine)} · tiny-"), exact=True)
        page.get_by_label("Why may it go?").fill(f"reason {number}")
        page.get_by_role("button", name=f"Approve {engine}", exact=True).click()
        page.get_by_text(f"{engine} is approved.").wait_for()
        page.get_by_text("Publish an approved engine").click()
        choose(page, "Approved engine", re.compile(rf"^{re.escape(engine)} · tiny-"))
        page.get_by_role("button", name=f"Publish {engine}", exact=True).click()
        page.get_by_text("names it now").wait_for()
    page.goto(f"{served.address}/releases")
    page.get_by_text("Roll an alias back").click()
    page.get_by_label("Why?", exact=True).fill("p99 doubled")
    page.get_by_role("button", name="Roll back").click()
    page.get_by_text("now.").first.wait_for()
    releases = {release.record.approval.reason: release for release in list_releases(target)}
    assert releases["reason 0"].aliases == ("production",)
    assert read_audit(target)[-1].detail["reason"] == "p99 doubled"
    page.get_by_role("button", name="Verify every byte").click()
    page.get_by_text("all as released").wait_for()


PAGES = ("", "accuracy", "latency", "engine", "layers", "compare", "jobs", "releases")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_fits_a_phone(browser, served, scheme):
    watched = Watched(browser, color_scheme=scheme)
    watched.page.set_viewport_size({"width": 390, "height": 800})
    for name in PAGES:
        watched.page.goto(f"{served.address}/{name}")
        watched.page.wait_for_selector("h1")
        watched.page.wait_for_function("document.querySelectorAll('[data-testid=stSkeleton]').length == 0")
        assert watched.page.evaluate("document.documentElement.scrollWidth") <= 390, name
    background = watched.page.evaluate("getComputedStyle(document.querySelector('.stApp')).backgroundColor")
    assert background == {"light": "rgb(255, 255, 255)", "dark": "rgb(18, 22, 28)"}[scheme]
    watched.quiet()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_static_report_draws_without_a_network(browser, stored_home, tmp_path, scheme):
    with RunStore(stored_home.store) as store:
        path = tmp_path / "report.html"
        path.write_text(export.render(store, store.find_run(), "html"), encoding="utf-8")
    watched = Watched(browser, color_scheme=scheme, offline=True)
    watched.page.goto(path.as_uri())
    for name in ("tradeoff-tpot_ms", "tradeoff-size_bytes", "agreement", "latency-tpot_ms"):
        watched.page.wait_for_selector(f"#{name} .main-svg")
    assert watched.page.locator("#tradeoff-tpot_ms .textpoint").count() == 5
    assert watched.page.locator("tbody tr").first.is_visible()
    assert watched.page.evaluate("document.documentElement.scrollWidth") <= 1280
    watched.quiet()
