"""Does the candidate say as much as the baseline? The ratio of output lengths over the same prompts.

r = sum of the candidate's tokens / sum of the baseline's, over continuations of the same texts, with the linearised
standard error of a ratio of two sums (``evals.statistics``) and Student's t. PASS when the whole interval lies inside
the window, FAIL when it lies outside, INCONCLUSIVE when it straddles an end.

A continuation that was cut off at the token limit says only "at least this long". Where most of the baseline's were
cut, growth cannot be seen at all, so the check answers INCONCLUSIVE and names the limit; early stops it still sees.
"""

from __future__ import annotations

import math

import numpy as np

from evals.policy import LengthRule
from evals.report import EvalReport, Reason, VerdictWord
from evals.sequential import corrected_z
from evals.statistics import clustered_ratio, t_of_z

CHECK = "output length"
#: Continuations are this long where length is judged: short ones are cut off and say nothing about growth.
LENGTH_TOKENS = 128


def judge_length(candidate: EvalReport, baseline: EvalReport | None, rule: LengthRule, candidates: int = 1) -> Reason:
    """One line of the verdict. FAIL when either report has no continuations (the figure that was asked is missing)."""
    allowed = f"{rule.low:g} to {rule.high:g} times the baseline's"
    def line(word: VerdictWord, found: str) -> Reason:
        return Reason(check=CHECK, word=word, found=found, allowed=allowed)
    if baseline is None:
        return line("FAIL", "not measured: no baseline")
    before = {sample.id: len(sample.token_ids) for sample in baseline.samples}
    after = {sample.id: len(sample.token_ids) for sample in candidate.samples}
    common = sorted(before.keys() & after.keys())
    if not common or len(common) < len(before) or not sum(before.values()):
        return line("FAIL", f"not measured: {len(common)} of {len(before)} continuations are there")
    if len(common) < rule.min_samples:
        return line("INCONCLUSIVE", f"{len(common)} continuations, {rule.min_samples} are needed")
    old = np.array([float(before[name]) for name in common])
    new = np.array([float(after[name]) for name in common])
    ratio, error, count = clustered_ratio(new, old, common)
    reach = t_of_z(corrected_z(1, candidates), count - 1) * error
    low, high = ratio - reach, ratio + reach
    found = f"{ratio:.3f} [{low:.3f}, {high:.3f}] over {count} continuations"
    if high < rule.low or low > rule.high:
        return line("FAIL", found)
    limit = int(baseline.harness.get("sample_tokens", "0")) or math.inf
    cut = int((old >= limit).sum())
    if 2 * cut > count:
        return line("INCONCLUSIVE", f"{found}; {cut} of the baseline's were cut off at {limit} tokens, so longer "
                                    "output cannot be seen")
    return line("PASS" if rule.low < low and high < rule.high else "INCONCLUSIVE", found)
