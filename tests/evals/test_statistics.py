"""Statistics against closed forms, scipy, and simulation with fixed seeds."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats

from evals.sequential import FAIL, OPEN, PASS, POCOCK, corrected_z, decide
from evals.statistics import (
    clustered_estimate,
    clustered_ratio,
    holm,
    incomplete_beta,
    mcnemar_p,
    paired_drop,
    stratified_drop,
    t_of_z,
    t_quantile,
    wilson,
)


@pytest.mark.parametrize("df", [1, 2, 5, 19, 63, 1000])
@pytest.mark.parametrize("p", [0.6, 0.975, 0.990886, 0.9999])
def test_t_quantile_is_scipys(p, df):
    assert t_quantile(p, df) == pytest.approx(stats.t.ppf(p, df), rel=1e-9)


@given(st.floats(0.2, 200), st.floats(0.2, 200), st.floats(0.0, 1.0))
@settings(max_examples=200, deadline=None)
def test_incomplete_beta_is_scipys(a, b, x):
    assert incomplete_beta(a, b, x) == pytest.approx(float(special.betainc(a, b, x)), abs=1e-10)


def test_t_of_z_grows_with_few_clusters():
    assert t_of_z(2.361, 100_000) == pytest.approx(2.361, abs=1e-3)
    assert t_of_z(2.361, 10) > t_of_z(2.361, 50) > 2.361


def test_clustered_ratio_closed_forms():
    sums, weights = np.array([2.0, 4.0, 9.0]), np.array([10.0, 10.0, 30.0])
    ratio, error, count = clustered_ratio(sums, weights, ["a", "b", "c"])
    residual = sums - 0.3 * weights
    assert (ratio, count) == (pytest.approx(0.3), 3)
    assert error == pytest.approx(math.sqrt(1.5 * (residual**2).sum()) / 50)
    equal = np.array([1.0, 2.0, 3.0, 6.0])
    _, error, _ = clustered_ratio(equal, np.ones(4), list("abcd"))
    assert error == pytest.approx(equal.std(ddof=1) / 2)
    merged = clustered_ratio(np.array([3.0, 9.0]), np.array([2.0, 2.0]), ["a", "b"])
    assert clustered_ratio(equal, np.ones(4), ["a", "a", "b", "b"]) == pytest.approx(merged)
    assert clustered_ratio(sums, weights, ["one"] * 3)[1] == math.inf
    assert clustered_estimate(sums, weights, ["one"] * 3) is None


def test_clustered_interval_covers_95_percent_where_the_naive_one_does_not():
    rng = np.random.default_rng(0)
    documents = [f"d{i // 10}" for i in range(300)]
    covered = naive = 0
    for _ in range(400):
        values = np.repeat(rng.normal(0, 1, 30), 10) + rng.normal(0, 0.3, 300)
        estimate = clustered_estimate(values, np.ones(300), documents)
        covered += estimate.ci_low <= 0 <= estimate.ci_high
        naive += abs(values.mean()) < 1.96 * values.std(ddof=1) / math.sqrt(300)
    assert 0.92 <= covered / 400 <= 0.98
    assert naive / 400 < 0.7


def test_wilson_is_scipys():
    for right, n in ((0, 10), (7, 10), (333, 1000)):
        expected = stats.binomtest(right, n).proportion_ci(0.95, method="wilson")
        assert wilson(right, n) == pytest.approx((expected.low, expected.high), abs=1e-6)


def test_paired_drop_is_the_documented_formula_and_never_certain():
    drop, error = paired_drop(12.0, 4.0, 400.0)
    assert drop == pytest.approx(0.02)
    assert error == pytest.approx(math.sqrt(17 - 64 / 400) / 400)
    assert paired_drop(0.0, 0.0, 200.0) == (0.0, pytest.approx(1 / 200))
    assert stratified_drop([(12, 4, 400)]) == pytest.approx((drop, error))
    one, two = stratified_drop([(12, 4, 300), (0, 0, 100)])
    assert one == pytest.approx(0.02)
    assert two < error


def test_paired_error_matches_simulation():
    rng = np.random.default_rng(1)
    counts = rng.multinomial(800, [0.04, 0.02, 0.94], size=20_000)
    drops, errors = paired_drop(counts[:, 0].astype(float), counts[:, 1].astype(float), 800.0)
    assert drops.mean() == pytest.approx(0.02, abs=2e-4)
    assert errors.mean() == pytest.approx(drops.std(), rel=0.03)


def test_mcnemar_and_holm():
    assert mcnemar_p(0, 0) == 1.0
    assert mcnemar_p(15, 5) == pytest.approx(stats.binomtest(15, 20, 0.5, alternative="greater").pvalue)
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


def test_decide_stops_at_the_first_clear_look_and_says_when_the_cap_decided():
    error = np.full((5, 3), 0.01)
    drop = np.array([[0.00, 0.90, 0.90], [0.10, 0.00, 0.00], [0.02, 0.02, 0.019], [0.02, 0.02, 0.021],
                     [0.015, 0.06, 0.0]])
    capped = decide(drop, error, 0.02, 1.9, capped=True)
    assert capped.code.tolist() == [PASS, FAIL, PASS, FAIL, FAIL]
    assert capped.look.tolist() == [0, 0, 2, 2, 1]
    assert capped.by_estimate.tolist() == [False, False, True, True, False]
    assert decide(drop, error, 0.02, 1.9, capped=False).code.tolist() == [PASS, FAIL, OPEN, OPEN, FAIL]


def test_z_is_corrected_for_looks_and_candidates():
    assert [round(corrected_z(k), 2) for k in POCOCK] == [1.96, 2.18, 2.29, 2.36, 2.41]
    assert corrected_z(4, 5) == pytest.approx(stats.norm.isf(stats.norm.sf(2.361) / 5))


def test_false_alarm_over_four_doubling_looks_stays_near_the_nominal_one():
    rng = np.random.default_rng(2)
    looks = np.array([200, 400, 800, 1600])
    steps = rng.normal(0, np.sqrt(np.diff(looks, prepend=0)), size=(100_000, 4)).cumsum(axis=1)
    mean, error = steps / looks, 1 / np.sqrt(looks) * np.ones_like(steps)
    wrong = decide(mean, error, 0.0, corrected_z(4), capped=False).code == FAIL
    assert 0.015 < wrong.mean() < 0.030
