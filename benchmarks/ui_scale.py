"""Does the dashboard stay quick with thousands of runs?

    python -m benchmarks.ui_scale [--runs 5000] [--json FILE]

Fills a store in a temporary home with runs of five engines and four latency cells each (100,000 cells for 5,000 runs),
starts the pages on it as ``toolkit ui`` does, and uses them in a headless browser. A page's time is from the click on
its name until it is whole (heading there, no placeholder, no running mark), the median of ``--repeats`` turns; its
``floor`` is what is asked of it, a second. Visits by a browser with an empty cache, which loads Streamlit's own scripts
first, stand apart. Also the store's own questions, without a page, and the server's memory before and after.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from calib.artifact import sha256_hex
from calib.errors import ENVIRONMENT
from evals.bench import BenchCell, cell_of, table, write_cells
from evals.report import Accuracy, Cell, Estimate, Row
from toolkit.home import Home
from toolkit.jobs import JobTable
from toolkit.store import RunStore, StoredRow

PAGES = ("Tradeoffs", "Accuracy", "Latency", "Engine", "Layers", "Compare", "Jobs", "Releases")
ENGINES = (("bf16", "bf16"), ("fp8", "bf16"), ("int8", "bf16"), ("int4_awq", "bf16"), ("int8", "fp8"))
CHROMIUM = "/usr/bin/chromium"
WHOLE = ("document.querySelector('h1') && document.querySelectorAll('[data-testid=stSkeleton]').length == 0 "
          "&& !document.querySelector('[data-testid=stStatusWidget]')")


def make_row(run: int, number: int) -> Row:
    recipe, cache = ENGINES[number]
    loss, tpot = 0.01 * number + run % 7 * 1e-4, 40.0 - 4 * number + run % 5
    cells = [Cell(batch_size=batch, isl=64, osl=32, n=3, ttft_ms=4 * tpot, ttft_ms_spread=2.0, tpot_ms=tpot,
                  tpot_ms_spread=1.0, e2e_ms=36 * tpot, out_tok_s=1000 * batch / tpot,
                  total_tok_s=3000 * batch / tpot) for batch in (1, 2, 4, 8)]
    return Row(recipe=recipe, kv_cache=cache, device="cpu", emulated=False,
               engine_digest=sha256_hex(f"engine {run} {number}".encode()),
               checkpoint_digest=sha256_hex(f"checkpoint {run} {number}".encode()), source_grid=None,
               size_bytes=10**8, accuracy=Accuracy(value=.4, ci_low=.35, ci_high=.45, n=240, tasks=["piqa"]),
               delta_nll=Estimate(value=loss, ci_low=loss - .004, ci_high=loss + .004, n=64), kl_mean=loss,
               same_top1=1 - loss, flips=loss, ttft_ms=4 * tpot, tpot_ms=tpot, out_tok_s=1000 / tpot, batch_size=1,
               isl=64, osl=32, peak_memory_bytes=3 * 10**8, verdict="PASS" if number else "BASELINE",
               verdict_reason="made for the benchmark", cells=cells)


def fill(home: Home, runs: int) -> float:
    """Seconds it took. All runs in one transaction each, as real ones are written."""
    begin = time.perf_counter()
    with RunStore(home.store) as store:
        store._db.execute("PRAGMA synchronous=OFF")  # the making of the data is not what is measured
        for run in range(runs):
            name = f"job{run % 40:02d}-{sha256_hex(str(run).encode())[:12]}"
            store.begin(name, f"job{run % 40:02d}", {"model": f"Model-{run % 25}B", "device": "cpu", "seed": run,
                                                     "evaluation_digest": "e" * 64, "model_digest": "m" * 64,
                                                     "margin": 0.05})
            store.finish(name, [StoredRow(make_row(run, number), None) for number in range(len(ENGINES))],
                         home.reports / f"{name}.html")
    with JobTable(home.store) as table:
        for number in range(200):
            table.finish(table.add("sweep", [f"engine{number}"], own=False), 0)
    return time.perf_counter() - begin


def timed(call: Callable[[], Any], repeats: int = 5) -> list[float]:
    """Milliseconds of each call."""
    spent = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        spent.append(1000 * (time.perf_counter() - begin))
    return spent


def questions(home: Home) -> list[BenchCell]:
    """What pages ask the store, without a page."""
    with RunStore(home.store) as store:
        newest = store.find_run().id
        asked: dict[str, Callable[[], Any]] = {
            "one page of 60 runs": lambda: store.runs(60, finished=True),
            "a page from the middle": lambda: store.runs(60, offset=store.count_runs() // 2),
            "search by model": lambda: store.runs(60, search="Model-7B", finished=True),
            "count": lambda: store.count_runs(finished=True),
            "rows and cells of a run": lambda: store.rows(newest)}
        return [cell_of(f"store: {name}", timed(call), "ms") for name, call in asked.items()]


class Server:
    """The pages on a free port."""

    def __init__(self, home: Home) -> None:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen([sys.executable, "-m", "ui", "--home", str(home.path), "--port", str(port),
                                         "--headless"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(600):
            with suppress(OSError):
                urllib.request.urlopen(f"{self.address}/_stcore/health", timeout=1)
                return
            time.sleep(0.1)
        raise SystemExit("the server did not start")

    @property
    def megabytes(self) -> float:
        return psutil.Process(self.process.pid).memory_info().rss / 1e6


def open_pages(server: Server, repeats: int) -> list[BenchCell]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        cells = [cell_of("visit: first of a server, empty browser cache", [_visit(browser, server.address)], "s"),
                 cell_of("visit: tradeoffs, empty browser cache",
                         [_visit(browser, server.address) for _ in range(repeats)], "s")]
        before = server.megabytes
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(120_000)
        page.goto(server.address)
        page.wait_for_function(WHOLE)
        spent: dict[str, list[float]] = {title: [] for title in PAGES}
        for _ in range(repeats + 1):
            for title in [*list(PAGES)[1:], next(iter(PAGES))]:
                spent[title].append(_turn_to(page, title))
        cells += [cell_of(f"page: {title}", times[1:], "s", floor=1.0) for title, times in spent.items()]
        cells.append(cell_of("page: search among the runs", [_search(page, f"Model-{n}B") for n in range(repeats)], "s",
                             floor=1.0))
        cells += [cell_of("server: memory after the first page", [before], "MB"),
                  cell_of("server: memory after all visits", [server.megabytes], "MB")]
        browser.close()
    return cells


def _visit(browser: Any, address: str) -> float:
    """Seconds until a fresh browser, which must load Streamlit's own scripts too, shows the whole page."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(120_000)
    begin = time.perf_counter()
    page.goto(address)
    page.wait_for_function(WHOLE)
    spent = time.perf_counter() - begin
    page.close()
    return spent


def _turn_to(page: Any, title: str) -> float:
    """Seconds from a click on a page's name until that page is whole."""
    begin = time.perf_counter()
    page.get_by_role("link", name=title, exact=True).click()
    page.wait_for_function(f"document.querySelector('h1')?.textContent == '{title}' && {WHOLE}")
    return time.perf_counter() - begin


def _search(page: Any, words: str) -> float:
    """Seconds from words typed into the search until the page stands again."""
    box = page.get_by_label("Find a run")
    box.fill(words)
    begin = time.perf_counter()
    box.press("Enter")
    page.wait_for_function(f"decodeURIComponent(location.search).includes('{words}')")
    page.wait_for_function(WHOLE)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description="Page times on a store with thousands of runs.")
    parser.add_argument("--runs", type=int, default=5000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not Path(CHROMIUM).exists():
        print(f"no browser at {CHROMIUM}", file=sys.stderr)
        raise SystemExit(ENVIRONMENT)
    with tempfile.TemporaryDirectory() as folder:
        home = Home(Path(folder) / "home")
        made = fill(home, options.runs)
        size = home.store.stat().st_size / 1e6
        print(f"{options.runs:,} runs, {options.runs * len(ENGINES) * 4:,} cells, {size:.0f} MB, made in {made:.0f} s")
        cells = questions(home)
        server = Server(home)
        try:
            cells += open_pages(server, options.repeats)
        finally:
            server.process.terminate()
            server.process.wait()
    print(table(cells))
    if options.json:
        write_cells(options.json, cells, f"python -m benchmarks.ui_scale --runs {options.runs}")


if __name__ == "__main__":
    main()
