"""Every page of the dashboard as a picture, light and dark: ``docs/screenshots``.

    python -m benchmarks.screenshots --home HOME [--out docs/screenshots] [--page Layers ...] [--scheme dark]

Starts the pages on ``HOME`` (a home with a finished run; nothing in it is changed) as ``toolkit ui`` does, opens each
one in a headless browser 1280 pixels wide, waits until it is whole and its charts are drawn, and keeps all of it, as
high as it is, with 256 colours (half of the bytes, no visible difference on flat colours). A page with an error on
it is no picture: the error is said instead.
"""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks.ui_scale import CHROMIUM, PAGES, WHOLE, Server
from calib.errors import ENVIRONMENT
from toolkit.home import Home
from toolkit.store import RunStore

WIDTH, LEAST = 1280, 900
COLOURS = 256
#: What each page is asked to show, beside the newest run.
QUERIES = {"Tradeoffs": "", "Accuracy": "accuracy?engine=int8", "Latency": "latency", "Engine": "engine?engine=int8",
           "Layers": "layers?format=int4_awq&raised=layer+3&raised=layer+28&kept=layer+29",
           "Compare": "compare?{runs}", "Jobs": "jobs", "Releases": "releases"}
#: Charts that a page has when it is whole.
CHARTS = {"Tradeoffs": 1, "Accuracy": 1, "Latency": 1, "Layers": 1}
_HEIGHT = "Math.max(...['stMain', 'stSidebarContent'].map(name => document.querySelector(`[data-testid=${name}]`)" \
          "?.scrollHeight ?? 0))"


def take(browser: Any, address: str, title: str, scheme: str) -> Image.Image:
    """The page at ``address`` as a picture. SystemExit says what is wrong on it."""
    page = browser.new_page(viewport={"width": WIDTH, "height": LEAST}, color_scheme=scheme)
    page.set_default_timeout(180_000)
    page.goto(address)
    page.wait_for_function(f"document.querySelector('h1')?.textContent == '{title}' && {WHOLE}")
    page.wait_for_function(f"document.querySelectorAll('.js-plotly-plot .main-svg').length >= {CHARTS.get(title, 0)}")
    for _ in range(2):  # a higher window may make room for wider charts, which are drawn anew
        page.set_viewport_size({"width": WIDTH, "height": max(LEAST, int(page.evaluate(_HEIGHT)))})
        page.wait_for_timeout(1500)
        page.wait_for_function(WHOLE)
    if page.locator("[data-testid=stException]").count():
        raise SystemExit(f"{title}: {page.locator('[data-testid=stException]').first.inner_text()[:300]}")
    picture = Image.open(io.BytesIO(page.screenshot()))
    page.close()
    return picture.convert("RGB").quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)


def main() -> None:
    parser = argparse.ArgumentParser(description="Pictures of every page, light and dark.")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("docs/screenshots"))
    parser.add_argument("--page", action="append", choices=PAGES)
    parser.add_argument("--scheme", action="append", choices=("light", "dark"))
    options = parser.parse_args()
    if not Path(CHROMIUM).exists():
        print(f"no browser at {CHROMIUM}", file=sys.stderr)
        raise SystemExit(ENVIRONMENT)
    from playwright.sync_api import sync_playwright

    options.out.mkdir(parents=True, exist_ok=True)
    home = Home(options.home)
    with RunStore(home.store) as store:
        newest = "&".join(f"runs={run.id}" for run in store.runs(2, finished=True))
    server = Server(home)
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM)
            for title in options.page or PAGES:
                for scheme in options.scheme or ("light", "dark"):
                    path = options.out / f"{title.lower()}-{scheme}.png"
                    address = f"{server.address}/{QUERIES[title].format(runs=newest)}"
                    take(browser, address, title, scheme).save(path, optimize=True)
                    print(f"{path}  {path.stat().st_size / 1e3:.0f} kB")
            browser.close()
    finally:
        server.process.terminate()
        server.process.wait()


if __name__ == "__main__":
    main()
