"""A question's context is computed once: the scores must be those of the separate prompts."""

import numpy as np
import pytest

from calib.checkpoint import QuantizedCheckpoint
from calib.model import load_model
from calib.text import Tokenizer
from engines.build.builder import build
from engines.errors import EngineError, LimitError
from engines.llm import LLM
from engines.plan import EngineSpec
from engines.request import PromptScore
from evals.accuracy import answer
from evals.errors import EvalError
from evals.module import ModuleScorer
from evals.target import checked_choices

#: (length of the context, lengths of the continuations): one token, unequal, many, long, single.
SHAPES = [(1, (1, 1)), (1, (2,)), (2, (1,)), (7, (1, 4, 2)), (30, (5, 5, 5, 5)), (17, tuple(range(1, 12))),
          (90, (40, 3))]


def questions(tokenizer, seed=0):
    draw = np.random.default_rng(seed)
    def ids(n):
        return draw.integers(2, tokenizer.vocab_size, n).tolist()
    return [(ids(shared), [ids(n) for n in each]) for shared, each in SHAPES]


def apart(scorer, asked):
    for context, each in asked:
        scores = scorer.loglikelihood([[*context, *one] for one in each])
        yield [PromptScore(score.logprobs[len(context) - 1:], score.greedy[len(context) - 1:]) for score in scores]


def check(scorer, asked):
    for found, expected in zip(scorer.score_choices(asked), apart(scorer, asked), strict=True):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5, rtol=0)
            assert (one.greedy == other.greedy).all()


def test_an_engine_gives_the_scores_of_separate_prompts(engine, tokenizer):
    with LLM(engine) as llm:
        asked = questions(tokenizer)
        check(llm, asked)
        stats = llm.stats()
        assert (stats["used_blocks"], stats["running"]) == (0, 0)
        before = stats["tokens_computed"]
        llm.score_choices([asked[4]])
        assert llm.stats()["tokens_computed"] - before == 30 + 4 * 4 + 3 * (30 % 16)


def test_a_quantized_cache_is_seen_through_alike(model_folder, tokenizer, tmp_path):
    from calib.calibrate import quantize
    from calib.dataset import CalibrationSet
    from calib.recipe import load_recipe
    from tests.evals.conftest import sentences

    source = tmp_path / "texts.jsonl"
    source.write_text("".join(f'{{"text": "{text}"}}\n' for text in sentences(100)))
    own = Tokenizer.open(model_folder)
    calibration = CalibrationSet.build([source], own, tmp_path / "set", rows=4, length=32)
    checkpoint = quantize(model_folder, load_recipe("bf16"), tmp_path / "ckpt", kv_cache="fp8",
                          calibration=calibration, choose_texts=list(sentences(20, 100)))
    built = build(checkpoint, EngineSpec(tune="none", max_batch_size=8), tmp_path / "engine")
    with LLM(built) as llm:
        check(llm, questions(tokenizer))
    check(ModuleScorer(load_model(QuantizedCheckpoint.open(checkpoint.path)), tokenizer), questions(tokenizer))


def test_a_question_too_wide_for_a_step_is_scored_apart(model_folder, tokenizer, tmp_path):
    built = build(QuantizedCheckpoint.open(model_folder), EngineSpec(
        tune="none", max_batch_size=2, max_num_tokens=32, max_seq_len=128), tmp_path / "narrow")
    asked = questions(tokenizer)[:6]
    with LLM(built) as llm:
        check(llm, asked)
        with pytest.raises(LimitError, match="exceed this engine's max_seq_len"):
            llm.score_choices(questions(tokenizer)[6:])
        with pytest.raises(EngineError, match="is empty"):
            llm.score_choices([([1, 2], [[3], []])])
        assert llm.stats()["used_blocks"] == 0


def test_a_module_gives_the_scores_of_separate_prompts(scorer, tokenizer):
    check(scorer, questions(tokenizer))


class Whole:
    """A scorer without ``score_choices``."""

    def __init__(self, scorer):
        self.loglikelihood = scorer.loglikelihood


def test_items_do_not_depend_on_how_they_were_scored(engine, scorer, tokenizer, data, tmp_path):
    with LLM(engine) as llm:
        for name, judge in (("module", scorer), ("engine", llm)):
            shared = answer(judge, tokenizer, data, ["facts", "truth"], scratch=tmp_path / f"{name}-a", key="k")
            whole = answer(Whole(judge), tokenizer, data, ["facts", "truth"], scratch=tmp_path / f"{name}-b", key="k")
            assert [item.choice for item in shared] == [item.choice for item in whole]
            assert [item.prompt_sha256 for item in shared] == [item.prompt_sha256 for item in whole]
            np.testing.assert_allclose([item.margin for item in shared], [item.margin for item in whole], atol=2e-5)


def test_scores_of_another_shape_are_refused(scorer, tokenizer):
    class Short:
        loglikelihood = scorer.loglikelihood

        def score_choices(self, asked):
            return [[PromptScore(score.logprobs[1:], score.greedy[1:]) for score in each]
                    for each in scorer.score_choices(asked)]
    with pytest.raises(EvalError, match="ChoiceScorer"):
        checked_choices(Short(), questions(tokenizer))
