"""Every other page through AppTest, on the tiny real model taken through the whole pipeline."""

import pytest

from calib.artifact import sha256_hex
from calib.recipe import recipe_names
from toolkit import jobs, layers
from toolkit.home import Home
from toolkit.jobs import JobTable
from toolkit.release import list_releases, read_audit, release_of_alias
from toolkit.report.answers import flips, task_lines
from toolkit.store import RunStore
from toolkit.target import FolderTarget

from .conftest import add_answers, add_sensitivity, move_home, shown_text


@pytest.fixture
def own_home(judged_home, tmp_path):
    """A copy that a test may write to."""
    return move_home(judged_home, Home(tmp_path / "home"))


def engine_rows(home):
    with RunStore(home.store) as store:
        run = store.find_run()
        return run, [stored.row for stored in store.rows(run.id)]


def test_accuracy_opens_a_flip_in_words(open_page, judged_home):
    from toolkit import evidence

    run, rows = engine_rows(judged_home)
    page = open_page(judged_home, "accuracy", engine="int8 kv=fp8")
    assert not page.exception
    with RunStore(judged_home.store) as store:
        report = evidence.report_of(store, rows[2], run)
        baseline = evidence.baseline_of(store, report)
    found = flips(report, baseline, evidence.questions(judged_home, report.data_digest))
    labels = [expander.label for expander in page.expander]
    assert sum("wrong" in label and "right" in label for label in labels) == len(found)
    [line] = task_lines(report, baseline)
    assert page.dataframe[0].value["right to wrong"][0] == line.to_wrong
    assert page.dataframe[0].value["questions"][0] == 6
    table = next(frame.value for frame in page.dataframe if "document" in frame.value)
    assert len(table) == 22
    assert table["ΔNLL, nats/token"].is_monotonic_decreasing


def test_flips_are_shown_in_words_the_most_harmful_first(open_page, stored_home, report_rows):
    from toolkit.store import StoredRow

    with RunStore(stored_home.store) as store:
        facts = dict(store.find_run().facts)
        add_answers(stored_home, report_rows, facts)
        store.begin("flips-000000000000", "flips", facts)
        store.finish("flips-000000000000", [StoredRow(row, None) for row in report_rows], stored_home.reports / "x")
    page = open_page(stored_home, "accuracy", engine="int8")
    assert not page.exception
    labels = [expander.label for expander in page.expander if "wrong" in expander.label]
    assert [label.partition("]")[0] for label in labels] == [":red-badge[✕ right to wrong"] * 2 + [
        ":green-badge[✓ wrong to right"]
    text = shown_text(page)
    assert "the right 0" in text
    assert "the wrong 0" in text
    line = page.dataframe[0].value
    assert (line["right to wrong"][0], line["wrong to right"][0]) == (2, 1)
    page.segmented_control(key="flips").set_value("Wrong to right").run()
    assert len([label for label in (expander.label for expander in page.expander) if "to wrong" in label]) == 0
    table = next(frame.value for frame in page.dataframe if "document" in frame.value)
    assert table["document"][0] == "doc 5"
    assert table["ΔNLL, nats/token"][0] == pytest.approx(0.1)
    tradeoffs = open_page(stored_home, loss="5 points")
    assert "int8\\: it lost 16.7 " in tradeoffs.markdown[0].value, "one of six more is wrong than before"


def test_accuracy_without_the_answers_says_what_to_run(open_page, stored_home):
    page = open_page(stored_home, "accuracy")
    assert not page.exception
    assert "The answers are not in this home" in shown_text(page)


def test_latency_serves_within_objectives(open_page, judged_home):
    page = open_page(judged_home, "latency")
    assert not page.exception
    assert "Set a limit" in shown_text(page)
    slider = page.select_slider(key="slo_tpot")
    slider.set_value(slider.options[-2].split()[0]).run()
    assert not page.exception
    goodput = page.dataframe[0].value
    assert set(goodput["engine"]) == {"bf16", "fp8", "int8 kv=fp8"}
    rate = goodput["requests/s within"].dropna()
    assert len(rate) >= 1
    assert (rate > 0).all()


def endpoint_sweep(home, url, slow, users=(1, 2, 4)):
    """What a sweep of two runs a load leaves in the store; the last run of the last load is not valid."""
    from evals.loads import EndpointCell, Spread
    from evals.records import save_record
    from evals.report import Cell, LatencySweep, Target

    def load(count, run):
        base = slow * count + run
        return EndpointCell(tool="t", completed=120, concurrency=count, client_lag_ms=0.1,
                            ttft_ms=Spread(p50=base, p90=2 * base, p99=3 * base),
                            tpot_ms=Spread(p50=base / 10, p90=base / 5, p99=base / 3),
                            invalid="the client was late" if (count, run) == (users[-1], 1) else None)
    digest = sha256_hex(url.encode())
    cells = [Cell(mode="closed", batch_size=count, isl=8, osl=4, n=2, ttft_ms=slow * count, ttft_ms_spread=1.0,
                  tpot_ms=slow, tpot_ms_spread=0.1, e2e_ms=9.0 * slow, out_tok_s=10.0, total_tok_s=30.0, req_s=2.0)
             for count in users]
    sweep = LatencySweep(
        target=Target(name="m", digest=digest, numerics=f"endpoint {url}", tokenizer_digest="t" * 64,
                      template_sha256="none", bos=True),
        device="endpoint", cells=cells, peak_memory_bytes=None, warmup=1, repeats=2,
        loads=[load(count, run) for count in users for run in (0, 1)])
    with RunStore(home.store) as store:
        store.remember(save_record(sweep, home.artifacts("latency-sweep") / f"e-{digest[:8]}-{slow:g}", [digest]))


def test_percentiles_of_servers_under_load(open_page, stored_home):
    page = open_page(stored_home, "latency")
    assert "come from a server under load" in shown_text(page)
    endpoint_sweep(stored_home, "http://127.0.0.1:1", 40.0)
    endpoint_sweep(stored_home, "http://127.0.0.1:2", 70.0)
    page = open_page(stored_home, "latency")
    assert "Choose an endpoint above" in shown_text(page)
    assert len(page.button_group(key="endpoints").options) == 2, "one name, two servers"
    page.button_group(key="endpoints").set_value(["m"]).run()
    assert not page.exception
    table = next(frame.value for frame in page.dataframe if "TTFT p90" in frame.value)
    assert list(table["load"]) == ["1 at a time", "1 at a time", "2 at a time", "2 at a time", "4 at a time",
                                   "4 at a time"]
    assert (table["TTFT p99"] > table["TTFT p90"]).all()
    assert list(table["not valid because"]) == [""] * 5 + ["the client was late"]


def test_a_load_that_is_not_valid_is_in_no_line(stored_home):
    from toolkit.evidence import endpoint_sweeps
    from toolkit.report.speed import by_load, told_apart

    endpoint_sweep(stored_home, "http://127.0.0.1:1", 40.0)
    endpoint_sweep(stored_home, "http://127.0.0.1:2", 70.0)
    with RunStore(stored_home.store) as store:
        sweeps = told_apart(endpoint_sweeps(store))
    assert len({sweep.target.name for sweep in sweeps}) == 2
    [first] = [sweep for sweep in sweeps if sweep.target.digest == sha256_hex(b"http://127.0.0.1:1")]
    assert dict(by_load(first, "ttft_ms")) == {
        "1 at a time": {"p50": 40.5, "p90": 81.0, "p99": 121.5}, "2 at a time": {"p50": 80.5, "p90": 161, "p99": 241.5},
        "4 at a time": {"p50": 160.0, "p90": 320.0, "p99": 480.0}}


def test_the_engine_is_taken_apart(open_page, judged_home):
    page = open_page(judged_home, "engine", engine="fp8")
    assert not page.exception
    program = page.dataframe[0].value
    assert "linear q_proj, linear k_proj, linear v_proj" in list(program["before fusion"])
    assert "not exact" not in shown_text(page)
    chain = next(frame.value for frame in page.dataframe if "step" in frame.value)
    assert list(chain["step"]) == ["model", "calibration data", "recipe", "checkpoint", "engine", "eval report",
                                   "latency sweep", "verdict"]
    assert set(chain["here"]) == {"✓"}


def test_an_engine_that_is_gone_says_so(open_page, stored_home):
    page = open_page(stored_home, "engine")
    assert not page.exception
    assert "not in this home any more" in shown_text(page)


def test_two_runs_are_compared_and_what_differs_is_marked(open_page, stored_home, report_rows):
    from toolkit.store import StoredRow

    with RunStore(stored_home.store) as store:
        slower = [row.model_copy(update={"tpot_ms": row.tpot_ms * 3, "cells": []}) for row in report_rows]
        store.begin("later-000000000000", "later", store.find_run().facts | {"seed": 7})
        store.finish("later-000000000000", [StoredRow(row, None) for row in slower], stored_home.reports / "x.html")
    page = open_page(stored_home, "compare", runs=["demo-0123456789ab", "later-000000000000"])
    assert not page.exception
    facts = page.dataframe[0].value
    assert list(facts["fact"]) == ["seed"]
    page.toggle(key="differs").set_value(True).run()
    figures = page.dataframe[1].value
    assert set(figures["figure"]) == {"TPOT, ms"}
    assert all(cell.startswith("▲ ") and cell.endswith(" worse") for cell in figures["later-000000000000"])


def test_runs_of_other_data_are_not_compared(open_page, stored_home, report_rows):
    from toolkit.store import StoredRow

    with RunStore(stored_home.store) as store:
        store.begin("other-000000000000", "other", store.find_run().facts | {"evaluation_digest": "f" * 64})
        store.finish("other-000000000000", [StoredRow(report_rows[0], None)], stored_home.reports / "x.html")
    page = open_page(stored_home, "compare", runs=["demo-0123456789ab", "other-000000000000"])
    assert "judged on different data" in shown_text(page)


def test_a_layer_is_raised_and_the_recipe_follows(open_page, tmp_path):
    from calib.recipe import load_recipe

    home = Home(tmp_path / "home")
    add_sensitivity(home)
    page = open_page(home, "layers", format="int4_awq")
    assert not page.exception
    assert page.metric[0].value == "+0.0500"
    assert "that is the recipe int4" in shown_text(page), "and no recipe of its own that keeps nothing"
    assert [code.value for code in page.code] == ["toolkit quantize tiny --recipe int4_awq --out int4_awq"]
    page.multiselect(key="kept").set_value([3]).run()
    assert page.metric[0].value == "+0.0300"
    assert page.metric[1].value == "3.59 kB"
    recipe = tmp_path / "int4_awq-keep-3.yaml"
    recipe.write_text(page.code[0].value)
    assert "with 1 layer left" in page.code[0].value
    assert load_recipe(recipe).keep == ("model.layers.3.*",)
    assert page.code[1].value == "toolkit quantize tiny --recipe int4_awq-keep-3.yaml --out int4_awq-keep-3"
    page.multiselect(key="raised").set_value([2]).run()
    assert page.metric[0].value == "–", "nobody measured int8"
    assert "was not measured" in shown_text(page)
    recipe.write_text(page.code[0].value)
    found = load_recipe(recipe)
    assert (found.keep, found.raised) == (("model.layers.3.*",), {"int8": ("model.layers.2.*",)})
    assert "--recipe int4_awq-keep-3-int8-2.yaml" in page.code[1].value


def test_a_layer_has_one_format(open_page, tmp_path):
    """What is chosen in one list leaves the other; eight bits are offered where the recipe can hold them."""
    home = Home(tmp_path / "home")
    add_sensitivity(home, ("int8", "int4_awq"))
    page = open_page(home, "layers", format="int4_awq", kept=["layer 3"])
    assert page.multiselect(key="kept").value == [3]
    page.button(key="raise").click().run()
    assert (page.multiselect(key="raised").value, page.multiselect(key="kept").value) == ([1, 2, 3], [])
    assert page.metric[0].value == "+0.0140", "layer 0 in int4 and the others in int8"
    assert page.metric[1].value == "3.53 kB"
    assert "so it should lose less" in shown_text(page)
    page.multiselect(key="kept").set_value([1]).run()
    assert page.multiselect(key="raised").value == [2, 3]
    assert page.button(key="raise").disabled
    page.multiselect(key="raised").set_value([0, 2, 3]).run()
    assert "No layer is left in int4" in shown_text(page)
    page.segmented_control(key="format").set_value("int8").run()
    assert not page.exception
    assert not any(found.key == "raised" for found in page.multiselect)


def test_the_advice_is_taken_and_all_layers_in_16_bits_is_no_recipe(open_page, tmp_path):
    home = Home(tmp_path / "home")
    add_sensitivity(home)
    page = open_page(home, "layers", format="int4_awq")
    assert "The most sensitive in int4" in shown_text(page)
    page.button(key="advice").click().run()
    assert page.multiselect(key="kept").value == [1, 2, 3]
    assert page.metric[0].value == "+0.0050"
    assert page.button(key="advice").disabled
    assert "are noise" not in shown_text(page)
    page.multiselect(key="kept").set_value([0, 1, 2, 3]).run()
    assert not page.exception
    assert "that is the recipe bf16" in shown_text(page)
    assert len(page.code) == 0


def test_layers_that_seem_to_gain_tell_how_large_the_noise_is(open_page, tmp_path):
    home = Home(tmp_path / "home")
    add_sensitivity(home)
    file = home.path / layers.FOLDER / "tiny.json"
    found = layers.Sensitivity.model_validate_json(file.read_text())
    costs = [cost.model_copy(update={"loss": -0.0123}) if (cost.layer, cost.format) == (2, "fp8") else cost
             for cost in found.costs]
    file.write_text(found.model_copy(update={"costs": costs}).model_dump_json())
    page = open_page(home, "layers", format="fp8")
    assert "gains 0.0123, so differences below that are noise" in shown_text(page)
    assert "are noise" not in shown_text(open_page(home, "layers", format="int4_awq"))


def test_layers_without_a_measurement_or_with_a_broken_one(open_page, tmp_path):
    home = Home(tmp_path / "home")
    assert "No layer has been measured yet" in shown_text(open_page(home, "layers"))
    (home.path / layers.FOLDER).mkdir(parents=True)
    (home.path / layers.FOLDER / "bad.json").write_text('{"model": 1}')
    page = open_page(home, "layers")
    assert not page.exception
    assert "bad.json is no sensitivity file" in shown_text(page).replace("\\", "")


def test_a_job_is_started_from_a_form_and_listed(open_page, tmp_path):
    home = Home(tmp_path / "home")
    page = open_page(home, "jobs")
    assert not page.exception
    page.text_input(key="job-file").set_value(str(tmp_path / "nothing.yaml"))
    page.button[0].click().run()
    assert "was started" in shown_text(page)
    assert not page.expander[0].success, "that part folds away"
    with JobTable(home.store) as table:
        [work] = table.list()
    assert (work.verb, work.arguments) == ("run", [str(tmp_path / "nothing.yaml")])
    for _ in range(300):
        with JobTable(home.store) as table:
            work = table.find(work.id)
        if work.over:
            break
        __import__("time").sleep(0.1)
    assert (work.state, work.exit_code) == ("failed", 2)
    again = open_page(home, "jobs")
    assert list(again.dataframe[0].value["state"]) == ["✕ failed"]
    assert not jobs.log_of(home, work.id).read_text()


def test_the_forms_offer_what_quantize_takes(open_page, tmp_path):
    """Every KV cache, and every recipe that no particular chip is needed for; each choice is a command line."""
    home = Home(tmp_path / "home")
    page = open_page(home, "jobs", kind="Quantize")
    assert page.selectbox(key="kv-quantize").options == ["bf16", "fp8", "int8"]
    recipes = page.selectbox(key="recipe-quantize").options
    assert set(recipes) == set(recipe_names()) - {"nvfp4", "mxfp8"}
    assert {"int4_gptq", "fp8_block", "int8_static"} <= set(recipes)


def test_a_job_that_goes_on_is_shown_with_its_eta(open_page, tmp_path):
    home = Home(tmp_path / "home")
    with JobTable(home.store) as table:
        job = table.add("sweep", ["int8"], own=False)
        table.adopt(job, "running")
        from calib.progress import Progress

        table.progress(job, Progress("measure", 2, 8, "cell"))
        with table._write() as db:
            db.execute("UPDATE work SET stage_began='2026-01-01T00:00:00+00:00', updated='2026-01-01T00:00:20+00:00'")
    page = open_page(home, "jobs")
    assert not page.exception
    assert any("measure · 25 % · about 1 min 00 s left" in str(element.proto) for element in page.get("progress"))
    assert any(button.label == "Cancel" for button in page.button)


def test_read_only_offers_nothing_that_changes(open_page, own_home):
    for name in ("jobs", "releases", "compare"):
        page = open_page(own_home, name, read_only=True)
        assert not page.exception
        assert "read-only" in shown_text(page)
        assert not [button.label for button in page.button if button.label not in ("Verify every byte",)]


def press(page, label):
    next(button for button in page.button if button.label.startswith(label)).click().run()
    assert not page.exception


def test_approve_publish_and_roll_back(open_page, own_home):
    target = FolderTarget(own_home.path / "releases")
    page = open_page(own_home, "releases")
    assert not page.exception
    assert "Nothing has been released here yet" in shown_text(page)
    assert "No engine is approved yet" in shown_text(page)
    names = page.selectbox(key="release-engine").options
    assert len(names) == 2
    for number, name in enumerate(names):
        page.selectbox(key="release-engine").set_value(name).run()
        page.text_input(key="reason").set_value(f"reason {number}")
        engine = name.removeprefix("✓ ").partition(" · ")[0]
        press(page, f"Approve {engine}")
        assert f"{engine} is approved" in shown_text(page)
        page.selectbox(key="publish-engine").set_value(name.removeprefix("✓ ")).run()
        page.text_input(key="publisher").set_value("grace")
        press(page, f"Publish {engine}")
        assert "names it now" in shown_text(page)
    first, second = sorted(list_releases(target), key=lambda release: release.record.approval.reason)
    assert release_of_alias(target, "production").digest == second.digest
    assert {release.record.publisher for release in (first, second)} == {"grace"}

    page = open_page(own_home, "releases")
    page.text_input(key="rollback-reason").set_value("p99 doubled")
    press(page, "Roll back")
    assert release_of_alias(target, "production").digest == first.digest
    assert f"production names release {first.digest[:12]} now" in shown_text(page)
    released = next(frame.value for frame in page.dataframe if "release" in frame.value and "engine" in frame.value)
    assert dict(zip(released["release"], released["alias"], strict=True))[first.digest[:12]] == "production"
    assert not any(expander.success for expander in page.expander), "what folds away hides what was done"
    last = read_audit(target)[-1]
    assert (last.action, last.detail["reason"]) == ("rollback", "p99 doubled")
    press(page, "Verify every byte")
    assert "all as released" in shown_text(page)


def test_a_target_that_cannot_be_read_is_not_called_empty(open_page, tmp_path):
    home = Home(tmp_path / "home")
    assert "Nothing has been released here yet" in shown_text(open_page(home, "releases"))
    folder = home.path / "releases"
    (folder / "blobs" / "sha256").mkdir(parents=True)
    (folder / "index.json").write_text("{")
    page = open_page(home, "releases")
    assert not page.exception
    assert len(page.error) == 1
    assert "Nothing has been released here yet" not in shown_text(page)


def test_an_approval_is_shown_and_withdrawn(open_page, own_home):
    page = open_page(own_home, "releases")
    press(page, "Approve")
    assert "needs a name and a reason" in shown_text(page)
    page.text_input(key="reason").set_value("it passed")
    press(page, "Approve")
    held = next(frame.value for frame in page.dataframe if "policy" in frame.value)
    assert (held["why"][0], held["verdict"][0]) == ("it passed", "PASS")
    page.text_input(key="withdraw-reason").set_value("the data was wrong")
    press(page, "Withdraw")
    assert "It is withdrawn" in shown_text(page)
    assert "No engine is approved yet" in shown_text(page)
    assert "No engine was approved on that day" in shown_text(page)
    assert not (own_home.path / "releases").exists()
